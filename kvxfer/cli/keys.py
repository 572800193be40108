"""``kvxfer keys``: makes, rotates and shows the folder of CURVE keys that engines share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.errors import ConfigError

WRONG = 2

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the keys.")]
_Step = Annotated[
    str | None,
    typer.Argument(
        metavar="STEP",
        help="add: a next key, which is accepted from now on. use: engines that start take it. "
        "drop: the previous key is not accepted any more. If not given, says which is due.",
    ),
]

keys = typer.Typer(
    help="Make and rotate the CURVE keys that engines share (curve_keys_dir).",
    no_args_is_help=True,
)

_NEXT = {
    "add": "to replace the key: kvxfer keys rotate {folder} add",
    "use": "copy {folder} to every host; when it is everywhere: kvxfer keys rotate {folder} use",
    "drop": "copy {folder} to every host, and restart the engines, one after the other;\n"
    "when all have: kvxfer keys rotate {folder} drop, and copy it once more",
}
"""What is to be done, by the step that is due."""


@keys.command()
def make(folder: _Folder) -> None:
    """Make a folder with a new key pair. Keys that are there are not replaced."""
    with _border():
        from kvxfer.transports.key_folder import make_keys

        make_keys(folder)
        typer.echo(f"copy {folder} to every host, and set curve_keys_dir on every engine")
        _show(folder)


@keys.command()
def rotate(folder: _Folder, step: _Step = None) -> None:
    """Replace the key in three steps, add, use and drop, while engines run."""
    with _border():
        from kvxfer.transports.key_folder import Step, rotate_keys

        if step is not None and step not in list(Step):
            raise ConfigError(f"STEP: expected one of {', '.join(Step)}, got {step}")
        rotate_keys(folder, None if step is None else Step(step))
        _show(folder)


@keys.command()
def show(folder: _Folder) -> None:
    """Show the public keys of a folder, and which step of a rotation is due.

    Exit status 2 for files that are missing, damaged, or readable by every user.
    """
    with _border():
        _show(folder)


def _show(folder: Path) -> None:
    from kvxfer.transports.key_folder import next_step, read_keys

    found = read_keys(folder)
    typer.echo(f"{folder}: {found}")
    typer.echo(_NEXT[next_step(found)].format(folder=folder))


@contextmanager
def _border() -> Iterator[None]:
    """Errors become one line and an exit code."""
    try:
        yield
    except (ConfigError, OSError) as e:
        print(f"kvxfer: error: {e}", file=sys.stderr)
        raise typer.Exit(WRONG) from e
