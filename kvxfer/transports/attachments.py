"""What direct wires share: memory that is given, and which source ranks' memories a sink has
mapped, in which life of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.manifest import MemoryHandle, MemoryInfo, RankManifest
from kvxfer.transports.base import Held, SourceTransport

NOT_ATTACHED = "the source rank is not attached"


class DirectSource(SourceTransport):
    """The giving side of a direct wire: memory that sinks map, and nothing to do."""

    is_stream = False

    def __init__(self, handles: Iterable[MemoryHandle]) -> None:
        self.counts: Counter[str] = Counter()
        self._own = tuple(handles)

    def data_endpoint(self) -> str | None:
        """None: the handles are in the manifest."""
        return None

    def handles(self) -> tuple[MemoryHandle, ...]:
        """One for each memory."""
        return self._own

    @property
    def is_idle(self) -> bool:
        """Always: sinks read by themselves."""
        return True

    def close(self) -> None:
        """Nothing to give back: the memory is its owner's."""


M = TypeVar("M", bound=Held)
"""A peer's memory, mapped here."""
H = TypeVar("H", bound=MemoryHandle)
_Handles = tuple[MemoryHandle | None, ...]


@dataclass(slots=True, eq=False)
class Attached(Generic[M]):
    """A mapped source rank. The handles name the life of its memories."""

    control_endpoint: str
    handles: _Handles
    mappings: tuple[M, ...]


class Attachments(Generic[M]):
    """The mapped source ranks by control endpoint.

    Args:
        map_memory: maps one memory; the text names it. Raises TransportUnavailable.
        let_go: called with an attachment that is not to be used for new reads any more.
    """

    def __init__(
        self,
        transport: str,
        map_memory: Callable[[MemoryInfo, str], M],
        let_go: Callable[[Attached[M]], None],
    ) -> None:
        self._transport = transport
        self._map_memory = map_memory
        self._let_go = let_go
        self._by_endpoint: dict[str, Attached[M]] = {}

    def map_first(self, source: RankManifest) -> M:
        """Map one memory of a rank, to try. Raises TransportUnavailable."""
        return self._map_memory(self._memories(source)[0], "memory 0")

    def map_all(self, source: RankManifest) -> tuple[M, ...]:
        """Every memory of a rank that has one, to try; if one fails, none. Raises
        TransportUnavailable.
        """
        return self._map_all(self._memories(source))

    def _memories(self, source: RankManifest) -> tuple[MemoryInfo, ...]:
        if not source.memories:
            raise TransportUnavailable(
                f"{self._transport}: expected memories of {source.control_endpoint}, got none"
            )
        return source.memories

    def _map_all(self, memories: Sequence[MemoryInfo]) -> tuple[M, ...]:
        """Every one of them, or none."""
        mappings: list[M] = []
        try:
            for number, info in enumerate(memories):
                mappings.append(self._map_memory(info, f"memory {number}"))
        except TransportUnavailable:
            for mapping in mappings:
                mapping.close()
            raise
        return tuple(mappings)

    def attach(self, source: RankManifest, mapped: tuple[M, ...] = ()) -> None:
        """Map the rank's memories, once for each life of them. ``mapped``: all of them, by
        :meth:`map_all`; who has attached has them, and closes them if they are not needed.

        Other memories under the same control endpoint take the place of those that are mapped: an
        endpoint is what a peer says of itself, so reads look at the handles too.
        """
        if self.find(source) is not None:
            for mapping in mapped:
                mapping.close()
            return
        mappings = mapped or self._map_all(source.memories)
        self.detach(source.control_endpoint)
        self._by_endpoint[source.control_endpoint] = Attached(
            source.control_endpoint, _handles(source), mappings
        )

    def find(self, source: RankManifest) -> Attached[M] | None:
        """The mapped memories, if they are those that this manifest names."""
        attached = self._by_endpoint.get(source.control_endpoint)
        return attached if attached and attached.handles == _handles(source) else None

    def detach(self, control_endpoint: str) -> None:
        """Forget a rank; unknown ones: nothing."""
        attached = self._by_endpoint.pop(control_endpoint, None)
        if attached is not None:
            self._let_go(attached)

    def close(self) -> None:
        """Forget all."""
        for endpoint in list(self._by_endpoint):
            self.detach(endpoint)


def handle_of(transport: str, info: MemoryInfo, name: str, kind: type[H]) -> H:
    """A peer's handle, if it is of this wire's kind and size. Raises TransportUnavailable."""
    handle = info.handle
    if not isinstance(handle, kind):
        raise TransportUnavailable(
            f"{transport}: expected a handle for {name}, got none; the peer does not offer it"
        )
    if handle.nbytes != info.nbytes:
        raise TransportUnavailable(
            f"{transport}: expected {info.nbytes} bytes of {name}, got a handle of {handle.nbytes}"
        )
    return handle


def _handles(source: RankManifest) -> _Handles:
    return tuple(info.handle for info in source.memories)
