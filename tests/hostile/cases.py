"""What a hostile peer does to the ports of a source, as a table, and how one case is carried out.

A case says what is sent, to which port, from where, with which key, and what it may cost. ``fate``
is what comes of the connection that it is sent over.
"""

from __future__ import annotations

import enum
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Literal

import msgspec
import zmq

from kvxfer.transfer.manifest import MAX_RANKS, RankId
from kvxfer.transfer.wire import (
    Cancel,
    Consumer,
    Drain,
    Find,
    Hello,
    Keep,
    OfferRef,
    Ping,
    Pull,
    Reason,
    Release,
    encode,
)
from kvxfer.transports import stream_wire
from tests import zmtp

WAIT_S = 60
DEEP = b"\x91" * 60_000
_LIFE = b"a stranger's own"
_HELLO = encode(Hello((1, 1), (), "stranger", _LIFE))


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where a source listens, and what an attacker has found out: an open offer by its names, but
    not its digest, and the life of the sink that it is for.
    """

    control: str
    data: str
    nonce: bytes
    incarnation: bytes
    sink_life: bytes
    keys: tuple[str, ...] = ()

    @property
    def offer(self) -> OfferRef:
        """Of a request that another engine will load."""
        return OfferRef(self.nonce, self.incarnation)


class Fate(enum.StrEnum):
    """What comes of a hostile connection."""

    REFUSED = "refused"  # at the handshake
    ENDED = "ended"  # by the source
    ANSWERED = "answered"  # it goes on, and is answered
    SILENT = "silent"  # it goes on; nothing it has sent is answered


Port = Literal["control", "data"]
Origin = Literal["loopback", "afar"]
Key = Literal["none", "strange", "pinned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attack.

    ``sends``: the bytes that follow the handshake (``is_raw``: instead of it) on each of ``number``
    connections. ``keys``: whether the source has CURVE keys. ``counts``: counters of the source
    that each round moves. ``waits``: the end comes with the handshake's time-out. ``may_end``: the
    source may end it, too; how much the kernel's buffers hold decides.
    """

    name: str
    fate: Fate
    sends: Callable[[Target], Iterator[bytes]] = lambda _: iter(())
    port: Port = "control"
    origin: Origin = "loopback"
    keys: bool = False
    key: Key = "none"
    is_raw: bool = False
    number: int = 1
    counts: tuple[str, ...] = ()
    waits: bool = False
    may_end: bool = False
    slow: bool = False


# ------------------------------------------------------------------ what is sent


def _raw(*pieces: bytes) -> Callable[[Target], Iterator[bytes]]:
    return lambda _: iter(pieces)


def _said(*messages: bytes) -> Callable[[Target], Iterator[bytes]]:
    return lambda _: map(zmtp.frame, messages)


def _parts(_: Target) -> Iterator[bytes]:
    yield zmtp.EMPTY_PART * 20_000 + zmtp.EMPTY_END


def _endless(_: Target) -> Iterator[bytes]:
    while True:
        yield zmtp.EMPTY_PART * 65_536


def _unread(_: Target) -> Iterator[bytes]:
    yield from [zmtp.frame(_HELLO) * 100] * 60


def _pull(target: Target, life: bytes, digest: bytes = b"guessed") -> Pull:
    return Pull(
        offer=target.offer,
        consumer=Consumer(life, RankId(0, 0)),
        claim=(RankId(0, 0),),
        digest=digest,
        transport="zmq",
        chunk_nbytes=1 << 20,
    )


def _forged(target: Target) -> Iterator[bytes]:
    """All that can be said of an offer by who knows its nonce and the life of its sink."""
    for life in (_LIFE, target.sink_life):
        consumer = Consumer(life, RankId(0, 0))
        for message in (
            _pull(target, life),
            Release(target.offer, consumer),
            Cancel(target.offer, life, Reason.CANCELLED, b"guessed"),
            Cancel(target.offer, life, Reason.CANCELLED),
            Keep((target.offer,) * 64, life, 86400.0, {target.nonce: b"guessed"}),
        ):
            yield zmtp.frame(encode(message))


def _about_nothing(_: Target) -> Iterator[bytes]:
    """The same of an offer that is not there."""
    nobody = Target(control="", data="", nonce=b"n" * 16, incarnation=_LIFE, sink_life=_LIFE)
    return _forged(nobody)


