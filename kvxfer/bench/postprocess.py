"""How fast received blocks are put into the local order in place, and blocks zeroed, on one GPU,
beside what the memory can do. Bytes are checked first; nothing is timed that is wrong.

    postprocess  all layers in one launch. Limit: a device-to-device copy of as many bytes, which
                 reads and writes each once, as the rewrite does. "torch" is the same rewrite in
                 torch operations, layer by layer.
    zero         the pieces of random blocks in all layers. Limit: one memset of as many bytes (the
                 driver's: torch's zero_ is a kernel).

Blocks are in random order in pools twice as large. Contenders take turns; the ratio is the median
of each round's ratio to the limit of that round. One call is timed by events and includes the
launch, not the ids' way to the GPU. GB/s count the blocks' bytes once.

A rewrite leaves some rows where they are (fixed points of its permutation). GB/s and ratios count
all bytes of the blocks nevertheless, as the limit copies all of them: a kernel that does not touch
what stays can exceed the limit. "moves" is how much of the blocks changes its place.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvxfer.bench import core
from kvxfer.bench.frame import Benchmark, Session, option
from kvxfer.bench.gpu import StreamClock
from kvxfer.bench.members import gpu_missing
from kvxfer.bench.pools import POISON
from kvxfer.kernels.block_rewrite import (
    BlockOrder,
    BlockRewrite,
    rewrite_blocks_ref,
    sources_of_runs,
)
from kvxfer.kernels.rewrite_kernel import plane_table, rewrite_blocks
from kvxfer.kernels.zero_blocks import TILE_NBYTES, zero_blocks

_POSTPROCESS_GOAL = 0.75
_ZERO_GOAL = 0.95
_KERNEL = "kernel"  # as it is called without further wishes
SPREAD = 2  # a pool has this many times the blocks of the request
AHEAD_CYCLES = 5_000_000  # about 3 ms


@dataclass(frozen=True, slots=True)
class _Rewritten:
    name: str
    received: BlockOrder
    local: BlockOrder
    num_heads: int = 8
    width_nbytes: int = 256


REWRITES = [
    _Rewritten("regroup 4 to 16", BlockOrder(4, True), BlockOrder(16, True)),
    _Rewritten("regroup 16 to 128", BlockOrder(16, True), BlockOrder(128, True)),
    _Rewritten("layout 16", BlockOrder(16, True), BlockOrder(16, False)),
    _Rewritten("layout 64", BlockOrder(64, True), BlockOrder(64, False)),
    _Rewritten("layout 128", BlockOrder(128, True), BlockOrder(128, False)),
    _Rewritten("layout 16 to HND", BlockOrder(16, False), BlockOrder(16, True)),
    _Rewritten("both 4 to 16", BlockOrder(4, True), BlockOrder(16, False)),
    _Rewritten("both 16 to 64", BlockOrder(16, True), BlockOrder(64, False)),
    _Rewritten("split 64 to 16", BlockOrder(64, True), BlockOrder(16, True)),
    _Rewritten("split 24 to 16, layout", BlockOrder(24, True), BlockOrder(16, False)),
    _Rewritten("both 4 to 16, 1152", BlockOrder(4, True), BlockOrder(16, False), 2, 1152),
    _Rewritten("both 4 to 16, 656", BlockOrder(4, True), BlockOrder(16, False), 4, 656),
    _Rewritten("both 4 to 16, 132", BlockOrder(4, True), BlockOrder(16, False), 8, 132),
    _Rewritten("layout 128, 64 heads", BlockOrder(128, True), BlockOrder(128, False), 64),
]


@dataclass(frozen=True, slots=True)
class Case:
    """What is done, by contender, the limit first; all are right already. ``goals``: of some."""

    bench: str
    name: str
    nbytes: int
    works: Mapping[str, core.Work]
    goals: Mapping[str, float]
    moves_percent: float | None = None


def once(work: core.Work, device: torch.device) -> core.Timing:
    if device.type == "cuda":
        # It is busy while the host prepares the launch, so that the launch is not what is timed
        torch.cuda._sleep(AHEAD_CYCLES)
    clock = StreamClock(device)
    clock.mark()
    work()
    clock.mark()
    return core.Timing(clock.elapsed_ms() / 1e3)


def _rewrite_case(
    wanted: _Rewritten, num_tokens: int, num_planes: int, tiles: list[int], device: torch.device
) -> Case:
    """One rewrite as it is done by itself, and in programs of so many KiB. Raises SystemExit."""
    rewrite = BlockRewrite(wanted.num_heads, wanted.received, wanted.local)
    tokens = wanted.local.block_tokens
    num_blocks = max(1, num_tokens // rewrite.set_tokens) * rewrite.set_blocks
    middle = (wanted.num_heads, tokens) if wanted.local.by_head else (tokens, wanted.num_heads)
    shape = (SPREAD * num_blocks, *middle, wanted.width_nbytes)
    pools = [
        torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(num_planes)
    ]
    ids = torch.randperm(shape[0], device=device)[:num_blocks].contiguous()
    by_kernel = partial(rewrite_blocks, plane_table(pools), ids, rewrite)
    kernels: dict[str, core.Work] = {_KERNEL: by_kernel}
    for kib in tiles:
        kernels[f"kernel, {kib} KiB"] = partial(by_kernel, tile_nbytes=kib << 10)
    name = f"{wanted.name}, {num_blocks * tokens} tokens"
    for which, work in kernels.items():
        wants = [pool.clone() for pool in pools]
        work()
        for pool, want in zip(pools, wants, strict=True):
            rewrite_blocks_ref(want, ids, rewrite)
            if not torch.equal(pool, want):
                raise SystemExit(f"{name}, {which}: wrong bytes")

    def by_torch() -> None:
        for pool in pools:
            rewrite_blocks_ref(pool, ids, rewrite)

    nbytes = num_planes * num_blocks * pools[0][0].nbytes
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    copy = partial(torch.zeros_like(source).copy_, source)
    runs = sources_of_runs(rewrite, torch.device("cpu"))
    moves_percent = 100 * float((runs != torch.arange(len(runs))).double().mean())
    works: dict[str, core.Work] = {"copy": copy, "torch": by_torch, **kernels}
    return Case("postprocess", name, nbytes, works, {_KERNEL: _POSTPROCESS_GOAL}, moves_percent)


def memset(target: Tensor) -> core.Work:
    """The driver's memset of a contiguous tensor, in the current stream."""
    if not target.is_cuda:
        return target.zero_
    set_bytes = ctypes.CDLL("libcuda.so.1").cuMemsetD8Async
    set_bytes.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]

    def run() -> None:
        stream = torch.cuda.current_stream(target.device).cuda_stream
        status = set_bytes(target.data_ptr(), 0, target.nbytes, stream)
        if status:
            raise SystemExit(f"cuMemsetD8Async: expected status 0, got {status}")

    return run


