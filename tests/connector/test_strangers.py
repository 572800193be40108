"""What others do to the ports of an engine, and that an honest pair goes on meanwhile."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kvxfer.connector import control
from kvxfer.connector.records import SourceRef
from kvxfer.errors import ProtocolError
from kvxfer.transfer.manifest import MAX_RANKS, RankId
from kvxfer.transfer.plan import DenseOrder, PullClass, RegionName
from kvxfer.transfer.wire import (
    MAX_CLASSES,
    MAX_EARLY,
    MAX_KEPT,
    Consumer,
    Find,
    Hello,
    Keep,
    Malformed,
    Manifest,
    OfferRef,
    Ping,
    Pong,
    Pull,
    Reason,
    Refuse,
    Verify,
    decode_to_sink,
    decode_to_source,
    encode,
)
from kvxfer.transports import channel, guard, visitors
from tests import zmtp
from tests.builders import EngineShape
from tests.connector.rig import (
    POISON,
    Engine,
    let_look,
    num_connections_of,
    service_of,
    stuck,
    until,
)
from tests.far_peers import count_as_far, limit_descriptors, use_tcp
from tests.helpers import needs_socket_filters

ONE = EngineShape()
PORTS = ["control", "data"]


def port_of(engine: Engine, port: str) -> str:
    return engine.endpoint if port == "control" else engine.manifest.ranks[0].data_endpoints["zmq"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(ONE, "prefill", fill=1, transport="zmq", control_max_nbytes=100_000) as engine:
        yield engine


@contextmanager
def dealer(endpoint: str, **options: Any) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(endpoint)
        yield socket


def ping(socket: zmq.Socket[bytes]) -> None:
    socket.send(encode(Ping()))
    assert socket.poll(30_000)
    assert isinstance(decode_to_sink(socket.recv()), Pong)


AT_ONCE_S = 3.0
"""For what is expected to be kept out: it gets no answer."""


def is_kept_out(endpoint: str, wait_s: float = 30.0) -> bool:
    """Whether a new connection is ended, or has no answer for so long."""
    try:
        peer = zmtp.connect(endpoint, wait_s)
    except OSError:
        return True
    with closing(peer):
        peer.settimeout(1.0)
        try:
            return not peer.recv(1)  # else ZeroMQ asks whether it lives, and ends it 3 s later
        except TimeoutError:
            return False
        except OSError:
            return True


def keep_penalties(patch: pytest.MonkeyPatch) -> None:
    """They hold until somebody has looked, however late that is."""
    patch.setattr(guard, "PENALTY_S", 300.0)
    patch.setattr(guard, "MOST_PENALTY_S", 300.0)


def loads(source: Engine, sink: Engine, number: int) -> set[str | None]:
    """Why that many loads, one after the other, ended as they did."""
    reasons: set[str | None] = set()
    for each in range(number):
        name = f"{time.monotonic()} {each}"
        ref = source.offer(name, 16, [1])
        source.compute(name)
        sink.load(name, ref, [1], (0, 16))
        until(lambda name=name: sink.received(name), 60)  # type: ignore[misc]
        reasons |= sink.reasons(name)
    return reasons


# ------------------------------------------------------------------ messages


@pytest.mark.parametrize("port", PORTS)
def test_a_message_of_many_parts_costs_its_sender_the_connection(
    engine: Engine, port: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(zmtp.connect(port_of(engine, port))) as peer:
        peer.sendall(zmtp.EMPTY_PART * 20_000 + zmtp.EMPTY_END)
        assert zmtp.has_ended(peer)
    until(lambda: "127.0.0.1 was closed: it sent a message of many parts" in caplog.text)
    with Engine(ONE, "decode", fill=POISON, transport="zmq") as sink:
        assert loads(engine, sink, 1) == {None}


def test_penalties_double_and_are_forgotten() -> None:
    penalties = guard.Penalties()
    now_s = 100.0
    for wanted_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        penalties.add("a", now_s)
        assert penalties.holds("a", now_s + wanted_s - 0.01)
        assert not penalties.holds("a", now_s + wanted_s)
        assert not penalties.holds("b", now_s)
        now_s += wanted_s + guard.FORGET_S - 1
    penalties.add("a", now_s + 100)
    assert not penalties.holds("a", now_s + 101)
    for number in range(10_000):
        penalties.add(str(number), now_s)
    assert not penalties.holds("0", now_s)  # or each address would cost memory
    assert penalties.holds("9999", now_s)


def test_the_address_of_most_connections_of_late() -> None:
    penalties = guard.Penalties()
    assert penalties.busiest(0.0) == ("", 0)
    for address in ("a", "b", "b"):
        penalties.begun(address, 100.0)
    assert penalties.busiest(100.0) == ("b", 2)
    assert penalties.busiest(100.0 + guard.BEGUN_S) == ("", 0)
    penalties.begun("b", 100.0 + guard.BEGUN_S)  # counted anew
    assert penalties.busiest(100.0 + guard.BEGUN_S) == ("b", 1)
    for number in range(10_000):
        penalties.begun(str(number), 200.0)
    penalties.begun("0", 200.0)
    assert penalties.busiest(200.0)[1] == 1  # forgotten meanwhile, or each would cost memory


def test_an_address_that_connects_all_the_time_has_to_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: 100.0))
    penalties = guard.penalties_of(service_of(engine)._context)
    with dealer(engine.endpoint) as honest:
        ping(honest)
        for _ in range(guard.MOST_BEGUN - 20):
            penalties.begun("127.0.0.1", 100.0)
        for _ in range(20 - 1):
            zmtp.connect(engine.endpoint).close()
        assert is_kept_out(engine.endpoint, AT_ONCE_S)
        ping(honest)
    (warned,) = (each.message for each in caplog.records if "expected at most 1024" in each.message)
    assert "127.0.0.1" in warned
    until(lambda: engine.count("connections.refused.penalty") >= 1)


@pytest.mark.parametrize("port", PORTS)
def test_an_address_that_misbehaved_has_to_wait_and_others_of_it_go_on(
    engine: Engine, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=time.perf_counter)
    for module in (guard, visitors):
        monkeypatch.setattr(module, "time", clock)
    endpoint = port_of(engine, port)
    with (
        dealer(engine.endpoint) as honest,
        closing(zmtp.connect(endpoint)) as peer,
        closing(zmtp.connect(endpoint)) as silent,
    ):
        ping(honest)
        peer.sendall(zmtp.EMPTY_PART * 20_000 + zmtp.EMPTY_END)
        assert zmtp.has_ended(peer)
        assert zmtp.has_ended(silent)
        ping(honest)
    assert is_kept_out(endpoint, AT_ONCE_S)

    def is_let_in() -> bool:
        now_s[0] += guard.MOST_PENALTY_S  # what still lay unread may be a new penalty
        return not is_kept_out(endpoint)

    until(is_let_in)


def test_long_messages_that_are_none_are_answered_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_penalties(monkeypatch)

    def say(nbytes: int) -> None:
        peer.sendall(b"\x02" + nbytes.to_bytes(8, "big") + bytes(nbytes))

    with closing(zmtp.connect(engine.endpoint)) as peer:
        for nbytes in (control.LONG_NBYTES, control.LONG_NBYTES, control.LONG_NBYTES + 1):
            say(nbytes)
            kind, size, *answer = peer.recv(1 << 16)
            assert (kind, size) == (0, len(answer))
            assert isinstance(decode_to_sink(bytes(answer)), Malformed)
        say(control.LONG_NBYTES + 1)
        assert zmtp.has_ended(peer)
    assert is_kept_out(engine.endpoint, AT_ONCE_S)
    with Engine(ONE, "decode", fill=POISON, transport="zmq") as sink:  # over the Unix socket
        assert loads(engine, sink, 1) == {None}


@pytest.mark.parametrize("port", PORTS)
def test_messages_that_nobody_can_read_in_time_end_the_connection_and_not_the_process(
    port: str,
) -> None:
    """ZeroMQ aborts where its high-water mark has stopped a connection that ends, at its next
    heartbeat.
    """
    with Engine(ONE, "prefill", fill=1, transport="zmq", peer_silent_s=0.3) as engine:
        with stuck(engine):
            with closing(zmtp.connect(port_of(engine, port))) as peer:
                peer.sendall(zmtp.frame(b"x") * 20_000)
            time.sleep(0.5)  # heartbeats: each 0.1 s
        with dealer(engine.endpoint) as honest:

            def has_answer() -> int:  # a late heartbeat ends a connection, with what was said
                honest.send(encode(Hello((1, 1), (), "decode", b"i" * 16)))
                return honest.poll(1000)

            until(has_answer)
            assert isinstance(decode_to_sink(honest.recv()), Manifest)


def test_lists_are_bounded_before_they_are_built() -> None:
    ref, rank = OfferRef(b"n" * 16, b"i" * 16), RankId(0, 0)
    pull = Pull(
        offer=ref,
        consumer=Consumer(b"s" * 16, rank),
        claim=(rank,) * MAX_RANKS,
        digest=b"",
        transport="shm",
    )
    keep, hello = Keep((ref,) * MAX_KEPT, b"i" * 16, 1.0), Hello((1, 1), ("a",) * 64, "e", b"i")
    asked = PullClass(
        regions=(RegionName("l", ("k",)),),
        head_lo=0,
        head_hi=1,
        inner_nbytes=1,
        order=DenseOrder(1, True),
        token_lo=0,
        token_hi=1,
    )
    pull = msgspec.structs.replace(pull, classes=(asked,) * MAX_CLASSES)
    lists = ((pull, "claim"), (pull, "classes"), (keep, "offers"), (hello, "capabilities"))
    for message, name in lists:
        assert decode_to_source(encode(message)) == message
        longer = msgspec.structs.replace(
            message, **{name: (*getattr(message, name), getattr(message, name)[0])}
        )
        with pytest.raises(ProtocolError, match=r"Expected `array` of length <= \d+"):
            decode_to_source(encode(longer))
    verified = msgspec.structs.replace(pull, verify=Verify(1, (*pull.classes, asked)))
    with pytest.raises(ProtocolError, match=r"Expected `array` of length <= \d+.*verify"):
        decode_to_source(encode(verified))


def test_a_source_that_sends_many_parts_is_lost(engine: Engine) -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        evil = msgspec.structs.replace(
            engine.offer("x", 16, [1]), endpoint=f"tcp://127.0.0.1:{port}"
        )
        sink.load("d", evil, [1], (0, 16))
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, *[b""] * 1000])
        until(lambda: sink.received("d"))
        assert "many parts" in sink.reports("d")[0].detail


def test_a_connection_that_has_nothing_to_say_says_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its heartbeats would be taken for a message without an end, some day."""
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        offer = OfferRef(b"n" * 16, b"i" * 16)
        ref = SourceRef(
            engine_id="e", endpoint=f"tcp://127.0.0.1:{port}", offer=offer, num_tokens=16
        )
        sink.load("d", ref, [1], (0, 16))
        router.rcvtimeo = 30_000
        router.recv_multipart()  # it greets
        since_s = time.monotonic()
        clock = SimpleNamespace(monotonic=lambda: since_s + channel.WORD_S)
        monkeypatch.setattr(channel, "time", clock)
        until(lambda: decode_to_source(router.recv_multipart()[1]) == Ping())


