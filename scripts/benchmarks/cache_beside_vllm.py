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
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm import SamplingParams
from vllm.utils.hashing import sha256 as their_sha256
from vllm.v1 import kv_cache_interface as theirs
from vllm.v1.core.block_pool import BlockPool as TheirPool
from vllm.v1.core.kv_cache_manager import KVCacheManager as TheirManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

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

BLOCK_TOKENS = 16
POOL_BLOCKS = 100_000
REQUEST_BLOCKS = 500
MAX_MODEL_LEN = 8192
NUM_REQUESTS = 100
PROMPT_TOKENS = 16_384

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Beside:
    """One case: us of one unit, medians of the rounds, and the median of each round's ratio."""

    case: str
    unit: str
    ours_us: float
    theirs_us: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work twice; ``before`` is done before each round, outside of the time."""

    case: str
    unit: str
    num_units: int
    ours: Work
    theirs: Work
    before: Work = lambda: None


def beside_vllm(rounds: int) -> list[Beside]:
    """All cases in turns, theirs first in every second round."""
    init_none_hash(their_sha256)
    pairs = [*_naming(), *(_pools(caching) for caching in (False, True))]
    for caching in (False, True):
        pairs += [_requests(num_tokens, caching) for num_tokens in (16, 128, 512, 4096)]
    times: list[list[tuple[float, float]]] = [[] for _ in pairs]
    for number in range(rounds):
        for pair, samples in zip(pairs, times, strict=True):
            pair.before()
            if number % 2:
                of_theirs = _time_us(pair.theirs, pair.num_units)
                samples.append((_time_us(pair.ours, pair.num_units), of_theirs))
            else:
                of_ours = _time_us(pair.ours, pair.num_units)
                samples.append((of_ours, _time_us(pair.theirs, pair.num_units)))
    return [_result(pair, samples) for pair, samples in zip(pairs, times, strict=True)]


def table(results: list[Beside]) -> str:
    """The results as Markdown."""
    lines = [
        f"Beside vLLM {vllm.__version__} (microseconds):",
        "",
        "| work | unit | kvxfer | vLLM | vLLM / kvxfer |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.case} | {r.unit} | {r.ours_us:.2f} | {r.theirs_us:.2f} | {r.ratio:.2f} |"
        for r in results
    ]
    return "\n".join(lines) + "\n"


def _time_us(work: Work, num_units: int) -> float:
    start = time.thread_time()
    work()
    return (time.thread_time() - start) / num_units * 1e6


def _result(pair: Pair, samples: list[tuple[float, float]]) -> Beside:
    ours, others = zip(*samples, strict=True)
    ratio = statistics.median(other / own for own, other in samples)
    return Beside(pair.case, pair.unit, statistics.median(ours), statistics.median(others), ratio)


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

    def their_names() -> None:
        hasher(request)

    def own_names() -> None:
        hash_request_tokens(sha256, BLOCK_TOKENS, prompt, root=own_root)

    def same_names() -> None:
        hash_request_tokens(same, BLOCK_TOKENS, prompt, root=root)

    return [
        Pair("names", "block", num_blocks, own_names, their_names),
        Pair("names, vLLM's names", "block", num_blocks, same_names, their_names),
    ]


def _pools(caching: bool) -> Pair:
    ours = BlockPool(POOL_BLOCKS + 1, caching)
    others = TheirPool(POOL_BLOCKS + 1, caching, BLOCK_TOKENS)
    num_live, steps = POOL_BLOCKS // REQUEST_BLOCKS, 20
    own_live = [ours.get_new_blocks(REQUEST_BLOCKS) for _ in range(num_live)]
    their_live = [others.get_new_blocks(REQUEST_BLOCKS) for _ in range(num_live)]
    generator, chosen = random.Random(2), list(range(steps))
    token_ids = [0] * (REQUEST_BLOCKS * BLOCK_TOKENS)

    def name_and_choose() -> None:
        for number in chosen if caching else ():
            names = [generator.randbytes(32) for _ in range(REQUEST_BLOCKS)]
            ours.cache_full_blocks(own_live[number], names, 0, REQUEST_BLOCKS)
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
    return Pair(case, "block", steps * REQUEST_BLOCKS, own_steps, their_steps, name_and_choose)


def _managers(caching: bool) -> tuple[KVCacheManager, TheirManager]:
    shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 8, "head_size": 64}
    group = KVCacheGroupSpec(["0"], FullAttentionSpec(**shape, dtype="bfloat16"))
    ours = KVCacheManager(
        KVCacheConfig(POOL_BLOCKS + 1, [], [group]),
        enable_caching=caching,
        max_step_tokens=MAX_MODEL_LEN,
    )
    their_group = theirs.KVCacheGroupSpec(
        ["0"], theirs.FullAttentionSpec(**shape, dtype=torch.bfloat16)
    )
    others = TheirManager(
        theirs.KVCacheConfig(POOL_BLOCKS + 1, [], [their_group]),
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
        for _ in range(NUM_REQUESTS)
    ]
    ids = [f"r{number}" for number in range(NUM_REQUESTS)]
    requests = [
        _their_request(number, token_ids, lambda _, names=names[number]: names)
        for number in range(NUM_REQUESTS)
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

    def forget() -> None:
        if not (ours.pool.reset_prefix_cache() and others.reset_prefix_cache()):
            raise SystemExit("requests: expected all blocks free between rounds, got some in use")

    case = f"request of {num_tokens} tokens, caching {'on' if caching else 'off'}"
    before: Work = forget if caching else lambda: None
    return Pair(case, "request", NUM_REQUESTS, own_requests, their_requests, before)
