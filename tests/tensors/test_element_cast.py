"""The arithmetic of casts: bits against the oracle, and the error bounds that docs/protocol.md
states.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvxfer.tensors.device_copy import BoundCopy, BoundSide, DeviceCopier
from kvxfer.tensors.element_cast import dequantised, quantised
from kvxfer.transfer.casts import Values
from kvxfer.transfer.layout import ITEM_NBYTES
from kvxfer.transfer.plan import Tile
from tests.casts import FORMATS, TYPES, decode, naive_cast
from tests.tensors.test_device_copy import DEVICE, new_stream

# NumPy's, in Triton's interpreter, of values that overflow as they should
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = ("float8_e4m3fn", "float8_e5m2")
ULP_BITS = {name: found.mantissa_bits for name, found in FORMATS.items()}
scales = st.floats(2.0**-20, 2.0**20, width=32)


def cast(elements: Tensor, sink: str, given_scale: float = 1.0, taken_scale: float = 1.0) -> Tensor:
    """One head and token."""
    raw = elements.reshape(1, 1, -1).contiguous().view(torch.uint8).numpy()
    values = dequantised(raw, name_of(elements), torch.tensor([given_scale]))
    bits = quantised(values, sink, torch.tensor([taken_scale]))
    return torch.from_numpy(bits).view(getattr(torch, sink)).reshape(-1)


def by_kernel(elements: Tensor, sink: str, given_scale: float, taken_scale: float) -> Tensor:
    """The same, as cells of 64 elements of as many tokens."""
    source = elements.to(DEVICE).contiguous()
    taken = torch.zeros(source.numel(), dtype=getattr(torch, sink), device=DEVICE)
    sides = []
    for tensor, scale in ((source, given_scale), (taken, taken_scale)):
        inner_nbytes = 64 * tensor.element_size()
        num_tokens = tensor.numel() // 64
        tile = Tile(
            block_tokens=num_tokens,
            kernel_tokens=num_tokens,
            num_blocks=1,
            num_heads=1,
            inner_nbytes=inner_nbytes,
            stride_block=num_tokens * inner_nbytes,
            stride_head=inner_nbytes,
            stride_token=inner_nbytes,
        )
        values = Values(name_of(tensor), ((scale,),))
        address = np.array([tensor.data_ptr()], np.int64)
        sides.append(BoundSide(tile=tile, addresses=address, values=values, chunk=values))
    copier, ids, stream = DeviceCopier(DEVICE), np.zeros(1, np.int64), new_stream()
    copier.copy(BoundCopy(*sides), ids, ids, (0, num_tokens), stream=stream)
    copier.mark(stream).synchronize()
    return taken.cpu()


def name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def every(dtype: str) -> Tensor:
    """Every element of a type of 8 or 16 bits; of float32 many, near what 8 bits can hold."""
    if dtype == "float32":
        generator = torch.Generator().manual_seed(1)
        bits = torch.randint(0, 1 << 31, (1 << 14,), generator=generator, dtype=torch.int32)
        near = torch.randn(1 << 14, generator=generator) * 2.0 ** torch.randint(-12, 18, (1 << 14,))
        # Ties: halfway between numbers of 8 bits
        ties = torch.cat([_ties(small) for small in SMALL])
        return torch.cat([bits.view(torch.float32), near, ties])
    size = ITEM_NBYTES[dtype]
    bits = torch.arange(1 << (8 * size), dtype=torch.int32).to((torch.uint8, torch.int16)[size - 1])
    return bits.view(getattr(torch, dtype))


def _ties(dtype: str) -> Tensor:
    numbers = torch.tensor([decode(bits, dtype) for bits in range(0x7C)])
    ties = (numbers[:-1] + numbers[1:]) / 2
    ties = torch.cat((ties, ties.nextafter(torch.tensor(0.0)), -ties))
    return torch.nn.functional.pad(ties, (0, -ties.numel() % 64))


def same(got: Tensor, want: Tensor) -> bool:
    """Equal bits; every NaN is as good as another."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    are_nan = got.float().isnan() & want.float().isnan()
    return bool((are_nan | (got.view(bits) == want.view(bits))).all())


