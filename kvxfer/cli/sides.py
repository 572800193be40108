"""From options to engines: their configurations, and pools that fit the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.cache.kv_cache_manager import KVCacheManager
from kvxfer.cli.options import EngineOptions, RunOptions, SideOptions, naming_options
from kvxfer.cli.prompts import Prompt, built_in_prompts, load_prompts, load_trace, text_encoder
from kvxfer.config import Config, load_config
from kvxfer.engine.config import CPU, EngineConfig, Role
from kvxfer.engine.kv_plan import plan_kv_caches
from kvxfer.engine.model_config import ModelConfig, load_model_config, shard_for

_KEPT_NBYTES = 512 << 20
"""How much KV a rank's pool may hold beyond what is in flight, so that prefixes stay cached."""
SERVER_SEQS = 64
"""Requests at once, of an engine that does not know its work; more where the run has more."""
_SIZING_BLOCKS = 1024
"""Of a cache that is asked for sizes only: a block for each of more groups than a model has."""


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of a run, and how many of them run at once."""

    prompts: tuple[Prompt, ...]
    in_flight: int

    def max_tokens(self) -> int:
        return max(map(_num_tokens, self.prompts))

    def num_blocks(self, sizing: KVCacheManager, kept_blocks: int) -> int:
        """A pool in which the longest requests in flight fit together, and cached prefixes of up to
        ``kept_blocks``. ``sizing``: an empty cache of the same groups.
        """
        sizes = sorted((_most_blocks(sizing, prompt) for prompt in self.prompts), reverse=True)
        needed = sum(sizes[: self.in_flight])
        whole = sum(
            group.blocks_needed(_num_tokens(prompt))
            for group in sizing.groups
            for prompt in self.prompts
        )
        return 1 + max(needed, min(whole, kept_blocks))  # block 0 is never used


def _num_tokens(prompt: Prompt) -> int:
    return len(prompt.token_ids) + prompt.max_new_tokens


def _most_blocks(sizing: KVCacheManager, prompt: Prompt) -> int:
    """An offer keeps the window of its last prompt token until it was read."""
    return sizing.blocks_needed(_num_tokens(prompt), len(prompt.token_ids) - 1)


def read_model(options: EngineOptions, sides: Sequence[SideOptions]) -> ModelConfig:
    """Checked against every side's TP size before any process starts. Raises ModelError."""
    with naming_options():
        model = load_model_config(
            options.model, num_kv_heads=options.kv_heads, dtype=options.dtype.value
        )
    for side in sides:
        with naming_options(side.option_names):
            shard_for(model, 0, side.tp_size)
    return model


def read_work(options: RunOptions, model: ModelConfig) -> Work:
    """The requests to send. Raises ConfigError naming file and line."""
    if options.trace is not None:
        prompts = load_trace(
            options.trace,
            scale=options.trace_scale,
            time_scale=options.time_scale,
            limit=options.limit,
            vocab_size=model.vocab_size,
            max_new_tokens=options.max_new_tokens,
        )
    elif options.prompts is not None:
        prompts = load_prompts(
            options.prompts,
            encode=text_encoder(options.model),
            vocab_size=model.vocab_size,
            max_new_tokens=options.max_new_tokens,
        )
    else:
        prompts = built_in_prompts(model.vocab_size, options.max_new_tokens)
    return Work(tuple(prompts[: options.limit]), options.in_flight)


def settings(
    options: EngineOptions,
    *,
    given: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """First options and ``given``, then the environment, ``defaults``, the product's."""
    said = {"transport": options.transport, "log_level": options.log_level}
    with naming_options():
        loaded = load_config({**said, **(given or {})})
    usual = {n: value for n, value in (defaults or {}).items() if loaded.origins[n] == "default"}
    return msgspec.structs.replace(loaded.config, **usual)


def transfer_engine(
    role: Role, side: SideOptions, options: EngineOptions, model: ModelConfig, kv: Config
) -> EngineConfig:
    with naming_options(side.option_names):
        return EngineConfig(
            role=role,
            engine_id=role.value,
            model=options.model,
            num_kv_heads=options.kv_heads,
            dtype=model.dtype,
            tp_size=side.tp_size,
            block_size=side.block_size,
            layout=side.layout.value,
            max_num_batched_tokens=options.step_tokens,
            enable_prefix_caching=side.prefix_caching,
            device=side.device,
            devices=side.devices,
            kv=kv.for_engine(gives_kv=role is not Role.DECODE, num_ranks=side.tp_size),
        )


def fitted(
    engine: EngineConfig, side: SideOptions, options: RunOptions, model: ModelConfig, work: Work
) -> EngineConfig:
    with naming_options(side.option_names):
        num_blocks = pool_blocks(side, model, work, engine.max_num_batched_tokens)
    return msgspec.structs.replace(
        engine,
        num_blocks=num_blocks,
        max_model_len=work.max_tokens(),
        max_num_seqs=max(SERVER_SEQS, work.in_flight),
        digests=options.verify,
        on_load_failure=options.on_load_failure,
    )


def single_engine(
    options: EngineOptions, model: ModelConfig, work: Work, *, device: str = CPU
) -> EngineConfig:
    """The engine that the others are compared with: one rank, no prefix cache, no transfer.

    ``device``: "cpu" or "cuda:N", of the kind that the others are on: elsewhere sums are formed in
    another order.
    """
    config = EngineConfig(
        role=Role.ALONE,
        engine_id="single",
        model=options.model,
        num_kv_heads=options.kv_heads,
        dtype=model.dtype,
        max_model_len=work.max_tokens(),
        max_num_batched_tokens=options.step_tokens,
        enable_prefix_caching=False,
        device=device,
        kv=Config(log_level="WARNING"),
    )
    one_at_a_time = Work(work.prompts, 1)
    num_blocks = one_at_a_time.num_blocks(_sizing(config, model)[0], 0)
    return msgspec.structs.replace(config, num_blocks=num_blocks)


def pool_blocks(side: SideOptions, model: ModelConfig, work: Work, step_tokens: int = 2048) -> int:
    if side.num_blocks is not None:
        return side.num_blocks
    config = EngineConfig(
        role=Role.BOTH,
        engine_id="sizing",
        tp_size=side.tp_size,
        block_size=side.block_size,
        max_num_batched_tokens=step_tokens,
    )
    sizing, block_nbytes = _sizing(config, model)
    return work.num_blocks(sizing, _KEPT_NBYTES // block_nbytes)


def _sizing(config: EngineConfig, model: ModelConfig) -> tuple[KVCacheManager, int]:
    """An empty cache with the engine's groups, to size requests, and a block's bytes on a rank."""
    plan = plan_kv_caches(msgspec.structs.replace(config, num_blocks=_SIZING_BLOCKS), model)[0]
    manager = KVCacheManager(
        plan, enable_caching=False, max_step_tokens=config.max_num_batched_tokens
    )
    return manager, sum(tensor.size for tensor in plan.kv_cache_tensors) // plan.num_blocks


def model_name(options: EngineOptions) -> str:
    return "built-in" if options.model is None else Path(options.model).name
