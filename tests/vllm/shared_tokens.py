"""Ranks that share the tokens of a request (decode context parallelism), on vLLM's CPU build.

Of that vLLM 0.32 has for CPUs the scheduling, the block tables, and how ranks gather and add up.
Its attention does not return the logarithms of its sums, with which outputs of ranks are added up;
its operator for the slots of tokens knows one rank alone; and what makes an output ready to be
added up is a Triton kernel (``test_what_vllm_lacks_for_cpus``). These are put in with PyTorch where
a worker asks for :class:`Extension` (``worker_extension_cls``). The blocks, what lies in them and
where stay vLLM's: ``slots_of`` is compared with its own kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.ops import dcp
from vllm.v1.worker import block_table


def __getattr__(name: str) -> type:
    if name != "Extension":
        raise AttributeError(name)
    for kind in (CPUAttentionBackendImpl, CPUMLAImpl):
        kind.__init__ = _noting_shares(kind.__init__)
        kind.can_return_lse_for_decode = True
    CPUMLAImpl.forward_mqa = attend_latents
    CPUAttentionBackendImpl.do_kv_cache_update = write_heads
    CPUAttentionBackendImpl.forward = attend_heads
    dcp.correct_attn_out = weigh
    block_table.ComputeSlotMappingKernel.__call__ = write_slots
    return type(name, (), {})


def _noting_shares(begin: Any) -> Any:
    def make(impl: Any, *arguments: Any, **more: Any) -> None:
        begin(impl, *arguments, **more)
        impl.dcp_world_size = get_dcp_group().world_size
        impl.run = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size

    return make


# ------------------------------------------------------------------ attention over a rank's tokens


def attend_latents(
    impl: Any, query: Any, cache: Any, metadata: Any, layer: object
) -> tuple[Any, Any]:
    """One query a request, of all heads. ``cache``: [block][token in it][element]. Returns
    [request][head][element], and for each head the logarithm of its sum.
    """
    query = torch.cat(query, -1) if isinstance(query, tuple) else query
    out = query.new_zeros(*query.shape[:2], impl.kv_lora_rank)
    sums = query.new_full(query.shape[:2], -torch.inf)
    tables, lengths = metadata.decode.block_table.tolist(), metadata.decode.seq_lens.tolist()
    for row, (blocks, length) in enumerate(zip(tables, lengths, strict=True)):
        if length:
            kept = cache[blocks].flatten(0, 1)[:length]
            scores = query[row] @ kept.T * impl.scale
            sums[row] = scores.logsumexp(-1)
            out[row] = scores.softmax(-1) @ kept[:, : impl.kv_lora_rank]
    return out, sums


def attend_heads(
    impl: Any,
    layer: object,
    query: Any,
    key: Any,
    value: object,
    cache: Any,
    metadata: Any,
    output: Any,
    **_: object,
) -> Any:
    """Queries of all ranks' heads over the tokens that this one keeps, those of the step included;
    then the heads of this rank over all tokens.
    """
    if metadata is None:  # vLLM warms up
        return output
    keys, values = _planes(cache, key.shape[-1])
    group, edges = get_dcp_group(), metadata.query_start_loc.tolist()
    query = group.all_gather(query[: metadata.num_actual_tokens].contiguous(), dim=1)
    out, sums = torch.zeros_like(query), query.new_full(query.shape[:2], -torch.inf)
    for row, (lo, hi) in enumerate(zip(edges, edges[1:], strict=False)):
        length = int(metadata.seq_lens[row])
        tokens = _kept(length, group.world_size, group.rank_in_group, impl.run)
        blocks = metadata.block_table[row, : -(-len(tokens) // keys.shape[-1])].long()
        # [head][channel][token] and [head][token][channel]
        k = keys[blocks].permute(1, 2, 0, 3).flatten(2)[..., : len(tokens)]
        v = values[blocks].transpose(0, 1).flatten(1, 2)[:, : len(tokens)]
        q = query[lo:hi].unflatten(1, (group.world_size, len(k), -1))
        scores = torch.einsum("qrhgd,hdt->qrhgt", q, k) * impl.scale
        is_later = tokens > torch.arange(length - (hi - lo), length)[:, None]
        scores.masked_fill_(is_later[:, None, None, None], -torch.inf)
        sums[lo:hi] = scores.logsumexp(-1).flatten(1)
        weights = scores.softmax(-1).nan_to_num(0)  # of a query that sees none of them
        out[lo:hi] = torch.einsum("qrhgt,htd->qrhgd", weights, v).flatten(1, 3)
    output[: len(out)].copy_(dcp.cp_lse_ag_out_rs(out, sums, group).view_as(output[: len(out)]))
    return output


def write_heads(impl: object, layer: object, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """Where vLLM's operator writes float32, but for tokens of other ranks."""
    keys, values = _planes(cache, key.shape[-1])
    (own,) = (slots >= 0).nonzero(as_tuple=True)
    block, at = slots[own] // keys.shape[-1], slots[own] % keys.shape[-1]
    keys[block, :, :, at] = key[own]
    values[block, :, at] = value[own]


def _planes(cache: Any, size: int) -> tuple[Any, Any]:
    """K as [block][head][channel][token], V as [block][head][token][channel]."""
    num_blocks, num_heads, block_tokens, _ = cache.shape
    k, v = cache.view(num_blocks, num_heads, 2, block_tokens * size).unbind(2)
    return k.unflatten(2, (size, block_tokens)), v.unflatten(2, (block_tokens, size))


def _kept(length: int, size: int, rank: int, run: int) -> Any:
    """Which of the first tokens a rank keeps, in order."""
    tokens = torch.arange(length)
    return tokens[tokens // run % size == rank]


def weigh(out: Any, sums: Any, rank: int, context: object, **_: object) -> tuple[Any, Any]:
    """This rank's part of the output of all, and the logarithms of all sums. ``sums``: [rank]
    [request][head].
    """
    total = sums.logsumexp(0)
    return out * torch.exp(sums[rank] - total)[..., None], total


# ------------------------------------------------------------------ where a token lies


def slots_of(positions: Any, blocks: Any, block_tokens: int, size: int, rank: int, run: int) -> Any:
    """Where a rank of ``size`` writes the tokens of one request; -1: it does not keep them."""
    in_block = positions % (block_tokens * size)
    own = in_block // (size * run) * run + in_block % run
    slots = blocks[positions // (block_tokens * size)].long() * block_tokens + own
    return torch.where(in_block // run % size == rank, slots, -1)


def write_slots(
    kernel: object,
    num_requests: int,
    num_tokens: int,
    most_tokens: int,
    starts: Any,
    positions: Any,
    tables: Any,
    table_stride: int,
    slots: Any,
    *shares: int,
) -> None:
    """``shares``: the last arguments of :func:`slots_of`."""
    slots[num_tokens:most_tokens] = -1
    edges = starts[: num_requests + 1].tolist()
    for row, (lo, hi) in enumerate(zip(edges, edges[1:], strict=False)):
        slots[lo:hi] = slots_of(positions[lo:hi], tables[row], *shares)
