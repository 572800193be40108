"""Ask what writes vLLM's cache where it puts what: on a CPU the platform's operator, on a GPU the
method by which vLLM's forward pass fills the cache of a layer, with a scratch cache in its place.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.interior import Rows, Trace, Write, trace_rows, trace_writes
from kvxfer.integrations.vllm.specs import LayerSpec


def trace_cpu(
    layer: str, spec: LayerSpec, *, num_tokens: int, dtype: torch.dtype, cache_dtype: str = "auto"
) -> Trace:
    """The trace of this platform's writer for kernel blocks of ``num_tokens``. Raises ConfigError
    for a cache that this build of vLLM, or this machine, cannot write.
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
    write = _operator(spec, num_tokens, dtype, cache_dtype)
    return trace_writes(write, spec=spec, num_tokens=num_tokens, dtype=dtype)


def _operator(spec: LayerSpec, num_tokens: int, dtype: torch.dtype, cache_dtype: str) -> Write:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if spec.is_latent:
        return _latent_operator()
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


def _latent_operator() -> Write:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        del value
        # The method uses nothing of its object; its two parts are written side by side.
        rank = key.shape[-1] // 2
        parts = (key[:, 0, :rank], key[:, :, rank:])
        CPUMLAImpl.do_kv_cache_update(None, *parts, cache, slots, "auto", None)

    return write


_log = logging.getLogger("kvxfer.integrations")


def trace_layer(
    layer: str,
    spec: LayerSpec,
    view: Tensor,
    modules: Mapping[str, Any],
    *,
    dtype: torch.dtype,
) -> Trace | None:
    """The trace of this layer's writer for kernel blocks ``[H, N, C]`` as those of ``view``.

    Not asked are layers whose spec leaves nothing open: a latent fills its cell, and what is in the
    cell of a quantised cache depends on scales that the spec does not promise. Nor can those be
    asked whose backend writes the cache within its attention, or that this version has no module
    of. The spec is then believed.

    Raises:
        ConfigError: a writer that mixes or drops elements.
    """
    writer = _writer(layer, modules)
    is_plain = spec.quantisation == "none" and spec.num_head_slots is None
    is_square = not spec.is_latent and spec.head_size == spec.head_size_v
    cell_nbytes = view.shape[3] * view.element_size()
    if writer is None or not is_plain or not is_square or cell_nbytes != spec.dense_nbytes:
        return None
    pool = _scratch(view)
    try:
        return trace_writes(writer, spec=spec, num_tokens=view.shape[2], dtype=dtype, pool=pool)
    except ConfigError:
        raise
    except Exception as exc:  # noqa: BLE001 (a backend that needs more than this says nothing)
        _log.warning(
            "%s: the interior of its blocks is taken from the KV cache spec: its attention backend "
            "could not be asked (%s: %s)",
            *(layer, type(exc).__name__, exc),
        )
        return None


@functools.cache
def trace_packed(
    quantisation: str, num_tokens: int, cell_nbytes: int, device: torch.device
) -> Rows | None:
    """Where vLLM's operator puts each token of a block of packed latents; None of those that only
    a model's own kernel writes.
    """
    write = _packed_writer(quantisation, cell_nbytes, device)
    if write is None or device.type == "cpu":
        return None
    pool = torch.empty(3, num_tokens, cell_nbytes, dtype=torch.uint8, device=device)
    try:
        return trace_rows(write, pool)
    except (ImportError, AttributeError, TypeError, NotImplementedError, RuntimeError) as exc:
        _log.warning(
            "%s of %d bytes: the interior of its blocks is taken from the KV cache spec: its "
            "operator could not be asked (%s: %s)",
            *(quantisation, cell_nbytes, type(exc).__name__, exc),
        )
        return None


def _packed_writer(
    quantisation: str, cell_nbytes: int, device: torch.device
) -> Callable[[Tensor, Tensor], None] | None:
    from vllm import _custom_ops as ops

    def ones(num: int) -> Tensor:
        return torch.ones(1, num, dtype=torch.bfloat16, device=device)

    if (quantisation, cell_nbytes) == ("none", 132):
        return lambda cache, slots: ops.indexer_k_quant_and_cache(
            ones(128), cache, slots, 128, "ue8m0"
        )
    if quantisation.endswith("_ds_mla") and cell_nbytes in (656, 352):
        scale = torch.ones(1, device=device)
        return lambda cache, slots: ops.concat_and_cache_mla(
            ones(512), ones(64), cache, slots, quantisation, scale
        )
    return None


def _writer(layer: str, modules: Mapping[str, Any]) -> Write | None:
    module = modules.get(layer)
    # A layer that reads the KV of another one writes none.
    module = modules.get(getattr(module, "kv_sharing_target_layer_name", None) or layer)
    backend = getattr(module, "attn_backend", None)
    update = getattr(getattr(module, "impl", None), "do_kv_cache_update", None)
    if update is None or getattr(backend, "forward_includes_kv_cache_update", True):
        return None

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        update(module, key, value, cache, slots)

    return write


def _scratch(view: Tensor) -> Tensor:
    """Three blocks on the view's device, in its order of dimensions, without gaps."""
    shape = (3, *view.shape[1:])
    order = sorted(range(view.dim()), key=view.stride, reverse=True)
    dense = torch.empty([shape[i] for i in order], dtype=view.dtype, device=view.device)
    return dense.permute([order.index(i) for i in range(view.dim())])
