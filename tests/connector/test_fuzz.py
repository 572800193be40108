"""Whatever comes in on the control port is answered and counted, and never ends the listener."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.wire import (
    Broken,
    Cancel,
    Consumer,
    Grant,
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
    Release,
    ToSource,
    Verdict,
    decode_to_sink,
    encode,
)
from tests.builders import EngineShape
from tests.connector.rig import Engine, until

ONE = EngineShape(num_kv_heads=2, num_blocks=8)
MAX_NBYTES = 64 << 10

ids = st.binary(min_size=1, max_size=64)
ranks = st.builds(RankId, st.integers(0, 3), st.integers(0, 3))
offers = st.builds(OfferRef, ids, ids)
consumers = st.builds(Consumer, ids, ranks)
messages = st.one_of(
    st.builds(Hello, st.just((1, 1)), st.just(()), st.text(max_size=20), ids),
    st.builds(
        Pull,
        offer=offers,
        consumer=consumers,
        claim=st.lists(ranks, max_size=4).map(tuple),
        digest=st.binary(max_size=64),
        transport=st.sampled_from(["shm", "zmq", "null", "", "nixl"]),
        is_null=st.booleans(),
        chunk_nbytes=st.integers(0, 1 << 40),
    ),
    st.builds(Release, offers, consumers),
    st.builds(Cancel, offers, ids, st.sampled_from(Reason)),
    st.builds(Keep, st.lists(offers, max_size=4).map(tuple), ids, st.floats(0, 86400)),
    st.just(Ping()),
)
junk = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.text(), st.binary()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)
        ),
        max_leaves=10,
    ).map(lambda value: msgspec.msgpack.encode(value) if _fits(value) else b"\xc1"),
    st.sampled_from(["hello", "pull", "grant", "nonsense", ""]).map(
        lambda tag: msgspec.msgpack.encode({"type": tag})
    ),
)


def _fits(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, ValueError):
        return False
    return True


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good message, cut short, lengthened, or with a byte changed."""
    frame = encode(draw(messages))
    position = draw(st.integers(0, len(frame) - 1))
    match draw(st.sampled_from(["cut", "longer", "changed"])):
        case "cut":
            return frame[:position]
        case "longer":
            return frame + draw(st.binary(min_size=1, max_size=8))
        case _:
            changed = draw(st.binary(min_size=1, max_size=1))
            return frame[:position] + changed + frame[position + 1 :]


@pytest.fixture(scope="module")
def listener() -> Iterator[Engine]:
    with Engine(ONE, "prefill", fill=1, control_max_nbytes=MAX_NBYTES) as engine:
        yield engine


@pytest.fixture(scope="module")
def dealer(listener: Engine) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(listener.endpoint)
    yield socket
    socket.close()
    context.term()


def _answers(socket: zmq.Socket[bytes]) -> list[object]:
    """Everything up to the answer to a last message, which proves that the listener goes on. No
    other answer can be taken for it: a damaged Hello may still be one.
    """
    last = OfferRef(secrets.token_bytes(16), b"the last one")
    socket.send(encode(Release(last, Consumer(b"fuzz", RankId(0, 0)))))
    answers: list[object] = []
    while True:
        assert socket.poll(120_000), "the listener is gone"
        answer = decode_to_sink(socket.recv())
        if isinstance(answer, Verdict) and answer.offer == last:
            return answers
        answers.append(answer)


@given(frames=st.lists(st.one_of(junk, damaged()), min_size=1, max_size=20))
@settings(max_examples=60)
def test_noise_is_answered_and_counted(
    listener: Engine, dealer: zmq.Socket[bytes], frames: list[bytes]
) -> None:
    before = _refusals(listener)
    for frame in frames:
        dealer.send(frame)
    answers = _answers(dealer)
    num_malformed = sum(isinstance(answer, Malformed) for answer in answers)
    assert _refusals(listener) - before == num_malformed
    # A damaged frame may still be a message; then it is answered as one.
    expected = (Malformed, Manifest, Refuse, Verdict, Pong)
    assert all(isinstance(answer, expected) for answer in answers)
    assert len(answers) <= len(frames)


def _refusals(listener: Engine) -> int:
    counts = listener.take_stats().counts
    assert counts.get("io.errors", 0) == 0
    names = ("control.malformed", "control.oversized", "control.out_of_state")
    return sum(counts.get(name, 0) for name in names)


