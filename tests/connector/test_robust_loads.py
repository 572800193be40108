"""A load ends and is reported, whatever goes wrong on its way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvxfer.connector.keeper import OFFER_NBYTES, Keeper
from kvxfer.connector.peer import Peer
from kvxfer.connector.peer_session import PeerState
from kvxfer.connector.peers import Peers
from kvxfer.connector.records import ConnectorMetadata, Hold, SourceRef
from kvxfer.errors import ProtocolError
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.wire import MAX_KEPT, Consumer, Grant, Keep, OfferRef, Pull, Release
from kvxfer.transports.base import ReadRequest
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_wire import Attached, ChunkHeader, decode_to_sink, encode
from tests.builders import EngineShape
from tests.connector.inside import slots_behind
from tests.connector.rig import (
    NIXL,
    POISON,
    UCX,
    WIRES,
    Engine,
    kept_by,
    links_of,
    num_loads_at,
    only_peer_of,
    pass_s,
    service_of,
    until,
    was_granted,
)
from tests.copies import HeldPieces
from tests.spoken import change_frames, change_messages, watch_messages
from tests.wires import pipe_of, use_sink

ONE = EngineShape(num_kv_heads=2, num_blocks=64)
SPAN = (0, 64)


def _offered(source: Engine, name: str) -> SourceRef:
    ref = source.offer(name, 64, range(4))
    source.compute(name)
    return ref


def _meet(source: Engine, sink: Engine) -> None:
    sink.load("first", _offered(source, "first"), range(4), SPAN)
    until(lambda: sink.received("first"))
    assert sink.reasons("first") == {None}


def test_a_release_that_is_never_answered_misses_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    releases: list[Release] = []

    def lose(said: Any) -> Iterable[Any]:
        if not isinstance(said, Release):
            return (said,)
        releases.append(said)
        return ()

    change_messages(monkeypatch, lose)
    with (
        Engine(ONE, "prefill", fill=1, transport="shm") as source,
        Engine(ONE, "decode", fill=POISON, transport="shm", offer_board=False) as sink,
    ):
        ref = _offered(source, "p")
        started_s = time.perf_counter()
        sink.load("d", ref, range(4), SPAN)
        until(lambda: len(releases) > 2)
        assert sink.count("control.retries") < time.perf_counter() - started_s  # one a second
        assert not sink.received("d")
        pass_s(sink, 300.0)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"deadline"}


def test_repeated_grants_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldPieces(monkeypatch, "shm")
    with (
        Engine(ONE, "prefill", fill=1, transport="shm") as source,
        Engine(ONE, "decode", fill=POISON, transport="shm", pull_timeout_s=0.5) as sink,
    ):
        ref = _offered(source, "p")
        sink.load("d", ref, range(4), SPAN)
        until(lambda: sink.count("peers.ready"))
        service, peer = service_of(sink), only_peer_of(sink)
        grant = Grant(ref.offer, Consumer(sink.incarnation, RankId(0, 0)), ((0, 1, 2, 3),))
        deadline_s = time.monotonic() + 120.0
        while not source.sent("p"):  # given back when the deadline has passed
            assert time.monotonic() < deadline_s, "the deadline does not come"
            service.io.post(lambda: service.sink.on_message(peer, RankId(0, 0), grant))
            time.sleep(0.05)
        held.may_end.set()
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"deadline"}


def test_what_a_link_raises_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Engine(ONE, "prefill", fill=1, transport="shm") as source,
        Engine(ONE, "decode", fill=POISON, transport="shm", offer_board=False) as sink,
    ):
        _meet(source, sink)
        with monkeypatch.context() as patch:

            def no_send(_: object) -> None:
                raise OSError(24, "too many open files")

            watch_messages(patch, no_send)
            sink.load("d", _offered(source, "p"), range(4), SPAN)
            until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"read_failed"}
        assert sink.count("loads.unforeseen") > 0


@pytest.mark.parametrize("where", ["ready", "hold_at", "begin_load"])
def test_what_is_raised_before_a_load_begins_fails_it(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with (
        Engine(ONE, "prefill", fill=1, transport="shm") as source,
        Engine(ONE, "decode", fill=POISON, transport="shm") as sink,
    ):
        _meet(source, sink)
        peer = only_peer_of(sink)
        owner: type = {"ready": Peers, "hold_at": Keeper, "begin_load": Peer}[where]
        original = getattr(owner, where)

        def once(*args: object) -> object:
            monkeypatch.setattr(owner, where, original)
            raise RuntimeError("unforeseen")

        monkeypatch.setattr(owner, where, once)
        sink.load("d", _offered(source, "p"), range(4), SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"read_failed"}
        until(lambda: source.sent("p"))  # cancelled, not after its lease
        assert not kept_by(sink)
        assert num_loads_at(peer) == 0


def test_silence_from_before_a_load_is_not_held_against_it() -> None:
    with (
        Engine(ONE, "prefill", fill=1, transport="shm") as source,
        Engine(ONE, "decode", fill=POISON, transport="shm") as sink,
    ):
        _meet(source, sink)
        peer = only_peer_of(sink)
        pass_s(sink, 300.0)
        until(lambda: peer._watch is None)  # over the first load
        for client in links_of(peer):
            client.unanswered_s = time.monotonic() - 300.0
        sink.load("d", _offered(source, "p"), range(4), SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}


def test_no_keep_stays_behind_for_a_load_that_ends_as_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        Engine(ONE, "prefill", fill=1, transport="shm") as source,
        Engine(ONE, "decode", fill=POISON, transport="shm") as sink,
    ):
        _meet(source, sink)
        peer = only_peer_of(sink)
        monkeypatch.setattr(peer, "begin_load", lambda: peer.lost("silent"))
        sink.load("d", _offered(source, "p"), range(4), SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"peer_lost"}
        assert not kept_by(sink)
        until(lambda: source.count("offers.done") == 1)  # it was never asked for the second one


def test_nothing_is_asked_behind_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two Pulls cannot be sent: the second route is neither armed nor asked."""
    expected: list[str] = []

    class Noting(StreamSink):
        def submit_expect(self, request: ReadRequest) -> None:
            expected.append(request.key.source_rank)
            super().submit_expect(request)

    pulled: list[Pull] = []

    def send_but_not_first(message: object) -> None:
        if isinstance(message, Pull):
            pulled.append(message)
            raise ProtocolError("too long")

    use_sink(monkeypatch, "zmq", partial(Noting, pipe_of("zmq")))
    watch_messages(monkeypatch, send_but_not_first)
    with (
        Engine(EngineShape(tp_size=2, num_kv_heads=4), "a", fill=1, transport="zmq") as source,
        Engine(EngineShape(num_kv_heads=4), "decode", fill=POISON, transport="zmq") as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [1], (0, 16))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"read_failed"}
        assert len(pulled) == len(expected) == 1
        until(lambda: source.sent("p"))


