"""How fast KV moves between two CPU pools, beside a plain copy of as many bytes. Bytes are checked
first.

    equal       32 KiB blocks, the same layout on both sides
    mixed       HND blocks of 16 tokens to NHD blocks of 32: runs of 256 bytes
    in order    equal, but the blocks lie side by side in both pools
    pack, unpack    chunks of 1 MiB of the mixed case, pool to chunk and chunk to pool

Blocks are in random order except "in order". Cases take turns; the ratio is the median of each
round's ratio to the plain copy of that round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvxfer.bench import core
from kvxfer.bench.frame import Benchmark, Session, option
from kvxfer.bench.pools import POISON, Ids, Pool, Request, Shape
from kvxfer.tensors.strided_copy import Scratch, gather, scatter, strided_copy

_CHUNK_NBYTES = 1 << 20
NUM_SLOTS = 8
"""Chunks that are packed or unpacked in turn."""
SPREAD = 2  # a pool has this many times the blocks of the request


@dataclass(frozen=True, slots=True)
class Side:
    """A pool of random bytes, and the blocks of the request."""

    pool: Pool
    memory: Tensor
    ids: Ids


def side_of(shape: Shape, layout: str, block_tokens: int, num_tokens: int, seed: int) -> Side:
    """A seed of 0: its blocks lie in order."""
    num_blocks = num_tokens // block_tokens
    pool = Pool(layout, block_tokens, SPREAD * num_blocks, shape)
    content = np.random.default_rng(seed).integers(0, 256, pool.nbytes, np.uint8)
    ids = pool.ids(num_tokens, seed) if seed else np.arange(num_blocks)
    return Side(pool, torch.from_numpy(content), ids)


def _checked_copy(name: str, source: Side, sink: Side, num_tokens: int) -> Callable[[], object]:
    """Pool to pool, once done into a poisoned one."""
    copy_class, _ = Request(source.pool, sink.pool, num_tokens).copy_class()
    memories, ids = ([source.memory], [sink.memory]), (source.ids, sink.ids)
    run = partial(strided_copy, *memories, copy_class, *ids, (0, num_tokens), scratch=Scratch())
    sink.memory.fill_(POISON)
    run()
    tokens = range(num_tokens)
    given, taken = (
        side.pool.token_digests(side.memory, side.ids, tokens) for side in (source, sink)
    )
    if given != taken or not sink.pool.is_untouched_beside(sink.memory, sink.ids):
        raise SystemExit(f"{name}: wrong bytes")
    return run


def _by_chunk(side: Side, num_tokens: int, move: Callable[..., object]) -> Callable[[], None]:
    """``move`` (regions, tokens, chunk) of chunks of one region each."""
    token_nbytes = side.pool.shape.token_nbytes
    step = _CHUNK_NBYTES // token_nbytes
    chunks = [torch.zeros(_CHUNK_NBYTES, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
    spans = [
        ((region, region + 1), (lo, min(lo + step, num_tokens)))
        for region in range(side.pool.shape.regions)
        for lo in range(0, num_tokens, step)
    ]

    def run() -> None:
        for number, (regions, (lo, hi)) in enumerate(spans):
            move(regions, (lo, hi), chunks[number % NUM_SLOTS][: (hi - lo) * token_nbytes])

    return run


def _works_of(shape: Shape, num_tokens: int) -> dict[str, core.Work]:
    """All cases, the plain copy first. Raises SystemExit for wrong bytes."""
    nbytes = num_tokens * shape.regions * shape.token_nbytes
    hnd, other = (side_of(shape, "HND", 16, num_tokens, seed) for seed in (1, 2))
    nhd = side_of(shape, "NHD", 32, num_tokens, 3)
    given, taken = (side_of(shape, "HND", 16, num_tokens, 0) for _ in range(2))
    pack = partial(gather, [hnd.memory], hnd.pool.side(), hnd.ids, nhd.pool.side().tile.order)
    unpack = partial(scatter, [nhd.memory], nhd.pool.side(), nhd.ids)
    return {
        "plain copy": partial(other.memory[:nbytes].copy_, hnd.memory[:nbytes]),
        "equal": _checked_copy("equal", hnd, other, num_tokens),
        "mixed": _checked_copy("mixed", hnd, nhd, num_tokens),
        "in order": _checked_copy("in order", given, taken, num_tokens),
        "pack": _by_chunk(hnd, num_tokens, pack),
        "unpack": _by_chunk(nhd, num_tokens, unpack),
    }


def run(session: Session, options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    shape = Shape("8 heads", options.regions, 8, 256)
    num_tokens = (options.mib << 20) // shape.regions // shape.token_nbytes // 32 * 32
    if not num_tokens:
        raise SystemExit(
            f"bench strided-copy: --mib: expected at least 32 tokens in each of {options.regions} "
            f"regions, got {options.mib} MiB"
        )
    nbytes = num_tokens * shape.regions * shape.token_nbytes
    sizes = f"{options.mib} MiB in {options.regions} regions"
    tables = core.by_section("The ratio is to the plain copy of the same round.")
    report = session.report(
        *("strided_copy", "Copies between two CPU pools", tables), packages=("numpy",)
    )
    taken = core.measure(core.clocked(_works_of(shape, num_tokens), core.timed), options.rounds)
    report.compare(core.Measured("copies", sizes, nbytes), taken)
    report.write()
    return 0


BENCHMARK = Benchmark(
    (
        option("--mib", 64, 16, type=int, help="bytes moved per case (default 64)"),
        option("--regions", 16, type=int, help="regions that share them"),
        option("--rounds", 15, 7, type=int, help="that each case runs"),
        option("--threads", 1, type=int, help="of the plain copy; ours has one"),
    ),
    run,
)
