"""What the process that starts an engine and the processes of its ranks tell each other.

Free of torch, so that the parent starts its ranks a second or two earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from kvxfer.engine.config import EngineConfig

STOP = b"stop"
"""From the parent: end."""


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
    """From the parent, at the start and for each reconfiguration: end the life before, begin this
    one. ``token``: random, names the links.
    """

    config: EngineConfig
    incarnation: bytes
    token: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """To the parent, from rank 0: all ranks serve. ``endpoint``: the request channel;
    ``kv_endpoint``: the KV front door, empty without a connector.
    """

    endpoint: str
    kv_endpoint: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """To the parent: this rank cannot start, and why. ``kind``: the error's class."""

    kind: str
    error: str


def keeps_store(collectives: str) -> bool:
    """Is the store needed as long as a rank runs, not only until they have met?

    A thread of torch's nccl looks into it every second, and where it is gone waits for it for a
    minute, in which the process cannot leave its group.
    """
    return collectives == "nccl"


def run_rank(
    spec: RankSpec, parent: Connection, set_up: Callable[[], object] | None = None
) -> None:
    """The entry of a rank's process. ``set_up`` is called first, for tests."""
    from kvxfer.engine.rank import rank_main  # loaded with torch in the fork server, not here

    if set_up is not None:
        set_up()
    rank_main(spec, parent)
