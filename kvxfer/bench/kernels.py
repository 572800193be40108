"""The copying kernel on a GPU, and over the link between two, beside what the hardware can do.

    memcpy          as many contiguous bytes, pool to pool: on one GPU, or from the other
    memset          as many bytes, on one GPU (half the traffic of a copy)
    torch           index_select, permute and index_copy_, region by region: the usual way
    batch           cudaMemcpyBatchAsync of blocks as they are, its arrays made before
    kernel          DeviceCopier.copy between pools whose blocks lie in random order

Bytes are checked before anything is timed: a wrong copy ends the run. The contenders of a case take
turns, each after 256 MiB were written to clear the caches, slow ones fewer times; the ratio is the
median of each round's ratio to the memcpy of that round. GB/s are of the payload; on one GPU each
byte is read and written, so its memory moves twice as many. The way of ids and addresses to the GPU
is in the times. The host's time to launch is not (that is section cpu), except for "torch" and
"batch": their hundreds of launches or pieces outlast the head start.

The section casts copies bfloat16 to types of 8 bits and back, with a scale of each region, of each
token, or none; its GB/s are of the source's bytes, and so is its memcpy.

Sections: pieces (equal layouts, blocks of 2 KiB to 2 MiB), pairs (block sizes x layouts x heads),
inner (sizes that are no powers of two), gib (1 GiB of latents, and of states), casts, lengths (128
to 32k tokens), widths (programs of a launch), cpu (the host's time for a request). What copies cost
a decode step is in gpu-transfer.
With two GPUs all of it also from the other GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from msgspec.structs import replace
from torch import Tensor

from kvxfer.bench import core
from kvxfer.bench.frame import Benchmark, Session, option
from kvxfer.bench.gpu import BatchCopyUnavailable, batch_copy, stream_ms
from kvxfer.bench.members import FLUSH_NBYTES, gpu_missing
from kvxfer.bench.plain_ways import torch_copy
from kvxfer.bench.plots import Plot, line, plot_of
from kvxfer.bench.pools import (
    LLAMA_8B,
    LLAMA_70B_TP8,
    POISON,
    Ids,
    Pool,
    Request,
    Shape,
    layout_of,
    request_of,
)
from kvxfer.kernels.strided_work import WHOLE_GPU
from kvxfer.tensors.device_copy import BoundCopy, CopySettings, DeviceCopier, bind_copy
from kvxfer.tensors.device_memory import DeviceMemory
from kvxfer.transfer.casts import Values
from kvxfer.transfer.layout import SCALE_NBYTES
from kvxfer.transfer.plan import CopyClass, Side

SPREAD = 2  # a pool has this many times the blocks of the request
BUDGET_S = 1.5
"""Of one contender in one case, after its least rounds."""
BLOCKS = (8, 16, 24, 32, 64, 128)
LAYOUTS = ("HND", "NHD")
_WIDTHS = (8, 16, 24, 32, 48, 64, 96, 132, 264, WHOLE_GPU)
_LINK_PROGRAMS = 32
_CAST_WIDTHS = (24, 48, 96, 132, 264, WHOLE_GPU)
HEAD_SIZE = 128


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
    report: core.Report

    @property
    def width(self) -> int:
        """Programs of a copy where nothing else is said."""
        return WHOLE_GPU if self.where == "local" else _LINK_PROGRAMS


@dataclass(frozen=True, slots=True)
class _Job:
    """A copy, ready to be made: one class, the ids of both sides."""

    request: Request
    bound: BoundCopy
    source_ids: Ids
    sink_ids: Ids


def between(source: str, sink: str, num_tokens: int, shape: Shape = LLAMA_8B) -> Request:
    """A request that fills a part of its pools; ``source``, ``sink``: HND16."""
    return request_of(shape, f"{source}->{sink}", num_tokens, SPREAD * num_tokens)


def _job_of(bench: Bench, request: Request) -> _Job:
    copy_class, _ = request.copy_class()
    memories = [
        (DeviceMemory(memory.data_ptr(), memory.numel()),) for memory in (bench.source, bench.sink)
    ]
    bound = bind_copy(copy_class, *memories)
    return _Job(request, bound, request.source_ids, request.sink_ids)


def copy(bench: Bench, job: _Job, programs: int) -> None:
    ids = (job.source_ids, job.sink_ids)
    bench.copier.copy(
        job.bound, *ids, (0, job.request.num_tokens), stream=bench.stream, programs=programs
    )


def check(bench: Bench, job: _Job, programs: int) -> None:
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
            raise SystemExit(f"bench kernels: wrong bytes: {request.name}")
        if not bool((got[:, num_tokens:] == POISON).all()):
            raise SystemExit(f"bench kernels: wrote behind: {request.name}")
    if not request.sink.is_untouched_beside(pool, job.sink_ids):
        raise SystemExit(f"bench kernels: wrote beside: {request.name}")


def content(memory: Tensor, pool: Pool, ids: Ids, lo: int, step: int) -> Tensor:
    """[regions, tokens, heads, inner] of some regions, all tokens of the blocks."""
    blocks = pool.blocks(memory)[lo : lo + step]
    taken = blocks[:, torch.from_numpy(ids).to(memory.device)]
    return taken.reshape(taken.shape[0], -1, pool.shape.heads, pool.shape.inner_nbytes)


def once(bench: Bench, work: core.Work) -> core.Timing:
    return core.Timing(stream_ms(bench.stream, bench.flush, work) / 1e3)


def _limits_of(bench: Bench, nbytes: int) -> dict[str, core.Work]:
    """The first is what ratios are to."""
    given, taken = bench.source[:nbytes], bench.sink[:nbytes]
    found: dict[str, core.Work] = {"memcpy": partial(taken.copy_, given)}
    if bench.where == "local":
        found["memset"] = taken.zero_
    return found


def _others_of(bench: Bench, request: Request) -> dict[str, core.Work]:
    """The usual ways, for equal layouts; what a machine does not have is left out."""
    found: dict[str, core.Work] = {"torch": torch_copy(request, bench.source, bench.sink)}
    given, taken = request.pieces()
    addresses = (given + bench.source.data_ptr(), taken + bench.sink.data_ptr())
    try:
        found["batch"] = batch_copy(*addresses, request.source.block_nbytes, bench.stream)
    except BatchCopyUnavailable as exc:
        print(exc)
    return found


def _run_case(
    bench: Bench,
    section: str,
    request: Request,
    widths: Sequence[int] = (),
    *,
    beside_others: bool = False,
) -> None:
    job, widths = _job_of(bench, request), widths or (bench.width,)
    check(bench, job, widths[0])
    works = _limits_of(bench, request.nbytes)
    if beside_others:
        works |= _others_of(bench, request)
    works |= {name_of(width): partial(copy, bench, job, width) for width in widths}
    taken = core.measure(core.clocked(works, partial(once, bench)), bench.rounds, budget_s=BUDGET_S)
    shape = request.shape
    sizes = f"{shape.regions}x{shape.heads}x{shape.inner_nbytes}"
    case = f"{request.layouts} {sizes} {request.num_tokens} tokens"
    bench.report.compare(core.Measured(f"{section}, {bench.where}", case, request.nbytes), taken)


def name_of(width: int) -> str:
    return "kernel, all" if width == WHOLE_GPU else f"kernel {width}"


# ------------------------------------------------------------------ sections


def pieces(bench: Bench, blocks: Sequence[int]) -> None:
    for log2 in range(11):  # 2 KiB are one token of 8 heads
        request = between(f"HND{1 << log2}", f"HND{1 << log2}", 8192)
        _run_case(bench, "pieces", request, beside_others=True)


def pairs(bench: Bench, blocks: Sequence[int]) -> None:
    half = Shape("half of 8B", 64, 4, 256)
    for shape in (LLAMA_8B, half, LLAMA_70B_TP8):
        num_tokens = 8192 if shape.heads > 1 else 16384
        layouts = list(product(LAYOUTS, LAYOUTS)) if shape.heads > 1 else [("HND", "HND")]
        for (ours, theirs), given, taken in product(layouts, blocks, blocks):
            request = between(f"{ours}{given}", f"{theirs}{taken}", num_tokens, shape)
            beside = shape == LLAMA_8B and given == taken == 16 and ours == theirs
            _run_case(bench, "pairs", request, beside_others=beside)


def inner(bench: Bench, blocks: Sequence[int]) -> None:
    for inner_nbytes, (given, taken) in product(
        (1152, 656, 128, 4), ((64, 64), (64, 16), (16, 24))
    ):
        shape = Shape("odd", 61, 1, inner_nbytes)
        # One token more than whole blocks, so that they cannot be joined to wider words
        for num_tokens in (8192, 8193):
            request = between(f"NHD{given}", f"NHD{taken}", num_tokens, shape)
            _run_case(bench, "inner", request)


GIB = 1 << 30
LATENTS = (Shape("V3", 61, 1, 1152), Shape("V3.2, fp8", 61, 1, 656))
STATES = (
    # Of Qwen3-Next: a matrix for each of 32 heads; three inputs of a convolution of 8192 channels.
    (Shape("matrices", 36, 32, 128 * 128 * 2), "NHD1", "NHD1"),
    (Shape("inputs", 36, 1, 8192 * 2), "NHD3", "NHD3"),
    (Shape("inputs by channel", 36, 8192, 2), "NHD3", "HND3"),
)


def gib(bench: Bench, blocks: Sequence[int]) -> None:
    """As many tokens, or requests, as are 1 GiB. States: a block holds one request's."""
    for shape, (given, taken) in product(LATENTS, ((64, 64), (64, 128))):
        num_tokens = GIB // (shape.regions * shape.token_nbytes)
        _run_case(bench, "gib", between(f"NHD{given}", f"NHD{taken}", num_tokens, shape))
    for shape, source, sink in STATES:
        _, rows = layout_of(source)
        requests = GIB // (shape.regions * shape.token_nbytes * rows)
        _run_case(bench, "gib", between(source, sink, requests * rows, shape))


