"""Loads that are verified: equal bytes pass on every wire, and each way to get others fails the
load as ``corrupt``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from kvxfer.connector.load_routes import Digesting
from kvxfer.connector.records import ConnectorMetadata
from kvxfer.connector.verifier import Verifier
from kvxfer.tensors.device_digest import DeviceDigester
from kvxfer.tensors.device_launch import HostEvent
from kvxfer.transfer.layout import Interior
from kvxfer.transfer.wire import BIND_TOKENS, Pull, Reason, Release, Verdict
from kvxfer.transports.base import LocalMemory, ReadRequest, SinkCompletion, TransferKey
from kvxfer.transports.copy_thread import CopyJob
from kvxfer.transports.cuda_ipc_direct import CudaIpcSink
from kvxfer.transports.shm_direct import ShmSink
from kvxfer.transports.stream_packing import ChunkJob
from tests.builders import EngineShape
from tests.connector.rig import (
    NIXL,
    POISON,
    UCX,
    Engine,
    expect_copied,
    live_offers,
    pass_s,
    until,
)
from tests.copies import is_unpack
from tests.spoken import change_messages, watch_messages
from tests.transports.host_gpu import gpu_of
from tests.wires import run_pieces, use_sink

TWO = EngineShape(tp_size=2, block_tokens=16, layout="HND")
ONE = EngineShape(tp_size=1, block_tokens=32, layout="NHD")
NUM_TOKENS = 96
SPAN = (0, NUM_TOKENS)
SOURCE_IDS, SINK_IDS = (5, 2, 7, 1, 4, 3), (6, 1, 4)


def ids_of(engine: Engine) -> tuple[int, ...]:
    return SOURCE_IDS if engine.shape is TWO else SINK_IDS


@contextmanager
def engines(
    transport: str, verify: str, shape: EngineShape = TWO, **more: Any
) -> Iterator[tuple[Engine, Engine]]:
    """``shape``: of the source; the sink has the other one."""
    settings = {"transport": transport, **more}
    other = ONE if shape is TWO else TWO
    with (
        Engine(shape, "prefill", fill=None, **settings) as source,
        Engine(other, "decode", fill=POISON, verify=verify, **settings) as sink,
    ):
        yield source, sink


def load(
    source: Engine, sink: Engine, name: str = "d", span: tuple[int, int] = SPAN
) -> set[str | None]:
    ref = source.offer(name, span[1], ids_of(source))
    source.compute(name)
    sink.load(name, ref, ids_of(sink), span)
    until(lambda: sink.received(name))
    return sink.reasons(name)


@pytest.mark.parametrize(
    ("transport", "verify"),
    [
        *(("shm", "sample"), ("shm", "all"), ("zmq", "sample"), ("zmq", "all")),
        ("cuda_ipc", "all"),
        *(pytest.param(each.values[0], "sample", marks=each.marks) for each in (UCX, NIXL)),
    ],
)
def test_a_load_is_verified(transport: str, verify: str) -> None:
    with engines(transport, verify) as (source, sink):
        for name in ("d", "e"):
            assert load(source, sink, name) == {None}
            expect_copied(source, sink, SOURCE_IDS, SINK_IDS, SPAN)
            until(partial(source.sent, name))
        assert sink.count("verify.equal") == 4  # two loads from two ranks
        assert source.count("offers.done") == 4


@pytest.mark.parametrize("is_flipped", [False, True])
def test_digests_of_the_kernel_agree_with_those_of_the_host(
    monkeypatch: pytest.MonkeyPatch, is_flipped: bool
) -> None:
    """A decode engine on a GPU, which is a CPU here, and a prefill engine on a CPU."""
    with engines("shm", "all", faults=FLIPS if is_flipped else "") as (source, sink):
        for worker in sink.workers:
            verifier = worker._service.sink._verifier  # type: ignore[union-attr]
            digester = DeviceDigester(verifier._memory.tensors)
            monkeypatch.setattr(verifier, "_digester", lambda digester=digester: digester)
        for name in ("d", "e"):
            reasons = load(source, sink, name, span=(7, 40))
            assert reasons == ({"corrupt"} if is_flipped else {None})
        assert sink.count("verify.differing" if is_flipped else "verify.equal")


@pytest.mark.parametrize("shape", [TWO, ONE], ids=["down", "up"])
def test_sides_of_any_shape_agree(shape: EngineShape) -> None:
    with engines("shm", "all", shape) as (source, sink):
        assert load(source, sink, span=(7, NUM_TOKENS - 5)) == {None}
        assert sink.count("verify.equal") == 2


HYBRID: dict[str, Any] = {"groups": (0, 1), "windows": (None, 40), "num_layers": 2}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "latent": ({"is_mla": True, "inner_nbytes": 36}, {"is_mla": True, "inner_nbytes": 36}),
    "K and V side by side": ({"outermost": "inner"}, {"outermost": "inner", "layout": "NHD"}),
    "K by channel at the source": ({"turned": ("k",)}, {"layout": "NHD"}),
    "a window": (HYBRID, {**HYBRID, "layout": "NHD"}),
    "opaque blocks": ({"interior": Interior.OPAQUE}, {"interior": Interior.OPAQUE}),
    "compressed": ({"cell_tokens": 8, "kernel_blocks": 2}, {"cell_tokens": 8, "layout": "NHD"}),
    "tokens of 2 ranks": (
        {"num_kv_heads": 1, "tp_size": 2, "cp_size": 2, "block_tokens": 8},
        {"num_kv_heads": 1, "layout": "NHD", "protocol": (1, 3)},
    ),
    "kernel blocks": ({"block_tokens": 32, "kernel_blocks": 2}, {"block_tokens": 32}),
}


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_and_other_digests_are_corrupt(name: str, transport: str) -> None:
    """Latents, packed planes, channels, windows, opaque blocks, kernel blocks; on two wires."""
    shapes = [EngineShape(**each) for each in LAYOUTS[name]]
    settings: dict[str, Any] = {"transport": transport}
    num_tokens, ids = 90, tuple(range(1, 7))
    with (
        Engine(shapes[0], "prefill", fill=None, **settings) as source,
        Engine(shapes[1], "decode", fill=POISON, verify="all", **settings) as sink,
    ):
        table = (ids,) * shapes[0].num_groups
        verifiers = held(source)
        for request, reason in (("d", None), ("e", "corrupt")):
            ref = source.offer_groups(request, num_tokens, table)
            source.compute(request)
            sink.load_groups(request, ref, table, (0, num_tokens))
            until(lambda: all(each.kept for each in verifiers))
            if reason is not None:  # one more digest, of other bytes than were read
                verifiers[0].kept = [partial(verifiers[0].dones[-1], (1,) * 64)]
            for worker, verifier in zip(source.workers, verifiers, strict=True):
                verifier.end(worker)
                verifier.kept = []
            until(partial(sink.received, request))
            assert sink.reasons(request) == {reason}


# ------------------------------------------------------------------ corruption


def with_other_head(side: Any) -> Any:
    """Of two heads, which lie at multiples of twice their stride."""
    stride = side.tile.stride_head
    offsets = [base.offset + stride * (1 - 2 * (base.offset // stride % 2)) for base in side.bases]
    bases = [
        msgspec.structs.replace(base, offset=offset)
        for base, offset in zip(side.bases, offsets, strict=True)
    ]
    return msgspec.structs.replace(side, bases=tuple(bases))


def rolled(table: Any) -> Any:
    return tuple((*ids[-1:], *ids[:-1]) for ids in table)


def wrong_chunk(kind: str, job: CopyJob) -> bool:
    """A piece of a stream, with something wrong at its source, or at its sink."""
    if not isinstance(job, ChunkJob):  # of a trial
        return job.run()
    dense = job.dense = job.take_dense()
    if is_unpack(job):
        if kind == "a wrong place":
            job.block_ids = np.roll(job.block_ids, 1)
        return kind != "stale bytes" and job.run()
    if kind == "a wrong block":
        job.block_ids = np.roll(job.block_ids, 1)
    if kind == "a wrong head":
        job.side = with_other_head(job.side)
    job.run()
    if kind == "a flipped bit":
        dense[len(dense) // 2] ^= 1
    if kind == "a torn copy":
        dense[len(dense) // 2 :] ^= 0x55
    return False


def wrong_request(kind: str, request: ReadRequest) -> ReadRequest:
    """What a direct wire is asked for, with something wrong."""
    change = msgspec.structs.replace
    if kind == "a wrong block":
        return change(request, source_ids=rolled(request.source_ids))
    if kind == "a wrong place":
        return change(request, sink_ids=rolled(request.sink_ids))
    if kind == "a wrong head":
        classes = [replace(each, source=with_other_head(each.source)) for each in request.classes]
        return change(request, classes=tuple(classes))
    pulls = [
        change(pull, token_hi=pull.token_lo + (kind == "a torn copy") * NUM_TOKENS // 2)
        for pull in request.pull_classes
    ]
    return change(request, pull_classes=tuple(pulls))


def use_wrong_wire(patch: pytest.MonkeyPatch, transport: str, kind: str) -> None:
    """For engines that are made from now on; a flipped bit is one of ``faults``."""

    class Shm(ShmSink):
        def submit_read(self, request: ReadRequest) -> None:
            super().submit_read(wrong_request(kind, request))

    class CudaIpc(CudaIpcSink):
        def submit_read(self, request: ReadRequest) -> None:
            super().submit_read(wrong_request(kind, request))

    if transport == "shm":
        use_sink(patch, transport, Shm)
    elif transport == "cuda_ipc":
        use_sink(patch, transport, partial(_with_gpu, CudaIpc))
    else:
        run_pieces(patch, transport, partial(wrong_chunk, kind))


def _with_gpu(make: Callable[..., CudaIpcSink], memory: LocalMemory, *more: Any) -> CudaIpcSink:
    return make(memory, *more, gpu_of(memory))


FLIPS = "read:flip"
"""A bit of each piece of a copy."""


def expect_corrupt(reasons: set[str | None]) -> None:
    """On some rank; its Cancel may end the offer before another one has its verdict."""
    assert {"corrupt"} <= reasons <= {"corrupt", "ended"}


KINDS = [
    "a flipped bit",
    "a wrong place",
    "a wrong block",
    "a wrong head",
    "stale bytes",
    "a torn copy",
]


QUICK = ("a wrong place", "a flipped bit")
"""Tried over the wires whose engines take seconds to start, too."""
CASES = [
    pytest.param(
        *(transport, kind),
        marks=marks if transport in ("shm", "zmq") or kind in QUICK else (*marks, pytest.mark.slow),
    )
    for transport, marks in (
        *(("shm", ()), ("zmq", ()), ("cuda_ipc", ())),
        *((each.values[0], each.marks) for each in (UCX, NIXL)),
    )
    for kind in KINDS
    if (transport, kind) != ("cuda_ipc", "a flipped bit")  # a kernel has no place to plant it
]


@pytest.mark.parametrize(("transport", "kind"), CASES)
def test_corruption_is_found(
    transport: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = FLIPS if (transport, kind) == ("shm", "a flipped bit") else ""
    if not faults:
        use_wrong_wire(monkeypatch, transport, kind)
    shape = ONE if kind == "a wrong head" else TWO
    with engines(transport, "all", shape, chunk_nbytes=4096, faults=faults) as (source, sink):
        with caplog.at_level(logging.WARNING):
            expect_corrupt(load(source, sink))
        assert sink.count("verify.differing") >= 1
        # A rank may hear from the source that another one gave up, before it has found it itself
        report = next(each for each in sink.reports("d") if "differ" in each.detail)
        assert report.reason is Reason.CORRUPT
        assert source.endpoint in report.detail
        assert "regions that differ; the first: layers." in report.detail
        assert report.detail in caplog.text
        until(lambda: source.sent("d"))  # its blocks come back


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a flipped bit"])
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_sample_finds_whole_blocks(
    transport: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_wrong_wire(monkeypatch, transport, kind)
    shape = ONE if kind == "a wrong head" else TWO
    with engines(transport, "sample", shape) as (source, sink):
        expect_corrupt(load(source, sink))


def test_a_sample_finds_one_bit_in_16() -> None:
    """The bit is of any token, and each offer has another sample."""
    found: list[set[str | None]] = []
    with engines("shm", "sample", faults=FLIPS) as (source, sink):
        # None of 60 finds it once in 50 runs of this test
        while len(found) < 60 or ({"corrupt"} not in found and len(found) < 400):
            found.append(load(source, sink, f"d{len(found)}"))
    assert 0 < found.count({"corrupt"}) < len(found) / 3


def test_without_the_setting_nothing_is_asked_or_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Pull] = []

    def look(message: object) -> None:
        if isinstance(message, Pull):
            asked.append(message)

    watch_messages(monkeypatch, look)
    use_wrong_wire(monkeypatch, "shm", "a wrong block")  # and so it is not found
    with engines("shm", "off") as (source, sink):
        assert load(source, sink) == {None}
        assert sink.count("board.verdicts") == 2  # which have no digests
        until(lambda: source.sent("d"))
    assert [each.verify for each in asked] == [UNSET, UNSET]
    assert not [name for name in sink.take_stats().counts if name.startswith("verify.")]


# ------------------------------------------------------------------ messages and ends


def test_an_older_source_is_read_unverified(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"transport": "shm"}
    with (
        Engine(TWO, "prefill", fill=None, announce=False, **settings) as source,
        Engine(ONE, "decode", fill=POISON, verify="all", **settings) as sink,
        caplog.at_level(logging.WARNING),
    ):
        older = msgspec.structs.replace(source.manifest, capabilities=(BIND_TOKENS,))
        source.step(ConnectorMetadata(manifest=older))
        for name in ("d", "e", "f"):
            assert load(source, sink, name) == {None}
        assert sink.count("verify.not_possible") == 3
        assert sink.count("verify.equal") == 0
        said = [each for each in caplog.records if "makes no digests" in each.getMessage()]
        assert len(said) == 1


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_lost_answers_are_asked_for_again(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Verdict of each rank is lost; a repeated Release gets it again, digests and all."""
    lost: set[int] = set()  # by the IO thread of its rank

    def lose(message: Any) -> Iterable[Any]:
        if isinstance(message, Verdict) and threading.get_ident() not in lost:
            lost.add(threading.get_ident())
            return ()
        return (message,)

    change_messages(monkeypatch, lose)
    with engines(transport, "all") as (source, sink):
        assert load(source, sink) == {None}
        assert sink.count("verify.equal") == 2
        assert len(lost) == 2


