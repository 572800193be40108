"""The kernels on a GPU, and over the link between two, beside what the hardware
can do.

    memcpy   as many contiguous bytes, pool to pool: on one GPU, or from the
             other; the limit
    torch    index_select and index_copy_, region by region: the usual way, of
             equal layouts
    kernel   DeviceCopier.copy between pools whose blocks lie in random order

Bytes are checked before anything is timed: a wrong copy ends the run. The
contenders of a case take turns, each after 256 MiB were written to clear the
caches, slow ones fewer times. GB/s are of the payload; on one GPU each byte is
read and written, so its memory moves twice as many. The way of ids and addresses
to the GPU is in the times. The host's time to launch is not, except for "torch":
its hundreds of launches outlast the head start.

Sections: pieces (equal layouts, blocks of 2 KiB to 2 MiB), lengths (128 to 32k
tokens), inner (sizes that are no powers of two), gib (1 GiB of latents, and of
states), pairs (block sizes x layouts x heads), casts (bfloat16 to types of 8 bits
and back, with a scale of each region, of each token, or none; GB/s are of the
source's bytes, and so is its memcpy).
With two GPUs all of it also from the other GPU. On one GPU also: rewrite (blocks
put into another order in place; rows that stay where they are count, so a ratio
may exceed 1) and zero (random blocks beside as many contiguous bytes).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from msgspec.structs import replace
from torch import Tensor

from kvxfer.bench import core
from kvxfer.bench.frame import Benchmark, Session, option
from kvxfer.bench.members import FLUSH_NBYTES, gpu_missing
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
from kvxfer.kernels.block_rewrite import BlockOrder, BlockRewrite, rewrite_blocks_ref
from kvxfer.kernels.rewrite_kernel import plane_table, rewrite_blocks
from kvxfer.kernels.strided_work import WHOLE_GPU
from kvxfer.kernels.zero_blocks import zero_blocks
from kvxfer.tensors.device_copy import CopySettings, DeviceCopier, bind_copy
from kvxfer.tensors.device_memory import DeviceMemory
from kvxfer.transfer.casts import Values
from kvxfer.transfer.layout import SCALE_NBYTES
from kvxfer.transfer.plan import CopyClass, Side

SPREAD = 2  # a pool has this many times the blocks of the request
BUDGET_S = 1.5
"""Of one contender in one case, after its least rounds."""
BLOCKS = (8, 16, 24, 32, 64, 128)
LAYOUTS = ("HND", "NHD")
HEAD_SIZE = 128
_LINK_PROGRAMS = 32
_CAST_PROGRAMS = (24, 48, 96, 132, 264, WHOLE_GPU)
_AHEAD_CYCLES = 1_000_000
REWRITE_AIM, ZERO_AIM = 0.75, 0.95
PLANES = 64
"""Of what is rewritten and zeroed: K and V of 32 layers."""


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
    def programs(self) -> int:
        """Of a copy where nothing else is said."""
        return WHOLE_GPU if self.where == "local" else _LINK_PROGRAMS

    def once(self, work: core.Work) -> core.Timing:
        """What ``work`` launches on the stream. The host is ahead of it, with all launches made
        before the first runs, unless they are hundreds.
        """
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            self.flush.zero_()
            torch.cuda._sleep(_AHEAD_CYCLES)
            began.record()
            work()
            ended.record()
        ended.synchronize()
        return core.Timing(began.elapsed_time(ended) / 1e3)

    def compare(
        self,
        section: str,
        name: str,
        nbytes: int,
        works: Mapping[str, core.Work],
        aims: Mapping[str, float] | None = None,
    ) -> None:
        """The first one is the limit."""
        taken = core.measure(core.clocked(works, self.once), self.rounds, budget_s=BUDGET_S)
        case = core.Case(section=f"{section}, {self.where}", name=name, nbytes=nbytes)
        self.report.compare(case, taken, aims)

    def memcpy(self, nbytes: int) -> core.Work:
        return partial(self.sink[:nbytes].copy_, self.source[:nbytes])

    def copy_of(self, request: Request, copied: CopyClass) -> Callable[..., object]:
        """What copies it, if it is told in how many programs."""
        memories = (
            (DeviceMemory(memory.data_ptr(), memory.numel()),)
            for memory in (self.source, self.sink)
        )
        ids, span = (request.source_ids, request.sink_ids), (0, request.num_tokens)
        bound = bind_copy(copied, *memories)
        return partial(self.copier.copy, bound, *ids, span, stream=self.stream)

    def poisoned(self, request: Request, copy: core.Work) -> Tensor:
        """The sink's pool, which held poison before this copy."""
        pool = self.sink[: request.sink.nbytes]
        with torch.cuda.stream(self.stream):
            pool.fill_(POISON)
        copy()
        self.stream.synchronize()
        return pool


