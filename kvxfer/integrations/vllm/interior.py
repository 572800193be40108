"""What lies inside a block of vLLM's cache: decided from the spec and a probe, never from names.

vLLM registers every layer as ``[B, H, N, C]``: blocks, head slots, tokens, bytes of one cell. The
shape does not say what is in a cell. The spec does where nobody can be asked: with one slot for
each head, and C that is K and V without anything else, K lies before V in every cell. Mostly the
writer can be asked: :func:`trace_writes` lets it write coded tokens into a scratch block and reads
where each went. On a GPU it is the layer's own method (:mod:`.probes`), whose answer either
confirms what the spec says or makes the block one that can only move whole; on a CPU it is the
operator, which takes the ``N * C`` bytes of a head for its own.

What the operator of vLLM 0.32 does with a head's ``2 * N * D`` elements, N tokens of D channels,
alike for N of 32, 64, 96 and 128 and D of 32, 64, 80 and 128::

    float32, float16                     K [D][N], V [N][D]                             two planes
    bfloat16 on a machine without AMX    K [D][N], V [N][D]                             two planes
    bfloat16 on a machine with AMX       K [N/16][D/2][16][2], V [D/16][N/2][16][2]     opaque
    a latent, any of them                [N][D]                                         one plane

Latents that are packed with their scales have a page of rows: first those of all values, then those
of all scales, or rows that hold both (``_PACKED``). There the writer is asked, where it can be,
which bytes it writes for each token, and not for values, which it quantises.

A plane is named where the bytes of (token, channel) lie at constant strides. Anything else moves
whole, and its plane bears a fingerprint of the interior, so that unlike interiors have no plane in
common and are refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.specs import LayerSpec
from kvxfer.transfer.layout import SCALE_NBYTES

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(K ``[T, H, D]``, V the same, cache ``[B, H, N, C]``, slots ``[T]``): an operator that writes a
cache as the platform does; a latent's has D elements in K and none in V."""

FP8_PER_TOKEN_HEAD = "fp8_per_token_head"
"""vLLM's mode in which each cell is [K | its scale | V | its scale], scales of float32."""
SCALE_SUFFIX = "_scale"
SCALES = "latent_scales"
_PACKED = {
    ("fp8_ds_mla", 656): (656,),  # DeepSeek V3.2: 512 fp8, 4 scales of float32, 64 bfloat16
    ("nvfp4_ds_mla", 352): (352,),  # 512 fp4, 64 fp8, 32 scales of fp8
    ("fp8_ds_mla", 584): (576, 8),  # V4: 448 fp8 and 64 bfloat16; 7 scales and a byte
    ("fp8_ds_mla", 528): (512, 16),  # V4.1: 512 fp8; 16 scales
    ("none", 132): (128, 4),  # the indexer's key: 128 fp8; a scale of float32
    ("none", 68): (64, 4),  # the same: 128 fp4; 4 scales
}
"""By type and bytes of a cell: bytes of a row of values, and of one of scales if these lie apart
(vLLM 0.32, ``flashmla_sparse.py``, ``fused_compress_quant_cache.py``).
"""
_BASE = 8
"""Codes are 1 to 8, which every floating type holds exactly, also those of one byte."""
_BLOCK = 1  # of three: what is written before or behind it shows
_PROBE_HEADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The geometry of a registered view, in bytes; ``num_tokens`` are those of a kernel block."""

    num_slots: int
    num_tokens: int
    cell_nbytes: int
    stride_slot: int
    stride_token: int

    @property
    def block_nbytes(self) -> int:
        """Bytes of a kernel block without gaps."""
        return self.num_slots * self.num_tokens * self.cell_nbytes

    @property
    def order(self) -> str | None:
        """Which of slots (H) and tokens (N) is outermost in a block without gaps; None: gaps."""
        head_major = (self.num_tokens * self.cell_nbytes, self.cell_nbytes)
        token_major = (self.cell_nbytes, self.num_slots * self.cell_nbytes)
        for order, strides in (("HN", head_major), ("NH", token_major)):
            counts = (self.num_slots, self.num_tokens)
            got = (self.stride_slot, self.stride_token)
            pairs = zip(counts, strides, got, strict=True)
            if all(count == 1 or wanted == found for count, wanted, found in pairs):
                return order
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One named plane of a kernel block, in the words of a Region; bytes, from the block's first.

    ``channel_nbytes`` 0: the ``inner_nbytes`` of a token are contiguous.
    """

    plane: str
    offset: int
    inner_nbytes: int
    stride_token: int
    channel_nbytes: int = 0
    stride_channel: int = 0


