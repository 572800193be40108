"""An honest pair of engines that is under attack."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zmq

from kvxfer.connector.records import SourceRef
from tests.builders import EngineShape
from tests.connector.rig import POISON, Engine, until
from tests.far_peers import count_as_far, use_tcp
from tests.hostile.cases import Fate, Target, Waits, attack_by_number

SHAPE = EngineShape()
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Content = npt.NDArray[np.uint8]
Attack = Callable[[int, Target, str, Waits], Future[Fate]]
"""The number of its case, whom and from which address, and how long it waits for what."""
_BLOCKS = (1, 2, 3)
_names = count()


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """CURVE settings of both sides, and what a thief has of them."""

    source: Mapping[str, Any]
    sink: Mapping[str, Any]
    stolen: tuple[str, ...] = ()

    @classmethod
    def made(cls) -> Keys:
        (gives, gives_secret), (takes, takes_secret) = (
            [key.decode() for key in zmq.curve_keypair()] for _ in range(2)
        )
        pinned = {"curve_server_keys": {"prefill": gives, "decode": takes}}
        return cls(
            {"curve_public_key": gives, "curve_secret_key": gives_secret, **pinned},
            {"curve_public_key": takes, "curve_secret_key": takes_secret, **pinned},
            (takes, takes_secret, gives),
        )


NO_KEYS = Keys({}, {})


@dataclass(frozen=True, slots=True)
class Giver:
    """An honest source. ``held``: an open offer that nobody has asked for yet."""

    source: Engine
    sink_life: bytes
    held: SourceRef
    keys: Keys

    @property
    def target(self) -> Target:
        """What an attacker knows."""
        return Target(
            control=self.source.endpoint,
            data=self.source.manifest.ranks[0].data_endpoints[self.source.config.transport],
            nonce=self.held.offer.nonce,
            incarnation=self.source.incarnation,
            sink_life=self.sink_life,
            keys=self.keys.stolen,
        )

    @property
    def sent(self) -> Content:
        """What its pool holds."""
        content: Content = self.source.pools[0].tensor.numpy()
        return content

    def offer(self) -> SourceRef:
        return offer_of(self.source)


@dataclass(frozen=True, slots=True)
class Honest(Giver):
    """With its sink in the same process."""

    sink: Engine

    def load(self) -> None:
        """One request from its offer to its report, over TCP: accepted, with the right bytes."""
        self.finish(self.offer())

    def finish(self, ref: SourceRef) -> None:
        """Load what was offered."""
        take(self.sink, ref, self.sent)


def offer_of(source: Engine) -> SourceRef:
    """An offer that will open."""
    name = f"request {next(_names)}"
    ref = source.offer(name, 16 * len(_BLOCKS), _BLOCKS)
    source.compute(name)
    return ref


def take(sink: Engine, ref: SourceRef, sent: Content) -> None:
    """Load what was offered of a pool that holds ``sent``: accepted, with the right bytes."""
    name = f"load {next(_names)}"
    (taken,) = sink.pools
    taken.tensor.fill_(POISON)
    sink.load(name, ref, _BLOCKS, (0, 16 * len(_BLOCKS)))
    until(lambda: sink.received(name))
    assert sink.reasons(name) == {None}
    sink.results[0].received.clear()  # or looking through them takes longer and longer
    got = taken.tensor.numpy()
    is_moved = got != POISON
    # The same shape and ids: the same bytes in the same places, and as many as were asked for
    np.testing.assert_array_equal(got[is_moved], sent[is_moved])
    assert 0.98 < is_moved.sum() / (sent.size * len(_BLOCKS) / SHAPE.num_blocks) <= 1  # or POISON


@contextmanager
def over_tcp() -> Iterator[None]:
    """Honest peers come over TCP as attackers do, and what comes from 127.1 comes from afar."""
    with pytest.MonkeyPatch.context() as patch:
        use_tcp(patch)
        count_as_far(patch, lambda address: address.startswith("127.1."))
        yield


@contextmanager
def honest_source(keys: Keys, *, wire: str = "zmq", **settings: Any) -> Iterator[Giver]:
    """``settings``: more of its own."""
    with (
        over_tcp(),
        Engine(SHAPE, "prefill", fill=None, **{**_wire(wire), **settings}, **keys.source) as source,
    ):
        yield Giver(source, secrets.token_bytes(16), offer_of(source), keys)


@contextmanager
def honest_sink(keys: Keys, life: bytes, *, wire: str = "zmq") -> Iterator[Engine]:
    """``life``: its incarnation."""
    more = {**_wire(wire), **keys.sink}
    with over_tcp(), Engine(SHAPE, "decode", fill=POISON, incarnation=life, **more) as sink:
        yield sink


@contextmanager
def honest_pair(*, has_keys: bool = False, wire: str = "zmq", **settings: Any) -> Iterator[Honest]:
    """``settings``: of the source."""
    keys = Keys.made() if has_keys else NO_KEYS
    with (
        honest_source(keys, wire=wire, **settings) as giver,
        honest_sink(keys, giver.sink_life, wire=wire) as sink,
    ):
        honest = Honest(giver.source, giver.sink_life, giver.held, keys, sink)
        honest.load()
        # One socket may carry it all while another is not admitted yet: its thread comes late.
        until(lambda: _num_threads("kvxfer-tcp-send") == _num_threads("kvxfer-tcp-take"))
        yield honest


def _num_threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def _wire(name: str) -> dict[str, Any]:
    return {"transport": name} | ({"zmq_streams": 2} if name == "tcp" else {})


@contextmanager
def attackers() -> Iterator[Attack]:
    """A process beside this one that carries attacks out: what they hold is not the source's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.hostile.cases"])
    with ProcessPoolExecutor(1, context) as pool:
        pool.submit(int).result()  # now it has all threads and descriptors that it will have
        yield lambda *attack: pool.submit(attack_by_number, *attack)