def test_a_verdict_without_digests_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(message: Any) -> Iterable[Any]:
        if isinstance(message, Verdict):
            message = msgspec.structs.replace(message, digests=UNSET)
        return (message,)

    change_messages(monkeypatch, change)
    with engines("shm", "sample") as (source, sink):
        assert load(source, sink) == {"read_failed"}
        (report,) = sink.reports("d")
        assert "expected digests of its KV, got none" in report.detail


class Held(Verifier):
    """Digests that nobody gets until they are let go."""

    kept: list[partial[object]]
    dones: list[Callable[[Any], object]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept, self.dones = [], []

    def submit(
        self, lane: Any, cells: Any, seed: Any, done: Any, *about: Any, after: Any = None
    ) -> None:
        told = partial(done, *about)
        self.dones.append(told)

        def keep(digests: Any) -> None:
            self.kept.append(partial(told, digests))

        super().submit(lane, cells, seed, keep, after=after)

    def end(self, worker: Any) -> None:
        for call in self.kept:
            worker._service.io.post(call)


def held(engine: Engine, side: str = "source") -> list[Held]:
    """Of each rank's source, or sink."""
    verifiers = []
    for worker in engine.workers:
        end = getattr(worker._service, side)
        inner = end._verifier
        end._verifier = Held(inner._memory, inner._copy_thread, inner._post)
        verifiers.append(end._verifier)
    return verifiers


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("is_ended", [False, True])
def test_blocks_are_kept_until_their_digests_are_made(transport: str, is_ended: bool) -> None:
    """Though all is read; and an offer that ends meanwhile is not valid."""
    with engines(transport, "all") as (source, sink):
        verifiers = held(source)
        ref = source.offer("d", NUM_TOKENS, SOURCE_IDS)
        source.compute("d")
        sink.load("d", ref, SINK_IDS, SPAN)
        until(lambda: all(each.kept for each in verifiers))
        until(lambda: all(list(offer.checks.values())[0].waiting for offer in live_offers(source)))
        assert not source.sent("d")
        assert not sink.received("d")
        if is_ended:
            source.end("d")
        for worker, verifier in zip(source.workers, verifiers, strict=True):
            verifier.end(worker)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == ({"aborted"} if is_ended else {None})
        until(lambda: source.sent("d"))


def test_a_stream_that_has_brought_all_is_not_cut_for_digests_that_are_late() -> None:
    with engines("zmq", "all") as (source, sink):
        verifiers, num_routes = held(sink, "sink"), len(source.workers)
        ref = source.offer("d", NUM_TOKENS, SOURCE_IDS)
        source.compute("d")
        sink.load("d", ref, SINK_IDS, SPAN)
        until(lambda: all(len(each.kept) == num_routes for each in verifiers))
        pass_s(sink, 300.0)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"deadline"}
        assert sink.count("peers.peer_lost") == 0
        other = source.offer("e", NUM_TOKENS, SOURCE_IDS)
        source.compute("e")
        sink.load("e", other, SINK_IDS, SPAN)
        until(lambda: all(len(each.kept) == 2 * num_routes for each in verifiers))
        assert sink.count("peers.peer_lost") == 0


