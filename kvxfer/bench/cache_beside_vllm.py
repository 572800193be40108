"""vLLM's part of the benchmark ``cache``: the same works by its own code."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256 as their_sha256
from vllm.v1 import kv_cache_interface as theirs
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvxfer.bench.cache import (
    BLOCK_TOKENS,
    MAX_MODEL_LEN,
    OURS,
    POOL_BLOCKS,
    REQUEST_BLOCKS,
    SHAPE,
    fresh_names,
    prompt_of,
    some_of,
)
from kvxfer.bench.core import Work
from kvxfer.cache import get_hash_fn_by_name, hash_request_tokens

init_none_hash(their_sha256)


def _request(number: int, token_ids: list[int], names: Sequence[bytes] = ()) -> Request:
    """``names``: of its blocks, which are ready."""
    sampling = SamplingParams(max_tokens=1)
    hasher = (lambda _: list(names)) if names else None
    return Request(f"r{number}", token_ids, sampling, None, block_hasher=hasher)


def names(token_ids: list[int]) -> dict[str, Work]:
    """By vLLM, and the same ones by our function that gives vLLM's."""
    request = _request(0, token_ids)
    hasher = get_request_block_hasher(BLOCK_TOKENS, their_sha256)
    same = get_hash_fn_by_name("sha256")
    ours = partial(
        hash_request_tokens, same, BLOCK_TOKENS, prompt_of(token_ids), root=same.none_hash(None)
    )
    if ours() != hasher(request):
        raise SystemExit("get_hash_fn_by_name: expected vLLM's names, got others")
    return {f"{OURS}, vLLM's names": ours, "vLLM": partial(hasher, request)}


class TheirFullPool:
    """As :class:`kvxfer.bench.cache.FullPool`."""

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self._caching = caching
        self._pool = BlockPool(num_blocks + 1, caching, BLOCK_TOKENS)
        self._live = [
            self._pool.get_new_blocks(REQUEST_BLOCKS) for _ in range(num_blocks // REQUEST_BLOCKS)
        ]
        self._random = random.Random(num_blocks)
        self._token_ids = [0] * (REQUEST_BLOCKS * BLOCK_TOKENS)
        self._chosen: list[int] = []

    def prepare(self) -> None:
        """Choose the requests of the next round, and name their blocks."""
        self._chosen = some_of(self._random, len(self._live))
        for number in self._chosen if self._caching else ():
            request = _request(0, self._token_ids, fresh_names(self._random))
            self._pool.cache_full_blocks(
                request, self._live[number], 0, REQUEST_BLOCKS, BLOCK_TOKENS, 0
            )

    def get_and_free(self) -> None:
        for number in self._chosen:
            self._pool.free_blocks(reversed(self._live[number]))
            self._live[number] = self._pool.get_new_blocks(REQUEST_BLOCKS)


def their_requests(
    num_tokens: int, names: Sequence[Sequence[bytes]], *, caching: bool
) -> tuple[Work, Any]:
    """What serves a request for each of these names, and the pool of it."""
    group = theirs.KVCacheGroupSpec(["0"], theirs.FullAttentionSpec(**SHAPE, dtype=torch.bfloat16))
    manager = KVCacheManager(
        theirs.KVCacheConfig(POOL_BLOCKS + 1, [], [group]),
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        max_in_flight_tokens=MAX_MODEL_LEN,
        enable_caching=caching,
    )
    requests = [_request(n, [0] * num_tokens, hashes) for n, hashes in enumerate(names)]

    def serve() -> None:
        for request in requests:
            blocks, num_hit, _ = manager.get_computed_blocks(request)
            manager.allocate_slots(request, num_tokens - num_hit, num_hit, blocks)
            manager.free(request)

    return serve, manager.block_pool
