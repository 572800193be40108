"""NIXL between two processes: blocks as they are, with descriptor lists prepared beforehand.

The initiator is timed from making the request (which picks the descriptors by index, as an engine's
connector does for each request) to the state DONE, for which it asks without a pause.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.bench.core import Timing, timed
from kvxfer.bench.members import SINK, SOURCE, Devices, Member
from kvxfer.bench.pools import Pool, Request

_NUM_THREADS = 4  # what vLLM's connector sets for UCX


@dataclass(frozen=True, slots=True)
class Setting:
    """Which way to measure, and by whom it is initiated."""

    name: str
    operation: str
    environment: tuple[tuple[str, str], ...] = ()
    num_threads: int = _NUM_THREADS
    has_progress_thread: bool = True

    @property
    def initiator(self) -> str:
        """READ is the sink's, WRITE the source's."""
        return SINK if self.operation == "READ" else SOURCE


SETTINGS = (
    Setting(f"NIXL READ, {_NUM_THREADS} threads", "READ"),
    Setting(f"NIXL WRITE, {_NUM_THREADS} threads, _SGL", "WRITE", (("NIXL_UCX_SGL_ENABLE", "1"),)),
)
"""Between GPUs: as vLLM has it, and what was the fastest."""
HOST_SETTINGS = (
    Setting("NIXL READ, default", "READ", num_threads=0),
    Setting("NIXL READ, no thread", "READ", num_threads=0, has_progress_thread=False),
)
"""In host memory: as NIXL is by itself, and what was the fastest on few cores, where its thread,
which looks without a pause, takes the processor from those who copy."""
LOOK_S = 0.005
"""How often an agent without a thread looks what peers want of it while it is asked nothing."""


@dataclass(frozen=True, slots=True)
class Card:
    """What an agent tells the other: its metadata, and where its memory lies."""

    metadata: bytes
    address: int
    device: int


class NixlMember(Member):
    """One agent and one side's memory. Raises ImportError without NIXL."""

    def __init__(self, side: str, setting: Setting, devices: Devices, nbytes: int) -> None:
        nixl = import_module("nixl._api")  # optional
        super().__init__({side: devices.by_side[side]}, nbytes)
        self._side, self._operation = side, setting.operation
        memory = self.memories[side]
        self._kind = "DRAM" if memory.device.type == "cpu" else "VRAM"
        self._device = memory.device.index or 0
        self._address = memory.tensor.data_ptr()
        config = nixl.nixl_agent_config(
            backends=["UCX"],
            num_threads=setting.num_threads,
            enable_prog_thread=setting.has_progress_thread,
        )
        self._agent: Any = nixl.nixl_agent(f"bench-{side}-{setting.operation}", config)
        if "UCX" not in self._agent.backends:
            raise RuntimeError("NIXL: expected its UCX plugin, found none")
        rows = [(self._address, memory.tensor.numel(), self._device, "")]
        self._registered = self._agent.register_memory(rows, self._kind)
        self._peer = ""
        self._peer_card: Card | None = None
        self._lists: dict[tuple[Pool, Pool], tuple[Any, Any]] = {}
        self._pause = os.sched_yield if memory.device.type == "cpu" else _spin
        self._over = threading.Event()
        self._looker: threading.Thread | None = None
        self._needs_looker = not setting.has_progress_thread and side != setting.initiator

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self._agent.get_new_notifs()

    def card(self) -> Card:
        return Card(self._agent.get_agent_metadata(), self._address, self._device)

    def meet(self, card: Card) -> None:
        name = self._agent.add_remote_agent(card.metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._peer_card = card
        if self._needs_looker:  # from here on the agent is that thread's, because nobody asks it
            self._looker = threading.Thread(target=self._look)
            self._looker.start()

    def run(self, way: str, request: Request) -> Timing:
        """One request, made and posted anew."""
        ours, theirs = self._prepared(request)
        is_source = self._side == SOURCE
        own, other = (_indexes(*request.side(which)) for which in (is_source, not is_source))
        handles: list[Any] = []

        def post() -> None:
            handle = self._agent.make_prepped_xfer(self._operation, ours, own, theirs, other)
            handles.append(handle)
            self._check(self._agent.transfer(handle))

        def wait() -> None:
            while self._check(self._agent.check_xfer_state(handles[0])) != "DONE":
                self._pause()

        self.flush()
        timing = timed(post, wait)
        self._agent.release_xfer_handle(handles[0])
        return timing

    def _check(self, state: str) -> str:
        if state == "ERR":
            raise RuntimeError(f"NIXL {self._operation}: expected it to be done, got {state}")
        return state

    def _prepared(self, request: Request) -> tuple[Any, Any]:
        """Lists of all blocks of both pools; made once for each pair of pools."""
        if self._peer_card is None:
            raise RuntimeError("NIXL: expected meet before run")
        key = (request.source, request.sink)
        if key not in self._lists:
            is_source, card = self._side == SOURCE, self._peer_card
            (own, _), (other, _) = request.side(is_source), request.side(not is_source)
            prepare = self._agent.prep_xfer_dlist
            self._lists[key] = (
                prepare("NIXL_INIT_AGENT", _rows(own, self._address, self._device), self._kind),
                prepare(self._peer, _rows(other, card.address, card.device), self._kind),
            )
        return self._lists[key]

    def close(self) -> None:
        self._over.set()
        if self._looker is not None:
            self._looker.join()
        for pair in self._lists.values():
            for prepared in pair:
                self._agent.release_dlist_handle(prepared)
        if self._peer:
            self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)
        super().close()


def _spin() -> None:
    return


def _rows(pool: Pool, address: int, device: int) -> NDArray[np.uint64]:
    """All blocks of all regions: one row, (address, length, device, stride, count), a region."""
    rows = np.empty((pool.shape.regions, 5), np.uint64)
    regions = np.arange(pool.shape.regions, dtype=np.uint64)
    rows[:, 0] = np.uint64(address) + regions * np.uint64(pool.num_blocks * pool.block_nbytes)
    rows[:, 1:] = (pool.block_nbytes, device, pool.block_nbytes, pool.num_blocks)
    return rows


def _indexes(pool: Pool, ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """Of a request's blocks among all rows' blocks, region by region."""
    regions = np.arange(pool.shape.regions, dtype=np.int64)[:, None] * pool.num_blocks
    return (regions + ids).ravel().astype(np.int32)
