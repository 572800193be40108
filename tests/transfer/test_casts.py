"""Which planes are cast, what of them travels, and who is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET, convert, to_builtins
from msgspec.structs import replace

from kvxfer.errors import IncompatiblePeer, ProtocolError
from kvxfer.transfer.casts import Values
from kvxfer.transfer.compatibility import check_compatible, differences
from kvxfer.transfer.layout import Elements, Interior, Region, check_region
from kvxfer.transfer.manifest import EngineManifest
from kvxfer.transfer.plan import CopyClass, DenseOrder, PullClass, make_plan
from kvxfer.transfer.pull import PullResolver
from tests.builders import EngineShape, pull_classes
from tests.casts import cast_engine

SHAPE = EngineShape(tp_size=2, num_kv_heads=4)
ONE = EngineShape(num_kv_heads=4, layout="NHD")


def engine(
    dtype: str, scales: str = "none", shape: EngineShape = ONE, **more: int
) -> EngineManifest:
    return cast_engine(shape, dtype, dtype, scales, **more)


BF16 = engine("bfloat16", shape=SHAPE)
E4M3 = engine("float8_e4m3fn", "tensor")


def changed(manifest: EngineManifest, change: Callable[[Region], Region]) -> EngineManifest:
    ranks = (replace(r, regions=tuple(map(change, r.regions))) for r in manifest.ranks)
    return replace(manifest, ranks=tuple(ranks))


def restated(**fields: Any) -> Callable[[Region], Region]:
    """Other elements of the data planes."""

    def change(region: Region) -> Region:
        if region.plane.endswith("_scale"):
            return region
        assert region.elements
        return replace(region, elements=replace(region.elements, **fields))

    return change


def of_plane(plane: str, **fields: Any) -> Callable[[Region], Region]:
    return lambda region: replace(region, **fields) if region.plane == plane else region


def classes(source: EngineManifest, sink: EngineManifest) -> list[CopyClass]:
    check_compatible(source, sink)
    return [each for route in make_plan(source, sink).routes for each in route.classes]


# ---------------------------------------------------------------- what travels


@pytest.mark.parametrize(
    ("source", "sink", "travels"),
    [
        pytest.param(("bfloat16", "none"), ("float8_e4m3fn", "tensor"), "sink", id="fewer bytes"),
        pytest.param(("float8_e4m3fn", "head"), ("float32", "none"), "source", id="more bytes"),
        pytest.param(("float16", "none"), ("bfloat16", "none"), "source", id="as many"),
        pytest.param(("bfloat16", "none"), ("float8_e4m3fn", "token"), "source", id="made there"),
        pytest.param(("float8_e4m3fn", "token"), ("float32", "none"), "sink", id="kept there"),
    ],
)
def test_as_few_bytes_travel_as_can_without_scales_of_tokens(
    source: tuple[str, str], sink: tuple[str, str], travels: str
) -> None:
    ours, theirs = engine(*source), engine(*sink)
    (route,) = make_plan(ours, theirs).routes
    for copied, pull in zip(route.classes, pull_classes(route, {0: (0, 16)}), strict=True):
        assert copied.source.values
        assert copied.sink.values
        chosen = copied.sink.values if travels == "sink" else copied.source.values
        assert copied.source.chunk == copied.sink.chunk == chosen
        assert pull.inner_nbytes == 8 * chosen.item_nbytes
        assert pull.order == DenseOrder(16, True)
        assert pull.cast == (chosen if travels == "sink" else UNSET)
        assert convert(to_builtins(pull), PullClass) == pull


def test_scales_are_those_of_the_wanted_heads() -> None:
    found = classes(engine("bfloat16"), engine("float8_e4m3fn", "head", SHAPE))
    scales = {(c.head_lo, c.sink.values.scales) for c in found if c.sink.values}
    wanted = {
        (
            lo,
            tuple(
                region.elements.scales
                for region in rank.regions
                if region.elements and region.head_lo == lo
            ),
        )
        for lo, rank in zip((0, 2), engine("float8_e4m3fn", "head", SHAPE).ranks, strict=True)
    }
    assert scales == wanted


def test_planes_of_scales_move_between_equal_types_and_are_made_for_others() -> None:
    token = engine("float8_e4m3fn", "token")
    moved = [name.planes for c in classes(token, token) for name in c.names]
    assert {plane for planes in moved for plane in planes} == {"k", "k_scale", "v", "v_scale"}
    assert all(c.source.values is None for c in classes(token, token))
    made = [name.planes for c in classes(BF16, token) for name in c.names]
    assert {plane for planes in made for plane in planes} == {"k", "v"}


def test_equal_types_and_scales_are_not_cast() -> None:
    for scales in ("none", "tensor", "head"):
        assert all(c.source.values is None for c in classes(E4M3, E4M3))
        ours = engine("float8_e4m3fn", scales, SHAPE)
        assert all(c.source.values is None for c in classes(ours, engine("float8_e4m3fn", scales)))
    packed = EngineShape(outermost="inner")
    (copied,) = classes(engine("bfloat16", shape=packed), engine("bfloat16", shape=packed))
    assert copied.names[0].planes == ("k", "v")  # joined, whatever they state


# ---------------------------------------------------------------- who is refused


def test_one_side_that_states_nothing_allows_nothing() -> None:
    silent = changed(E4M3, lambda region: replace(region, elements=UNSET))
    for pair in ((BF16, silent), (changed(BF16, of_plane("k", elements=UNSET)), silent)):
        fields = [found.field for found in differences(*pair)]
        assert fields[:2] == ["dtype", "quantisation"]
        with pytest.raises(IncompatiblePeer, match="or set allow_cast on both"):
            check_compatible(*pair)


TOKEN = engine("float8_e4m3fn", "token")
REFUSED: dict[str, tuple[EngineManifest, EngineManifest, str]] = {
    "another type": (
        BF16,
        changed(E4M3, restated(dtype="float8_e4m3fnuz")),
        "sink has float8_e4m3fnuz; what can be cast is float32, bfloat16, float16, float8_e4m3fn",
    ),
    "a plane of no stated type": (
        BF16,
        changed(E4M3, of_plane("v", elements=UNSET)),
        "v heads [0, 2): sink has elements of which it states no type",
    ),
    "opaque": (
        changed(BF16, lambda region: replace(region, interior=Interior.OPAQUE)),
        changed(E4M3, lambda region: replace(region, interior=Interior.OPAQUE)),
        "source has interior opaque, which cannot be cast",
    ),
    "other counts": (
        engine("bfloat16", num_elements=16),
        E4M3,
        "source has 16 elements a head and token, sink 8",
    ),
    "scales of tokens on both sides": (
        TOKEN,
        engine("float8_e5m2", "token"),
        "source has float8_e4m3fn with a scale of each token, sink float8_e5m2",
    ),
    "scales that are not there": (
        BF16,
        changed(TOKEN, restated(scale_plane="scales")),
        "sink has no plane scales of its scales",
    ),
    "scales of another size": (
        changed(TOKEN, of_plane("k_scale", inner_nbytes=2)),
        BF16,
        "source has a plane k_scale that is not one float32 for each head and token",
    ),
    "elements between addresses": (
        changed(BF16, lambda region: replace(region, offset=region.offset + 1)),
        E4M3,
        "source has bfloat16 that does not lie at multiples of its size",
    ),
    "channels of another size": (
        changed(
            BF16,
            lambda region: replace(region, channel_nbytes=4, stride_channel=1 << 16),
        ),
        E4M3,
        "source has bfloat16 that does not lie at multiples of its size",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cast_is_refused_by_name(case: str) -> None:
    source, sink, text = REFUSED[case]
    with pytest.raises(IncompatiblePeer) as e:
        make_plan(source, sink)
    assert text in str(e.value)


def test_a_region_has_a_scale_for_each_head_or_one() -> None:
    region = E4M3.ranks[0].regions[0]
    wrong = replace(region, elements=Elements("float8_e4m3fn", (1.0,) * 3))
    with pytest.raises(ValueError, match="scales: expected none, one or one for each of 4 heads"):
        check_region(wrong, 1 << 30)


# ---------------------------------------------------------------- what a source believes


def asked(**change: Any) -> PullClass:
    (route, *_) = make_plan(BF16, E4M3).routes
    return replace(pull_classes(route, {0: (0, 16)})[0], **change)


def test_a_source_casts_what_a_pull_asks_for() -> None:
    (side,) = PullResolver(BF16.ranks[0]).resolve((asked(),))
    assert side.values == Values("bfloat16")
    assert side.chunk == asked().cast
    assert side.is_cast


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cast": Values("int4")}, "inner_nbytes: expected 0, got 8"),
        ({"cast": Values("float32")}, "inner_nbytes: expected 32, got 8"),
        ({"cast": Values("float8_e4m3fn", ((1.0,),))}, "expected a scale, or one for each of 2"),
        ({"cast": Values("float8_e4m3fn", ((1.0,) * 3,) * 4)}, "expected a scale, or one for each"),
        ({"order": DenseOrder(16, False)}, "cast: expected a chunk token by token"),
        ({"order": DenseOrder(16, False, 2)}, "cast: expected a chunk token by token"),
    ],
    ids=["no type", "another size", "few scales", "many scales", "an order", "channels"],
)
def test_a_source_casts_nothing_else(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ProtocolError) as e:
        PullResolver(BF16.ranks[0]).resolve((asked(**change),))
    assert text in str(e.value)


def test_a_source_that_allows_no_cast_makes_none() -> None:
    silent = changed(BF16, lambda region: replace(region, elements=UNSET)).ranks[0]
    with pytest.raises(ProtocolError, match="inner_nbytes: expected 16, got 8"):
        PullResolver(silent).resolve((asked(),))
    with pytest.raises(ProtocolError, match="cast: expected none, for allow_cast is off"):
        PullResolver(silent).resolve((asked(inner_nbytes=16),))
