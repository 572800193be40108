"""Whether two engines can exchange KV, decided field by field.

Unknown is refused, never taken for equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from kvxfer.errors import IncompatiblePeer
from kvxfer.transfer.interleave import MAX_PERIOD, Interleave
from kvxfer.transfer.layout import Region
from kvxfer.transfer.manifest import CacheFacts, EngineManifest
from kvxfer.transfer.windows import Keeping, keeping_of, may_clip

_SHOWN_LAYERS = 4
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two engines do not meet, both values as shown to a person."""

    field: str
    source: str
    sink: str
    advice: str

    def __str__(self) -> str:
        return f"{self.field}: source has {self.source}, sink has {self.sink}; {self.advice}"


_SAME_MODEL = "serve the same model on both sides"
_FACTS: Mapping[str, str] = {
    "model": _SAME_MODEL,
    "weights": "load the same revision of the weights on both sides",
    "rope": "use the same rope settings on both sides",
    "dtype": "use the same KV dtype on both sides, or set allow_cast on both",
    "quantisation": "use the same KV quantisation on both sides, or set allow_cast on both",
    "num_kv_heads": _SAME_MODEL,
    "head_size": _SAME_MODEL,
    "num_layers": _SAME_MODEL,
    "is_mla": _SAME_MODEL,
    "draft_layers": "use the same draft on both sides, or none on one",
    "attention": _SAME_MODEL,
}
"""Every field of CacheFacts that must not differ, and what to do where it does."""
_CAST_FACTS = frozenset({"dtype", "quantisation"})
"""What may differ where both sides allow casts."""
_DRAFT_FACTS = frozenset({"draft_layers", "num_kv_heads"})
"""What may differ where one side has no draft, whose heads count among the engine's."""


def differences(source: EngineManifest, sink: EngineManifest) -> tuple[Difference, ...]:
    """Every field in which KV of ``source`` is not KV for ``sink``; empty if they can exchange it.

    TP, PP and context parallel sizes, block sizes, layouts, KV cache groups and engine versions may
    differ, one side may have a draft and the other none, and the source may keep more of a layer
    than the sink. Which layers and heads are there is the plan's question, and so is where both
    allow casts which elements can be cast.
    """
    may_cast = allows_cast(source) and allows_cast(sink)
    return (
        *_protocol_differences(source, sink),
        *_facts_differences(source.facts, sink.facts, may_cast=may_cast),
        *_interleave_differences(source, sink),
        *_region_differences(source, sink, may_cast=may_cast),
        *_window_differences(source, sink),
    )


def allows_cast(engine: EngineManifest) -> bool:
    """Does it state the elements of its planes?"""
    return any(region.elements for rank in engine.ranks for region in rank.regions)


