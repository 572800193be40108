"""Digests of a request's KV by a deliberately naive reader, so that two engines can compare what
they hold.

Right tokens alone do not prove right bytes. The reader here walks token by token and head by head
with the address formula of :mod:`kvxfer.transfer.layout` and shares no line with any copy: an error
in the copy arithmetic cannot hide in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from kvxfer.transfer.layout import Interior, Region

if TYPE_CHECKING:
    from torch import Tensor  # who only compares digests starts without it

DIGEST_NBYTES = 8


class PlaneDigest(msgspec.Struct, frozen=True, kw_only=True):
    """One plane and one global head of a layer; ``tokens`` is one digest of 8 bytes per token, in
    token order.
    """

    layer: str
    plane: str
    head: int
    tokens: bytes


class KVDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of the first ``num_tokens`` tokens of a request on one rank (or, merged, on all ranks
    of an engine).
    """

    num_tokens: int
    planes: tuple[PlaneDigest, ...]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
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
    regions: Sequence[Region], buffer: Tensor, block_ids: Sequence[int], num_tokens: int
) -> KVDigest:
    """Digest tokens ``[0, num_tokens)`` of a request whose blocks are ``block_ids``.

    ``buffer`` is the one-dimensional uint8 CPU tensor that the regions' offsets count from. Raises
    ValueError for block ids outside the pool, too few of them, or a region whose heads cannot be
    told apart.
    """
    memory = memoryview(buffer.numpy().data)
    planes = [
        PlaneDigest(
            layer=region.layer,
            plane=region.plane,
            head=head,
            tokens=_digest_head(region, memory, block_ids, num_tokens, head),
        )
        for region in regions
        for head in range(region.head_lo, region.head_hi)
    ]
    return KVDigest(num_tokens=num_tokens, planes=tuple(planes))


def merge_digests(ranks: Iterable[KVDigest]) -> tuple[KVDigest, list[Difference]]:
    """Join the ranks of one engine. Heads that several ranks hold must agree; where they do not,
    the first is kept.
    """
    merged: dict[tuple[str, str, int], PlaneDigest] = {}
    differences: list[Difference] = []
    counts: set[int] = set()
    for rank in ranks:
        counts.add(rank.num_tokens)
        for digest in rank.planes:
            first = merged.setdefault((digest.layer, digest.plane, digest.head), digest)
            if first.tokens != digest.tokens:
                differences.append(
                    _difference(
                        digest, _first_difference(first.tokens, digest.tokens), "replicas differ"
                    )
                )
    if len(counts) != 1:
        raise ValueError(f"ranks: expected one token count on all, got {sorted(counts)}")
    planes = tuple(merged[key] for key in sorted(merged))
    return KVDigest(num_tokens=counts.pop(), planes=planes), differences


def compare(source: Sequence[KVDigest], sink: Sequence[KVDigest]) -> list[Difference]:
    """Every plane and head that is not the same on both sides; an empty list means equal KV.

    ``source`` and ``sink`` hold one digest per rank. Replicas that disagree within a side, and
    planes that only one side holds, are differences too.
    """
    left, left_differences = merge_digests(source)
    right, right_differences = merge_digests(sink)
    differences = [_on_side(found, "source") for found in left_differences]
    differences += [_on_side(found, "sink") for found in right_differences]
    left_planes = {(d.layer, d.plane, d.head): d for d in left.planes}
    right_planes = {(d.layer, d.plane, d.head): d for d in right.planes}
    for key in sorted(left_planes.keys() | right_planes.keys()):
        ours, theirs = left_planes.get(key), right_planes.get(key)
        if ours is None or theirs is None:
            layer, plane, head = key
            reason = "missing on the source" if ours is None else "missing on the sink"
            differences.append(
                Difference(layer=layer, plane=plane, head=head, first_token=0, reason=reason)
            )
        elif ours.tokens != theirs.tokens:
            token = _first_difference(ours.tokens, theirs.tokens)
            differences.append(_difference(ours, token, "source and sink differ"))
    return differences


def _digest_head(
    region: Region, memory: memoryview, block_ids: Sequence[int], num_tokens: int, head: int
) -> bytes:
    if region.interior is not Interior.PLAIN:
        raise ValueError(
            f"{region.layer} {region.plane}: expected a plain interior, got {region.interior.value}"
        )
    if num_tokens > len(block_ids) * region.block_tokens:
        raise ValueError(
            f"block_ids: expected blocks for {num_tokens} tokens, "
            f"got {len(block_ids)} of {region.block_tokens} tokens"
        )
    kernel_tokens = region.block_tokens // region.kernel_blocks
    digests = bytearray()
    for token in range(num_tokens):
        block, slot = block_ids[token // region.block_tokens], token % region.block_tokens
        if not 0 <= block < region.num_blocks:
            raise ValueError(f"block_ids: expected ids in [0, {region.num_blocks}), got {block}")
        address = (
            region.offset
            + (block * region.kernel_blocks + slot // kernel_tokens) * region.stride_block
            + (head - region.head_lo) * region.stride_head
            + slot % kernel_tokens * region.stride_token
        )
        values = memory[address : address + region.inner_nbytes]
        if len(values) != region.inner_nbytes:
            raise ValueError(
                f"{region.layer} {region.plane}: expected {region.inner_nbytes} bytes at "
                f"{address}, "
                f"got a buffer of {len(memory)}"
            )
        digests += blake2b(values, digest_size=DIGEST_NBYTES).digest()
    return bytes(digests)


def _first_difference(ours: bytes, theirs: bytes) -> int:
    """The first token whose digests differ; the shorter length where one is the beginning of the
    other.
    """
    shorter = min(len(ours), len(theirs)) // DIGEST_NBYTES
    for token in range(shorter):
        at = slice(token * DIGEST_NBYTES, (token + 1) * DIGEST_NBYTES)
        if ours[at] != theirs[at]:
            return token
    return shorter


def _difference(digest: PlaneDigest, first_token: int, reason: str) -> Difference:
    return Difference(
        layer=digest.layer,
        plane=digest.plane,
        head=digest.head,
        first_token=first_token,
        reason=reason,
    )


def _on_side(found: Difference, side: str) -> Difference:
    return msgspec.structs.replace(found, reason=f"{side} {found.reason}")