def test_who_reads_no_answers_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And who reads them is served as long as it likes."""
    keep_penalties(monkeypatch)
    hellos = zmtp.frame(encode(Hello((1, 1), (), "e", b"i" * 16))) * 1000
    with (
        # On a busy machine the questions that nobody has read yet must not be too many first
        Engine(ONE, "prefill", fill=1, control_max_nbytes=1 << 30) as engine,
        dealer(engine.endpoint) as honest,
        closing(zmtp.connect(engine.endpoint)) as peer,
    ):
        ping(honest)  # before: who has said nothing is sent away with others of its address
        sent = 0
        while "it does not read what it asks for" not in caplog.text:
            with suppress(OSError):  # it has been sent away
                peer.sendall(hellos)
            ping(honest)
            sent += 1
            assert sent < 1000
        assert is_kept_out(engine.endpoint, AT_ONCE_S)


def test_what_is_left_of_a_connection_is_not_asked_after_for_each_message(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    recv = zmq.Socket.recv

    def counted_recv(socket: zmq.Socket[bytes], *args: Any, **how: Any) -> Any:
        looks.extend([1] * (socket.type == zmq.PAIR))  # of a monitor
        return recv(socket, *args, **how)

    ping = zmtp.frame(encode(Ping()))
    with stuck(engine):
        for _ in range(visitors.MOST_LEFT - 1):
            with closing(zmtp.connect(engine.endpoint)) as peer:
                peer.sendall(ping * 50)
        last = zmtp.connect(engine.endpoint)  # comes when all of that is there
        last.sendall(ping * 50)
        monkeypatch.setattr(zmq.Socket, "recv", counted_recv)
    with closing(last):
        for _ in range(50):
            assert last.recv(1)
        let_look(engine)
    assert len(looks) < 60, "of 400 messages"


def test_who_sends_and_goes_again_and_again_has_to_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has sent is nobody's backlog any more, and would fill the memory."""

    def send_and_go() -> None:
        with closing(zmtp.connect(engine.endpoint)) as peer:
            peer.sendall(zmtp.frame(encode(Ping())) * 20)

    for _ in range(2 * visitors.MOST_LEFT):
        send_and_go()
        until(lambda: not num_connections_of(engine))
    assert not is_kept_out(engine.endpoint)  # all of it was read at once
    penalties, penalised = guard.penalties_of(service_of(engine)._context), list[str]()
    add, listener = penalties.add, service_of(engine)._server.router

    def noted_add(address: str, now_s: float) -> None:
        add(address, now_s)
        penalised.append(address)

    monkeypatch.setattr(penalties, "add", noted_add)
    with stuck(engine):
        for _ in range(2 * visitors.MOST_LEFT):
            send_and_go()

        listener.inspect()  # on this thread, while the other stands: now it is behind

        def is_penalised() -> bool:
            listener.inspect()
            listener.visitors.meet()  # whom ZeroMQ has told of by now
            return "127.0.0.1" in penalised

        until(is_penalised)
    until(lambda: not is_kept_out(engine.endpoint, AT_ONCE_S))


