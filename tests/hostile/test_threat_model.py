"""The page on trust names tests and cases that are there, and leaves no case out."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.defined import ROOT, files_by_test
from tests.hostile.cases import CASES


def _page() -> str:
    text = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    return text.partition("## 8. Trust")[2].partition("\n## ")[0]


def _tables() -> list[list[list[str]]]:
    """The cells of each table of the page, its header first."""
    found = re.findall(r"(?:^\|.*\n)+", _page(), re.MULTILINE)
    tables = [
        [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
        for table in found
    ]
    return [[header, *rows] for header, _, *rows in tables]


def test_every_line_of_every_table_names_tests_that_are_there() -> None:
    defined = files_by_test().keys()
    tables = _tables()
    assert len(tables) >= 5
    assert max(map(len, tables)) > 20
    for header, *rows in tables:
        assert header[-1] == "shown by", header
        for row in rows:
            assert len(row) == len(header), row
            shown_by = row[-1]
            tests, cases = re.findall(r"`(\w+)`", shown_by), re.findall(r'"([^"]+)"', shown_by)
            assert tests or cases, shown_by
            assert set(tests) <= defined, shown_by
            for name in cases:
                assert any(case.name.startswith(name) for case in CASES), shown_by
    assert set(re.findall(r"`(test_\w+)`", _page())) <= defined


def test_every_hostile_case_is_named_on_the_page() -> None:
    """The other way round: no case shows what nobody claims."""
    rows = (row[-1] for _, *rows in _tables() for row in rows)
    named = [name for shown_by in rows for name in re.findall(r'"([^"]+)"', shown_by)]
    assert [case.name for case in CASES if not case.name.startswith(tuple(named))] == []


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
