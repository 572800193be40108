"""What a layer's own attention backend says of its cache, on the registered views' own strides."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm import regions as regions_module
from kvxfer.integrations.vllm.facts import CacheModel
from kvxfer.integrations.vllm.interior import Cells, Named, Opaque, Plane, look_inside
from kvxfer.integrations.vllm.probes import trace_layer
from kvxfer.integrations.vllm.regions import locate
from kvxfer.integrations.vllm.specs import LayerSpec

# vLLM loads parts of torch that other parts of torch call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

HEADS, TOKENS, CHANNELS = 3, 16, 16  # vLLM's kernel never ends with fewer than 32 elements a token
CELL_NBYTES = 2 * CHANNELS * 2
SPEC = LayerSpec(
    block_tokens=TOKENS,
    num_kv_heads=HEADS,
    head_size=CHANNELS,
    head_size_v=CHANNELS,
    dtype=torch.bfloat16,
)
PLANES = [("k", 0), ("v", 2 * CHANNELS)]

Update = Callable[[Any, Tensor, Tensor, Tensor, Tensor], None]


def hnd(num_blocks: int = 5) -> Tensor:
    """A view [B, H, N, C] whose heads are outermost in a block."""
    return torch.zeros(num_blocks, HEADS, TOKENS, 2 * CHANNELS, dtype=torch.bfloat16)


def nhd(num_blocks: int = 5) -> Tensor:
    """A view [B, H, N, C] whose tokens are outermost in a block."""
    pool = torch.zeros(num_blocks, TOKENS, HEADS, 2 * CHANNELS, dtype=torch.bfloat16)
    return pool.transpose(1, 2)


def packed(num_blocks: int = 5) -> Tensor:
    """Blocks of the second of three layers, which lie side by side for each block."""
    pool = torch.zeros(num_blocks, 3, TOKENS, HEADS, 2 * CHANNELS, dtype=torch.bfloat16)
    return pool[:, 1].transpose(1, 2)


def cells_of(view: Tensor) -> Cells:
    return Cells(
        num_slots=view.shape[1],
        num_tokens=view.shape[2],
        cell_nbytes=view.shape[3] * view.element_size(),
        stride_slot=view.stride(1) * view.element_size(),
        stride_token=view.stride(2) * view.element_size(),
    )


def by_split(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """As vLLM's GPU backends: K before V in a cell, tokens by their slots."""
    keys, values = cache.transpose(1, 2).chunk(2, dim=-1)
    blocks, tokens = slots // cache.shape[2], slots % cache.shape[2]
    keys[blocks, tokens] = key
    values[blocks, tokens] = value


