"""From options to engines: their configurations, and pools that fit the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.cli.options import ModelOptions, SideOptions, WorkOptions
from kvxfer.cli.prompts import Prompt, built_in_prompts, load_prompts, text_encoder
from kvxfer.cli.trace import load_trace
from kvxfer.config import Config, load_config
from kvxfer.engine.config import EngineConfig, OnLoadFailure, Role
from kvxfer.engine.model_config import ModelConfig, load_model_config, shard_for

KEPT_NBYTES = 512 << 20
"""How much KV a rank's pool may hold beyond what is in flight, so that prefixes stay cached."""
DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of a run, and how many of them run at once."""

    prompts: tuple[Prompt, ...]
    in_flight: int

    def max_tokens(self) -> int:
        """Tokens of the longest request, new ones included."""
        return max(len(prompt.token_ids) + prompt.max_new_tokens for prompt in self.prompts)

    def num_blocks(self, block_size: int, kept_blocks: int) -> int:
        """A pool in which the longest requests in flight fit together, and cached prefixes of up to
        ``kept_blocks``.
        """
        sizes = sorted(
            (
                -(-(len(prompt.token_ids) + prompt.max_new_tokens) // block_size)
                for prompt in self.prompts
            ),
            reverse=True,
        )
        needed = sum(sizes[: self.in_flight])
        return 1 + max(needed, min(sum(sizes), kept_blocks))  # block 0 is never used


def read_model(options: ModelOptions, tp_sizes: Sequence[int]) -> ModelConfig:
    """The model, checked against every TP size of the run before any process starts.

    Raises ModelError for missing files, and for head counts that a TP size does not fit.
    """
    model = load_model_config(
        options.model, num_kv_heads=options.num_kv_heads, dtype=options.dtype.value
    )
    for tp_size in tp_sizes:
        shard_for(model, 0, tp_size)
    return model


def read_work(options: WorkOptions, model: ModelConfig, model_path: str | None) -> Work:
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
            encode=text_encoder(model_path),
            vocab_size=model.vocab_size,
            max_new_tokens=options.max_new_tokens,
        )
    else:
        prompts = built_in_prompts(model.vocab_size, options.max_new_tokens)
    return Work(tuple(prompts[: options.limit]), options.in_flight)


def settings(*, defaults: dict[str, Any], given: dict[str, Any]) -> Config:
    """The settings of one engine: ``given`` options first (None: not given), then the environment,
    then the command's ``defaults``, then the product's.
    """
    loaded = load_config(given)
    chosen = {name: value for name, value in defaults.items() if loaded.origins[name] == "default"}
    return msgspec.structs.replace(loaded.config, **chosen)


def transfer_engine(
    role: Role,
    side: SideOptions,
    options: ModelOptions,
    model: ModelConfig,
    *,
    kv: Config,
    num_blocks: int,
    max_model_len: int,
    max_num_seqs: int,
    digests: bool,
    on_load_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE,
) -> EngineConfig:
    """A prefill or decode engine."""
    return EngineConfig(
        role=role,
        engine_id=role.value,
        model=options.model,
        num_kv_heads=options.num_kv_heads,
        dtype=model.dtype,
        tp_size=side.tp_size,
        block_size=side.block_size,
        layout=side.layout.value,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=side.prefix_caching,
        on_load_failure=on_load_failure,
        digests=digests,
        kv=kv,
    )


def single_engine(options: ModelOptions, model: ModelConfig, work: Work) -> EngineConfig:
    """The engine that the others are compared with: one rank, no prefix cache, no transfer."""
    block_size = 16
    one_at_a_time = Work(work.prompts, 1)
    return EngineConfig(
        role=Role.ALONE,
        engine_id="single",
        model=options.model,
        num_kv_heads=options.num_kv_heads,
        dtype=model.dtype,
        block_size=block_size,
        num_blocks=one_at_a_time.num_blocks(block_size, 0),
        max_model_len=work.max_tokens(),
        enable_prefix_caching=False,
    )


def pool_blocks(side: SideOptions, model: ModelConfig, work: Work) -> int:
    """What ``--num-blocks`` says, or what the work needs."""
    if side.num_blocks is not None:
        return side.num_blocks
    heads = max(1, model.num_kv_heads // side.tp_size)
    block_nbytes = (
        2 * model.num_layers * heads * model.head_size * DTYPE_NBYTES[model.dtype] * side.block_size
    )
    return work.num_blocks(side.block_size, KEPT_NBYTES // block_nbytes)


def model_name(options: ModelOptions) -> str:
    """For people."""
    return "built-in" if options.model is None else Path(options.model).name