def lengths(bench: Bench, blocks: Sequence[int]) -> None:
    for shape, num_tokens in product((LLAMA_8B, LLAMA_70B_TP8), (128, 512, 2048, 8192, 32768)):
        for source in ("HND16", "NHD16"):
            _run_case(bench, "lengths", between(source, "NHD64", num_tokens, shape))


def widths(bench: Bench, blocks: Sequence[int]) -> None:
    for source in ("NHD16", "HND16"):
        _run_case(bench, "widths", between(source, "NHD64", 8192), _WIDTHS)


def cpu(bench: Bench, blocks: Sequence[int]) -> None:
    """The host's time in ``copy``, while the GPU is busy with something else."""
    for num_tokens in (128, 2048, 32768):
        job = _job_of(bench, between("HND16", "NHD64", num_tokens))
        check(bench, job, bench.width)
        taken: list[core.Timing] = []
        for _ in range(20 * bench.rounds):
            taken.append(core.timed(partial(copy, bench, job, bench.width)))
            bench.stream.synchronize()
        case = f"host time of a request of {num_tokens} tokens"
        bench.report.compare(core.Measured(f"cpu, {bench.where}", case, 0), {"kernel": taken})


CASTS = (
    ("bfloat16", "float8_e4m3fn", ""),
    ("bfloat16", "float8_e4m3fn", "regions"),
    ("bfloat16", "float8_e4m3fn", "tokens"),
    ("bfloat16", "float8_e5m2", ""),
    ("float8_e4m3fn", "bfloat16", "regions"),
)
"""Type of the source, type of the sink, and what has scales at the side of 8 bits."""


