"""What a person at a terminal has: a bar, log lines above it, and ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from types import FrameType
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvxfer.errors import KvxferError

WRONG = 2
"""Exit code: the command could not do its work."""
_STDERR = 2
_LAST = b"\0\n"
"""Ends the lines: the fork server has the pipe open as long as this process lives."""
_WAIT_S = 5.0


class ToldToEnd(BaseException):
    """SIGINT or SIGTERM came. Not an Exception: who handles it raises it again."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def border(*also: type[Exception]) -> Iterator[None]:
    """Errors of kvxfer, and these, become one line and an exit code; signals end what was started,
    and then this.
    """
    logging.basicConfig(level=logging.WARNING, format="kvxfer: %(message)s")
    heed_signals()
    one_line: tuple[type[Exception], ...] = (KvxferError, *also)
    try:
        yield
    except one_line as e:
        print(f"kvxfer: error: {e}", file=sys.stderr)
        raise typer.Exit(WRONG) from e
    except ToldToEnd as e:
        print(f"kvxfer: ended by {signal.Signals(e.number).name}", file=sys.stderr)
        raise typer.Exit(128 + e.number) from e


def heed_signals() -> None:
    """The first SIGINT or SIGTERM raises ToldToEnd; later ones must not cut the ending short."""

    def tell(number: int, _frame: FrameType | None) -> NoReturn:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise ToldToEnd(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, tell)


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere; call with requests that are over, and all."""
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("requests", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def stderr_above(console: Console) -> Iterator[None]:
    """On a terminal, what this process and those that it starts meanwhile write to standard error
    goes through ``console``, which knows where the bar is.
    """
    if not (console.is_terminal and os.isatty(_STDERR)):
        yield
        return
    kept = os.dup(_STDERR)
    lines, writing = os.pipe()
    os.dup2(writing, _STDERR)
    os.close(writing)
    printer = Thread(target=_print_lines, args=(lines, console), name="stderr", daemon=True)
    printer.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.write(_STDERR, _LAST)
        os.dup2(kept, _STDERR)
        os.close(kept)
        printer.join(_WAIT_S)


def _print_lines(lines: int, console: Console) -> None:
    # Left open at the end: the fork server's last words would fail without a reader
    with open(lines, "rb", closefd=False) as stream:
        is_last = False
        while not is_last and (line := stream.readline()):
            is_last = line.endswith(_LAST)
            if text := line.removesuffix(_LAST).decode(errors="replace").rstrip("\n"):
                console.print(Text(text), soft_wrap=True)
