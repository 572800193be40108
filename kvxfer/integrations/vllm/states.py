"""Where vLLM keeps the states of recurrent layers: parts of its pages, as regions.

A page of such a layer has the last inputs of a convolution, then the recurrence. Which channels a
rank has of each projection follows from the shapes on this rank, the number of ranks and the kind
of layer; the tests compare with what vLLM's layers compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.facts import CacheModel
from kvxfer.integrations.vllm.specs import StateSpec
from kvxfer.transfer.layout import Region
from kvxfer.transfer.states import StatePart, state_regions

_RUN_CHANNELS = 16
"""Channels that are moved as one, of a convolution whose channels belong to no heads, where up to
64 ranks have a multiple of them.
"""


@dataclass(frozen=True, slots=True)
class Rank:
    tp_rank: int
    tp_size: int


def regions_of_state(
    layer: str,
    view: Tensor,
    spec: StateSpec,
    rank: Rank,
    model: CacheModel,
    *,
    group: int,
    memory: int,
    offset: int,
) -> tuple[Region, ...]:
    """Regions of a layer's pages ``[B, 1, 1, bytes]``, which begin at ``offset`` of a memory.

    Raises:
        ConfigError: pages or a state that cannot be described.
    """
    shape, nbytes = tuple(view.shape), sum(_nbytes(spec, i) for i in range(len(spec.shapes)))
    if len(shape) != 4 or view.element_size() != 1 or shape[1:3] != (1, 1) or shape[3] < nbytes:
        raise ConfigError(
            f"{layer}: expected pages [B, 1, 1, {nbytes} bytes or more], got {view.dtype} of shape "
            f"{shape}; use vLLM 0.32 or 0.33"
        )
    if spec.is_replicated:
        rank = Rank(0, 1)
    found: list[Region] = []
    num_drafted = _num_drafted_steps(layer, spec, model)
    for number, parts in enumerate(_parts(layer, spec, rank, model)):
        steps, stride_step, num_channels, stride_channel = _axes(layer, spec, number)
        if _is_convolution(spec, number):
            steps -= num_drafted
        itemsize = spec.dtypes[number].itemsize
        whole = Region(
            layer=layer,
            plane="state",
            group=group,
            memory=memory,
            offset=offset,
            num_blocks=shape[0],
            block_tokens=steps,
            head_lo=0,
            head_hi=1,
            inner_nbytes=num_channels * itemsize,
            stride_block=view.stride(0),
            stride_head=1,
            stride_token=stride_step * itemsize,
            channel_nbytes=itemsize,
            stride_channel=stride_channel * itemsize,
            state_tokens=spec.state_tokens,
        )
        try:
            found += state_regions(whole, parts, rank.tp_rank, rank.tp_size)
        except ValueError as exc:
            raise _unknown(layer, spec, str(exc)) from exc
        offset += _nbytes(spec, number)
    return tuple(found)


def _nbytes(spec: StateSpec, number: int) -> int:
    return math.prod(spec.shapes[number]) * spec.dtypes[number].itemsize


def _is_convolution(spec: StateSpec, number: int) -> bool:
    return number == 0 and spec.kind != "LINEAR"


def _num_drafted_steps(layer: str, spec: StateSpec, model: CacheModel) -> int:
    """Steps of a convolution that do not count: vLLM's kernels keep the inputs of the tokens that
    may be rejected behind its own. What prefill leaves, and what a first step of decode reads, is
    in front of them: with one accepted token the offset is 0.

    Raises ConfigError for a layer that has no such room: vLLM has no way back for it.
    """
    if not spec.num_drafted_tokens:
        return 0
    module = model.layers.get(layer)
    found = (getattr(module, name, None) for name in ("conv1d", "conv", "q_conv1d"))
    kept = next((conv.weight.shape[-1] - 1 for conv in found if conv is not None), None)
    steps = _axes(layer, spec, 0)[0]
    if spec.kind == "LINEAR" or kept is None or steps != kept + spec.num_drafted_tokens:
        raise ConfigError(
            f"{layer}: expected a convolution of {spec.kind} with room for "
            f"{spec.num_drafted_tokens} tokens that may be rejected, got {steps} steps where its "
            f"kernel looks at {kept or 'unknown'}: this vLLM cannot take a rejected token back out "
            "of its state; serve this model without speculative decoding"
        )
    return spec.num_drafted_tokens


def _axes(layer: str, spec: StateSpec, number: int) -> tuple[int, int, int, int]:
    """(steps, stride of a step, channels, stride of a channel), in elements. A recurrence has one
    step, and all its elements are channels.
    """
    shape = spec.shapes[number]
    if not _is_convolution(spec, number):
        return 1, math.prod(shape), math.prod(shape), 1
    if len(shape) != 2:
        raise _unknown(layer, spec, f"a convolution of shape {shape}")
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    if is_conv_state_dim_first():
        return shape[1], 1, shape[0], shape[1]
    return shape[0], shape[1], shape[1], 1


def _parts(
    layer: str, spec: StateSpec, rank: Rank, model: CacheModel
) -> tuple[tuple[StatePart, ...], ...]:
    """What each tensor of the state has, one behind the other, of all ranks together."""
    kind, shapes, size = spec.kind, spec.shapes, rank.tp_size
    ranks_of = {"LINEAR": (3,), "SHORT_CONV": (2,), "MAMBA1": (2, 2)}.get(kind, (2, 3))
    if tuple(map(len, shapes)) != ranks_of:
        raise _unknown(layer, spec, f"shapes {shapes}")
    channels = _axes(layer, spec, 0)[2]
    if kind == "SHORT_CONV":
        return ((_runs(channels * size),),)
    heads, *sizes = shapes[-1]
    recurrence = (StatePart("recurrence", heads * size, math.prod(sizes)),)
    if kind == "LINEAR":
        return (recurrence,)
    if kind == "MAMBA1":
        return ((_runs(channels * size),), recurrence)
    if kind == "MAMBA2":
        head_size, state_size = sizes
        num_groups, rest = divmod(channels - heads * head_size, 2 * state_size)
        if num_groups < 1 or rest:
            raise _unknown(layer, spec, f"shapes {shapes}")
        total = num_groups * size
        if num_groups == 1 and size > 1:  # one of each rank, or the same one on all
            total = model.num_state_groups or 0
            if total not in (1, size):
                raise _unknown(
                    layer, spec, f"{model.num_state_groups or 'no'} groups in its config"
                )
        x = StatePart("x", heads * size, head_size)
        return (
            (x, StatePart("B", total, state_size), StatePart("C", total, state_size)),
            recurrence,
        )
    if kind == "GDN_ATTN":
        head_v, head_k = sizes
        num_keys, rest = divmod(channels - heads * head_v, 2 * head_k)
        if num_keys < 1 or rest:
            raise _unknown(layer, spec, f"shapes {shapes}")
        q, k = (StatePart(name, num_keys * size, head_k) for name in "qk")
        return ((q, k, StatePart("v", heads * size, head_v)), recurrence)
    raise _unknown(layer, spec, "no description of it")


def _runs(num_channels: int) -> StatePart:
    run = _RUN_CHANNELS if num_channels % (64 * _RUN_CHANNELS) == 0 else 1
    return StatePart("x", num_channels // run, run)


def _unknown(layer: str, spec: StateSpec, got: str) -> ConfigError:
    return ConfigError(
        f"{layer}: expected a state of Mamba, Mamba2, a gated delta net, a short convolution or "
        f"linear attention, got {spec.kind} with {got}; serve this model without disaggregation"
    )
