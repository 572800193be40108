"""What a writer does to a scratch block is read back right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.interior import (
    Cells,
    Named,
    Opaque,
    Plane,
    Trace,
    Write,
    look_inside,
    trace_writes,
)
from kvxfer.integrations.vllm.specs import LayerSpec

TOKENS, CHANNELS = 32, 32


def spec_of(**changes: Any) -> LayerSpec:
    fields: dict[str, Any] = {
        "block_tokens": TOKENS,
        "num_kv_heads": 2,
        "head_size": CHANNELS,
        "head_size_v": CHANNELS,
        "dtype": torch.float32,
    }
    return LayerSpec(**(fields | changes))


def cells_of(spec: LayerSpec, **changes: int) -> Cells:
    """As vLLM's LBHNC has them."""
    nbytes = spec.dense_nbytes
    fields = {
        "num_slots": spec.num_kv_heads,
        "num_tokens": TOKENS,
        "cell_nbytes": nbytes,
        "stride_slot": TOKENS * nbytes,
        "stride_token": nbytes,
    }
    return Cells(**(fields | changes))


def writer(pack: Callable[[Tensor, Tensor], list[Tensor]]) -> Write:
    """A writer of whole blocks; ``pack`` takes K and V ``[H, N, D]`` and returns pieces that lie
    one behind the other in each head's part."""

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        block = int(slots[0]) // cache.shape[2]
        pieces = [p.flatten(1) for p in pack(key.transpose(0, 1), value.transpose(0, 1))]
        cache[block] = torch.cat(pieces, dim=1).reshape(cache.shape[1:]).to(cache.dtype)

    return write


