"""What scripts/vllm_load runs: loads, their requests, contenders and models. All of it is pure."""

from __future__ import annotations

import argparse
import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np

SIDES = ("prefill", "decode")
KINDS = ("nixl", "kvxfer", "early", "plain", "floor")
"""early: kvxfer, on the same engines; decode hears of a request together with prefill. plain: two
engines without a connector, each serves every other request whole. floor: the same two; decode has
each prompt's KV in its own prefix cache, so that a hand-over moves nothing."""
_PAIRS = re.compile(r",(?=[\w.]+=)")  # a comma inside a JSON value is not followed by name=
_FIRST_TOKEN_ID = 3
Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


# ------------------------------------------------------------------ loads


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from ``least`` to ``most``, all equally likely."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Span:
        """Of ``64`` or ``64-128``. Raises ValueError."""
        first, _, last = text.partition("-")
        span = cls(int(first), int(last or first))
        if not 1 <= span.least <= span.most:
            raise ValueError(f"expected numbers like 64 or 64-128, got {text}")
        return span

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least}-{self.most}"


_FIELDS = {
    **{"arrival_ms": "timestamp", "prompt_tokens": "input_length"},
    "output_tokens": "output_length",
}


class TraceLine(msgspec.Struct, frozen=True, rename=_FIELDS):
    """One request of a trace; what is None is drawn from the load's rate and spans."""

    arrival_ms: NotNegative | None = None
    prompt_tokens: Positive | None = None
    output_tokens: Positive | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Open-loop requests: they arrive when they arrive, whatever the engines do.

    Attributes:
        rate: mean requests a second; the times between them are exponential (Poisson arrivals).
        every_s: between two requests, always the same; 0: as the rate has it.
        trace: lines that say some or all of it, used one after the other and then again.
    """

    rate: float = 2.0
    prompt: Span = Span(1000, 8000)
    output: Span = Span(64, 128)
    trace: tuple[TraceLine, ...] = ()
    trace_name: str = ""
    every_s: float = 0.0

    def __str__(self) -> str:
        known = self.trace[0] if self.trace else TraceLine()
        parts = [f"trace={self.trace_name}"] if self.trace else []
        arrivals = f"every={self.every_s:g}" if self.every_s else f"rate={self.rate:g}"
        parts += [arrivals] if known.arrival_ms is None else []
        parts += [f"prompt={self.prompt}"] if known.prompt_tokens is None else []
        parts += [f"output={self.output}"] if known.output_tokens is None else []
        return ",".join(parts)

    @property
    def most_tokens(self) -> int:
        """Of the longest request."""
        prompts = [line.prompt_tokens or self.prompt.most for line in self.trace]
        outputs = [line.output_tokens or self.output.most for line in self.trace]
        return max(prompts or [self.prompt.most]) + max(outputs or [self.output.most])


def parse_loads(text: str) -> list[Load]:
    """``rate=2/4,prompt=1000-8000,output=64-128,trace=FILE``: each is optional, ``/`` separates
    alternatives, and every combination is a load. ``every=2.5`` (seconds) in the place of a rate.
    Raises ArgumentTypeError.
    """
    usual = {"rate": "2", "prompt": "1000-8000", "output": "64-128"}
    given = dict(pair.partition("=")[::2] for pair in text.split(","))
    name, every = given.pop("trace", None), given.pop("every", None)
    try:
        trace = Load() if name is None else read_trace(Path(name))
        if every is not None:
            if "rate" in given or not 0 < float(every) < math.inf:
                return _refused("every above 0, and no rate")
            trace = replace(trace, every_s=float(every))
        if unknown := given.keys() - usual.keys():
            return _refused(f"rate, every, prompt, output and trace, got {', '.join(unknown)}")
        values = {key: (usual | given)[key].split("/") for key in usual}
        loads = [
            replace(trace, rate=float(rate), prompt=Span.parse(prompt), output=Span.parse(output))
            for rate, prompt, output in product(*values.values())
        ]
        return loads if all(load.rate > 0 for load in loads) else _refused("a rate above 0")
    except (ValueError, OSError) as exc:
        raise argparse.ArgumentTypeError(f"{text}: {exc}") from exc


def _refused(expected: str) -> NoReturn:
    raise ValueError(f"expected {expected}")


def read_trace(path: Path) -> Load:
    """A load of JSON lines with some of ``timestamp`` (ms), ``input_length`` and ``output_length``,
    the same in each line, by time. Raises ValueError naming the line, and OSError.
    """
    lines: list[TraceLine] = []
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        try:
            line = msgspec.json.decode(text, type=TraceLine)
            if not any(_shape(line)):
                _refused(f"some of {', '.join(_FIELDS.values())}")
            if lines and (_shape(line), True) != (_shape(lines[0]), _arrives(line, lines[-1])):
                _refused("the fields of line 1, and arrivals in order")
        except ValueError as exc:
            raise ValueError(f"{path.name}, line {number}: {exc}") from exc
        lines.append(line)
    if not lines or (_shape(lines[0])[0] and not lines[-1].arrival_ms):
        _refused(f"lines in {path.name}, the last one's arrival above 0")
    return Load(trace=tuple(lines), trace_name=path.name)


def _shape(line: TraceLine) -> tuple[bool, ...]:
    return tuple(getattr(line, name) is not None for name in _FIELDS)


def _arrives(line: TraceLine, before: TraceLine) -> bool:
    return (line.arrival_ms or 0.0) >= (before.arrival_ms or 0.0)


# ------------------------------------------------------------------ requests


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a segment. ``prompt_id``: requests with the same one have the same prompt."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prompt_id: int


def jobs_of(
    load: Load,
    round_number: int,
    duration_s: float,
    *,
    seed: int,
    block_tokens: int,
    distinct_tokens: int,
) -> tuple[Job, ...]:
    """The requests of one round, the same for every contender.

    Prompts have whole blocks and one token more: then the floor computes one token at decode, as
    the others do. ``distinct_tokens``: prompts of more tokens than that in all are repeated ones
    (the floor has to keep them in its cache; for the others every request is new).
    """
    name = zlib.crc32(f"{load} {round_number}".encode())
    rng = np.random.default_rng([name, seed])
    jobs: list[Job] = []
    lengths: list[int] = []
    for index, (arrival_s, line) in enumerate(_arrivals(load, round_number, duration_s, rng)):
        drawn = int(rng.integers(load.prompt.least, load.prompt.most + 1))
        blocks = max(1, round(((line.prompt_tokens or drawn) - 1) / block_tokens))
        length = blocks * block_tokens + 1
        if len(lengths) == index and sum(lengths) + length <= max(distinct_tokens, length):
            lengths.append(length)
        drawn = int(rng.integers(load.output.least, load.output.most + 1))
        at = index % len(lengths)
        output_tokens = line.output_tokens or drawn
        jobs.append(Job(index, arrival_s, lengths[at], output_tokens, (name << 16) + at))
    return tuple(jobs)


def _arrivals(
    load: Load, round_number: int, duration_s: float, rng: np.random.Generator
) -> Iterable[tuple[float, TraceLine]]:
    """When each request arrives, from the round's begin, and what a trace says of it; at least one.
    The next round goes on where this one ends.
    """
    trace = load.trace or (TraceLine(),)
    if trace[0].arrival_ms is not None:
        yield from _traced(trace, round_number * duration_s, duration_s)
        return
    mean_s = load.every_s or 1 / load.rate
    arrival_s, index = 0.0, round(round_number * duration_s / mean_s)
    while arrival_s < duration_s:
        yield arrival_s, trace[index % len(trace)]
        arrival_s, index = arrival_s + (load.every_s or rng.exponential(mean_s)), index + 1


def _traced(
    trace: Sequence[TraceLine], begin_s: float, duration_s: float
) -> Iterable[tuple[float, TraceLine]]:
    """What arrives in that time; after its last line a trace begins again."""
    arrivals_s = [(line.arrival_ms or 0.0) / 1e3 for line in trace]
    period_s = arrivals_s[-1] * (1 + 1 / len(trace))
    laps = range(int(begin_s // period_s), int((begin_s + duration_s) // period_s) + 1)
    found = [
        (lap * period_s + arrival_s - begin_s, line)
        for lap in laps
        for arrival_s, line in zip(arrivals_s, trace, strict=True)
    ]
    return [each for each in found if 0 <= each[0] < duration_s] or [(0.0, trace[0])]


def prompt_of(seed: int, prompt_id: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Random tokens; prompts of other ids share no first block."""
    rng = np.random.default_rng([seed, prompt_id])
    found: list[int] = rng.integers(_FIRST_TOKEN_ID, vocab_size, num_tokens).tolist()
    return found


