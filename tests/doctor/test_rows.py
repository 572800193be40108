"""The decisions of kvxfer doctor, from made-up facts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cli.doctor import as_json, as_text
from kvxfer.connector.peer_session import Failure
from kvxfer.doctor.rows import (
    GpuFacts,
    IpcTry,
    Row,
    State,
    failed_row,
    failure_row,
    gpu_rows,
    ipc_rows,
    library_row,
    limit_row,
    port_row,
    status,
    wire_row,
)
from kvxfer.transfer.costs import WireCosts, Workload
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import Trial
from kvxfer.transports.choice import Choice

TEXT = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), max_size=300)
ROWS = st.builds(Row, TEXT, st.sampled_from(State), TEXT, TEXT)


def choice(name: str, gb_per_s: float, duration_s: float) -> Choice:
    costs = WireCosts(5e-6, 0.0, gb_per_s * 1e9)
    return Choice(name, Trial(costs), Workload(1 << 20, 4096), duration_s, reasons={"x": "why"})


@given(st.lists(ROWS))
def test_only_what_fails_makes_the_status_1(rows: list[Row]) -> None:
    assert status(rows) == (1 if "fail" in [row.state.value for row in rows] else 0)


@given(ROWS)
def test_a_row_fits_80_columns_and_loses_no_word(row: Row) -> None:
    text = str(as_text(msgspec.structs.replace(row, thing=row.thing[:16])))
    assert max(map(len, text.splitlines()), default=0) <= 80
    squeezed = "".join(text.split())
    assert "".join(row.seen.split()) in squeezed
    assert "".join(row.remedy.split()) in squeezed


def test_json_is_as_documented() -> None:
    rows = [
        Row("wire zmq", State.OK, "seen", gb_per_s=2.0, latency_us=7.5),
        Row("a", State.FAIL, ""),
    ]
    assert msgspec.json.decode(as_json(rows)) == {
        "kvxfer": "0.1.0",
        "status": 1,
        "rows": [
            {
                "thing": "wire zmq",
                "state": "ok",
                "seen": "seen",
                "remedy": "",
                "gb_per_s": 2.0,
                "latency_us": 7.5,
            },
            {
                "thing": "a",
                "state": "fail",
                "seen": "",
                "remedy": "",
                "gb_per_s": None,
                "latency_us": None,
            },
        ],
    }


@pytest.mark.parametrize(
    ("amount", "state", "seen"),
    [
        (None, State.OK, "no limit"),
        (64 << 20, State.OK, "64 MiB"),
        ((64 << 20) - 1, State.WARN, "expected at least 64 MiB, got 63 MiB"),
        (8 << 20, State.WARN, "expected at least 64 MiB, got 8 MiB"),
    ],
)
def test_limits(amount: int | None, state: State, seen: str) -> None:
    row = limit_row("memlock", amount, 64 << 20, "raise it")
    remedy = "raise it" if state is State.WARN else ""
    assert row == Row("limit memlock", state, seen, remedy)


def test_a_number_is_no_size() -> None:
    row = limit_row("open files", 1024, 4096, "raise it", is_nbytes=False)
    assert row.seen == "expected at least 4096, got 1024"


def test_ports() -> None:
    free = port_row("127.0.0.1", "port", "5700-5710", "", "")
    assert free == Row("port", State.OK, "5700-5710: free on 127.0.0.1")
    assert port_row("127.0.0.1", "data_port", "0", "", "").seen == "any: free on 127.0.0.1"
    taken = port_row("127.0.0.1", "port", "5700", "Address already in use", "process 7 (vllm)")
    assert (taken.state, taken.seen) == (
        State.FAIL,
        "5700 on 127.0.0.1: Address already in use: process 7 (vllm)",
    )
    assert "--peer" in taken.remedy


def test_libraries() -> None:
    there = library_row("ucx", {"ucxx-cu13": "0.52", "libucx-cu13": "1.21"}, "")
    assert there == Row("library ucx", State.OK, "ucxx-cu13 0.52, libucx-cu13 1.21")
    missing = library_row("cuda_ipc", {"triton": "3.9", "cuda-bindings": ""}, "do")
    assert (missing.state, missing.seen) == (
        State.SKIPPED,
        "triton 3.9, cuda-bindings not installed",
    )
    assert missing.remedy == "if you want it: do"


def gpu(number: int, *reaches: int) -> GpuFacts:
    return GpuFacts(number, "H200", 10**10, 15 * 10**10, reaches)


def test_gpus_and_their_peer_access() -> None:
    assert [row.state for row in gpu_rows(())] == [State.SKIPPED]
    assert gpu_rows([gpu(0)]) == [Row("gpu 0", State.OK, "H200, 10 GB of 150 GB free")]
    first, second, third = gpu_rows([gpu(0, 1, 2), gpu(1, 0), gpu(2, 0)])
    assert (first.state, first.remedy) == (State.OK, "")
    assert first.seen.endswith("peer access to 1, 2")
    assert (second.state, third.state) == (State.WARN, State.WARN)
    assert second.seen.endswith("peer access to 0, none to 2")
    assert "stream" in second.remedy


def test_cuda_ipc_with_wrong_bytes_fails_and_without_a_mapping_warns() -> None:
    good = [IpcTry(0, 0, is_equal=True, gb_per_s=2000.0), IpcTry(0, 1, is_equal=True, gb_per_s=300)]
    (row,) = ipc_rows(good)
    assert (row.state, row.gb_per_s) == (State.OK, 300)
    assert "2 pairs" in row.seen
    assert "300 to 2000 GB/s" in row.seen
    wrong, unmapped, rest = ipc_rows(
        [IpcTry(1, 0, gb_per_s=100.0), IpcTry(1, 1, problem="no mapping; name them"), *good]
    )
    assert (wrong.thing, wrong.state) == ("cuda ipc 1->0", State.FAIL)
    assert (unmapped.state, unmapped.seen, unmapped.remedy) == (
        State.WARN,
        "no mapping",
        "name them",
    )
    assert rest == row


def test_the_remedy_of_an_error_is_behind_its_last_semicolon() -> None:
    assert failed_row("a", State.FAIL, "port: taken; by 7; end it", "x") == Row(
        "a", State.FAIL, "port: taken; by 7", "end it"
    )
    assert failed_row("a", State.FAIL, "port: taken", "x").remedy == "x"


@pytest.mark.parametrize("reason", Reason)
def test_every_failure_says_what_to_do(reason: Reason) -> None:
    assert failure_row("a", State.FAIL, Failure(reason, "it fails")).remedy


@pytest.mark.parametrize(
    ("needed", "min_gbps", "state"),
    [
        (False, None, State.OK),
        (True, None, State.OK),
        (True, 2.0, State.OK),
        (True, 2.01, State.FAIL),
        (False, 2.01, State.WARN),
    ],
)
def test_a_slow_wire_fails_where_it_is_needed(
    needed: bool, min_gbps: float | None, state: State
) -> None:
    found = {"pp0tp0": choice("zmq", 2.0, 1.0)}
    row = wire_row("wire zmq", found, is_needed=needed, min_gbps=min_gbps)
    assert (row.state, row.gb_per_s) == (state, 2.0)
    assert row.latency_us == pytest.approx(5)
    assert bool(row.remedy) == (state is not State.OK)
    assert "not x: why" in row.seen


def test_a_wire_that_does_not_work() -> None:
    failure = Failure(Reason.TRANSPORT, "ucx: expected ucxx, got none; pip install 'ucxx>=1'")
    row = wire_row("wire ucx", failure, is_needed=False)
    assert row == Row(
        "wire ucx", State.WARN, "ucx: expected ucxx, got none", "pip install 'ucxx>=1'"
    )
    assert wire_row("wire ucx", failure, is_needed=True).state is State.FAIL


@given(st.lists(st.floats(1e-6, 10), min_size=2, max_size=9, unique=True), st.data())
def test_the_slowest_rank_counts(durations_s: list[float], data: st.DataObject) -> None:
    wires = data.draw(
        st.lists(
            st.sampled_from(["shm", "zmq"]),
            min_size=len(durations_s),
            max_size=len(durations_s),
        )
    )
    found = {
        f"pp0tp{number}": choice(wire, 1 / duration_s, duration_s)
        for number, (wire, duration_s) in enumerate(zip(wires, durations_s, strict=True))
    }
    row = wire_row("choice", found, is_needed=True)
    worst = durations_s.index(max(durations_s))
    assert f"rank pp0tp{worst}, the slowest of {len(durations_s)}" in row.seen
    assert row.gb_per_s == pytest.approx(1 / max(durations_s))
    assert row.seen.startswith(wires[worst])
    assert all(wire in row.seen for wire in wires)


def test_a_peer_of_which_nothing_is_read() -> None:
    assert wire_row("choice", {}, is_needed=True).state is State.OK
