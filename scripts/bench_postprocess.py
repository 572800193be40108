"""How fast received blocks are put into the local order in place, and blocks zeroed, on one GPU,
beside what the memory can do. Bytes are checked first; nothing is timed that is wrong.

    postprocess  all layers in one launch. Limit: a device-to-device copy of as many bytes, which
                 reads and writes each once, as the rewrite does. "torch" is the same rewrite in
                 torch operations, layer by layer.
    zero         the pieces of random blocks in all layers. Limit: one memset of as many bytes (the
                 driver's: torch's zero_ is a kernel).

Blocks are in random order in pools twice as large. Contenders are interleaved round by round; the
ratio is the median of each round's ratio to the limit of that round. One call is timed by events
and includes the launch, not the ids' way to the GPU. GB/s count the blocks' bytes once.

A rewrite leaves some rows where they are (fixed points of its permutation). GB/s and ratios count
all bytes of the blocks nevertheless, as the limit copies all of them: a kernel that does not touch
what stays can exceed the limit. "moves" is how much of the blocks changes its place.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from kvxfer.kernels.block_rewrite import (
    BlockOrder,
    BlockRewrite,
    rewrite_blocks_ref,
    sources_of_runs,
)
from kvxfer.kernels.rewrite_kernel import TILE_NBYTES as REWRITE_TILE_NBYTES
from kvxfer.kernels.rewrite_kernel import plane_table, rewrite_blocks
from kvxfer.kernels.zero_blocks import TILE_NBYTES, zero_blocks

POSTPROCESS_GOAL = 0.75
ZERO_GOAL = 0.95
KERNEL = "kernel"  # as it is called without further wishes
SPREAD = 2  # a pool has this many times the blocks of the request
WARM_UPS = 3
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A case of post-processing."""

    name: str
    received: BlockOrder
    local: BlockOrder
    num_heads: int = 8
    width_nbytes: int = 256


REWRITES = [
    Rewritten("regroup 4 to 16", BlockOrder(4, True), BlockOrder(16, True)),
    Rewritten("regroup 16 to 128", BlockOrder(16, True), BlockOrder(128, True)),
    Rewritten("layout 16", BlockOrder(16, True), BlockOrder(16, False)),
    Rewritten("layout 64", BlockOrder(64, True), BlockOrder(64, False)),
    Rewritten("layout 128", BlockOrder(128, True), BlockOrder(128, False)),
    Rewritten("layout 16 to HND", BlockOrder(16, False), BlockOrder(16, True)),
    Rewritten("both 4 to 16", BlockOrder(4, True), BlockOrder(16, False)),
    Rewritten("both 16 to 64", BlockOrder(16, True), BlockOrder(64, False)),
    Rewritten("split 64 to 16", BlockOrder(64, True), BlockOrder(16, True)),
    Rewritten("split 24 to 16, layout", BlockOrder(24, True), BlockOrder(16, False)),
    Rewritten("both 4 to 16, 1152", BlockOrder(4, True), BlockOrder(16, False), 2, 1152),
    Rewritten("both 4 to 16, 656", BlockOrder(4, True), BlockOrder(16, False), 4, 656),
    Rewritten("both 4 to 16, 132", BlockOrder(4, True), BlockOrder(16, False), 8, 132),
    Rewritten("layout 128, 64 heads", BlockOrder(128, True), BlockOrder(128, False), 64),
]


