"""The digests of :mod:`kvxfer.tensors.kv_digest`, of cells in the memory of a GPU.

numbers [NUM_PARAMS] int64 (``DigestLaunch.params``); addresses, keys, sums [num_regions] int64: of
each region the address of (block 0, first head, token 0), its part of the key, and where its digest
is added to; offsets, tokens [num_tokens] int64: from that address to each token, and the token's
part of the key; factors [num_words] int64

A program has CELLS cells of one region, which it goes through WORDS words at a time. All is int64
and wraps around as uint64 does; a shift to the right is masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

ELEMENTS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
CELLS, MAX_WORDS, WARPS = 32, 32, 4
"""4 KiB of cells of 128 bytes: a warp reads 256 bytes side by side."""
NUM_PARAMS, NUM_ARRAYS = 8, 7


@dataclass(frozen=True, slots=True)
class DigestLaunch:
    """A launch: what is compiled in, and ``params``, which the kernel reads from memory."""

    params: tuple[int, ...]
    element_nbytes: int
    words: int
    by_channel: bool
    num_programs: int

    @property
    def binary(self) -> tuple[object, ...]:
        """Everything that is compiled in: launches with equal values share one binary."""
        return "digest", self.element_nbytes, self.words, self.by_channel


def plan_digest(
    *,
    num_regions: int,
    num_tokens: int,
    heads: tuple[int, int, int],
    inner_nbytes: int,
    channels: tuple[int, int] | None,
    element_nbytes: int,
) -> DigestLaunch:
    """One launch for all regions of a class. ``heads``: how many, their stride, and the key of one
    head as int64; ``channels``: bytes of a channel and their stride, where they are apart.
    ``element_nbytes`` divides every address, offset and size.
    """
    num_cells = num_tokens * heads[0]
    tiles = -(-num_cells // CELLS)
    params = (num_cells, *heads, inner_nbytes, *(channels or (inner_nbytes, 0)), tiles)
    words = min(MAX_WORDS, triton.next_power_of_2(-(-inner_nbytes // 8)))
    return DigestLaunch(params, element_nbytes, words, channels is not None, tiles * num_regions)


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
    CELLS: tl.constexpr,
    WORDS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    num_cells = tl.load(numbers).to(tl.int32)
    num_heads = tl.load(numbers + 1).to(tl.int32)
    inner_nbytes = tl.load(numbers + 4).to(tl.int32)
    tiles = tl.load(numbers + 7).to(tl.int32)
    region = tl.program_id(0) // tiles
    cell = tl.program_id(0) % tiles * CELLS + tl.arange(0, CELLS)
    is_cell = cell < num_cells
    token, head = cell // num_heads, (cell % num_heads).to(tl.int64)
    start = tl.load(addresses + region) + tl.load(offsets + token, mask=is_cell, other=0)
    start += head * tl.load(numbers + 2)
    nbytes: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    hashes = tl.zeros([CELLS], tl.int64)
    for first in range(0, tl.cdiv(inner_nbytes, 8), WORDS):
        word = first + tl.arange(0, WORDS)
        values = tl.zeros([CELLS, WORDS], tl.int64)
        for part in tl.static_range(8 // nbytes):
            byte = word * 8 + part * nbytes
            at = byte.to(tl.int64)
            if BY_CHANNEL:
                channel_nbytes = tl.load(numbers + 5).to(tl.int32)
                # int64 before the multiply: channels may lie far apart
                at = (byte // channel_nbytes).to(tl.int64) * tl.load(numbers + 6)
                at += byte % channel_nbytes
            wanted = is_cell[:, None] & (byte < inner_nbytes)[None, :]
            where = (start[:, None] + at[None, :]).to(tl.pointer_type(ELEMENT))
            values |= _widened(tl.load(where, mask=wanted, other=0), nbytes) << part * nbytes * 8
        factor = tl.load(factors + word, mask=word * 8 < inner_nbytes, other=0)
        values ^= _shifted(values, 32)
        hashes += tl.sum(values * factor[None, :], axis=1)
    head_key = head * tl.load(numbers + 3)
    hashes += tl.load(keys + region) + head_key + tl.load(tokens + token, is_cell, 0)
    tl.atomic_add(sums + region, tl.sum(tl.where(is_cell, _mix(hashes), 0), axis=0))


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
            CELLS=CELLS,
            WORDS=launch.words,
            BY_CHANNEL=launch.by_channel,
            num_warps=WARPS,
        )
    return compiled
