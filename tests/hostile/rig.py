"""An honest pair of engines that is under attack."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kvxfer.connector.records import SourceRef
from tests.builders import EngineShape
from tests.connector.rig import POISON, Engine, until
from tests.far_peers import count_as_far, use_tcp
from tests.hostile.cases import Fate, Target, attack_by_number

SHAPE = EngineShape()
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Attack = Callable[[int, Target, str], Future[Fate]]
"""The number of its case, whom and from which address."""
_BLOCKS = (1, 2, 3)
_names = count()


@dataclass(frozen=True, slots=True)
class Honest:
    """``held``: an open offer that nobody has asked for yet."""

    source: Engine
    sink: Engine
    held: SourceRef
    keys: tuple[str, ...]

    @property
    def target(self) -> Target:
        """What an attacker knows."""
        return Target(
            control=self.source.endpoint,
            data=self.source.manifest.ranks[0].data_endpoints[self.source.config.transport],
            nonce=self.held.offer.nonce,
            incarnation=self.source.incarnation,
            sink_life=self.sink.incarnation,
            keys=self.keys,
        )

    def load(self) -> None:
        """One request from its offer to its report, over TCP: accepted, with the right bytes."""
        self.finish(self.offer())

    def offer(self) -> SourceRef:
        """An offer that will open."""
        name = f"request {next(_names)}"
        ref = self.source.offer(name, 16 * len(_BLOCKS), _BLOCKS)
        self.source.compute(name)
        return ref

    def finish(self, ref: SourceRef) -> None:
        """Load what was offered."""
        name = f"load {next(_names)}"
        (taken,), (given,) = self.sink.pools, self.source.pools
        taken.tensor.fill_(POISON)
        self.sink.load(name, ref, _BLOCKS, (0, 16 * len(_BLOCKS)))
        until(lambda: self.sink.received(name))
        assert self.sink.reasons(name) == {None}
        self.sink.results[0].received.clear()  # or looking through them takes longer and longer
        got, sent = taken.tensor.numpy(), given.tensor.numpy()
        is_moved = got != POISON
        # The same shape and ids: the same bytes in the same places, and as many as were asked for
        np.testing.assert_array_equal(got[is_moved], sent[is_moved])
        assert (
            0.98 < is_moved.sum() / (sent.size * len(_BLOCKS) / SHAPE.num_blocks) <= 1
        )  # or POISON


@contextmanager
def over_tcp() -> Iterator[None]:
    """Honest peers come over TCP as attackers do, and what comes from 127.1 comes from afar."""
    with pytest.MonkeyPatch.context() as patch:
        use_tcp(patch)
        count_as_far(patch, lambda address: address.startswith("127.1."))
        yield


@contextmanager
def honest_pair(*, has_keys: bool = False, wire: str = "zmq", **settings: Any) -> Iterator[Honest]:
    """``settings``: of the source."""
    keys: list[dict[str, Any]] = [{}, {}]
    stolen: tuple[str, ...] = ()
    if has_keys:
        (gives, gives_secret), (takes, takes_secret) = (
            [key.decode() for key in zmq.curve_keypair()] for _ in range(2)
        )
        pinned = {"curve_server_keys": {"prefill": gives, "decode": takes}}
        keys = [
            {"curve_public_key": gives, "curve_secret_key": gives_secret, **pinned},
            {"curve_public_key": takes, "curve_secret_key": takes_secret, **pinned},
        ]
        stolen = (takes, takes_secret, gives)
    with ExitStack() as stack:
        stack.enter_context(over_tcp())
        common: dict[str, Any] = {"transport": wire}
        if wire == "tcp":
            common["zmq_streams"] = 2
        source = stack.enter_context(
            Engine(SHAPE, "prefill", fill=None, **{**common, **settings}, **keys[0])
        )
        sink = stack.enter_context(Engine(SHAPE, "decode", fill=POISON, **common, **keys[1]))
        held = source.offer("held", 16 * len(_BLOCKS), _BLOCKS)
        source.compute("held")
        honest = Honest(source, sink, held, stolen)
        honest.load()
        yield honest


@contextmanager
def attackers() -> Iterator[Attack]:
    """A process beside this one that carries attacks out: what they hold is not the source's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.hostile.cases"])
    with ProcessPoolExecutor(1, context) as pool:
        pool.submit(int).result()  # now it has all threads and descriptors that it will have
        yield lambda number, target, address: pool.submit(attack_by_number, number, target, address)


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


def _status_nbytes(name: str) -> int:
    """A size of proc(5)."""
    lines = STATUS.read_text(encoding="ascii").splitlines()
    size = next(line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(size) << 10
