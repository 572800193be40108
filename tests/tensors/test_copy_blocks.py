"""Blocks of all layers between two caches: compared with loops, in bytes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvxfer.tensors.copy_blocks import Direction, copy_kv_blocks, make_src_and_dst_indices
from tests.helpers import assert_same_bytes, poisoned

Caches = dict[str, Tensor]


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (
        torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize)).to(torch.uint8).view(dtype)
    )


def naive(src: Tensor, dst: Tensor, pairs: list[tuple[int, int]], block_dim: int) -> Tensor:
    """The destination afterwards, one block after the other, as bytes."""
    after = dst.clone().view(torch.uint8)
    # Not contiguous(): it leaves a last dimension of size 1 its stride.
    source = src.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    for src_id, dst_id in pairs:
        after.select(block_dim, dst_id).copy_(source.select(block_dim, src_id))
    return after.view(dst.dtype)


@given(data=st.data())
def test_matches_the_loops(data: st.DataObject) -> None:
    block_dim = data.draw(st.sampled_from([0, 1]))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float8_e4m3fn]))
    direction: Direction = data.draw(st.sampled_from(["h2d", "d2h"]))
    dst_ids = data.draw(st.lists(st.integers(0, 6), unique=True, max_size=7))
    src_ids = data.draw(st.lists(st.integers(0, 4), min_size=len(dst_ids), max_size=len(dst_ids)))
    # Layer b has another size, and the source's dimensions lie in memory in any order.
    order = data.draw(st.permutations(range(4 if block_dim == 0 else 5)))
    src: Caches = {}
    dst: Caches = {}
    for name, rest in (("a", (2, 3, 2)), ("b", (4, 3, 1))):
        for caches, num_blocks in ((src, 5), (dst, 7)):
            shape = (num_blocks, *rest) if block_dim == 0 else (2, num_blocks, *rest)
            if caches is dst:
                dst[name] = poisoned(shape, dtype=dtype)
                continue
            memory = random_bytes(tuple(shape[dim] for dim in order), dtype)
            src[name] = memory.permute([order.index(dim) for dim in range(len(shape))])
    pairs = list(zip(src_ids, dst_ids, strict=True))
    want = {name: naive(src[name], dst[name], pairs, block_dim) for name in src}
    copy_kv_blocks(src, dst, src_ids, dst_ids, direction, block_dim=block_dim)
    for name in src:
        assert_same_bytes(dst[name], want[name])


def test_there_and_back(device: torch.device) -> None:
    on_device = {name: torch.rand(6, 2, 3, 4, device=device) for name in ("a", "b")}
    on_host = {name: poisoned((9, 2, 3, 4), dtype=torch.float32) for name in ("a", "b")}
    back = {name: poisoned((6, 2, 3, 4), device, torch.float32) for name in ("a", "b")}
    copy_kv_blocks(on_device, on_host, [5, 0, 3], [8, 2, 1], "d2h")
    copy_kv_blocks(on_host, back, torch.tensor([2, 8, 1]), torch.tensor([0, 5, 3]), "h2d")
    untouched = poisoned((2, 3, 4), dtype=torch.float32)
    for name, cache in on_device.items():
        for block in (5, 0, 3):
            assert_same_bytes(back[name][block], cache[block])
        for block in (1, 2, 4):
            assert_same_bytes(back[name][block], untouched)
        assert_same_bytes(on_host[name][0], untouched)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_the_host_side_is_on_the_host(direction: Direction) -> None:
    caches = {"a": torch.zeros(3, 2, device="cuda")}
    with pytest.raises(ValueError, match=f"layer a: expected a .* in CPU memory for '{direction}'"):
        copy_kv_blocks(caches, caches, [0], [1], direction)


def test_blocks_may_trade_places_in_one_cache() -> None:
    caches = {"a": torch.arange(8).view(4, 2)}
    copy_kv_blocks(caches, caches, [0, 1, 3], [1, 0, 2], "h2d")
    assert caches["a"].tolist() == [[2, 3], [0, 1], [6, 7], [6, 7]]


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what PyTorch writes into caches by their block ids."""

    num = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num += func.overloadpacket in (torch.ops.aten.index_copy_, torch.ops.aten.index_put_)
        return func(*args, **(kwargs or {}))


