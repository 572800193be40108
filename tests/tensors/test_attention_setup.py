"""Specs from layers, backends and builders by group, metadata of a step."""

from __future__ import annotations

import copy
import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvxfer.cache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvxfer.tensors.attention import (
    AttentionBackend,
    CommonAttentionMetadata,
    ForwardConfig,
    MultipleOf,
    attention_layers,
    build_attn_metadata,
    get_kv_cache_spec,
    init_attn_backend,
)


@dataclass(frozen=True)
class Built:
    """What a builder makes: itself and what it was given."""

    builder: Builder
    prefix: int
    common: CommonAttentionMetadata


class Builder:
    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        config: ForwardConfig,
        device: torch.device | str,
    ) -> None:
        self.given = (kv_cache_spec, layer_names, config, device)
        self.num_built = 0

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> Built:
        self.num_built += 1
        return Built(self, common_prefix_len, common_attn_metadata)


class WorkspaceBuilder(Builder):
    workspace: Tensor | None = None

    def get_workspace_buffer(self) -> Tensor:
        if self.workspace is None:
            self.workspace = torch.zeros(4)
        return self.workspace

    def set_workspace_buffer(self, workspace: Tensor) -> None:
        assert self.workspace is None
        self.workspace = workspace


class PlainBackend:
    @staticmethod
    def get_name() -> str:
        return "PLAIN"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        return (0, 1, 2, 3, 4)

    @staticmethod
    def get_supported_kernel_block_sizes() -> Sequence[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class ScratchBackend(PlainBackend):
    @staticmethod
    def get_name() -> str:
        return "SCRATCH"

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return WorkspaceBuilder


class OtherScratchBackend(ScratchBackend):
    pass


@dataclass
class Layer:
    num_kv_heads: int = 2
    head_size: int = 8
    sliding_window: int | None = None
    kv_sharing_target_layer_name: str | None = None
    backend: type[AttentionBackend] = PlainBackend
    kv_cache: Tensor = field(default_factory=lambda: torch.zeros(0))

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend


class Kind(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


def settings(layers: dict[str, Any], **model: Any) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(block_size=16),
        model_config=SimpleNamespace(**{"dtype": torch.bfloat16, **model}),
    )


def full(dtype: str = "bfloat16") -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=dtype)


WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=4, head_size=8, dtype="bfloat16", sliding_window=48
)
HYBRID = {
    "layers.0": Layer(num_kv_heads=4, sliding_window=48),
    "layers.1": Layer(),
    "layers.2": Layer(num_kv_heads=4, sliding_window=48),
    "experts.2": SimpleNamespace(num_experts=8),
    "layers.3": Layer(kv_sharing_target_layer_name="layers.1"),
}


def test_a_spec_for_each_layer_with_a_cache() -> None:
    specs = get_kv_cache_spec(settings(HYBRID), "auto")
    assert specs == {"layers.0": WINDOW, "layers.1": full(), "layers.2": WINDOW}
    assert list(specs) == ["layers.0", "layers.1", "layers.2"]
    assert list(attention_layers(settings(HYBRID))) == [f"layers.{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("model_dtype", "cache_dtype", "want"),
    [
        (torch.float16, "auto", "float16"),
        ("float32", "auto", "float32"),
        (torch.float16, "float8_e4m3fn", "float8_e4m3fn"),
        ("float32", torch.uint8, "uint8"),
    ],
)
def test_dtypes(model_dtype: Any, cache_dtype: str | torch.dtype, want: str) -> None:
    config = settings({"a": Layer()}, dtype=model_dtype)
    assert get_kv_cache_spec(config, cache_dtype) == {"a": full(want)}


def test_latent_attention() -> None:
    config = settings({"a": Layer(num_kv_heads=1, head_size=576)}, use_mla=True)
    want = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype="bfloat16")
    (spec,) = get_kv_cache_spec(config, "auto").values()
    assert spec == want
    assert type(spec) is MLAAttentionSpec
    plain = settings({"a": Layer()}, use_mla=False)
    assert type(get_kv_cache_spec(plain, "auto")["a"]) is FullAttentionSpec


class BareLatentLayer:
    """The field's latent attention: no window, no target, no kind."""

    num_kv_heads = 1
    head_size = 576

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PlainBackend