@pytest.mark.parametrize("stays", [True, False])
def test_who_asks_again_and_again_for_what_it_is_not_given_has_to_wait(
    engine: Engine, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over one connection that reads the answers, or over many that have gone when their pulls are
    read. Others of the address go on.
    """
    keep_penalties(monkeypatch)
    monkeypatch.setattr(guard, "BEGUN_S", 300.0)
    monkeypatch.setattr(service_of(engine), "_inspect", lambda _: None)
    let_look(engine)  # for the last time
    pull = Pull(
        offer=engine.offer("held", 16, [1]).offer,
        consumer=Consumer(b"k" * 16, RankId(0, 0)),
        claim=(RankId(0, 0),),
        digest=b"of other tokens",
        transport="zmq",
    )
    frame = zmtp.frame(encode(pull))
    with dealer(engine.endpoint) as other:
        ping(other)
        if stays:
            with closing(zmtp.connect(engine.endpoint)) as peer:
                peer.sendall(frame * (visitors.MOST_REFUSED - 1))
                until(lambda: engine.count("refused.tokens") == visitors.MOST_REFUSED - 1)
                assert not is_kept_out(engine.endpoint)
                peer.sendall(frame)
                until(lambda: is_kept_out(engine.endpoint, AT_ONCE_S), 120)
        else:
            with stuck(engine):
                for _ in range(2 * visitors.MOST_LEFT):
                    with closing(zmtp.connect(engine.endpoint)) as peer:
                        peer.sendall(frame * 50)
            until(lambda: is_kept_out(engine.endpoint, AT_ONCE_S), 120)
        ping(other)
    engine.compute("held")


@pytest.mark.parametrize("says", ["find", "pull"])
def test_who_has_more_wait_than_may_has_to_wait_itself(
    engine: Engine, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first that is too much it is refused that one; with many it is warned, and then its
    connection ends. What waited of it is forgotten, and others go on.
    """
    keep_penalties(monkeypatch)
    monkeypatch.setattr(service_of(engine), "_inspect", lambda _: None)
    let_look(engine)  # for the last time

    def ask(first: int, last: int) -> bytes:
        names = [b"%016d" % number for number in range(first, last)]
        consumer = Consumer(b"k" * 16, RankId(0, 0))
        pulls = [
            Pull(
                offer=OfferRef(name, engine.incarnation),
                consumer=consumer,
                claim=(consumer.rank,),
                digest=b"d",
                transport="zmq",
                grows=True,
            )
            for name in names
        ]
        finds = [Find(name, consumer.incarnation, b"d") for name in names]
        return b"".join(zmtp.frame(encode(each)) for each in (finds if says == "find" else pulls))

    with dealer(engine.endpoint) as other, closing(zmtp.connect(engine.endpoint)) as peer:
        ping(other)
        beyond = MAX_EARLY + visitors.MOST_REFUSED
        peer.sendall(ask(0, beyond - 1))
        until(lambda: engine.count("refused.unknown") == visitors.MOST_REFUSED - 1)
        assert not is_kept_out(engine.endpoint)
        peer.sendall(ask(beyond - 1, beyond))
        until(lambda: is_kept_out(engine.endpoint, AT_ONCE_S), 120)
        with suppress(OSError):
            peer.sendall(ask(beyond, beyond + visitors.MOST_REFUSED))
        assert zmtp.has_ended(peer)
        ping(other)
        other.send(encode(Find(b"other", b"k" * 16, b"d")))
        until(lambda: b"other" in service_of(engine).source._parked)
        until(lambda: b"%016d" % 0 not in service_of(engine).source._parked)


BAD, GOOD = "127.0.9.1", "127.0.9.2"


@needs_socket_filters
@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("says", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64)])
def test_who_floods_a_port_is_kept_out_by_the_kernel(
    engine: Engine,
    port: str,
    says: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of both ports; what stands of it goes on, and so do others."""
    keep_penalties(monkeypatch)
    with closing(zmtp.connect(engine.endpoint, address=BAD)) as stood:
        zmtp.flood(port_of(engine, port), BAD, says)
        until(lambda: engine.count("connections.refused.flood") == 1)
        for other in PORTS:
            with pytest.raises(zmtp.KeptOut):
                zmtp.open_tcp(port_of(engine, other), address=BAD, connect_s=0.3)
            zmtp.connect(port_of(engine, other), address=GOOD).close()
        stood.sendall(zmtp.frame(encode(Ping())))
        assert stood.recv(1)
    assert f"{BAD} floods this engine with connections" in caplog.text


@needs_socket_filters
def test_who_was_kept_out_may_come_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "PENALTY_S", 0.5)
    while not engine.count("connections.refused.flood"):
        with suppress(zmtp.KeptOut):
            zmtp.open_tcp(engine.endpoint, address=BAD, connect_s=0.1).close()

    def is_let_in() -> bool:
        with suppress(zmtp.KeptOut):
            zmtp.open_tcp(engine.endpoint, address=BAD, connect_s=0.1).close()
            return True
        return False

    until(is_let_in)
    with closing(zmtp.connect(engine.endpoint, address=BAD)) as peer:
        peer.sendall(zmtp.frame(encode(Ping())))
        assert peer.recv(1)


def test_probes_of_an_idle_port_keep_nobody_out(engine: Engine) -> None:
    """Who only connects and goes leaves nothing that would have to be read."""
    let_look(engine)  # nothing had come since the look before
    for _ in range(2 * visitors.MOST_LEFT):
        with closing(zmtp.open_tcp(engine.endpoint)):
            until(lambda: num_connections_of(engine))
        until(lambda: not num_connections_of(engine))
    assert not is_kept_out(engine.endpoint)


# ------------------------------------------------------------------ who comes in


@pytest.mark.parametrize("port", PORTS)
def test_who_is_not_admitted_is_refused_at_the_handshake(
    engine: Engine,
    port: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    count_as_far(monkeypatch, "127.0.0.9".__eq__)
    for _ in range(3):
        with pytest.raises(ConnectionError, match="400"):
            zmtp.connect(port_of(engine, port), address="127.0.0.9")
    until(lambda: engine.count("connections.refused.address") == 3)
    (line,) = [each for each in caplog.messages if "was refused" in each]
    assert "127.0.0.9 was refused: expected a peer on this host" in line
    assert "allowed_peers" in line


def test_both_sides_are_told_of_allowed_peers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_tcp(monkeypatch)
    with (
        Engine(ONE, "prefill", fill=1, allowed_peers=("192.0.2.1",)) as source,
        Engine(ONE, "decode", fill=POISON, connect_timeout_s=60) as sink,
    ):
        count_as_far(monkeypatch, "127.0.0.1".__eq__)
        ref = source.offer("p", 16, [1])
        sink.load("d", ref, [1], (0, 16))
        until(lambda: sink.received("d"))
        assert "allowed_peers" in sink.reports("d")[0].detail
    assert "127.0.0.1 was refused: expected a peer on this host" in caplog.text


def _keys() -> dict[str, Any]:
    public, secret = zmq.curve_keypair()
    return {"curve_public_key": public.decode(), "curve_secret_key": secret.decode()}


@pytest.mark.parametrize("uses_unix_sockets", [True, False])
def test_data_goes_to_pinned_keys(uses_unix_sockets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not uses_unix_sockets:
        use_tcp(monkeypatch)
    prefill, decode = _keys(), _keys()
    pinned = {"prefill": prefill["curve_public_key"], "decode": decode["curve_public_key"]}
    common: dict[str, Any] = {"transport": "zmq", "curve_server_keys": pinned}
    with (
        Engine(ONE, "prefill", fill=1, **common, **prefill) as source,
        Engine(ONE, "decode", fill=POISON, **common, **decode) as sink,
    ):
        assert loads(source, sink, 2) == {None}


@pytest.mark.parametrize("port", PORTS)
def test_with_keys_nobody_comes_in_without_one_that_is_pinned(
    port: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, strange = _keys(), _keys()
    with Engine(ONE, "prefill", fill=1, transport="zmq", **ours) as source:
        endpoint = port_of(source, port)
        with pytest.raises(ConnectionError):
            zmtp.connect(endpoint)
        until(lambda: "has no CURVE key" in caplog.text)
        options = {
            "curve_serverkey": ours["curve_public_key"].encode(),
            "curve_publickey": strange["curve_public_key"].encode(),
            "curve_secretkey": strange["curve_secret_key"].encode(),
        }
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            for name, value in options.items():
                setattr(stranger, name, value)
            stranger.monitor(
                "inproc://events", zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
            )
            with context.socket(zmq.PAIR) as monitor:
                monitor.connect("inproc://events")
                stranger.connect(endpoint)  # last: what comes before somebody listens is lost
                assert monitor.poll(30_000)
                event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
            stranger.disable_monitor()
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        assert "expected a CURVE key that is pinned" in caplog.text
        until(lambda: source.count("connections.refused.key") >= 1)


@pytest.mark.parametrize("keys", [{}, _keys()], ids=["without keys", "with keys"])
def test_with_keys_a_control_port_has_no_unix_socket(keys: dict[str, Any]) -> None:
    """What is said there would travel in clear."""
    with Engine(ONE, "prefill", fill=1, transport="zmq", **keys) as source:
        found = {}
        for port in PORTS:
            name = guard.unix_endpoint(port_of(source, port)).removeprefix("ipc://@")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
                found[port] = visitor.connect_ex(f"\0{name}") == 0
    assert found == {port: port != "control" or not keys for port in PORTS}


def test_a_listener_stands_where_host_says() -> None:
    with Engine(ONE, "prefill", fill=1, transport="zmq", host="localhost") as source:
        (rank,) = source.manifest.ranks
        for endpoint in (rank.control_endpoint, *rank.data_endpoints.values()):
            assert endpoint.startswith("tcp://127.0.0.1:")


# ------------------------------------------------------------------ how many


@pytest.mark.parametrize("says", [b"", encode(Hello((1, 1), (), "x", b"i" * 16))])
def test_idle_connections_keep_nobody_out(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that never say a word nor those that said one give way too late."""
    limit_descriptors(monkeypatch, 8 * 20)
    idle: list[socket.socket] = []
    with Engine(ONE, "prefill", fill=1, transport="zmq") as source:
        try:
            for _ in range(30):
                idle.append(zmtp.connect(source.endpoint))
                if says:
                    idle[-1].sendall(zmtp.frame(says))
                    assert idle[-1].recv(1)
            until(lambda: num_connections_of(source) <= 10)
            with Engine(ONE, "decode", fill=POISON, transport="zmq") as sink:
                assert loads(source, sink, 2) == {None}
        finally:
            for each in idle:
                each.close()


@pytest.mark.parametrize(("most", "of_address"), [(4, 512), (100, 2)])
def test_who_was_silent_longest_makes_room(
    most: int, of_address: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit_descriptors(monkeypatch, 8 * most)  # two of one address
    monkeypatch.setattr(visitors, "MOST_OF_ADDRESS", of_address)
    with Engine(ONE, "prefill", fill=1) as source, ExitStack() as stack:

        def say(peer: socket.socket) -> None:
            peer.sendall(zmtp.frame(encode(Ping())))
            assert peer.recv(1 << 16)
            let_look(source)

        first, second = (
            stack.enter_context(closing(zmtp.connect(source.endpoint))) for _ in range(2)
        )
        for peer in (first, second, first):
            say(peer)
        stack.enter_context(closing(zmtp.connect(source.endpoint)))
        until(lambda: "it was silent" in caplog.text)  # not by a heartbeat that is not answered
        assert zmtp.has_ended(second)
        say(first)


# ------------------------------------------------------------------ meanwhile


def test_a_ping_is_answered_behind_a_message_of_many_parts(engine: Engine) -> None:
    """And behind parts that look like the name of another connection."""
    parts = zmtp.EMPTY_PART * 10_000 + b"\x01\x05\0abcd" * 10_000 + b"\x00\x05\0abcd"
    with closing(zmtp.connect(engine.endpoint)) as peer, dealer(engine.endpoint) as honest:
        honest.send(encode(Hello((1, 1), (), "decode", b"i" * 16)))
        assert honest.poll(30_000)
        honest.recv()
        with stuck(engine):
            peer.sendall(parts)
            for _ in range(3):
                honest.send(b"\x81\xa4type\xa4ping")
            time.sleep(0.2)
        for _ in range(3):
            assert honest.poll(30_000)
            assert isinstance(decode_to_sink(honest.recv()), Pong)


def test_a_pull_over_an_unknown_wire_is_refused_for_what_is_looked_at_first(engine: Engine) -> None:
    """Its tokens here, also where it grows with the offer."""
    ref = engine.offer("r", 16, range(1)).offer
    pull = Pull(
        offer=ref,
        consumer=Consumer(b"s" * 16, RankId(0, 0)),
        claim=(RankId(0, 0),),
        digest=b"of other tokens",
        transport="none of ours",
        grows=True,
    )
    with dealer(engine.endpoint) as stranger:
        stranger.send(encode(pull))
        assert stranger.poll(30_000)
        answer = decode_to_sink(stranger.recv())
    assert isinstance(answer, Refuse)
    assert answer.reason is Reason.TOKENS
