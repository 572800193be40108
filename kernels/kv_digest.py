"""The digests of :mod:`kvxfer.tensors.kv_digest`, of cells in the memory of a GPU.

numbers [NUM_PARAMS] int64 (``DigestLaunch.params``); addresses, keys, sums [num_regions] int64: of
each region the address of (block 0, first head, token 0), its part of the key, and where its digest
is added to; offsets, tokens [num_tokens] int64: from that address to each token, and the token's
part of the key; factors [num_words] int64

A program has TILES times CELLS cells of one region, and goes through CELLS of them at a time, WORDS
words at a time. All is int64 and wraps around as uint64 does; a shift to the right is masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

ELEMENTS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
CELLS, TILES, MAX_WORDS, WARPS = 32, 4, 32, 4
"""8 KiB at a time of cells of 256 bytes, which half a warp reads side by side. 459 MB of an H200
take 0.18 ms, 2.6 TB/s; 0.36 without ALIGN_NBYTES and with one tile of a program.
"""
ALIGN_NBYTES = 16
"""A thread loads as many bytes at once where every cell begins at a multiple of them."""
NUM_PARAMS, NUM_ARRAYS = 8, 7


@dataclass(frozen=True, slots=True)
class DigestLaunch:
    """A launch: what is compiled in, and ``params``, which the kernel reads from memory."""

    params: tuple[int, ...]
    element_nbytes: int
    align_nbytes: int
    words: int
    by_channel: bool
    num_programs: int

    @property
    def binary(self) -> tuple[object, ...]:
        """Everything that is compiled in: launches with equal values share one binary."""
        return "digest", self.element_nbytes, self.align_nbytes, self.words, self.by_channel


def plan_digest(
    *,
    num_regions: int,
    num_tokens: int,
    heads: tuple[int, int, int],
    inner_nbytes: int,
    channels: tuple[int, int] | None,
    align_nbytes: int,
) -> DigestLaunch:
    """One launch for all regions of a class. ``heads``: how many, their stride, and the key of one
    head as int64; ``channels``: bytes of a channel and their stride, where they are apart.
    ``align_nbytes``: a power of two, up to ALIGN_NBYTES, that divides every address, offset and
    size.
    """
    num_cells = num_tokens * heads[0]
    programs = -(-num_cells // (CELLS * TILES))
    params = (num_cells, *heads, inner_nbytes, *(channels or (inner_nbytes, 0)), programs)
    return DigestLaunch(
        params=params,
        element_nbytes=min(8, align_nbytes),
        align_nbytes=align_nbytes,
        words=min(MAX_WORDS, triton.next_power_of_2(-(-inner_nbytes // 8))),
        by_channel=channels is not None,
        num_programs=programs * num_regions,
    )


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_FACTOR_0 = tl.constexpr(_signed(0xBF58476D1CE4E5B9))
_FACTOR_1 = tl.constexpr(_signed(0x94D049BB133111EB))


@triton.jit
def _shifted(words, SHIFT: tl.constexpr):
    return words >> SHIFT & (1 << 64 - SHIFT) - 1


@triton.jit
def _mix(words):
    words = (words ^ _shifted(words, 30)) * _FACTOR_0
    words = (words ^ _shifted(words, 27)) * _FACTOR_1
    return words ^ _shifted(words, 31)


@triton.jit(
    do_not_specialize_on_alignment=[
        "numbers",
        "addresses",
        "keys",
        "offsets",
        "tokens",
        "factors",
        "sums",
    ]
)
def _digest_kernel(
    numbers,
    addresses,
    keys,
    offsets,
    tokens,
    factors,
    sums,
    ELEMENT: tl.constexpr,
    ALIGN: tl.constexpr,
    CELLS: tl.constexpr,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    num_cells = tl.load(numbers).to(tl.int32)
    num_heads = tl.load(numbers + 1).to(tl.int32)
    head_stride, head_key = tl.load(numbers + 2), tl.load(numbers + 3)
    inner_nbytes = tl.load(numbers + 4).to(tl.int32)
    programs = tl.load(numbers + 7).to(tl.int32)
    region, part_of_region = tl.program_id(0) // programs, tl.program_id(0) % programs
    base, region_key = tl.load(addresses + region), tl.load(keys + region)
    nbytes: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    at_once: tl.constexpr = ALIGN // nbytes
    digests = tl.zeros([CELLS], tl.int64)
    for tile in range(TILES):
        cell = (part_of_region * TILES + tile) * CELLS + tl.arange(0, CELLS)
        is_cell = cell < num_cells
        token, head = cell // num_heads, (cell % num_heads).to(tl.int64)
        start = base + tl.load(offsets + token, mask=is_cell, other=0) + head * head_stride
        hashes = region_key + head * head_key + tl.load(tokens + token, is_cell, 0)
        for first in range(0, tl.cdiv(inner_nbytes, 8), WORDS):
            word = first + tl.arange(0, WORDS)
            values = tl.zeros([CELLS, WORDS], tl.int64)
            for part in tl.static_range(8 // nbytes):
                byte = word * 8 + part * nbytes
                if BY_CHANNEL:
                    channel_nbytes = tl.load(numbers + 5).to(tl.int32)
                    # int64 before the multiply: channels may lie far apart
                    at = (byte // channel_nbytes).to(tl.int64) * tl.load(numbers + 6)
                    at += byte % channel_nbytes
                    where = (start[:, None] + at[None, :]).to(tl.pointer_type(ELEMENT))
                else:  # in elements, or Triton does not see that they are side by side
                    element = word * (8 // nbytes) + part
                    where = start.to(tl.pointer_type(ELEMENT))[:, None] + element[None, :]
                    where = tl.max_contiguous(tl.multiple_of(where, [1, ALIGN]), [1, at_once])
                    if ALIGN > 8:  # one question for what is loaded at once
                        byte = word // at_once * ALIGN
                wanted = is_cell[:, None] & (byte < inner_nbytes)[None, :]
                loaded = _widened(tl.load(where, mask=wanted, other=0), nbytes)
                values |= loaded << part * nbytes * 8
            factor = tl.load(factors + word, mask=word * 8 < inner_nbytes, other=0)
            values ^= _shifted(values, 32)
            hashes += tl.sum(values * factor[None, :], axis=1)
        digests += tl.where(is_cell, _mix(hashes), 0)
    tl.atomic_add(sums + region, tl.sum(digests, axis=0))


@triton.jit
def _widened(elements, NBYTES: tl.constexpr):
    """As int64 without a sign."""
    wide = elements.to(tl.int64)
    if NBYTES < 8:
        wide &= (1 << NBYTES * 8) - 1
    return wide


def launch_digest(arrays: Sequence[torch.Tensor], launch: DigestLaunch) -> object:
    """Add to the digest of each region, on the current stream. ``arrays``: the kernel's, in its
    order. Returns the compiled kernel.

    Addresses are not checked: the GPU cannot.
    """
    # Triton launches on the current device, whatever its tensors are on
    with torch.cuda.device_of(arrays[0]):  # type: ignore[no-untyped-call]
        compiled: object = _digest_kernel[(launch.num_programs,)](
            *arrays,
            ELEMENT=ELEMENTS[launch.element_nbytes],
            ALIGN=launch.align_nbytes,
            CELLS=CELLS,
            TILES=TILES,
            WORDS=launch.words,
            BY_CHANNEL=launch.by_channel,
            num_warps=WARPS,
        )
    return compiled