@dataclass(frozen=True, slots=True)
class Named:
    """Heads and tokens can be told apart."""

    planes: tuple[Plane, ...]


@dataclass(frozen=True, slots=True)
class Opaque:
    """Blocks move as they are, to blocks of the same fingerprint."""

    fingerprint: str


Inside = Named | Opaque


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a writer put the elements of one block: ``at[plane, head, token, channel]``, counted
    in elements from the block's first as ``[H, N, C]`` is read, whatever its strides.

    ``is_of_view``: the scratch block had the order of the registered view; else it had no gaps and
    was ``[H, N, C]`` in memory.
    """

    at: Tensor
    is_of_view: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a writer put each token's bytes: ``written[token, byte of the block]``."""

    written: Tensor


def look_inside(
    layer: str, spec: LayerSpec, cells: Cells, *, trace: Trace | Rows | None = None
) -> Inside:
    """The interior of a layer's kernel blocks. ``trace``: of the platform's writer for these cells;
    None where the spec says it all. Raises ConfigError for an interior that can neither be named
    nor be told from others.
    """
    if rows := packed_planes(spec, cells):
        if not isinstance(trace, Rows) or _holds(rows, trace):
            return Named(rows)
        return _whole(layer, spec, cells, _digest(trace.written))
    assert not isinstance(trace, Rows)
    if scaled := _scaled_planes(spec, cells):
        return Named(scaled)
    if problem := _unnamed(spec, cells):
        raise ConfigError(
            f"{layer}: interior: expected plain K and V in every cell, got {problem}; choose "
            "another attention backend or KV cache type"
        )
    if trace is None:
        return Named(_stated_planes(spec, cells))
    if trace.is_of_view:
        if torch.equal(trace.at, _stated_places(trace.at.shape)):
            return Named(_stated_planes(spec, cells))
        return _whole(layer, spec, cells, _digest(trace.at))
    if cells.stride_token != cells.cell_nbytes:
        raise ConfigError(
            f"{layer}: interior: expected the {cells.num_tokens} cells of a head side by side, as "
            f"the platform writes them, got {cells.stride_token} bytes from one to the next; "
            "choose another KV cache layout"
        )
    planes = _traced_planes(spec, trace)
    return Named(planes) if planes else _whole(layer, spec, cells, _digest(trace.at))


def packed_planes(spec: LayerSpec, cells: Cells) -> tuple[Plane, ...]:
    """Of latents that are packed with their scales; none of others."""
    parts = _PACKED.get((spec.quantisation, cells.cell_nbytes), ())
    is_row = cells.num_slots == 1 and cells.stride_token == cells.cell_nbytes
    if not spec.is_latent or spec.dtype != torch.uint8 or not is_row:
        return ()
    planes, offset = [], 0
    for name, nbytes in zip(("latent", SCALES), parts, strict=False):
        planes.append(Plane(plane=name, offset=offset, inner_nbytes=nbytes, stride_token=nbytes))
        offset += cells.num_tokens * nbytes
    return tuple(planes)


def trace_rows(write: Callable[[Tensor, Tensor], None], pool: Tensor) -> Rows:
    """Which bytes ``write`` changes of a block for each of its tokens, whatever it puts there.

    Args:
        write: (cache, slots ``[1]``) writes one token.
        pool: three scratch blocks of bytes ``[3, N, C]``.

    Raises:
        ConfigError: a token that is written beyond its block.
    """
    num_tokens = pool.shape[1]
    written = torch.zeros(num_tokens, pool[0].numel(), dtype=torch.bool)
    for token in range(num_tokens):
        slots = torch.tensor([_BLOCK * num_tokens + token], device=pool.device)
        for fill in (0, 255):  # a byte that is written differs from one of them
            write(pool.fill_(fill), slots)
            changed = (pool != fill).flatten(1).cpu()
            if bool(changed[0].any()) or bool(changed[2].any()):
                raise _beyond_its_block()
            written[token] |= changed[_BLOCK]
    return Rows(written)


def _holds(planes: tuple[Plane, ...], rows: Rows) -> bool:
    """Does each token's place in the planes hold all that was written for it, and something was?"""
    left = rows.written.clone()
    for token in range(len(left)):
        for plane in planes:
            first = plane.offset + token * plane.stride_token
            left[token, first : first + plane.inner_nbytes] = False
    return not bool(left.any()) and bool(rows.written.any(dim=1).all())


