"""How fast KV moves between two CPU pools, beside a plain copy of as many bytes. Bytes are checked
first.

    equal       32 KiB blocks, the same layout on both sides
    mixed       HND blocks of 16 tokens to NHD blocks of 32: runs of 256 bytes
    in order    equal, but the blocks lie side by side in both pools
    pack, unpack    chunks of 1 MiB of the mixed case, pool to chunk and chunk to pool

Blocks are in random order except "in order". Cases are interleaved round by round; the ratio is the
median of each round's ratio to the plain copy of that round.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from kvxfer.tensors.strided_copy import Scratch, gather, scatter, strided_copy
from kvxfer.transfer.plan import Base, CopyClass, RegionName, Side, Tile

NUM_HEADS = 8
INNER_NBYTES = 256
TOKEN_NBYTES = NUM_HEADS * INNER_NBYTES
CHUNK_NBYTES = 1 << 20
SPREAD = 2  # a pool has this many times the blocks of the request


@dataclass(frozen=True, slots=True)
class Pool:
    """One memory with all regions of a side, and the request's blocks."""

    memory: Tensor
    side: Side
    block_ids: NDArray[np.int64]

    def content(self) -> NDArray[np.uint8]:
        """[regions, tokens, heads, inner] of the request, not by the code under test."""
        tile = self.side.tile
        blocks = self.memory.numpy().reshape(len(self.side.bases), tile.num_blocks, -1)
        if tile.stride_token == INNER_NBYTES:
            shaped = blocks.reshape(*blocks.shape[:2], NUM_HEADS, tile.block_tokens, INNER_NBYTES)
            shaped = shaped.swapaxes(2, 3)
        else:
            shaped = blocks.reshape(*blocks.shape[:2], tile.block_tokens, NUM_HEADS, INNER_NBYTES)
        return shaped[:, self.block_ids].reshape(len(self.side.bases), -1, NUM_HEADS, INNER_NBYTES)


@dataclass(frozen=True, slots=True)
class Result:
    """GB/s of one case and the median ratio to the plain copy."""

    case: str
    p20_gbps: float
    p50_gbps: float
    p80_gbps: float
    ratio: float


