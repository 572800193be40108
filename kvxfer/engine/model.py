"""A Llama-family decoder over a paged KV cache, one tensor-parallel rank of it.

Query, key, value, gate and up are split by columns, output and down by rows, so a layer needs two
sums over the ranks. Embedding and lm_head are whole on every rank. The arithmetic follows
transformers' ``LlamaForCausalLM`` and ``MinistralForCausalLM`` (sliding windows) step by step
(norms and rotary angles in float32), whose logits are the test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from kvxfer.engine.attention import AttentionMetadata, PagedAttention
from kvxfer.engine.model_config import Llama3Rope, ModelConfig, shard_for
from kvxfer.engine.state import StateLayer
from kvxfer.engine.weights import LayerWeights, LlamaWeights


class LlamaModel:
    """One rank of a decoder. ``layers``: those with a cache, by name, bound to it before the first
    step. ``all_reduce``: returns the sum of its argument over all ranks (in place or not).
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        *,
        tp_rank: int,
        tp_size: int,
        layers: Mapping[str, PagedAttention | StateLayer],
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config = config
        self.shard = shard_for(config, tp_rank, tp_size)
        self._layers = dict(layers)
        self._weights = weights
        self._sum = all_reduce or (lambda partial: partial)
        self._inv_freq = _inverse_frequencies(config).to(weights.embedding.device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attn_metadata: Mapping[str, AttentionMetadata],
    ) -> Tensor:
        """Run the new tokens of a step and write their KV.

        ``token_ids`` and ``positions`` [T] int64, ``attn_metadata`` by layer name -> hidden [T,
        hidden_size] after the final norm. Raises KeyError for a layer without metadata.
        """
        hidden = embedding(token_ids, self._weights.embedding)
        angles = positions[:, None].to(torch.float32) * self._inv_freq
        cos, sin = (table.to(hidden.dtype)[:, None] for table in (angles.cos(), angles.sin()))
        for layer, (name, paged) in zip(self._weights.layers, self._layers.items(), strict=True):
            normed = self._norm(hidden, layer.input_norm)
            meta = attn_metadata[name]
            if isinstance(paged, StateLayer):
                assert layer.state is not None
                state = paged.advance(token_ids, layer.state, meta).to(hidden.dtype)
                mixed = linear(state * silu(linear(normed, layer.qkv)), layer.output)
            else:
                mixed = self._attention(normed, cos, sin, layer, paged, meta)
            hidden = hidden + self._sum(mixed)
            normed = self._norm(hidden, layer.post_attention_norm)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + self._sum(linear(silu(gate) * up, layer.down))
        return self._norm(hidden, self._weights.final_norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size] float32; equal on all ranks."""
        return linear(hidden, self._weights.lm_head).float()

    def _attention(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: LayerWeights,
        paged: PagedAttention,
        meta: AttentionMetadata,
    ) -> Tensor:
        num_query = self.shard.query_hi - self.shard.query_lo
        heads = linear(hidden, layer.qkv).view(len(hidden), -1, self.config.head_size)
        if paged.kv_sharing_target_layer_name is not None:
            # All heads are queries; K and V of the new tokens were written by the target.
            query = _rotate(heads, cos, sin)
        else:
            num_kv = self.shard.kv_hi - self.shard.kv_lo
            query_key, value = heads.tensor_split((num_query + num_kv,), dim=1)
            query, key = _rotate(query_key, cos, sin).tensor_split((num_query,), dim=1)
            paged.write(key, value, meta)
        attended = paged.attend(query, meta)
        return linear(attended.flatten(1), layer.output)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        exact = hidden.float()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return weight * (exact * scale).to(hidden.dtype)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: pairs (d, d + D/2). heads [T, H, D], cos and sin [T, 1, D/2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each rotary pair, [D/2] float32."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
    plain = 1.0 / config.rope_theta**exponents
    return plain if config.rope_scaling is None else _llama3_frequencies(plain, config.rope_scaling)


def _llama3_frequencies(plain: Tensor, rope: Llama3Rope) -> Tensor:
    """Slow pairs are stretched by ``factor``, fast ones kept, others interpolated."""
    rotations = rope.original_max_position_embeddings * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((rotations - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return plain * kept + plain / rope.factor * (1.0 - kept)
