"""A recurrent layer in whole numbers: what its state must be is exact, on any number of ranks, in
steps of any size.

Each token has a row of small integers for each channel. A convolution over the last
``NUM_TAPS`` rows gives x, for each head, and g, for each group of heads. The state of a head is
``decay * state + x * g``, modulo :data:`MODULUS` with an odd decay: no token is ever forgotten, and
one wrong bit stays wrong. A block of its cache has the last rows in bfloat16, which holds these
integers exactly, then the states in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch import Tensor

from kvxfer.cache.specs import MambaSpec
from kvxfer.engine.attention import AttentionMetadata, PagedBackend
from kvxfer.engine.model_config import NUM_TAPS, ModelConfig, StateShard, TpShard, conv_parts
from kvxfer.tensors.cache_views import LayerCache
from kvxfer.transfer.layout import Region
from kvxfer.transfer.states import StatePart, state_regions

MODULUS = 4096


@dataclass(frozen=True, slots=True)
class StateWeights:
    """int64 of one rank: ``table`` [vocab, channels], ``taps`` [channels, NUM_TAPS], oldest first,
    ``decay`` [heads, 1].
    """

    table: Tensor
    taps: Tensor
    decay: Tensor


@dataclass(slots=True, eq=False)
class StateLayer:
    """One such layer on one rank. ``kv_cache``: rows and states of all blocks, once bound. The
    other names are those of a layer of attention, by which the cache utilities find it.
    """

    shard: StateShard
    kv_cache: list[Tensor] = field(default_factory=list)

    @property
    def num_kv_heads(self) -> int:
        return len(self.shard.heads)

    @property
    def head_size(self) -> int:
        return self.shard.head_size

    def get_attn_backend(self) -> type[PagedBackend]:
        return PagedBackend  # of which a state has the metadata only

    def advance(self, token_ids: Tensor, weights: StateWeights, meta: AttentionMetadata) -> Tensor:
        """Compute the new tokens [T] of a step, and keep the state after them: [T, heads *
        head_size] float32 from -1 to 1.
        """
        rows = weights.table[token_ids]
        found = torch.empty(len(rows), len(self.shard.heads), self.head_size, dtype=torch.int64)
        found = found.to(rows.device)
        for index, seq_len in enumerate(meta.seq_lens):
            begin, end = meta.query_starts[index], meta.query_starts[index + 1]
            ids = meta.block_table[index]
            num_computed = seq_len - (end - begin)
            before, state = self._read(ids, num_computed, meta.block_tokens)
            seen = torch.cat((before, rows[begin:end]))
            added = self._convolve(seen, weights.taps)
            for at in range(end - begin):
                state = (weights.decay * state + added[at]) % MODULUS
                found[begin + at] = state
            self._write(ids[(seq_len - 1) // meta.block_tokens], seen[1 - NUM_TAPS :], state)
        return (found.flatten(1) / (MODULUS / 2) - 1).float()

    def _convolve(self, seen: Tensor, taps: Tensor) -> Tensor:
        """[before + T, channels] -> x * g [T, heads, head_size]."""
        num_new, shard = len(seen) - NUM_TAPS + 1, self.shard
        out = sum(taps[:, tap] * seen[tap : tap + num_new] for tap in range(NUM_TAPS))
        assert isinstance(out, Tensor)
        parts = out.view(num_new, -1, shard.head_size)
        group_of = [head // shard.heads_per_group - shard.groups[0] for head in shard.heads]
        num_heads = len(shard.heads)
        return parts[:, :num_heads] * parts[:, num_heads:][:, group_of]

    def _read(self, ids: Tensor, num_computed: int, block_tokens: int) -> tuple[Tensor, Tensor]:
        """A request begins with zeros, whatever its first block holds."""
        block = ids[max(0, num_computed - 1) // block_tokens]
        rows, state = (each[block].to(torch.int64) for each in self.kv_cache)
        if num_computed == 0:
            rows, state = torch.zeros_like(rows), torch.zeros_like(state)
        return rows.T if self.shard.is_turned else rows, state

    def _write(self, block: Tensor, rows: Tensor, state: Tensor) -> None:
        self.kv_cache[0][block] = (rows.T if self.shard.is_turned else rows).to(torch.bfloat16)
        self.kv_cache[1][block] = state.float()


def layer_regions(
    name: str,
    views: LayerCache,
    buffer: Tensor,
    model: ModelConfig,
    shard: TpShard,
    *,
    group: int,
    spec: MambaSpec,
) -> tuple[Region, ...]:
    """The planes x, g and recurrence of a layer's views, which lie in ``buffer``, memory 0."""
    conv, recurrence = views
    step = conv.shape.index(NUM_TAPS - 1, 1)  # the channels are a multiple of a head's
    channel = 3 - step
    whole = Region(
        layer=name,
        plane="conv",
        group=group,
        memory=0,
        offset=conv.data_ptr() - buffer.data_ptr(),
        num_blocks=len(conv),
        block_tokens=NUM_TAPS - 1,
        head_lo=0,
        head_hi=1,
        inner_nbytes=conv.shape[channel] * conv.element_size(),
        stride_block=conv.stride(0) * conv.element_size(),
        stride_head=1,
        stride_token=conv.stride(step) * conv.element_size(),
        channel_nbytes=conv.element_size(),
        stride_channel=conv.stride(channel) * conv.element_size(),
        state_tokens=spec.block_size,
    )
    nbytes = recurrence[0].numel() * recurrence.element_size()
    states = replace(
        whole,
        offset=recurrence.data_ptr() - buffer.data_ptr(),
        block_tokens=1,
        inner_nbytes=nbytes,
        stride_token=nbytes,
        channel_nbytes=recurrence.element_size(),
        stride_channel=recurrence.element_size(),
    )
    (x, _), ranks = conv_parts(model), (shard.tp_rank, shard.tp_size)
    return (
        *state_regions(whole, conv_parts(model), *ranks),
        *state_regions(states, (StatePart("recurrence", x.num_heads, x.num_channels),), *ranks),
    )