@pytest.mark.parametrize("wire", WIRES)
def test_tokens_beyond_the_offered_ones_are_not_read_unbound_either(wire: str) -> None:
    settings: dict[str, Any] = {"transport": wire, "bind_tokens": False}
    with (
        Engine(ONE, "prefill", fill=1, **settings) as source,
        Engine(ONE, "decode", fill=POISON, **settings) as sink,
    ):
        ref = source.offer("p", 50, range(4))
        source.compute("p")
        sink.load("d", msgspec.structs.replace(ref, num_tokens=64), range(4), SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"plan"}
        assert (sink.pools[0].tensor == POISON).all()


# ------------------------------------------------------------------ Keeps


def test_keeps_of_many_offers_come_in_slices_and_go_on_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most, num_offers = 10, 23
    sizes: list[int] = []

    def record(message: object) -> None:
        if isinstance(message, Keep):
            sizes.append(len(message.offers))
            if len(sizes) == num_offers + 1:
                raise RuntimeError("unforeseen")

    watch_messages(monkeypatch, record)
    with (
        Engine(ONE, "prefill", fill=1, max_hold_s=3600.0) as source,
        Engine(
            *(ONE, "decode"),
            fill=POISON,
            keep_s=100.0,
            control_max_nbytes=most * OFFER_NBYTES,
        ) as sink,
    ):
        for number in range(num_offers):
            sink.hold(f"d{number}", _offered(source, f"p{number}"))
        until(lambda: len(sizes) == num_offers)
        sink.expected_io_errors = 1
        for number in range(4):  # more than the lease
            pass_s(source, 100.0)
            pass_s(sink, 100.0)
            until(lambda: len(sizes) == num_offers + 1 + 3 * number)  # noqa: B023
            num_kept = num_offers * (1 + number)
            until(lambda: source.count("leases.extended") == num_kept)  # noqa: B023
        assert not any(source.sent(f"p{number}") for number in range(num_offers))
        # The one behind those of the holds failed, and ended its round
        each_as_held, in_slices = sizes[:num_offers], sizes[num_offers + 1 :]
        assert each_as_held == [1] * num_offers
        assert in_slices == [10, 10, 3] * 3