def unhashable(source: EngineManifest, sink: EngineManifest) -> tuple[Difference, ...]:
    """The block sizes between which a sink block can lack its first tokens; empty if none can.

    An engine that names every full block for prefix reuse must not load from such a source.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for layer, given, taken in _kept_pairs(source, sink):
        if may_clip(taken, given):
            ours, theirs = (
                f"{k.block_tokens} with {k.kept.removesuffix(' tokens')}" for k in (given, taken)
            )
            alike.setdefault((ours, theirs), []).append(layer)
    advice = (
        "the window can begin within a sink block, which must then not be named for prefix reuse, "
        "and the sink cannot prevent that; give the source blocks that are a multiple of the "
        "sink's, or switch prefix caching off at the sink"
    )
    return tuple(
        Difference(f"block_tokens of {_layers(layers)}", *shown, advice)
        for shown, layers in alike.items()
    )


def check_compatible(
    source: EngineManifest, sink: EngineManifest, *, can_leave_unhashed: bool = True
) -> None:
    """Raise IncompatiblePeer that lists every field of :func:`differences`, if there is one.

    ``can_leave_unhashed``: the sink can keep single blocks from prefix reuse; False also refuses
    what :func:`unhashable` finds.
    """
    found = differences(source, sink)
    if not can_leave_unhashed:
        found += unhashable(source, sink)
    if found:
        raise IncompatiblePeer(
            f"engines {source.engine_id} and {sink.engine_id} cannot exchange KV: "
            + " | ".join(map(str, found))
        )


def _protocol_differences(source: EngineManifest, sink: EngineManifest) -> Iterator[Difference]:
    if max(source.protocol[0], sink.protocol[0]) > min(source.protocol[1], sink.protocol[1]):
        yield Difference(
            "protocol",
            "versions {} to {}".format(*source.protocol),
            "versions {} to {}".format(*sink.protocol),
            "upgrade the older side",
        )


def _facts_differences(
    source: CacheFacts, sink: CacheFacts, *, may_cast: bool
) -> Iterator[Difference]:
    may_differ = _CAST_FACTS if may_cast else frozenset()
    if bool(source.draft_layers) != bool(sink.draft_layers):
        may_differ |= _DRAFT_FACTS
    for field, advice in _FACTS.items():
        ours, theirs = getattr(source, field), getattr(sink, field)
        if ours == "" or theirs == "":
            unknown = "the side that does not know it must state it"
            yield Difference(field, _shown(ours), _shown(theirs), unknown)
        elif ours != theirs and field not in may_differ:
            yield Difference(field, _shown(ours), _shown(theirs), advice)


def _interleave_differences(source: EngineManifest, sink: EngineManifest) -> Iterator[Difference]:
    """Which tokens a rank keeps may differ, where its engine says it and it repeats soon."""
    is_stated = [
        max(each.facts.dcp_size, each.facts.pcp_size) == 1 or bool(interleaves(each))
        for each in (source, sink)
    ]
    if not all(is_stated):
        ours, theirs = ("them as stated" if each else "some, unstated" for each in is_stated)
        advice = "an engine with context parallelism must state which tokens its ranks keep: "
        yield Difference("tokens of a rank", ours, theirs, f"{advice}upgrade it")
        return
    periods = [{each.period for each in interleaves(e)} or {1} for e in (source, sink)]
    if max(math.lcm(*pair) for pair in itertools.product(*periods)) > MAX_PERIOD:
        ours, theirs = (", ".join(map(str, sorted(each))) for each in periods)
        yield Difference(
            "context parallel size times interleave size",
            ours,
            theirs,
            f"what two ranks share must repeat within {MAX_PERIOD} tokens: make one a multiple of "
            "the other",
        )


def interleaves(engine: EngineManifest) -> set[Interleave]:
    """How its ranks keep only some tokens; empty where each keeps all."""
    regions = (region for rank in engine.ranks for region in rank.regions)
    return {region.interleave for region in regions if region.interleave}


def _region_differences(
    source: EngineManifest, sink: EngineManifest, *, may_cast: bool
) -> Iterator[Difference]:
    """Inner size and interior of each plane that both have; one line for all planes alike."""
    fields = [("interior", "use the same attention backend on both sides")]
    if not may_cast:
        fields.insert(0, ("inner_nbytes", "use the same head size and KV dtype on both sides"))
    for field, advice in fields:
        ours, theirs = (_by_plane(each, attrgetter(field)) for each in (source, sink))
        alike: dict[tuple[str, str], list[str]] = {}
        for name in theirs:
            if name in ours and ours[name].keys() != theirs[name].keys():
                given, taken = (", ".join(map(str, sorted(at[name]))) for at in (ours, theirs))
                alike.setdefault((given, taken), []).append("/".join(name))
        for values, names in alike.items():
            more = f" and {len(names) - 1} more planes" if len(names) > 1 else ""
            yield Difference(f"{field} of {names[0]}{more}", *values, advice)


def _window_differences(source: EngineManifest, sink: EngineManifest) -> Iterator[Difference]:
    """A sink can keep less of a layer than its source does, never more."""
    alike: dict[tuple[str, str], list[str]] = {}
    for layer, given, taken in _kept_pairs(source, sink):
        if not given.includes(taken):
            alike.setdefault((_window(given), _window(taken)), []).append(layer)
    for values, layers in alike.items():
        yield Difference(
            f"window of {_layers(layers)}",
            *values,
            "make the source keep at least what the sink keeps: the same windows on both sides, or "
            "none at the source",
        )


def _window(keeping: Keeping) -> str:
    if keeping.window is None:
        return "all tokens"
    return f"{'chunks of ' if keeping.is_chunk else ''}{keeping.window} tokens"


def _kept_pairs(
    source: EngineManifest, sink: EngineManifest
) -> Iterator[tuple[str, Keeping, Keeping]]:
    """(layer, what the source keeps, what the sink keeps), each that occurs once."""
    ours, theirs = (_by_plane(each, keeping_of) for each in (source, sink))
    pairs = {
        (layer, given, taken): None
        for (layer, plane), kept in theirs.items()
        for given in ours.get((layer, plane), ())
        for taken in kept
    }
    yield from pairs


def _by_plane(
    manifest: EngineManifest, value: Callable[[Region], _T]
) -> dict[tuple[str, str], dict[_T, None]]:
    """A value of regions by (layer, plane); several if the ranks disagree."""
    found: dict[tuple[str, str], dict[_T, None]] = {}
    for rank in manifest.ranks:
        for region in rank.regions:
            found.setdefault((region.layer, region.plane), {})[value(region)] = None
    return found


def _layers(layers: list[str]) -> str:
    shown = ", ".join(layers[:_SHOWN_LAYERS])
    more = len(layers) - _SHOWN_LAYERS
    return f"{shown} and {more} more" if more > 0 else shown


def _shown(value: object) -> str:
    if value == "":
        return "unknown"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
