"""The cost model of a wire: found again from what it makes, and best where it says so."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.transfer.costs import (
    Staging,
    StagingBounds,
    WireCosts,
    Workload,
    fit_costs,
    plan_staging,
    size_text,
)
from kvxfer.transports.pipe import HOST_STAGING

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TCP = WireCosts(latency_s=300e-6, message_s=200e-6, bytes_per_s=3e9)
NVLINK = WireCosts(latency_s=40e-6, message_s=20e-6, bytes_per_s=300e9)
GBIT = WireCosts(latency_s=3e-3, message_s=100e-6, bytes_per_s=0.12e9)
HOST = StagingBounds(32 * MIB, 8 * MIB)
DEVICE = StagingBounds(256 * MIB, 64 * MIB)


def test_times_by_hand() -> None:
    wire, unit = WireCosts(latency_s=0.5, message_s=0.25, bytes_per_s=1e10), 10**8
    assert wire.direct_s(1000 * unit) == 0.5 + 0.25 + 10
    # ten chunks of 100: pack the first (1 s), send all (10 s), unpack the last (1 s)
    assert wire.stream_s(1000 * unit, 100 * unit) == 0.5 + 10 * 0.25 + 1 + 10 + 1
    assert wire.stream_s(1001 * unit, 100 * unit) == pytest.approx(0.5 + 11 * 0.25 + 1 + 10.01 + 1)
    # one chunk, which is not larger than the transfer
    assert wire.stream_s(50 * unit, 100 * unit) == 0.5 + 0.25 + 0.5 * 3
    # a wire slower than copies, which take 0.1 s for the same chunks
    slow = replace(wire, bytes_per_s=1e8)
    assert slow.stream_s(10 * unit, unit) == pytest.approx(0.5 + 10 * 0.25 + 0.1 + 10 + 0.1)


def test_chunks_of_known_wires() -> None:
    """About what was found best by trying: 4 MiB for 64 MiB over TCP, tens of MiB over NVLink."""
    assert TCP.chunk_nbytes(64 * MIB, 64 * KIB, 64 * MIB) == 4 * MIB
    assert TCP.chunk_nbytes(16 * MIB, 64 * KIB, 64 * MIB) == 2 * MIB
    assert TCP.chunk_nbytes(MIB, 64 * KIB, 64 * MIB) == 512 * KIB
    assert NVLINK.chunk_nbytes(GIB, 64 * KIB, 64 * MIB) == 64 * MIB
    assert NVLINK.chunk_nbytes(16 * MIB, 64 * KIB, 64 * MIB) == 8 * MIB
    assert TCP.chunk_nbytes(64 * MIB, 64 * KIB, MIB) == MIB
    assert TCP.chunk_nbytes(100, 64 * KIB, MIB) == 64 * KIB
    # Slower than copies: what does not overlap is short, and 10 ms of the wire are 1 MiB
    chunks = [GBIT.chunk_nbytes(n * MIB, 64 * KIB, 64 * MIB) for n in (1, 4, 16, 64, 1024)]
    assert chunks == [256 * KIB, 512 * KIB, MIB, MIB, MIB]
    assert replace(GBIT, bytes_per_s=12e6).chunk_nbytes(GIB, 64 * KIB, 64 * MIB) == 128 * KIB


def test_streams_have_four_chunks_each_that_are_worth_their_messages() -> None:
    """As ``zmq`` between GPUs was measured: eight streams carry 5 MB in the time of a message."""
    zmq = WireCosts(latency_s=7e-4, message_s=4e-4, bytes_per_s=1.6e9)

    def chunk(nbytes: int, num_streams: int) -> int:
        return zmq.chunk_nbytes(nbytes, 256 * KIB, 8 * MIB, num_streams)

    assert [chunk(n * MIB, 8) for n in (128, 256, 2048)] == [4 * MIB, 8 * MIB, 8 * MIB]
    # A quarter of a stream's share is not worth a message
    assert [chunk(n * MIB, 8) for n in (4, 16, 64)] == [MIB, 2 * MIB, 4 * MIB]
    # Fewer streams have four as it is
    for number in (1, 2, 4):
        assert [chunk(n * MIB, number) for n in (4, 16, 64, 128)] == [
            MIB,
            2 * MIB,
            4 * MIB,
            8 * MIB,
        ]


@pytest.mark.parametrize(
    ("num_streams", "num_slots", "slot_mib"), [(1, 7, 4), (2, 10, 4), (4, 16, 8), (8, 32, 8)]
)
def test_the_chunks_of_all_streams_leave_without_waiting_for_a_credit(
    num_streams: int, num_slots: int, slot_mib: int
) -> None:
    """``zmq`` between GPUs, as above. Slots stay as large as a long prompt's chunks."""
    zmq = WireCosts(latency_s=7e-4, message_s=4e-4, bytes_per_s=1.6e9)
    size = HOST_STAGING.over(num_streams)
    bounds = StagingBounds(
        size.nbytes, size.most_slot_nbytes, busy_slots=size.busy_slots, num_streams=num_streams
    )
    staging = plan_staging(zmq, Workload(256 * MIB, 64 * KIB), bounds)
    assert (staging.num_slots, staging.slot_nbytes) == (num_slots, slot_mib * MIB)
    assert staging.num_slots * staging.slot_nbytes <= bounds.nbytes
    if num_streams > 1:
        nbytes = num_streams * 16 * MIB  # four chunks for each
        assert nbytes / staging.chunk_nbytes(zmq, nbytes) <= num_slots


