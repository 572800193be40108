"""Our names beside vLLM's own: its records go in, its consumers take what comes out, and where both
have a function, both do the same.
"""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvxfer.cache.specs import KVCacheConfig, KVCacheGroupSpec
from kvxfer.connector.aggregator import KVOutputAggregator
from kvxfer.connector.utils import yield_req_data
from kvxfer.tensors.attention import CommonAttentionMetadata, build_attn_metadata
from kvxfer.tensors.kv_cache import bind_kv_cache
from kvxfer.tensors.postprocess import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
)
from tests.cache.planning_cases import full

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM loads parts of torch that other parts call deprecated
    from vllm import EngineArgs
    from vllm.distributed.kv_events import KVConnectorKVEvents
    from vllm.distributed.kv_transfer.kv_connector import utils as field
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.attention import backend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker import utils as field_worker

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Adds in place, as vLLM's own do."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data["loads"] += other.data["loads"]
        return self


class Events(KVConnectorKVEvents):  # type: ignore[misc]
    def __init__(self, *events: str) -> None:
        self.events, self.workers = list(events), 1

    def add_events(self, events: list[Any]) -> None:
        self.events += events

    def aggregate(self) -> Events:
        return self

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count

    def get_all_events(self) -> list[Any]:
        return self.events

    def get_number_of_workers(self) -> int:
        return self.workers

    def clear_events(self) -> None:
        self.events = []


def output(**fields: Any) -> Any:  # noqa: ANN401 -- a ModelRunnerOutput
    made = dataclasses.replace(EMPTY_MODEL_RUNNER_OUTPUT)
    made.kv_connector_output = KVConnectorOutput(**fields)
    return made


def test_the_aggregator_takes_and_makes_vllms_record() -> None:
    outputs = [
        output(
            finished_sending={"s"},
            finished_recving={"a", "b", "c"},
            failed_recving={"a"},
            kv_connector_stats=Stats({"loads": number}),
            kv_cache_events=Events(f"stored {number}"),
            invalid_block_ids={number},
            expected_finished_count=2,
        )
        for number in (1, 2)
    ]
    merged = KVOutputAggregator(5).aggregate(outputs)
    assert merged is not None
    assert merged is outputs[0]
    made = merged.kv_connector_output
    assert isinstance(made, KVConnectorOutput)
    assert (made.finished_sending, made.finished_recving) == ({"s"}, {"a", "b", "c"})
    assert (made.failed_recving, made.invalid_block_ids) == ({"a"}, {1, 2})
    assert made.expected_finished_count == 2
    assert made.kv_connector_stats == Stats({"loads": 3})
    assert made.kv_cache_events is not None
    assert made.kv_cache_events.get_all_events() == ["stored 1", "stored 2"]
    assert made.kv_cache_events.get_number_of_workers() == 2
    empty = [output() for _ in range(2)]
    KVOutputAggregator(2).aggregate(empty)
    assert empty[0].kv_connector_output is not None
    assert empty[0].kv_connector_output.is_empty()


@pytest.mark.parametrize("seed", range(20))
def test_rounds_of_ranks_that_report_once_are_aggregated_as_vllm_does(seed: int) -> None:
    """Ids come again, ranks lag behind each other, loads fail."""
    chosen = random.Random(seed)
    num_ranks = chosen.randint(1, 4)
    ours, theirs = KVOutputAggregator(num_ranks), field.KVOutputAggregator(num_ranks)
    # What each rank still has to say, in its own order: an id comes again when it is over.
    waiting: list[list[tuple[str, str]]] = [[] for _ in range(num_ranks)]
    for life in range(3):
        for request_id, kind in product("abc", ("finished_sending", "finished_recving")):
            for rank in waiting:
                rank.append((f"{request_id}", kind))
        while any(waiting):
            fields: list[dict[str, set[str]]] = []
            for rank in waiting:
                said: dict[str, set[str]] = {}
                for _ in range(min(len(rank), chosen.randint(0, 3))):
                    request_id, kind = rank.pop(chosen.randrange(len(rank)))
                    said.setdefault(kind, set()).add(request_id)
                    if kind == "finished_recving" and chosen.random() < 0.2:
                        said.setdefault("failed_recving", set()).add(request_id)
                fields.append(said)
            found = ours.aggregate([output(**said) for said in fields])
            wanted = theirs.aggregate([output(**said) for said in fields])
            assert found is not None
            assert wanted is not None
            assert found.kv_connector_output == wanted.kv_connector_output, life
    assert ours.num_dropped == 0


