"""The request channel: bad frames are refused and counted, lost engines are noticed."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.config import Config
from kvxfer.engine.rpc import (
    Abort,
    Ask,
    Done,
    Generate,
    RequestRefused,
    RpcClient,
    RpcServer,
    ToClient,
    ToEngine,
    Token,
)
from kvxfer.errors import ConfigError, PeerLost, ProtocolError
from kvxfer.transfer import wire
from kvxfer.transports import guard
from kvxfer.transports.key_folder import ADD, USE, make_keys, rotate_keys
from kvxfer.transports.visitors import LOOK_S, MESSAGES_PER_TURN
from tests import zmtp
from tests.connector.rig import until
from tests.helpers import free_port, needs_socket_filters
from tests.rpc_messages import DONE, INFO
from tests.wiretap import Wiretap


class Engine:
    """Answers Ask, keeps everything else."""

    def __init__(self, port: int = 0, kv: Config | None = None) -> None:
        self.heard: list[ToEngine] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.server = RpcServer(self._context, "127.0.0.1", port, kv)
        self.endpoint = self.server.endpoint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                self.server.socket.poll(20)
                for client, message in self.server.receive():
                    self._answer(client, message)
        finally:
            self.server.close()

    def _answer(self, client: bytes, message: ToEngine) -> None:
        if isinstance(message, Ask):
            self.server.send(client, INFO)
        elif isinstance(message, Generate):
            self.server.send(client, Token(message.request_id, 7, 0.5))
            self.server.send(client, DONE)
        self.heard.append(message)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.term()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.stop()


def test_a_request_and_its_answers(engine: Engine) -> None:
    with RpcClient(engine.endpoint, connect_timeout_s=60) as client:
        assert client.info == INFO
        client.send(Generate("a", (1, 2, 3), 4, {"do_remote_decode": True}))
        answers: list[ToClient] = []
        while len(answers) < 2:
            answers += client.poll(60)
        client.send(Abort("a"))
        client.ask(5)
    assert answers == [Token("a", 7, 0.5), DONE]
    assert engine.heard[1:3] == [
        Generate("a", (1, 2, 3), 4, {"do_remote_decode": True}),
        Abort("a"),
    ]


def raw_client(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.connect(endpoint)
    return socket


GOOD = msgspec.msgpack.encode(Generate("a", (1, 2), 3))
MALFORMED = [
    b"",
    b"\xc1",
    b"\x00",
    b"\xff" * 100,
    GOOD[:-1],
    GOOD + b"\x00",
    b"\x91" * 5000,  # nested deeper than the interpreter's stack
    msgspec.msgpack.encode({"type": "pickle"}),
    msgspec.msgpack.encode({"type": "generate"}),
    msgspec.msgpack.encode({"type": "generate", "request_id": 1, "prompt_token_ids": [1]}),
    msgspec.msgpack.encode(["generate"]),
    msgspec.msgpack.encode({"type": "abort", "request_id": None}),
    b"\x81\xa4type\xa8generat\xff",  # not UTF-8
]


def test_malformed_frames_are_answered_and_counted(engine: Engine) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, raw_client(context, engine.endpoint) as socket:
        for number, frame in enumerate(MALFORMED, start=1):
            socket.send(frame)
            answer = msgspec.msgpack.decode(socket.recv(), type=RequestRefused)
            assert answer.request_id == ""
            assert answer.error.startswith("request frame: ")
            assert engine.server.num_malformed == number
        socket.send_multipart([GOOD, GOOD])
        answer = msgspec.msgpack.decode(socket.recv(), type=RequestRefused)
        assert answer.error == "request frame: expected 1 frame, got 2"
        socket.send(GOOD)
        assert msgspec.msgpack.decode(socket.recv(), type=Token) == Token("a", 7, 0.5)


def test_mutated_frames_never_stop_the_listener(engine: Engine) -> None:
    rng = random.Random(5)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, raw_client(context, engine.endpoint) as socket:
        for _ in range(300):
            frame = bytearray(GOOD)
            for _ in range(rng.randint(1, 4)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            socket.send(bytes(frame[: rng.randint(0, len(frame))]))
        socket.send(msgspec.msgpack.encode(Ask()))
        while b"info" not in socket.recv():
            pass
    assert engine.server.num_malformed > 100


def test_a_peer_that_speaks_no_zmq_is_dropped(engine: Engine) -> None:
    import socket as sockets

    host, port = engine.endpoint.removeprefix("tcp://").split(":")
    with sockets.create_connection((host, int(port)), timeout=120) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\x00" * 4000)
    with RpcClient(engine.endpoint, connect_timeout_s=60) as client:
        assert client.info == INFO


def test_who_sends_without_an_end_is_heard_in_turns() -> None:
    """Between two of them the engine makes a step."""
    num_sent, most = 20_000, 0
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = RpcServer(context, "127.0.0.1", 0)
    with raw_client(context, server.endpoint) as socket:
        for number in range(num_sent):
            socket.send(msgspec.msgpack.encode(Abort(str(number))))
        heard: list[ToEngine] = []
        while len(heard) < num_sent:
            assert server.socket.poll(120_000)
            messages = server.receive()
            most = max(most, len(messages))
            heard += [message for _, message in messages]
    assert heard == [Abort(str(number)) for number in range(num_sent)]
    assert 0 < most <= MESSAGES_PER_TURN
    server.close()
    context.term()


def test_who_asks_and_does_not_read_is_sent_away(engine: Engine) -> None:
    """And nobody else is."""
    asks = zmtp.frame(msgspec.msgpack.encode(Ask())) * 1000
    with (
        RpcClient(engine.endpoint, connect_timeout_s=60) as client,
        zmtp.connect(engine.endpoint) as peer,
    ):
        for _ in range(100):
            peer.sendall(asks)
        end = select.poll()
        end.register(peer, select.POLLRDHUP)
        assert end.poll(120_000)
        assert client.ask(30) == INFO


def test_a_message_without_an_end_is_ended(engine: Engine) -> None:
    """ZeroMQ collects its parts, and nothing can be read meanwhile."""
    assert engine.server.wait_ms is None
    part = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
    with RpcClient(engine.endpoint, connect_timeout_s=60) as client:
        assert engine.server.wait_ms == round(LOOK_S * 1000)
        with zmtp.connect(engine.endpoint) as peer, pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(1000):
                peer.sendall(part)
        assert client.ask(30) == INFO


@needs_socket_filters
def test_it_looks_until_who_was_kept_out_is_let_in(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody is connected."""
    monkeypatch.setattr(guard, "PENALTY_S", 4.0)  # longer than the kernel needs to try again
    assert engine.server.wait_ms is None
    zmtp.flood(engine.endpoint, "127.0.9.1")
    until(lambda: engine.server.wait_ms is None)
    zmtp.connect(engine.endpoint, address="127.0.9.1").close()