@pytest.mark.parametrize("sink", TYPES)
@pytest.mark.parametrize("source", [each for each in TYPES if each != "float32"])
def test_every_element_is_cast_as_the_oracle_says(source: str, sink: str) -> None:
    elements = every(source)
    if ITEM_NBYTES[source] == 2:
        elements = elements[::7].contiguous()  # the oracle takes 10 us for each
    size = ITEM_NBYTES[source]
    bits = [
        int.from_bytes(e.tobytes(), "little")
        for e in elements.view(torch.uint8).numpy().reshape(-1, size)
    ]
    for given_scale, taken_scale in ((1.0, 1.0), (0.3, 1.7)):
        want, _ = naive_cast(tuple(bits), source, sink, given_scale, taken_scale)
        got = cast(elements, sink, given_scale, taken_scale)
        number = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ITEM_NBYTES[sink]]
        mask = (1 << (8 * ITEM_NBYTES[sink])) - 1
        for mine, right, value in zip(
            got.view(number).tolist(), want, got.float().tolist(), strict=True
        ):
            assert math.isnan(value) if right is None else mine & mask == right


@pytest.mark.parametrize(("source", "sink"), list(product(TYPES, TYPES)))
def test_the_kernel_makes_the_same_bits(source: str, sink: str) -> None:
    """Scales of 1, powers of two (whose reciprocals multiply), and others."""
    elements = every(source)
    for pair in ((1.0, 1.0), (1.0, 0.25), (0.3, 1.7)):
        assert same(by_kernel(elements, sink, *pair), cast(elements, sink, *pair)), pair


@given(value=st.floats(width=32, allow_nan=False), scale=scales, sink=st.sampled_from(TYPES))
def test_an_error_is_half_a_step_times_the_scale(value: float, scale: float, sink: str) -> None:
    """|got * scale - value| <= scale * max(2^-(m+1) |value / scale|, half the least step), within
    the type's range, and a float32 rounding of the quotient.
    """
    found = FORMATS[sink]
    scale = float(np.float32(scale))
    quotient = value / scale
    got = float(cast(torch.tensor([value]), sink, 1.0, scale).double())
    if abs(quotient) > found.largest:
        limit = found.largest if found.saturates else math.inf
        assert got in (math.copysign(limit, value), math.copysign(found.largest, value))
        return
    least_step = 2.0 ** (1 - found.bias - found.mantissa_bits)
    half_step = max(2.0 ** -(found.mantissa_bits + 1) * abs(quotient), least_step / 2)
    of_quotient = max(2.0**-23 * abs(quotient), 2.0**-149)
    assert abs(got - quotient) <= half_step + of_quotient


@pytest.mark.parametrize(("small", "wide"), list(product(SMALL, TYPES[:3])))
def test_a_wider_type_holds_every_element(small: str, wide: str) -> None:
    """With scale 1 nothing is lost: there and back every bit is the same."""
    elements = every(small)
    there = cast(elements, wide)
    assert torch.equal(there.float().nan_to_num(-1.0), elements.float().nan_to_num(-1.0))
    finite = elements.float().isfinite()
    assert same(cast(there, small)[finite], elements[finite])


@given(scale=scales, small=st.sampled_from(SMALL))
def test_there_and_back_with_one_scale_is_the_same(scale: float, small: str) -> None:
    """Dequantised to float32 and quantised with the same scale: two roundings of 2^-24 move nothing
    by half a step.
    """
    scale = float(np.float32(scale))
    elements = every(small)
    back = cast(cast(elements, "float32", scale, 1.0), small, 1.0, scale)
    finite = elements.float().isfinite()
    assert same(back[finite], elements[finite])


@given(given_scale=scales, taken_scale=scales)
def test_requantised_elements_are_half_a_step_of_the_new_scale_away(
    given_scale: float, taken_scale: float
) -> None:
    given_scale, taken_scale = float(np.float32(given_scale)), float(np.float32(taken_scale))
    elements = every("float8_e4m3fn")
    elements = elements[elements.float().isfinite()]
    values = elements.double() * given_scale
    got = cast(elements, "float8_e4m3fn", given_scale, taken_scale).double() * taken_scale
    limit = 448.0 * taken_scale
    kept = values.clamp(-limit, limit)
    half_step = torch.maximum(kept.abs() * 2.0**-4, torch.tensor(2.0**-10 * taken_scale))
    assert bool(((got - kept).abs() <= half_step * (1 + 2.0**-18)).all())