def test_the_requests_of_a_step_are_yielded_as_by_vllm() -> None:
    step = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", block_ids=([1, 2], [3]))],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["b", "c", "d"],
            new_block_ids=[([4], []), None, ([5, 6], [7])],
            resumed_req_ids={"d"},
        ),
    )
    assert list(yield_req_data(step)) == list(field.yield_req_data(step))


def test_caches_are_bound_in_vllms_order() -> None:
    for names, modules in (
        (["model.layers.1.attn", "model.layers.0.attn", "draft.layers.0.attn"], 1),
        (["d.1.self_attn", "d.1.cross_attn", "d.0.self_attn", "d.0.cross_attn"], 1),
        (["d.1.self_attn", "d.1.cross_attn", "d.0.self_attn", "d.0.cross_attn"], 2),
        (["m.1.attn.1", "m.1.attn.0", "m.0.attn.1", "m.0.attn.0"], 2),
    ):
        caches = {name: torch.zeros(1) for name in names}

        class Layer(SimpleNamespace):
            def bind_kv_cache(self, kv_cache: Tensor) -> None:
                self.kv_cache = kv_cache

        found: list[Tensor] = []
        bind_kv_cache(caches, {name: Layer(kv_cache=None) for name in names}, found, modules)
        wanted: list[Tensor] = []
        field_worker.bind_kv_cache(caches, {name: Layer() for name in names}, wanted, modules)
        assert [id(cache) for cache in found] == [id(cache) for cache in wanted]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_received_blocks_are_joined_as_by_vllm(layout: str) -> None:
    """Over views [blocks, H, N, D], as vLLM has them."""
    name = "kv_postprocess_blksize_on_receive"
    ours: Any = kv_postprocess_blksize_on_receive
    if layout == "NHD":
        name = "kv_postprocess_blksize_and_layout_on_receive"
        ours = kv_postprocess_blksize_and_layout_on_receive
    ids = torch.tensor([4, 0, 3])
    for heads, tokens, ratio in product((1, 2, 3, 8), (1, 2, 4, 12, 16), (1, 2, 3, 4, 16)):
        if tokens % ratio:
            continue
        shape = (6, heads, tokens, 2) if layout == "HND" else (6, tokens, heads, 2)
        memory = torch.rand(shape)
        wanted = memory.clone()
        seen = [each if layout == "HND" else each.transpose(1, 2) for each in (memory, wanted)]
        ours(seen[0], ids, ratio)
        getattr(field, name)(seen[1], ids, ratio)
        assert torch.equal(memory, wanted), (heads, tokens, ratio)


def test_the_common_metadata_has_all_that_vllms_has() -> None:
    ours = {each.name for each in dataclasses.fields(CommonAttentionMetadata)}
    theirs = dataclasses.fields(backend.CommonAttentionMetadata)
    assert {each.name for each in theirs if not each.name.startswith("_")} <= ours


@pytest.mark.parametrize(
    "builder_class", [CPUAttentionMetadataBuilder, TritonAttentionMetadataBuilder]
)
def test_vllms_builders_take_the_common_metadata(builder_class: Any, tmp_path: Path) -> None:
    """And make of it what they make of vLLM's own record."""
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 64,
        "max_position_embeddings": 256,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = EngineArgs(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    builder = builder_class(spec, [], config, torch.device("cpu"))
    starts, lengths = (
        CpuGpuBuffer(8, dtype=torch.int32, device=torch.device("cpu"), pin_memory=False)
        for _ in range(2)
    )
    for buffer, values in ((starts, [0, 3, 4]), (lengths, [20, 7])):
        buffer.cpu[: len(values)] = torch.tensor(values)
        buffer.copy_to_gpu()
    table = torch.tensor([[1, 2], [3, 0], [9, 9]], dtype=torch.int32)
    slots = torch.tensor([33, 34, 35, 54, -1])
    group = KVCacheGroupSpec(["layers.0"], full())
    made = build_attn_metadata(
        [builder],
        2,
        4,
        starts,
        lengths,
        torch.tensor([17, 6, 0]),
        [table],
        [slots],
        KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group]),
    )["layers.0"]
    own = backend.CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens=torch.tensor([20, 7], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor([20, 7], dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=4,
        max_query_len=3,
        max_seq_len=20,
        block_table_tensor=table[:2],
        slot_mapping=slots[:4],
    )
    wanted = builder.build(0, own)
    for each in dataclasses.fields(wanted):
        ours, theirs = getattr(made, each.name), getattr(wanted, each.name)
        if builder_class is CPUAttentionMetadataBuilder and each.name == "scheduler_metadata":
            ours, theirs = ours.shape, theirs.shape  # its content has addresses
        same = torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs
        assert ours is theirs or same, each.name
