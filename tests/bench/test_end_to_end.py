"""The benchmark commands from end to end, on the CPU and small: what they write, and that a lost
contender is a row and not an end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.contenders import is_installed
from kvxfer.bench.nixl_ways import HOST_SETTINGS
from kvxfer.bench.transfer import WIRES
from tests.bench.link_marks import needs_link

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "kvxfer", "bench", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=ONE_THREAD, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result(folder: Path, pattern: str) -> dict[str, Any]:
    (path,) = folder.glob(pattern)
    assert path.with_suffix(".md").exists()
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@pytest.mark.slow
def test_the_connector_over_another_wire(tmp_path: Path) -> None:
    run(
        "connector",
        *("--device", "cpu", "--transport", "zmq", "--out", str(tmp_path), "--rounds", "2"),
        *("--tokens", "128", "--layouts", "HND16->NHD64", "--modes", "idle"),
    )
    (cell,) = result(tmp_path, "connector_zmq_cpu_*.json")["cells"]
    assert cell["transports"] == ["zmq"]
    assert cell["aim"].startswith("2.0 ms")


@pytest.mark.slow
def test_the_connector_from_offer_to_accepted(tmp_path: Path) -> None:
    run(
        "connector",
        *("--device", "cpu", "--out", str(tmp_path), "--rounds", "2", "--tokens", "64"),
        *("--layouts", "HND16->NHD64"),
    )
    found = result(tmp_path, "connector_shm_cpu_*.json")
    assert found["lost"] == {}
    assert [cell["mode"] for cell in found["cells"]] == ["idle", "busy"]
    for cell in found["cells"]:
        assert cell["transports"] == ["shm"]
        assert cell["nbytes"] == 64 * 4 * 128
        assert 0 < cell["p50_ms"] <= cell["ms"]["seen_s"] * 2
        assert cell["ms"]["io_cpu_s"] > 0


@pytest.mark.slow
def test_the_connector_with_pools_of_two_shapes(tmp_path: Path) -> None:
    run(
        "connector",
        *("--device", "cpu", "--out", str(tmp_path), "--rounds", "2", "--tokens", "64", "128"),
        *("--shapes", "8B", "tiny", "--layouts", "HND16->NHD64", "--modes", "idle"),
    )
    found = result(tmp_path, "connector_shm_cpu_*.json")
    assert found["lost"] == {}
    assert [cell["case"] for cell in found["cells"]] == [
        f"{shape} HND16->NHD64 {num_tokens} tokens"
        for shape in ("8B", "tiny")
        for num_tokens in (64, 128)
    ]


@pytest.mark.slow
def test_every_wire_of_host_memory_beside_others(tmp_path: Path) -> None:
    run(
        "transfer",
        *("--shapes", "tiny", "--tokens", "96", "--rounds", "2", "--out", str(tmp_path)),
    )
    found = result(tmp_path, "transfer_host_*.json")
    wires = [name for name in WIRES if is_installed(name)]
    others = {"sockets", "memcpy"}
    for layouts in ("HND16->HND16", "HND16->NHD64"):
        cells = [cell for cell in found["cells"] if cell["layouts"] == layouts]
        assert {cell["way"] for cell in cells} >= others | {f"kvxfer {name}" for name in wires}
        assert all(cell["nbytes"] == 96 * 4 * 128 for cell in cells)
        assert all(len(cell["ratios"]) == 3 for cell in cells)
    missing = {f"kvxfer {name}" for name in WIRES if name not in wires}
    if not is_installed("nixl"):
        missing |= {setting.name for setting in HOST_SETTINGS}
    assert set(found["lost"]) == missing
    assert set(found["trials"]) == {f"kvxfer {name}" for name in wires}


@pytest.mark.slow
def test_wires_over_several_streams(tmp_path: Path) -> None:
    run(
        "streams",
        *("--device", "cpu", "--shapes", "tiny", "--tokens", "96", "--rounds", "2"),
        *("--streams", "1", "3", "--out", str(tmp_path)),
    )
    found = result(tmp_path, "streams_cpu_*.json")
    wires = {f"kvxfer {wire} x{number}" for wire in ("tcp", "zmq-tcp") for number in (1, 3)}
    for case in ("tiny HND16->HND16 96 tokens", "tiny HND16->NHD64 96 tokens"):
        cells = {cell["way"]: cell for cell in found["cells"] if cell["case"] == case}
        assert cells.keys() >= {"sockets x1", "sockets x3", *wires}
        assert all(cell["nbytes"] == 96 * 4 * 128 for cell in cells.values())
        assert cells["sockets x3"]["ratios"] == [1, 1, 1]
    assert set(found["trials"]) == wires


@pytest.mark.gpu
def test_wires_over_several_streams_between_gpus(tmp_path: Path) -> None:
    run(
        "streams",
        *("--shapes", "tiny", "--tokens", "128", "--rounds", "2", "--streams", "1", "4"),
        *("--out", str(tmp_path)),
    )
    found = result(tmp_path, "streams_*.json")
    contenders = {cell["way"] for cell in found["cells"]}
    assert contenders >= {"sockets x4", "kvxfer tcp x4", "kvxfer zmq-tcp x1", "kvxfer zmq-tcp x4"}


@pytest.mark.slow
def test_many_small_transfers(tmp_path: Path) -> None:
    run("soak", *("--transport", "zmq", "--transfers", "40", "--out", str(tmp_path)))
    soaked = result(tmp_path, "soak_cpu_*.json")["soaked"]
    assert {(held["wire"], held["num_transfers"]) for held in soaked} == {("zmq", 40)}
    assert [held["side"] for held in soaked] == ["source", "sink"]
    assert all(len(held["usages"]) == 5 for held in soaked)


@pytest.mark.slow
@needs_link
def test_the_wires_over_a_slow_link(tmp_path: Path) -> None:
    run(
        "link",
        *("--shapes", "tiny", "--tokens", "1024", "--rounds", "2", "--out", str(tmp_path)),
        *("--transport", "zmq"),
    )
    found = result(tmp_path, "link_cpu_*.json")
    cells = {cell["way"]: cell for cell in found["cells"]}
    # 512 KiB at 1 Gbit/s, and a round trip before the first byte: 4.2 ms and 2
    for way in ("sockets", "kvxfer zmq"):
        assert cells[way]["p50_ms"] > 6.0


@pytest.mark.gpu
def test_the_wire_on_a_gpu(tmp_path: Path) -> None:
    run(
        "transfer",
        *("--device", "cuda", "--out", str(tmp_path), "--rounds", "2", "--shapes", "tiny"),
        *("--tokens", "128", "1024"),
    )
    found = result(tmp_path, "transfer_*.json")
    assert {cell["way"] for cell in found["cells"]} >= {"memcpy", "kvxfer cuda_ipc"}


@pytest.mark.gpu
def test_the_connector_on_a_gpu(tmp_path: Path) -> None:
    run(
        "connector",
        *("--out", str(tmp_path), "--rounds", "2", "--shapes", "tiny", "--tokens", "128"),
    )
    found = result(tmp_path, "connector_cuda_ipc_*.json")
    assert {tuple(cell["transports"]) for cell in found["cells"]} == {("cuda_ipc",)}


@pytest.mark.gpu
def test_the_kernels_on_a_gpu(tmp_path: Path) -> None:
    sections = ("pieces", "casts", "rewrite", "zero")
    run(
        "kernels",
        "--rounds",
        "2",
        "--where",
        "local",
        "--sections",
        *sections,
        "--out",
        str(tmp_path),
    )
    found = result(tmp_path, "kernels_*.json")["cells"]
    assert {f"{section}, local" for section in sections} == {cell["section"] for cell in found}
    assert {"memcpy", "torch", "kernel, all", "kernel"} <= {cell["way"] for cell in found}