def _finds(target: Target) -> Iterator[bytes]:
    """More than one connection may wait for."""
    for number in range(2000):
        yield zmtp.frame(encode(Find(b"%016d" % number, _LIFE, b"d" * 32)))


def _early_pulls(target: Target) -> Iterator[bytes]:
    for number in range(2000):
        pull = _pull(target, _LIFE)
        offer = OfferRef(b"%016d" % number, target.incarnation)
        early = msgspec.structs.replace(pull, offer=offer, grows=True)
        yield zmtp.frame(encode(early))


def _long_claim(target: Target) -> Iterator[bytes]:
    """A claim of a million ranks, in 3 MB."""
    fields = msgspec.msgpack.decode(encode(_pull(target, _LIFE)))
    rank = msgspec.msgpack.encode(RankId(0, 0))
    fields["claim"] = msgspec.Raw(b"\xdd" + (1_000_000).to_bytes(4, "big") + rank * 1_000_000)
    yield zmtp.frame(msgspec.msgpack.encode(fields)) * 2


def _widest_claims(target: Target) -> Iterator[bytes]:
    """Claims of as many ranks as are heard, each of another engine, over and over."""
    claim = tuple(RankId(0, rank) for rank in range(MAX_RANKS))
    for number in range(40):
        pull = msgspec.structs.replace(_pull(target, number.to_bytes(16, "big")), claim=claim)
        yield zmtp.frame(encode(pull))


def _data(*messages: stream_wire.ToSource) -> Callable[[Target], Iterator[bytes]]:
    return _said(*map(stream_wire.encode, messages))


_ATTACH = stream_wire.Attach(stream_wire.STREAM_VERSION, 2, 1 << 20, "zmq")
_TRIAL_ATTACH = msgspec.structs.replace(_ATTACH, slot_nbytes=4 << 20, is_trial=True)
_TRIAL = stream_wire.AskTrial(64 << 10)
_READY = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Ide"
_OTHER_MECHANISM = zmtp.GREETING[:12] + b"PLAIN".ljust(20, b"\0") + zmtp.GREETING[32:]
_ENDED, _REFUSED, _ANSWERED, _SILENT = Fate.ENDED, Fate.REFUSED, Fate.ANSWERED, Fate.SILENT
_PORTS: tuple[Port, ...] = ("control", "data")
_AT_PORT = {"control": "at the control port", "data": "at a data port"}


def _of_both_ports() -> Iterator[Case]:
    for port in _PORTS:
        where = _AT_PORT[port]
        yield Case(
            name=f"garbage {where}",
            port=port,
            fate=_ENDED,
            is_raw=True,
            sends=_raw(bytes(range(256)) * 16),
        )
        yield Case(
            name=f"a request of HTTP {where}",
            port=port,
            fate=_ENDED,
            is_raw=True,
            sends=_raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64)),
        )
        yield Case(
            name=f"another mechanism {where}",
            port=port,
            fate=_ENDED,
            is_raw=True,
            sends=_raw(_OTHER_MECHANISM),
        )
        yield Case(
            name=f"half a greeting {where}",
            port=port,
            fate=_ENDED,
            is_raw=True,
            waits=True,
            sends=_raw(zmtp.GREETING[:20]),
        )
        yield Case(
            name=f"half a handshake {where}",
            port=port,
            fate=_ENDED,
            is_raw=True,
            waits=True,
            sends=_raw(zmtp.GREETING, _READY),
        )
        yield Case(name=f"a part flood {where}", port=port, fate=_ENDED, sends=_parts)
        yield Case(name=f"a message without an end {where}", port=port, fate=_ENDED, sends=_endless)
        yield Case(
            name=f"a huge frame {where}",
            port=port,
            fate=_ENDED,
            sends=_raw(b"\x02" + ((64 << 20) + 1).to_bytes(8, "big") + bytes(1000)),
        )
        yield Case(
            name=f"an address that is not admitted {where}",
            port=port,
            fate=_REFUSED,
            origin="afar",
            counts=("connections.refused.address",),
        )
        yield Case(name=f"no key {where}", port=port, fate=_REFUSED, keys=True)
        yield Case(
            name=f"a strange key {where}",
            port=port,
            fate=_REFUSED,
            keys=True,
            key="strange",
            counts=("connections.refused.key",),
        )
        yield Case(
            name=f"a strange key from afar {where}",
            port=port,
            fate=_REFUSED,
            keys=True,
            key="strange",
            origin="afar",
            counts=("connections.refused.key",),
        )
        yield Case(
            name=f"half a greeting with keys {where}",
            port=port,
            fate=_ENDED,
            keys=True,
            is_raw=True,
            waits=True,
            sends=_raw(zmtp.GREETING[:20]),
        )
        yield Case(
            name=f"garbage with keys {where}",
            port=port,
            fate=_ENDED,
            keys=True,
            is_raw=True,
            sends=_raw(bytes(range(256)) * 16),
        )
        yield Case(
            name=f"garbage from afar {where}",
            port=port,
            fate=_ENDED,
            is_raw=True,
            origin="afar",
            sends=_raw(bytes(range(256)) * 16),
        )
        yield Case(name=f"300 idle connections {where}", port=port, fate=_SILENT, number=300)
        yield Case(
            name=f"10,000 connections {where}",
            port=port,
            fate=_REFUSED,
            number=10_000,
            counts=("connections.refused.penalty",),
            slow=True,
        )


