"""The copying kernel on a GPU, and over the link between two, beside what the hardware can do.

    memcpy          as many contiguous bytes, pool to pool: on one GPU, or from the other
    memset          as many bytes, on one GPU (half the traffic of a copy)
    torch           index_select, permute and index_copy_, region by region: the usual way
    kernel          DeviceCopier.copy between pools whose blocks lie in random order

Bytes are checked before anything is timed: a wrong copy ends the run. The contenders of a cell take
turns, each after 256 MiB were written to clear the caches; the ratio is the median of each round's
ratio to the memcpy of that round. GB/s are of the payload; on one GPU each byte is read and
written, so its memory moves twice as many. The way of ids and addresses to the GPU is in the times,
the host's time to launch is not: that is section cpu.

Sections: pieces (equal layouts, blocks of 2 KiB to 2 MiB), pairs (block sizes x layouts x heads),
inner (sizes that are no powers of two), lengths (128 to 32k tokens), widths (programs of a launch),
cpu (the host's time for a request), decode (a matrix loop on the sink GPU while copies run).
With two GPUs all but "torch" also from the other GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from kvxfer.tensors.device_copy import CopySettings, DeviceCopier
from kvxfer.tensors.device_work import BoundCopy, DeviceMemory, bind_copy
from kvxfer.transfer.plan import Base, CopyClass, RegionName, Side, Tile

SPREAD = 2  # a pool has this many times the blocks of the request
FLUSH_NBYTES = 256 << 20
AHEAD_CYCLES = 1_000_000
BLOCKS = (8, 16, 24, 32, 64, 128)
LAYOUTS = ("HND", "NHD")
LLAMA_8B = (64, 8, 256)  # regions (K and V of 32 layers), heads, bytes of one head and token
LLAMA_70B_TP8 = (160, 1, 256)
WIDTHS = (8, 16, 32, 48, 64, 96, 132, 264, 528)
LINK_PROGRAMS = 64


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a request lies on one side."""

    layout: str
    block_tokens: int
    regions: int
    heads: int
    inner_nbytes: int

    @property
    def token_nbytes(self) -> int:
        return self.heads * self.inner_nbytes

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens) * SPREAD

    def pool_nbytes(self, num_tokens: int) -> int:
        return self.regions * self.num_blocks(num_tokens) * self.block_tokens * self.token_nbytes

    def side(self, num_tokens: int) -> Side:
        is_hnd = self.layout == "HND"
        block_nbytes = self.block_tokens * self.token_nbytes
        num_blocks = self.num_blocks(num_tokens)
        tile = Tile(
            block_tokens=self.block_tokens,
            kernel_tokens=self.block_tokens,
            num_blocks=num_blocks,
            num_heads=self.heads,
            inner_nbytes=self.inner_nbytes,
            stride_block=block_nbytes,
            stride_head=self.block_tokens * self.inner_nbytes if is_hnd else self.inner_nbytes,
            stride_token=self.inner_nbytes if is_hnd else self.token_nbytes,
        )
        bases = tuple(Base(0, region * num_blocks * block_nbytes) for region in range(self.regions))
        return Side(group=0, tile=tile, bases=bases)

    def blocks(self, memory: Tensor, num_tokens: int) -> Tensor:
        """[regions, blocks, tokens, heads, inner], a view."""
        shape = (self.block_tokens, self.heads)
        shape = shape[::-1] if self.layout == "HND" else shape
        pool = memory[: self.pool_nbytes(num_tokens)]
        pool = pool.view(self.regions, self.num_blocks(num_tokens), *shape, self.inner_nbytes)
        return pool.transpose(2, 3) if self.layout == "HND" else pool


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the results: medians in ms and GB/s, ratio to the memcpy beside it."""

    section: str
    where: str
    case: str
    contender: str
    nbytes: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    gbps: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Bench:
    """The pools, of which every case uses the first bytes, and the copier of the sink's GPU."""

    where: str
    source: Tensor
    sink: Tensor
    flush: Tensor
    copier: DeviceCopier
    stream: torch.cuda.Stream
    rounds: int


@dataclass(frozen=True, slots=True)
class Request:
    """A copy, ready to be made: one class, the ids of both sides."""

    source: Geometry
    sink: Geometry
    num_tokens: int
    bound: BoundCopy
    source_ids: NDArray[np.int64]
    sink_ids: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return self.num_tokens * self.sink.regions * self.sink.token_nbytes


