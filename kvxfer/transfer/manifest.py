"""An engine's manifest: its records and their validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import msgspec

from kvxfer.errors import IncompatiblePeer
from kvxfer.transfer.interleave import MAX_PERIOD
from kvxfer.transfer.layout import MAX_NBYTES, Region, check_region
from kvxfer.transfer.windows import group_keepings

MAX_RANKS = 1024
"""Of an engine. Each Pull names the ranks of its engine, which takes the source 0.2 ms for so many,
whoever sends it; with 4096 and 0.9 ms a stranger's Pulls made loads wait for 80 ms.
"""
_MAX_GROUPS = 256
_MAX_OTHER_HEADS = 1 << 24
"""Of states and of drafts, whose heads are not the model's; nothing loops over them."""
_INCARNATION_NBYTES = 16
_SHOWN_PROBLEMS = 8


class RankId(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One worker of an engine. Not the garbage collector's: claims of 4096 of these, one after the
    other, made it look through the whole process all the time (p99 of other loads 10 times as
    long).
    """

    pp: int
    tp: int

    def __str__(self) -> str:
        return f"pp{self.pp}tp{self.tp}"


class MemfdHandle(msgspec.Struct, frozen=True, kw_only=True, tag="memfd"):
    """A pool in shared memory: ``/proc/<pid>/fd/<fd>`` of the process that owns it.

    ``nonce`` stands in the pool's header (its first 4096 bytes), so that a sink can prove that it
    mapped the right one. ``boot_id`` names the host's life: equal on both sides or the handle is
    not even tried.
    """

    boot_id: str
    pid: int
    fd: int
    nbytes: int
    nonce: bytes


class CudaIpcHandle(msgspec.Struct, frozen=True, kw_only=True, tag="cuda_ipc"):
    """Memory of a GPU: the 64 bytes by which the CUDA driver names an allocation of process ``pid``
    on the host whose life is ``boot_id``, and where in it the memory lies.
    """

    boot_id: str
    pid: int
    handle: bytes
    offset: int
    nbytes: int


MemoryHandle = MemfdHandle | CudaIpcHandle


class MemoryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Regions refer to it by its position. ``handle``: None where it cannot be mapped."""

    device: str
    nbytes: int
    handle: MemoryHandle | None = None


class RankManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank: where it listens (``tcp://host:port``) and where its cache lies.

    ``board``: where sinks of the same host see which of its offers are open; None: nowhere.
    ``curve_public_key`` (Z85): of the listeners of its data endpoints; None: without CURVE.
    """

    rank: RankId
    control_endpoint: str
    data_endpoints: dict[str, str]
    memories: tuple[MemoryInfo, ...]
    regions: tuple[Region, ...]
    board: MemfdHandle | None = None
    curve_public_key: str | None = None


class CacheFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must agree between two engines, but for the sizes of context parallelism,
    which tell how many ranks share the tokens. Unknown is "" and never equals anything.

    ``attention``: what each layer looks at and whose KV it uses, in one word where all layers look
    at all tokens and have their own (the default), else a text that two engines of the same model
    make alike. What is *kept* for that may differ, and stands in the regions.
    """

    model: str
    weights: str
    rope: str
    dtype: str
    quantisation: str
    num_kv_heads: int
    head_size: int
    num_layers: int
    is_mla: bool = False
    draft_layers: tuple[str, ...] = ()
    dcp_size: int = 1
    pcp_size: int = 1
    attention: str = "full"


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in one life (``incarnation``: 16 random bytes, one registration of its pools), as
    its scheduler and all its workers know it.
    """

    engine_id: str
    incarnation: bytes
    facts: CacheFacts
    tp_size: int
    pp_size: int
    block_tokens: int
    layout: str


class EngineManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What another engine is told: all of :class:`EngineIdentity`, and all ranks. The order of the
    fields is that of their bytes.
    """

    engine_id: str
    incarnation: bytes
    protocol: tuple[int, int]
    capabilities: tuple[str, ...]
    facts: CacheFacts
    tp_size: int
    pp_size: int
    block_tokens: int
    layout: str
    ranks: tuple[RankManifest, ...]

    def rank(self, rank: RankId) -> RankManifest:
        """The manifest of one rank; KeyError names it."""
        for entry in self.ranks:
            if entry.rank == rank:
                return entry
        raise KeyError(f"rank: expected one of {[str(r.rank) for r in self.ranks]}, got {rank}")


def validate_manifest(manifest: EngineManifest) -> None:
    """By itself? Raises IncompatiblePeer with the first few things that are wrong."""
    problems = list(_engine_problems(manifest))
    if not problems:  # the sizes are sane, so the ranks can be looked at
        problems = list(_rank_problems(manifest))
    if problems:
        shown = "; ".join(problems[:_SHOWN_PROBLEMS])
        more = len(problems) - _SHOWN_PROBLEMS
        raise IncompatiblePeer(
            f"manifest of engine {manifest.engine_id[:64]!r}: {shown}"
            + (f"; and {more} more" if more > 0 else "")
        )


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``. Raises ValueError."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    plain = (f"tcp://{host}:{port}", f"tcp://[{host}]:{port}")
    if not host or not port or endpoint.lower() not in plain:
        raise ValueError(f"endpoint: expected tcp://host:port, got {endpoint[:128]!r}")
    return host, port


def _engine_problems(manifest: EngineManifest) -> Iterator[str]:
    if not manifest.engine_id:
        yield "engine_id: expected a name, got an empty one"
    if len(manifest.incarnation) != _INCARNATION_NBYTES:
        yield f"incarnation: expected 16 bytes, got {len(manifest.incarnation)}"
    if not 1 <= manifest.protocol[0] <= manifest.protocol[1]:
        yield f"protocol: expected 1 <= min <= max, got {manifest.protocol}"
    for field in ("tp_size", "pp_size", "block_tokens"):
        if getattr(manifest, field) < 1:
            yield f"{field}: expected 1 or more, got {getattr(manifest, field)}"
    for field in ("num_kv_heads", "head_size", "num_layers", "dcp_size", "pcp_size"):
        if getattr(manifest.facts, field) < 1:
            yield f"{field}: expected 1 or more, got {getattr(manifest.facts, field)}"
    if max(len(manifest.ranks), manifest.tp_size * manifest.pp_size) > MAX_RANKS:
        yield (
            f"ranks: expected at most {MAX_RANKS}, got {len(manifest.ranks)} "
            f"of {manifest.tp_size} x {manifest.pp_size}"
        )


def _rank_problems(manifest: EngineManifest) -> Iterator[str]:
    expected = {RankId(p, t) for p in range(manifest.pp_size) for t in range(manifest.tp_size)}
    got = Counter(entry.rank for entry in manifest.ranks)
    if set(got) != expected or len(manifest.ranks) != len(expected):
        wrong = sorted({rank for rank, count in got.items() if count > 1} | (set(got) ^ expected))
        yield (
            f"ranks: expected each of {manifest.pp_size} x {manifest.tp_size} (pp x tp) once, "
            f"got {', '.join(map(str, wrong[:_SHOWN_PROBLEMS]))} missing, twice or unexpected"
        )
    listening = Counter(entry.control_endpoint for entry in manifest.ranks)
    for endpoint, count in listening.items():
        if count > 1:
            yield (
                "ranks: expected each to have a control endpoint of its own, "
                f"got {endpoint[:128]!r} {count} times"
            )
    max_head = 1 if manifest.facts.is_mla else manifest.facts.num_kv_heads
    for entry in manifest.ranks:
        where = f"rank {entry.rank}"
        for endpoint in (entry.control_endpoint, *entry.data_endpoints.values()):
            try:
                parse_endpoint(endpoint)
            except ValueError as e:
                yield f"{where}: {e}"
        for number, memory in enumerate(entry.memories):
            if not 0 <= memory.nbytes <= MAX_NBYTES:
                yield f"{where}: memory {number}: expected a size, got {memory.nbytes} bytes"
        for problem in _region_problems(entry.regions, entry.memories, max_head):
            yield f"{where}: {problem}"
    try:
        group_keepings(region for entry in manifest.ranks for region in entry.regions)
    except ValueError as e:
        yield str(e)
    yield from _interleave_problems(manifest)


def _interleave_problems(manifest: EngineManifest) -> Iterator[str]:
    """Ranks of one context parallel group take their tokens in turns, all in the same runs."""
    size = manifest.facts.dcp_size * manifest.facts.pcp_size
    runs: dict[tuple[str, str], int] = {}
    for entry in manifest.ranks:
        for region in entry.regions:
            name = f"rank {entry.rank}: region {region.layer}/{region.plane}: interleave"
            kept = region.kept
            if kept.size not in (1, size) or kept.period > MAX_PERIOD:
                yield (
                    f"{name}: expected the {size} ranks of dcp_size x pcp_size and at most "
                    f"{MAX_PERIOD} tokens of all, got {kept}"
                )
            if runs.setdefault((region.layer, region.plane), kept.period) != kept.period:
                yield f"{name}: expected runs as on the ranks before, got {kept}"


def _region_problems(
    regions: Sequence[Region], memories: Sequence[MemoryInfo], max_head: int
) -> Iterator[str]:
    names: set[tuple[str, str]] = set()
    for region in regions:
        name = f"region {region.layer}/{region.plane}"
        if (region.layer, region.plane) in names:
            yield f"{name}: expected once, got it again"
        names.add((region.layer, region.plane))
        if not 0 <= region.memory < len(memories):
            yield f"{name}: memory: expected one of {len(memories)}, got number {region.memory}"
            continue
        if region.group >= _MAX_GROUPS:
            yield f"{name}: group: expected below {_MAX_GROUPS}, got {region.group}"
        most = _MAX_OTHER_HEADS if region.is_state or region.is_draft else max_head
        if region.head_hi > most:
            yield f"{name}: heads: expected at most {most}, got head_hi {region.head_hi}"
        try:
            check_region(region, memories[region.memory].nbytes)
        except ValueError as e:
            yield str(e)
