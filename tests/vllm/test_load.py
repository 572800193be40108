"""The serving benchmark (scripts/vllm_load) on real engines, as somebody runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.vllm.engines import ENVIRONMENT, ROOT

pytestmark = pytest.mark.slow
LIMIT_S = 600.0
SMALL = (
    *("--gpus", "0", "--load", "rate=3,prompt=40-300,output=8-16", "--duration-s", "2"),
    *("--rounds", "2", "--warm-up-s", "1"),
)


def started(out: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "scripts/vllm_load.py", *SMALL, "--out", str(out), *options],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def result(out: Path) -> dict[str, Any]:
    (path,) = out.glob("vllm_load_*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_contenders_serve_the_same_requests_and_one_that_cannot_start_is_told(
    tmp_path: Path,
) -> None:
    names = ("floor", "plain", "kvxfer,wire=zmq", "kvxfer,name=bad,lease_s=-1")
    run = started(tmp_path, *(f"--contender={name}" for name in names))
    said, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1, said
    found = result(tmp_path)
    assert list(found["lost"]) == ["bad"], said
    assert "lease_s: expected a finite number above 0, got -1.0" in found["lost"]["bad"]
    cells = {cell["contender"]: cell for cell in found["cells"]}
    assert list(cells) == ["floor", "plain", "kvxfer:zmq"], said
    for name, cell in cells.items():
        assert (cell["failed"], cell["recomputed"]) == (0, 0), said
        assert cell["requests"] == cells["floor"]["requests"] >= 4
        assert cell["equal"] == 1.0  # float32: no near ties
        assert (cell["handover_ms"][0] > 0) is (name != "plain")
    assert all(check["equal_tokens"] == check["new_tokens"] for check in found["checks"])
    assert len({check["prompt_tokens"] for check in found["checks"]}) == 3
    loaded = found["counters"]["kvxfer:zmq"]["decode"]["vllm:kvxfer_requests_loaded_total"]
    assert loaded == cells["kvxfer:zmq"]["requests"] + 3  # each request, and the checked prompts
    shown = [line for line in said.splitlines() if str(tmp_path) not in line]
    assert len(shown) < 60
    assert max(map(len, shown)) <= 80, said


def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(tmp_path: Path) -> None:
    run = started(tmp_path, "--contender=floor", "--rounds", "50")
    assert run.stdout is not None
    until = next(line for line in run.stdout if "turn 1 of 50" in line)
    while run.poll() is None and not list(tmp_path.glob("*.json")):
        time.sleep(0.2)
    children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130, until + said
    (cell,) = result(tmp_path)["cells"]
    assert (cell["contender"], cell["failed"]) == ("floor", 0)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
