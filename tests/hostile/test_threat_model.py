"""The page on trust names tests and cases that are there, and leaves no case out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.hostile.cases import CASES

ROOT = Path(__file__).resolve().parents[2]


def _page() -> str:
    text = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    return text.partition("## 8. Trust")[2].partition("\n## ")[0]


def _rows() -> list[str]:
    """Of the table of attacks: its last column."""
    table = _page().partition("| shown by |\n")[2].partition("\n\n")[0]
    return [line.rpartition(" | ")[2].removesuffix(" |") for line in table.splitlines()[1:]]


def test_every_line_names_a_test_that_is_there() -> None:
    defined = {
        name
        for file in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    rows = _rows()
    assert len(rows) > 15
    for shown_by in rows:
        tests, cases = re.findall(r"`(\w+)`", shown_by), re.findall(r'"([^"]+)"', shown_by)
        assert tests or cases, shown_by
        assert set(tests) <= defined, shown_by
        for name in cases:
            assert any(case.name.startswith(name) for case in CASES), shown_by
    assert set(re.findall(r"`(test_\w+)`", _page())) <= defined


ROUTER = """
import sys, zmq
from tests import zmtp
with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
    endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    first = zmtp.connect(endpoint)
    first.sendall(zmtp.frame(b"x"))
    given = int.from_bytes(router.recv_multipart()[0][1:], "big")
    named = zmtp.connect(endpoint, name=b"\\0" + ((given + 1) % 2**32).to_bytes(4, "big"))
    named.sendall(zmtp.frame(b"x"))
    router.recv_multipart()
    other = zmtp.connect(endpoint)
    other.sendall(zmtp.frame(b"x"))
    router.poll(10_000)
"""


def test_a_name_that_is_given_twice_still_ends_a_router() -> None:
    """Once libzmq does not, the page's open line goes."""
    ended = subprocess.run(
        [sys.executable, "-c", ROUTER], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "Assertion failed: ok" in ended.stderr
