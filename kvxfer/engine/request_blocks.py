"""The scheduler's blocks: what a request finds by prefix, what it gets, and under which names
others find it.

Nothing that was admitted is ever preempted: everything it can come to need is promised at admission
and taken step by step. Blocks get names only when their KV is computed, or was loaded and accepted
by every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.cache.hashing import (
    HashFunction,
    get_hash_fn_by_name,
    hash_request_tokens,
    none_hash,
    sha256,
)
from kvxfer.cache.kv_cache_manager import CacheHit, KVCacheManager
from kvxfer.cache.kv_events import KVCacheEvent, KVEventLog
from kvxfer.cache.metrics import PrefixCacheStats, PrefixCachingMetrics
from kvxfer.cache.specs import KVCacheConfig, MambaSpec
from kvxfer.connector.params import OfferWanted, parse_params
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.request import Request
from kvxfer.engine.steps import GroupIds
from kvxfer.errors import OutOfBlocks


class RequestBlocks:
    """Blocks of all requests of one engine, in all groups of ``kv_cache_config``."""

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        self._manager = KVCacheManager(
            kv_cache_config,
            enable_caching=config.enable_prefix_caching,
            max_step_tokens=config.max_num_batched_tokens,
            events=KVEventLog() if config.enable_kv_cache_events else None,
        )
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.keeps_states = any(isinstance(spec, MambaSpec) for spec in specs)
        self._prefix_metrics = PrefixCachingMetrics()
        self._hash_function: HashFunction = sha256
        self._hash_root = none_hash(config.kv.hash_seed_bytes)
        if config.prefix_caching_hash_algo is not None:
            self._hash_function = function = get_hash_fn_by_name(config.prefix_caching_hash_algo)
            self._hash_root = function.none_hash(config.kv.hash_seed)

    @property
    def num_free_blocks(self) -> int:
        return self._manager.num_free_blocks

    @property
    def prefix_hit_rate(self) -> float:
        return self._prefix_metrics.hit_rate

    def add(self, request: Request) -> None:
        """Name the prompt's blocks. Raises OutOfBlocks when the request can never fit."""
        num_tokens = request.num_prompt_tokens + request.max_new_tokens
        num_needed = self._manager.blocks_needed(num_tokens, self._num_held_tokens(request))
        num_total = self._manager.num_usable_blocks
        if num_needed > num_total or num_tokens > self._config.max_model_len:
            raise OutOfBlocks(
                f"request {request.request_id}: {num_tokens} tokens need {num_needed} blocks of "
                f"{self._config.block_size}, the cache has {num_total} and requests may have "
                f"{self._config.max_model_len} tokens; raise num_blocks or max_model_len"
            )
        self._name_full_blocks(request)

    def find_hit(self, request: Request, max_tokens: int) -> CacheHit:
        return self._manager.find_longest_cache_hit(request.block_hashes, max_tokens)

    def admit(self, request: Request, hit: CacheHit, num_external_tokens: int) -> bool:
        """False, and nothing changed, when all that it can need does not fit now."""
        # The prompt is computed in steps as large as the engine's, then one token at a time.
        num_left = request.num_prompt_tokens - hit.num_tokens - num_external_tokens
        is_admitted = self._manager.admit(
            request.request_id,
            num_tokens=request.num_prompt_tokens + request.max_new_tokens,
            hit=hit,
            num_external_tokens=num_external_tokens,
            num_held_tokens=self._num_held_tokens(request),
            max_step_tokens=max(num_left, 1),
        )
        # A request whose load failed comes a second time, and was counted.
        if is_admitted and request.failure is None and self._config.enable_prefix_caching:
            self._prefix_metrics.observe(
                PrefixCacheStats(requests=1, queries=request.num_prompt_tokens, hits=hit.num_tokens)
            )
        return is_admitted

    def grow(self, request: Request, num_new_tokens: int) -> GroupIds:
        """Blocks for a step of the next ``num_new_tokens`` tokens; the new ids, by group."""
        num_computed = request.num_computed_tokens
        return self._manager.grow(request.request_id, num_computed, num_computed + num_new_tokens)

    def table(self, request: Request) -> GroupIds:
        """The request's blocks by group and position, -1 where it has none."""
        if request.request_id not in self._manager:
            return ()
        return self._manager.block_ids(request.request_id)

    def computed(self, request: Request) -> None:
        """The KV of the request's computed tokens is complete: others may find it."""
        if not self._config.enable_prefix_caching:
            return
        # Only when a block has become full: asked for every token, the prompt would be copied for
        # each.
        num_hashed = (len(request.block_hashes) + 1) * self._manager.hash_block_size
        if num_hashed <= request.num_computed_tokens:
            self._name_full_blocks(request)
        self._manager.cache_blocks(
            request.request_id, request.block_hashes, request.num_computed_tokens, request
        )

    def take_events(self) -> list[KVCacheEvent]:
        return self._manager.take_events()

    def loaded(self, request: Request, incomplete: Iterable[tuple[int, int]]) -> None:
        """Every rank has accepted the request's load, which is counted as computed by now.

        ``incomplete``: (group, position) of blocks whose first tokens the source did not hold any
        more. No token of this request looks at them, but one of another request could.
        """
        for group, position in incomplete:
            self._manager.leave_unhashed(request.request_id, group, (position,))
        self.computed(request)

    def keep(self, request: Request) -> None:
        """The request has ended: what may still be read or written stays until :meth:`free`."""
        self._manager.stop_growing(request.request_id, request.num_computed_tokens)

    def free(self, request_id: str) -> None:
        if request_id in self._manager:
            self._manager.free(request_id)

    def is_offered(self, request: Request) -> bool:
        return self._config.role in {Role.PREFILL, Role.BOTH} and isinstance(
            parse_params(request.kv_transfer_params), OfferWanted
        )

    def cut_step(self, num_computed_tokens: int, num_new_tokens: int) -> int:
        """A step of so many tokens, or a shorter one that ends with a block where states are cached
        at the ends of blocks.
        """
        end = num_computed_tokens + num_new_tokens
        if self.keeps_states and self._config.enable_prefix_caching:
            last = end - end % self._manager.alignment_tokens
            end = last if last > num_computed_tokens else end
        return end - num_computed_tokens

    def _num_held_tokens(self, request: Request) -> int | None:
        """A sink computes the last prompt token itself: what it looks at must stay."""
        return request.num_prompt_tokens - 1 if self.is_offered(request) else None

    def _name_full_blocks(self, request: Request) -> None:
        if self._config.enable_prefix_caching:
            request.block_hashes += hash_request_tokens(
                self._hash_function,
                self._manager.hash_block_size,
                request,
                root=self._hash_root,
                known=request.block_hashes,
            )
