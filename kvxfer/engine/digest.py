"""Digests of a request's KV by a deliberately naive reader, so that two engines can compare what
they hold.

Right tokens alone do not prove right bytes. The reader here walks token by token and head by head
with the address formula of :mod:`kvxfer.transfer.layout` and shares no line with any copy: an error
in the copy arithmetic cannot hide in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
from msgspec import UnsetType
from msgspec.structs import replace

from kvxfer.transfer.layout import Interior, Region

if TYPE_CHECKING:
    from torch import Tensor  # a process that only compares digests starts without it

DIGEST_NBYTES = 8
_DROPPED = -1


class PlaneDigest(msgspec.Struct, frozen=True):
    """One plane and one global head of a layer.

    ``tokens`` is one digest of 8 bytes for each token from ``first_token`` on; the tokens before it
    are out of the layer's window, or its chunk (``is_chunk``), and their blocks gone.
    """

    layer: str
    plane: str
    head: int
    tokens: bytes
    first_token: int = 0
    is_chunk: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        return self.layer, self.plane, self.head

    @property
    def end(self) -> int:
        return self.first_token + len(self.tokens) // DIGEST_NBYTES

    def between(self, lo: int, hi: int) -> PlaneDigest:
        first = min(max(self.first_token, lo), hi)
        begin, end = (max(0, at - self.first_token) * DIGEST_NBYTES for at in (first, hi))
        return replace(self, first_token=first, tokens=self.tokens[begin:end])


class KVDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of a request's first ``num_tokens`` tokens, on one rank or merged of all ranks."""

    num_tokens: int
    planes: tuple[PlaneDigest, ...]


class Difference(msgspec.Struct, frozen=True):
    """The first token at which one plane of one head differs, and what differs."""

    layer: str
    plane: str
    head: int
    first_token: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.layer} {self.plane} head {self.head} from token {self.first_token}: "
            f"{self.reason}"
        )


def kv_digests(
    regions: Sequence[Region],
    buffer: Tensor,
    block_ids: Sequence[Sequence[int]],
    num_tokens: int,
) -> KVDigest:
    """Digest tokens ``[0, num_tokens)`` of a request, those of dropped blocks left out.

    ``buffer`` is the one-dimensional uint8 CPU tensor that the regions' offsets count from.
    ``block_ids``: for each group its table by position; in a group with a window the first ones may
    be -1, dropped. Raises ValueError for block ids outside the pool (-1 anywhere else among them),
    too few of them, or a region whose heads cannot be told apart.
    """
    memory = memoryview(buffer.numpy().data)
    planes: list[PlaneDigest] = []
    for region in regions:
        if not isinstance(region.state_tokens, UnsetType):
            planes += _digest_state(region, region.state_tokens, memory, block_ids, num_tokens)
            continue
        table = _table(region, block_ids, num_tokens)
        first_token = min(_num_dropped(region, table) * region.block_tokens, num_tokens)
        for head in range(region.head_lo, region.head_hi):
            tokens = _digest_head(region, memory, table, range(first_token, num_tokens), head)
            of_head = (region.layer, region.plane, head, tokens, first_token)
            planes.append(PlaneDigest(*of_head, region.is_chunk is True))
    return KVDigest(num_tokens=num_tokens, planes=tuple(planes))


def blocks_on_host(
    regions: Sequence[Region], buffer: Tensor, block_ids: Sequence[Sequence[int]]
) -> Tensor:
    """A GPU's buffer on the CPU, as large: these blocks in their places, anything in the others."""
    # What is not written is never backed by memory.
    host = buffer.new_empty(buffer.shape, device="cpu")
    for region in regions:
        tables = block_ids[region.group : region.group + 1]
        for block in sorted({block for table in tables for block in table if block >= 0}):
            # Blocks are outermost but for planes, which are regions of their own: from a region's
            # block to its next is all that it has of it.
            begin = region.offset + block * region.kernel_blocks * region.stride_block
            end = begin + region.kernel_blocks * region.stride_block
            host[begin:end].copy_(buffer[begin:end])
    return host


def merge_digests(ranks: Iterable[KVDigest]) -> tuple[KVDigest, list[Difference]]:
    """Join the ranks of one engine. Where heads on several ranks differ, the first is kept."""
    merged: dict[tuple[str, str, int], PlaneDigest] = {}
    differences: list[Difference] = []
    counts: set[int] = set()
    for rank in ranks:
        counts.add(rank.num_tokens)
        for digest in rank.planes:
            first = merged.setdefault(digest.key, digest)
            if (token := _first_difference(first, digest)) is not None:
                differences.append(Difference(*digest.key, token, "replicas differ"))
    if len(counts) != 1:
        raise ValueError(f"ranks: expected one token count on all, got {sorted(counts)}")
    planes = tuple(merged[key] for key in sorted(merged))
    return KVDigest(num_tokens=counts.pop(), planes=planes), differences


