"""The cache's own work: naming the blocks of a prompt, and giving blocks out and back.

Hashing: a random prompt as a Python list of token ids, blocks of 16, conversion included, beside a
loop over hashlib.sha256 with ready-made 64-byte pieces.

    loop        hashlib.sha256(piece).digest() for every piece: no chain, no conversion
    plain       hash_request_tokens
    with salt   hash_request_tokens of a request whose first block has an extra key

Pool: every block belongs to one of the live requests of 500 blocks. A random one is freed, tail
first, and takes 500 new blocks, so a full pool gives out what was just freed. get and free together
count once per block.

    caching off
    caching on  every block gets a fresh name after it was given out, and loses it when it is given
                out again; "name" is the time of that (cache_full_blocks, which also takes the old
                name out of the table), "all" is get + name + free
    bare dict   "name" is the time to take 500 old names out of a dict of all names and to put 500
                fresh ones in, in C, and nothing else: what the memory behind a table costs

Contenders are interleaved round by round; the ratio is the median of each round's ratio to the loop
of that round. Times are the thread's own on its processor, so other work of the machine is not in
them, except by the caches and the memory that it shares.

With vLLM installed (``.venv-vllm/bin/python scripts/bench_cache.py``) the same work is timed beside
vLLM's own, in turns: scripts/benchmarks/cache_beside_vllm.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import ssl
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from kvxfer.cache import BlockPool, KVCacheBlock
from kvxfer.cache.hashing import hash_request_tokens, none_hash, sha256

BLOCK_TOKENS = 16
PIECE_NBYTES = 4 * BLOCK_TOKENS
REQUEST_BLOCKS = 500
ROOT = none_hash(b"0")
RATIO_GOAL = 0.6
POOL_GOALS = {"caching off": 8.0, "caching on": 5.0}  # M blocks/s of get + free
GOAL_POOL_BLOCKS = 100_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as hashing reads it."""

    all_token_ids: list[int]
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class HashResult:
    """One way to hash the prompt; ``ratio`` to the loop."""

    case: str
    p20_mtokens_s: float
    p50_mtokens_s: float
    p80_mtokens_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class PoolResult:
    """One pool; ns a block and M blocks/s, medians over the rounds; 0 where nothing is measured."""

    num_blocks: int
    case: str
    free_ns: float
    get_ns: float
    name_ns: float
    get_free_mblocks_s: float
    all_mblocks_s: float


def fresh_names(generator: random.Random) -> list[bytes]:
    """For one request."""
    return [generator.randbytes(32) for _ in range(REQUEST_BLOCKS)]


