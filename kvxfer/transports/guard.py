"""Which connections a listener admits, over TCP or from this host.

ZeroMQ asks a :class:`Guard` about each connection during the handshake (ZAP, ZeroMQ RFC 27). A
refused peer sends no message, holds no memory beyond the handshake, and is told that it was
refused. The peer's address decides; where CURVE keys are configured, its key decides instead.

A listener that is bound to ``tcp://HOST:PORT`` also answers the abstract Unix socket that is named
after it: for stream data always, for control messages where no CURVE keys are set. Such names
belong to one network namespace, as the port does, so a sink that finds the name is on the source's
host. The Unix socket carries the same frames at less cost: 64 MiB took 49 ms of processor time over
the Unix socket and 58 over TCP, all threads of both sides together. Anybody may take a free name,
so each end checks the user of the other, with CURVE keys as well as without. A sink that finds no
such name, or somebody else's, uses TCP.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import socket as sockets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import zmq
from zmq.utils import z85

from kvxfer.bounded import Bounded
from kvxfer.config import Config
from kvxfer.log_limit import LogLimit
from kvxfer.transports.key_folder import accepted_keys, short
from kvxfer.transports.syn_filter import MOST_SHUT, SynFilter

MAX_WARNED = 16
"""Addresses that are warned of within a minute, each once."""

PENALTY_S, MOST_PENALTY_S = 1.0, 30.0
"""How long an address makes no new connections after one of its connections has misbehaved: at
first, and at most. It doubles with each time that follows within FORGET_S.
"""
FORGET_S = 60.0
_MAX_PENALTIES = _MAX_JUDGED = 1024
_NEVER = -math.inf, 0.0
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ RFC 27
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: "struct ucred" of unix(7)
_UNIX_HOST = "localhost"  # what libzmq calls the host of a Unix socket's peer

_log = logging.getLogger("kvxfer.transports")


def pinned_keys(config: Config) -> frozenset[str]:
    """The public keys of all engines that this one knows, its own included."""
    keys = set((config.curve_server_keys or {}).values())
    if config.curve_keys_dir is not None:
        keys |= accepted_keys(config.curve_keys_dir)
    if config.curve_public_key is not None:
        keys.add(config.curve_public_key)
    return frozenset(keys)


def is_own(config: Config, address: str, key: str) -> bool:
    """Whether a connection that was admitted is the operator's of this engine: a process of its
    user on its host, or with a key that is its own. All keys of a shared folder are.
    """
    if user_of(address) is not None:
        return True
    own = pinned_keys(config) if config.curve_keys_dir is not None else {config.curve_public_key}
    return key in own


def remedy(config: Config, *, there: bool) -> str:
    """What to do about a key that one side does not know: ``there``, or this one."""
    if config.curve_keys_dir is not None:
        return f"copy {config.curve_keys_dir} (curve_keys_dir) of one to the other"
    return f"name it in curve_server_keys {'there' if there else 'here'}"


def why_refused(config: Config, address: str, key: str | None) -> str | None:
    """Why a listener does not admit this address with this CURVE key; None if it does.

    Without keys loopback is admitted, and any other address only if ``allowed_peers`` names it.
    """
    user = user_of(address)
    if user is not None:
        mine = os.geteuid()
        return None if user == mine else f"expected a process of user {mine}, got user {user}"
    if config.curve_secret_key is not None:
        if key is not None and key in pinned_keys(config):
            return None
        got = "none" if key is None else f"another ({short(key)})"
        return f"expected a CURVE key that is pinned, got {got}; {remedy(config, there=False)}"
    try:
        if ipaddress.ip_address(address).is_loopback:
            return None
    except ValueError:
        return "expected an address, got none"
    if config.peer_allowed(address):
        return None
    return "expected a peer on this host, got another; name it in allowed_peers, or configure CURVE"


BEGUN_S = 5.0
"""For so long connections that were admitted are counted by address."""
MOST_BEGUN = 1024
"""Connections of an address within BEGUN_S; one more is as if one had misbehaved. 64 ranks of an
address that come back make 128 of them. libzmq 4.3.5 ends the process when it gives a connection
the name that another one has given itself, one of 2**32: this bounds how many are tried.
"""


PROMPT, REFILL_S = 64, 0.1
"""So many handshakes of an address are answered at once, and one more after each REFILL_S. Those
behind them wait: who begins anew with each answer made thousands a second, each of which takes
ZeroMQ, the guard and the IO thread 0.1 ms, with CURVE 1. Beside 300 of them loads on one core took
15 ms instead of 3.
"""
PACE_S, ALL_PACE_S = 0.004, 0.002
"""Of those that wait one is answered each PACE_S of an address, and one each ALL_PACE_S of all. 64
ranks of an address make 128, the last of which wait for 0.26 s. Four addresses that made 1,000 a
second together had each load on one core take 3.1 ms instead of 1.6.
"""
MOST_LATE_OF, MOST_LATE = 500, 4096
"""So many handshakes of an address may wait, for 2 s, and of all; one more is told to come again.
Of who does not wait for answers thousands a second would lie here.
"""


class Pace:
    """Whose handshakes are answered at once: a bucket of tokens for each address."""

    def __init__(self) -> None:
        self._full_s: Bounded[str, float] = Bounded(_MAX_PENALTIES)
        """When the bucket will be full again."""

    def is_prompt(self, address: str, now_s: float) -> bool:
        """Takes one of its tokens, if there is one."""
        full_s = max(self._full_s.pop(address, now_s), now_s)
        is_prompt = full_s - now_s <= (PROMPT - 1) * REFILL_S
        self._full_s[address] = full_s + REFILL_S if is_prompt else full_s
        return is_prompt


class Late:
    """Handshakes that wait. Their addresses have turns, each for one of its own: who has many waits
    for them all, and others wait for one of them.
    """

    def __init__(self) -> None:
        self._of: dict[str, deque[list[bytes]]] = {}
        self._turns: deque[tuple[float, str]] = deque()
        """When each address has its turn. All of them wait equally long, so the last came last."""
        self._num = 0
        self._next_s = -math.inf

    def __len__(self) -> int:
        return self._num

    @property
    def due_s(self) -> float:
        """When the next one is to be answered; there is one."""
        return max(self._turns[0][0], self._next_s)

    def has_room(self, address: str) -> bool:
        """Whether one more of this address may wait, as far as it is up to the address."""
        return len(self._of.get(address, ())) < MOST_LATE_OF

    def add(self, address: str, now_s: float, frames: list[bytes]) -> None:
        if address not in self._of:
            self._of[address] = deque()
            self._await_turn(address, now_s)
        self._of[address].append(frames)
        self._num += 1

    def take(self, now_s: float) -> list[bytes]:
        """The next one."""
        _, address = self._turns.popleft()
        waiting = self._of[address]
        frames = waiting.popleft()
        if waiting:
            self._await_turn(address, now_s)
        else:
            del self._of[address]
        self._num -= 1
        self._next_s = max(self._next_s, now_s - PACE_S) + ALL_PACE_S
        return frames

    def _await_turn(self, address: str, now_s: float) -> None:
        self._turns.append((now_s + PACE_S, address))


class Penalties:
    """Addresses that may make no new connections for a while, to any listener of a context.

    A connection that misbehaves is closed; without a penalty it would be back at once: each message
    of a megabyte in empty parts holds up all others of the port for 0.2 s. Processes of this user
    come over the Unix socket, where no penalty is given.
    """

    def __init__(self) -> None:
        self._by_address: Bounded[str, tuple[float, float]] = Bounded(_MAX_PENALTIES)
        """Until when, and how long it is."""
        self._begun: Bounded[str, tuple[float, int]] = Bounded(_MAX_PENALTIES)

    def begun(self, address: str, now_s: float) -> int:
        """A connection of this address was admitted. From the guard's thread. Returns how many were
        within BEGUN_S.
        """
        since_s, number = self._begun.pop(address, (now_s, 0))
        if now_s - since_s >= BEGUN_S:
            since_s, number = now_s, 0
        self._begun[address] = since_s, number + 1
        return number + 1

    def busiest(self, now_s: float) -> tuple[str, int]:
        """The address of most connections of late, and how many; "" if there is none."""
        late = {
            address: number
            for address, (since_s, number) in list(self._begun.items())
            if now_s - since_s < BEGUN_S
        }
        return max(late.items(), key=itemgetter(1), default=("", 0))

    def add(self, address: str, now_s: float) -> float:
        """Returns until when it lasts."""
        until_s, length_s = self._by_address.pop(address, _NEVER)
        is_known = now_s < until_s + FORGET_S
        length_s = min(2 * length_s, MOST_PENALTY_S) if is_known else PENALTY_S
        self._by_address[address] = now_s + length_s, length_s
        return now_s + length_s

    def holds(self, address: str, now_s: float) -> bool:
        return now_s < self._by_address.get(address, _NEVER)[0]


_penalties: WeakKeyDictionary[zmq.Context[zmq.Socket[bytes]], Penalties] = WeakKeyDictionary()


def penalties_of(context: zmq.Context[zmq.Socket[bytes]]) -> Penalties:
    """Listeners add to them and the guard reads them, on different threads."""
    return _penalties.setdefault(context, Penalties())


class Floods:
    """Addresses that flood the listeners of a context with connections. The kernel drops what they
    send to those, with the times of penalties: see :mod:`kvxfer.transports.syn_filter`. Any thread.

    ``on_shut`` is called for each time that one begins.
    """

    def __init__(self) -> None:
        self.filter = SynFilter()
        self.on_shut: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._times = Penalties()
        self._until_s: dict[str, float] = {}
        self._warned: LogLimit[str] = LogLimit(MAX_WARNED)

    def __len__(self) -> int:
        return len(self._until_s)

    def shut(self, address: str, now_s: float) -> None:
        """Nothing changes where the kernel does not do that, or it is shut: what comes now was
        accepted before.
        """
        with self._lock:
            if address in self._until_s or len(self._until_s) >= MOST_SHUT:
                return
            if not self.filter.keep_out([*self._until_s, address]):
                self.filter.keep_out(self._until_s)  # also from a listener that comes later
                return
            self._until_s[address] = until_s = self._times.add(address, now_s)
        with suppress(Exception):  # a counter that fails ends no guard
            self.on_shut()
        if self._warned.note(address, now_s):
            text = "%s floods this engine with connections, and is kept out for %g s; is it one?"
            _log.warning(text, address, until_s - now_s)

    def open_due(self, now_s: float) -> None:
        """Let in again whose time is over."""
        with self._lock:
            over = [each for each, until_s in self._until_s.items() if until_s <= now_s]
            for address in over:
                del self._until_s[address]
            if over:
                self.filter.keep_out(self._until_s)


_floods: WeakKeyDictionary[zmq.Context[zmq.Socket[bytes]], Floods] = WeakKeyDictionary()


def floods_of(context: zmq.Context[zmq.Socket[bytes]]) -> Floods:
    """The guard and the listeners tell it whom they see, on different threads."""
    return _floods.setdefault(context, Floods())


class Guard:
    """Decides about every connection to the listeners of one context. It has a thread of its own,
    so a busy IO thread does not delay handshakes. Make it before the listeners bind; it ends with
    the context.

    ``on_refused`` is called on that thread for each connection that was refused, with the reason in
    a word: user, key, address, penalty or pace. "flood" is an address that the kernel keeps out.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: Config,
        on_refused: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self._config = config
        self._penalties = penalties_of(context)
        self._on_refused = on_refused
        self._warned: LogLimit[str] = LogLimit(MAX_WARNED)
        self._judged: Bounded[str, str | None] = Bounded(_MAX_JUDGED)
        """Addresses, where no keys are set: to compare one with ranges takes 20 us."""
        self._pace = Pace()
        self._floods = floods_of(context)
        self._floods.on_shut = partial(on_refused, "flood")
        self._late = Late()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ENDPOINT)
        self._thread = threading.Thread(target=self._main, name="kvxfer-guard", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _main(self) -> None:
        try:
            while True:
                if not self._late or self._socket.poll(self._wait_ms()):
                    self._take(self._socket.recv_multipart())
                while self._late and self._late.due_s <= (now_s := time.monotonic()):
                    self._judge(self._late.take(now_s))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _wait_ms(self) -> int:
        """Rounded up: nothing is answered too early."""
        return max(0, math.ceil((self._late.due_s - time.monotonic()) * 1e3))

    def _take(self, frames: list[bytes]) -> None:
        """Answer a request, or have it wait. This user's processes are not paced."""
        address, now_s = _address_of(frames), time.monotonic()
        is_own = user_of(address) == os.geteuid()
        if is_own or self._pace.is_prompt(address, now_s):
            self._judge(frames)
        elif (has_room := self._late.has_room(address)) and len(self._late) < MOST_LATE:
            self._late.add(address, now_s, frames)
        else:
            self._judge(frames, is_late=True)
            if not has_room:
                self._floods.shut(address, now_s)

    def _judge(self, frames: list[bytes], *, is_late: bool = False) -> None:
        try:
            answer = self._put_off(frames, "pace") if is_late else self._answer(frames)
        except Exception:  # noqa: BLE001  # others are admitted all the same
            if self._warned.note("", time.monotonic()):
                _log.exception("a connection is refused that could not be judged")
            answer = _said(frames, b"500", "unforeseen")
        self._socket.send_multipart(answer)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """Frames: as :func:`_address_of` has them."""
        mechanism, *credentials = frames[7:]
        address, now_s = _address_of(frames), time.monotonic()
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else None
        why = self._why_refused(address, key)
        if why is not None:
            is_user = user_of(address) is not None
            by_key = self._config.curve_secret_key is not None
            self._on_refused("user" if is_user else "key" if by_key else "address")
            who = "another user" if is_user else address
            if self._warned.note(who, now_s):
                _log.warning("a connection from %s was refused: %s", address or "nowhere", why)
            return _said(frames, b"400", why)
        if self._has_to_wait(address, now_s):
            return self._put_off(frames, "penalty")
        return _said(frames, b"200", "OK", key or "")

    def _put_off(self, frames: list[bytes], why: str) -> list[bytes]:
        """A peer that is admitted tries again."""
        self._on_refused(why)
        return _said(frames, b"300", "later")

    def _why_refused(self, address: str, key: str | None) -> str | None:
        if self._config.curve_secret_key is not None:
            return why_refused(self._config, address, key)
        if address not in self._judged:
            self._judged[address] = why_refused(self._config, address, key)
        return self._judged[address]

    def _has_to_wait(self, address: str, now_s: float) -> bool:
        if self._penalties.holds(address, now_s):
            return True
        if user_of(address) is not None or self._penalties.begun(address, now_s) <= MOST_BEGUN:
            return False
        self._penalties.add(address, now_s)
        if self._warned.note(address, now_s):
            _log.warning(
                "connections from %s wait: expected at most %d in %g s, got more; is it an engine?",
                address,
                MOST_BEGUN,
                BEGUN_S,
            )
        return True


def _said(frames: list[bytes], status: bytes, text: str, user_id: str = "") -> list[bytes]:
    """The answer to a request. ZeroMQ states the user id with each message of the connection."""
    asker, empty, _, request_id = frames[:4]
    return [asker, empty, b"1.0", request_id, status, text.encode(), user_id.encode(), b""]


def _address_of(frames: list[bytes]) -> str:
    """Of a request: who asks, nothing, version, request id, domain, address, routing id, mechanism,
    CURVE key.
    """
    return frames[5].decode(errors="replace")


# ------------------------------------------------------------------ the Unix socket beside a port


def unix_endpoint(endpoint: str) -> str:
    """What ZeroMQ calls the Unix socket beside a TCP endpoint."""
    return f"ipc://@{_name(endpoint)}"


def unix_name(endpoint: str) -> bytes:
    """What the kernel calls it."""
    return b"\0" + _name(endpoint).encode()


def nearest_endpoint(endpoint: str) -> str:
    """The Unix socket beside ``endpoint`` if this user's source is there, else ``endpoint``."""
    return unix_endpoint(endpoint) if _is_here(unix_name(endpoint)) else endpoint


def user_of(peer_address: str) -> int | None:
    """The user id in what libzmq says of a Unix socket's peer, ``localhost:UID:GID:PID``.

    None for the numeric address of any other peer.
    """
    host, *ids = peer_address.split(":")
    if host != _UNIX_HOST or len(ids) != 3 or not ids[0].isdecimal():
        return None
    return int(ids[0])


def _name(endpoint: str) -> str:
    return f"kvxfer-zmq-{urlsplit(endpoint).netloc}"


def _is_here(name: bytes) -> bool:
    if not hasattr(sockets, "SO_PEERCRED"):  # no Linux
        return False
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as tried:
        tried.setblocking(False)  # it connects at once, or the listener's queue is full: then not
        try:
            tried.connect(name)
            found = tried.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return False
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())