def test_latent_layers_without_windows_and_targets() -> None:
    config = settings({"a": BareLatentLayer(), "b": BareLatentLayer()}, use_mla=True)
    want = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype="bfloat16")
    assert get_kv_cache_spec(config, "auto") == {"a": want, "b": want}


def test_a_size_that_is_no_number_is_named_with_its_layer() -> None:
    layer = Layer(head_size=8.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"layer a: head_size: expected an int, got 8\.0"):
        get_kv_cache_spec(settings({"a": layer}), "auto")


def test_encoder_layers_keep_nothing() -> None:
    layers = {name: Layer() for name in ("plain", "text", "enum", "only", "encoder")}
    kinds = {
        "text": "decoder",
        "enum": Kind.DECODER,
        "only": Kind.ENCODER_ONLY,
        "encoder": "encoder",
    }
    for name, kind in kinds.items():
        layers[name].attn_type = kind  # type: ignore[attr-defined]
    assert list(get_kv_cache_spec(settings(layers), "auto")) == ["plain", "text", "enum"]


def test_a_model_without_attention_has_no_specs() -> None:
    assert get_kv_cache_spec(settings({"experts": SimpleNamespace()}), "auto") == {}


def cross_attention() -> Layer:
    layer = Layer()
    layer.attn_type = "encoder_decoder"  # type: ignore[attr-defined]
    return layer


SHARES = "expected kv_sharing_target_layer_name to be a layer with a cache of its own, got "


@pytest.mark.parametrize(
    ("layers", "model", "dtype", "message"),
    [
        (
            {"a": Layer(), "b": Layer(kv_sharing_target_layer_name="x")},
            {},
            "auto",
            "layer b: " + SHARES,
        ),
        (
            {
                "a": Layer(kv_sharing_target_layer_name="b"),
                "b": Layer(kv_sharing_target_layer_name="a"),
            },
            {},
            "auto",
            f"layer a: {SHARES}'b'; name one of none",
        ),
        (
            {"a": Layer(sliding_window=4)},
            {"use_mla": True},
            "auto",
            "layer a: expected no sliding_wi",
        ),
        (
            {"a": Layer(sliding_window=-1)},
            {},
            "auto",
            "layer a: sliding_window: expected at least 1",
        ),
        (
            {"a": Layer(sliding_window=0)},
            {},
            "auto",
            "layer a: sliding_window: expected at least 1",
        ),
        ({"a": Layer(head_size=0)}, {}, "auto", "layer a: head_size: expected at least 1, got 0"),
        (
            {"a": Layer()},
            {},
            "fp4",
            "layer a: dtype: expected one of float32, float16, bfloat16, fl",
        ),
        (
            {"a": cross_attention()},
            {},
            "auto",
            "layer a: expected attn_type decoder or one of encod",
        ),
    ],
)
def test_a_layer_without_a_sound_spec_is_named(
    layers: dict[str, Any], model: dict[str, Any], dtype: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        get_kv_cache_spec(settings(layers, **model), dtype)


def groups(*groups: tuple[list[str], KVCacheSpec]) -> KVCacheConfig:
    made = [KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec) for names, spec in groups]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=made)


def test_a_builder_for_each_group() -> None:
    config = settings(HYBRID)
    cache = groups((["layers.1", "layers.3"], full()), (["layers.0", "layers.2"], WINDOW))
    backends, builders = init_attn_backend(cache, config, "cpu")
    assert backends == {f"layers.{i}": PlainBackend for i in (1, 3, 0, 2)}
    assert [builder.given for builder in builders if isinstance(builder, Builder)] == [
        (full(), ["layers.1", "layers.3"], config, "cpu"),
        (WINDOW, ["layers.0", "layers.2"], config, "cpu"),
    ]


def test_builders_of_one_backend_share_its_workspace() -> None:
    kinds: dict[str, type[AttentionBackend]] = {
        "a": ScratchBackend,
        "b": PlainBackend,
        "c": ScratchBackend,
        "d": OtherScratchBackend,
    }
    layers = {name: Layer(backend=backend) for name, backend in kinds.items()}
    cache = groups(*(([name], full()) for name in kinds))
    _, builders = init_attn_backend(cache, settings(layers), "cpu")
    a, b, c, d = builders
    assert isinstance(a, WorkspaceBuilder)
    assert isinstance(c, WorkspaceBuilder)
    assert isinstance(d, WorkspaceBuilder)
    assert not isinstance(b, WorkspaceBuilder)
    assert a.workspace is c.workspace
    assert a.workspace is not None
    assert d.workspace is not None
    assert d.workspace is not a.workspace


