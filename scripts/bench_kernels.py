"""The copying kernel on a GPU, and over the link between two, beside what the hardware can do.

    memcpy          as many contiguous bytes, pool to pool: on one GPU, or from the other
    memset          as many bytes, on one GPU (half the traffic of a copy)
    torch           index_select, permute and index_copy_, region by region: the usual way
    batch           cudaMemcpyBatchAsync of blocks as they are, its arrays made before
    kernel          DeviceCopier.copy between pools whose blocks lie in random order

Bytes are checked before anything is timed: a wrong copy ends the run. The contenders of a cell take
turns, each after 256 MiB were written to clear the caches, slow ones fewer times; the ratio is the
median of each round's ratio to the memcpy of that round. GB/s are of the payload; on one GPU each
byte is read and written, so its memory moves twice as many. The way of ids and addresses to the GPU
is in the times. The host's time to launch is not (that is section cpu), except for "torch" and
"batch": their hundreds of launches or pieces outlast the head start.

Sections: pieces (equal layouts, blocks of 2 KiB to 2 MiB), pairs (block sizes x layouts x heads),
inner (sizes that are no powers of two), lengths (128 to 32k tokens), widths (programs of a launch),
cpu (the host's time for a request), decode (a matrix loop on the sink GPU while copies run).
With two GPUs all of it also from the other GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from kvxfer.kernels.strided_work import WHOLE_GPU
from kvxfer.tensors.device_copy import BoundCopy, CopySettings, DeviceCopier, bind_copy
from kvxfer.tensors.device_memory import DeviceMemory
from scripts.benchmarks.batch_copy import BatchCopyUnavailable, batch_copy
from scripts.benchmarks.devices import FLUSH_NBYTES, MatrixLoop, stream_ms
from scripts.benchmarks.plain_ways import torch_copy
from scripts.benchmarks.pools import (
    LLAMA_8B,
    LLAMA_70B_TP8,
    POISON,
    Ids,
    Pool,
    Request,
    Shape,
    layout_of,
)
from scripts.benchmarks.results import (
    Line,
    Plot,
    Table,
    facts_of,
    quantiles,
    today,
    write_report,
)

SPREAD = 2  # a pool has this many times the blocks of the request
BUDGET_MS = 1500.0
"""Of one contender in one case, after its least rounds."""
LEAST_ROUNDS = 3
BLOCKS = (8, 16, 24, 32, 64, 128)
LAYOUTS = ("HND", "NHD")
WIDTHS = (8, 16, 24, 32, 48, 64, 96, 132, 264, WHOLE_GPU)
LINK_PROGRAMS = 32


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
class Job:
    """A copy, ready to be made: one class, the ids of both sides."""

    request: Request
    bound: BoundCopy
    source_ids: Ids
    sink_ids: Ids


def between(source: str, sink: str, num_tokens: int, shape: Shape = LLAMA_8B) -> Request:
    """A request that fills a part of its pools; ``source``, ``sink``: HND16."""
    pools = []
    for text in (source, sink):
        layout, block_tokens = layout_of(text)
        num_blocks = -(-num_tokens // block_tokens) * SPREAD
        pools.append(Pool(layout, block_tokens, num_blocks, shape))
    return Request(pools[0], pools[1], num_tokens)


def job_of(bench: Bench, request: Request) -> Job:
    """Bound to the pools of the benchmark."""
    copy_class, _ = request.copy_class()
    memories = [
        (DeviceMemory(memory.data_ptr(), memory.numel()),) for memory in (bench.source, bench.sink)
    ]
    bound = bind_copy(copy_class, *memories)
    return Job(request, bound, request.source_ids, request.sink_ids)


def copy(bench: Bench, job: Job, programs: int) -> None:
    ids = (job.source_ids, job.sink_ids)
    bench.copier.copy(
        job.bound, *ids, (0, job.request.num_tokens), stream=bench.stream, programs=programs
    )


def check(bench: Bench, job: Job, programs: int) -> None:
    """Not by the code under test: every byte of the request, and none beside it."""
    request, num_tokens = job.request, job.request.num_tokens
    pool = bench.sink[: request.sink.nbytes]
    with torch.cuda.stream(bench.stream):
        pool.fill_(POISON)
    copy(bench, job, programs)
    bench.stream.synchronize()
    step = max(1, (1 << 30) // (num_tokens * request.shape.token_nbytes))
    for lo in range(0, request.shape.regions, step):
        want = content(bench.source, request.source, job.source_ids, lo, step)
        got = content(pool, request.sink, job.sink_ids, lo, step)
        if not torch.equal(got[:, :num_tokens], want[:, :num_tokens].to(got.device)):
            raise SystemExit(f"bench_kernels: wrong bytes: {request.name}")
        if not bool((got[:, num_tokens:] == POISON).all()):
            raise SystemExit(f"bench_kernels: wrote behind: {request.name}")
    if not request.sink.is_untouched_beside(pool, job.sink_ids):
        raise SystemExit(f"bench_kernels: wrote beside: {request.name}")


def content(memory: Tensor, pool: Pool, ids: Ids, lo: int, step: int) -> Tensor:
    """[regions, tokens, heads, inner] of some regions, all tokens of the blocks."""
    blocks = pool.blocks(memory)[lo : lo + step]
    taken = blocks[:, torch.from_numpy(ids).to(memory.device)]
    return taken.reshape(taken.shape[0], -1, pool.shape.heads, pool.shape.inner_nbytes)


def timed(bench: Bench, work: Callable[[], None]) -> float:
    """ms on the sink's GPU."""
    return stream_ms(bench.stream, bench.flush, work)


