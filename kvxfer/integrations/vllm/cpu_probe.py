"""Ask the operators with which vLLM writes its cache on a CPU where they put what."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.interior import Trace, Write, trace_writes
from kvxfer.integrations.vllm.specs import LayerSpec


def trace_cpu(
    layer: str, spec: LayerSpec, *, num_tokens: int, dtype: torch.dtype, cache_dtype: str = "auto"
) -> Trace:
    """The trace of this platform's writer for kernel blocks of ``num_tokens``.

    Args:
        dtype: the model's, in which K and V come.
        cache_dtype: vLLM's name for what the cache keeps of them.

    Raises:
        ConfigError: a cache that this build of vLLM, or this machine, cannot write.
    """
    if not spec.is_latent and spec.head_size_v != spec.head_size:
        raise ConfigError(
            f"{layer}: head_size: expected one for K and V on a CPU, got {spec.head_size} and "
            f"{spec.head_size_v}; serve this model without disaggregation"
        )
    try:
        key = (spec.head_size, spec.dtype, spec.quantisation, spec.is_latent)
        return _trace(*key, num_tokens, dtype, cache_dtype)
    except (ImportError, AttributeError, TypeError, NotImplementedError, RuntimeError) as exc:
        raise ConfigError(
            f"{layer}: interior: expected an operator that writes the KV cache on this machine, "
            f"got {type(exc).__name__}: {exc}; use a version of vLLM from 0.26 to 0.33"
        ) from exc


# One answer for each kind of block; a model has a few kinds in dozens of layers.
@functools.cache
def _trace(
    head_size: int,
    kept_dtype: torch.dtype,
    quantisation: str,
    is_latent: bool,
    num_tokens: int,
    dtype: torch.dtype,
    cache_dtype: str,
) -> Trace:
    spec = LayerSpec(
        block_tokens=num_tokens,
        num_kv_heads=1,
        head_size=head_size,
        head_size_v=0 if is_latent else head_size,
        dtype=kept_dtype,
        quantisation=quantisation,
        is_latent=is_latent,
    )
    write = _writer(spec, num_tokens, dtype, cache_dtype)
    return trace_writes(write, spec=spec, num_tokens=num_tokens, dtype=dtype)


def _writer(spec: LayerSpec, num_tokens: int, dtype: torch.dtype, cache_dtype: str) -> Write:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if spec.is_latent:
        return _latent_writer()
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    # Said only where it matters: older versions take no such argument.
    named: tuple[Any, ...] = () if spec.quantisation == "none" else (cache_dtype,)
    isa = cpu_attn._get_attn_isa(dtype, num_tokens, spec.head_size, *named)

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        blocks, heads, tokens, _ = cache.shape
        halves = cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
        scales = (1.0, 1.0, *named) if named else ()
        ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa, *scales)

    return write


def _latent_writer() -> Write:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        del value
        # The method uses nothing of its object; its two parts are written side by side.
        rank = key.shape[-1] // 2
        parts = (key[:, 0, :rank], key[:, :, rank:])
        CPUMLAImpl.do_kv_cache_update(None, *parts, cache, slots, "auto", None)

    return write