def test_slots_of_a_slow_wire_hold_more_than_one_way_round() -> None:
    """A slot of NIXL's comes round in 15 ms over 1 Gbit/s with 1 ms of delay; where eight held 18
    ms of the wire, it stood still whenever a thread came late.
    """
    nixl = WireCosts(latency_s=4.8e-3, message_s=100e-6, bytes_per_s=0.115e9)
    staging = plan_staging(nixl, Workload(256 * MIB, 16 * KIB), HOST)
    for nbytes in (16 * MIB, 64 * MIB, GIB):
        held_s = staging.num_slots * staging.chunk_nbytes(nixl, nbytes) / nixl.bytes_per_s
        assert 0.05 < held_s < 0.15
    # Shorter ones are in the slots as a whole, nearly
    assert staging.num_slots * staging.chunk_nbytes(nixl, 4 * MIB) >= 4 * MIB


def test_slots_of_known_wires() -> None:
    assert TCP.num_slots(MIB, 100) == 6 + 2  # 0.9 MB between question and answer, twice
    slow = WireCosts(latency_s=2e-3, message_s=0.0, bytes_per_s=12.5e9)  # 100 Gbit/s, far away
    assert slow.num_slots(MIB, 100) == 6 + 48
    assert slow.num_slots(MIB, 8) == 8


COSTS = st.builds(
    WireCosts,
    latency_s=st.floats(0, 1e-2),
    message_s=st.floats(1e-7, 1e-3),
    bytes_per_s=st.floats(1e7, 4e11),
)


@settings(max_examples=200, deadline=None)
@given(COSTS, st.integers(1, 4 * GIB), st.integers(12, 26))
def test_no_other_power_of_two_is_much_better(costs: WireCosts, nbytes: int, other: int) -> None:
    """The optimum is flat: the power of two that is nearest is within a few per cent of the best of
    those that are not too long on the wire, where chunks of a transfer are counted in fractions.
    """
    least, most = 1 << 12, 1 << 26
    chosen = costs.chunk_nbytes(nbytes, least, most)
    assert least <= chosen <= most
    assert chosen == least or chosen / costs.bytes_per_s <= 0.01 * math.sqrt(2)
    if (1 << other) / costs.bytes_per_s > 0.01:
        return
    copied_per_s = max(costs.bytes_per_s, 1e9)

    def beside_bytes_s(chunk_nbytes: int) -> float:
        return nbytes / chunk_nbytes * costs.message_s + 2 * chunk_nbytes / copied_per_s

    assert beside_bytes_s(chosen) <= 1.07 * beside_bytes_s(1 << other)


