"""Ask a layer of the model where its attention backend puts what: the method that is called here is
the one by which vLLM's forward pass fills the cache, with a scratch cache in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.interior import Trace, Write, trace_writes
from kvxfer.integrations.vllm.specs import LayerSpec

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

    Args:
        modules: vLLM's attention layers by name.
        dtype: the model's, in which K and V come.

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
    """Three blocks on the view's device; the order of the dimensions in memory is the view's, and
    there are no gaps.
    """
    shape = (3, *view.shape[1:])
    order = sorted(range(view.dim()), key=view.stride, reverse=True)
    dense = torch.empty([shape[i] for i in order], dtype=view.dtype, device=view.device)
    return dense.permute([order.index(i) for i in range(view.dim())])
