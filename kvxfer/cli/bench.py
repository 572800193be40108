"""``kvxfer bench``: its options are the benchmarks' own, so they go on as they are."""

from __future__ import annotations

import typer

_AS_THEY_ARE = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    app.command("bench", add_help_option=False, context_settings=_AS_THEY_ARE)(bench)


def bench(context: typer.Context) -> None:
    """Measure what moves KV here, beside what the hardware can do."""
    from kvxfer.bench.command import main

    raise typer.Exit(main(context.args))