@given(batch=st.lists(messages, min_size=1, max_size=10))
def test_well_formed_messages_about_nothing_are_refused(
    listener: Engine, dealer: zmq.Socket[bytes], batch: list[ToSource]
) -> None:
    for message in batch:
        dealer.send(encode(message))
    answers = _answers(dealer)
    wanted = {Hello: Manifest, Pull: Refuse, Release: Verdict, Ping: Pong}
    expected = [wanted[type(message)] for message in batch if type(message) in wanted]
    assert [type(answer) for answer in answers] == expected
    for answer in answers:
        if isinstance(answer, Refuse | Verdict):
            assert answer.reason in (Reason.UNKNOWN, Reason.INCARNATION)
        if isinstance(answer, Verdict):
            assert not answer.valid
    _refusals(listener)


@given(messages=st.lists(messages, min_size=1, max_size=20), noise=st.lists(damaged(), max_size=5))
def test_messages_about_a_live_offer_never_hurt_the_listener(
    listener: Engine,
    dealer: zmq.Socket[bytes],
    messages: list[ToSource],
    noise: list[bytes],
) -> None:
    ref = listener.offer("p", 16, [1])
    listener.compute("p")
    for message in messages:
        if isinstance(message, Pull | Release | Cancel):
            message = msgspec.structs.replace(message, offer=ref.offer)
        elif isinstance(message, Keep):
            message = msgspec.structs.replace(message, offers=(ref.offer,))
        if not isinstance(message, Hello):
            dealer.send(encode(message))
    for frame in noise:
        dealer.send(frame)
    answers = _answers(dealer)
    possible = (Malformed, Manifest, Refuse, Verdict, Pong, Grant, Broken)
    assert all(isinstance(answer, possible) for answer in answers)
    listener.end("p")
    until(lambda: _is_sent(listener))
    _drain(dealer)
    _refusals(listener)


def _is_sent(listener: Engine) -> bool:
    listener.collect()
    return not listener.workers[0].has_pending()


def _drain(socket: zmq.Socket[bytes]) -> None:
    while socket.poll(5):
        socket.recv()


@pytest.mark.parametrize("extra_nbytes", [1, 1 << 20])
def test_an_oversized_frame_is_answered(extra_nbytes: int) -> None:
    with (
        Engine(ONE, "prefill", fill=1, control_max_nbytes=MAX_NBYTES) as listener,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.linger = 0
        dealer.connect(listener.endpoint)
        dealer.send(secrets.token_bytes(MAX_NBYTES + extra_nbytes))
        (answer,) = _answers(dealer)
        assert isinstance(answer, Malformed)
        assert f"at most {MAX_NBYTES} bytes, got {MAX_NBYTES + extra_nbytes}" in answer.detail
        assert listener.count("control.oversized") == 1


@pytest.mark.parametrize("parts", [[b""], [b"", b""], [b"", encode(Ping())], [encode(Ping())] * 3])
def test_several_parts_are_answered(
    listener: Engine, dealer: zmq.Socket[bytes], parts: list[bytes]
) -> None:
    dealer.send_multipart(parts)
    (answer,) = _answers(dealer)
    assert isinstance(answer, Malformed)


def test_a_sink_survives_noise_from_its_source() -> None:
    """A source that answers nonsense costs its own loads, and nothing else."""
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        Engine(ONE, "decode", fill=1) as sink,
        Engine(ONE, "prefill", fill=1) as source,
    ):
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        liar = msgspec.structs.replace(
            source.offer("x", 16, [1]), endpoint=f"tcp://127.0.0.1:{port}"
        )
        sink.load("lied to", liar, [1], (0, 16))
        identity, _ = router.recv_multipart()
        for answer in (b"", b"\xc1", encode(Ping()), b"x" * 100, encode(Pong(b"i"))):
            router.send_multipart([identity, answer])
        router.send_multipart([identity, b"", b""])
        router.send_multipart([identity, encode(_lie(source))])
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [1], (0, 16))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        until(lambda: sink.received("lied to"))
        assert sink.reasons("lied to") == {"incompatible"}
        assert sink.count("control.malformed") == 5


def _lie(source: Engine) -> Manifest:
    """A manifest that does not make sense."""
    return Manifest(msgspec.structs.replace(source.manifest, incarnation=b"short"))