# ------------------------------------------------------------------ contenders


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to serve. By side: further arguments of vLLM's engine, and environment variables.

    Attributes:
        extra: ``kv_connector_extra_config``.
    """

    name: str
    kind: str
    extra: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, dict[str, Any]] = field(default_factory=lambda: {s: {} for s in SIDES})
    environment: dict[str, dict[str, str]] = field(default_factory=lambda: {s: {} for s in SIDES})

    @property
    def has_connector(self) -> bool:
        return self.kind in {"nixl", "kvxfer", "early"}

    @property
    def pair_key(self) -> str:
        """Equal for contenders that run on the same two engines."""
        kind = "nixl" if self.kind == "nixl" else "kvxfer" if self.has_connector else "plain"
        return f"{kind} {self.extra} {self.engine} {self.environment}"


def parse_contender(text: str) -> Contender:
    """``KIND,key=value,...``. Keys: ``name``; ``wire`` (kvxfer's transport); ``engine.ARG``,
    ``prefill.ARG`` and ``decode.ARG``, arguments of vLLM's engines; names in capitals, with a side
    before them or not, environment variables; all others go to the connector's extra config.
    Values are JSON, or text where they are not. Raises ArgumentTypeError.
    """
    kind, *pairs = _PAIRS.split(text)
    made = Contender(text, kind)
    for pair in pairs:
        key, _, value = pair.partition("=")
        side, _, name = key.rpartition(".")
        sides = SIDES if side in {"", "engine"} else (side,)
        if kind not in KINDS or side not in {"", "engine", *SIDES}:
            break
        if key == "name" and kind != "floor":  # of which there is one, the others' reference
            made = replace(made, name=value)
        elif name.isupper():
            for each in sides:
                made.environment[each][name] = value
        elif side:
            for each in sides:
                made.engine[each][name] = _json(value)
        elif made.has_connector:
            made.extra["transport" if name == "wire" else name] = _json(value)
        else:
            raise argparse.ArgumentTypeError(f"{text}: expected no {key}: {kind} has no connector")
    else:
        if kind in KINDS:
            return made if made.name != text else replace(made, name=_usual_name(made, text))
    raise argparse.ArgumentTypeError(
        f"{text}: expected one of {', '.join(KINDS)} and then key=value, engine.ARG=value, "
        "prefill.ARG=value or decode.ARG=value"
    )


def _usual_name(contender: Contender, text: str) -> str:
    wire = contender.extra.get("transport")
    is_short = wire is not None and len(contender.extra) == 1 and text.count("=") == 1
    return f"{contender.kind}:{wire}" if is_short else text


def _json(text: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except ValueError:
        return text


# ------------------------------------------------------------------ models


@dataclass(frozen=True, slots=True)
class Model:
    """Geometry of a Llama. ``path``: its folder; without ``has_weights`` there they are seeded."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab_size: int = 128256
    dtype_nbytes: int = 2
    path: str = ""
    has_weights: bool = False

    @property
    def kv_nbytes(self) -> int:
        """Of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.dtype_nbytes

    @property
    def cache_text(self) -> str:
        return f"{self.kv_nbytes:,} bytes of KV a token"

    def pool_nbytes(self, kv_tokens: int) -> int:
        """Of a pool that holds so many tokens."""
        return kv_tokens * self.kv_nbytes

    @property
    def weights_nbytes(self) -> int:
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return (self.layers * layer + 2 * self.vocab_size * self.hidden) * self.dtype_nbytes

    def config(self, max_tokens: int) -> dict[str, Any]:
        """Its config.json. The head is no copy of the embedding: random weights would then repeat
        their last token.
        """
        return {
            **{"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            **{"hidden_size": self.hidden, "num_hidden_layers": self.layers},
            **{"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads},
            **{"head_dim": self.head_size, "intermediate_size": self.intermediate},
            **{"hidden_act": "silu", "vocab_size": self.vocab_size, "rope_theta": 500000.0},
            **{"rms_norm_eps": 1e-5, "max_position_embeddings": max_tokens},
            **{"initializer_range": 0.02, "tie_word_embeddings": False},
            **{"attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16"},
            **{"bos_token_id": 128000, "eos_token_id": 128001},
        }


@dataclass(frozen=True, slots=True)
class SparseLatentModel(Model):
    """Geometry of DeepSeek V3.2 without experts: latents, an indexer beside each. ``head_size``:
    of a latent with its rotary part.
    """

    @property
    def kv_nbytes(self) -> int:
        return self.layers * (self.head_size * self.dtype_nbytes + 132)

    @property
    def weights_nbytes(self) -> int:
        heads = self.heads * (1536 * 192 + 512 * 256 + 128 * self.hidden)
        layer = heads + self.hidden * (1536 + self.head_size + 3 * self.intermediate)
        return (self.layers * layer + 2 * self.vocab_size * self.hidden) * self.dtype_nbytes

    def config(self, max_tokens: int) -> dict[str, Any]:
        return {
            **Model.config(self, max_tokens),
            **{"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
            **{"num_key_value_heads": self.heads, "first_k_dense_replace": self.layers},
            **{"q_lora_rank": 1536, "kv_lora_rank": self.head_size - 64, "qk_rope_head_dim": 64},
            **{"qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64},
            **{"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
            **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
            **{"moe_intermediate_size": 2048, "n_shared_experts": 1, "moe_layer_freq": 1},
            **{"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
            **{"routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0},
        }


@dataclass(frozen=True, slots=True)
class StateModel(Model):
    """Geometry of Qwen3-Next, with experts in one layer alone: of four layers three keep the state
    of a gated delta net, with half as many heads of K as of V, and one keeps KV.
    """

    value_heads: int = 32
    state_head_size: int = 128

    @property
    def kv_nbytes(self) -> int:
        return self.layers // 4 * 2 * self.kv_heads * self.head_size * self.dtype_nbytes

    @property
    def state_nbytes(self) -> int:
        """Of one request: the last three inputs of a convolution, and a matrix for each head."""
        heads, size = self.value_heads, self.state_head_size
        return self.layers * 3 // 4 * (3 * 2 * heads * size + heads * size**2) * self.dtype_nbytes

    @property
    def cache_text(self) -> str:
        return f"{self.kv_nbytes:,} bytes of KV a token, {self.state_nbytes:,} of a request's state"

    def pool_nbytes(self, kv_tokens: int) -> int:
        """A block is one of KV, or one of the states of a third of the other layers."""
        return 4 * Model.pool_nbytes(self, kv_tokens)

    @property
    def weights_nbytes(self) -> int:
        state = 5 * self.hidden * self.value_heads * self.state_head_size
        layer = state + 3 * self.hidden * self.intermediate
        return (self.layers * layer + 2 * self.vocab_size * self.hidden) * self.dtype_nbytes

    def config(self, max_tokens: int) -> dict[str, Any]:
        kinds = [*["linear_attention"] * 3, "full_attention"] * (self.layers // 4)
        return {
            **Model.config(self, max_tokens),
            **{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
            **{"layer_types": kinds, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25},
            **{"linear_key_head_dim": self.state_head_size},
            **{"linear_value_head_dim": self.state_head_size},
            **{"linear_num_key_heads": self.value_heads // 2},
            **{"linear_num_value_heads": self.value_heads},
            # vLLM wants a layer with experts.
            **{
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "mlp_only_layers": [*range(1, self.layers)],
            },
            **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        }


MODELS = {
    "llama-8b": Model("llama-8b", 32, 4096, 32, 8, 128, 14336),
    "llama-3b": Model("llama-3b", 28, 3072, 24, 8, 128, 8192),
    "llama-1b": Model("llama-1b", 16, 2048, 32, 8, 64, 8192),
}
"""Largest first."""
BY_NAME = MODELS | {
    "deepseek-v3.2": SparseLatentModel("deepseek-v3.2", 12, 7168, 128, 1, 576, 18432),
    "qwen3-next": StateModel("qwen3-next", 48, 2048, 16, 2, 256, 5120, vocab_size=151936),
}
"""With those that are taken only if they are named; of DeepSeek's 61 layers 12."""
TINY = Model("tiny", 4, 256, 8, 4, 32, 512, vocab_size=1000, dtype_nbytes=4)
"""That of the vLLM tests, which has weights."""
WIDE = Model("wide", 8, 64, 8, 8, 128, 128, vocab_size=1000)
"""Much KV for what it computes: over a slow link a prompt's transfer takes longer than its prefill,
on few cores too.
"""
OVERHEAD_NBYTES = 2 << 30
"""Of an engine on a GPU beside weights and KV: CUDA, workspaces, activations, graphs."""


def engine_nbytes(model: Model, kv_tokens: int) -> int:
    return model.weights_nbytes + model.pool_nbytes(kv_tokens) + OVERHEAD_NBYTES


def largest_that_fits(num_engines: int, kv_tokens: int, free_nbytes: int) -> Model:
    """Of which so many engines have room together; the smallest where none has."""
    for model in MODELS.values():
        if num_engines * engine_nbytes(model, kv_tokens) <= free_nbytes:
            return model
    return model


def groups_of(keys: Sequence[str], most: int) -> list[list[str]]:
    """Pairs that are there at the same time, in order: at most so many, but one at least."""
    distinct, most = list(dict.fromkeys(keys)), max(1, most)
    return [distinct[at : at + most] for at in range(0, len(distinct), most)]


# ------------------------------------------------------------------ a run

_PRIMED_SHARE = 0.7
"""Of decode's pool at the floor; the rest is for answers."""
_GRAPHS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run, and where. ``gpus``: of prefill and decode; none: CPUs. ``hosts``: addresses of
    both engines, where each has a network of its own. ``cores``: of prefill and of decode, the
    same for all contenders; none: all are for all.
    """

    contenders: tuple[Contender, ...]
    loads: tuple[Load, ...]
    model: Model
    gpus: tuple[str, ...]
    kv_tokens: int
    block_tokens: int
    pairs_at_once: int
    duration_s: float
    rounds: int
    drain_s: float
    warm_up_s: float
    seed: int
    ends_s: float
    engine: dict[str, Any] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.gpus else "float32"

    @property
    def longest(self) -> int:
        """Tokens of the longest request, with the block that rounding may add."""
        return max(load.most_tokens for load in self.loads) + self.block_tokens

    def jobs(self, load: Load, round_number: int) -> tuple[Job, ...]:
        distinct_tokens = int(_PRIMED_SHARE * self.kv_tokens)
        return jobs_of(
            load, round_number, self.duration_s, seed=self.seed,
            block_tokens=self.block_tokens, distinct_tokens=distinct_tokens,
        )  # fmt: skip


def engine_args(plan: Plan, contender: Contender, side: str, port: int) -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    model = plan.model
    found: dict[str, Any] = {
        **{"model": model.path, "dtype": plan.dtype, "seed": 0},
        **{"load_format": "auto" if model.has_weights else "dummy", "skip_tokenizer_init": True},
        **{"max_model_len": plan.longest, "max_num_seqs": 32, "block_size": plan.block_tokens},
        "max_num_batched_tokens": max(2048, min(8192, plan.longest)),
        "kv_cache_memory_bytes": model.pool_nbytes(plan.kv_tokens),
        **{"enable_prefix_caching": True, "disable_log_stats": False},
        "worker_extension_cls": "scripts.benchmarks.load_host.SeededWeights",
        "enforce_eager": True,
    }
    if plan.gpus:  # what must be free at the start: others may share the GPU
        found["gpu_memory_utilization"] = 0.05
        if side == "decode" or not contender.has_connector:
            graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [*_GRAPHS]}
            found |= {"enforce_eager": False, "compilation_config": {"mode": 0} | graphs}
    if contender.has_connector:
        found["kv_transfer_config"] = _transfer_config(contender, side, port, plan.hosts)
    return found | plan.engine | contender.engine[side]


def _transfer_config(
    contender: Contender, side: str, port: int, hosts: tuple[str, ...]
) -> dict[str, Any]:
    if contender.kind == "nixl":
        return {
            **{"kv_connector": "NixlConnector", "kv_role": "kv_both"},
            "kv_connector_extra_config": contender.extra,
        }
    return {
        "kv_connector": "KvxferConnector",
        "kv_connector_module_path": "kvxfer.integrations.vllm",
        "kv_role": "kv_producer" if side == "prefill" else "kv_consumer",
        "kv_connector_extra_config": {"port": port, "log_level": "INFO"}
        | ({"host": hosts[SIDES.index(side)], "allowed_peers": [*hosts]} if hosts else {})
        | contender.extra,
    }
