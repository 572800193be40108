"""``kvxfer plan``: its options, and a plan as tables of 80 columns or as JSON."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Option

from kvxfer.errors import ConfigError, IncompatiblePeer

if TYPE_CHECKING:  # it loads torch
    from kvxfer.plan.transfer_plan import TransferPlan

_GEOMETRY = "[CONFIG,]KEY=VALUE,..."
_COLUMNS = 80
_MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    source: Annotated[
        str,
        Option(
            help="The prefill engine: a Hugging Face config.json or its folder, and what differs: "
            "tp=4,pp=1,dcp=2,block=16,layout=HND,kv_cache_dtype=fp8. Without a config: layers, "
            "kv_heads, head_dim, or mla=true, and windows=1024/full.",
            metavar=_GEOMETRY,
        ),
    ]
    sink: Annotated[
        str,
        Option(
            help="The decode engine; without a config of the source's model.", metavar=_GEOMETRY
        ),
    ]
    tokens: Annotated[int, Option(min=1, max=1 << 24, help="Tokens of the request.")] = 2048
    gbps: Annotated[
        float | None,
        Option(
            min=1e-3,
            help="Two hosts, and what the link of each rank carries, in GB/s (1e9 bytes). One host "
            "if not given.",
        ),
    ] = None
    svg: Annotated[
        Path | None, Option(help="Draw what goes where into this file.", metavar="FILE")
    ] = None
    json: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False


def run_plan(options: PlanOptions) -> bool:
    """False where the pair is refused. Raises ConfigError."""
    from kvxfer.plan.drawing import draw
    from kvxfer.plan.geometry import parse_geometry
    from kvxfer.plan.transfer_plan import Refusal, TransferPlan, plan_transfer

    logging.getLogger("kvxfer.cache").setLevel(logging.ERROR)  # it speaks of pools, for each stage
    try:
        source = parse_geometry("--source", options.source)
        sink = parse_geometry("--sink", options.sink, like=source)
        plan = plan_transfer(source, sink, options.tokens, options.gbps)
    except IncompatiblePeer as exc:  # a model that does not move
        plan = Refusal(reason=str(exc))
    if options.svg is not None and isinstance(plan, TransferPlan):
        try:
            options.svg.write_text(draw(plan))
        except OSError as exc:
            raise ConfigError(
                f"--svg: expected a file that can be written, got {options.svg} ({exc.strerror})"
            ) from exc
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(plan)).decode())
    elif isinstance(plan, TransferPlan):
        _print(plan)
    else:
        Console(width=_COLUMNS, highlight=False).print(f"refused: {escape(plan.reason)}")
    return isinstance(plan, TransferPlan)


def _print(plan: TransferPlan) -> None:
    from kvxfer.transfer.costs import size_text
    from kvxfer.transports.choice import ms_text

    console, first = Console(width=_COLUMNS, highlight=False), plan.wires[0]
    console.print(
        f"{plan.num_tokens} tokens, {size_text(plan.nbytes)}; {first.wire} takes "
        f"{ms_text(first.duration_s)} ms; ready last: {first.busiest}"
    )
    console.print(f"source  {plan.source}\nsink    {plan.sink}\n")
    moves = Table(box=None, pad_edge=False)
    for name in ("source", "sink", "layers", "heads", "tokens"):
        moves.add_column(name, no_wrap=True)
    for name in ("regions", "bytes"):
        moves.add_column(name, justify="right", no_wrap=True)
    for move in plan.moves[:_MOST_ROWS]:
        what = (*move.words, str(move.num_regions)) if move.layers else ("none", "", "", "0")
        moves.add_row(move.source, move.sink, *what, size_text(move.nbytes))
    console.print(moves)
    if len(plan.moves) > _MOST_ROWS:
        console.print(f"and {len(plan.moves) - _MOST_ROWS} more; --json has all")
    wires = Table(box=None, pad_edge=False)
    for name in ("wire", "for each pair", "staging of a pair", "ms", "limited by"):
        wires.add_column(name, justify="right" if name == "ms" else "left", no_wrap=True)
    for wire in plan.wires:
        cut = max(wire.cuts, key=lambda cut: cut.num_pieces)
        chunk = f" of {size_text(cut.chunk_nbytes)}" if cut.chunk_nbytes else ""
        staging = f"{cut.num_slots} x {size_text(cut.slot_nbytes)}" if cut.num_slots else "-"
        limit = f"{wire.limit} ({ms_text(wire.terms_s[wire.limit])} ms)"
        pieces = f"{wire.pieces}: {cut.num_pieces}{chunk}"
        streams = f" x{wire.figures.num_streams}" if wire.figures.num_streams > 1 else ""
        wires.add_row(f"{wire.wire}{streams}", pieces, staging, ms_text(wire.duration_s), limit)
    measured = dict.fromkeys(f"{w.figures.hardware}, {w.figures.date}" for w in plan.wires)
    off = max(wire.figures.most_off for wire in plan.wires)
    console.print(
        "",
        wires,
        f"\nWires as measured on {'; '.join(measured)}. The times measured there differ from those "
        f"of this model by a factor of at most {off:.2f}.",
        sep="\n",
    )