@given(
    st.text(max_size=20),
    st.lists(st.integers(0, 2**32 - 1), max_size=8),
    st.integers(1, 2**31),
)
def test_generate_survives_the_journey(name: str, tokens: list[int], max_new: int) -> None:
    message = Generate(name, tuple(tokens), max_new)
    decoder = msgspec.msgpack.Decoder(Generate | Abort | Ask)
    assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_a_port_in_use_is_named(engine: Engine) -> None:
    port = int(engine.endpoint.rpartition(":")[2])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, pytest.raises(ConfigError, match=f"cannot bind 127.0.0.1:{port}: .*in use"):
        RpcServer(context, "127.0.0.1", port)


def test_nobody_there_is_an_error_within_the_deadline() -> None:
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"no answer within 0.3 s; is it running, and can its port"):
        RpcClient(f"tcp://127.0.0.1:{free_port()}", connect_timeout_s=0.3)
    assert time.monotonic() - started_s < 100


def test_a_wrong_endpoint_is_named() -> None:
    with pytest.raises(ConfigError, match="expected tcp://host:port, got 'nowhere'"):
        RpcClient("nowhere", connect_timeout_s=0.3)


def test_an_engine_that_goes_is_noticed_after_its_last_words() -> None:
    engine = Engine()
    with RpcClient(engine.endpoint, connect_timeout_s=60) as client:
        client.send(Generate("a", (1,), 1))
        while len(engine.heard) < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        engine.stop()
        answers: list[ToClient] = []
        with pytest.raises(PeerLost, match="the connection ended"):  # noqa: PT012
            for _ in range(100):
                answers += client.poll(60)
    assert answers == [Token("a", 7, 0.5), DONE]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (b"hello", r"is it a kvxfer engine\?"),
        (
            wire.encode(wire.Malformed("control frame: Invalid value 'ask'")),
            "expected the port where it takes requests, got that of its KV",
        ),
    ],
)
def test_something_that_takes_no_requests(said: bytes, sentence: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            client, _ = router.recv_multipart()
            router.send_multipart([client, said])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match=sentence):
            RpcClient(f"tcp://127.0.0.1:{port}", connect_timeout_s=60)
        thread.join()


# ------------------------------------------------------------------ CURVE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def with_keys(folder: Path) -> Config:
    return Config(curve_keys_dir=str(folder))


@pytest.mark.parametrize("has_keys", [False, True])
def test_prompts_cannot_be_read_with_keys(has_keys: bool, folder: Path) -> None:
    kv = with_keys(folder) if has_keys else None
    engine = Engine(kv=kv)
    tap = Wiretap()
    with RpcClient(tap.beside(engine.endpoint), connect_timeout_s=60, kv=kv) as client:
        client.send(Generate("a-name-of-a-request", (1, 2, 3), 4))
        while not any(isinstance(message, Done) for message in client.poll(60)):
            pass
    engine.stop()
    tap.close()
    heard = tap.heard[engine.endpoint]
    assert len(heard) > 500
    assert (b"a-name-of-a-request" in heard) is not has_keys


def test_an_engine_serves_both_keys_of_a_rotation(folder: Path) -> None:
    old = Engine(kv=with_keys(folder))
    for step in (ADD, USE):
        rotate_keys(folder, step)
    new = Engine(kv=with_keys(folder))
    for engine in (old, new):
        with RpcClient(engine.endpoint, connect_timeout_s=60, kv=with_keys(folder)) as client:
            assert client.info == INFO
        engine.stop()


@pytest.mark.parametrize("client", ["another folder", "no keys", "keys, and the engine has none"])
def test_another_key_is_one_sentence(client: str, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_keys(other)
    engine = Engine(kv=None if "none" in client else with_keys(folder))
    kv = None if client == "no keys" else with_keys(other)
    with pytest.raises(PeerLost, match="with the CURVE keys of this side"):
        RpcClient(engine.endpoint, connect_timeout_s=60, kv=kv)
    engine.stop()
