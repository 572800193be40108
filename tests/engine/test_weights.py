"""Weights: every TP size slices the same full tensors, and files that do not fit are refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvxfer.engine.model_config import ModelConfig, load_model_config, shard_for
from kvxfer.engine.weights import LlamaWeights, load_weights, weights_identity
from kvxfer.errors import ModelError

CONFIG = msgspec.structs.replace(
    load_model_config(None, num_kv_heads=2),
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    head_size=6,
)


def full_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """A checkpoint whose every value is different, under Hugging Face's names."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    shapes = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.num_layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (query, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, query),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (mlp, hidden),
                "mlp.up_proj": (mlp, hidden),
                "mlp.down_proj": (hidden, mlp),
            }.items()
        }
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def with_files(folder: Path, tensors: dict[str, Tensor]) -> ModelConfig:
    save_file(tensors, folder / "model.safetensors")
    return msgspec.structs.replace(CONFIG, weights=folder)


def assert_slices(parts: list[LlamaWeights], full: dict[str, Tensor], tp_size: int) -> None:
    """Each rank against slices written out here: 4 query heads, 2 KV heads of 6 values."""
    queries = 4 // tp_size * 6
    mlps = 24 // tp_size
    for rank, part in enumerate(parts):
        kv_lo, kv_hi = {1: [(0, 12)], 2: [(0, 6), (6, 12)], 4: [(0, 6), (0, 6), (6, 12), (6, 12)]}[
            tp_size
        ][rank]
        query, mlp = (
            slice(rank * queries, (rank + 1) * queries),
            slice(rank * mlps, (rank + 1) * mlps),
        )
        assert torch.equal(part.embedding, full["model.embed_tokens.weight"])
        assert torch.equal(part.lm_head, full["lm_head.weight"])
        assert torch.equal(part.final_norm, full["model.norm.weight"])
        for layer, weights in enumerate(part.layers):
            name = f"model.layers.{layer}"
            q, k, v, o = (full[f"{name}.self_attn.{p}_proj.weight"] for p in "qkvo")
            gate, up, down = (full[f"{name}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
            stacked = torch.cat([q[query], k[kv_lo:kv_hi], v[kv_lo:kv_hi]])
            assert torch.equal(weights.qkv, stacked)
            assert torch.equal(weights.output, o[:, query])
            assert torch.equal(weights.gate_up, torch.cat([gate[mlp], up[mlp]]))
            assert torch.equal(weights.down, down[:, mlp])
            assert torch.equal(weights.input_norm, full[f"{name}.input_layernorm.weight"])
            post = full[f"{name}.post_attention_layernorm.weight"]
            assert torch.equal(weights.post_attention_norm, post)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_read_their_slices_of_the_files(tmp_path: Path, tp_size: int) -> None:
    full = full_tensors(CONFIG)
    config = with_files(tmp_path, full)
    parts = [load_weights(config, shard_for(config, r, tp_size)) for r in range(tp_size)]
    assert_slices(parts, full, tp_size)
    nbytes = parts[0].layers[0].down.untyped_storage().nbytes()
    assert nbytes == 16 * 24 // tp_size * 4  # a slice does not keep the whole tensor


def test_random_weights_are_the_same_for_every_tp_size() -> None:
    whole = load_weights(CONFIG, shard_for(CONFIG, 0, 1), seed=1)
    full = {
        "model.embed_tokens.weight": whole.embedding,
        "model.norm.weight": torch.ones(16),
        "lm_head.weight": whole.lm_head,
    }
    for layer, weights in enumerate(whole.layers):
        name = f"model.layers.{layer}"
        q, k, v = weights.qkv.split([24, 12, 12])  # type: ignore[no-untyped-call]
        gate, up = weights.gate_up.chunk(2)
        full |= {
            f"{name}.self_attn.{p}_proj.weight": t for p, t in zip("qkv", (q, k, v), strict=True)
        }
        full |= {f"{name}.mlp.gate_proj.weight": gate, f"{name}.mlp.up_proj.weight": up}
        full[f"{name}.self_attn.o_proj.weight"] = weights.output
        full[f"{name}.mlp.down_proj.weight"] = weights.down
        full[f"{name}.input_layernorm.weight"] = torch.ones(16)
        full[f"{name}.post_attention_layernorm.weight"] = torch.ones(16)
    for tp_size in (2, 4):
        parts = [
            load_weights(CONFIG, shard_for(CONFIG, r, tp_size), seed=1) for r in range(tp_size)
        ]
        assert_slices(parts, full, tp_size)


def test_random_weights_differ_by_name_and_seed_and_have_the_spread() -> None:
    config = load_model_config(None)
    shard = shard_for(config, 0, 1)
    first, other = load_weights(config, shard, seed=1), load_weights(config, shard, seed=2)
    assert first.embedding.std().item() == pytest.approx(0.08, rel=0.02)
    assert not torch.equal(first.embedding, other.embedding)
    assert not torch.equal(first.embedding, first.lm_head)
    assert not torch.equal(first.layers[0].qkv, first.layers[1].qkv)


def test_dtype_is_the_configs() -> None:
    config = msgspec.structs.replace(CONFIG, dtype="bfloat16")
    weights = load_weights(config, shard_for(config, 0, 2))
    assert weights.layers[1].qkv.dtype == torch.bfloat16
    assert weights.embedding.dtype == torch.bfloat16


def test_tied_embeddings_are_one_tensor() -> None:
    config = msgspec.structs.replace(CONFIG, tie_word_embeddings=True)
    weights = load_weights(config, shard_for(config, 0, 1))
    assert weights.lm_head is weights.embedding


def test_index_names_the_files(tmp_path: Path) -> None:
    full = full_tensors(CONFIG)
    names = sorted(full)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: full[name] for name in part}, tmp_path / file)
    (tmp_path / "left_over.safetensors").write_bytes(b"not one of ours")
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = msgspec.structs.replace(CONFIG, weights=tmp_path)
    assert_slices([load_weights(config, shard_for(config, 0, 1))], full, 1)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors: expected a file \(the index names it\)"):
        load_weights(config, shard_for(config, 0, 1))