@dataclass(frozen=True, slots=True)
class Result:
    """One contender: GB/s, and the median ratio to the limit (None: it is the limit).

    ``moves_percent`` of a rewrite: what does not stay where it is.
    """

    bench: str
    case: str
    contender: str
    mib: float
    moves_percent: float | None
    p20_gbps: float
    p50_gbps: float
    p80_gbps: float
    ratio: float | None
    goal: float | None

    def row(self) -> str:
        """Of the Markdown table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        moves = "" if self.moves_percent is None else f"{self.moves_percent:.1f} %"
        goal = ""
        if self.goal is not None and self.ratio is not None:
            goal = f"{self.goal:.2f} {'met' if self.ratio >= self.goal else 'missed'}"
        return (
            f"| {self.bench} | {self.case} | {self.contender} | {self.mib:.0f} | {moves} | "
            f"{self.p20_gbps:.0f} | {self.p50_gbps:.0f} | {self.p80_gbps:.0f} | {ratio} | {goal} |"
        )


def elapsed_s(run: Run, device: torch.device) -> float:
    """One call, by events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The GPU is busy while the host prepares the launch, so that the launch is not what is timed.
    torch.cuda._sleep(5_000_000)  # clock cycles, about 3 ms
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def measure(
    bench: str,
    case: str,
    contenders: dict[str, Run],
    goals: dict[str, float],
    nbytes: int,
    rounds: int,
    device: torch.device,
    moves_percent: float | None = None,
) -> list[Result]:
    """All contenders, interleaved; the first one is the limit."""
    for run in contenders.values():
        for _ in range(WARM_UPS):
            run()
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            rates[name].append(nbytes / elapsed_s(run, device) / 1e9)
    limit_name, limit = next(iter(rates.items()))
    results = []
    for name, values in rates.items():
        p20, p50, p80 = (statistics.quantiles(values, n=10)[at] for at in (1, 4, 7))
        ratio = statistics.median(value / of for value, of in zip(values, limit, strict=True))
        results.append(
            Result(
                bench=bench,
                case=case,
                contender=name,
                mib=nbytes / 2**20,
                moves_percent=moves_percent,
                p20_gbps=p20,
                p50_gbps=p50,
                p80_gbps=p80,
                ratio=None if name == limit_name else ratio,
                goal=goals.get(name),
            )
        )
    return results


def moves_percent_of(rewrite: BlockRewrite) -> float:
    """Of a set's runs, those that do not stay where they are."""
    sources = sources_of_runs(rewrite, torch.device("cpu"))
    return 100 * float((sources != torch.arange(len(sources))).double().mean())