def name_of(programs: int) -> str:
    return "kernel, all" if programs == WHOLE_GPU else f"kernel {programs}"


# ------------------------------------------------------------------ copies


def between(source: str, sink: str, num_tokens: int, shape: Shape = LLAMA_8B) -> Request:
    """A request that fills a part of its pools; ``source``, ``sink``: HND16."""
    return request_of(shape, f"{source}->{sink}", num_tokens, SPREAD * num_tokens)


def pieces(blocks: Sequence[int]) -> Iterator[Request]:
    for log2 in range(11):  # 2 KiB are one token of 8 heads
        yield between(f"HND{1 << log2}", f"HND{1 << log2}", 8192)


def lengths(blocks: Sequence[int]) -> Iterator[Request]:
    for shape, num_tokens in product((LLAMA_8B, LLAMA_70B_TP8), (128, 512, 2048, 8192, 32768)):
        for source in ("HND16", "NHD16"):
            yield between(source, "NHD64", num_tokens, shape)


def inner(blocks: Sequence[int]) -> Iterator[Request]:
    for inner_nbytes, (given, taken) in product(
        (1152, 656, 128, 4), ((64, 64), (64, 16), (16, 24))
    ):
        # One token more than whole blocks, so that they cannot be joined to wider words
        for num_tokens in (8192, 8193):
            shape = Shape("odd", 61, 1, inner_nbytes)
            yield between(f"NHD{given}", f"NHD{taken}", num_tokens, shape)


def pairs(blocks: Sequence[int]) -> Iterator[Request]:
    for shape in (LLAMA_8B, Shape("half of 8B", 64, 4, 256)):
        for ours, theirs, given, taken in product(LAYOUTS, LAYOUTS, blocks, blocks):
            yield between(f"{ours}{given}", f"{theirs}{taken}", 8192, shape)
    for given, taken in product(blocks, blocks):
        yield between(f"HND{given}", f"HND{taken}", 16384, LLAMA_70B_TP8)


GIB = 1 << 30
LATENTS = (Shape("V3", 61, 1, 1152), Shape("V3.2, fp8", 61, 1, 656))
STATES = (
    # Of Qwen3-Next: a matrix for each of 32 heads; three inputs of a convolution of 8192 channels.
    (Shape("matrices", 36, 32, 128 * 128 * 2), "NHD1", "NHD1"),
    (Shape("inputs", 36, 1, 8192 * 2), "NHD3", "NHD3"),
    (Shape("inputs by channel", 36, 8192, 2), "NHD3", "HND3"),
    (Shape("inputs by channel", 36, 8192, 2), "HND3", "NHD3"),
)


def gib(blocks: Sequence[int]) -> Iterator[Request]:
    """As many tokens, or requests, as are 1 GiB. States: a block holds one request's."""
    for shape, (given, taken) in product(LATENTS, ((64, 64), (64, 128))):
        num_tokens = GIB // (shape.regions * shape.token_nbytes)
        yield between(f"NHD{given}", f"NHD{taken}", num_tokens, shape)
    for shape, source, sink in STATES:
        _, rows = layout_of(source)
        requests = GIB // (shape.regions * shape.token_nbytes * rows)
        yield between(source, sink, requests * rows, shape)


COPIES = {section.__name__: section for section in (pieces, lengths, inner, gib, pairs)}


def run_copies(bench: Bench, section: str, blocks: Sequence[int]) -> None:
    for request in COPIES[section](blocks):
        copied, _ = request.copy_class()
        copy = partial(bench.copy_of(request, copied), programs=bench.programs)
        check(bench, request, copy)
        works: dict[str, core.Work] = {"memcpy": bench.memcpy(request.nbytes)}
        if section == "pieces":
            works["torch"] = torch_copy(request, bench.source, bench.sink)
        shape = request.shape
        sizes = f"{shape.regions}x{shape.heads}x{shape.inner_nbytes}"
        name = f"{request.layouts} {sizes} {request.num_tokens} tokens"
        works[name_of(bench.programs)] = copy
        bench.compare(section, name, request.nbytes, works)