MIXED = {"a": Layer(), "b": Layer(backend=ScratchBackend)}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "group 1: expected at least one layer, got none"),
        (["a", "x", "y"], "group 1: expected attention layers of the model, got x, y; it has a, b"),
        (
            ["a", "b"],
            "group 1: expected one backend for its layers, got PLAIN for a and SCRATCH for b",
        ),
    ],
)
def test_unsound_groups_are_named(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        init_attn_backend(groups((["a"], full()), (names, full())), settings(MIXED), "cpu")


CACHE = groups((["layers.1", "layers.3"], full()), (["layers.0", "layers.2"], WINDOW))


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def step(**changes: Any) -> dict[str, Any]:
    """Two requests, of 3 and 1 new tokens, in buffers longer than the step."""
    _, builders = init_attn_backend(CACHE, settings(HYBRID), "cpu")
    return {
        "attn_metadata_builders": builders,
        "num_reqs": 2,
        "num_tokens": 4,
        "query_start_loc": ids(0, 3, 4, -9),
        "seq_lens": ids(10, 7, -9),
        "num_computed_tokens_cpu": ids(7, 6, -9),
        "block_tables": [ids(1, 2, 3, 4, -9, -9).view(3, 2), ids(5, 6, -9).view(3, 1)],
        "slot_mappings": [ids(20, 21, 22, 50, -9), ids(80, 81, 82, 90, -9)],
        "kv_cache_config": CACHE,
        **changes,
    }


def test_metadata_once_for_each_group() -> None:
    arguments = step()
    metadata = build_attn_metadata(**arguments)
    assert list(metadata) == ["layers.1", "layers.3", "layers.0", "layers.2"]
    assert metadata["layers.1"] is metadata["layers.3"]
    assert metadata["layers.0"] is metadata["layers.2"]
    tables = {"layers.1": [[1, 2], [3, 4]], "layers.0": [[5], [6]]}
    slots = {"layers.1": [20, 21, 22, 50], "layers.0": [80, 81, 82, 90]}
    for builder, name in zip(arguments["attn_metadata_builders"], tables, strict=True):
        built = metadata[name]
        assert (built.builder, builder.num_built, built.prefix) == (builder, 1, 0)
        common = built.common
        assert (common.num_reqs, common.num_actual_tokens) == (2, 4)
        assert (common.max_query_len, common.max_seq_len, common.causal) == (3, 10, True)
        assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist() == [0, 3, 4]
        assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist() == [10, 7]
        assert common.seq_lens_cpu_upper_bound.tolist() == [10, 7]
        assert common.num_computed_tokens_cpu.tolist() == [7, 6]
        assert common.block_table_tensor.tolist() == tables[name]
        assert common.slot_mapping.tolist() == slots[name]


def twice(values: Tensor, on_host: Tensor | None = None) -> Any:
    """A buffer of the field: its sides differ here, so that the test sees which one is read."""
    return SimpleNamespace(cpu=values if on_host is None else on_host, gpu=values)


def test_buffers_with_two_sides() -> None:
    given = step()
    sides = {
        name: twice(given[name].int(), given[name])
        for name in ("query_start_loc", "seq_lens", "num_computed_tokens_cpu")
    }
    lists = {
        name: [twice(each, torch.zeros(0)) for each in given[name]]
        for name in ("block_tables", "slot_mappings")
    }
    common = build_attn_metadata(**{**given, **sides, **lists})["layers.0"].common
    assert (common.query_start_loc.dtype, common.query_start_loc_cpu.dtype) == (
        torch.int32,
        torch.int64,
    )
    assert (common.seq_lens.dtype, common.seq_lens_cpu.dtype) == (torch.int32, torch.int64)
    assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist() == [0, 3, 4]
    assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist() == [10, 7]
    assert common.num_computed_tokens_cpu.tolist() == [7, 6]
    assert common.block_table_tensor.tolist() == [[5], [6]]
    assert common.slot_mapping.tolist() == [80, 81, 82, 90]


def test_nothing_of_the_step_is_copied() -> None:
    given = step()
    common = build_attn_metadata(**given)["layers.1"].common
    for name, field_name in (
        ("query_start_loc", "query_start_loc"),
        ("query_start_loc", "query_start_loc_cpu"),
        ("seq_lens", "seq_lens"),
        ("num_computed_tokens_cpu", "num_computed_tokens_cpu"),
    ):
        assert getattr(common, field_name).data_ptr() == given[name].data_ptr()
    assert common.block_table_tensor.data_ptr() == given["block_tables"][0].data_ptr()
    assert common.slot_mapping.data_ptr() == given["slot_mappings"][0].data_ptr()


def test_what_the_common_metadata_works_out() -> None:
    common = build_attn_metadata(**step())["layers.1"].common
    assert common.batch_size() == 2
    assert common.naive_query_lens().tolist() == [3, 1]
    assert common.compute_num_computed_tokens().tolist() == [7, 6]
    buffer = torch.full((6,), -9, dtype=torch.int32)
    assert common.token_to_req_indices(buffer).tolist() == [0, 0, 0, 1]
    assert buffer.tolist() == [0, 0, 0, 1, -9, -9]
    other = common.replace(causal=False, max_query_len=1)
    assert (other.causal, other.max_query_len, other.max_seq_len) == (False, 1, 10)
    assert (common.causal, common.max_query_len) == (True, 3)
    copied = copy.copy(common)
    copied.causal = False  # as the field's builders do
    assert common.causal is True


def test_slot_mappings_may_be_one_tensor() -> None:
    both = torch.stack([ids(20, 21, 22, 50), ids(80, 81, 82, 90)])
    metadata = build_attn_metadata(**step(slot_mappings=both))
    assert metadata["layers.2"].common.slot_mapping.tolist() == [80, 81, 82, 90]


def test_a_step_without_requests() -> None:
    metadata = build_attn_metadata(**step(num_reqs=0, num_tokens=0))
    common = metadata["layers.0"].common
    assert common.block_table_tensor.shape == (0, 1)
    assert (common.max_query_len, common.max_seq_len) == (0, 0)


TABLE = ids(1, 2).view(2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attn_metadata_builders": []},
            "attn_metadata_builders: expected one for each of 2 groups,",
        ),
        ({"block_tables": [TABLE]}, "block_tables: expected one for each of 2 groups, got 1"),
        (
            {"slot_mappings": [ids(1)] * 3},
            "slot_mappings: expected one for each of 2 groups, got 3",
        ),
        ({"num_reqs": -1}, "num_reqs: expected at least 0, got -1"),
        ({"num_tokens": -1}, "num_tokens: expected at least 0, got -1"),
        (
            {"query_start_loc": ids(0, 4)},
            "query_start_loc: expected at least 3 rows, got shape (2,)",
        ),
        ({"num_tokens": 3}, "query_start_loc: expected to run from 0 to num_tokens 3, got 0 to 4"),
        ({"query_start_loc": ids(1, 3, 4)}, "expected to run from 0 to num_tokens 4, got 1 to 4"),
        (
            {"query_start_loc": ids(0, 5, 4)},
            "query_start_loc: expected no number below its predecessor, got [0, 5, 4]",
        ),
        (
            {"seq_lens": twice(ids(10), ids(10, 7))},
            "seq_lens: expected at least 2 rows, got shape (1,)",
        ),
        ({"seq_lens": ids(10)}, "seq_lens: expected at least 2 rows, got shape (1,)"),
        ({"seq_lens": TABLE}, "seq_lens: expected at least 2 rows, got shape (2, 1)"),
        (
            {"num_computed_tokens_cpu": ids(7)},
            "num_computed_tokens_cpu: expected at least 2 rows, got",
        ),
        (
            {"block_tables": [TABLE, TABLE[:1]]},
            "block_tables[1]: expected at least 2 rows and 2 dimensions, got shape (1, 1)",
        ),
        (
            {"block_tables": [ids(1, 2), TABLE]},
            "block_tables[0]: expected at least 2 rows and 2 dimensions, got shape (2,)",
        ),
        (
            {"slot_mappings": [ids(1, 2, 3, 4), ids(1, 2, 3)]},
            "slot_mappings[1]: expected at least 4 rows, got shape (3,)",
        ),
    ],
)
def test_what_does_not_fit_the_step_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build_attn_metadata(**step(**changes))
