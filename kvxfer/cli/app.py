"""The commands. Nothing heavy is imported before one runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer

from kvxfer.cli.keys import keys
from kvxfer.cli.options import (
    DecodeOptions,
    DoctorOptions,
    DrainOptions,
    PairOptions,
    PrefillOptions,
    ProxyOptions,
    own_version,
    parse_address,
)
from kvxfer.cli.plan import PlanOptions, run_plan
from kvxfer.cli.terminal import ToldToEnd, border
from kvxfer.proxy.settings import ProxySettings, Side, parse_engines

DIFFERENT = 1
"""Exit code: something was not equal or failed."""

app = typer.Typer(
    help="Move the KV cache of requests from prefill workers to decode workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # in boxes, 80 columns cut the names of options
)


def _command(run: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Make a command of a function of one record, whose fields are the command's options. It says
    whether all is well.
    """
    record = get_type_hints(run)["options"]
    hints = get_type_hints(record, include_extras=True)
    # The command's own options first, then those that it has in common with others.
    own_first = [name for each in record.__mro__ for name in vars(each).get("__annotations__", ())]
    defaults = {each.name: each.default for each in fields(record)}

    def command(**given: object) -> None:
        with border():
            if not run(record(**given)):
                raise typer.Exit(DIFFERENT)

    command.__doc__ = run.__doc__
    command.__annotations__ = hints
    command.__signature__ = Signature(  # type: ignore[attr-defined]  # what typer reads
        [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if defaults[name] is MISSING else defaults[name],
                annotation=hints[name],
            )
            for name in dict.fromkeys(own_first)
        ]
    )
    # Help is cut to one line where it is not given: the first paragraph, whole
    summary = " ".join((run.__doc__ or "").split("\n\n")[0].split())
    app.command(run.__name__, short_help=summary)(command)
    return run


@_command
def pair(options: PairOptions) -> bool:
    """Prefill in one group of processes, move the KV, decode in another, and compare.

    Exit status: 0 when everything is equal, 1 when something differs or failed or KV was not used,
    2 for errors.
    """
    from kvxfer.cli.commands import run_pair

    return run_pair(options)


@_command
def prefill(options: PrefillOptions) -> bool:
    """Serve prefill requests, and give their KV to decode engines, until ctrl-C.

    SIGTERM drains: no new requests are taken, the others are finished, and their KV is given, for
    KVXFER_DRAIN_TIMEOUT_S at most. A second one ends it at once. Exit status: 0 when nothing was
    left, 1 when something was.
    """
    from kvxfer.cli.commands import run_prefill

    return run_prefill(options)


@_command
def decode(options: DecodeOptions) -> bool:
    """Send prompts to a prefill engine elsewhere, take their KV, and decode here.

    Exit status: 0 when every request ended well with the KV that it asked for and nothing differs,
    1 when not, 2 for errors.
    """
    from kvxfer.cli.commands import run_decode

    return run_decode(options)


@_command
def plan(options: PlanOptions) -> bool:
    """Say what a request's KV would take from one engine to another, or why it is refused.

    No engine and no GPU is needed. Exit status: 0 with a plan, 1 when the pair is refused, 2 for
    errors.
    """
    return run_plan(options)


@_command
def proxy(options: ProxyOptions) -> bool:
    """Serve OpenAI requests with prefill and decode engines of vLLM, until ctrl-C.

    Each request is prefilled by one engine and decoded by another. Needs the extra proxy.
    """
    address = parse_address("--listen", options.listen, everywhere=True)
    settings = ProxySettings(
        prefill=parse_engines(Side.PREFILL, options.prefill),
        decode=parse_engines(Side.DECODE, options.decode),
        host=address.host.strip("[]"),
        port=address.port,
        on_missing_kv=options.on_missing_kv,
        dispatch=options.dispatch,
        prefill_timeout_s=options.timeout_s,
        connect_timeout_s=options.connect_timeout_s,
        health_interval_s=options.health_interval_s,
        max_body_nbytes=options.max_body_nbytes,
    )
    from kvxfer.cli.proxy import run_proxy

    raise ToldToEnd(run_proxy(settings, options.log_level))


@_command
def doctor(options: DoctorOptions) -> bool:
    """Try what an engine here would use: GPUs, wires with real bytes, limits, ports, a peer.

    Exit status: 0 when all is well, 1 when something that an engine needs does not work or is
    slower than --min-gbps, 2 for wrong use.
    """
    from kvxfer.cli.doctor import run_doctor

    return run_doctor(options)


@_command
def drain(options: DrainOptions) -> bool:
    """Tell an engine to offer and load nothing new; with --wait until nothing is open.

    Run it on the engine's host as its user, or with its CURVE key. There is no way back but a new
    start. Exit status: 0 when it is so, 1 when something is open after the time, 2 for errors.
    """
    from kvxfer.cli.drain import run_drain

    return run_drain(options)


_AS_THEY_ARE = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("bench", add_help_option=False, context_settings=_AS_THEY_ARE)
def bench(context: typer.Context) -> None:
    """Measure what moves KV here, beside what the hardware can do."""
    from kvxfer.bench.command import main as run_bench  # its options are its own

    raise typer.Exit(run_bench(context.args))


app.add_typer(keys, name="keys", short_help="Make and rotate the CURVE keys that engines share.")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvxfer {own_version()}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show it.")
    ] = False,
) -> None:
    """Move the KV cache of requests from prefill workers to decode workers."""


def main() -> None:
    app(prog_name="kvxfer")