def compare(
    source: Sequence[KVDigest], sink: Sequence[KVDigest], *, span: tuple[int, int] | None = None
) -> list[Difference]:
    """Every plane and head that is not the same on both sides; an empty list means equal KV.

    ``source`` and ``sink`` hold one digest per rank, of which tokens ``[lo, hi)`` of ``span`` are
    looked at; None: all. What is compared are the tokens from the first that both sides hold to the
    last; a plane that has no such token, one that only one side has, and replicas that disagree
    within a side are differences too.
    """
    differences: list[Difference] = []
    planes: list[dict[tuple[str, str, int], PlaneDigest]] = []
    for side, ranks in (("source", source), ("sink", sink)):
        merged, found = merge_digests(
            KVDigest(num_tokens=span[1], planes=tuple(each.between(*span) for each in rank.planes))
            if span
            else rank
            for rank in ranks
        )
        differences += [replace(each, reason=f"{side} {each.reason}") for each in found]
        planes.append({digest.key: digest for digest in merged.planes})
    for key in sorted(planes[0].keys() | planes[1].keys()):
        ours, theirs = (of_side.get(key) for of_side in planes)
        if ours is None or theirs is None:
            where = "source" if ours is None else "sink"
            differences.append(Difference(*key, 0, f"missing on the {where}"))
        elif _shares_no_token(ours, theirs):
            differences.append(Difference(*key, ours.end, "no token is held by both sides"))
        elif (token := _first_difference(ours, theirs)) is not None:
            differences.append(Difference(*key, token, "source and sink differ"))
    return differences


def _table(region: Region, block_ids: Sequence[Sequence[int]], num_tokens: int) -> Sequence[int]:
    if region.group >= len(block_ids):
        raise ValueError(
            f"block_ids: expected a table for group {region.group} of {region.layer}, got "
            f"{len(block_ids)} tables"
        )
    table = block_ids[region.group]
    if num_tokens > len(table) * region.block_tokens:
        raise ValueError(
            f"block_ids: expected blocks for {num_tokens} tokens, "
            f"got {len(table)} of {region.block_tokens} tokens"
        )
    return table


def _num_dropped(region: Region, table: Sequence[int]) -> int:
    """How many blocks at the beginning of a table are out of the region's window."""
    if region.window is None:
        return 0  # a block that is missing here is an error
    return sum(1 for _ in itertools.takewhile(lambda block: block == _DROPPED, table))


def _digest_state(
    region: Region,
    state_tokens: int,
    memory: memoryview,
    block_ids: Sequence[Sequence[int]],
    num_tokens: int,
) -> Iterator[PlaneDigest]:
    """One digest of each head, of all steps, in the place of the last token's."""
    last = max(0, num_tokens - 1)
    steps = range(region.block_tokens if num_tokens else 0)
    table = block_ids[region.group][last // state_tokens :][:1]
    for head in range(region.head_lo, region.head_hi):
        tokens = _digest_head(region, memory, table, steps, head)
        if tokens:
            tokens = blake2b(tokens, digest_size=DIGEST_NBYTES).digest()
        yield PlaneDigest(region.layer, region.plane, head, tokens, last)


def _digest_head(
    region: Region, memory: memoryview, block_ids: Sequence[int], tokens: range, head: int
) -> bytes:
    if region.interior is not Interior.PLAIN:
        raise ValueError(
            f"{region.layer} {region.plane}: expected a plain interior, got {region.interior.value}"
        )
    kernel_tokens = region.block_tokens // region.kernel_blocks
    digests = bytearray()
    for token in tokens:
        block, slot = block_ids[token // region.block_tokens], token % region.block_tokens
        if not 0 <= block < region.num_blocks:
            raise ValueError(f"block_ids: expected ids in [0, {region.num_blocks}), got {block}")
        address = (
            region.offset
            + (block * region.kernel_blocks + slot // kernel_tokens) * region.stride_block
            + (head - region.head_lo) * region.stride_head
            + slot % kernel_tokens * region.stride_token
        )
        values = _inner_bytes(region, memory, address)
        if len(values) != region.inner_nbytes:
            raise ValueError(
                f"{region.layer} {region.plane}: expected {region.inner_nbytes} bytes at "
                f"{address}, "
                f"got a buffer of {len(memory)}"
            )
        digests += blake2b(values, digest_size=DIGEST_NBYTES).digest()
    return bytes(digests)


def _inner_bytes(region: Region, memory: memoryview, address: int) -> bytes:
    """One head of one token; channel by channel where these lie apart."""
    nbytes = region.channel_nbytes or region.inner_nbytes
    starts = (address + at * region.stride_channel for at in range(region.inner_nbytes // nbytes))
    return b"".join(memory[start : start + nbytes] for start in starts)


def _shares_no_token(ours: PlaneDigest, theirs: PlaneDigest) -> bool:
    """Is nothing compared, though there is something to compare? Not where a side holds no token
    because a chunk begins with the next one.
    """
    is_empty = ours.end == 0 and theirs.end == 0
    if ours.is_chunk and theirs.is_chunk:
        pairs = (ours, theirs), (theirs, ours)
        is_empty |= any(not one.tokens and one.first_token >= other.end for one, other in pairs)
    return not is_empty and max(ours.first_token, theirs.first_token) >= min(ours.end, theirs.end)


def _first_difference(ours: PlaneDigest, theirs: PlaneDigest) -> int | None:
    """The first token whose digests differ, of those from the first that both have; the shorter's
    end where one is the beginning of the other; None where all are equal.
    """
    first = max(ours.first_token, theirs.first_token)
    shorter = min(ours.end, theirs.end)
    mine, others = (plane.between(first, shorter).tokens for plane in (ours, theirs))
    if mine != others:
        pairs = zip(_by_token(mine), _by_token(others), strict=True)
        return first + next(token for token, (one, two) in enumerate(pairs) if one != two)
    return None if ours.end == theirs.end else max(first, shorter)


def _by_token(tokens: bytes) -> list[bytes]:
    return [tokens[at : at + DIGEST_NBYTES] for at in range(0, len(tokens), DIGEST_NBYTES)]