def test_layers_in_the_same_memory() -> None:
    """Layers that share KV, or one buffer, are copied once; neighbours in a buffer each."""
    src_buffer, dst_buffer = torch.arange(16).view(2, 4, 2), torch.zeros(2, 4, 2).long()
    names = {"a": 0, "b": 1, "shares a": 0}
    src = {name: src_buffer[plane] for name, plane in names.items()}
    dst = {name: dst_buffer[plane] for name, plane in names.items()}
    with Writes() as writes:  # type: ignore[no-untyped-call]
        copy_kv_blocks(src, dst, [1], [2], "d2h")
    assert writes.num == 2
    assert dst_buffer[:, 2].tolist() == [[2, 3], [10, 11]]
    assert int(dst_buffer.sum()) == 2 + 3 + 10 + 11


A = {"a": torch.zeros(4, 3)}


@pytest.mark.parametrize(
    ("src", "dst", "src_ids", "dst_ids", "direction", "message"),
    [
        (A, A, [0], [1], "d2d", "direction: expected 'h2d' or 'd2h', got 'd2d'"),
        (
            {},
            {},
            [],
            [],
            "h2d",
            "src_kv_caches and dst_kv_caches: expected at least one layer, got",
        ),
        (
            A,
            {},
            [0],
            [1],
            "h2d",
            "dst_kv_caches: expected the layers of the other side, got none fo",
        ),
        (
            {},
            A,
            [0],
            [1],
            "h2d",
            "src_kv_caches: expected the layers of the other side, got none fo",
        ),
        (A, A, [0, 1], [1], "h2d", "dst_block_ids: expected as many as src_block_ids, 2, got 1"),
        (A, A, [], [1], "d2h", "dst_block_ids: expected as many as src_block_ids, 0, got 1"),
        (A, A, [4], [1], "d2h", "src_block_ids: expected ids in [0, 4), got 4"),
        (A, A, [1], [-1], "d2h", "dst_block_ids: expected ids in [0, 4), got -1"),
        (A, A, [1, 2], [3, 3], "d2h", "dst_block_ids: expected every block once, got 3 twice"),
        (
            A,
            {"a": torch.zeros(4, 2)},
            [0],
            [1],
            "h2d",
            "layer a: expected shape (4, 3) as in the so",
        ),
        (
            A,
            {"a": torch.zeros(4, 3, 1)},
            [0],
            [1],
            "h2d",
            "layer a: expected shape (4, 3) as in the",
        ),
        (
            A,
            {"a": torch.zeros(4, 3).int()},
            [0],
            [1],
            "h2d",
            "layer a: expected dtype torch.float32",
        ),
    ],
)
def test_refusals(
    src: Caches, dst: Caches, src_ids: list[int], dst_ids: list[int], direction: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        copy_kv_blocks(src, dst, src_ids, dst_ids, direction)


def test_a_bad_layer_stops_the_copy_before_the_first() -> None:
    src = {"a": torch.ones(4, 3), "b": torch.ones(4, 3)}
    dst = {"a": torch.zeros(4, 3), "b": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=re.escape("dst_block_ids: expected ids in [0, 2), got 3")):
        copy_kv_blocks(src, dst, [0], [3], "h2d")
    assert not dst["a"].any()


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_are_not_guessed_where_the_first_dimension_may_be_k_and_v(size: int) -> None:
    src, dst = torch.arange(size * 4.0).view(size, 2, 2), torch.zeros(size, 2, 2)
    good, before = torch.zeros(3, 2, 2), dst.clone()
    message = "layer a: expected blocks in dimension 0, got shape"
    for name in ("a", "first"):  # whatever other layers there are
        with pytest.raises(ValueError, match=message + ".*pass block_dim, 1 for"):
            copy_kv_blocks({name: good, "a": src}, {name: good, "a": dst}, [0], [1], "h2d")
    assert_same_bytes(dst, before)
    copy_kv_blocks({"a": src}, {"a": dst}, [0], [size - 1], "h2d", block_dim=0)
    assert_same_bytes(dst[-1], src[0])
    larger = torch.zeros(5, 2, 2)  # no planes: the other side has fewer
    copy_kv_blocks({"a": src}, {"a": larger}, [0], [4], "h2d")
    assert_same_bytes(larger[4], src[0])


def test_planes_outside_the_blocks() -> None:
    src, dst = torch.arange(12.0).view(2, 3, 2), torch.zeros(2, 3, 2)
    copy_kv_blocks({"a": src}, {"a": dst}, [0], [1], "h2d", block_dim=1)
    assert dst.tolist() == [[[0, 0], [0, 1], [0, 0]], [[0, 0], [6, 7], [0, 0]]]


def test_layers_of_two_dtypes_at_one_place_are_both_copied() -> None:
    """Their shapes and strides are equal, their bytes are not."""
    src, dst = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)

    def layers(memory: Tensor) -> Caches:
        return {"a": memory[:32].view(4, 8), "b": memory.view(torch.int16).view(4, 8)}

    copy_kv_blocks(layers(src), layers(dst), [3], [3], "h2d")
    want = torch.zeros(64, dtype=torch.uint8)
    want[24:32], want[48:] = src[24:32], src[48:]
    assert_same_bytes(dst, want)


