"""What ``kvxfer doctor`` says: a row for each thing, decided from what was seen. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvxfer.connector.peer_session import Failure
from kvxfer.transfer.wire import Reason
from kvxfer.transports.choice import Choice


class State(enum.StrEnum):
    """``fail`` makes the exit status 1; ``skipped`` was not tried, because it cannot matter."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


class Row(msgspec.Struct, frozen=True):
    """One thing; the shape of ``--json`` (``docs/operations.md``). For a wire with its measured
    costs: 1e9 bytes a second, microseconds of a small message.
    """

    thing: str
    state: State
    seen: str
    remedy: str = ""
    gb_per_s: float | None = None
    latency_us: float | None = None


def status(rows: Iterable[Row]) -> int:
    return int(any(row.state is State.FAIL for row in rows))


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """``reaches``: the numbers of the GPUs whose memory it can map."""

    number: int
    name: str
    free_nbytes: int
    total_nbytes: int
    reaches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IpcTry:
    """A GPU's memory, mapped by another process and copied to a GPU there. ``problem``: why it was
    not; ``is_equal``: whether every byte came.
    """

    source: int
    sink: int
    problem: str = ""
    is_equal: bool = False
    gb_per_s: float = 0.0


def limit_row(
    name: str, amount: int | None, least: int, remedy: str, *, is_nbytes: bool = True
) -> Row:
    """``amount`` None: there is no limit."""
    if amount is None:
        return Row(f"limit {name}", State.OK, "no limit")
    has, needs = (f"{each >> 20:,} MiB" if is_nbytes else f"{each}" for each in (amount, least))
    if amount >= least:
        return Row(f"limit {name}", State.OK, has)
    return Row(f"limit {name}", State.WARN, f"expected at least {needs}, got {has}", remedy)


def port_row(address: str, setting: str, ports: str, problem: str, owner: str) -> Row:
    """``problem``: why none of ``ports`` is free; ``owner``: who has the first, "": unknown."""
    shown = "any" if ports == "0" else ports
    if not problem:
        return Row(setting, State.OK, f"{shown}: free on {address}")
    seen = f"{shown} on {address}: {problem}" + (f": {owner}" if owner else "")
    remedy = f"end that process, or set another {setting}; try a running engine with --peer"
    return Row(setting, State.FAIL, seen, remedy)


def library_row(wire: str, versions: Mapping[str, str], install: str) -> Row:
    """``versions``: of the wire's packages; "" for one that is missing. ``install``: how to have
    them.
    """
    seen = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    if all(versions.values()):
        return Row(f"library {wire}", State.OK, seen)
    return Row(f"library {wire}", State.SKIPPED, seen, f"if you want it: {install}")


def gpu_rows(gpus: Sequence[GpuFacts]) -> list[Row]:
    if not gpus:
        return [Row("gpu", State.SKIPPED, "none that CUDA can use: KV is in host memory")]
    rows = []
    for gpu in gpus:
        apart = [each.number for each in gpus if each.number not in (gpu.number, *gpu.reaches)]
        free, total = (f"{nbytes / 1e9:.0f} GB" for nbytes in (gpu.free_nbytes, gpu.total_nbytes))
        seen = f"{gpu.name}, {free} of {total} free"
        if len(gpus) > 1:
            seen += f", peer access to {_numbers(gpu.reaches)}"
        remedy = ""
        if apart:
            seen += f", none to {_numbers(apart)}"
            remedy = "auto takes a stream between these; nvidia-smi topo -p2p r says why"
        rows.append(Row(f"gpu {gpu.number}", State.WARN if apart else State.OK, seen, remedy))
    return rows


def ipc_rows(tries: Sequence[IpcTry]) -> list[Row]:
    rows = []
    for each in tries:
        thing = f"cuda ipc {each.source}->{each.sink}"
        if each.problem:
            remedy = "auto takes a stream there; containers need --ipc=host"
            rows.append(failed_row(thing, State.WARN, each.problem, remedy))
        elif not each.is_equal:
            remedy = "set transport to zmq, and report it with driver and topology"
            rows.append(Row(thing, State.FAIL, "other bytes came than were there", remedy))
    good = [each.gb_per_s for each in tries if each.is_equal]
    if good:
        speed = f"{min(good):.0f} to {max(good):.0f} GB/s"
        seen = f"{len(good)} pairs of GPUs, read by another process: bytes equal, {speed}"
        rows.append(Row("cuda ipc", State.OK, seen, gb_per_s=min(good)))
    return rows


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


_REMEDIES = {
    Reason.NOT_ALLOWED: "set allowed_peers or CURVE keys on both sides to name the other one",
    Reason.INCOMPATIBLE: "run the same kvxfer and the same model on both sides",
    Reason.INCARNATION: "the engine was started anew meanwhile: try again",
    Reason.PEER_LOST: "see that a kvxfer engine listens there, and what its log says",
    Reason.TRANSPORT: "see docs/wires.md",
}
"""Where the product's own sentence names none."""


def failed_row(thing: str, state: State, sentence: str, remedy: str) -> Row:
    """Of an error, whose own remedy stands behind its last semicolon. ``remedy``: without one."""
    seen, _, own = sentence.rpartition("; ")
    return Row(thing, state, seen or own, own if seen else remedy)


def failure_row(thing: str, state: State, failure: Failure) -> Row:
    remedy = _REMEDIES.get(failure.reason, "see KVXFER_LOG_LEVEL=DEBUG kvxfer doctor")
    return failed_row(thing, state, failure.detail, remedy)


def wire_row(
    thing: str,
    found: Mapping[str, Choice] | Failure,
    *,
    is_needed: bool,
    note: str = "",
    min_gbps: float | None = None,
) -> Row:
    """What was chosen for each rank of a peer, by rank; the slowest counts, as in a peer's log
    line. ``is_needed``: an engine would not work, or not as it should, without this.
    """
    bad = State.FAIL if is_needed else State.WARN
    if isinstance(found, Failure):
        return failure_row(thing, bad, found)
    if not found:
        return Row(thing, State.OK, "no rank has anything to be read")
    rank = max(found, key=lambda each: found[each].duration_s)
    slowest = found[rank]
    seen = f"{slowest}{note}"
    if len(found) > 1:
        wires = ", ".join(sorted({choice.transport for choice in found.values()}))
        seen += f" (rank {rank}, the slowest of {len(found)} over {wires})"
    costs, remedy = slowest.costs, ""
    if min_gbps is not None and costs.gb_per_s < min_gbps:
        remedy = f"expected {min_gbps:g} GB/s: see what else uses the link, or lower min_gbps"
    state = bad if remedy else State.OK
    return Row(thing, state, seen, remedy, costs.gb_per_s, costs.latency_s * 1e6)