@dataclass(frozen=True, slots=True)
class Usage:
    """What this process has."""

    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Usage:
        return cls(len(os.listdir("/proc/self/fd")), threading.active_count())


class Peak:
    """The memory that this process has had since this was made, beyond what it had then."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # or what comes fits in what others have left
        CLEAR_REFS.write_text("5", encoding="ascii")  # VmHWM begins anew: proc(5)
        self._begin_nbytes = _status_nbytes("VmRSS")

    @property
    def grown_nbytes(self) -> int:
        """At the worst moment."""
        return max(0, _status_nbytes("VmHWM") - self._begin_nbytes)

    @property
    def left_nbytes(self) -> int:
        """Now."""
        return max(0, _status_nbytes("VmRSS") - self._begin_nbytes)


class Looks:
    """When the guards of this process ask the kernel what the connections of an address have
    brought. ``longest_s``: until then, since they asked before or this was made.
    """

    def __init__(self, patch: pytest.MonkeyPatch, address: str) -> None:
        self.longest_s = 0.0
        self._begin_s = time.monotonic()
        self._last_s: dict[int, float] = {}
        getsockopt = socket.socket.getsockopt

        def comes_from(asked: socket.socket) -> bool:
            with suppress(OSError):  # it has ended
                return bool(asked.getpeername()[0] == address)
            return False

        def noted(asked: socket.socket, level: int, name: int, *more: Any) -> Any:
            if (level, name) == (socket.IPPROTO_TCP, socket.TCP_INFO) and comes_from(asked):
                now_s = time.monotonic()
                before_s = self._last_s.get(asked.fileno(), self._begin_s)
                self._last_s[asked.fileno()] = now_s
                self.longest_s = max(self.longest_s, now_s - before_s)
            return getsockopt(asked, level, name, *more)

        patch.setattr(socket.socket, "getsockopt", noted)


def _status_nbytes(name: str) -> int:
    """A size of proc(5)."""
    lines = STATUS.read_text(encoding="ascii").splitlines()
    size = next(line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(size) << 10
