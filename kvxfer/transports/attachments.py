"""The memories of source ranks that the sink of a direct wire has mapped."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.manifest import MemoryHandle, MemoryInfo, RankManifest
from kvxfer.transports.base import DirectSink, Held, Trial

NOT_ATTACHED = "the source rank is not attached"

M = TypeVar("M", bound=Held)
"""A peer's memory, mapped here."""
H = TypeVar("H", bound=MemoryHandle)
_Handles = tuple[MemoryHandle | None, ...]


@dataclass(slots=True, eq=False)
class Attached(Generic[M]):
    """A mapped source rank. Its handles tell one life of its memories from the next."""

    control_endpoint: str
    handles: _Handles
    mappings: tuple[M, ...]


class MappingSink(DirectSink, Generic[M]):
    """The part of a direct wire's sink that knows which ranks are mapped, by control endpoint."""

    def __init__(self) -> None:
        self._by_endpoint: dict[str, Attached[M]] = {}

    @abstractmethod
    def _map(self, info: MemoryInfo, name: str) -> M:
        """Map one memory; ``name`` is for errors. Raises TransportUnavailable."""

    @abstractmethod
    def _let_go(self, attached: Attached[M]) -> None:
        """No new read begins there. Unfinished reads break, and the mappings close when no copy
        runs on them any more.
        """

    def _check_has_memories(self, source: RankManifest) -> None:
        """Raises TransportUnavailable for a rank without memories."""
        if not source.memories:
            raise TransportUnavailable(
                f"{self.name}: expected memories of {source.control_endpoint}, got none"
            )

    def _map_all(self, source: RankManifest) -> tuple[M, ...]:
        """Every memory of a rank, or none. Raises TransportUnavailable."""
        mappings: list[M] = []
        with ExitStack() as undo:
            for number, info in enumerate(source.memories):
                mappings.append(self._map(info, f"memory {number}"))
                undo.callback(mappings[-1].close)
            undo.pop_all()
        return tuple(mappings)

    def attach(self, source: RankManifest, trial: Trial | None = None) -> None:
        """Map the rank's memories, once for each life of them, unless the trial has mapped them.

        Other memories under the same control endpoint take the place of those that are mapped: a
        peer states its own endpoint, so reads compare the handles too.
        """
        if self._find(source) is not None:
            if trial is not None:
                trial.close()
            return
        held = trial.held if trial is not None else ()
        mappings = cast("tuple[M, ...]", held) or self._map_all(source)
        self.detach(source.control_endpoint)
        self._by_endpoint[source.control_endpoint] = Attached(
            source.control_endpoint, _handles(source), mappings
        )

    def detach(self, control_endpoint: str) -> None:
        attached = self._by_endpoint.pop(control_endpoint, None)
        if attached is not None:
            self._let_go(attached)

    def _find(self, source: RankManifest) -> Attached[M] | None:
        """The mapped memories of this rank, if their handles are those of its manifest."""
        attached = self._by_endpoint.get(source.control_endpoint)
        return attached if attached and attached.handles == _handles(source) else None

    def _detach_all(self) -> None:
        for endpoint in list(self._by_endpoint):
            self.detach(endpoint)


def handle_of(transport: str, info: MemoryInfo, name: str, kind: type[H]) -> H:
    """A peer's handle, if it is of this wire's kind and size. Raises TransportUnavailable."""
    handle = info.handle
    if not isinstance(handle, kind):
        raise TransportUnavailable(
            f"{transport}: expected a handle for {name}, got none: nobody else can map it"
        )
    if handle.nbytes != info.nbytes:
        raise TransportUnavailable(
            f"{transport}: expected {info.nbytes} bytes of {name}, got a handle of {handle.nbytes}"
        )
    return handle


def _handles(source: RankManifest) -> _Handles:
    return tuple(info.handle for info in source.memories)
