"""Which ranks of a remote engine hold the KV heads of a local rank, and how block sizes compare.

KV heads are split over tensor-parallel ranks in order: with ``total_num_kv_heads`` K and TP size T,
rank r holds heads ``[r*K/T, (r+1)*K/T)``, or, when T > K, one head that T/K neighbouring ranks
share. With MLA every rank holds everything.

The ratios here want sizes that divide each other. The plan of a copy does not: it works from head
ranges and token positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.errors import UnknownEngine

_EngineId = str


@dataclass
class TpKVTopology:
    """The local rank's view of its own engine and of the engines it knows.

    ``remote_tp_size`` and ``remote_block_size`` (tokens) are by engine id and contain the own
    engine too; they may grow as engines are met. ``attn_backend`` is whatever tells the cache
    layout; nothing here depends on it.

    Raises ValueError for sizes below 1 and a rank outside its engine, UnknownEngine if the own
    engine is missing.
    """

    tp_rank: int
    remote_tp_size: dict[_EngineId, int]
    is_mla: bool
    total_num_kv_heads: int
    attn_backend: object
    engine_id: _EngineId
    remote_block_size: dict[_EngineId, int]

    def __post_init__(self) -> None:
        if self.total_num_kv_heads < 1:
            raise ValueError(
                f"total_num_kv_heads: expected at least 1, got {self.total_num_kv_heads}"
            )
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(
                f"tp_rank: expected 0 to {self.tp_size - 1} (tp_size {self.tp_size}), "
                f"got {self.tp_rank}"
            )
        _positive("block_size", self.block_size)

    @property
    def tp_size(self) -> int:
        return _positive("tp_size", _known(self.remote_tp_size, self.engine_id))

    @property
    def block_size(self) -> int:
        """Tokens of a block of the own engine."""
        return _known(self.remote_block_size, self.engine_id)

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Local ranks per remote rank; if the remote is larger, minus remote ranks per local rank.

        Equal sizes give 1. Raises ValueError when neither size divides the other.
        """
        local, remote = self.tp_size, _positive("remote tp_size", remote_tp_size)
        if max(local, remote) % min(local, remote):
            raise ValueError(
                f"tp_size: expected one to be a multiple of the other, "
                f"got local {local} and remote {remote}"
            )
        return local // remote if local >= remote else -(remote // local)

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Remote blocks per local block.

        Raises ValueError when the remote size does not divide the local one (also when it is
        larger).
        """
        local, remote = self.block_size, _positive("remote block_size", remote_block_size)
        if local % remote:
            raise ValueError(
                f"block_size: expected the local one to be a multiple of the remote one, "
                f"got local {local} and remote {remote}"
            )
        return local // remote

    def tp_ratio_from_engine_id(self, engine_id: _EngineId) -> int:
        """:meth:`tp_ratio` to a known engine. Raises UnknownEngine, ValueError."""
        return self.tp_ratio(_known(self.remote_tp_size, engine_id))

    def block_size_ratio_from_engine_id(self, engine_id: _EngineId) -> int:
        """:meth:`block_size_ratio` to a known engine. Raises UnknownEngine, ValueError."""
        return self.block_size_ratio(_known(self.remote_block_size, engine_id))

    def is_kv_replicated(self, engine_id: _EngineId) -> bool:
        """Do several ranks of that engine hold the same head (more ranks than heads)?"""
        return _known(self.remote_tp_size, engine_id) > self.total_num_kv_heads

    def replicates_kv_cache(self, engine_id: _EngineId) -> bool:
        """Do several ranks of that engine hold the same KV, by head replication or by MLA?"""
        # Asked first: an unknown engine is an error with MLA too.
        return self.is_kv_replicated(engine_id) or self.is_mla

    def get_target_remote_ranks(self, remote_tp_size: int) -> list[int]:
        """The remote ranks that this rank works with, in order; several when the remote is larger.

        They hold every head that this rank holds. Where KV is replicated they hold it more than
        once, and the plan picks.
        """
        ratio = self.tp_ratio(remote_tp_size)
        if ratio > 0:
            return [self.tp_rank // ratio]
        return [self.tp_rank * -ratio + i for i in range(-ratio)]

    def get_target_remote_ranks_from_engine_id(self, engine_id: _EngineId) -> list[int]:
        """:meth:`get_target_remote_ranks` of a known engine. Raises UnknownEngine, ValueError."""
        return self.get_target_remote_ranks(_known(self.remote_tp_size, engine_id))


def _known(by_engine: dict[_EngineId, int], engine_id: _EngineId) -> int:
    if engine_id not in by_engine:
        known = ", ".join(sorted(by_engine)) or "none"
        raise UnknownEngine(f"engine: expected a known one ({known}), got {engine_id!r}")
    return by_engine[engine_id]


def _positive(name: str, size: int) -> int:
    if size < 1:
        raise ValueError(f"{name}: expected at least 1, got {size}")
    return size