def bench_postprocess(
    case: Rewritten,
    num_tokens: int,
    num_planes: int,
    tiles: Sequence[int],
    rounds: int,
    device: torch.device,
) -> list[Result]:
    """One rewrite as it is done by itself, and in programs of ``tiles`` bytes."""
    rewrite = BlockRewrite(case.num_heads, case.received, case.local)
    tokens = case.local.block_tokens
    num_blocks = max(1, num_tokens // rewrite.set_tokens) * rewrite.set_blocks
    middle = (case.num_heads, tokens) if case.local.by_head else (tokens, case.num_heads)
    shape = (SPREAD * num_blocks, *middle, case.width_nbytes)
    pools = [
        torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(num_planes)
    ]
    ids = torch.randperm(shape[0], device=device)[:num_blocks].contiguous()
    planes = plane_table(pools)
    nbytes = num_planes * num_blocks * pools[0][0].nbytes
    name = f"{case.name}, {num_blocks * tokens} tokens"

    def by(tile_nbytes: int) -> Run:
        return lambda: rewrite_blocks(planes, ids, rewrite, tile_nbytes=tile_nbytes)

    runs = {KERNEL: by(REWRITE_TILE_NBYTES)}
    runs |= {f"kernel, {tile_nbytes} bytes": by(tile_nbytes) for tile_nbytes in tiles}
    for at, run in runs.items():
        wants = [pool.clone() for pool in pools]
        run()
        for pool, want in zip(pools, wants, strict=True):
            rewrite_blocks_ref(want, ids, rewrite)
            if not torch.equal(pool, want):
                raise SystemExit(f"{name}, {at}: wrong bytes")
        del wants

    def by_torch() -> None:
        for pool in pools:
            rewrite_blocks_ref(pool, ids, rewrite)

    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    sink = torch.zeros_like(source)
    contenders: dict[str, Run] = {"copy": lambda: sink.copy_(source), "torch": by_torch, **runs}
    goals = {KERNEL: POSTPROCESS_GOAL}
    moves_percent = moves_percent_of(rewrite)
    return measure("postprocess", name, contenders, goals, nbytes, rounds, device, moves_percent)


def memset(target: Tensor) -> Run:
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


def bench_zero(
    block_nbytes: int,
    num_blocks: int,
    num_planes: int,
    tiles: Sequence[int],
    rounds: int,
    device: torch.device,
) -> list[Result]:
    """Zeroing with programs of several sizes."""
    pools = torch.empty(
        (num_planes, SPREAD * num_blocks, block_nbytes), dtype=torch.uint8, device=device
    )
    ids = torch.randperm(SPREAD * num_blocks, device=device)[:num_blocks].contiguous()
    rows = [(pool.data_ptr(), block_nbytes, block_nbytes) for pool in pools]
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    name = f"{num_blocks} blocks of {block_nbytes} bytes"
    others = torch.ones(pools.shape[1], dtype=torch.bool, device=device)
    others[ids] = False
    for tile_nbytes in tiles:
        pools.fill_(0xEE)
        zero_blocks(table, ids, block_nbytes, tile_nbytes=tile_nbytes)
        if any(pool[ids].any() or not bool((pool[others] == 0xEE).all()) for pool in pools):
            raise SystemExit(f"zero, {name}, tiles of {tile_nbytes}: wrong bytes")

    def by_kernel(tile_nbytes: int) -> Run:
        return lambda: zero_blocks(table, ids, block_nbytes, tile_nbytes=tile_nbytes)

    nbytes = num_planes * num_blocks * block_nbytes
    flat: Tensor = pools.view(-1)[:nbytes]
    flat.fill_(0xEE)
    memset(flat)()
    if flat.any():
        raise SystemExit("memset: wrong bytes")
    contenders: dict[str, Run] = {"memset": memset(flat), "torch zero_": flat.zero_}
    goals = {}
    for tile_nbytes in tiles:
        label = f"kernel, {tile_nbytes} bytes"
        contenders[label] = by_kernel(tile_nbytes)
        if tile_nbytes == TILE_NBYTES:
            goals[label] = ZERO_GOAL
    return measure("zero", name, contenders, goals, nbytes, rounds, device)


def command_of(options: argparse.Namespace) -> str:
    """As it can be repeated, without where its results went."""
    words = ["scripts/bench_postprocess.py"]
    for name, value in vars(options).items():
        if name not in ("json", "markdown") and value not in (None, []):
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


def report(results: list[Result], facts: str, options: argparse.Namespace) -> str:
    """All results as Markdown."""
    lines = [
        f"{facts}",
        "",
        f"Command: `{command_of(options)}`",
        "",
        "GB/s and ratios count all bytes of the blocks, as the limit copies them, although rows "
        "that stay where they are need not be moved: a ratio may exceed 1. *moves*: percent of the "
        "blocks that changes its place.",
        "",
        "| bench | case | contender | MiB | moves | p20 | p50 | p80 GB/s | ratio to limit | goal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(result.row() for result in results)]) + "\n"


def main() -> None:
    """Parse, check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cpu only with TRITON_INTERPRET=1, to try")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192], help="of a request")
    parser.add_argument("--planes", type=int, default=64, help="K and V of all layers")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--only", choices=["postprocess", "zero"], help="one of the two")
    parser.add_argument("--case", help="only the rewrites whose name has this in it")
    parser.add_argument(
        "--tiles", type=int, nargs="+", default=[], help="also, KiB a program rewrites"
    )
    parser.add_argument(
        "--zero-tiles", type=int, nargs="+", default=[], help="also, KiB a program zeroes"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    options = parser.parse_args()
    if min(options.tokens) < 1 or options.planes < 1 or options.rounds < 2:
        parser.error("--tokens, --planes, --rounds: expected at least 1, 1 and 2")
    device = torch.device(options.device)
    torch.manual_seed(0)
    tiles = [kib << 10 for kib in options.tiles]
    zero_tiles = [TILE_NBYTES, *(kib << 10 for kib in options.zero_tiles)]
    results = []
    for num_tokens in options.tokens:
        for case in REWRITES if options.only != "zero" else []:
            if options.case is None or options.case in case.name:
                results += bench_postprocess(
                    case,
                    num_tokens,
                    options.planes,
                    tiles,
                    options.rounds,
                    device,
                )
        for block_nbytes in [4096, 32768, 131072] if options.only != "postprocess" else []:
            num_blocks = max(1, num_tokens * 2048 // block_nbytes)  # 8 heads of 256 bytes
            results += bench_zero(
                block_nbytes, num_blocks, options.planes, zero_tiles, options.rounds, device
            )
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"
    facts = (
        f"{chip}, torch {torch.__version__} (CUDA {torch.version.cuda}), triton "
        f"{triton.__version__}, {time.strftime('%Y-%m-%d', time.gmtime())}"
    )
    text = report(results, facts, options)
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        rows = [asdict(result) for result in results]
        options.json.write_text(json.dumps({"facts": facts, "results": rows}, indent=2))


if __name__ == "__main__":
    main()
