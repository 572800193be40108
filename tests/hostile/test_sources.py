"""A source that lies about itself: the loads that name it fail with the stated reason, and those of
an honest source beside it go on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq

from kvxfer.connector.board import NUM_SLOTS, PROBES, SLOT_NBYTES
from kvxfer.connector.records import SourceRef
from kvxfer.tensors.shared_memory import SharedPool
from kvxfer.transfer.manifest import EngineManifest, MemfdHandle
from kvxfer.transfer.wire import Manifest, encode
from tests.builders import EngineShape
from tests.connector.rig import POISON, Engine, expect_copied, service_of, until

SHAPE = EngineShape()
replace = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class Lie:
    """What a source says of itself that is not so, and why loads from it fail."""

    name: str
    change: Callable[[EngineManifest], EngineManifest]
    reason: str


def _with_rank(manifest: EngineManifest, **fields: Any) -> EngineManifest:
    return replace(manifest, ranks=(replace(manifest.ranks[0], **fields),))


def _with_memory(manifest: EngineManifest, **fields: Any) -> EngineManifest:
    (memory,) = manifest.ranks[0].memories
    assert memory.handle is not None
    changed = replace(memory, handle=replace(memory.handle, **fields))
    return _with_rank(manifest, memories=(changed,))


def _behind(name: str, descriptor: Callable[[], int]) -> Lie:
    return Lie(name, lambda m: _with_memory(m, fd=descriptor()), "transport")


def _unsealed() -> int:
    fd = os.memfd_create("kvxfer-pool")
    os.ftruncate(fd, 1 << 20)
    return fd


_kept: list[Any] = []


def _socket() -> int:
    near, far = socket.socketpair()
    far.close()
    return near.detach()


def _other_pool() -> int:
    _kept.append(SharedPool.create(1 << 16))
    return int(_kept[-1].info.handle.fd)


LIES = (
    _behind("a pipe", lambda: os.pipe()[0]),
    _behind("a device", lambda: os.open("/dev/zero", os.O_RDONLY)),
    _behind("its own memory", lambda: os.open("/proc/self/mem", os.O_RDONLY)),
    _behind("a folder", lambda: os.open("/", os.O_RDONLY)),
    _behind("a socket", _socket),
    _behind("a file that may shrink", _unsealed),
    _behind("another pool", _other_pool),
    _behind("a number that is none", lambda: 1 << 40),
    Lie("another process", lambda m: _with_memory(m, pid=1, fd=0), "transport"),
    Lie("no process", lambda m: _with_memory(m, pid=-1), "transport"),
    Lie("another host", lambda m: _with_memory(m, boot_id="x"), "transport"),
    Lie("another version", lambda m: replace(m, protocol=(7, 9)), "incompatible"),
    Lie("no version", lambda m: replace(m, protocol=(0, 0)), "incompatible"),
    Lie("a short life", lambda m: replace(m, incarnation=b"short"), "incompatible"),
    Lie("another engine's name", lambda m: replace(m, engine_id="honest"), "incarnation"),
    Lie(
        "a place afar",
        lambda m: _with_rank(m, data_endpoints={"zmq": "tcp://192.0.2.1:5700"}),
        "not_allowed",
    ),
    Lie("millions of ranks", lambda m: replace(m, tp_size=1 << 40), "incompatible"),
)


@pytest.fixture(scope="module")
def honest() -> Iterator[tuple[Engine, Engine]]:
    with (
        Engine(SHAPE, "honest", fill=None, transport="shm") as source,
        Engine(SHAPE, "decode", fill=POISON, transport="shm") as sink,
    ):
        assert _reason(source, sink, _offer(source, "first"), "first") is None
        yield source, sink


def _reason(source: Engine, sink: Engine, ref: SourceRef, name: str) -> str | None:
    sink.pools[0].tensor.fill_(POISON)
    sink.load(name, ref, [1], (0, 16))
    until(lambda: sink.received(name))
    (reason,) = sink.reasons(name)
    return reason


def _offer(source: Engine, name: str) -> SourceRef:
    ref = source.offer(name, 16, [1])
    source.compute(name)
    until(lambda: source.count("offers.opened") > 0)
    return ref


def _introduce(liar: Engine, manifest: EngineManifest) -> None:
    """What it answers to every Hello. An honest engine refuses to say it."""
    service = service_of(liar)
    until(lambda: service.introduction)
    service.introduction = zmq.Frame(encode(Manifest(manifest)))


@pytest.mark.parametrize("number", range(len(LIES)), ids=[lie.name for lie in LIES])
def test_a_lie_costs_its_own_loads(number: int, honest: tuple[Engine, Engine]) -> None:
    lie, (source, sink) = LIES[number], honest
    with ExitStack() as stack:
        before = len(os.listdir("/proc/self/fd"))
        liar = stack.enter_context(Engine(SHAPE, f"liar {number}", fill=None, transport="shm"))
        _introduce(liar, lie.change(liar.manifest))
        assert _reason(liar, sink, _offer(liar, "p"), f"lied to {number}") == lie.reason
        assert _reason(source, sink, _offer(source, f"p{number}"), f"told {number}") is None
        expect_copied(source, sink, [1], [1], (0, 16))
    assert len(os.listdir("/proc/self/fd")) - before < 8  # the lie's own, and nothing of the sink


def _entry(nonce: bytes, content: bytes) -> bytes:
    return (1).to_bytes(8, "little") + nonce + len(content).to_bytes(8, "little") + content


ENTRIES = {
    "deep": b"\x94\xc0\x10\x90" + b"\x91" * 5000 + b"\xc0",
    "blocks that are not there": msgspec.msgpack.encode((None, 16, ((1 << 62,),))),
    "no blocks": msgspec.msgpack.encode((None, 16, ())),
    "fewer tokens": msgspec.msgpack.encode((None, 1, ((1,),))),
    "garbage": b"\xc1" * 100,
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_forged_board_costs_its_own_loads(name: str, honest: tuple[Engine, Engine]) -> None:
    """It takes the place of the board; what cannot be read is asked for by message."""
    source, sink = honest
    board = SharedPool.create(NUM_SLOTS * SLOT_NBYTES)
    handle = board.info.handle
    assert isinstance(handle, MemfdHandle)
    try:
        with Engine(SHAPE, f"forger {name}", fill=None, transport="shm") as liar:
            _introduce(liar, _with_rank(liar.manifest, board=handle))
            ref = _offer(liar, "p")
            first = int.from_bytes(ref.offer.nonce[:8], "little")
            entry = _entry(ref.offer.nonce, ENTRIES[name])
            content = board.tensor.numpy()
            for probe in range(PROBES):
                begin = (first + probe) % NUM_SLOTS * SLOT_NBYTES
                content[begin : begin + len(entry)] = memoryview(entry)
            reason = _reason(liar, sink, ref, f"forged {name}")
            assert reason == (None if name in ("deep", "garbage") else "plan")
            if reason is None:
                expect_copied(liar, sink, [1], [1], (0, 16))
        assert _reason(source, sink, _offer(source, f"after {name}"), f"after {name}") is None
    finally:
        board.close()
