"""The links between the ranks of one engine: steps out, outputs and signs of activity back, msgpack
over ZMQ PAIR.

Abstract Unix sockets: no file is left behind, and nobody on another host can connect.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeAlias

import msgspec
import zmq

from kvxfer.engine.steps import SchedulerOutput, StepOutput
from kvxfer.transfer.manifest import RankManifest

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A rank is up: its manifest (None without a connector)."""

    manifest: RankManifest | None


class Activity(msgspec.Struct, frozen=True, tag="activity"):
    """This rank's connector has something to report: run a step."""


class Output(msgspec.Struct, frozen=True, tag="output"):
    """A step's result."""

    output: StepOutput


FromRank = Started | Activity | Output

END = b""
LAST_WORD_MS = 500
"""How long END may take to leave; a rank that is gone does not hold rank 0 longer."""

_encoder = msgspec.msgpack.Encoder()
_from_rank = msgspec.msgpack.Decoder(FromRank)
_step = msgspec.msgpack.Decoder(SchedulerOutput)


def link_address(engine_token: str, tp_rank: int) -> str:
    """Where rank 0 listens for one other rank; ``engine_token`` is random per life of an engine."""
    return f"ipc://@kvxfer-{engine_token}-{tp_rank}"


class DriverLink:
    """Rank 0's end of the link to one other rank."""

    def __init__(self, context: Context, address: str) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, LAST_WORD_MS)
        self.socket.bind(address)

    def send(self, step: SchedulerOutput) -> None:
        """One step."""
        self.socket.send(_encoder.encode(step))

    def receive(self) -> FromRank:
        """The next message; waits for it. The parent process ends this one when a rank dies."""
        message: FromRank = _from_rank.decode(self.socket.recv())
        return message

    def close(self) -> None:
        """Tell the rank to end, between steps, and drop the link."""
        # Only from here: a rank that left by itself could leave rank 0 in a step, waiting for it.
        with suppress(zmq.Again):  # it never connected
            self.socket.send(END, zmq.NOBLOCK)
        self.socket.close()


class RankLink:
    """A rank's end of its link to rank 0."""

    def __init__(self, context: Context, address: str) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def send(self, message: FromRank) -> None:
        """Tell rank 0."""
        self.socket.send(_encoder.encode(message))

    def receive(self) -> SchedulerOutput | None:
        """The next step; waits for it. None: there is no next one."""
        frame = self.socket.recv()
        return None if frame == END else _step.decode(frame)

    def close(self) -> None:
        """Drop the link."""
        self.socket.close()
