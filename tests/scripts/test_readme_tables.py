"""The README's tables are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvxfer.bench.core import Report, Timing, cells_of
from kvxfer.bench.pools import LLAMA_8B, request_of
from kvxfer.bench.transfer_report import case_of
from scripts.readme_tables import ROOT, engines_table, wires_table, with_tables
from scripts.wire_figures import times_of


def test_the_readme_has_the_newest_results() -> None:
    page = (ROOT / "README.md").read_text()
    assert page.count("<!-- end -->") == 2
    assert with_tables(page) == page


def test_another_result_is_another_table(tmp_path: Path) -> None:
    sample = {"tokens": 1024, "together": 1, "is_first": False, "local_s": 0.02}
    samples = [
        {
            **sample,
            "connector": name,
            "pool": pool,
            "loads_s": [0.001 * factor, 0.002 * factor],
            "first_token_s": [0.03 * factor],
        }
        for name, factor in (("nixl", 10), ("kvxfer", 1))
        for pool in ("fresh", "fragmented")
    ]
    (tmp_path / "vllm_gpu_2026-01-01.json").write_text(json.dumps({"samples": []}))
    (tmp_path / "vllm_gpu_2026-01-02.json").write_text(json.dumps({"samples": samples}))
    page = "before\n<!-- engines: old.json -->\nold\n<!-- end -->\nbehind\n"
    table = with_tables(page, tmp_path)
    assert table.startswith("before\n<!-- engines: vllm_gpu_2026-01-02.json -->\n| ms | 1,024")
    assert "| load, NIXL | 20.0 (20.0) |" in table  # of several loads the last
    assert "| first token, kvxfer | 30.0 (30.0) |" in table
    assert table.endswith("| first token, KV was there | 20.0 (20.0) |\n<!-- end -->\nbehind\n")


def test_the_best_setting_of_a_peer_is_shown() -> None:
    same, other = "8B HND16->HND16 512 tokens", "8B HND16->NHD64 512 tokens"
    speeds = {"sockets": 4.0, "kvxfer shm": 8.0, "NIXL READ, default": 2.0, "NIXL WRITE, x": 5.0}
    cells = [
        {"case": case, "way": way, "gbps": [0, gbps - (case == other), 9], "ratios": [0, 1.5, 9]}
        for case in (same, other)
        for way, gbps in speeds.items()
    ]
    rows = wires_table({"cells": cells}).splitlines()[2:]
    assert rows == [
        "| plain TCP sockets | 4.00 | 1.50 |",
        "| NIXL WRITE, x, blocks as they are | 5.00 | 1.50 |",
        "| NIXL READ, default, blocks as they are | 2.00 | 1.50 |",
        "| kvxfer `shm`, other blocks | 7.00 | 1.50 |",
    ]


def test_what_a_benchmark_writes_is_what_is_read(tmp_path: Path) -> None:
    report = Report(tmp_path, "transfer_host", "t", {"command": "c"}, lambda _: [], date="d")
    for layouts in ("HND16->HND16", "HND16->NHD64"):
        case = case_of(request_of(LLAMA_8B, layouts, 512, 512))
        ways = {"sockets": 0.02, "kvxfer shm": 0.01, "NIXL READ, default": 0.04}
        taken = {way: [Timing(total_s)] for way, total_s in ways.items()}
        report.records.setdefault("cells", []).extend(cells_of(case, taken, lambda _: "sockets"))
    report.write()
    file = tmp_path / "transfer_host_d.json"
    assert wires_table(json.loads(file.read_text())).splitlines()[2:] == [
        "| plain TCP sockets | 3.36 | 1.00 |",
        *["| NIXL READ, default, blocks as they are | 1.68 | 0.50 |"] * 2,
        "| kvxfer `shm`, other blocks | 6.71 | 2.00 |",
    ]
    assert times_of(file, {"way": "kvxfer shm"}) == [(64 << 20, 0.01)] * 2


def test_a_table_that_nobody_makes_is_named() -> None:
    with pytest.raises(ValueError, match="table 'speed': expected one of engines, wires"):
        with_tables("<!-- speed: x.json -->\n<!-- end -->")
    assert engines_table({"samples": []}).startswith("| ms |")
