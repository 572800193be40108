"""The weights of one rank: read from safetensors files, or made from a seed.

Both come as *parts*: a rank names the tensor, its full shape and the rows or columns that it wants.
A random tensor is seeded by its full name, so that every TP size slices the same full weights.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from kvxfer.engine.model_config import (
    NUM_TAPS,
    LayerAttention,
    ModelConfig,
    TpShard,
    attention_layers,
    state_shard,
)
from kvxfer.engine.state import StateWeights
from kvxfer.errors import ModelError
from kvxfer.extras import install

# The order of float32 summation (TP 1 against 2 and 4) moved the tiny model's logits by at most
# 1e-5
# and flipped none of 4,096 greedy tokens; the smallest gap between the best two was 8e-5.
_RANDOM_STD = 0.08
_INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """``qkv``, ``gate_up``: rows stacked; only query rows where the layer reads another's KV, and
    those of the output's gate where it keeps a ``state``.
    """

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor
    state: StateWeights | None = None


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """One rank's weights. ``embedding`` and ``lm_head`` [vocab, hidden] are whole on every rank."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """``[lo, hi)`` along ``dim`` of the tensor ``name`` of this shape; dim None: all of it."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    lo: int = 0
    hi: int = 0


class RandomWeights:
    """Seeded weights: norms of one, the rest normal with a small standard deviation."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def read(self, part: Part) -> Tensor:
        """The same bytes for the same seed and name, whichever part of the tensor is asked for."""
        if len(part.shape) == 1:
            return torch.ones(part.shape)
        digest = hashlib.blake2b(f"{self._seed}:{part.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        full = torch.empty(part.shape).normal_(std=_RANDOM_STD, generator=generator)
        return full if part.dim is None else full.narrow(part.dim, part.lo, part.hi - part.lo)


@dataclass(frozen=True, slots=True)
class _Safetensors:
    """The tensors of a folder by name, each in its open file."""

    folder: Path
    handles: Mapping[str, Any]

    def read(self, part: Part) -> Tensor:
        """Read only the part's bytes. ModelError if it is missing or has another shape."""
        handle = self.handles.get(part.name)
        if handle is None:
            raise ModelError(f"{self.folder}: expected a tensor {part.name}, found none")
        stored = handle.get_slice(part.name)
        shape = tuple(stored.get_shape())
        if shape != part.shape:
            raise ModelError(
                f"{self.folder}: {part.name}: expected shape {part.shape}, got {shape}; "
                "config.json and the weights do not belong together"
            )
        if part.dim is None:
            tensor: Tensor = handle.get_tensor(part.name)
        elif part.dim == 0:
            tensor = stored[part.lo : part.hi]
        else:
            tensor = stored[:, part.lo : part.hi]
        if not tensor.is_floating_point():
            raise ModelError(
                f"{self.folder}: {part.name}: expected floating point values, got {tensor.dtype}; "
                "quantised weights are not supported"
            )
        return tensor


@contextmanager
def _open_safetensors(folder: Path) -> Iterator[_Safetensors]:
    try:
        safetensors = importlib.import_module("safetensors")
    except ImportError as exc:
        raise ModelError(f"safetensors is not installed; {install('engine')}") from exc
    handles: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in weight_files(folder):
            try:
                handle = stack.enter_context(safetensors.safe_open(file, framework="pt"))
            except (OSError, safetensors.SafetensorError) as exc:
                raise ModelError(f"{file}: cannot be read ({exc})") from exc
            handles |= dict.fromkeys(handle.keys(), handle)
        yield _Safetensors(folder, handles)


def load_weights(
    config: ModelConfig, shard: TpShard, *, seed: int = 0, device: torch.device | str = "cpu"
) -> LlamaWeights:
    """One rank's weights in ``config.dtype``: from ``config.weights``, or random from ``seed``
    where that is None.

    Raises ModelError for a tensor that is missing, has another shape, or is one that this engine
    does not compute with.
    """
    if config.weights is None:
        return _assemble(config, shard, RandomWeights(seed), device)
    with _open_safetensors(config.weights) as source:
        _refuse_unknown(config, frozenset(source.handles))
        return _assemble(config, shard, source, device)