@pytest.mark.parametrize(
    ("made", "reason"), [("its own", None), ("others", "corrupt"), ("none", "read_failed")]
)
@pytest.mark.parametrize("transport", ["shm", "zmq", "cuda_ipc"])
def test_a_verdict_waits_for_the_digests_of_its_sink(
    transport: str, made: str, reason: str | None
) -> None:
    """The source is asked for it meanwhile, and is through; its offer may end, which changes
    nothing.
    """
    with engines(transport, "all") as (source, sink):
        verifiers, num_routes = held(sink, "sink"), len(source.workers)
        ref = source.offer("d", NUM_TOKENS, SOURCE_IDS)
        source.compute("d")
        sink.load("d", ref, SINK_IDS, SPAN)
        until(lambda: all(len(each.kept) == num_routes for each in verifiers))
        until(lambda: source.sent("d"))
        until(lambda: all(run.verdict is not None for run in routes(sink)))
        assert not sink.received("d")
        for each in verifiers if made != "its own" else ():
            each.kept = [
                partial(told.func, *told.args[:-1], None if made == "none" else (*own[1:], own[0]))
                for told, own in ((kept, kept.args[-1]) for kept in each.kept)
            ]
        for worker, verifier in zip(sink.workers, verifiers, strict=True):
            verifier.end(worker)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {reason}
        if reason == "read_failed":
            (report,) = sink.reports("d")
            assert "expected digests of what was read, got none" in report.detail


