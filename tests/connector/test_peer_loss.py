"""Source engines in processes of their own, that die, stop, or come back as another life."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest

from kvxfer.connector.records import SourceRef
from tests.builders import EngineShape
from tests.connector.rig import (
    HOST_WIRES,
    POISON,
    Engine,
    links_of,
    only_peer_of,
    pass_s,
    until,
)
from tests.copies import HeldPieces, is_unpack
from tests.helpers import free_port, stop_process

SHAPE = EngineShape(num_kv_heads=2, num_blocks=64)
TOKENS = 16 * 60


def _serve(end: Connection, settings: dict[str, Any]) -> None:
    """A source engine: mints and opens an offer for each name that it is told."""
    with Engine(SHAPE, "prefill", fill=1, **settings) as engine:
        while True:
            engine.collect()
            if not end.poll(0.01):
                continue
            name = end.recv()
            if name is None:
                break
            ref = engine.offer(name, TOKENS, range(60))
            engine.compute(name)
            end.send(ref)


class Prefill:
    """A source engine in a process of its own."""

    def __init__(self, **settings: Any) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "kvxfer.connector.worker_side"])
        self._end, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        self.process.start()
        theirs.close()

    def offer(self, name: str) -> SourceRef:
        self._end.send(name)
        ref: SourceRef = self._end.recv()
        return ref

    def stop(self) -> None:
        assert self.process.pid is not None
        stop_process(self.process.pid)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        with suppress(ProcessLookupError):  # killed a moment ago, and not yet seen to be dead
            if self.process.is_alive():
                self.signal(signal.SIGKILL)
        self.process.join()
        self._end.close()


@contextmanager
def prefill(**settings: Any) -> Iterator[Prefill]:
    process = Prefill(**settings)
    try:
        yield process
    finally:
        process.close()


@pytest.mark.parametrize("wire", HOST_WIRES)
def test_a_killed_source_fails_its_loads_at_once_and_a_restarted_one_serves(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    settings: dict[str, Any] = {
        "transport": wire,
        "chunk_nbytes": 4096,
        "staging_slots": 4,  # not room for all of it, which would outlive the source
    }
    held = HeldPieces(monkeypatch, wire, lambda job: wire == "shm" or is_unpack(job))
    with Engine(SHAPE, "decode", fill=POISON, **settings) as sink:
        with prefill(transport=wire, port=port) as first:
            stale = first.offer("p1")
            sink.load("d0", first.offer("p0"), range(60), (0, TOKENS))
            until(lambda: sink.count("peers.ready"))
            first.signal(signal.SIGKILL)
            until(lambda: sink.count("peers.peer_lost"))
            held.may_end.set()  # the running piece of copying is waited for, and nothing else
            until(lambda: sink.received("d0"))
            assert sink.reasons("d0") == {"peer_lost"}
        with prefill(transport=wire, port=port) as second:
            ref = second.offer("p2")
            assert ref.offer.incarnation != stale.offer.incarnation
            sink.load("d2", ref, range(60), (0, TOKENS))
            sink.load("d1", stale, range(60), (0, TOKENS))
            until(lambda: sink.received("d2"))
            until(lambda: sink.received("d1"))
            assert sink.reasons("d2") == {None}
            assert sink.reasons("d1") == {"incarnation"}


def test_a_stopped_source_is_lost_when_it_has_been_silent_for_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = HeldPieces(monkeypatch, "shm")
    settings: dict[str, Any] = {"transport": "shm", "pull_timeout_s": 10_000.0}
    with Engine(SHAPE, "decode", fill=POISON, **settings) as sink, prefill() as source:
        sink.load("d", source.offer("p"), range(60), (0, TOKENS))
        until(lambda: sink.count("peers.ready"))
        (link,) = links_of(only_peer_of(sink))
        assert held.has_begun.wait(60)
        source.stop()

        def is_asked() -> bool:  # what the source said before it was stopped may still come
            pass_s(sink, 80.0)
            return link.unanswered_s is not None

        until(is_asked)
        assert not sink.count("peers.peer_lost")

        def is_lost() -> int:
            pass_s(sink, 150.0)
            return sink.count("peers.peer_lost")

        until(is_lost)
        assert not sink.received("d")
        held.may_end.set()
        until(lambda: sink.received("d"))  # never before the copy has ended
        assert sink.reasons("d") == {"peer_lost"}
        source.signal(signal.SIGCONT)


def test_a_stopped_source_misses_the_deadline() -> None:
    settings: dict[str, Any] = {"pull_timeout_s": 0.5, "offer_board": False}
    with (
        Engine(SHAPE, "decode", fill=POISON, transport="shm", **settings) as sink,
        prefill() as source,
    ):
        refs = [source.offer("p0"), source.offer("p1")]
        sink.load("d0", refs[0], range(60), (0, TOKENS))
        until(lambda: sink.received("d0"))
        source.stop()
        started_s = time.perf_counter()
        sink.load("d1", refs[1], range(60), (0, TOKENS))
        until(lambda: sink.received("d1"))
        assert time.perf_counter() - started_s > 0.45
        assert sink.reasons("d1") == {"deadline"}
        source.signal(signal.SIGCONT)


def test_a_source_that_comes_back_while_its_loss_was_not_seen() -> None:
    """Another life behind the same endpoint is met at the first offer that names it."""
    port = free_port()
    with Engine(SHAPE, "decode", fill=POISON) as sink:
        for life in range(3):
            with Engine(SHAPE, "prefill", fill=1, port=port) as source:
                ref = source.offer("p", 16, [0])
                source.compute("p")
                sink.load(f"d{life}", ref, [1], (0, 16))
                until(lambda life=life: sink.received(f"d{life}"))  # type: ignore[misc]
                assert sink.reasons(f"d{life}") == {None}
