"""Wires of a test in the place of kvxfer's own: in the tables where those are named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvxfer.testing.faults import ChangedCopier
from kvxfer.transports import registry
from kvxfer.transports.copy_thread import CopyJob
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource

Make = Callable[..., Any]
RunPiece = Callable[[CopyJob], bool]


def use_sink(patch: pytest.MonkeyPatch, name: str, make: Make) -> None:
    patch.setitem(registry.SINKS, name, make)


def use_source(patch: pytest.MonkeyPatch, name: str, make: Make) -> None:
    patch.setitem(registry.SOURCES, name, make)


def use_pipe(patch: pytest.MonkeyPatch, name: str, make_pipe: Make) -> None:
    """Both sides of a stream wire."""
    use_source(patch, name, partial(StreamSource, make_pipe))
    use_sink(patch, name, partial(StreamSink, make_pipe))


def pipe_of(name: str) -> Make:
    """What makes the pipe of one of kvxfer's own wires."""
    return registry.PIPES[name]


def keep_wires(patch: pytest.MonkeyPatch) -> None:
    """What is changed in the tables is forgotten with ``patch``."""
    for table in ("SOURCES", "SINKS"):
        patch.setattr(registry, table, dict(getattr(registry, table)))


def run_pieces(
    patch: pytest.MonkeyPatch, name: str, run: RunPiece, *, at_once: bool = False
) -> None:
    """Both ends of a wire, made from now on, have ``run(job)`` in the place of ``job.run()`` for
    each piece of copying on a CPU. ``at_once``: small ones where they begin, as ever.
    """

    def with_pieces(make: Make, memory: Any, config: Any, copier: Any, *rest: Any) -> Any:
        return make(memory, config, ChangedCopier(copier, run, at_once=at_once), *rest)

    use_source(patch, name, partial(with_pieces, registry.SOURCES[name]))
    use_sink(patch, name, partial(with_pieces, registry.SINKS[name]))