def measure(
    bench: Bench, section: str, case: str, nbytes: int, contenders: dict[str, Callable[[], None]]
) -> Iterator[Cell]:
    """The contenders in turns; the first is the memcpy that ratios are to."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(bench.rounds + 2):
        for name, work in contenders.items():
            if sum(times[name]) > BUDGET_MS and len(times[name]) >= LEAST_ROUNDS:
                continue
            spent_ms = timed(bench, work)
            if number > 1:
                times[name].append(spent_ms)
    limits = times[next(iter(contenders))]
    for name, taken in times.items():
        p20, p50, p80 = quantiles(taken)
        # Rounds that were left out are the last ones
        ratio = statistics.median(limit / ours for limit, ours in zip(limits, taken, strict=False))
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


def others_of(bench: Bench, request: Request) -> dict[str, Callable[[], None]]:
    """The usual ways, for equal layouts; what a machine does not have is left out."""
    found = {"torch": torch_copy(request, bench.source, bench.sink)}
    given, taken = request.pieces()
    addresses = (given + bench.source.data_ptr(), taken + bench.sink.data_ptr())
    try:
        found["batch"] = batch_copy(*addresses, request.source.block_nbytes, bench.stream)
    except BatchCopyUnavailable as exc:
        print(exc)
    return found


def _void(_: object) -> None:
    """For callables whose result nobody needs."""


def run_case(
    bench: Bench,
    section: str,
    request: Request,
    widths: Sequence[int],
    *,
    beside_others: bool = False,
) -> Iterator[Cell]:
    job = job_of(bench, request)
    check(bench, job, widths[0])
    contenders = limits_of(bench, request.nbytes)
    if beside_others:
        contenders |= others_of(bench, request)
    for width in widths:
        contenders[name_of(width)] = partial(copy, bench, job, width)
    shape = request.shape
    case = (
        f"{request.layouts} {shape.regions}x{shape.heads}x{shape.inner_nbytes} "
        f"{request.num_tokens} tokens"
    )
    yield from measure(bench, section, case, request.nbytes, contenders)


def name_of(width: int) -> str:
    """Of the kernel with so many programs."""
    return "kernel, all" if width == WHOLE_GPU else f"kernel {width}"


def pieces(bench: Bench, width: int) -> Iterator[Cell]:
    for log2 in range(11):  # 2 KiB are one token of 8 heads
        request = between(f"HND{1 << log2}", f"HND{1 << log2}", 8192)
        yield from run_case(bench, "pieces", request, [width], beside_others=True)


def pairs(bench: Bench, width: int, blocks: Sequence[int]) -> Iterator[Cell]:
    half = Shape("half of 8B", 64, 4, 256)
    for shape in (LLAMA_8B, half, LLAMA_70B_TP8):
        num_tokens = 8192 if shape.heads > 1 else 16384
        layouts = list(product(LAYOUTS, LAYOUTS)) if shape.heads > 1 else [("HND", "HND")]
        for (ours, theirs), given, taken in product(layouts, blocks, blocks):
            request = between(f"{ours}{given}", f"{theirs}{taken}", num_tokens, shape)
            beside = shape == LLAMA_8B and given == taken == 16 and ours == theirs
            yield from run_case(bench, "pairs", request, [width], beside_others=beside)


def inner(bench: Bench, width: int) -> Iterator[Cell]:
    for inner_nbytes, (given, taken) in product((1152, 656, 132), ((64, 64), (64, 16), (16, 24))):
        shape = Shape("odd", 61, 1, inner_nbytes)
        # One token more than whole blocks, so that they cannot be joined to wider words
        for num_tokens in (8192, 8193):
            request = between(f"NHD{given}", f"NHD{taken}", num_tokens, shape)
            yield from run_case(bench, "inner", request, [width])


def lengths(bench: Bench, width: int) -> Iterator[Cell]:
    for shape, num_tokens in product((LLAMA_8B, LLAMA_70B_TP8), (128, 512, 2048, 8192, 32768)):
        for source in ("HND16", "NHD16"):
            request = between(source, "NHD64", num_tokens, shape)
            yield from run_case(bench, "lengths", request, [width])


def widths(bench: Bench) -> Iterator[Cell]:
    for source in ("NHD16", "HND16"):
        yield from run_case(bench, "widths", between(source, "NHD64", 8192), WIDTHS)


def cpu(bench: Bench, width: int) -> Iterator[Cell]:
    """The host's time in ``copy``, while the GPU is busy with something else."""
    for num_tokens in (128, 2048, 32768):
        job = job_of(bench, between("HND16", "NHD64", num_tokens))
        check(bench, job, width)
        taken: list[float] = []
        for _ in range(20 * bench.rounds):
            first = time.perf_counter()
            copy(bench, job, width)
            taken.append((time.perf_counter() - first) * 1e3)
            bench.stream.synchronize()
        p20, p50, p80 = quantiles(taken)
        case = f"host time of a request of {num_tokens} tokens"
        print(f"cpu      {bench.where:6} {case:44} {p50 * 1e3:8.0f} us")
        yield Cell("cpu", bench.where, case, "kernel", job.request.nbytes, p20, p50, p80, 0.0, 0.0)