def test_a_destination_that_lies_over_itself_is_refused() -> None:
    src, dst = {"a": torch.ones(4, 3)}, {"a": torch.zeros(1, 3).expand(4, 3)}
    with pytest.raises(RuntimeError, match="single memory location"):
        copy_kv_blocks(src, dst, [0, 1], [2, 3], "h2d")


NO_INTEGERS: list[Any] = [
    [1.7],
    [1.0],
    [1, 2.0],
    [True],
    [None],
    ["1"],
    (1.7,),
    np.array([1.7]),
    np.array([True]),
    torch.tensor([1.7]),
    torch.tensor([True]),
    [torch.tensor(1.7)],
]


@pytest.mark.parametrize("ids", NO_INTEGERS, ids=repr)
def test_ids_that_are_no_integers_are_never_truncated(ids: Any) -> None:
    src, dst = {"a": torch.ones(4, 3)}, {"a": torch.zeros(4, 3)}
    others = list(range(len(ids)))
    for src_ids, dst_ids in ((ids, others), (others, ids)):
        with pytest.raises(TypeError, match="_block_ids: expected (integers|an integer dtype), go"):
            copy_kv_blocks(src, dst, src_ids, dst_ids, "h2d")
        with pytest.raises(TypeError, match="_block_ids: expected (integers|an integer dtype), go"):
            make_src_and_dst_indices(src_ids, dst_ids, "cpu", "cpu")
    assert not dst["a"].any()


@pytest.mark.parametrize("ids", [[2**63], torch.tensor([2**63], dtype=torch.uint64)], ids=repr)
def test_ids_too_large_for_int64_are_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match=re.escape("src_block_ids: expected ids below 2**63")):
        make_src_and_dst_indices(ids, [0], "cpu", "cpu")


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64", "uint64"])
def test_ids_of_any_integers(dtype: str) -> None:
    wide = np.arange(8, dtype=dtype)
    for ids in (wide[1::3], torch.from_numpy(wide)[1::3], list(wide[1::3]), range(1, 8, 3)):
        src, dst = make_src_and_dst_indices(ids, ids, "cpu", "cpu")
        assert src.tolist() == dst.tolist() == [1, 4, 7]
        assert src.dtype == torch.int64
    with pytest.raises(ValueError, match="src_block_ids: expected 1 dimension, got shape"):
        make_src_and_dst_indices(wide[:4].reshape(2, 2), [0, 1], "cpu", "cpu")


@pytest.mark.parametrize("block_dim", [-1, 2])
def test_block_dim_is_a_dimension(block_dim: int) -> None:
    message = f"block_dim: expected a dimension of layer a, [0, 2), got {block_dim}"
    with pytest.raises(ValueError, match=re.escape(message)):
        copy_kv_blocks(A, A, [0], [1], "h2d", block_dim=block_dim)


def test_layers_on_two_devices_are_refused() -> None:
    src = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3, device="meta")}
    with pytest.raises(
        ValueError, match="src_kv_caches: expected all layers on one device, got cpu"
    ):
        copy_kv_blocks(src, {"a": src["a"], "b": src["a"]}, [0], [1], "d2h")


def test_indices(device: torch.device) -> None:
    src, dst = make_src_and_dst_indices(
        [3, 1], torch.tensor([0, 2], dtype=torch.int32), "cpu", device
    )
    assert (src.tolist(), dst.tolist()) == ([3, 1], [0, 2])
    assert src.dtype == dst.dtype == torch.int64
    assert (src.device.type, dst.device.type) == ("cpu", device.type)
    empty, _ = make_src_and_dst_indices([], [], "cpu", device)
    assert (empty.shape, empty.dtype) == ((0,), torch.int64)


def test_indices_of_differing_lengths() -> None:
    with pytest.raises(ValueError, match="expected as many as src_block_ids, 1, got 3"):
        make_src_and_dst_indices([0], [1, 2, 3], "cpu", "cpu")
