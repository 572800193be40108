"""What the processes of an engine tell each other.

The process that starts it and its ranks, over a pipe: lives out, one report back. Rank 0 and the
others, msgpack over ZMQ PAIR: steps out, outputs and signs of activity back. These are abstract
Unix sockets: no file is left behind, and nobody on another host can connect.

Free of torch, so that the parent starts its ranks a second or two earlier.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeAlias

import msgspec
import zmq

from kvxfer.engine.config import EngineConfig
from kvxfer.engine.steps import SchedulerOutput, StepOutput
from kvxfer.transfer.manifest import RankManifest

STOP = b"stop"
"""From the parent: end."""
DRAIN = b"drain"
"""From the parent to rank 0: take nothing new, finish the rest, and say Drained."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is told when it starts, and keeps through all its lives.

    ``store``: the file at which the ranks meet. ``device``: "cpu" or "cuda:N". ``collectives``:
    gloo or nccl.
    """

    tp_rank: int
    tp_size: int
    store: str
    device: str
    collectives: str
    listen_host: str
    listen_port: int
    peer_pids: tuple[int, ...] = ()


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """From the parent: end the life before, begin this one. ``token``: random, names the links."""

    config: EngineConfig
    incarnation: bytes
    token: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """To the parent, from rank 0: all ranks serve. ``endpoint``: the request channel;
    ``kv_endpoint``: the KV front door, empty without a connector; ``metrics_endpoint``: the URL of
    its metrics, empty without.
    """

    endpoint: str
    kv_endpoint: str = ""
    metrics_endpoint: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """To the parent: this rank cannot start, and why. ``kind``: the error's class."""

    kind: str
    error: str


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """To the parent, from rank 0 that was told to drain: no request and no offer is left."""


def keeps_store(collectives: str) -> bool:
    """Is the store needed as long as a rank runs, not only until they have met?

    A thread of torch's nccl looks into it every second, and where it is gone waits for it for a
    minute, in which the process cannot leave its group.
    """
    return collectives == "nccl"


Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A rank is up: its manifest (None without a connector)."""

    manifest: RankManifest | None


class Activity(msgspec.Struct, frozen=True, tag="activity"):
    """This rank's connector has something to report: run a step."""


class Output(msgspec.Struct, frozen=True, tag="output"):
    """What one rank returns from a step, sent to rank 0."""

    output: StepOutput


_FromRank = Started | Activity | Output

_END = b""
_LAST_WORD_MS = 500
"""How long _END may take to leave; a rank that is gone does not hold rank 0 longer."""

_encoder = msgspec.msgpack.Encoder()
_from_rank = msgspec.msgpack.Decoder(_FromRank)
_step = msgspec.msgpack.Decoder(SchedulerOutput)


def link_address(engine_token: str, tp_rank: int) -> str:
    """Where rank 0 listens for one other rank; ``engine_token`` is random per life of an engine."""
    return f"ipc://@kvxfer-{engine_token}-{tp_rank}"


class DriverLink:
    """Rank 0's end of the link to one other rank."""

    def __init__(self, context: Context, address: str) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, _LAST_WORD_MS)
        self.socket.bind(address)

    def send(self, step: SchedulerOutput) -> None:
        self.socket.send(_encoder.encode(step))

    def receive(self) -> _FromRank:
        """The next message; waits for it. The parent process ends this one when a rank dies."""
        message: _FromRank = _from_rank.decode(self.socket.recv())
        return message

    def close(self) -> None:
        """Tell the rank to end, between steps, and drop the link."""
        # Only from here: a rank that left by itself could leave rank 0 in a step, waiting for it.
        with suppress(zmq.Again):  # it never connected
            self.socket.send(_END, zmq.NOBLOCK)
        self.socket.close()


class RankLink:
    """A rank's end of its link to rank 0."""

    def __init__(self, context: Context, address: str) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def send(self, message: _FromRank) -> None:
        self.socket.send(_encoder.encode(message))

    def receive(self) -> SchedulerOutput | None:
        frame = self.socket.recv()
        return None if frame == _END else _step.decode(frame)

    def close(self) -> None:
        self.socket.close()