def _zero_case(
    block_nbytes: int, num_blocks: int, num_planes: int, tiles: list[int], device: torch.device
) -> Case:
    """Zeroing as it is done by itself, and in programs of so many KiB. Raises SystemExit."""
    shape = (num_planes, SPREAD * num_blocks, block_nbytes)
    pools = torch.empty(shape, dtype=torch.uint8, device=device)
    ids = torch.randperm(shape[1], device=device)[:num_blocks].contiguous()
    rows = [(pool.data_ptr(), block_nbytes, block_nbytes) for pool in pools]
    segments = torch.tensor(rows, dtype=torch.int64, device=device)
    name = f"{num_blocks} blocks of {block_nbytes} bytes"
    others = torch.ones(shape[1], dtype=torch.bool, device=device)
    others[ids] = False
    kernels: dict[str, core.Work] = {}
    for tile_nbytes in (TILE_NBYTES, *(kib << 10 for kib in tiles)):
        work = partial(zero_blocks, segments, ids, block_nbytes, tile_nbytes=tile_nbytes)
        pools.fill_(POISON)
        work()
        if any(pool[ids].any() or not bool((pool[others] == POISON).all()) for pool in pools):
            raise SystemExit(f"zero, {name}, tiles of {tile_nbytes}: wrong bytes")
        kernels[f"kernel, {tile_nbytes} bytes"] = work
    nbytes = num_planes * num_blocks * block_nbytes
    flat: Tensor = pools.view(-1)[:nbytes]
    flat.fill_(POISON)
    memset(flat)()
    if flat.any():
        raise SystemExit("memset: wrong bytes")
    works = {"memset": memset(flat), "torch zero_": flat.zero_, **kernels}
    return Case("zero", name, nbytes, works, {f"kernel, {TILE_NBYTES} bytes": _ZERO_GOAL})


def _wanted_cases(options: argparse.Namespace) -> list[Callable[[torch.device], Case]]:
    """All that were asked for; each is made and checked when its turn comes."""
    found: list[Callable[[torch.device], Case]] = []
    for num_tokens in options.tokens:
        for wanted in REWRITES if options.only != "zero" else ():
            if options.case is None or options.case in wanted.name:
                given = (wanted, num_tokens, options.planes, options.tiles)
                found.append(partial(_rewrite_case, *given))
        for block_nbytes in (4096, 32768, 131072) if options.only != "postprocess" else ():
            num_blocks = max(1, num_tokens * 2048 // block_nbytes)  # 8 heads of 256 bytes
            sizes = (block_nbytes, num_blocks, options.planes, options.zero_tiles)
            found.append(partial(_zero_case, *sizes))
    return found


TEXT = (
    "GB/s and ratios count all bytes of the blocks, as the limit copies them, although rows that "
    "stay where they are need not be moved: a ratio may exceed 1. The note says what moves."
)


def run(session: Session, options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    torch.manual_seed(0)
    tables = core.by_section(TEXT)
    title = "Rewriting and zeroing blocks"
    report = session.report("postprocess", title, tables, packages=("triton",))
    wanted = _wanted_cases(options)
    session.progress.plan(len(wanted))
    for make in wanted:
        case = make(device)
        taken = core.measure(core.clocked(case.works, partial(once, device=device)), options.rounds)
        moves = "" if case.moves_percent is None else f"{case.moves_percent:.1f} % moves"
        report.compare(
            core.Measured(case.bench, case.name, case.nbytes, note=moves), taken, case.goals
        )
        report.write()
        session.progress.step()
    return 0


BENCHMARK = Benchmark(
    (
        option("--device", "cuda", help="cpu only with TRITON_INTERPRET=1, to try"),
        option("--tokens", [1024, 8192], [1024], type=int, nargs="+", help="of a request"),
        option("--planes", 64, type=int, help="K and V of all layers"),
        option("--rounds", 31, 7, type=int, help="that each contender runs"),
        option("--only", choices=["postprocess", "zero"], help="one of the two"),
        option("--case", help="only the rewrites whose name has this in it"),
        option("--tiles", [], type=int, nargs="+", metavar="KIB", help="of a rewrite's program"),
        option("--zero-tiles", [], type=int, nargs="+", metavar="KIB", help="of a zeroing program"),
    ),
    run,
    gpu_missing,
)
