"""A read of a stream wire's sink, which chunks of it are wanted, and one that is being unpacked."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.transfer.plan import Chunk
from kvxfer.transports.base import ReadBroke, ReadRequest
from kvxfer.transports.stream_link import Link
from kvxfer.transports.stream_packing import ChunkJob, Ids
from kvxfer.transports.stream_wire import ChunkHeader, Header


@dataclass(slots=True, eq=False)
class Read:
    """One read. ``arrived`` (announced) and ``placed`` are bitmaps over the chunk list."""

    request: ReadRequest
    link: ReadLink
    chunks: tuple[Chunk, ...]
    sink_ids: list[Ids]
    arrived: bytearray
    placed: bytearray
    nbytes: int = 0
    jobs: dict[int, UnpackJob] = field(default_factory=dict)
    stopped: bool = False
    broke: ReadBroke | None = None

    @property
    def is_placed(self) -> bool:
        """Whether every chunk lies in place."""
        return all(self.placed)

    @property
    def is_over(self) -> bool:
        """Whether its chunks are not wanted any more."""
        return self.stopped or self.broke is not None


Wanted = tuple[Read, int] | None
"""Which chunk of which read; None for one that nobody wants."""
ReadLink = Link[Wanted]


class UnpackJob(ChunkJob):
    """A chunk on its way out of a slot of a link."""

    __slots__ = ("link", "read")

    def __init__(self, read: Read, sequence: int, slot: int) -> None:
        chunk, link = read.chunks[sequence], read.link
        side = read.request.classes[chunk.class_index].sink
        payload = link.lane.payload(slot)
        ids = read.sink_ids[side.group]
        super().__init__(
            read.request.key, chunk, side, ids, None, slot, lambda: payload, read.request.after
        )
        self.read = read
        self.link = link


def why_not(link: ReadLink, read: Read | None, header: Header) -> str | None:
    """Why a chunk is not wanted; None if it is."""
    if read is None or read.is_over or not isinstance(header, ChunkHeader):
        return "unknown_key"
    if read.link is not link:
        return "foreign_source"
    if not 0 <= header.sequence < len(read.chunks):
        return "unknown_sequence"
    if read.arrived[header.sequence]:
        return "duplicate"
    if header.nbytes != read.chunks[header.sequence].nbytes:
        return "wrong_nbytes"
    return None
