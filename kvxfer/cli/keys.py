"""``kvxfer keys``: makes, rotates and shows the folder of CURVE keys that engines share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.cli.terminal import border
from kvxfer.errors import ConfigError

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the keys.")]
_Step = Annotated[str | None, typer.Argument(metavar="STEP", help="add, use or drop.")]
_NEXT = {
    "add": "to replace the key: kvxfer keys rotate {0} add",
    "use": "copy {0} to every host; when it is everywhere: kvxfer keys rotate {0} use",
    "drop": "copy {0} to every host, and restart the engines, one after the other;\n"
    "when all have: kvxfer keys rotate {0} drop, and copy it once more",
}
"""What is to be done, by the step that is due."""


@contextmanager
def _border(folder: Path) -> Iterator[None]:
    with border():
        try:
            yield
        except OSError as e:
            raise ConfigError(
                f"{folder}: expected a folder that this user can read and write, got "
                f"{e.strerror or e}; name another one, or see who owns it"
            ) from e


keys = typer.Typer(
    help="Make and rotate the CURVE keys that engines share (curve_keys_dir).",
    no_args_is_help=True,
)


@keys.command()
def make(folder: _Folder) -> None:
    """Make a folder with a key pair. Keys that are there are not replaced."""
    with _border(folder):
        from kvxfer.transports.key_folder import make_keys

        make_keys(folder)
        typer.echo(f"copy {folder} to every host, and set curve_keys_dir on every engine")
        _show(folder)


@keys.command()
def rotate(folder: _Folder, step: _Step = None) -> None:
    """Replace the key while engines run, in three steps.

    add: a next key, which is accepted from now on. use: engines that start from now on take it.
    drop: the key before it is not accepted any more.
    """
    with _border(folder):
        from kvxfer.transports.key_folder import rotate_keys

        rotate_keys(folder, step)
        _show(folder)


@keys.command()
def show(folder: _Folder) -> None:
    """Show the public keys, and the step that is due. Exit status 2 for a folder that engines
    refuse.
    """
    with _border(folder):
        _show(folder)


def _show(folder: Path) -> None:
    from kvxfer.transports.key_folder import read_keys

    found = read_keys(folder)
    typer.echo(f"{folder}: {found}\n{_NEXT[found.due].format(folder)}")