def check(bench: Bench, request: Request, copy: core.Work) -> None:
    """Not by the code under test: every byte of the request, and none beside it."""
    pool, num_tokens = bench.poisoned(request, copy), request.num_tokens
    step = max(1, (1 << 30) // (num_tokens * request.shape.token_nbytes))
    for lo in range(0, request.shape.regions, step):
        want = content(bench.source, request.source, request.source_ids, lo, step)
        got = content(pool, request.sink, request.sink_ids, lo, step)
        if not torch.equal(got[:, :num_tokens], want[:, :num_tokens].to(got.device)):
            raise SystemExit(f"bench kernels: wrong bytes: {request.name}")
        if not bool((got[:, num_tokens:] == POISON).all()):
            raise SystemExit(f"bench kernels: wrote behind: {request.name}")
    if not request.sink.is_untouched_beside(pool, request.sink_ids):
        raise SystemExit(f"bench kernels: wrote beside: {request.name}")


def content(memory: Tensor, pool: Pool, ids: Ids, lo: int, step: int) -> Tensor:
    """[regions, tokens, heads, inner] of some regions, all tokens of the blocks."""
    blocks = pool.blocks(memory)[lo : lo + step]
    taken = blocks[:, torch.from_numpy(ids).to(memory.device)]
    return taken.reshape(taken.shape[0], -1, pool.shape.heads, pool.shape.inner_nbytes)


def torch_copy(request: Request, source: Tensor, sink: Tensor) -> Callable[[], None]:
    """Region by region: index_select, copy to the other GPU, index_copy_; of equal layouts."""
    given, taken = (
        memory[: pool.nbytes].view(pool.shape.regions, pool.num_blocks, -1)
        for memory, pool in ((source, request.source), (sink, request.sink))
    )
    source_ids = torch.from_numpy(request.source_ids).to(source.device)
    sink_ids = torch.from_numpy(request.sink_ids).to(sink.device)

    def run() -> None:
        for theirs, ours in zip(given, taken, strict=True):
            ours.index_copy_(0, sink_ids, theirs.index_select(0, source_ids).to(sink.device))

    return run


# ------------------------------------------------------------------ casts

CASTS = (
    ("bfloat16", "float8_e4m3fn", ""),
    ("bfloat16", "float8_e4m3fn", "regions"),
    ("bfloat16", "float8_e4m3fn", "tokens"),
    ("bfloat16", "float8_e5m2", ""),
    ("float8_e4m3fn", "bfloat16", "regions"),
)
"""Type of the source, type of the sink, and what has scales at the side of 8 bits."""
Cast = tuple[str, str, str]


def run_casts(bench: Bench) -> None:
    layouts = ("HND16->HND16", "NHD16->HND64")
    for cast, between_them, num_tokens in product(CASTS, layouts, (2048, 16384)):
        (given, source), (taken, sink) = (
            cast_side(dtype, cast[2], text, num_tokens)
            for dtype, text in zip(cast[:2], between_them.split("->"), strict=True)
        )
        request = Request(given, taken, num_tokens)
        names, _ = request.copy_class()
        source, sink = (replace(side, chunk=source.values) for side in (source, sink))
        copied = CopyClass(names.names, 0, LLAMA_8B.heads, source, sink)
        copy = bench.copy_of(request, copied)
        check_cast(bench, request, partial(copy, programs=_CAST_PROGRAMS[0]), cast, (source, sink))
        nbytes = num_tokens * LLAMA_8B.regions * LLAMA_8B.heads * source.tile.inner_nbytes
        works: dict[str, core.Work] = {"memcpy": bench.memcpy(nbytes)}
        works |= {name_of(number): partial(copy, programs=number) for number in _CAST_PROGRAMS}
        name = f"{' '.join(filter(None, cast))} {between_them} {num_tokens} tokens"
        bench.compare("casts", name, nbytes, works)


def cast_side(dtype: str, scaled: str, text: str, num_tokens: int) -> tuple[Pool, Side]:
    """A pool of values of that type, and what the code under test is told of it."""
    values = Values(dtype)
    scaled = scaled if values.item_nbytes == 1 else ""
    tail_nbytes = SCALE_NBYTES if scaled == "tokens" else 0
    inner_nbytes = HEAD_SIZE * values.item_nbytes
    layout, block_tokens = layout_of(text)
    shape = Shape("8B", LLAMA_8B.regions, LLAMA_8B.heads, inner_nbytes + tail_nbytes)
    pool = Pool(layout, block_tokens, -(-num_tokens // block_tokens) * SPREAD, shape)
    side = replace(pool.side(), values=values)
    if scaled == "regions":
        scales = tuple((0.1 + region / 64,) for region in range(shape.regions))
        side = replace(side, values=Values(dtype, scales))
    elif tail_nbytes:  # as vLLM has it: each cell ends in its scale
        places = tuple(replace(base, offset=base.offset + inner_nbytes) for base in side.bases)
        tile = replace(side.tile, inner_nbytes=tail_nbytes)
        scale = replace(side, tile=tile, bases=places, values=None)
        side = replace(side, tile=replace(side.tile, inner_nbytes=inner_nbytes), scale=scale)
    return pool, side


def check_cast(
    bench: Bench, request: Request, copy: core.Work, cast: Cast, sides: tuple[Side, Side]
) -> None:
    """By PyTorch's casts, some regions at a time; every NaN is as good as another."""
    pool, num_tokens = bench.poisoned(request, copy), request.num_tokens
    source_type, sink_type = (getattr(torch, name) for name in cast[:2])
    for lo in range(0, LLAMA_8B.regions, 8):
        given = content(bench.source, request.source, request.source_ids, lo, 8)[:, :num_tokens]
        taken = content(pool, request.sink, request.sink_ids, lo, 8)[:, :num_tokens]
        values, got = (
            part[..., : side.tile.inner_nbytes].contiguous().view(dtype).float()
            for part, side, dtype in (
                (given.to(taken.device), sides[0], source_type),
                (taken, sides[1], sink_type),
            )
        )
        if cast[2] == "tokens":
            want = values * (1 / taken[..., -SCALE_NBYTES:].contiguous().view(torch.float32))
        else:
            ours, theirs = (
                torch.tensor(side.values.scales[lo : lo + 8] or (1.0,), device=got.device)
                for side in sides
                if side.values
            )
            want = values * ours.view(-1, 1, 1, 1) / theirs.view(-1, 1, 1, 1)
        if sink_type.itemsize == 1:
            largest = torch.finfo(sink_type).max
            want = want.clamp(-largest, largest)
        want = want.to(sink_type).float()
        if not bool(((got == want) | (got.isnan() & want.isnan())).all()):
            raise SystemExit(f"bench kernels: wrong values: {' '.join(cast)} {request.layouts}")
    if not request.sink.is_untouched_beside(pool, request.sink_ids):
        raise SystemExit(f"bench kernels: wrote beside: {' '.join(cast)} {request.layouts}")


# ------------------------------------------------------------------ in place, on one GPU

REWRITES = {
    "regroup 4 to 16": (BlockOrder(4, True), BlockOrder(16, True), 256),
    "layout 16": (BlockOrder(16, True), BlockOrder(16, False), 256),
    "layout 128": (BlockOrder(128, True), BlockOrder(128, False), 256),
    "both 16 to 64": (BlockOrder(16, True), BlockOrder(64, False), 256),
    "split 24 to 16, layout": (BlockOrder(24, True), BlockOrder(16, False), 256),
    "both 4 to 16, 132": (BlockOrder(4, True), BlockOrder(16, False), 132),
}
"""The order received, the local one, and bytes of one head."""
NUM_HEADS = 8
_IN_PLACE_TOKENS = (1024, 8192)
_ZERO_NBYTES = (4096, 32768, 131072)


def run_rewrites(bench: Bench) -> None:
    for num_tokens, (name, (received, local, width_nbytes)) in product(
        _IN_PLACE_TOKENS, REWRITES.items()
    ):
        rewrite = BlockRewrite(NUM_HEADS, received, local)
        num_blocks = max(1, num_tokens // rewrite.set_tokens) * rewrite.set_blocks
        middle = (NUM_HEADS, local.block_tokens)
        shape = (SPREAD * num_blocks, *(middle if local.by_head else middle[::-1]), width_nbytes)
        device = bench.sink.device
        pools = [
            torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(PLANES)
        ]
        ids = torch.randperm(shape[0], device=device)[:num_blocks].contiguous()
        kernel = partial(rewrite_blocks, plane_table(pools), ids, rewrite)
        wants = [pool.clone() for pool in pools]
        kernel()
        for pool, want in zip(pools, wants, strict=True):
            rewrite_blocks_ref(want, ids, rewrite)
            if not torch.equal(pool, want):
                raise SystemExit(f"bench kernels: {name}: wrong bytes")
        nbytes = PLANES * num_blocks * pools[0][0].nbytes
        works: dict[str, core.Work] = {"memcpy": bench.memcpy(nbytes), "kernel": kernel}
        title = f"{name}, {num_blocks * local.block_tokens} tokens"
        bench.compare("rewrite", title, nbytes, works, {"kernel": REWRITE_AIM})


def run_zeroing(bench: Bench) -> None:
    for num_tokens, block_nbytes in product(_IN_PLACE_TOKENS, _ZERO_NBYTES):
        num_blocks = max(1, num_tokens * LLAMA_8B.token_nbytes // block_nbytes)
        shape, device = (PLANES, SPREAD * num_blocks, block_nbytes), bench.sink.device
        pools = torch.full(shape, POISON, dtype=torch.uint8, device=device)
        ids = torch.randperm(shape[1], device=device)[:num_blocks].contiguous()
        rows = [(pool.data_ptr(), block_nbytes, block_nbytes) for pool in pools]
        segments = torch.tensor(rows, dtype=torch.int64, device=device)
        kernel = partial(zero_blocks, segments, ids, block_nbytes)
        kernel()
        is_other = torch.ones(shape[1], dtype=torch.bool, device=device)
        is_other[ids] = False
        name = f"{num_blocks} blocks of {block_nbytes} bytes"
        if any(pool[ids].any() or not (pool[is_other] == POISON).all() for pool in pools):
            raise SystemExit(f"bench kernels: zero, {name}: wrong bytes")
        nbytes = PLANES * num_blocks * block_nbytes
        zero = pools.view(-1)[:nbytes].zero_
        works: dict[str, core.Work] = {"torch zero_": zero, "kernel": kernel}
        bench.compare("zero", name, nbytes, works, {"kernel": ZERO_AIM})


# ------------------------------------------------------------------ the benchmark

IN_PLACE = {"rewrite": run_rewrites, "zero": run_zeroing}
SECTIONS = (*COPIES, "casts", *IN_PLACE)
TEXT = (
    "GB/s of payload, median; on one GPU each byte is read and written. The ratio is to the first "
    "contender in the same round."
)


def make_bench(where: str, nbytes: int, rounds: int, report: core.Report) -> Bench:
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


def plot(report: core.Report) -> Plot | None:
    cells = [cell for cell in report.records.get("cells", []) if cell.section.startswith("pieces")]
    lines = [
        line(
            f"{section.removeprefix('pieces, ')}: {way}",
            [cell for cell in cells if (cell.section, cell.way) == (section, way)],
            piece,
            is_limit=way == "memcpy",
        )
        for section, way in dict.fromkeys((cell.section, cell.way) for cell in cells)
    ]
    return plot_of("Copying kernel, by piece", "piece, bytes", "GB/s of payload", lines)


def piece(cell: core.Cell) -> tuple[float, float]:
    block_tokens = int(cell.case.split("->")[0][3:])
    return block_tokens * LLAMA_8B.token_nbytes, cell.gbps[1]


def run(session: Session, options: argparse.Namespace) -> int:
    """Run the sections and write the results after each place."""
    report = session.report("kernels", "Kernels", core.by_section(TEXT), plot, ("triton",))
    largest = between("HND64", "HND64", 32768).sink.nbytes
    has_peer = torch.cuda.device_count() > 1
    places = [where for where in options.where if where == "local" or has_peer]
    if places != options.where:
        report.lost["peer"] = "expected two GPUs, found one"
    session.progress.plan(len(places) * len(options.sections))
    for where in places:
        bench = make_bench(where, largest, options.rounds, report)
        for section in options.sections:
            if section in COPIES:
                run_copies(bench, section, options.blocks)
            elif section == "casts":
                run_casts(bench)
            elif where == "local":
                IN_PLACE[section](bench)
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
            choices=SECTIONS,
            help="of",
        ),
        option("--where", list(_PLACES), nargs="+", choices=_PLACES, help="the source's GPU"),
        option("--blocks", list(BLOCKS), nargs="+", type=int, help="tokens, of the section pairs"),
    ),
    run,
    gpu_missing,
)
