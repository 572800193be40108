"""The conformance check that every transport passes, also one that is not part of kvxfer.

    from kvxfer.testing import check_transport
    check_transport(make_source, make_sink)

Both arguments are functions of a module, ``make(memory, copy_thread, wake, context)``, that return
a SourceTransport and a SinkTransport. The source runs in a process of its own. Plain asserts say
what is wrong; it takes a few seconds.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from functools import partial

from kvxfer.testing import peers
from kvxfer.testing.cases import (
    CASES,
    Case,
    Move,
    make_move,
    move_nbytes,
    naive_copy,
)
from kvxfer.transfer.wire import Reason
from kvxfer.transports import base

_PEER_DEATH_S = 5.0
"""A killed peer must be noticed within this time."""
_INCARNATION = b"conformance-sink"


def check_transport(
    make_source: peers.MakeSource,
    make_sink: peers.MakeSink,
    *,
    timeout_s: float = 10.0,
    source_device: str = "cpu",
    sink_device: str = "cpu",
) -> None:
    """Raise AssertionError for the first promise that the transport breaks.

    Every wait ends after ``timeout_s``. Memory is shared memory, or that of a GPU ("cuda:1").
    """
    first = peers.SourcePeer(
        make_source, 1, timeout_s, source_device
    )  # starts the fork server, whose descriptors stay
    if sink_device != "cpu":  # CUDA opens descriptors with its first calls, and keeps them
        warm = peers.SinkPeer(make_sink, sink_device)
        warm.transport.trial(first.manifest, timeout_s).close()
        warm.close()
    before = _resources()
    sink = peers.SinkPeer(make_sink, sink_device)
    check = _Check(sink, first, make_sink, timeout_s, sink_device)
    second: peers.SourcePeer | None = None
    try:
        check.attach_and_trial()
        check.every_case()
        check.many_at_once()
        check.another_thread_looks()
        check.stop_writes_nothing_more()
        check.unknown_keys()
        check.detach_and_attach()
        check.sink_dies()
        check.source_dies()
        second = check.source = peers.SourcePeer(make_source, 2, timeout_s, source_device)
        check.sink.transport.attach(second.manifest)
        check.move(CASES[1], "a new source after the death of another")
        left = second.finish(timeout_s)
        second = None
        assert not left, f"source close: expected no thread left, got {left}"
    finally:
        check.sink.close()
        if second is not None:
            second.kill()
        if not check.is_source_dead:
            first.kill()
    _assert_no_more_than(before)


def _resources() -> tuple[int, set[str]]:
    return len(os.listdir("/proc/self/fd")), {thread.name for thread in threading.enumerate()}


def _assert_no_more_than(before: tuple[int, set[str]]) -> None:
    num_fds, threads = _resources()
    assert not threads - before[1], (
        f"sink close: expected no thread left, got {threads - before[1]}"
    )
    # The pipe of the first process was open before and is closed now.
    assert num_fds <= before[0], (
        f"sink close: expected {before[0]} descriptors or less, got {num_fds}"
    )


@dataclass(slots=True)
class _Check:
    sink: peers.SinkPeer
    source: peers.SourcePeer
    make_sink: peers.MakeSink
    timeout_s: float
    sink_device: str
    num_keys: int = 0
    is_source_dead: bool = False
    released: set[base.TransferKey] = field(default_factory=set)

    # -- the parts of a transfer

    def key(self) -> base.TransferKey:
        self.num_keys += 1
        return base.TransferKey(self.num_keys.to_bytes(16), _INCARNATION, "pp0tp0", "pp0tp0")

    def read_request(self, key: base.TransferKey, move: Move) -> base.ReadRequest:
        return base.ReadRequest(
            key=key,
            source=self.source.manifest,
            classes=(move.copy_class,),
            pull_classes=(move.pull,),
            source_ids=() if self.source.is_stream else (move.source_ids,),
            sink_ids=(move.sink_ids,),
            chunk_nbytes=move.case.chunk_nbytes,
        )

    def start(self, key: base.TransferKey, move: Move, hold_after: int = -1) -> None:
        """What the connector does: expect, let the source send, read."""
        request = self.read_request(key, move)
        self.ask(request)
        if self.source.is_stream:
            self.send(key, move, hold_after)

    def send(self, key: base.TransferKey, move: Move, hold_after: int = -1) -> None:
        of_class = (move.pull,), (move.copy_class.source,), (move.source_ids,)
        request = base.SendRequest(key, *of_class, move.case.chunk_nbytes)
        self.source.pipe.send(peers.Send(request, hold_after))

    def ask(self, request: base.ReadRequest) -> None:
        sink = self.sink.transport
        if isinstance(sink, base.DirectSink):
            sink.submit_read(request)
        else:
            sink.submit_expect(request)

    def end_of(
        self, key: base.TransferKey, what: str, timeout_s: float | None = None
    ) -> base.SinkCompletion:
        return self.sink.until(partial(peers.is_end, key), timeout_s or self.timeout_s, what)

    def ends_as(
        self, kind: type[base.ReadBroke | base.ReadStopped], key: base.TransferKey, what: str
    ) -> None:
        end = self.end_of(key, what)
        assert isinstance(end, kind), f"{what}: expected {kind.__name__}, got {end}"

    def source_says(self, kind: type[base.SourceCompletion], key: base.TransferKey) -> None:
        """Wait for it; the sink is driven meanwhile, because the source waits for its credits."""
        deadline_s = time.monotonic() + self.timeout_s
        while self.source.take(kind, key) is None:
            assert time.monotonic() < deadline_s, (
                f"source: expected {kind.__name__} within {self.timeout_s} s, "
                f"got {self.source.seen[-4:]}"
            )
            self.sink.rest(0.005)

    def done(self, key: base.TransferKey, move: Move, what: str) -> None:
        end = self.end_of(key, what)
        assert isinstance(end, base.ReadDone), f"{what}: expected ReadDone, got {end}"
        assert end.nbytes == move_nbytes(move), (
            f"{what}: expected {move_nbytes(move)} bytes, got {end.nbytes}"
        )
        assert end.certified == self.source.is_stream, f"{what}: certified is {end.certified}"
        if self.source.is_stream:
            self.source_says(base.Sent, key)

    def assert_content(self, moves: list[Move], what: str) -> None:
        self.sink.rest(0.02)  # a write after the end would be one too many
        want = bytearray(len(self.source.bytes))
        want[:] = b"\xee" * len(want)
        for move in moves:
            naive_copy(move, self.source.bytes, want)
        got = self.sink.content()
        if got != want:
            wrong = [at for at in range(len(want)) if got[at] != want[at]]
            raise AssertionError(
                f"{what}: {len(wrong)} of {len(want)} bytes differ; first at {wrong[0]}: "
                f"got {got[wrong[0]]}, want {want[wrong[0]]}"
            )

    def move(self, case: Case, what: str) -> None:
        """Poison the pool, run one whole transfer, and compare every byte."""
        self.sink.poison()
        key, move = self.key(), make_move(case, seed=self.num_keys)
        self.start(key, move)
        self.done(key, move, what)
        self.assert_content([move], what)

    # -- the promises

    def attach_and_trial(self) -> None:
        transport = self.sink.transport
        assert isinstance(transport, base.ReceivingSink) == self.source.is_stream
        assert transport.name == self.source.name
        for _ in range(2):
            trial = transport.trial(self.source.manifest, self.timeout_s)
            assert trial.costs.bytes_per_s > 0
            if isinstance(transport, base.DirectSink):
                transport.attach(self.source.manifest, trial)
            else:
                transport.attach(self.source.manifest)
        transport.attach(self.source.manifest)

    def every_case(self) -> None:
        for case in CASES:
            self.move(case, case.name)

    def many_at_once(self) -> None:
        self.sink.poison()
        moves = [make_move(case, 100 + slot, slot, len(CASES)) for slot, case in enumerate(CASES)]
        keys = [self.key() for _ in moves]
        for key, move in zip(keys, moves, strict=True):
            self.start(key, move)
        for key, move in zip(keys, moves, strict=True):
            self.done(key, move, f"{len(moves)} at once: {move.case.name}")
        self.assert_content(moves, f"{len(moves)} at once")

    def another_thread_looks(self) -> None:
        """As an engine's does in the IO thread's place, where the wire is quick."""
        sink = self.sink.transport
        if not (isinstance(sink, base.DirectSink) and sink.is_quick):
            return
        self.sink.poison()
        key, move = self.key(), make_move(CASES[0], seed=self.num_keys)
        deadline_s = time.monotonic() + self.timeout_s

        def engine() -> None:
            self.start(key, move)
            while not self.sink.has_ended(key) and time.monotonic() < deadline_s:
                self.sink.seen.extend(sink.look())

        thread = threading.Thread(target=engine)
        thread.start()
        thread.join()
        assert self.sink.has_ended(key), f"look: expected an end within {self.timeout_s} s"
        self.done(key, move, "looked at by another thread")
        self.assert_content([move], "looked at by another thread")

    def stop_writes_nothing_more(self) -> None:
        """Streams are stopped when some chunks have come, direct reads before their turn."""
        what = "stop in mid-transfer"
        self.sink.poison()
        key, move = self.key(), make_move(CASES[0], 7)
        if self.source.is_stream:
            self.start(key, move, hold_after=2)
            self.sink.until(
                lambda c: isinstance(c, base.Progress) and c.key == key, self.timeout_s, what
            )
            self.sink.transport.stop_read(key)
        else:
            gate = self.sink.gate()
            self.start(key, move)
            self.sink.transport.stop_read(key)
            gate.set()
        self.ends_as(base.ReadStopped, key, what)
        content = self.sink.content()
        if self.source.is_stream:
            self.source.pipe.send(peers.Release(key))
            self.source_says(base.Sent, key)
        self.sink.rest(0.1)
        assert self.sink.content() == content, f"{what}: the pool was written after ReadStopped"
        for _ in range(4):  # what was dropped must not use up the connection
            self.move(CASES[0], "after a stop")

    def unknown_keys(self) -> None:
        what = "a key that nobody knows"
        key, move = self.key(), make_move(CASES[0], 8)
        self.sink.transport.stop_read(key)
        self.ends_as(base.ReadStopped, key, what)
        if not self.source.is_stream:
            return
        self.sink.poison()
        self.source.pipe.send(peers.StopSend(key))
        self.source_says(base.SendStopped, key)
        # One that was known has to be there for a source to send anything: it knows the sink by it.
        key = self.key()
        self.ask(self.read_request(key, move))
        self.sink.transport.stop_read(key)
        self.ends_as(base.ReadStopped, key, what)
        self.send(key, move)
        self.source_says(base.Sent, key)
        self.sink.rest(0.1)
        self.assert_content([], what)
        self.move(CASES[0], "after chunks of an unknown key")

    def detach_and_attach(self) -> None:
        what = "detach in mid-transfer"
        gate = self.sink.gate()
        key = self.key()
        self.start(key, make_move(CASES[0], 9), hold_after=1)
        self.sink.transport.detach(self.source.manifest.control_endpoint)
        gate.set()
        self.ends_as(base.ReadBroke, key, what)
        self.sink.transport.detach(self.source.manifest.control_endpoint)
        late = self.key()
        self.ask(self.read_request(late, make_move(CASES[0], 9)))
        self.ends_as(base.ReadBroke, late, "a read of a source that is not attached")
        self.sink.transport.attach(self.source.manifest)
        if self.source.is_stream:
            self.source.pipe.send(peers.StopSend(key))
            self.source_says(base.SendStopped, key)
        self.move(CASES[2], "after attaching again")

    def sink_dies(self) -> None:
        """Another sink is killed while the source sends to it: this one is still served."""
        move = make_move(CASES[0], 10)
        key = base.TransferKey(b"n" * 16, b"other-sink------", "pp0tp0", "pp0tp0")
        read = self.read_request(key, move)
        other = peers.Child(peers.serve_idle_sink, self.make_sink, read, self.sink_device)
        try:
            assert other.pipe.poll(60), "other sink: expected it to attach, got nothing"
            if self.source.is_stream:
                self.send(key, move, hold_after=1)
        finally:
            other.kill()
        if self.source.is_stream:
            self.source.pipe.send(peers.Release(key))
            self.source.pipe.send(peers.StopSend(key))
            self.source_says(base.SendStopped, key)
        for case in CASES[:3]:
            self.move(case, "after the death of another sink")

    def source_dies(self) -> None:
        what = "source killed in mid-transfer"
        key = self.key()
        gate = self.sink.gate()
        self.start(key, make_move(CASES[0], 11), hold_after=1)
        self.source.kill()
        self.is_source_dead = True
        gate.set()
        started_s = time.monotonic()
        end = self.end_of(key, what, _PEER_DEATH_S)
        if not self.source.is_stream:  # the mapping outlives its owner
            assert isinstance(end, base.ReadDone | base.ReadBroke), f"{what}: got {end}"
        else:
            assert isinstance(end, base.ReadBroke), f"{what}: expected ReadBroke, got {end}"
            assert end.reason is Reason.PEER_LOST, f"{what}: expected peer_lost, got {end.reason}"
            endpoint = self.source.manifest.control_endpoint
            self.sink.until(
                lambda c: isinstance(c, base.PeerGone) and c.control_endpoint == endpoint,
                _PEER_DEATH_S,
                what,
            )
        assert time.monotonic() - started_s < _PEER_DEATH_S
        self.sink.transport.detach(self.source.manifest.control_endpoint)