def weights_identity(config: ModelConfig, *, seed: int = 0) -> str:
    """A short name of the weights for the manifest: the same weights give the same name.

    The reverse is likely, not certain: files are sampled (name, size, 256 pieces of 4 KiB), because
    hashing 16 GB at 0.37 GB/s takes 43 s. A change between the samples is not seen.
    """
    model = msgspec.structs.replace(config, weights=None, dtype="float32")
    digest = hashlib.blake2b(msgspec.json.encode(model), digest_size=16)
    if config.weights is None:
        digest.update(f"seed {seed} std {_RANDOM_STD}".encode())
        return f"random-{digest.hexdigest()}"
    for file in weight_files(config.weights):
        nbytes = file.stat().st_size
        digest.update(f"{file.name} {nbytes}".encode())
        with file.open("rb") as stream:
            for sample in range(256):
                stream.seek(max(0, nbytes - 4096) * sample // 255)
                digest.update(stream.read(4096))
    return f"files-{digest.hexdigest()}"


def weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX_NAME
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelError(f"{index}: {exc}") from exc
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not os.path.isfile(file):  # False for what can be no name, too
            raise ModelError(f"{file}: expected a file (the index names it), found none")
    return files


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _refuse_unknown(config: ModelConfig, names: frozenset[str]) -> None:
    """A tensor that nobody reads (a bias, a query norm) would make the answers silently wrong."""
    known = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer, attention in enumerate(attention_layers(config)):
        own = _LAYER_TENSORS if attention.target is None else _LAYER_TENSORS - _KV_TENSORS
        known.update(f"model.layers.{layer}.{name}.weight" for name in own)
    # old checkpoints store the rotary frequencies, which follow from the config
    unknown = sorted(n for n in names - known if not n.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise ModelError(
            f"{config.weights}: {unknown[0]}: expected only the tensors of {config.num_layers} "
            f"{config.model_type} layers, got {len(unknown)} other; they are not supported"
        )


_KV_TENSORS = frozenset({"self_attn.k_proj", "self_attn.v_proj"})
_LAYER_TENSORS = _KV_TENSORS | {
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
}


def _assemble(
    config: ModelConfig,
    shard: TpShard,
    source: RandomWeights | _Safetensors,
    device: torch.device | str,
) -> LlamaWeights:
    dtype = getattr(torch, config.dtype)
    hidden, head = config.hidden_size, config.head_size

    def take(*parts: Part) -> Tensor:
        tensors = [source.read(part).to(device=device, dtype=dtype) for part in parts]
        # contiguous: a slice must not keep the full tensor in memory
        return (
            torch.cat(tensors)
            if len(tensors) > 1
            else tensors[0].clone(memory_format=torch.contiguous_format)
        )

    def rows(name: str, count: int, lo: int, hi: int) -> Part:
        return Part(name, (count, hidden), 0, lo, hi)

    def columns(name: str, count: int, lo: int, hi: int) -> Part:
        return Part(name, (hidden, count), 1, lo, hi)

    def layer_weights(layer: int, attention: LayerAttention) -> LayerWeights:
        prefix = f"model.layers.{layer}"
        num_q, num_kv = config.num_heads * head, config.num_kv_heads * head
        if attention.is_state:
            return state_layer_weights(prefix)
        query = (num_q, shard.query_lo * head, shard.query_hi * head)
        kv = (num_kv, shard.kv_lo * head, shard.kv_hi * head)
        qkv = [rows(f"{prefix}.self_attn.q_proj.weight", *query)]
        if attention.target is None:
            qkv += [rows(f"{prefix}.self_attn.{name}_proj.weight", *kv) for name in "kv"]
        return around(
            prefix, take(*qkv), take(columns(f"{prefix}.self_attn.o_proj.weight", *query))
        )

    def around(
        prefix: str, qkv: Tensor, output: Tensor, state: StateWeights | None = None
    ) -> LayerWeights:
        mlp = (config.intermediate_size, shard.mlp_lo, shard.mlp_hi)
        return LayerWeights(
            input_norm=take(Part(f"{prefix}.input_layernorm.weight", (hidden,))),
            qkv=qkv,
            output=output,
            post_attention_norm=take(Part(f"{prefix}.post_attention_layernorm.weight", (hidden,))),
            gate_up=take(
                rows(f"{prefix}.mlp.gate_proj.weight", *mlp),
                rows(f"{prefix}.mlp.up_proj.weight", *mlp),
            ),
            down=take(columns(f"{prefix}.mlp.down_proj.weight", *mlp)),
            state=state,
        )

    def state_layer_weights(prefix: str) -> LayerWeights:
        own = state_shard(config, shard, layout="HND")
        size, count = own.head_size, config.num_state_heads
        heads = (count * size, own.heads[0] * size, (own.heads[-1] + 1) * size)
        groups = (config.num_state_groups * size, own.groups[0] * size, (own.groups[-1] + 1) * size)

        def whole(name: str, other: int, most: int, dim: int, *parts: tuple[int, ...]) -> Tensor:
            """Whole numbers from -most to most, of these parts of two tensors or one."""
            found = []
            for part, (total, lo, hi) in zip(("x", "g"), parts, strict=False):
                shape = (other, total) if dim else (total, other)
                read = source.read(Part(f"{prefix}.mixer.{part}_{name}", shape, dim, lo, hi))
                found.append((read.float() * (most / _RANDOM_STD / 2)).round().clamp(-most, most))
            return torch.cat(found, dim).to(device=device, dtype=torch.int64)

        state = StateWeights(
            table=whole("table", config.vocab_size, 8, 1, heads, groups),
            taps=whole("taps", NUM_TAPS, 3, 0, heads, groups),
            decay=2 * whole("decay", 1, 30, 0, (count, own.heads[0], own.heads[-1] + 1)) + 1,
        )
        gate = take(rows(f"{prefix}.mixer.gate.weight", *heads))
        return around(prefix, gate, take(columns(f"{prefix}.mixer.o_proj.weight", *heads)), state)

    embedding = take(Part("model.embed_tokens.weight", (config.vocab_size, hidden)))
    tied = config.tie_word_embeddings
    lm_head = embedding if tied else take(Part("lm_head.weight", (config.vocab_size, hidden)))
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(
            layer_weights(layer, attention)
            for layer, attention in enumerate(attention_layers(config))
        ),
        final_norm=take(Part("model.norm.weight", (hidden,))),
        lm_head=lm_head,
    )