CASES = (
    *_of_both_ports(),
    Case(name="deep msgpack", fate=_ANSWERED, sends=_said(DEEP), counts=("control.malformed",)),
    Case(name="two long messages that are none", fate=_ENDED, sends=_said(DEEP * 2, DEEP * 2)),
    Case(name="messages longer than allowed", fate=_ENDED,
         sends=_said(bytes(5 << 20), bytes(5 << 20)), counts=("control.oversized",)),
    Case(name="a claim of a million ranks", fate=_ENDED, sends=_long_claim,
         counts=("control.malformed",)),
    Case(name="the widest claims", fate=_ANSWERED, sends=_widest_claims,
         counts=("refused.tokens",)),
    Case(name="a slow reader", fate=_SILENT, sends=_unread, may_end=True,
         counts=("control.dropped",)),
    Case(name="forged messages about an offer", fate=_ANSWERED, sends=_forged,
         counts=("refused.tokens", "verdict.plan", "cancel.not_granted", "keep.not_granted")),
    Case(name="forged messages about nothing", fate=_ANSWERED, sends=_about_nothing,
         counts=("refused.incarnation", "cancel.incarnation", "keep.incarnation")),
    Case(name="finds of what never comes", fate=_ANSWERED, sends=_finds,
         counts=("refused.unknown",)),
    Case(name="early pulls of what never comes", fate=_ANSWERED, sends=_early_pulls,
         counts=("refused.unknown",)),
    Case(name="a stolen identity", fate=_ANSWERED,
         sends=lambda target: iter([zmtp.frame(encode(_pull(target, target.sink_life)))] * 50),
         counts=("refused.tokens",)),
    Case(name="a drain", fate=_ANSWERED, sends=_said(encode(Drain())),
         counts=("control.not_own",)),
    Case(name="a drain with another's key", fate=_ANSWERED, keys=True, key="pinned",
         sends=_said(encode(Drain())), counts=("control.not_own",)),
    Case(name="another version", fate=_ANSWERED,
         sends=_said(encode(Hello((7, 9), ("unknown",), "stranger", _LIFE)))),
    Case(name="forged messages with a pinned key", fate=_ANSWERED, keys=True, key="pinned",
         sends=_forged, counts=("refused.tokens", "cancel.not_granted")),
    Case(name="deep msgpack with a pinned key", fate=_ANSWERED, keys=True, key="pinned",
         sends=_said(DEEP), counts=("control.malformed",)),
    Case(name="deep msgpack at a data port", port="data", fate=_ANSWERED,
         sends=_said(DEEP[:20_000]), counts=("zmq.malformed",)),
    Case(name="an attach of another version", port="data", fate=_ANSWERED,
         sends=_data(msgspec.structs.replace(_ATTACH, version=99)),
         counts=("zmq.malformed",)),
    Case(name="an attach of a native library", port="data", fate=_ANSWERED,
         sends=_data(msgspec.structs.replace(_ATTACH, pipe="ucx", address=b"\xff" * 4000)),
         counts=("zmq.malformed",)),
    Case(name="an attach of terabytes", port="data", fate=_ANSWERED,
         sends=_data(msgspec.structs.replace(_ATTACH, num_slots=1 << 40, slot_nbytes=1 << 60)),
         counts=("zmq.malformed",)),
    Case(name="an attach below nothing", port="data", fate=_ANSWERED,
         sends=_data(msgspec.structs.replace(_ATTACH, num_slots=-4, slot_nbytes=-1)),
         counts=("zmq.malformed",)),
    Case(name="credits of nobody", port="data", fate=_ANSWERED,
         sends=_data(stream_wire.Credit((0, 1, 1 << 60, -5))),
         counts=("zmq.not_attached",)),
    Case(name="credits for no chunk", port="data", fate=_SILENT,
         sends=_data(_ATTACH, stream_wire.Credit((0, 1, 1 << 60, -5))),
         counts=("zmq.unknown_credit",)),
    Case(name="more attached sinks than are served", port="data", fate=_SILENT, number=1100,
         slow=True, sends=_data(_ATTACH), counts=("zmq.sent_away",)),
    Case(name="trials without an end", port="data", fate=_ANSWERED,
         sends=_data(_TRIAL_ATTACH, *[_TRIAL] * 50),
         counts=("zmq.malformed",)),
)  # fmt: skip


