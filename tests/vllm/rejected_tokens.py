"""Tokens of a draft that are rejected, in models that keep a state, on vLLM's CPU build.

Of what such a step needs vLLM 0.32 has for CPUs the scheduling, the metadata and the blocks. Its
convolution and its recurrence of Mamba2 do not look at how many tokens were accepted, nor at more
than one block of a request (``test_what_vllm_lacks_for_cpus``). So both are put in with PyTorch, by
the rules of vLLM's Triton kernels. And with prefix caching states are moved between blocks by
Triton kernels: here by vLLM's own copy of one request, at the places that its kernel decides on.

All of it is put in where a worker asks for :class:`Extension` (``worker_extension_cls``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.v1.worker import mamba_utils


def __getattr__(name: str) -> type:
    if name != "Extension":
        raise AttributeError(name)
    mamba_mixer2.causal_conv1d_update = convolution
    mamba_mixer2.selective_state_update = recurrence
    mamba_utils._resolve_fused_precopy = lambda context: None
    mamba_utils.stage_postprocess_inputs_to_gpu = _remember
    mamba_utils.postprocess_mamba_align_gpu = _keep_full_blocks
    return type(name, (), {})


def convolution(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any,
    activation: str | None,
    *,
    conv_state_indices: Any,
    num_accepted_tokens: Any = None,
    query_start_loc: Any = None,
    **_: Any,
) -> Any:
    """``x``: tokens of all requests, one each if no edges are given. ``conv_state_indices``: the
    first of each row is the block that the convolution's inputs are in.
    """
    kept, out = weight.shape[1] - 1, torch.empty_like(x)
    edges = range(len(x) + 1) if query_start_loc is None else query_start_loc.tolist()
    for row, (lo, hi) in enumerate(zip(edges, edges[1:], strict=False)):
        if lo == hi:
            continue
        state = conv_state[conv_state_indices.view(len(conv_state_indices), -1)[row, 0]]
        offset = 0 if num_accepted_tokens is None else int(num_accepted_tokens[row]) - 1
        seen = torch.cat([state[:, offset : offset + kept], x[lo:hi].T], 1)
        found = F.conv1d(seen[None], weight[:, None], bias, groups=len(seen))[0]
        out[lo:hi] = (F.silu(found) if activation else found).T
        state[:, : seen.shape[1] - 1] = seen[:, 1:]
    return out


def recurrence(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    dt_bias: Any,
    *,
    state_batch_indices: Any,
    out: Any,
    num_accepted_tokens: Any = None,
    cu_seqlens: Any = None,
    **_: Any,
) -> None:
    """Of each row the state after its token t goes into the row's block t; it begins with the one
    after the last token that was accepted. ``state``: [block][head][channel][element].
    """
    heads_of_group = x.shape[1] // B.shape[1]
    edges = range(len(x) + 1) if cu_seqlens is None else cu_seqlens.tolist()
    blocks = state_batch_indices.view(len(state_batch_indices), -1).tolist()
    for row, (lo, hi) in enumerate(zip(edges, edges[1:], strict=False)):
        first = 0 if num_accepted_tokens is None else int(num_accepted_tokens[row]) - 1
        now = state[blocks[row][first]].float()
        for number, token in enumerate(range(lo, hi)):
            step = F.softplus(dt[token] + dt_bias)
            b, c = (each[token].repeat_interleave(heads_of_group, 0)[:, None] for each in (B, C))
            now = now * torch.exp(step[..., None] * A) + (step * x[token])[..., None] * b
            out[token] = (now * c).sum(-1) + D * x[token]
            state[blocks[row][number]] = now


_step: dict[str, Any] = {}


def _remember(
    ctx: Any, step: Any, req_ids: Any, num_reqs: int, requests: Any, state_idx: Any
) -> None:
    _step.update(step=step, req_ids=req_ids[:num_reqs], requests=requests, state_idx=state_idx)
    ctx.is_initialized = True


def _keep_full_blocks(
    *,
    bufs: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Any,
    num_accepted_tokens_cpu_tensor: Any,
    kv_cache_config: Any,
    forward_context: Any,
    mamba_state_copy_funcs: Any,
    **_: Any,
) -> None:
    """The state after the last full block goes into that block, as vLLM's Triton kernel decides."""
    copies = bufs.preprocess
    copies.offset = 0
    step, found = _step["step"], num_accepted_tokens_gpu[:num_reqs].clone()
    block_tokens = copies.mamba_spec.block_size
    for row, req_id in enumerate(_step["req_ids"][:num_reqs]):
        request = _step["requests"][req_id]
        drafted = len(step.scheduled_spec_decode_tokens.get(req_id, ()))
        sure = request.num_computed_tokens + step.num_scheduled_tokens[req_id] - drafted
        full = (sure + int(found[row]) - 1) // block_tokens * block_tokens
        if full < sure:
            continue
        source, target = _step["state_idx"][req_id], full // block_tokens - 1
        if source == target:
            found[row] = 1
        mamba_utils.collect_mamba_copy_meta(
            *(copies, kv_cache_config, mamba_state_copy_funcs, copies.mamba_group_ids),
            *(source, target, full - sure, request, forward_context),
        )
    mamba_utils.do_mamba_copy_block(copies)
    num_accepted_tokens_cpu_tensor[:num_reqs].copy_(found)