@given(COSTS, st.integers(1, 4 * GIB), st.integers(2, 16))
def test_each_stream_has_four_chunks_unless_they_are_not_worth_their_messages(
    costs: WireCosts, nbytes: int, num_streams: int
) -> None:
    least, most = 1 << 12, 1 << 26
    alone = costs.chunk_nbytes(nbytes, least, most)
    chosen = costs.chunk_nbytes(nbytes, least, most, num_streams)
    carried_nbytes = costs.message_s * costs.bytes_per_s * num_streams
    round_off = math.sqrt(2)  # to the nearest power of two
    assert chosen <= alone
    if chosen < alone:
        assert chosen >= carried_nbytes / round_off
        assert nbytes / chosen <= num_streams * 4 * round_off
    elif chosen > max(least, carried_nbytes * round_off):
        assert nbytes / chosen >= num_streams * 4 / round_off


PLAIN = Workload(64 * MIB, 16 * KIB)


@pytest.mark.parametrize(
    ("costs", "workload", "bounds", "staging"),
    [
        # 1 GiB: 16 MiB would be best, of which six do not fit
        (TCP, PLAIN, HOST, Staging(7, 4 * MIB, None)),
        (TCP, PLAIN, DEVICE, Staging(7, 16 * MIB, None)),
        (NVLINK, Workload(256 * MIB, 16 * KIB), DEVICE, Staging(7, 32 * MIB, None)),
        # Where a chunk costs more than a message says, fewer slots may be larger
        (
            *(NVLINK, Workload(256 * MIB, 16 * KIB)),
            *(replace(DEVICE, busy_slots=4), Staging(4, 64 * MIB, None)),
        ),
        # 1 Gbit/s, 1 ms: chunks of 10 ms, of which one is on its way
        (GBIT, PLAIN, HOST, Staging(7, MIB, None)),
        # Settings
        (TCP, PLAIN, replace(HOST, num_slots=2), Staging(2, 8 * MIB, None)),
        (TCP, PLAIN, replace(HOST, num_slots=100), Staging(100, 256 * KIB, None)),
        (TCP, PLAIN, replace(HOST, chunk_nbytes=4096), Staging(64, 16 * KIB, 4096)),
        (TCP, PLAIN, replace(HOST, chunk_nbytes=64 * MIB), Staging(2, 64 * MIB, 64 * MIB)),
        (TCP, PLAIN, replace(HOST, chunk_nbytes=MIB, num_slots=40), Staging(40, MIB, MIB)),
        (TCP, PLAIN, StagingBounds(MIB, 8 * MIB, is_limit=True), Staging(8, 128 * KIB, None)),
        # A block of 20 MiB is one chunk, whatever is usual
        (TCP, Workload(64 * MIB, 20 * MIB), HOST, Staging(2, 20 * MIB, None)),
    ],
)
def test_staging_by_hand(
    costs: WireCosts, workload: Workload, bounds: StagingBounds, staging: Staging
) -> None:
    assert plan_staging(costs, workload, bounds) == staging


@pytest.mark.parametrize(
    ("workload", "bounds", "message"),
    [
        (Workload(MIB, 20 * MIB), StagingBounds(32 * MIB, 8 * MIB, is_limit=True), "2 chunks of 2"),
        (
            PLAIN,
            StagingBounds(30 * KIB, 8 * MIB, is_limit=True),
            "2 chunks of 16384 bytes, got 30720",
        ),
        (
            PLAIN,
            StagingBounds(4 * MIB, 8 * MIB, is_limit=True, chunk_nbytes=MIB, num_slots=5),
            "5 chunks of 1048576 bytes, got 4194304",
        ),
    ],
)
def test_what_was_set_and_does_not_fit(
    workload: Workload, bounds: StagingBounds, message: str
) -> None:
    with pytest.raises(ValueError, match=f"staging_nbytes: expected room for {message}"):
        plan_staging(TCP, workload, bounds)