def request_of(bench: Bench, source: Geometry, sink: Geometry, num_tokens: int) -> Request:
    rng = np.random.default_rng(1)
    names = tuple(RegionName(str(region), ("kv",)) for region in range(sink.regions))
    copy_class = CopyClass(names, 0, sink.heads, source.side(num_tokens), sink.side(num_tokens))
    memories = [
        (DeviceMemory(memory.data_ptr(), memory.numel()),) for memory in (bench.source, bench.sink)
    ]
    ids = [
        rng.permutation(side.num_blocks(num_tokens))[: -(-num_tokens // side.block_tokens)]
        for side in (source, sink)
    ]
    bound = bind_copy(copy_class, *memories)
    return Request(
        source, sink, num_tokens, bound, ids[0].astype(np.int64), ids[1].astype(np.int64)
    )


def copy(bench: Bench, request: Request, programs: int) -> None:
    ids = (request.source_ids, request.sink_ids)
    bench.copier.copy(
        request.bound, *ids, 0, request.num_tokens, stream=bench.stream, programs=programs
    )


def check(bench: Bench, request: Request, programs: int) -> None:
    """Not by the code under test: every byte of the request, and none beside it."""
    pool = bench.sink[: request.sink.pool_nbytes(request.num_tokens)]
    with torch.cuda.stream(bench.stream):
        pool.fill_(0xEE)
    copy(bench, request, programs)
    bench.stream.synchronize()
    blocks = request.sink.blocks(pool, request.num_tokens)
    step = max(1, (1 << 30) // (request.num_tokens * request.sink.token_nbytes))
    for lo in range(0, request.sink.regions, step):
        asked = (request.num_tokens, lo, step)
        want = content(bench.source, request.source, request.source_ids, *asked)
        got = content(pool, request.sink, request.sink_ids, *asked)
        want = want[:, : request.num_tokens].to(got.device)
        if not torch.equal(got[:, : request.num_tokens], want):
            raise SystemExit(f"bench_kernels: wrong bytes: {request.source} to {request.sink}")
        if not bool((got[:, request.num_tokens :] == 0xEE).all()):
            raise SystemExit(f"bench_kernels: wrote behind: {request.source} to {request.sink}")
    others = torch.ones(blocks.shape[1], dtype=torch.bool, device=pool.device)
    others[torch.from_numpy(request.sink_ids).to(pool.device)] = False
    if not bool((blocks[0, others] == 0xEE).all()):
        raise SystemExit(f"bench_kernels: wrote beside: {request.source} to {request.sink}")


def content(
    memory: Tensor, side: Geometry, ids: NDArray[np.int64], num_tokens: int, lo: int, step: int
) -> Tensor:
    """[regions, tokens, heads, inner] of some regions, all tokens of the blocks."""
    blocks = side.blocks(memory, num_tokens)[lo : lo + step]
    taken = blocks[:, torch.from_numpy(ids).to(memory.device)]
    return taken.reshape(taken.shape[0], -1, side.heads, side.inner_nbytes)


def timed(bench: Bench, work: Callable[[], None]) -> float:
    """ms on the sink's GPU. The host is ahead of it, with all launches made before the first runs
    (but for "torch", which has hundreds).
    """
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(bench.stream):
        bench.flush.zero_()
        torch.cuda._sleep(AHEAD_CYCLES)
        first.record()
        work()
        last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def measure(
    bench: Bench, section: str, case: str, nbytes: int, contenders: dict[str, Callable[[], None]]
) -> Iterator[Cell]:
    """The contenders in turns; the first is the memcpy that ratios are to."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(bench.rounds + 2):
        for name, work in contenders.items():
            spent_ms = timed(bench, work)
            if number > 1:
                times[name].append(spent_ms)
    limits = times[next(iter(contenders))]
    for name, taken in times.items():
        p20, p50, p80 = np.percentile(taken, [20, 50, 80]).tolist()
        ratio = statistics.median(limit / ours for limit, ours in zip(limits, taken, strict=True))
        cell = Cell(
            *(section, bench.where, case, name, nbytes, p20, p50, p80),
            gbps=nbytes / p50 / 1e6,
            ratio=ratio,
        )
        print(f"{section:8} {bench.where:6} {case:44} {name:12} {cell.gbps:8.1f} {ratio:6.3f}")
        yield cell


def limits_of(bench: Bench, nbytes: int) -> dict[str, Callable[[], None]]:
    given, taken = bench.source[:nbytes], bench.sink[:nbytes]
    found: dict[str, Callable[[], None]] = {"memcpy": lambda: _void(taken.copy_(given))}
    if bench.where == "local":
        found["memset"] = lambda: _void(taken.zero_())
    return found


def by_torch(bench: Bench, request: Request) -> Callable[[], None]:
    """Region by region, for equal block sizes."""
    given = request.source.blocks(bench.source, request.num_tokens)
    taken = request.sink.blocks(bench.sink, request.num_tokens)
    device = bench.sink.device
    source_ids = torch.from_numpy(request.source_ids).to(device)
    sink_ids = torch.from_numpy(request.sink_ids).to(device)

    def run() -> None:
        for ours, theirs in zip(taken, given, strict=True):
            ours.index_copy_(0, sink_ids, theirs.index_select(0, source_ids))

    return run


def _void(_: object) -> None:
    """For callables whose result nobody needs."""


def run_case(
    bench: Bench,
    section: str,
    source: Geometry,
    sink: Geometry,
    num_tokens: int,
    widths: Sequence[int],
    *,
    beside_torch: bool = False,
) -> Iterator[Cell]:
    request = request_of(bench, source, sink, num_tokens)
    check(bench, request, widths[0])
    contenders = limits_of(bench, request.nbytes)
    if beside_torch and bench.where == "local" and source.block_tokens == sink.block_tokens:
        contenders["torch"] = by_torch(bench, request)
    for width in widths:
        contenders[f"kernel {width}"] = partial(copy, bench, request, width)
    case = (
        f"{source.layout}{source.block_tokens}->{sink.layout}{sink.block_tokens} "
        f"{sink.regions}x{sink.heads}x{sink.inner_nbytes} {num_tokens} tokens"
    )
    yield from measure(bench, section, case, request.nbytes, contenders)


def geometry(layout: str, block_tokens: int, shape: tuple[int, int, int] = LLAMA_8B) -> Geometry:
    return Geometry(layout, block_tokens, *shape)


def pieces(bench: Bench, width: int) -> Iterator[Cell]:
    for log2 in range(11):  # 2 KiB are one token of 8 heads
        side = geometry("HND", 1 << log2)
        yield from run_case(bench, "pieces", side, side, 8192, [width])


def pairs(bench: Bench, width: int, blocks: Sequence[int]) -> Iterator[Cell]:
    for shape in ((64, 8, 256), (64, 4, 256), LLAMA_70B_TP8):
        num_tokens = 8192 if shape[1] > 1 else 16384
        layouts = list(product(LAYOUTS, LAYOUTS)) if shape[1] > 1 else [("HND", "HND")]
        for (ours, theirs), given, taken in product(layouts, blocks, blocks):
            source, sink = geometry(ours, given, shape), geometry(theirs, taken, shape)
            beside = shape == LLAMA_8B and given == taken == 16
            yield from run_case(
                bench, "pairs", source, sink, num_tokens, [width], beside_torch=beside
            )


def inner(bench: Bench, width: int) -> Iterator[Cell]:
    for inner_nbytes, (given, taken) in product((1152, 656, 132), ((64, 64), (64, 16), (16, 24))):
        shape = (61, 1, inner_nbytes)
        sides = geometry("NHD", given, shape), geometry("NHD", taken, shape)
        yield from run_case(bench, "inner", *sides, 8192, [width])
        # One token more than whole blocks, so that they cannot be joined to wider words
        yield from run_case(bench, "inner", *sides, 8193, [width])


def lengths(bench: Bench, width: int) -> Iterator[Cell]:
    for shape, num_tokens in product((LLAMA_8B, LLAMA_70B_TP8), (128, 512, 2048, 8192, 32768)):
        for source in ("HND", "NHD"):
            sides = geometry(source, 16, shape), geometry("NHD", 64, shape)
            yield from run_case(bench, "lengths", *sides, num_tokens, [width])


def widths(bench: Bench) -> Iterator[Cell]:
    for source, sink in (("NHD", "NHD"), ("HND", "NHD")):
        sides = geometry(source, 16), geometry(sink, 64)
        yield from run_case(bench, "widths", *sides, 8192, WIDTHS)


def cpu(bench: Bench, width: int) -> Iterator[Cell]:
    """The host's time in ``copy``, while the GPU is busy with something else."""
    for num_tokens in (128, 2048, 32768):
        request = request_of(bench, geometry("HND", 16), geometry("NHD", 64), num_tokens)
        check(bench, request, width)
        taken: list[float] = []
        for _ in range(20 * bench.rounds):
            first = time.perf_counter()
            copy(bench, request, width)
            taken.append((time.perf_counter() - first) * 1e3)
            bench.stream.synchronize()
        p20, p50, p80 = np.percentile(taken, [20, 50, 80]).tolist()
        case = f"host time of a request of {num_tokens} tokens"
        print(f"cpu      {bench.where:6} {case:44} {p50 * 1e3:8.0f} us")
        yield Cell("cpu", bench.where, case, "kernel", request.nbytes, p20, p50, p80, 0.0, 0.0)


def decode(bench: Bench) -> Iterator[Cell]:
    """Matrix loops on the current stream while copies of 1 GiB follow each other on their own; the
    ratio is that of the loop's time alone.
    """
    device = bench.sink.device
    request = request_of(bench, geometry("HND", 16), geometry("NHD", 64), 8192)
    for rows in (16, 4096):
        matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        batch = torch.randn(rows, 8192, device=device, dtype=torch.bfloat16)
        repeats = 1000 if rows == 16 else 60

        def loop(matrix: Tensor = matrix, batch: Tensor = batch, repeats: int = repeats) -> float:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(repeats):
                torch.mm(batch, matrix)
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last))

        loop()
        alone_ms = statistics.median(loop() for _ in range(bench.rounds))
        for width in (0, *WIDTHS):
            taken, copies_ms = [], []
            for _ in range(bench.rounds):
                torch.cuda.synchronize(device)
                num_copies = 0
                if width:
                    copy_ms = timed(bench, partial(copy, bench, request, width))
                    num_copies = 1 + int(1.5 * alone_ms / copy_ms)
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record(bench.stream)
                for _ in range(num_copies):
                    copy(bench, request, width)
                last.record(bench.stream)
                taken.append(loop())
                last.synchronize()
                if num_copies:
                    copies_ms.append(first.elapsed_time(last) / num_copies)
            p20, p50, p80 = np.percentile(taken, [20, 50, 80]).tolist()
            gbps = request.nbytes / statistics.median(copies_ms) / 1e6 if copies_ms else 0.0
            case = f"[{rows}, 8192] x [8192, 8192] bf16, {repeats} times"
            name = f"kernel {width}" if width else "alone"
            print(f"decode   {bench.where:6} {case:44} {name:12} {gbps:8.1f} {p50 / alone_ms:6.3f}")
            yield Cell(
                *("decode", bench.where, case, name, request.nbytes, p20, p50, p80),
                gbps=gbps,
                ratio=p50 / alone_ms,
            )


def make_bench(where: str, nbytes: int, rounds: int) -> Bench:
    sink_device = torch.device("cuda", 0)
    source_device = torch.device("cuda", 0 if where == "local" else 1)
    torch.cuda.set_device(sink_device)
    source = torch.empty(nbytes, dtype=torch.uint8, device=source_device)
    for part in source.split(1 << 28):
        part.random_()
    sink = torch.empty(nbytes, dtype=torch.uint8, device=sink_device)
    # torch lets one GPU read the other only once it has copied in that direction
    sink[:1024].copy_(source[:1024])
    source[:1024].copy_(sink[:1024])
    flush = torch.empty(FLUSH_NBYTES, dtype=torch.uint8, device=sink_device)
    copier = DeviceCopier(sink_device, CopySettings())
    torch.cuda.synchronize(source_device)
    stream = torch.cuda.Stream(sink_device)
    return Bench(where, source, sink, flush, copier, stream, rounds)


def run_all(bench: Bench, sections: Sequence[str], blocks: Sequence[int]) -> list[Cell]:
    num_sms = torch.cuda.get_device_properties(bench.sink.device).multi_processor_count
    width = 2 * num_sms if bench.where == "local" else LINK_PROGRAMS
    runs: dict[str, Callable[[], Iterator[Cell]]] = {
        "pieces": lambda: pieces(bench, width),
        "pairs": lambda: pairs(bench, width, blocks),
        "inner": lambda: inner(bench, width),
        "lengths": lambda: lengths(bench, width),
        "widths": lambda: widths(bench),
        "cpu": lambda: cpu(bench, width),
        "decode": lambda: decode(bench),
    }
    return [cell for name in sections for cell in runs[name]()]


SECTIONS = ("pieces", "widths", "lengths", "inner", "cpu", "decode", "pairs")


def write_results(out: Path, facts: dict[str, str], cells: Sequence[Cell], date: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    name = f"kernels_{date}"
    record = {"facts": facts, "cells": [asdict(cell) for cell in cells]}
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    lines = [f"# Copying kernel, {date}", "", f"Command: `{facts['command']}`", ""]
    lines += ["| what | version |", "|---|---|"]
    lines += [f"| {what} | {fact} |" for what, fact in facts.items() if what != "command"]
    lines += ["", "GB/s of payload, median; on one GPU each byte is read and written. The ratio is"]
    lines += ["to the memcpy of the same round (decode: the loop's time to its time alone).", ""]
    lines += [f"![bytes per second by piece size]({name}.png)", ""]
    header = "| where | case | contender | p20 ms | p50 ms | p80 ms | GB/s | ratio |"
    for section in SECTIONS:
        chosen = [cell for cell in cells if cell.section == section]
        if chosen:
            lines += [f"## {section}", "", header, "|---|---|---|---|---|---|---|---|"]
            lines += [
                f"| {cell.where} | {cell.case} | {cell.contender} | {cell.p20_ms:.3f} | "
                f"{cell.p50_ms:.3f} | {cell.p80_ms:.3f} | {cell.gbps:.1f} | {cell.ratio:.3f} |"
                for cell in chosen
            ]
            lines.append("")
    (out / f"{name}.md").write_text("\n".join(lines))
    plot(out / f"{name}.png", cells)


def plot(path: Path, cells: Sequence[Cell]) -> None:
    """GB/s by piece size, both axes logarithmic; not without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("bench_kernels: expected matplotlib for the plot, found none; install it")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    chosen = [cell for cell in cells if cell.section == "pieces"]
    for where, contender in dict.fromkeys((cell.where, cell.contender) for cell in chosen):
        line = [cell for cell in chosen if (cell.where, cell.contender) == (where, contender)]
        sizes = [int(cell.case.split("->")[0][3:]) * 2048 for cell in line]
        axes.plot(sizes, [cell.gbps for cell in line], "o-", label=f"{where}: {contender}")
    axes.set(xscale="log", yscale="log", xlabel="piece, bytes", ylabel="GB/s of payload")
    axes.set_xscale("log", base=2)
    axes.grid(visible=True, which="both", alpha=0.3)
    if chosen:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def facts_of(command: str) -> dict[str, str]:
    return {
        "GPU": f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}",
        "Python": platform.python_version(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "triton": triton.__version__,
        "command": command,
    }


def main() -> None:
    """Run the sections and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("scripts/results"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--where", nargs="+", default=["local", "peer"], choices=["local", "peer"])
    parser.add_argument("--blocks", nargs="+", type=int, default=list(BLOCKS))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels: expected a CUDA device, found none")
    facts = facts_of("scripts/bench_kernels.py " + " ".join(sys.argv[1:]))
    print(facts)
    largest = geometry("HND", 64).pool_nbytes(32768)
    cells: list[Cell] = []
    for where in args.where:
        if where == "peer" and torch.cuda.device_count() < 2:
            print("bench_kernels: one GPU only: no copies from a peer")
            continue
        bench = make_bench(where, largest, args.rounds)
        cells += run_all(bench, args.sections, args.blocks)
        del bench
        torch.cuda.empty_cache()
        # After each place, so that a run cut short leaves something
        write_results(args.out, facts, cells, datetime.now(UTC).strftime("%Y-%m-%d"))


if __name__ == "__main__":
    main()