class Load:
    """A full pool, and the requests that hold it."""

    def __init__(self, num_blocks: int, *, caching: bool, seed: int) -> None:
        self.num_blocks, self.caching = num_blocks, caching
        self.case = "caching on" if caching else "caching off"
        self.random = random.Random(seed)
        self.pool = BlockPool(num_blocks + 1, caching)  # and the null block
        self.live = [
            self.pool.get_new_blocks(REQUEST_BLOCKS) for _ in range(num_blocks // REQUEST_BLOCKS)
        ]
        for blocks in self.live:
            self.pool.cache_full_blocks(blocks, fresh_names(self.random), 0, REQUEST_BLOCKS)

    def step(self) -> tuple[int, int, int]:
        """One request goes, one comes; ns of free, get and name."""
        number = self.random.randrange(len(self.live))
        names = fresh_names(self.random) if self.caching else []
        old, clock = self.live[number], time.thread_time_ns
        start = clock()
        self.pool.free_blocks(reversed(old))
        freed = clock()
        self.live[number] = new = self.pool.get_new_blocks(REQUEST_BLOCKS)
        got = clock()
        if not self.caching:
            return freed - start, got - freed, 0
        self.pool.cache_full_blocks(new, names, 0, REQUEST_BLOCKS)
        return freed - start, got - freed, clock() - got

    def check(self) -> None:
        """One step by hand; no time is taken of a pool that goes wrong."""
        old = self.live[0]
        hashes = [block.block_hash for block in old]
        self.pool.free_blocks(reversed(old))
        self.live[0] = new = self.pool.get_new_blocks(REQUEST_BLOCKS)
        right = new == old[::-1] and all(block.ref_cnt == 1 for block in new)
        for block_hash in hashes:
            right &= self.caching == (block_hash is not None)
            right &= block_hash is None or self.pool.get_cached_block(block_hash) is None
        names = fresh_names(self.random)
        self.pool.cache_full_blocks(new, names, 0, REQUEST_BLOCKS)
        found = [self.pool.get_cached_block(block_hash) for block_hash in names]
        want: Sequence[KVCacheBlock | None] = new if self.caching else [None] * REQUEST_BLOCKS
        if not right or found != want:
            raise SystemExit(f"pool of {self.num_blocks}: wrong blocks")


class BareDict:
    """The names of a pool without the pool."""

    case = "bare dict"

    def __init__(self, num_blocks: int, *, seed: int) -> None:
        self.num_blocks = num_blocks
        self.random = random.Random(seed)
        self.live = [fresh_names(self.random) for _ in range(num_blocks // REQUEST_BLOCKS)]
        self.table: dict[bytes, object] = {name: self for names in self.live for name in names}
        self.values = [self] * REQUEST_BLOCKS

    def step(self) -> tuple[int, int, int]:
        """Old names out, new names in; ns of that in the place of name."""
        number = self.random.randrange(len(self.live))
        old, self.live[number] = self.live[number], fresh_names(self.random)
        start = time.thread_time_ns()
        list(map(self.table.pop, old))
        self.table.update(zip(self.live[number], self.values, strict=True))
        return 0, 0, time.thread_time_ns() - start


def median_ratio(values: list[float], base: list[float]) -> float:
    """The median of each round's ratio."""
    return statistics.median(value / of for value, of in zip(values, base, strict=True))


def bench_hashing(num_tokens: int, rounds: int) -> list[HashResult]:
    """All ways, interleaved; the names are checked first, block by block."""
    generator = random.Random(1)
    token_ids = [generator.randrange(152_000) for _ in range(num_tokens)]
    packed = struct.pack(f"<{num_tokens}I", *token_ids)
    pieces = [packed[at : at + PIECE_NBYTES] for at in range(0, len(packed), PIECE_NBYTES)]
    parent, want = ROOT, []
    for piece in pieces:
        parent = hashlib.sha256(parent + piece).digest()
        want.append(parent)
    plain, salted = Prompt(token_ids), Prompt(token_ids, "salt")
    if hash_request_tokens(sha256, BLOCK_TOKENS, plain, root=ROOT) != want:
        raise SystemExit("hash_request_tokens: wrong names")

    def loop() -> list[bytes]:
        make = hashlib.sha256
        return [make(piece).digest() for piece in pieces]

    cases: dict[str, Callable[[], list[bytes]]] = {
        "loop": loop,
        "plain": lambda: hash_request_tokens(sha256, BLOCK_TOKENS, plain, root=ROOT),
        "with salt": lambda: hash_request_tokens(sha256, BLOCK_TOKENS, salted, root=ROOT),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            start = time.thread_time()
            run()
            rates[name].append(num_tokens / (time.thread_time() - start) / 1e6)
    results = []
    for name, values in rates.items():
        p20, p50, p80 = (statistics.quantiles(values, n=10)[at] for at in (1, 4, 7))
        results.append(HashResult(name, p20, p50, p80, median_ratio(values, rates["loop"])))
    return results


def bench_pools(sizes: list[int], rounds: int, steps: int) -> list[PoolResult]:
    """All pools, interleaved."""
    loads: list[Load | BareDict] = []
    for number, size in enumerate(sizes):
        for caching in (False, True):
            pool = Load(size, caching=caching, seed=number)
            pool.check()
            loads.append(pool)
        loads.append(BareDict(size, seed=number))
    times: list[list[tuple[float, ...]]] = [[] for _ in loads]
    num_blocks = steps * REQUEST_BLOCKS
    for _ in range(rounds):
        for load, samples in zip(loads, times, strict=True):
            columns = zip(*(load.step() for _ in range(steps)), strict=True)
            samples.append(tuple(sum(column) / num_blocks for column in columns))
    return [pool_result(load, samples) for load, samples in zip(loads, times, strict=True)]


def pool_result(load: Load | BareDict, samples: list[tuple[float, ...]]) -> PoolResult:
    """Medians of the rounds' (free, get, name) in ns a block."""
    median = statistics.median
    free_ns, get_ns, name_ns = (median(column) for column in zip(*samples, strict=True))
    get_free_ns = median(free + get for free, get, _ in samples)
    return PoolResult(
        num_blocks=load.num_blocks,
        case=load.case,
        free_ns=free_ns,
        get_ns=get_ns,
        name_ns=name_ns,
        get_free_mblocks_s=1e3 / get_free_ns if get_free_ns else 0.0,
        all_mblocks_s=1e3 / median(sum(sample) for sample in samples) if get_free_ns else 0.0,
    )


def bench_beside_vllm(rounds: int) -> tuple[list[dict[str, object]], str]:
    """The results beside vLLM, and as Markdown; nothing where it is not installed."""
    if find_spec("vllm") is None:
        return [], ""
    from scripts.benchmarks.cache_beside_vllm import beside_vllm, table

    results = beside_vllm(rounds)
    return [asdict(result) for result in results], "\n" + table(results)


def goal(reached: float, wanted: float) -> str:
    """For the last column."""
    return f"{wanted:g} {'met' if reached >= wanted else 'missed'}"


def tables(hashing: list[HashResult], pools: list[PoolResult], num_tokens: int) -> str:
    """Both results as Markdown."""
    lines = [
        f"Hashing, {num_tokens} tokens:",
        "",
        "| case | p20 | p50 | p80 M tokens/s | ratio to loop | goal |",
        "|---|---|---|---|---|---|",
    ]
    for h in hashing:
        wanted = goal(h.ratio, RATIO_GOAL) if h.case == "plain" else ""
        lines.append(
            f"| {h.case} | {h.p20_mtokens_s:.1f} | {h.p50_mtokens_s:.1f} | {h.p80_mtokens_s:.1f} "
            f"| {h.ratio:.2f} | {wanted} |"
        )
    lines += [
        "",
        f"Pool, requests of {REQUEST_BLOCKS} blocks (ns a block, M blocks/s):",
        "",
        "| blocks | case | free ns | get ns | name ns | get + free M/s | goal | all M/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for p in pools:
        has_goal = p.num_blocks == GOAL_POOL_BLOCKS and p.case in POOL_GOALS
        wanted = goal(p.get_free_mblocks_s, POOL_GOALS[p.case]) if has_goal else ""
        numbers = (p.free_ns, p.get_ns, p.name_ns)
        free, get, name = (f"{number:.0f}" if number else "" for number in numbers)
        rate, all_rate = (
            f"{number:.1f}" if number else "" for number in (p.get_free_mblocks_s, p.all_mblocks_s)
        )
        lines.append(
            f"| {p.num_blocks:,} | {p.case} | {free} | {get} | {name} | {rate} | {wanted} "
            f"| {all_rate} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse, check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131_072, help="of the prompt")
    parser.add_argument(
        "--pools", type=int, nargs="+", default=[1_000, 100_000, 1_000_000], help="blocks"
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=40, help="requests a round of each pool")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    options = parser.parse_args()
    if options.tokens < BLOCK_TOKENS or options.tokens % BLOCK_TOKENS:
        parser.error(f"--tokens: expected a multiple of {BLOCK_TOKENS}, got {options.tokens}")
    if options.rounds < 2 or options.steps < 1:
        parser.error("--rounds, --steps: expected at least 2 and 1")
    for size in options.pools:
        if size < REQUEST_BLOCKS or size % REQUEST_BLOCKS:
            parser.error(f"--pools: expected multiples of {REQUEST_BLOCKS}, got {size}")
    hashing = bench_hashing(options.tokens, options.rounds)
    pools = bench_pools(options.pools, options.rounds, options.steps)
    beside, beside_text = bench_beside_vllm(options.rounds)
    print(
        f"{platform.machine()}, Python {platform.python_version()}, {ssl.OPENSSL_VERSION}; "
        f"{options.rounds} rounds\n"
    )
    text = tables(hashing, pools, options.tokens) + beside_text
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        both = {
            "hashing": [asdict(result) for result in hashing],
            "pools": [asdict(result) for result in pools],
            "beside vLLM": beside,
        }
        options.json.write_text(json.dumps(both, indent=2))


if __name__ == "__main__":
    main()