@settings(max_examples=200, deadline=None)
@given(
    COSTS,
    st.integers(1, 4 * GIB),
    st.integers(1, 64 * MIB),
    st.integers(MIB, GIB),
    st.none() | st.integers(4096, 64 * MIB),
    st.none() | st.integers(2, 1024),
    st.booleans(),
)
def test_staging_keeps_to_its_bounds(
    costs: WireCosts,
    nbytes: int,
    block_nbytes: int,
    most_nbytes: int,
    chunk_nbytes: int | None,
    num_slots: int | None,
    is_limit: bool,
) -> None:
    bounds = StagingBounds(most_nbytes, 8 * MIB, is_limit, chunk_nbytes, num_slots)
    try:
        staging = plan_staging(costs, Workload(nbytes, block_nbytes), bounds)
    except ValueError:
        assert is_limit
        return
    if is_limit:
        assert staging.num_slots * staging.slot_nbytes <= most_nbytes
    assert staging.num_slots >= 2
    assert num_slots in (None, staging.num_slots)
    assert staging.slot_nbytes >= block_nbytes
    for transfer in (1, nbytes, 1 << 40):
        used = staging.chunk_nbytes(costs, transfer)
        assert chunk_nbytes in (None, used)
        assert used <= staging.slot_nbytes


def test_costs_by_hand() -> None:
    found = fit_costs((64 * KIB, 20e-6), (4 * MIB, 1e-3))
    assert found.bytes_per_s == pytest.approx((4 * MIB - 64 * KIB) / 980e-6)
    assert found.latency_s == pytest.approx(20e-6 - 64 * KIB / found.bytes_per_s)
    assert found.message_s == 0
    alike = fit_costs((100, 1e-3), (100, 1e-3))  # a pool of 100 bytes
    assert alike.bytes_per_s == pytest.approx(1e5)
    assert alike.latency_s == pytest.approx(0)


@settings(max_examples=200, deadline=None)
@given(latency_us=st.floats(1, 2000), gb_per_s=st.floats(0.05, 400))
def test_the_model_is_found_again(latency_us: float, gb_per_s: float) -> None:
    made = WireCosts(latency_us * 1e-6, 0.0, gb_per_s * 1e9)
    small_nbytes, large_nbytes = 64 * KIB, 64 * MIB
    found = fit_costs(
        (small_nbytes, made.direct_s(small_nbytes)), (large_nbytes, made.direct_s(large_nbytes))
    )
    # Where the latency is most of a large message, too, the rate is bounded to what was seen.
    if made.direct_s(large_nbytes) < 4 * large_nbytes / made.bytes_per_s:
        assert found.bytes_per_s == pytest.approx(made.bytes_per_s, rel=1e-3)
        assert found.latency_s == pytest.approx(made.latency_s, rel=1e-3, abs=1e-9)


def test_noise_gives_no_nonsense() -> None:
    found = fit_costs((64 * KIB, 3e-3), (4 * MIB, 2e-3))  # the wrong way round
    assert found.bytes_per_s == 4 * MIB / 2e-3
    assert 0 <= found.latency_s <= 3e-3
    # Nearly as fast as a small one: not faster than four times what was seen
    assert fit_costs((64 * KIB, 1e-3), (4 * MIB, 1.0001e-3)).bytes_per_s <= 4 * 4 * MIB / 1e-3


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ((0, 1.0), (10, 1.0)),
        ((11, 1.0), (10, 1.0)),
        ((1, 0.0), (10, 1.0)),
        ((1, 1.0), (10, -1.0)),
    ],
)
def test_what_was_not_measured_is_refused(
    small: tuple[int, float], large: tuple[int, float]
) -> None:
    with pytest.raises(ValueError, match="measurement: expected"):
        fit_costs(small, large)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="costs: expected"):
        WireCosts(0.0, 0.0, rate)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1023 << 10, "1023 KiB"),
        (3 << 19, "1.5 MiB"),
        (13 << 27, "1.6 GiB"),
        (5 << 40, "5120 GiB"),
    ],
)
def test_bytes_as_text(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