def refusal(folder: Path, tensors: dict[str, Tensor], message: str) -> None:
    config = with_files(folder, tensors)
    with pytest.raises(ModelError, match=message):
        load_weights(config, shard_for(config, 0, 1))


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    full = full_tensors(CONFIG)
    missing = {name: t for name, t in full.items() if name != "model.norm.weight"}
    refusal(tmp_path, missing, r"expected a tensor model\.norm\.weight, found none")
    wrong = full | {"model.norm.weight": torch.ones(17)}
    refusal(tmp_path, wrong, r"model\.norm\.weight: expected shape \(16,\), got \(17,\)")
    bias = full | {"model.layers.0.self_attn.q_proj.bias": torch.ones(24)}
    refusal(tmp_path, bias, r"q_proj\.bias: expected only the tensors of 2 llama layers, got 1")
    integers = full | {"model.norm.weight": torch.ones(16, dtype=torch.int8)}
    refusal(tmp_path, integers, r"norm\.weight: expected floating point values, got torch\.int8")
    frequencies = full | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    config = with_files(tmp_path, frequencies)
    load_weights(config, shard_for(config, 0, 1))
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        load_weights(config, shard_for(config, 0, 1))


def test_identity_tells_weights_apart(tmp_path: Path) -> None:
    full = full_tensors(CONFIG)
    config = with_files(tmp_path, full)
    identity = weights_identity(config)
    assert identity.startswith("files-")
    assert weights_identity(msgspec.structs.replace(config, dtype="float16")) == identity
    full["model.layers.1.mlp.down_proj.weight"][3, 3] += 1
    assert weights_identity(with_files(tmp_path, full)) != identity
    assert weights_identity(CONFIG, seed=1) != weights_identity(CONFIG, seed=2)
    assert weights_identity(CONFIG, seed=1) == weights_identity(CONFIG, seed=1)


def test_layers_that_share_kv_have_query_rows_only(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, num_kv_shared_layers=1)
    full = full_tensors(config)
    own, sharer = load_weights(config, shard_for(config, 1, 2)).layers
    assert (own.qkv.shape, sharer.qkv.shape) == ((12 + 6 + 6, 16), (12, 16))
    unused = ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight")
    save_file({n: t for n, t in full.items() if n not in unused}, tmp_path / "model.safetensors")
    config = msgspec.structs.replace(config, weights=tmp_path)
    _, sharer = load_weights(config, shard_for(config, 1, 2)).layers
    assert torch.equal(sharer.qkv, full["model.layers.1.self_attn.q_proj.weight"][12:])
    save_file(full, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.k_proj\.weight: expected only"):
        load_weights(config, shard_for(config, 0, 1))


def test_names_of_the_default_weights_stay() -> None:
    """They stand in manifests: another name would refuse every engine of an older version."""
    tiny, two_heads = load_model_config(None), load_model_config(None, num_kv_heads=2)
    assert weights_identity(tiny) == "random-193f968b8a12ee949442714f620b18e4"
    assert weights_identity(two_heads, seed=3) == "random-591b67a9ac1ffc7e10dab56cefc8c4b9"
    others = {weights_identity(load_model_config(name)) for name in ("hybrid", "kv-sharing")}
    assert len(others | {weights_identity(tiny)}) == 3
