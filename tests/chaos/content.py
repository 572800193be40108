"""KV bytes that say whose they are: of a prompt up to a token, a layer, a plane and a head.

As with a model, the KV of a token depends on all tokens before it, and the next token on all of
them. So engines that find a prefix of another request in their cache hold the right bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.transfer.layout import Region

Words = NDArray[np.uint64]

VOCAB_SIZE = 512
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mixed(words: Words) -> Words:
    """The finaliser of splitmix64."""
    words = (words ^ (words >> np.uint64(30))) * _MIX[0]
    words = (words ^ (words >> np.uint64(27))) * _MIX[1]
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


def names_of(token_ids: Sequence[int]) -> Words:
    """One word for each token, of it and all tokens before it."""
    tokens = np.asarray(token_ids, dtype=np.uint64)
    places = np.arange(1, len(tokens) + 1, dtype=np.uint64)
    return _mixed(np.cumsum(_mixed(tokens * _ODD + places), dtype=np.uint64))


def next_token(name: np.uint64) -> int:
    """What the synthetic model says behind the token of this name; never 0."""
    return 1 + int(name) % (VOCAB_SIZE - 1)


def answer_of(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """What an engine with the right KV generates."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(names_of(tokens)[-1]))
    return tuple(tokens[len(prompt) :])


def kv_of(names: Words, region: Region) -> Tensor:
    """The bytes of these tokens in a region: [tokens, heads, inner bytes]."""
    num_words = -(-region.inner_nbytes // 8)
    heads = np.arange(region.head_lo, region.head_hi, dtype=np.uint64)
    plane = np.uint64(zlib.crc32(f"{region.layer} {region.plane}".encode()))
    places = heads[:, None] * np.uint64(1 << 16) + np.arange(num_words, dtype=np.uint64)
    keys = _mixed(((places + (plane << np.uint64(24))) * _ODD).astype(np.uint64))
    words = _mixed(names[:, None, None] ^ keys)
    return torch.from_numpy(words.view(np.uint8)[..., : region.inner_nbytes])


class PlaneView:
    """One region of a rank's pool, by token of a request."""

    def __init__(self, region: Region, buffer: Tensor) -> None:
        self.region = region
        self._kernel_tokens = region.block_tokens // region.kernel_blocks
        size = (
            region.num_blocks * region.kernel_blocks,
            region.head_hi - region.head_lo,
            self._kernel_tokens,
            region.inner_nbytes,
        )
        strides = (region.stride_block, region.stride_head, region.stride_token, 1)
        self._bytes = torch.as_strided(buffer, size, strides, region.offset)

    def write(self, ids: Sequence[int], names: Words, lo: int, hi: int) -> None:
        """The KV of tokens [lo, hi) of the request with these names and blocks."""
        blocks, slots = self._places(ids, lo, hi)
        values = kv_of(names[lo:hi], self.region).to(self._bytes.device)
        self._bytes[blocks, :, slots] = values

    def first_wrong(self, ids: Sequence[int], names: Words, hi: int) -> tuple[int, int] | None:
        """The first (token, head) of tokens [0, hi) that holds other bytes; None if none does."""
        blocks, slots = self._places(ids, 0, hi)
        got = self._bytes[blocks, :, slots]
        expected = kv_of(names[:hi], self.region).to(got.device)
        if torch.equal(got, expected):
            return None
        token, head = (got != expected).any(dim=-1).nonzero()[0].tolist()
        return token, head + self.region.head_lo

    def _places(self, ids: Sequence[int], lo: int, hi: int) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(lo, hi)
        size, kernel = self.region.block_tokens, self._kernel_tokens
        blocks = torch.tensor(ids, dtype=torch.int64)[tokens // size]
        within = tokens % size
        device = self._bytes.device
        kernel_blocks = blocks * self.region.kernel_blocks + within // kernel
        return kernel_blocks.to(device), (within % kernel).to(device)
