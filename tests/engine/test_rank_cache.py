"""A rank's cache: one memory, bound layers, regions that say where the bytes lie, zeroing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvxfer.engine.attention import PagedAttention, attention_backend
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.model_config import load_model_config, shard_for
from kvxfer.engine.rank_cache import RankCache, RequestStep


def make(model_name: str | None, layout: str, tp_rank: int = 0, **settings: Any) -> RankCache:
    model = load_model_config(model_name, num_kv_heads=4)
    values: dict[str, Any] = {"role": Role.ALONE, "num_blocks": 10} | settings
    config = EngineConfig(engine_id="e", layout=layout, **values)
    shard = shard_for(model, tp_rank, config.tp_size)
    return RankCache(config, model, shard, attention_backend(layout))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", [None, "hybrid", "kv-sharing"])
def test_regions_say_where_a_layer_writes(layout: str, name: str | None) -> None:
    """Each layer writes one token's K and V; the addresses of its regions hold just that."""
    cache = make(name, layout, tp_rank=1, tp_size=2, block_size=24)
    tables = [[3, 5], [2, 7]][: len(cache.config.kv_cache_groups)]
    meta = cache.metadata([RequestStep(tables, 33, 1)])
    key = torch.arange(2 * 64).view(1, 2, 64).float()
    for number, (layer_name, layer) in enumerate(cache.layers.items()):
        group = next(
            g
            for g, spec in enumerate(cache.config.kv_cache_groups)
            if layer_name in spec.layer_names
        )
        assert isinstance(layer, PagedAttention)
        layer.write(key + number, key + number + 1000, meta[layer_name])
        regions = [region for region in cache.regions if region.layer == layer_name]
        assert [(region.plane, region.group) for region in regions] == [("k", group), ("v", group)]
        for region, added in zip(regions, (0, 1000), strict=True):
            assert (region.head_lo, region.head_hi) == (2, 4)
            assert region.window == (48 if layer.sliding_window else None)
            for head in (2, 3):
                at = region.address(tables[group][1], head, 9)  # token 33 of blocks of 24
                found = cache.buffer[at : at + region.inner_nbytes].view(torch.float32)
                assert torch.equal(found, key[0, head - 2] + number + added)


def test_sharing_layers_have_their_targets_bytes() -> None:
    cache = make("kv-sharing", "HND")
    by_layer = {(region.layer, region.plane): region for region in cache.regions}
    assert len(by_layer) == 12
    for sharer, target in ((4, 2), (5, 3)):
        for plane in "kv":
            mine, own = (
                by_layer[f"model.layers.{layer}.self_attn", plane] for layer in (sharer, target)
            )
            assert (mine.offset, mine.group) == (own.offset, own.group)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_zero_clears_these_blocks_in_all_layers_and_nothing_else(layout: str) -> None:
    cache = make("kv-sharing", layout, block_size=24)
    cache.buffer.fill_(0xEE)
    cache.zero([2, 7])
    for region in cache.regions:
        for block in range(10):
            for head in range(4):
                for token in range(24):
                    at = region.address(block, head, token)
                    want = 0 if block in {2, 7} else 0xEE
                    assert cache.buffer[at] == cache.buffer[at + region.inner_nbytes - 1] == want
    num_zero = int((cache.buffer == 0).sum())
    # 2 buffers, of 2 blocks K and V of 24 tokens, 4 heads of 64 float32
    assert num_zero == 2 * 2 * 2 * 24 * 4 * 64 * 4


def test_memory_can_be_mapped_only_where_a_wire_could_use_it() -> None:
    alone = make(None, "HND")
    assert alone.memory.infos[0].handle is None
    shared = make(None, "HND", role=Role.PREFILL)
    try:
        assert shared.memory.infos[0].handle is not None
        assert shared.memory.tensors[0] is shared.buffer
    finally:
        shared.close()


def test_a_step_without_blocks_is_refused() -> None:
    cache = make("hybrid", "HND")
    with pytest.raises(ValueError, match="longer than"):
        cache.metadata([RequestStep([[1]], 0, 1)])