def decode(bench: Bench) -> Iterator[Cell]:
    """Matrix loops on the current stream while copies of 1 GiB follow each other on their own; the
    ratio is that of the loop's time alone.
    """
    device = bench.sink.device
    job = job_of(bench, between("HND16", "NHD64", 8192))
    for rows in (16, 4096):
        loop = MatrixLoop(device, rows)
        loop.run_ms()
        alone_ms = statistics.median(loop.run_ms() for _ in range(bench.rounds))
        for width in (None, *WIDTHS):
            taken, copies_ms = [], []
            for _ in range(bench.rounds):
                torch.cuda.synchronize(device)
                copies: list[Callable[[], None]] = []
                if width is not None:
                    once = partial(copy, bench, job, width)
                    copies = [once] * (1 + int(1.5 * alone_ms / timed(bench, once)))
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record(bench.stream)
                for again in copies:
                    again()
                last.record(bench.stream)
                taken.append(loop.run_ms())
                last.synchronize()
                if copies:
                    copies_ms.append(first.elapsed_time(last) / len(copies))
            p20, p50, p80 = quantiles(taken)
            nbytes = job.request.nbytes
            gbps = nbytes / statistics.median(copies_ms) / 1e6 if copies_ms else 0.0
            name = "alone" if width is None else name_of(width)
            print(
                f"decode   {bench.where:6} {loop.name:44} {name:12} {gbps:8.1f} "
                f"{p50 / alone_ms:6.3f}"
            )
            yield Cell(
                *("decode", bench.where, loop.name, name, nbytes, p20, p50, p80),
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
    width = WHOLE_GPU if bench.where == "local" else LINK_PROGRAMS
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
    text = (
        "GB/s of payload, median; on one GPU each byte is read and written. The ratio is to the "
        "memcpy of the same round (decode: the loop's time to its time alone)."
    )
    header = ("where", "case", "contender", "p20 ms", "p50 ms", "p80 ms", "GB/s", "ratio")
    tables = [
        Table(
            section,
            text,
            header,
            tuple(
                (
                    *(cell.where, cell.case, cell.contender),
                    *(f"{ms:.3f}" for ms in (cell.p20_ms, cell.p50_ms, cell.p80_ms)),
                    *(f"{cell.gbps:.1f}", f"{cell.ratio:.3f}"),
                )
                for cell in cells
                if cell.section == section
            ),
        )
        for section in SECTIONS
    ]
    record = {"cells": [asdict(cell) for cell in cells]}
    write_report(
        out,
        f"kernels_{date}",
        f"Copying kernel, {date}",
        facts,
        tables,
        record,
        plot=plot_of(cells),
    )


def plot_of(cells: Sequence[Cell]) -> Plot | None:
    """GB/s by piece size."""
    chosen = [cell for cell in cells if cell.section == "pieces"]
    if not chosen:
        return None
    lines = []
    for where, contender in dict.fromkeys((cell.where, cell.contender) for cell in chosen):
        line = [cell for cell in chosen if (cell.where, cell.contender) == (where, contender)]
        sizes = [int(cell.case.split("->")[0][3:]) * LLAMA_8B.token_nbytes for cell in line]
        lines.append(Line(f"{where}: {contender}", tuple(sizes), tuple(cell.gbps for cell in line)))
    return Plot("bytes per second by piece size", "piece, bytes", "GB/s of payload", tuple(lines))


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
    facts = facts_of("scripts/bench_kernels.py " + " ".join(sys.argv[1:]), ("triton",))
    print(facts)
    largest = between("HND64", "HND64", 32768).sink.nbytes
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
        write_results(args.out, facts, cells, today())


if __name__ == "__main__":
    main()