def tiled_k(key: Tensor, tile: int) -> Tensor:
    """[N/tile][D/2][tile][2]"""
    heads, tokens, channels = key.shape
    return key.reshape(heads, tokens // tile, tile, channels // 2, 2).transpose(2, 3)


PLAIN = writer(lambda k, v: [torch.cat((k, v), dim=2)])
PLANES = writer(lambda k, v: [k, v])
TRANSPOSED = writer(lambda k, v: [k.transpose(1, 2), v])
TILES_16 = writer(lambda k, v: [tiled_k(k, 16), v])
TILES_8 = writer(lambda k, v: [tiled_k(k, 8), v])


def inside(write: Write, spec: LayerSpec | None = None) -> Named | Opaque:
    spec = spec or spec_of()
    trace = trace_writes(write, spec=spec, num_tokens=TOKENS, dtype=torch.float32)
    return look_inside("layer", spec, cells_of(spec), trace=trace)


def tiles_of_view() -> Trace:
    """Tiles, in blocks that have the order of the registered view."""
    traced = trace_writes(TILES_16, spec=spec_of(), num_tokens=TOKENS, dtype=torch.float32)
    return Trace(traced.at, is_of_view=True)


@pytest.mark.parametrize(
    ("write", "planes"),
    [
        (
            PLAIN,
            (
                Plane(plane="k", offset=0, inner_nbytes=128, stride_token=256),
                Plane(plane="v", offset=128, inner_nbytes=128, stride_token=256),
            ),
        ),
        (
            PLANES,
            (
                Plane(plane="k", offset=0, inner_nbytes=128, stride_token=128),
                Plane(plane="v", offset=4096, inner_nbytes=128, stride_token=128),
            ),
        ),
        (
            TRANSPOSED,
            (
                Plane(
                    plane="k",
                    offset=0,
                    inner_nbytes=128,
                    stride_token=4,
                    channel_nbytes=4,
                    stride_channel=128,
                ),
                Plane(plane="v", offset=4096, inner_nbytes=128, stride_token=128),
            ),
        ),
    ],
    ids=["side by side", "planes", "K transposed"],
)
def test_constant_strides_are_planes(write: Write, planes: tuple[Plane, ...]) -> None:
    assert inside(write) == Named(planes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_bytes(dtype: torch.dtype) -> None:
    found = inside(TRANSPOSED, spec_of(dtype=dtype))
    assert isinstance(found, Named)
    assert [(p.offset, p.stride_token, p.stride_channel) for p in found.planes] == [
        (0, 2, 64),
        (2048, 64, 0),
    ]


def test_a_quantised_cache_is_read_by_what_its_codes_look_like() -> None:
    spec = spec_of(dtype=torch.uint8, quantisation="fp8_per_tensor")

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        as_bytes = [t.to(torch.float8_e4m3fn).view(torch.uint8) for t in (key, value)]
        PLANES(as_bytes[0], as_bytes[1], cache, slots)

    assert inside(write, spec) == Named(
        (
            Plane(plane="k", offset=0, inner_nbytes=32, stride_token=32),
            Plane(plane="v", offset=1024, inner_nbytes=32, stride_token=32),
        )
    )


def test_a_latent_is_one_plane() -> None:
    spec = spec_of(num_kv_heads=1, head_size=40, head_size_v=0, is_latent=True)
    latent = writer(lambda k, v: [k])
    assert inside(latent, spec) == Named(
        (Plane(plane="latent", offset=0, inner_nbytes=160, stride_token=160),)
    )


def test_tiles_move_whole_and_other_tiles_have_another_name() -> None:
    found = [inside(write) for write in (TILES_16, TILES_8, TILES_16)]
    assert all(isinstance(each, Opaque) for each in found)
    assert found[0] == found[2]
    assert found[0] != found[1]


def test_a_fingerprint_also_tells_types_heads_and_order_apart() -> None:
    specs = [spec_of(), spec_of(dtype=torch.float16), spec_of(num_kv_heads=4)]
    assert len({str(inside(TILES_16, spec)) for spec in specs}) == 3
    head_major, spec = cells_of(spec_of()), spec_of()
    token_major = cells_of(spec, stride_slot=256, stride_token=512)
    names = [
        look_inside("x", spec, cells, trace=tiles_of_view()) for cells in (head_major, token_major)
    ]
    assert names[0] != names[1]


def swap_heads(key: Tensor, value: Tensor) -> list[Tensor]:
    return [key.flip(0), value]


def drop_last(key: Tensor, value: Tensor) -> list[Tensor]:
    key = key.clone()
    key[:, :, -1] = key[:, :, 0]
    return [key, value]


def add_scale(key: Tensor, value: Tensor) -> list[Tensor]:
    return [key + value, value]


def test_mixed_heads_are_no_planes() -> None:
    assert isinstance(inside(writer(swap_heads)), Opaque)


@pytest.mark.parametrize("pack", [drop_last, add_scale])
def test_elements_without_a_place_of_their_own_are_refused(
    pack: Callable[[Tensor, Tensor], list[Tensor]],
) -> None:
    with pytest.raises(ConfigError, match="interior: expected the platform to write each element"):
        inside(writer(pack))


def test_writing_outside_of_the_block_is_refused() -> None:
    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        PLANES(key, value, cache, slots)
        cache[2, 0, 0, 0] = 1

    with pytest.raises(ConfigError, match="got others changed"):
        inside(write)


def test_without_a_probe_the_spec_says_it() -> None:
    spec = spec_of(head_size_v=16)
    cells = cells_of(spec, stride_slot=192, stride_token=384)  # LBNHC
    assert look_inside("layer", spec, cells) == Named(
        (
            Plane(plane="k", offset=0, inner_nbytes=128, stride_token=384),
            Plane(plane="v", offset=128, inner_nbytes=64, stride_token=384),
        )
    )


def test_a_stated_cell_of_the_plain_size_is_plain() -> None:
    spec = spec_of(cell_nbytes=256)
    assert isinstance(look_inside("layer", spec, cells_of(spec)), Named)


@pytest.mark.parametrize(
    ("changes", "cells", "reason"),
    [
        # Two slots for two heads: shape and strides of the plain cache, and not a plain cache.
        ({"num_head_slots": 2, "cell_nbytes": 256}, {}, "2 head slots of its own"),
        ({}, {"num_slots": 4}, "4 head slots for 2 heads"),
        ({"cell_nbytes": 272}, {"cell_nbytes": 272}, "cells of 272 bytes for 256 bytes of K and V"),
        ({"cell_nbytes": 272}, {}, "cells of 256 bytes"),
        ({"quantisation": "int8_per_token_head"}, {}, "quantisation int8_per_token_head"),
        ({"dtype": torch.uint8}, {}, "bytes of which no quantisation is stated"),
    ],
)
def test_what_the_spec_does_not_name(
    changes: dict[str, Any], cells: dict[str, int], reason: str
) -> None:
    spec = spec_of(**changes)
    with pytest.raises(ConfigError, match=f"layer: interior: expected plain K and V.*{reason}"):
        look_inside("layer", spec, cells_of(spec, **cells))


def test_blocks_with_gaps_cannot_move_whole() -> None:
    spec = spec_of()
    cells = cells_of(spec, stride_slot=TOKENS * 256 + 64)
    with pytest.raises(ConfigError, match="layer: expected blocks without gaps"):
        look_inside("layer", spec, cells, trace=tiles_of_view())


def test_a_probed_layout_needs_a_head_s_cells_side_by_side() -> None:
    spec = spec_of()
    trace = trace_writes(TRANSPOSED, spec=spec, num_tokens=TOKENS, dtype=torch.float32)
    with pytest.raises(ConfigError, match="expected the 32 cells of a head side by side"):
        look_inside("layer", spec, cells_of(spec, stride_slot=256, stride_token=512), trace=trace)
