"""What a hostile peer does to the ports of a source, as a table, and how one case is carried out.

A case says what is sent, to which port, from where, with which key, and what it may cost. ``fate``
is what comes of the connection that it is sent over.
"""

from __future__ import annotations

import dataclasses
import enum
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import zmq

from kvxfer.config import Config
from kvxfer.connector.control import BEYOND_NBYTES
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
from kvxfer.transports.stream_source import BEHIND_NBYTES
from kvxfer.transports.visitors import LOOK_S, MOST_OF_ADDRESS
from tests import zmtp, zmtp_curve

WAIT_S = 60
LISTEN_S = 0.02
PUT_OFF_S = 5.0
"""ZeroMQ keeps a connection that is told to come later until its handshake has lasted too long, and
says nothing. 250 a second are answered.
"""
SOON_S = 0.2
"""Who comes again at once does not wait for longer until a connection stands."""
DEEP = b"\x91" * 60_000
FEW_NBYTES = 16 << 20
"""Of memory, in which some connections and short messages have room."""
SOME_NBYTES = 48 << 20
"""The same for messages of megabytes, and for what waits for an offer: 8 MiB of a connection."""
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
class Setting:
    """Who attacks which source. ``keys``: whether the source has CURVE keys. ``key``: which one the
    attacker has; a pinned one was stolen from the source's peer. ``slow``: most cases run here in
    the slow suite only.
    """

    name: str
    keys: bool = False
    origin: Origin = "loopback"
    key: Key = "none"
    slow: bool = False

    @property
    def is_admitted(self) -> bool:
        return self.key == "pinned" if self.keys else self.origin == "loopback"


ADMITTED = Setting(name="")
SETTINGS = (
    ADMITTED,
    Setting(name=", from afar", origin="afar"),
    Setting(name=", without a key", keys=True),
    Setting(name=", without a key from afar", keys=True, origin="afar", slow=True),
    Setting(name=", with a strange key", keys=True, key="strange", slow=True),
    Setting(name=", with a strange key from afar", keys=True, key="strange", origin="afar",
            slow=True),
    Setting(name=", with a pinned key", keys=True, key="pinned"),
    Setting(name=", with a pinned key from afar", keys=True, key="pinned", origin="afar",
            slow=True),
)  # fmt: skip