def test_a_keep_has_no_more_offers_than_its_reader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def record(message: object) -> None:
        if isinstance(message, Keep):
            sizes.append(len(message.offers))

    watch_messages(monkeypatch, record)
    with (
        Engine(ONE, "prefill", fill=1) as source,
        Engine(ONE, "decode", fill=POISON, keep_s=0.5) as sink,
    ):
        ref = _offered(source, "p")
        nonces = (number.to_bytes(16) for number in range(MAX_KEPT + 4))
        offers = (msgspec.structs.replace(ref.offer, nonce=nonce) for nonce in nonces)
        holds = (msgspec.structs.replace(ref, offer=offer) for offer in offers)
        sink.step(
            ConnectorMetadata(holds=tuple(Hold(f"d{n}", hold) for n, hold in enumerate(holds)))
        )
        until(lambda: 4 in sizes)
        assert max(sizes) == MAX_KEPT
        assert source.count("control.malformed") == 0


def test_an_offer_that_was_given_up_before_its_engine_was_known_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[OfferRef] = []

    def record(message: object) -> None:
        if isinstance(message, Keep):
            kept.extend(message.offers)

    watch_messages(monkeypatch, record)
    with (
        Engine(ONE, "prefill", fill=1) as source,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        ref = _offered(source, "p")
        service = service_of(sink)

        def hold_and_give_up() -> None:
            service.keeper.hold("d", ref)
            service.keeper.release("d", ref)

        service.io.post(hold_and_give_up)
        until(lambda: sink.count("peers.ready"))
        other = _offered(source, "other")
        sink.hold("e", other)
        until(lambda: kept)
        assert set(kept) == {other.offer}


class Lost:
    """What a ROUTER says of a stream and is ``wanted`` gets lost; its slots come back. Who waits
    for it is told nothing.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wanted: Callable[[Attached | ChunkHeader], bool] = lambda _: False
        self.num = 0
        self._unattached: set[bytes] = set()
        change_frames(patch, self._change)

    def _change(self, frames: list[Any]) -> list[Any]:
        identity, first, *rest = frames
        try:
            said = decode_to_sink(memoryview(first))
        except ProtocolError:  # of the control channel
            return frames
        if not isinstance(said, Attached | ChunkHeader) or not self.wanted(said):
            return frames
        self.num += 1
        name = bytes(memoryview(identity))
        if isinstance(said, Attached):
            self._unattached.add(name)
        elif name not in self._unattached:
            return [identity, encode(replace(said, nonce=b"nobody's")), *rest]
        return [identity, b"", *rest]  # a question whether the sink is there


@pytest.mark.parametrize("wire", ["zmq", "tcp", UCX, NIXL])
def test_a_stream_that_brings_nothing_to_anybody_is_cut_and_its_peer_met_anew(
    monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    """No other end tells of it: the connection stands, and so does the control channel."""
    lost = Lost(monkeypatch)
    with (
        Engine(ONE, "prefill", fill=1, transport=wire) as source,
        Engine(ONE, "decode", fill=POISON, transport=wire) as sink,
    ):
        ref = source.offer("p", 64, range(4))
        sink.load("d", ref, range(4), SPAN)
        until(lambda: sink.count("peers.ready"))
        first = only_peer_of(sink)
        # Over others a chunk may follow at once, which makes no sense to who is not attached
        kinds = ChunkHeader if wire == "zmq" else Attached | ChunkHeader
        # Once it is cut, what the next one says gets through
        lost.wanted = lambda said: isinstance(said, kinds) and first.state is not PeerState.OVER
        source.compute("p")
        until(lambda: lost.num and was_granted(sink, "d"))
        pass_s(sink, 300.0)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"deadline"}
        until(lambda: first.state is PeerState.OVER)
        sink.load("e", _offered(source, "q"), range(4), SPAN)
        until(lambda: sink.received("e"))
        assert sink.reasons("e") == {None}
        assert only_peer_of(sink) is not first
        until(lambda: all_free(source))


def all_free(source: Engine) -> bool:
    """No slot of a connection waits for what will not come."""
    sources = [
        slots for side, slots in slots_behind(service_of(source)).items() if "source" in side
    ]
    return all(each["LEAVING"] == each["IN_FLIGHT"] == 0 for slots in sources for each in slots)


def test_a_stream_that_brings_something_to_others_is_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = Lost(monkeypatch)
    with (
        Engine(ONE, "prefill", fill=1, transport="zmq") as source,
        Engine(ONE, "decode", fill=POISON, transport="zmq") as sink,
    ):
        _meet(source, sink)
        first, ref = only_peer_of(sink), _offered(source, "p")
        lost.wanted = lambda said: isinstance(said, ChunkHeader) and said.nonce == ref.offer.nonce
        sink.load("d", ref, range(4), SPAN)
        until(lambda: lost.num and was_granted(sink, "d"))
        sink.load("e", _offered(source, "q"), range(4, 8), SPAN)
        until(lambda: sink.received("e"))
        assert sink.reasons("e") == {None}
        pass_s(sink, 300.0)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"deadline"}
        sink.load("f", _offered(source, "r"), range(4, 8), SPAN)
        until(lambda: sink.received("f"))
        assert only_peer_of(sink) is first
