"""A transfer plan as an SVG picture: the ranks of both sides, and a band from rank to rank for each
set of regions that move alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from kvxfer.plan.transfer_plan import Move, TransferPlan
from kvxfer.transfer.costs import size_text
from kvxfer.transports.choice import ms_text

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f")
_GREY, _LIGHT, _DARK = "#6e7681", "#e6e9ed", "#24292f"
_WIDTH, _BOX, _MARGIN, _TOP, _HEAD, _ROW, _GAP = 1120, 400, 24, 92, 26, 38, 14
_COLUMNS = (("layers", 126), ("heads", 96), ("tokens", 130))
"""Of a row, each with words above a bar of all that there is of it."""


def draw(plan: TransferPlan) -> str:
    shapes = [_text(_MARGIN, 30, f"{plan.num_tokens} tokens, {size_text(plan.nbytes)}", 20)]
    right, bottom = _WIDTH - _MARGIN - _BOX, 0
    tops: dict[tuple[str, Move], int] = {}
    colours: dict[str, str] = {}
    for side, x in (("source", _MARGIN), ("sink", right)):
        served, _, model = str(getattr(plan, side)).partition(": ")
        shapes += [_text(x, 56, f"{side}: {served}", 13), _text(x, 74, model, 12, _GREY)]
        y = _TOP
        for rank in sorted({getattr(move, side) for move in plan.moves}, key=_numbers):
            colours.setdefault(rank, _COLOURS[len(colours) % len(_COLOURS)])
            moves = [move for move in plan.moves if getattr(move, side) == rank]
            if side == "sink":
                moves = [move for move in moves if move.layers]
            shapes.append(
                f'<rect x="{x}" y="{y}" width="{_BOX}" height="{_HEAD + _ROW * len(moves)}" rx="6" '
                'fill="none" stroke="#c9ced6"/>'
            )
            size = size_text(sum(move.nbytes for move in moves))
            shapes += [_text(x + 12, y + 18, rank, 13), _text(x + 330, y + 18, size, 12, _GREY)]
            y += _HEAD
            for move in moves:
                tops[side, move] = y
                shapes += _row(x, y, move, colours[move.source], plan)
                y += _ROW
            y += _GAP
        bottom = max(bottom, y)
    for move in plan.moves:
        if move.layers:
            start, end = tops["source", move] + 4, tops["sink", move] + 4
            shapes.append(_band(_MARGIN + _BOX, start, right, end, colours[move.source]))
    body = "\n".join((*shapes, _text(_MARGIN, bottom + 28, _footer(plan), 12, _GREY)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 48}" '
        f'font-family="Helvetica, Arial, sans-serif"><rect width="100%" height="100%" fill="#fff"/>'
        f"\n{body}\n</svg>\n"
    )


def _numbers(rank: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", rank)]


def _row(x: int, y: int, move: Move, colour: str, plan: TransferPlan) -> Iterator[str]:
    if not move.layers:
        yield _text(x + 14, y + 23, f"not read; {move.sink} tells it to let go", 12, _GREY)
        return
    yield _bar(x, y + 4, 5, _ROW - 8, colour)
    spans = ([(each, each + 1) for each in move.layers], [move.heads], [move.tokens])
    totals = (plan.source.layers, plan.source.kv_heads, plan.num_tokens)
    x += 14
    for (name, width), words, parts, total in zip(_COLUMNS, move.words, spans, totals, strict=True):
        yield _text(x, y + 18, words if words == "latent" else f"{name} {words}", 12)
        yield _bar(x, y + 24, width - 12, 5, _LIGHT)
        scale = (width - 12) / total
        for lo, hi in parts:
            yield _bar(x + lo * scale, y + 24, (hi - lo) * scale, 5, colour)
        x += width


def _band(x: int, y: int, to_x: int, to_y: int, colour: str) -> str:
    middle, thick = (x + to_x) / 2, _ROW - 8
    return (
        f'<path d="M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}v{thick}C{middle} '
        f'{to_y + thick} {middle} {y + thick} {x} {y + thick}z" fill="{colour}" opacity="0.35"/>'
    )


def _bar(x: float, y: int, width: float, height: int, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{fill}"/>'


def _text(x: int, y: int, words: str, size: int, fill: str = _DARK) -> str:
    weight = 600 if fill == _DARK and size > 12 else 400
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def _footer(plan: TransferPlan) -> str:
    times = ", ".join(f"{wire.wire} {ms_text(wire.duration_s)} ms" for wire in plan.wires)
    link = "" if plan.gbps is None else f" over links of {plan.gbps:g} GB/s"
    measured = dict.fromkeys(f"{w.figures.hardware}, {w.figures.date}" for w in plan.wires)
    return f"Predicted{link}: {times}. Wires as measured on {'; '.join(measured)}."