def _nothing(_: Target) -> Iterator[bytes]:
    return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attack, and what it may cost in its setting.

    ``sends``: the bytes that follow the handshake (``is_raw``: instead of it) on each of ``number``
    connections, from ``places`` addresses in turns. ``counts``: counters of the source that each
    round moves, and ``one_of``: of which it moves one. ``waits``: the end comes with the
    handshake's time-out. ``may_end``: the source may end it, too; how much the kernel's buffers
    hold decides. ``most_nbytes``: of the source's memory, at the worst moment.
    ``fills_nbytes_per_s``: of that memory, until the guard looks.
    """

    name: str
    fate: Fate
    sends: Callable[[Target], Iterator[bytes]] = _nothing
    port: Port = "control"
    setting: Setting = ADMITTED
    is_raw: bool = False
    number: int = 1
    places: int = 1
    counts: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    waits: bool = False
    may_end: bool = False
    slow: bool = False
    most_nbytes: int = FEW_NBYTES
    fills_nbytes_per_s: float = 0.0

    def most_late_nbytes(self, look_s: float) -> int:
        """``most_nbytes`` where the guard looked only after so long; a busy machine is late."""
        return self.most_nbytes + int(max(0.0, look_s - LOOK_S) * self.fills_nbytes_per_s)

    @property
    def origin(self) -> Origin:
        return self.setting.origin

    @property
    def keys(self) -> bool:
        return self.setting.keys

    def uncounted(self, moved: Collection[str]) -> tuple[str, ...]:
        """Of these counters: those that it moves and that have not moved."""
        missed = tuple(name for name in self.counts if name not in moved)
        return missed if set(self.one_of) & set(moved) else missed + self.one_of

    @property
    def is_let_in(self) -> bool:
        """Or it is refused whatever it sends behind its handshake, which it does at once."""
        return self.setting.is_admitted or self.is_raw


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
            Keep((target.offer,) * 16, life, 86400.0, {target.nonce: b"guessed"}),
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
_ERROR = b"\x05ERROR"
_READY = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Ide"
_OTHER_MECHANISM = zmtp.GREETING[:12] + b"PLAIN".ljust(20, b"\0") + zmtp.GREETING[32:]
_ENDED, _REFUSED, _ANSWERED, _SILENT = Fate.ENDED, Fate.REFUSED, Fate.ANSWERED, Fate.SILENT
_PORTS: tuple[Port, ...] = ("control", "data")
_HANDSHAKE = {"control": "connections.refused.handshake", "data": "zmq.refused.handshake"}
"""Counts handshakes that no peer makes."""
_AT_PORT = {"control": "at the control port", "data": "at a data port"}


_MANY_NBYTES = MOST_OF_ADDRESS * (192 << 10)
"""As many connections as an address may have: 40 KB each, 80 with CURVE, and as much again."""
_UNREAD_NBYTES = {"control": Config().control_max_nbytes + BEYOND_NBYTES, "data": BEHIND_NBYTES}
"""What a connection may have sent that was not read."""


_PARTS_NBYTES_PER_S = 0.6e9
"""Of memory, as empty parts fill it."""


def _flood_nbytes(unread_nbytes: int) -> int:
    """Memory of so much in empty parts, which have 2 bytes and take 64, and of what comes until the
    next look.
    """
    return 32 * unread_nbytes + int(LOOK_S * _PARTS_NBYTES_PER_S)


def _of_both_ports() -> Iterator[Case]:
    for port in _PORTS:
        where = _AT_PORT[port]
        yield Case(name=f"a handshake {where}", port=port, fate=_SILENT)
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
            counts=(_HANDSHAKE[port],),
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
        yield Case(
            name=f"a message without an end {where}",
            port=port,
            fate=_ENDED,
            sends=_endless,
            most_nbytes=_flood_nbytes(_UNREAD_NBYTES[port]),
            fills_nbytes_per_s=_PARTS_NBYTES_PER_S,
        )
        yield Case(
            name=f"a huge frame {where}",
            port=port,
            fate=_ENDED,
            sends=_raw(b"\x02" + ((64 << 20) + 1).to_bytes(8, "big") + bytes(1000)),
        )
        yield Case(
            name=f"300 idle connections {where}",
            port=port,
            fate=_SILENT,
            number=300,
            most_nbytes=_MANY_NBYTES,
        )
        yield Case(
            name=f"10,000 connections {where}",
            port=port,
            fate=_REFUSED,
            number=10_000,
            most_nbytes=_MANY_NBYTES,
            one_of=("connections.refused.penalty", "connections.refused.flood"),
            slow=True,
        )


_ATTACKS = (
    *_of_both_ports(),
    Case(name="deep msgpack", fate=_ANSWERED, sends=_said(DEEP), counts=("control.malformed",)),
    Case(name="two long messages that are none", most_nbytes=SOME_NBYTES, fate=_ENDED,
         sends=_said(DEEP * 2, DEEP * 2)),
    Case(name="messages longer than allowed", most_nbytes=SOME_NBYTES, fate=_ENDED,
         sends=_said(bytes(5 << 20), bytes(5 << 20)), counts=("control.oversized",)),
    Case(name="a claim of a million ranks", most_nbytes=SOME_NBYTES, fate=_ENDED, sends=_long_claim,
         counts=("control.malformed",)),
    Case(name="the widest claims", most_nbytes=SOME_NBYTES, fate=_ANSWERED, sends=_widest_claims,
         counts=("refused.tokens",)),
    Case(name="a slow reader", fate=_SILENT, sends=_unread, may_end=True,
         counts=("control.dropped",)),
    Case(name="forged messages about an offer", fate=_ANSWERED, sends=_forged,
         counts=("refused.tokens", "verdict.plan", "cancel.not_granted", "keep.not_granted")),
    Case(name="forged messages about nothing", fate=_ANSWERED, sends=_about_nothing,
         counts=("refused.incarnation", "cancel.incarnation", "keep.incarnation")),
    Case(name="finds of what never comes", most_nbytes=SOME_NBYTES, fate=_ENDED, sends=_finds,
         counts=("refused.unknown",)),
    Case(name="early pulls of what never comes", most_nbytes=SOME_NBYTES, fate=_ENDED,
         sends=_early_pulls, counts=("refused.unknown",)),
    Case(name="a stolen identity", fate=_ANSWERED,
         sends=lambda target: iter([zmtp.frame(encode(_pull(target, target.sink_life)))] * 50),
         counts=("refused.tokens",)),
    Case(name="a drain", fate=_ANSWERED, sends=_said(encode(Drain())),
         counts=("control.not_own",)),
    Case(name="another version", fate=_ANSWERED,
         sends=_said(encode(Hello((7, 9), ("unknown",), "stranger", _LIFE)))),
    Case(name="deep msgpack at a data port", port="data", fate=_ANSWERED,
         sends=_said(DEEP[:20_000]), counts=("zmq.malformed",)),
    Case(name="an attach of another version", port="data", fate=_ANSWERED,
         sends=_data(msgspec.structs.replace(_ATTACH, version=99)),
         counts=("zmq.malformed",)),
    Case(name="an attach of a native library", port="data", fate=_ANSWERED,
         sends=_data(stream_wire.Attach(_ATTACH.version, 2, 1 << 20, "ucx", b"\xff" * 4000)),
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
    Case(name="more attached sinks than are served", most_nbytes=_MANY_NBYTES, port="data",
         fate=_SILENT, number=1100, places=4, slow=True, sends=_data(_ATTACH),
         counts=("zmq.sent_away",)),
    Case(name="trials without an end", most_nbytes=SOME_NBYTES, port="data", fate=_ANSWERED,
         sends=_data(_TRIAL_ATTACH, *[_TRIAL] * 50),
         counts=("zmq.malformed",)),
)  # fmt: skip


_QUICK = {f"a handshake {where}" for where in _AT_PORT.values()} | {"a drain", "deep msgpack"}
"""Runs in every setting each time."""


def _cost(attack: Case, setting: Setting) -> Case:
    """The attack in this setting, with what it costs there: who is not admitted sends the same, and
    nothing of it counts for more than a handshake.
    """
    made = dataclasses.replace(
        attack,
        name=attack.name + setting.name,
        setting=setting,
        slow=attack.slow or (setting.slow and attack.name not in _QUICK),
    )
    if made.is_let_in:
        return made
    # What comes before the answer to a handshake ends it as well as the answer does
    ends = _HANDSHAKE[attack.port]
    why = ends
    if setting.keys and setting.key == "strange":
        why = "connections.refused.key"
    elif not setting.keys:
        why = "connections.refused.address"
    return dataclasses.replace(
        made,
        fate=_REFUSED,
        counts=(),
        one_of=(why,) if attack.sends is _nothing else (why, ends),
        most_nbytes=FEW_NBYTES,
        fills_nbytes_per_s=0.0,
    )


CASES = tuple(
    _cost(attack, setting)
    for attack in _ATTACKS
    for setting in SETTINGS
    if setting.key == "none" or not attack.is_raw  # or no key is used
)

# ------------------------------------------------------------------ one case


def address_of(case: Case, number: int) -> str:
    """Of the attacker: penalties are by address. What comes from 127.1 is taken for afar."""
    return f"127.{'1' if case.origin == 'afar' else '0'}.{number // 250}.{number % 250 + 2}"


class Waits(NamedTuple):
    """``answer_s``: for each answer; ``connect_s``: for a connection, which never stands if the
    kernel keeps this address out. ``hears_first``: who will be refused says no more before he is.
    """

    answer_s: float = WAIT_S
    connect_s: float = zmtp.CONNECT_S
    hears_first: bool = False


_WAITS = Waits()


def attack_by_number(number: int, target: Target, address: str, waits: Waits) -> Fate:
    """Of a case of the table: what another process can be asked for."""
    return attack(CASES[number], target, address, LISTEN_S, waits)


def attack(
    case: Case, target: Target, address: str, listen_s: float = 0.0, waits: Waits = _WAITS
) -> Fate:
    """Carry one round out, and say what came of its connections. ``listen_s``: who is answered goes
    when he has heard nothing for so long; one that goes before resets the connection, and then what
    it has sent may be thrown away.
    """
    if not case.is_let_in:
        return _knocked(case, target, address, waits)
    if case.fate is Fate.REFUSED:
        waits = waits._replace(answer_s=min(waits.answer_s, PUT_OFF_S))
    with ExitStack() as stack:
        peers = []
        for place in _places(case, address):
            try:
                peer, seal = _open(case, target, place, waits)
            except (ConnectionError, TimeoutError):
                return Fate.REFUSED
            peers.append((stack.enter_context(closing(peer)), seal))
            try:
                for piece in case.sends(target):
                    peer.sendall(seal(piece))
            except OSError:
                return Fate.ENDED
        return _fate(case, *peers[0], listen_s)


def _places(case: Case, address: str) -> Iterator[str]:
    """The address of each connection."""
    *net, third, last = address.split(".")
    for number in range(case.number):
        yield ".".join([*net, str(int(third) + 50 * (number % case.places)), last])


def _open(
    case: Case, target: Target, address: str, waits: Waits
) -> tuple[socket.socket, zmtp_curve.Saying]:
    """A connection, and how what is sent over it is said. Who will be refused does not wait."""
    endpoint = target.control if case.port == "control" else target.data
    wait_s, connect_s = waits.answer_s, waits.connect_s
    if case.is_raw:
        return zmtp.open_tcp(endpoint, wait_s, address, connect_s), bytes
    is_let_in = case.is_let_in
    if case.setting.key == "none":
        peer = zmtp.connect(endpoint, wait_s, address=address, waits=is_let_in, connect_s=connect_s)
        return peer, bytes
    public, secret = (key.decode() for key in zmq.curve_keypair())
    *stolen, server = target.keys
    if case.setting.key == "pinned":
        public, secret = stolen
    keys = zmtp_curve.keys_of(public, secret, server)
    return zmtp_curve.connect(endpoint, keys, wait_s, address, waits=is_let_in, connect_s=connect_s)


def _knocked(case: Case, target: Target, address: str, waits: Waits) -> Fate:
    """What comes of all its connections; who is kept out makes no more of them."""
    for place in _places(case, address):
        try:
            if _knock(case, target, place, waits) is not Fate.REFUSED:
                return Fate.ANSWERED
        except zmtp.KeptOut:
            break
    return Fate.REFUSED


def _knock(case: Case, target: Target, address: str, waits: Waits) -> Fate:
    """One connection that sends all that it has behind its handshake, and then looks for an answer
    to that. ZeroMQ ends some for what comes behind, and forgets to ask the guard.
    """
    try:
        peer, seal = _open(case, target, address, waits)
    except zmtp.KeptOut:
        raise
    except ConnectionError:
        return Fate.REFUSED
    came = b""
    with closing(peer), suppress(ConnectionError):
        if waits.hears_first and not case.is_raw:
            came = _answer(peer)
        with suppress(ConnectionError):
            for piece in case.sends(target):
                peer.sendall(seal(piece))
        came = came or _answer(peer)
    return Fate.ANSWERED if zmtp.READY in came else Fate.REFUSED


def _answer(peer: socket.socket) -> bytes:
    """To a handshake: it ends at once, or is told and left to end itself until it is too late."""
    came = b""
    while not (_ERROR in came or zmtp.READY in came) and (some := peer.recv(1 << 16)):
        came += some
    return came


def _fate(case: Case, first: socket.socket, seal: zmtp_curve.Saying, listen_s: float) -> Fate:
    if case.fate is Fate.ENDED:
        return Fate.ENDED if zmtp.has_ended(first) else Fate.SILENT
    if case.fate is Fate.SILENT:
        return Fate.SILENT
    try:
        first.sendall(seal(zmtp.frame(encode(Ping()) if case.port == "control" else b"x")))
        if case.port == "data":
            first.sendall(seal(zmtp.frame(stream_wire.encode(_TRIAL))))
        is_answered = bool(first.recv(1))
    except TimeoutError:
        return Fate.SILENT
    except OSError:
        return Fate.ENDED
    first.settimeout(listen_s)
    with suppress(OSError):
        while listen_s and first.recv(1 << 16):
            pass
    return Fate.ANSWERED if is_answered else Fate.ENDED


def repeat(case: Case, target: Target, address: str, on_round: Callable[[], object]) -> None:
    """Round after round until the process is ended: as an attacker that comes back at once."""
    while True:
        try:
            attack(case, target, address, waits=Waits(connect_s=SOON_S))
        except OSError:
            time.sleep(0.01)
        on_round()