def trace_writes(
    write: Write,
    *,
    spec: LayerSpec,
    num_tokens: int,
    dtype: torch.dtype,
    pool: Tensor | None = None,
) -> Trace:
    """Where ``write`` puts each element of a block of ``num_tokens`` tokens.

    Every element is written several times with one digit of its number each, in code; what each
    code looks like in the cache is learnt first, so quantised caches are read as well.

    Args:
        pool: three scratch blocks ``[3, H, N, C]`` in the order of a registered view; without it
            they are made here, on the host.

    Raises:
        ConfigError: elements that are not each in one place of their own (mixed, or dropped).
    """
    is_of_view = pool is not None
    if pool is None:
        num_heads = 1 if spec.is_latent else _PROBE_HEADS
        pool = torch.empty(
            (3, num_heads, num_tokens, spec.dense_nbytes // spec.dtype.itemsize), dtype=spec.dtype
        )
    shape = (1 if spec.is_latent else 2, pool.shape[1], num_tokens, spec.head_size)
    number = torch.arange(math.prod(shape)).reshape(shape)
    looks = torch.stack(
        [_written(write, pool, torch.full(shape, 1.0 + digit), dtype) for digit in range(_BASE)]
    )
    marks = looks[:, 0]
    is_clear = bool((looks == marks[:, None]).all()) and len(set(marks.tolist())) == _BASE
    if not is_clear or looks.shape[1] != number.numel():
        raise _unreadable(spec, num_tokens)
    found = torch.zeros(number.numel(), dtype=torch.int64)
    place = 1
    while place < number.numel():
        got = _written(write, pool, (number // place % _BASE + 1).float(), dtype)
        hits = got[:, None] == marks
        if not bool(hits.any(dim=1).all()):
            raise _unreadable(spec, num_tokens)
        found += hits.int().argmax(dim=1) * place
        place *= _BASE
    at = found.argsort()
    if not torch.equal(found[at], number.flatten()):
        raise _unreadable(spec, num_tokens)
    return Trace(at.reshape(shape), is_of_view)


def _unreadable(spec: LayerSpec, num_tokens: int) -> ConfigError:
    return ConfigError(
        "interior: expected the platform to write each element of K and V to a place of its own, "
        f"got others with {num_tokens} tokens of {spec.head_size} channels in {spec.dtype}; choose "
        "another KV cache type"
    )


def _written(write: Write, pool: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The middle block's elements as integers after writing ``codes`` [plane, head, token, D]."""
    raw = pool.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[pool.element_size()])
    raw.zero_()
    # [plane, token, head, D]
    tokens = codes.to(pool.device, dtype).transpose(1, 2).contiguous()
    num_tokens = tokens.shape[1]
    slots = torch.arange(num_tokens, dtype=torch.int64, device=pool.device) + _BLOCK * num_tokens
    write(tokens[0], tokens[-1], pool, slots)
    if bool(raw[0].any()) or bool(raw[2].any()):
        raise _beyond_its_block()
    return raw[_BLOCK].flatten().cpu().to(torch.int64)


def _beyond_its_block() -> ConfigError:
    return ConfigError(
        "interior: expected the platform to write tokens into their own block only, got others "
        "changed; this platform's cache cannot be read"
    )


def _traced_planes(spec: LayerSpec, trace: Trace) -> tuple[Plane, ...] | None:
    """Planes at constant strides, the same in every head; None if it is not so."""
    at, itemsize = trace.at, spec.dtype.itemsize
    _, num_heads, num_tokens, num_channels = at.shape
    per_head = at.numel() // num_heads
    planes = []
    for name, places in zip(_names(spec), at, strict=True):
        first = int(places[0, 0, 0])
        by_token = int(places[0, 1, 0]) - first if num_tokens > 1 else num_channels
        by_channel = int(places[0, 0, 1]) - first if num_channels > 1 else 1
        expected = (
            first
            + torch.arange(num_heads)[:, None, None] * per_head
            + torch.arange(num_tokens)[:, None] * by_token
            + torch.arange(num_channels) * by_channel
        )
        if min(by_token, by_channel) < 1 or not torch.equal(places, expected):
            return None
        apart = by_channel != 1
        planes.append(
            Plane(
                plane=name,
                offset=first * itemsize,
                inner_nbytes=num_channels * itemsize,
                stride_token=by_token * itemsize,
                channel_nbytes=itemsize if apart else 0,
                stride_channel=by_channel * itemsize if apart else 0,
            )
        )
    return tuple(planes)


def _stated_places(shape: torch.Size) -> Tensor:
    """``Trace.at`` of a writer that does what the spec says."""
    planes, heads, tokens, channels = shape
    return torch.arange(shape.numel()).reshape(heads, tokens, planes, channels).permute(2, 0, 1, 3)


def _stated_planes(spec: LayerSpec, cells: Cells) -> tuple[Plane, ...]:
    """K before V in every cell, or the latent alone."""
    itemsize = spec.dtype.itemsize
    sizes = (spec.head_size, spec.head_size_v)
    return tuple(
        Plane(
            plane=name,
            offset=index * spec.head_size * itemsize,
            inner_nbytes=size * itemsize,
            stride_token=cells.stride_token,
        )
        for index, (name, size) in enumerate(zip(_names(spec), sizes, strict=False))
    )


def _scaled_planes(spec: LayerSpec, cells: Cells) -> tuple[Plane, ...]:
    """Of cells with a scale behind K and one behind V, as vLLM 0.32 packs them; else none."""
    half_nbytes = spec.head_size * spec.dtype.itemsize + SCALE_NBYTES
    is_packed = (
        spec.quantisation == FP8_PER_TOKEN_HEAD
        and not spec.is_latent
        and spec.head_size == spec.head_size_v
        and spec.num_head_slots is None
        and cells.num_slots == spec.num_kv_heads
        and spec.cell_nbytes == cells.cell_nbytes == 2 * half_nbytes
    )
    if not is_packed:
        return ()
    return tuple(
        Plane(
            plane=name + suffix,
            offset=half * half_nbytes + offset,
            inner_nbytes=nbytes,
            stride_token=cells.stride_token,
        )
        for half, name in enumerate(_names(spec))
        for suffix, offset, nbytes in (
            ("", 0, half_nbytes - SCALE_NBYTES),
            (SCALE_SUFFIX, half_nbytes - SCALE_NBYTES, SCALE_NBYTES),
        )
    )


def _names(spec: LayerSpec) -> tuple[str, ...]:
    return ("latent",) if spec.is_latent else ("k", "v")


def _unnamed(spec: LayerSpec, cells: Cells) -> str | None:
    """Why the spec alone does not say where K and V are; None if it does."""
    if spec.num_head_slots is not None:
        return f"{spec.num_head_slots} head slots of its own"
    if cells.num_slots != spec.num_kv_heads:
        return f"{cells.num_slots} head slots for {spec.num_kv_heads} heads"
    if (spec.cell_nbytes, cells.cell_nbytes) not in {
        (None, spec.dense_nbytes),
        (spec.dense_nbytes, spec.dense_nbytes),
    }:
        return f"cells of {cells.cell_nbytes} bytes for {spec.dense_nbytes} bytes of K and V"
    if spec.quantisation not in ("none", "fp8_per_tensor"):
        return f"quantisation {spec.quantisation}"
    # Values and their scales may share a cell of bytes (sparse attention's indexers do).
    if spec.quantisation == "none" and spec.dtype.itemsize == 1:
        return "bytes of which no quantisation is stated"
    return None


def _whole(layer: str, spec: LayerSpec, cells: Cells, interior: str) -> Opaque:
    if spec.cell_tokens > 1:
        raise ConfigError(
            f"{layer}: interior: expected states of {spec.cell_tokens} tokens at constant strides, "
            "got others; choose another attention backend or KV cache type"
        )
    if cells.order is None:
        raise ConfigError(
            f"{layer}: expected blocks without gaps, which can move whole, got strides of "
            f"{cells.stride_slot} (head slot) and {cells.stride_token} (token) bytes for cells of "
            f"{cells.cell_nbytes}; choose another KV cache layout"
        )
    facts = (
        *(cells.order, cells.num_slots, cells.num_tokens, cells.cell_nbytes, spec.dtype),
        *(spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.is_latent),
        *(spec.quantisation, spec.num_head_slots, spec.cell_nbytes, interior),
    )
    text = " ".join(map(str, facts))
    return Opaque(hashlib.blake2b(text.encode(), digest_size=6).hexdigest())


def _digest(places: Tensor) -> str:
    return hashlib.blake2b(places.numpy().tobytes(), digest_size=16).hexdigest()