def make_pool(
    layout: str, block_tokens: int, num_tokens: int, num_regions: int, *, in_order: bool, seed: int
) -> Pool:
    """A dense pool of random bytes."""
    num_blocks = SPREAD * num_tokens // block_tokens
    block_nbytes = block_tokens * TOKEN_NBYTES
    tile = Tile(
        block_tokens=block_tokens,
        kernel_tokens=block_tokens,
        num_blocks=num_blocks,
        num_heads=NUM_HEADS,
        inner_nbytes=INNER_NBYTES,
        stride_block=block_nbytes,
        stride_head=INNER_NBYTES * (block_tokens if layout == "HND" else 1),
        stride_token=INNER_NBYTES * (1 if layout == "HND" else NUM_HEADS),
    )
    region_nbytes = num_blocks * block_nbytes
    bases = tuple(Base(0, number * region_nbytes) for number in range(num_regions))
    rng = np.random.default_rng(seed)
    memory = torch.from_numpy(rng.integers(0, 256, num_regions * region_nbytes, np.uint8))
    ids = np.arange(num_blocks) if in_order else rng.permutation(num_blocks)
    side = Side(group=0, tile=tile, bases=bases)
    return Pool(memory, side, ids[: num_tokens // block_tokens].astype(np.int64))


def copy_case(source: Pool, sink: Pool, num_tokens: int) -> Callable[[], None]:
    """Pool to pool."""
    names = tuple(RegionName(f"layers.{i}", ("k",)) for i in range(len(source.side.bases)))
    copy_class = CopyClass(names, 0, NUM_HEADS, source.side, sink.side)
    scratch = Scratch()

    def run() -> None:
        strided_copy(
            [source.memory],
            [sink.memory],
            copy_class,
            source.block_ids,
            sink.block_ids,
            (0, num_tokens),
            scratch=scratch,
        )

    return run


def chunk_spans(num_tokens: int, num_regions: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Regions and tokens of chunks of one region."""
    step = CHUNK_NBYTES // TOKEN_NBYTES
    return [
        ((region, region + 1), (lo, min(lo + step, num_tokens)))
        for region in range(num_regions)
        for lo in range(0, num_tokens, step)
    ]


def pack_case(source: Pool, sink: Pool, num_tokens: int) -> Callable[[], None]:
    """Source pool to chunks, into eight staging slots in turn."""
    order = sink.side.tile.order
    slots = [torch.zeros(CHUNK_NBYTES, dtype=torch.uint8) for _ in range(8)]
    spans = chunk_spans(num_tokens, len(source.side.bases))

    def run() -> None:
        for number, span in enumerate(spans):
            out = slots[number % 8][: (span[1][1] - span[1][0]) * TOKEN_NBYTES]
            gather([source.memory], source.side, source.block_ids, order, *span, out)

    return run


def unpack_case(sink: Pool, num_tokens: int) -> Callable[[], None]:
    """Eight chunks in turn to the sink pool."""
    slots = [torch.zeros(CHUNK_NBYTES, dtype=torch.uint8) for _ in range(8)]
    spans = chunk_spans(num_tokens, len(sink.side.bases))

    def run() -> None:
        for number, span in enumerate(spans):
            dense = slots[number % 8][: (span[1][1] - span[1][0]) * TOKEN_NBYTES]
            scatter([sink.memory], sink.side, sink.block_ids, *span, dense)

    return run


def plain_copy(source: Tensor, sink: Tensor) -> None:
    """The limit: the same bytes in one piece."""
    sink.copy_(source)


def check(name: str, run: Callable[[], None], source: Pool, sink: Pool) -> None:
    """Copy once into a poisoned pool; no time is taken of a case that moves wrong bytes."""
    sink.memory.fill_(0xEE)
    run()
    if not np.array_equal(source.content(), sink.content()):
        raise SystemExit(f"{name}: wrong bytes")


def measure(cases: dict[str, Callable[[], None]], nbytes: int, rounds: int) -> list[Result]:
    """All cases, interleaved; the first is what the others are compared with."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            rates[name].append(nbytes / (time.perf_counter() - start) / 1e9)
    plain = np.array(next(iter(rates.values())))
    return [
        Result(
            case=name,
            p20_gbps=float(np.quantile(values, 0.2)),
            p50_gbps=float(np.quantile(values, 0.5)),
            p80_gbps=float(np.quantile(values, 0.8)),
            ratio=float(np.median(np.array(values) / plain)),
        )
        for name, values in rates.items()
    ]


def main() -> None:
    """Parse, check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="bytes moved per case (default 64)")
    parser.add_argument("--regions", type=int, default=16, help="regions that share them")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of the plain copy; ours has one")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    num_tokens = (options.mib << 20) // options.regions // TOKEN_NBYTES // 32 * 32
    nbytes = num_tokens * TOKEN_NBYTES * options.regions
    if not nbytes:
        parser.error(f"--mib: expected at least 32 tokens in each of {options.regions} regions")

    def pool(layout: str, tokens: int, seed: int, *, in_order: bool = False) -> Pool:
        return make_pool(layout, tokens, num_tokens, options.regions, in_order=in_order, seed=seed)

    hnd, other, nhd = pool("HND", 16, 1), pool("HND", 16, 2), pool("NHD", 32, 3)
    ordered = (pool("HND", 16, 4, in_order=True), pool("HND", 16, 5, in_order=True))
    cases: dict[str, Callable[[], None]] = {}
    for name, source, sink in (("equal", hnd, other), ("mixed", hnd, nhd), ("in order", *ordered)):
        cases[name] = copy_case(source, sink, num_tokens)
        check(name, cases[name], source, sink)
    flat = (hnd.memory[:nbytes], other.memory[:nbytes])
    cases = {
        "plain copy": lambda: plain_copy(*flat),
        **cases,
        "pack": pack_case(hnd, nhd, num_tokens),
        "unpack": unpack_case(nhd, num_tokens),
    }
    results = measure(cases, nbytes, options.rounds)
    versions = f"torch {torch.__version__}, numpy {np.__version__}"
    print(f"{platform.machine()}, {versions}; {options.mib} MiB in {options.regions} regions")
    print(f"{'case':12s} {'p20':>7s} {'p50':>7s} {'p80':>7s} GB/s   of plain copy")
    for result in results:
        print(
            f"{result.case:12s} {result.p20_gbps:7.2f} {result.p50_gbps:7.2f} "
            f"{result.p80_gbps:7.2f}        {result.ratio:.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2))


if __name__ == "__main__":
    main()
