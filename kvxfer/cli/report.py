"""Show a run's results: a table, a summary, and the facts as JSON."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvxfer.cli.options import own_version
from kvxfer.cli.outcome import Result, Summary
from kvxfer.config import SECRETS
from kvxfer.engine.config import EngineConfig
from kvxfer.engine.rpc import Info
from kvxfer.errors import ConfigError
from kvxfer.transfer.costs import size_text

_WIDTH = 80
"""Columns where the output is no terminal. The table fits into them."""
_NAME_WIDTH = 11
_MAX_TEXTS = 10
PACKAGES = ("torch", "pyzmq", "msgspec", "numpy")
_MAX_DIFFERENCES = 5


def make_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _result_table(results: Sequence[Result]) -> Table:
    table = Table(title=None, box=None, pad_edge=False, header_style="bold")
    table.add_column("\nrequest", overflow="fold", max_width=_NAME_WIDTH)
    for name in (
        *("prompt\ntokens", "cached\nP/D", "KV\nbytes", "waited\nms", "read\nms", "\nGB/s"),
        *("tokens\nequal", "KV\nequal"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        moved = result.transfer
        gbps = moved.gbps if moved else None
        table.add_row(
            escape(result.name),
            str(result.num_prompt_tokens),
            f"{result.num_prefill_cached_tokens}/{result.num_decode_cached_tokens}",
            size_text(moved.nbytes) if moved else "-",
            _ms(moved.wait_s) if moved else "-",
            _ms(moved.read_s) if moved else "-",
            _three_digits(gbps),
            _yes_no(result.tokens_equal),
            _yes_no(result.kv.is_equal if result.kv else None),
        )
    return table


def _yes_no(value: bool | None) -> str:
    return {True: "[green]yes[/]", False: "[bold red]NO[/]", None: "-"}[value]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 10 else f"{seconds * 1e3:.0f}"


def _three_digits(number: float | None) -> str:
    """At most five characters below a million."""
    if number is None:
        return "-"
    return next(
        (f"{number:.{3 - n}f}" for n in range(3) if number < 10 ** (n + 1)), f"{number:.0f}"
    )


def _summary_lines(results: Sequence[Result], summary: Summary) -> list[str]:
    """What the table does not say, in a few sentences; rich markup."""
    lines = [
        f"{summary.num_requests} requests, {summary.num_prompt_tokens} prompt tokens "
        f"({summary.num_prefill_cached_tokens} cached at prefill, "
        f"{summary.num_decode_cached_tokens} at decode), {summary.num_new_tokens} new tokens, "
        f"{summary.wall_s:.1f} s"
    ]
    if summary.num_transfers:
        speed = f", {_three_digits(summary.gbps)} GB/s in {_ms(summary.read_s)} ms of reading"
        lines.append(
            f"wire {'+'.join(summary.wires) or 'none'}: {size_text(summary.nbytes)} "
            f"in {summary.num_transfers} transfers{speed if summary.gbps is not None else ''}"
        )
        if summary.median_wait_s is not None and summary.most_wait_s is not None:
            lines.append(
                f"waited before reading: median {_ms(summary.median_wait_s)} ms, most "
                f"{_ms(summary.most_wait_s)} ms"
            )
    else:
        nothing = "wire none: nothing was moved"
        lines.append(f"[{_bad(summary)}]{nothing}[/]" if summary.reasons else nothing)
    if summary.median_ttft_s is not None and summary.most_ttft_s is not None:
        lines.append(
            f"first token: median {_ms(summary.median_ttft_s)} ms after the request was sent, "
            f"most {_ms(summary.most_ttft_s)} ms"
        )
    lines += _unused_lines(results, summary)
    lines += _difference_lines(results)
    lines.append(_verdict(summary))
    return lines


def _bad(summary: Summary) -> str:
    return "yellow" if summary.may_recompute else "bold red"


def _unused_lines(results: Sequence[Result], summary: Summary) -> list[str]:
    lines: list[str] = []
    for reason, count in sorted(summary.reasons.items()):
        details = {r.detail for r in results if r.failure == reason and r.detail}
        lines.append(f"[{_bad(summary)}]KV not used: {escape(reason)} x {count}[/]")
        lines += [f"  {escape(detail)}" for detail in sorted(details)[:_MAX_DIFFERENCES]]
    return lines


def _difference_lines(results: Sequence[Result]) -> list[str]:
    lines: list[str] = []
    for result in results:
        if result.token_difference is not None:
            lines.append(f"{escape(result.name)}: {result.token_difference}")
        found = result.kv.differences if result.kv else ()
        lines += [f"{escape(result.name)}: {escape(each)}" for each in found[:_MAX_DIFFERENCES]]
        if len(found) > _MAX_DIFFERENCES:
            lines.append(
                f"{escape(result.name)}: and {len(found) - _MAX_DIFFERENCES} more differences"
            )
    return lines


def _verdict(summary: Summary) -> str:
    parts = []
    if summary.num_requests < summary.num_planned:
        parts.append(
            f"ended when {summary.num_requests} of {summary.num_planned} requests were over"
        )
    if summary.num_failed:
        parts.append(f"{summary.num_failed} requests failed")
    if summary.num_recomputed:
        allowed = "" if summary.may_recompute else "; --allow-recompute says that this is fine"
        number = f"{summary.num_recomputed} of {summary.num_requests} requests"
        parts.append(f"{number} ran without the KV that they asked for{allowed}")
    if summary.num_checked_tokens:
        parts.append(
            f"tokens equal to the single engine's: "
            f"{summary.num_equal_tokens} of {summary.num_checked_tokens}"
            + ("" if summary.tokens_decide else " (below float32 the KV decides)")
        )
    if summary.num_checked_kv:
        parts.append(
            f"KV equal to the source's: {summary.num_equal_kv} of {summary.num_checked_kv}"
        )
    if not summary.num_checked_tokens and not summary.num_checked_kv and not summary.num_failed:
        parts.append("nothing was compared")
    style = "green" if summary.is_good else "bold red"
    return f"[{style}]{'; '.join(parts)}[/]"


def show(console: Console, results: Sequence[Result], summary: Summary) -> None:
    if results:
        console.print(_result_table(results))
        console.print()
    texts = [result for result in results if result.text is not None]
    for result in texts[:_MAX_TEXTS]:
        shown = Text(f"{result.name}: {result.text!r}")
        console.print(shown, no_wrap=True, overflow="ellipsis", soft_wrap=False)
    if len(texts) > _MAX_TEXTS:
        console.print(f"and {len(texts) - _MAX_TEXTS} more texts: --json FILE has them all")
    for line in _summary_lines(results, summary):
        # Words are wrapped for a person, lines are whole for a program.
        console.print(line, soft_wrap=not console.is_terminal)


def facts(
    results: Sequence[Result],
    summary: Summary,
    *,
    engines: Mapping[str, EngineConfig],
    infos: Mapping[str, Info],
) -> dict[str, Any]:
    """Everything that a program wants to know of a run, JSON-ready. Secret keys are left out."""
    requests, configs = msgspec.to_builtins(list(results)), msgspec.to_builtins(dict(engines))
    for shown, result in zip(requests, results, strict=True):
        if (moved := result.transfer) is not None:
            times = {"wait_s": moved.wait_s, "read_s": moved.read_s, "gbps": moved.gbps}
            shown["transfer"] |= times
    for config in configs.values():
        config["kv"] |= {name: "(set)" for name in SECRETS if config["kv"][name] is not None}
    return {
        "versions": versions(),
        "engines": configs,
        "engines_at_end": msgspec.to_builtins(dict(infos)),
        "requests": requests,
        "summary": msgspec.to_builtins(summary),
    }


def versions() -> dict[str, str]:
    """Of what the numbers depend on; packages that are missing are left out."""
    found = {"kvxfer": own_version(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = msgspec.json.format(msgspec.json.encode(content), indent=2)
    try:
        path.write_bytes(text + b"\n")
    except OSError as e:
        raise ConfigError(f"--json: {path} cannot be written ({e.strerror})") from e
