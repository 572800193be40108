"""Which planes are cast between two engines, and what their elements stand for. Pure.

An engine that allows casts states the elements of its regions. Where two engines both do, and a
plane's types or scales differ, the copy casts it: it dequantises, quantises, or both.
``docs/protocol.md`` section 10 has the arithmetic and its error bounds.
"""

from __future__ import annotations

import msgspec

from kvxfer.transfer.layout import ITEM_NBYTES, SCALE_NBYTES, Elements, Interior, Region, Scale


class Values(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the elements of some regions stand for. ``scales``: of each region one for each head, or
    one for all heads; none where all are 1, or where each token has its own.
    """

    dtype: str
    scales: tuple[tuple[Scale, ...], ...] = ()

    @property
    def item_nbytes(self) -> int:
        return ITEM_NBYTES[self.dtype]


def scales_of(region: Region, elements: Elements, head_lo: int, head_hi: int) -> tuple[float, ...]:
    """The scales of these heads: one if they are equal."""
    scales = elements.scales or (1.0,)
    if len(scales) > 1:
        scales = scales[head_lo - region.head_lo : head_hi - region.head_lo]
    return scales[:1] if len(set(scales)) == 1 else scales


def is_cast(source: Region, sink: Region, head_lo: int, head_hi: int) -> bool:
    """Do equal bytes of these heads stand for different values, as far as both sides say?"""
    ours, theirs = source.elements, sink.elements
    if not ours or not theirs:
        return False
    kinds = [(each.dtype, bool(each.scale_plane)) for each in (ours, theirs)]
    return kinds[0] != kinds[1] or (
        scales_of(source, ours, head_lo, head_hi) != scales_of(sink, theirs, head_lo, head_hi)
    )


def cast_problem(source: Region, sink: Region) -> str | None:
    """Why the one cannot be cast to the other; None if it can."""
    if problem := elements_problem("source", source) or elements_problem("sink", sink):
        return problem
    ours, theirs = source.elements, sink.elements
    assert ours
    assert theirs
    if ours.scale_plane and theirs.scale_plane:
        return (
            f"source has {ours.dtype} with a scale of each token, sink {theirs.dtype}; at most one "
            "side may have such scales"
        )
    if cast_nbytes(ours, source.inner_nbytes, theirs.dtype) != sink.inner_nbytes:
        counts = [
            each.inner_nbytes // ITEM_NBYTES[e.dtype]
            for each, e in ((source, ours), (sink, theirs))
        ]
        return f"source has {counts[0]} elements a head and token, sink {counts[1]}"
    return None


def cast_nbytes(elements: Elements, nbytes: int, dtype: str) -> int:
    """What so many bytes of elements become as another type; 0 for types that are not cast."""
    given, taken = ITEM_NBYTES.get(elements.dtype, 0), ITEM_NBYTES.get(dtype, 0)
    return nbytes // given * taken if given else 0


def elements_problem(side: str, region: Region) -> str | None:
    """Why the elements of a region cannot be cast; None if they can."""
    elements = region.elements
    if not elements or elements.dtype not in ITEM_NBYTES:
        got = elements.dtype if elements else "elements of which it states no type"
        return f"{side} has {got}; what can be cast is {', '.join(ITEM_NBYTES)}"
    if region.interior is not Interior.PLAIN:
        return f"{side} has interior {region.interior.value}, which cannot be cast"
    item_nbytes = ITEM_NBYTES[elements.dtype]
    places = [region.offset, region.inner_nbytes, region.stride_block, region.stride_head]
    places.append(region.stride_token)
    if region.has_channels_apart:
        places.append(region.stride_channel)
    is_apart = region.has_channels_apart and region.channel_nbytes != item_nbytes
    if is_apart or any(place % item_nbytes for place in places):
        return f"{side} has {elements.dtype} that does not lie at multiples of its size"
    return None


def scale_problem(side: str, region: Region, scale: Region | None) -> str | None:
    """Why ``scale`` does not have a scale of each head and token of ``region``."""
    assert region.elements
    plane = region.elements.scale_plane
    if scale is None:
        return f"{side} has no plane {plane} of its scales"
    alike = ("group", "num_blocks", "block_tokens", "head_lo", "head_hi")
    same = all(getattr(region, field) == getattr(scale, field) for field in alike)
    places = (scale.offset, scale.stride_block, scale.stride_head, scale.stride_token)
    if not same or scale.inner_nbytes != SCALE_NBYTES or any(at % SCALE_NBYTES for at in places):
        return f"{side} has a plane {plane} that is not one float32 for each head and token"
    return None
