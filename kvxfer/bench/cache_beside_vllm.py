"""The cache's own work beside vLLM's, for bench_cache.py: the same requests, in turns.

names       a prompt's block names, from its token ids; "vLLM's names": our function that gives
            the same names as theirs
get + free  a pool of 100,000 blocks, all held by requests of 500: one goes, tail first, and
            another takes as many. With caching the blocks are named before they are freed,
            outside of the time
request     find the known prefix, get blocks for the whole prompt, and give them back. With
            caching the prompts are new, their names are ready, and naming the blocks counts
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256 as their_sha256
from vllm.v1 import kv_cache_interface as theirs
from vllm.v1.core.block_pool import BlockPool as TheirPool
from vllm.v1.core.kv_cache_manager import KVCacheManager as TheirManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvxfer.bench.core import Columns, Timing, measure, speed_of, timed_cpu
from kvxfer.cache import (
    BlockPool,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    get_hash_fn_by_name,
    hash_request_tokens,
    none_hash,
    sha256,
)

SIDES = ("kvxfer", "vLLM")
BLOCK_TOKENS = 16
_POOL_BLOCKS = 100_000
REQUEST_BLOCKS = 500
MAX_MODEL_LEN = 8192
_NUM_REQUESTS = 100
PROMPT_TOKENS = 16_384

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Beside:
    """One case: us of one unit, medians of the rounds, and the median of each round's ratio."""

    case: str
    unit: str
    ours_us: float
    theirs_us: float
    ratio: float