def casts(bench: Bench, blocks: Sequence[int]) -> None:
    for cast, layouts in product(CASTS, ("HND16->HND16", "NHD16->HND64")):
        for num_tokens in (2048, 16384):
            _run_cast(bench, cast, layouts, num_tokens)


def _run_cast(bench: Bench, cast: tuple[str, str, str], layouts: str, num_tokens: int) -> None:
    pools, sides = [], []
    for text, dtype in zip(layouts.split("->"), cast[:2], strict=True):
        values = Values(dtype)
        is_scaled = values.item_nbytes == 1 and cast[2]
        tail_nbytes = SCALE_NBYTES if is_scaled and cast[2] == "tokens" else 0
        inner_nbytes = HEAD_SIZE * values.item_nbytes
        layout, block_tokens = layout_of(text)
        shape = Shape("8B", LLAMA_8B.regions, LLAMA_8B.heads, inner_nbytes + tail_nbytes)
        num_blocks = -(-num_tokens // block_tokens) * SPREAD
        pools.append(Pool(layout, block_tokens, num_blocks, shape))
        side = replace(pools[-1].side(), values=values)
        if is_scaled and not tail_nbytes:
            scales = tuple((0.1 + region / 64,) for region in range(shape.regions))
            side = replace(side, values=Values(dtype, scales))
        elif tail_nbytes:  # as vLLM has it: each cell ends in its scale
            places = [replace(base, offset=base.offset + inner_nbytes) for base in side.bases]
            tile = replace(side.tile, inner_nbytes=tail_nbytes)
            scale = replace(side, tile=tile, bases=tuple(places), values=None)
            tile = replace(side.tile, inner_nbytes=inner_nbytes)
            side = replace(side, tile=tile, scale=scale)
        sides.append(side)
    request = Request(pools[0], pools[1], num_tokens)
    names, _ = request.copy_class()
    chunk = sides[0].values
    source, sink = (replace(side, chunk=chunk) for side in sides)
    memories = [
        (DeviceMemory(memory.data_ptr(), memory.numel()),) for memory in (bench.source, bench.sink)
    ]
    bound = bind_copy(CopyClass(names.names, 0, LLAMA_8B.heads, source, sink), *memories)
    job = _Job(request, bound, request.source_ids, request.sink_ids)
    _check_cast(bench, job, cast, (source, sink))
    nbytes = num_tokens * LLAMA_8B.regions * LLAMA_8B.heads * source.tile.inner_nbytes
    works = {"memcpy": _limits_of(bench, nbytes)["memcpy"]}
    works |= {name_of(width): partial(copy, bench, job, width) for width in _CAST_WIDTHS}
    taken = core.measure(core.clocked(works, partial(once, bench)), bench.rounds, budget_s=BUDGET_S)
    case = f"{' '.join(filter(None, cast))} {layouts} {num_tokens} tokens"
    bench.report.compare(core.Measured(f"casts, {bench.where}", case, nbytes), taken)


def _check_cast(
    bench: Bench, job: _Job, cast: tuple[str, str, str], sides: tuple[Side, Side]
) -> None:
    """By PyTorch's casts, some regions at a time; every NaN is as good as another."""
    request, num_tokens = job.request, job.request.num_tokens
    pool = bench.sink[: request.sink.nbytes]
    with torch.cuda.stream(bench.stream):
        pool.fill_(POISON)
    copy(bench, job, _CAST_WIDTHS[0])
    bench.stream.synchronize()
    for lo in range(0, LLAMA_8B.regions, 8):
        given = content(bench.source, request.source, job.source_ids, lo, 8)[:, :num_tokens]
        taken = content(pool, request.sink, job.sink_ids, lo, 8)[:, :num_tokens]
        values, got = (
            part[..., : side.tile.inner_nbytes].contiguous().view(getattr(torch, dtype)).float()
            for part, side, dtype in zip((given.to(taken.device), taken), sides, cast, strict=False)
        )
        if cast[2] == "tokens":
            scales = taken[..., -SCALE_NBYTES:].contiguous().view(torch.float32)
            want = values * (1 / scales)
        else:
            ours, theirs = (
                torch.tensor(side.values.scales[lo : lo + 8] or (1.0,), device=got.device)
                for side in sides
                if side.values
            )
            want = values * ours.view(-1, 1, 1, 1) / theirs.view(-1, 1, 1, 1)
        largest = torch.finfo(getattr(torch, cast[1])).max
        if cast[1].startswith("float8"):
            want = want.clamp(-largest, largest)
        want = want.to(getattr(torch, cast[1])).float()
        if not bool(((got == want) | (got.isnan() & want.isnan())).all()):
            raise SystemExit(f"bench kernels: wrong values: {' '.join(cast)} {request.layouts}")
    if not request.sink.is_untouched_beside(pool, job.sink_ids):
        raise SystemExit(f"bench kernels: wrote beside: {' '.join(cast)} {request.layouts}")


def _make_bench(where: str, nbytes: int, rounds: int, report: core.Report) -> Bench:
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
    return Bench(where, source, sink, flush, copier, stream, rounds, report)


SECTIONS = {
    section.__name__: section
    for section in (pieces, widths, lengths, inner, gib, casts, cpu, pairs)
}
TEXT = (
    "GB/s of payload, median; on one GPU each byte is read and written. The ratio is to the memcpy "
    "of the same round."
)


def plot(report: core.Report) -> Plot | None:
    cells = [cell for cell in report.records.get("cells", []) if cell.section.startswith("pieces")]
    names = dict.fromkeys((c.section, c.contender) for c in cells if c.contender != "memset")
    lines = [
        line(
            f"{section.removeprefix('pieces, ')}: {contender}",
            [cell for cell in cells if (cell.section, cell.contender) == (section, contender)],
            _piece,
            is_limit=contender == "memcpy",
        )
        for section, contender in names
    ]
    return plot_of("Copying kernel, by piece", "piece, bytes", "GB/s of payload", lines)


def _piece(cell: core.Measured) -> tuple[float, float]:
    block_tokens = int(cell.case.split("->")[0][3:])
    return block_tokens * LLAMA_8B.token_nbytes, cell.speed.gbps[1]


def run(session: Session, options: argparse.Namespace) -> int:
    """Run the sections and write the results after each place."""
    report = session.report(
        *("kernels", "Copying kernel", core.by_section(TEXT), plot, ("triton",))
    )
    largest = between("HND64", "HND64", 32768).sink.nbytes
    has_peer = torch.cuda.device_count() > 1
    places = [where for where in options.where if where == "local" or has_peer]
    if places != options.where:
        report.lost["peer"] = "expected two GPUs, found one"
    session.progress.plan(len(places) * len(options.sections))
    for where in places:
        bench = _make_bench(where, largest, options.rounds, report)
        for section in options.sections:
            SECTIONS[section](bench, options.blocks)
            session.progress.step()
        del bench
        torch.cuda.empty_cache()
        report.write(is_last=True)
    return 0


_PLACES = ("local", "peer")
BENCHMARK = Benchmark(
    (
        option("--rounds", 7, 3, type=int, help="that each contender runs"),
        option(
            "--sections",
            list(SECTIONS),
            ["pieces", "lengths"],
            nargs="+",
            choices=list(SECTIONS),
            help="of",
        ),
        option("--where", list(_PLACES), nargs="+", choices=_PLACES, help="the source's GPU"),
        option("--blocks", list(BLOCKS), nargs="+", type=int, help="tokens, of the section pairs"),
    ),
    run,
    gpu_missing,
)