def test_digests_are_made_behind_the_copies_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there before the host has seen the end of the read."""
    is_seen, waited = threading.Event(), []

    class Event(HostEvent):
        def synchronize(self) -> None:
            waited.append(self)

    class Behind(CudaIpcSink):
        def copied(self, keys: Collection[TransferKey]) -> Event:
            return Event()

        def _done(self) -> list[SinkCompletion]:
            return super()._done() if is_seen.is_set() else []

    use_sink(monkeypatch, "cuda_ipc", partial(_with_gpu, Behind))
    with engines("cuda_ipc", "all") as (source, sink):
        num_routes = len(source.workers)
        ref = source.offer("d", NUM_TOKENS, SOURCE_IDS)
        source.compute("d")
        sink.load("d", ref, SINK_IDS, SPAN)
        until(lambda: [run.digesting for run in routes(sink)] == [Digesting.OVER] * num_routes)
        assert len(waited) == num_routes
        assert not source.sent("d")
        assert not sink.received("d")
        is_seen.set()
        for worker in sink.workers:
            worker._service.io.wake()  # type: ignore[union-attr]
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        assert len(waited) == num_routes  # none is made twice
        expect_copied(source, sink, SOURCE_IDS, SINK_IDS, SPAN)


def routes(sink: Engine) -> list[Any]:
    """Of the loads of all ranks."""
    return [
        run
        for worker in sink.workers
        for load in worker._service.sink._by_request.values()  # type: ignore[union-attr]
        for run in load.routes.values()
    ]


def test_an_abort_meanwhile_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with engines("shm", "all") as (source, sink):
        verifiers = held(source)
        ref = source.offer("d", NUM_TOKENS, SOURCE_IDS)
        source.compute("d")
        sink.load("d", ref, SINK_IDS, SPAN)
        until(lambda: all(each.kept for each in verifiers))
        sink.abort("d")
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"cancelled"}
        for worker, verifier in zip(source.workers, verifiers, strict=True):
            verifier.end(worker)
        until(lambda: source.sent("d"))


def test_what_cannot_be_verified_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than is offered, or what is not there: the Pull is refused, and nothing is hashed."""

    def ask_for_more(message: Any) -> Iterable[Any]:
        if isinstance(message, Pull) and message.verify is not UNSET:
            change = msgspec.structs.replace
            classes = tuple(
                change(each, token_hi=NUM_TOKENS + 1) for each in message.verify.classes
            )
            message = change(message, verify=change(message.verify, classes=classes))
        return (message,)

    change_messages(monkeypatch, ask_for_more)
    with engines("shm", "all", offer_board=False) as (source, sink):
        assert load(source, sink) == {"plan"}
        (report,) = sink.reports("d")
        assert "verify: expected at most the offered 96 tokens, got 97" in report.detail
        assert not [offer for offer in live_offers(source) if offer.checks]


def test_nobody_gets_digests_without_a_grant() -> None:
    """A Release out of the blue is invalid as ever, and brings none."""
    seen: list[Verdict] = []
    with engines("shm", "all") as (source, sink), pytest.MonkeyPatch.context() as m:

        def look(message: object) -> None:
            if isinstance(message, Verdict):
                seen.append(message)

        watch_messages(m, look)
        ref = source.offer("d", NUM_TOKENS, SOURCE_IDS)
        source.compute("d")
        until(lambda: source.count("offers.opened"))
        consumer = sink.workers[0]._service.sink._addressing.consumer  # type: ignore[union-attr]
        service = source.workers[0]._service
        assert service is not None
        service.io.post(lambda: service.source.handle(b"nobody", Release(ref.offer, consumer)))
        until(lambda: seen)
        assert (seen[0].valid, seen[0].digests) == (False, UNSET)
