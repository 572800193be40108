"""The picture: well formed, nothing outside, a band and two rows for each move."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from kvxfer.plan.drawing import draw
from kvxfer.plan.geometry import Geometry
from kvxfer.plan.transfer_plan import TransferPlan, plan_transfer

SVG = "{http://www.w3.org/2000/svg}"
LLAMA = Geometry(layers=32, kv_heads=8, head_dim=128)
LATENT = Geometry(layers=61, head_dim=576, mla=True)
HYBRID = Geometry(layers=26, kv_heads=4, head_dim=256, windows="512/512/full")
CASES = {
    "tp4-tp2": (replace(LLAMA, tp=4), replace(LLAMA, tp=2)),
    "tp2-tp4": (replace(LLAMA, tp=2), replace(LLAMA, tp=4)),
    "tp1-tp1": (LLAMA, LLAMA),
    "latent": (replace(LATENT, tp=4), replace(LATENT, tp=2)),
    "stages": (replace(LLAMA, pp=2, tp=2), LLAMA),
    "windows": (HYBRID, replace(HYBRID, tp=2, block=8)),
    "many": (replace(LLAMA, tp=16), replace(LLAMA, tp=2, pp=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_move_is_a_band_between_two_rows(name: str) -> None:
    plan = plan_transfer(*CASES[name], 2048)
    assert isinstance(plan, TransferPlan)
    picture = ElementTree.fromstring(draw(plan))
    moves = [move for move in plan.moves if move.layers]
    bands = [each.attrib for each in picture.iter(f"{SVG}path")]
    assert len(bands) == len(moves)
    words = [each.text or "" for each in picture.iter(f"{SVG}text")]
    for move in plan.moves:
        if move.layers:
            for column, text in zip(("layers", "heads", "tokens"), move.words, strict=True):
                shown = text if text == "latent" else f"{column} {text}"
                assert words.count(shown) >= 2
        else:
            assert f"not read; {move.sink} tells it to let go" in words
    for rank in {move.source for move in plan.moves} | {move.sink for move in plan.moves}:
        assert rank in words
    check_bounds(picture)
    check_ends(picture, bands)


def check_bounds(picture: ElementTree.Element) -> None:
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for each in (*picture.iter(f"{SVG}rect"), *picture.iter(f"{SVG}text")):
        if each.attrib.get("width") == "100%":
            continue
        x, y = (float(each.attrib[name]) for name in "xy")
        right = x + float(each.attrib.get("width", 0))
        bottom = y + float(each.attrib.get("height", 0))
        assert 0 <= x <= right <= width, each.attrib
        assert 0 <= y <= bottom <= height, each.attrib


def check_ends(picture: ElementTree.Element, bands: list[dict[str, str]]) -> None:
    """A band begins and ends at marks of its own colour, and no two at the same one."""
    marks = {
        (float(each.attrib["x"]), float(each.attrib["y"])): each.attrib["fill"]
        for each in picture.iter(f"{SVG}rect")
        if each.attrib.get("width") == "5.0" and each.attrib["height"] == "30"
    }
    left = min(x for x, _ in marks)
    ends: list[tuple[float, float]] = []
    for band in bands:
        numbers = [float(each) for each in re.findall(r"[\d.]+", band["d"])]
        start, end = (left, numbers[1]), (numbers[6], numbers[7])
        assert marks[start] == marks[end] == band["fill"]
        ends += [start, end]
    assert sorted(ends) == sorted(marks)


def test_ranks_of_two_digits_come_in_order() -> None:
    plan = plan_transfer(*CASES["many"], 64)
    assert isinstance(plan, TransferPlan)
    text = draw(plan)
    assert text.index(">pp0tp2<") < text.index(">pp0tp10<")