def v_first(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    by_split(layer, value, key, cache, slots)


def only_k(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    by_split(layer, key, torch.zeros_like(value), cache, slots)


def breaks(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    raise RuntimeError("needs a plan")


def module(update: Update, *, inside_forward: bool = False, target: str | None = None) -> Any:
    """What vLLM's attention layers have of what is asked of them."""
    found = SimpleNamespace(
        attn_backend=SimpleNamespace(forward_includes_kv_cache_update=inside_forward),
        kv_sharing_target_layer_name=target,
    )
    found.impl = SimpleNamespace(do_kv_cache_update=lambda layer, *args: update(layer, *args))
    return found


def inside(view: Tensor, modules: dict[str, Any], spec: LayerSpec = SPEC) -> Named | Opaque:
    trace = trace_layer("a", spec, view, modules, dtype=torch.bfloat16)
    return look_inside("a", spec, cells_of(view), trace=trace)


def planes_of(view: Tensor) -> Named:
    stride_token = view.stride(2) * 2
    return Named(
        tuple(
            Plane(plane=name, offset=offset, inner_nbytes=2 * CHANNELS, stride_token=stride_token)
            for name, offset in PLANES
        )
    )


@pytest.mark.parametrize("make", [hnd, nhd, packed])
def test_k_before_v_is_confirmed_on_any_strides(make: Callable[[], Tensor]) -> None:
    view = make()
    asked: list[tuple[Any, ...]] = []

    def update(layer: Any, *args: Tensor) -> None:
        asked.append((layer, args[2].stride()[1:]))
        by_split(layer, *args)

    layer = module(update)
    assert inside(view, {"a": layer}) == planes_of(view)
    assert all(of is layer for of, _ in asked)
    assert {strides for _, strides in asked} == {view.stride()[1:]}
    assert not view.any()  # the cache itself was not touched


@pytest.mark.parametrize("make", [hnd, nhd])
def test_another_order_moves_whole(make: Callable[[], Tensor]) -> None:
    view = make()
    found = inside(view, {"a": module(v_first)})
    assert isinstance(found, Opaque)
    assert found == inside(make(), {"a": module(v_first)})
    other = nhd if make is hnd else hnd
    assert found != inside(other(), {"a": module(v_first)})


def test_a_writer_that_drops_elements_is_refused() -> None:
    with pytest.raises(ConfigError, match="to a place of its own"):
        inside(hnd(), {"a": module(only_k)})


@pytest.mark.parametrize(
    "modules",
    [
        {},
        {"a": SimpleNamespace()},
        {"a": module(only_k, inside_forward=True)},
        {"a": module(breaks)},
    ],
    ids=["no module", "no backend", "written within the attention", "cannot be called"],
)
def test_who_cannot_be_asked_is_believed(modules: dict[str, Any]) -> None:
    view = nhd()
    assert trace_layer("a", SPEC, view, modules, dtype=torch.bfloat16) is None
    assert inside(view, modules) == planes_of(view)


def test_a_failure_to_ask_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    inside(hnd(), {"a": module(breaks)})
    assert "RuntimeError: needs a plan" in caplog.text


def test_the_layer_whose_kv_is_shared_is_asked() -> None:
    modules = {"a": module(only_k, target="b"), "b": module(by_split)}
    assert inside(hnd(), modules) == planes_of(hnd())


@pytest.mark.parametrize(
    "fields",
    [
        {"quantisation": "fp8_per_tensor"},
        {"num_head_slots": 4},
        {"head_size_v": 4},
        {"head_size": 16, "head_size_v": 0, "is_latent": True},
    ],
)
def test_what_the_spec_leaves_open_is_not_asked(fields: dict[str, Any]) -> None:
    named: dict[str, Any] = {"block_tokens": TOKENS, "num_kv_heads": HEADS, "dtype": torch.bfloat16}
    spec = LayerSpec(**(named | {"head_size": CHANNELS, "head_size_v": CHANNELS} | fields))
    assert trace_layer("a", spec, hnd(), {"a": module(only_k)}, dtype=torch.bfloat16) is None


def test_cells_of_other_sizes_are_not_asked() -> None:
    view = torch.zeros(5, HEADS, TOKENS, 2 * CHANNELS + 4, dtype=torch.bfloat16)
    assert trace_layer("a", SPEC, view, {"a": module(only_k)}, dtype=torch.bfloat16) is None


# ------------------------------------------------------------------------------ on a device


def model_of(modules: dict[str, Any]) -> CacheModel:
    return CacheModel(
        dtype=torch.bfloat16, num_kv_heads=HEADS, head_counts=frozenset({HEADS}), layers=modules
    )


def test_all_caches_of_a_rank_are_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions_module, "READABLE_DEVICES", {"cpu", "meta"})
    specs = dict.fromkeys("ab", (0, SPEC))
    monkeypatch.setattr(regions_module, "layer_specs", lambda config: specs)
    views = {"a": hnd(), "b": hnd().to("meta")}
    with pytest.raises(ConfigError, match=r"cache on cpu \(a\), got meta \(b\)"):
        locate(views, SimpleNamespace(num_blocks=5), tp_rank=0, tp_size=1, model=model_of({}))


def on_gpu(view: Tensor) -> Tensor:
    return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="cuda").zero_()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [hnd, nhd, packed])
def test_views_on_a_gpu(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Tensor]) -> None:
    views = {name: on_gpu(make()) for name in "ab"}
    specs = dict.fromkeys("ab", (0, SPEC))
    monkeypatch.setattr(regions_module, "layer_specs", lambda config: specs)
    modules = {name: module(by_split) for name in "ab"}
    located = locate(
        views, SimpleNamespace(num_blocks=5), tp_rank=0, tp_size=1, model=model_of(modules)
    )
    assert [(region.layer, region.plane, region.memory) for region in located.regions] == [
        *[("a", "k", 0), ("a", "v", 0), ("b", "k", 1), ("b", "v", 1)],
    ]
    assert {region.stride_token for region in located.regions} == {views["a"].stride(2) * 2}
    for name, flat, info in zip("ab", *(located.memory.tensors, located.memory.infos), strict=True):
        assert flat.data_ptr() == views[name].untyped_storage().data_ptr()
        assert (info.device, info.nbytes) == ("cuda", flat.numel())


@pytest.mark.gpu
@pytest.mark.parametrize("make", [hnd, nhd])
def test_vllms_own_backend_on_a_gpu(make: Callable[[], Tensor]) -> None:
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

    impl = FlashAttentionImpl.__new__(FlashAttentionImpl)
    impl.attn_type, impl.head_size, impl.kv_cache_dtype = AttentionType.DECODER, CHANNELS, "auto"
    one = torch.ones((), device="cuda")
    layer = SimpleNamespace(
        attn_backend=FlashAttentionBackend, impl=impl, _k_scale=one, _v_scale=one
    )
    view = on_gpu(make())
    trace = trace_layer("a", SPEC, view, {"a": layer}, dtype=torch.bfloat16)
    assert trace is not None
    assert look_inside("a", SPEC, cells_of(view), trace=trace) == planes_of(view)
