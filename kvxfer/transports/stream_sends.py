"""A transfer of a stream wire's source, and a chunk of it that is being packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from kvxfer.transfer.plan import Chunk
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import SendRequest
from kvxfer.transports.stream_connections import Connection, ReadName
from kvxfer.transports.stream_packing import ChunkJob, Ids


@dataclass(slots=True, eq=False)
class Send:
    """One transfer. ``jobs`` and ``packed`` (the slot of each) are by sequence."""

    request: SendRequest
    chunks: tuple[Chunk, ...]
    block_ids: list[Ids]
    connection: Connection | None = None
    num_started: int = 0
    num_sent: int = 0
    nbytes: int = 0
    jobs: dict[int, PackJob] = field(default_factory=dict)
    packed: dict[int, int] = field(default_factory=dict)
    stopping: bool = False
    reason: Reason | None = None

    @property
    def name(self) -> ReadName:
        """By what the sink names it."""
        key = self.request.key
        return key.nonce, key.incarnation, key.sink_rank


class PackJob(ChunkJob):
    """A chunk on its way into a slot of a connection."""

    __slots__ = ("connection", "send")

    def __init__(self, send: Send, connection: Connection, chunk: Chunk, slot: int) -> None:
        assert connection.lane is not None
        side = send.request.sides[chunk.class_index]
        super().__init__(
            send.request.key,
            chunk,
            side,
            send.block_ids[side.group],
            send.request.classes[chunk.class_index].order,
            slot,
            partial(connection.lane.staging, slot, chunk.nbytes),
        )
        self.send = send
        self.connection = connection
