"""The serving benchmark (scripts/vllm_load) on real engines, as somebody runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
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
    run = started(tmp_path, "--trace", *(f"--contender={name}" for name in names))
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
        (handover_ms, *_) = cell["handover_ms"]  # nothing is handed over between plain engines
        assert handover_ms is None if name == "plain" else handover_ms > 0
    for check in found["checks"]:
        assert (check["equal_tokens"], check["less_likely"]) == (check["new_tokens"], 0)
    asked = Counter(check["contender"] for check in found["checks"])
    again = (f"floor, again {number}" for number in (1, 2, 3))
    assert asked == dict.fromkeys([*cells, *again], 3)
    assert len({check["prompt_tokens"] for check in found["checks"]}) == 3
    legs = {each["contender"]: each["legs_us"] for each in found["legs"]}
    assert legs.keys() == {"floor", "kvxfer:zmq"}  # plain engines hand nothing over
    assert {"Scheduler.schedule", "UniProcExecutor.execute_model"} <= legs["floor"].keys()
    assert "KvxferConnector.bind_connector_metadata" in legs["kvxfer:zmq"]
    assert all(value >= 0 for each in legs.values() for value in each.values())
    loaded = found["counters"]["kvxfer:zmq"]["decode"]["vllm:kvxfer_requests_loaded_total"]
    assert loaded == cells["kvxfer:zmq"]["requests"] + 3  # each request, and the checked prompts
    shown = [line for line in said.splitlines() if str(tmp_path) not in line]
    assert len(shown) < 60
    assert max(map(len, shown)) <= 80, said


def processes_of(run: subprocess.Popen[str], log: str) -> list[psutil.Process]:
    """Those below a run that write to such a log."""
    below = psutil.Process(run.pid).children(recursive=True)
    return [p for p in below if log in os.readlink(f"/proc/{p.pid}/fd/1")]


def test_the_others_go_on_where_one_dies_and_ctrl_c_keeps_what_was_measured(
    tmp_path: Path,
) -> None:
    run = started(tmp_path, "--contender=floor", "--contender=kvxfer,wire=zmq", "--rounds", "50")
    assert run.stdout is not None
    until = next(line for line in run.stdout if "turn 1 of 50" in line)
    children = psutil.Process(run.pid).children(recursive=True)
    wait_for(run, lambda: list(tmp_path.glob("*.json")))
    for process in processes_of(run, "prefill_kvxfer"):
        process.kill()
    wait_for(run, lambda: "kvxfer:zmq" in result(tmp_path)["lost"])
    rounds = requests_of(tmp_path, "floor")
    wait_for(run, lambda: requests_of(tmp_path, "floor") > rounds)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130, until + said
    floor, kvxfer = result(tmp_path)["cells"]
    assert (floor["contender"], floor["failed"]) == ("floor", 0)
    assert (kvxfer["contender"], kvxfer["failed"]) == ("kvxfer:zmq", 0)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def wait_for(run: subprocess.Popen[str], holds: Callable[[], object]) -> None:
    ends_s = time.monotonic() + LIMIT_S
    while time.monotonic() < ends_s:
        with suppress(ValueError):  # the result is being written
            if holds():
                return
        assert run.poll() is None
        time.sleep(0.2)
    raise TimeoutError


def requests_of(out: Path, contender: str) -> int:
    return sum(row["contender"] == contender for row in result(out)["requests"])