COLUMNS: Columns[Beside] = {
    "work": lambda beside: beside.case,
    "unit": lambda beside: beside.unit,
    "kvxfer": lambda beside: f"{beside.ours_us:.2f}",
    "vLLM": lambda beside: f"{beside.theirs_us:.2f}",
    "vLLM / kvxfer": lambda beside: f"{beside.ratio:.2f}",
}
SHOWN = ("work", "kvxfer", "vLLM", "vLLM / kvxfer")


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work twice; ``before`` is done by each side before its own, outside of the time."""

    case: str
    unit: str
    num_units: int
    ours: Work
    theirs: Work
    before: tuple[Work, Work] = (lambda: None, lambda: None)


def beside_vllm(rounds: int) -> list[Beside]:
    init_none_hash(their_sha256)
    pairs = [*_naming(), *(_pools(caching) for caching in (False, True))]
    for caching in (False, True):
        pairs += [_requests(num_tokens, caching) for num_tokens in (16, 128, 512, 4096)]
    runs = {
        f"{pair.case}, {side}": partial(_once, before, work)
        for pair in pairs
        for side, before, work in zip(SIDES, pair.before, (pair.ours, pair.theirs), strict=True)
    }
    taken = measure(runs, rounds)
    return [_result(pair, *(taken[f"{pair.case}, {side}"] for side in SIDES)) for pair in pairs]


def _once(before: Work, work: Work) -> Timing:
    before()
    return timed_cpu(work)


def _result(pair: Pair, ours: list[Timing], theirs: list[Timing]) -> Beside:
    own, others = speed_of(pair.num_units, ours, theirs), speed_of(pair.num_units, theirs)
    us = [speed.ms[1] / pair.num_units * 1e3 for speed in (own, others)]
    return Beside(pair.case, pair.unit, us[0], us[1], own.ratio or 0.0)


def _their_request(number: int, token_ids: list[int], block_hasher: Any = None) -> Request:  # noqa: ANN401
    sampling = SamplingParams(max_tokens=1)
    return Request(f"r{number}", token_ids, sampling, None, block_hasher=block_hasher)


def _naming() -> list[Pair]:
    generator = random.Random(1)
    token_ids = [generator.randrange(152_000) for _ in range(PROMPT_TOKENS)]
    prompt = SimpleNamespace(all_token_ids=token_ids)
    request = _their_request(0, token_ids)
    hasher = get_request_block_hasher(BLOCK_TOKENS, their_sha256)
    same, own_root = get_hash_fn_by_name("sha256"), none_hash(b"0")
    root = same.none_hash(None)
    if hash_request_tokens(same, BLOCK_TOKENS, prompt, root=root) != hasher(request):
        raise SystemExit("get_hash_fn_by_name: expected vLLM's names, got others")
    num_blocks = PROMPT_TOKENS // BLOCK_TOKENS

    their_names = partial(hasher, request)
    own_names, same_names = (
        partial(hash_request_tokens, function, BLOCK_TOKENS, prompt, root=its_root)
        for function, its_root in ((sha256, own_root), (same, root))
    )
    return [
        Pair("names", "block", num_blocks, own_names, their_names),
        Pair("names, vLLM's names", "block", num_blocks, same_names, their_names),
    ]


def _pools(caching: bool) -> Pair:
    ours = BlockPool(_POOL_BLOCKS + 1, caching)
    others = TheirPool(_POOL_BLOCKS + 1, caching, BLOCK_TOKENS)
    num_live, steps = _POOL_BLOCKS // REQUEST_BLOCKS, 20
    own_live = [ours.get_new_blocks(REQUEST_BLOCKS) for _ in range(num_live)]
    their_live = [others.get_new_blocks(REQUEST_BLOCKS) for _ in range(num_live)]
    generator, chosen = random.Random(2), list(range(steps))
    token_ids = [0] * (REQUEST_BLOCKS * BLOCK_TOKENS)

    def fresh_names() -> list[bytes]:
        return [generator.randbytes(32) for _ in range(REQUEST_BLOCKS)]

    def name_ours() -> None:
        for number in chosen if caching else ():
            ours.cache_full_blocks(own_live[number], fresh_names(), 0, REQUEST_BLOCKS)

    def name_theirs() -> None:
        for number in chosen if caching else ():
            names = fresh_names()
            request = _their_request(0, token_ids, lambda _, names=names: names)
            others.cache_full_blocks(
                request, their_live[number], 0, REQUEST_BLOCKS, BLOCK_TOKENS, 0
            )

    def own_steps() -> None:
        for number in chosen:
            ours.free_blocks(reversed(own_live[number]))
            own_live[number] = ours.get_new_blocks(REQUEST_BLOCKS)

    def their_steps() -> None:
        for number in chosen:
            others.free_blocks(reversed(their_live[number]))
            their_live[number] = others.get_new_blocks(REQUEST_BLOCKS)

    case = f"get + free, caching {'on' if caching else 'off'}"
    before = (name_ours, name_theirs)
    return Pair(case, "block", steps * REQUEST_BLOCKS, own_steps, their_steps, before)


def _managers(caching: bool) -> tuple[KVCacheManager, TheirManager]:
    shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 8, "head_size": 64}
    group = KVCacheGroupSpec(["0"], FullAttentionSpec(**shape, dtype="bfloat16"))
    ours = KVCacheManager(
        KVCacheConfig(_POOL_BLOCKS + 1, [], [group]),
        enable_caching=caching,
        max_step_tokens=MAX_MODEL_LEN,
    )
    their_group = theirs.KVCacheGroupSpec(
        ["0"], theirs.FullAttentionSpec(**shape, dtype=torch.bfloat16)
    )
    others = TheirManager(
        theirs.KVCacheConfig(_POOL_BLOCKS + 1, [], [their_group]),
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        max_in_flight_tokens=MAX_MODEL_LEN,
        enable_caching=caching,
    )
    return ours, others


def _requests(num_tokens: int, caching: bool) -> Pair:
    ours, others = _managers(caching)
    generator, token_ids = random.Random(3), [0] * num_tokens
    names = [
        [generator.randbytes(32) for _ in range(num_tokens // BLOCK_TOKENS)]
        for _ in range(_NUM_REQUESTS)
    ]
    ids = [f"r{number}" for number in range(_NUM_REQUESTS)]
    requests = [
        _their_request(number, token_ids, lambda _, names=names[number]: names)
        for number in range(_NUM_REQUESTS)
    ]

    def own_requests() -> None:
        for request_id, hashes in zip(ids, names, strict=True):
            hit = ours.find_longest_cache_hit(hashes, num_tokens - 1)
            ours.admit(request_id, num_tokens=num_tokens, hit=hit)
            ours.grow(request_id, hit.num_tokens, num_tokens)
            ours.cache_blocks(request_id, hashes, num_tokens)
            ours.free(request_id)

    def their_requests() -> None:
        for request in requests:
            blocks, num_hit, _ = others.get_computed_blocks(request)
            others.allocate_slots(request, num_tokens - num_hit, num_hit, blocks)
            others.free(request)

    def forget(pool: Any) -> None:  # noqa: ANN401
        if caching and not pool.reset_prefix_cache():
            raise SystemExit("requests: expected all blocks free between rounds, got some in use")

    case = f"request of {num_tokens} tokens, caching {'on' if caching else 'off'}"
    before = (partial(forget, ours.pool), partial(forget, others))
    return Pair(case, "request", _NUM_REQUESTS, own_requests, their_requests, before)