# ------------------------------------------------------------------ one case


def address_of(case: Case, number: int) -> str:
    """Of the attacker: penalties are by address. What comes from 127.1 is taken for afar."""
    return f"127.{'1' if case.origin == 'afar' else '0'}.{number // 250}.{number % 250 + 2}"


def attack(case: Case, target: Target, address: str, wait_s: float = WAIT_S) -> Fate:
    """Carry one round out, and say what came of its connections. ``wait_s``: for an answer."""
    endpoint = target.control if case.port == "control" else target.data
    if case.key != "none":
        return _attack_with_key(case, target, endpoint, address)
    with ExitStack() as stack:
        peers = []
        for _ in range(case.number):
            try:
                peer = (zmtp.open_tcp if case.is_raw else zmtp.connect)(
                    endpoint, wait_s, address=address
                )
            except ConnectionError:
                return Fate.REFUSED
            peers.append(stack.enter_context(closing(peer)))
            try:
                for piece in case.sends(target):
                    peer.sendall(piece)
            except OSError:
                return Fate.ENDED
        return _fate(case, peers)


def _fate(case: Case, peers: list[socket.socket]) -> Fate:
    first = peers[0]
    if case.fate is Fate.ENDED:
        return Fate.ENDED if zmtp.has_ended(first) else Fate.SILENT
    if case.fate is Fate.SILENT:
        return Fate.SILENT
    try:
        first.sendall(zmtp.frame(encode(Ping()) if case.port == "control" else b"x"))
        if case.port == "data":
            first.sendall(zmtp.frame(stream_wire.encode(_TRIAL)))
        return Fate.ANSWERED if first.recv(1) else Fate.ENDED
    except TimeoutError:
        return Fate.SILENT
    except OSError:
        return Fate.ENDED


def _attack_with_key(case: Case, target: Target, endpoint: str, address: str) -> Fate:
    """As a DEALER. A pinned key was stolen from the source itself."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    *stolen, server = target.keys
    if case.key == "pinned":
        public, secret = stolen
    host = endpoint.removeprefix("tcp://")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.curve_publickey, dealer.curve_secretkey = public.encode(), secret.encode()
        dealer.curve_serverkey = server.encode()
        monitor = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        dealer.connect(f"tcp://{address}:0;{host}")
        try:
            if not monitor.poll(WAIT_S * 1000):
                return Fate.SILENT
            event = struct.unpack("=H", monitor.recv_multipart()[0][:2])[0]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return Fate.REFUSED
            for piece in case.sends(target):
                dealer.send(_content(piece))
            dealer.send(encode(Ping()))
            return Fate.ANSWERED if dealer.poll(WAIT_S * 1000) else Fate.SILENT
        finally:
            dealer.disable_monitor()
            monitor.close(linger=0)


def _content(piece: bytes) -> bytes:
    """What is in a frame of ZMTP."""
    return piece[9:] if piece[0] & 2 else piece[2:]


def repeat(case: Case, target: Target, address: str, on_round: Callable[[], object]) -> None:
    """Round after round until the process is ended: as an attacker that comes back at once."""
    while True:
        try:
            attack(case, target, address)
        except OSError:
            time.sleep(0.01)
        on_round()
