"""``kvxfer keys`` as an operator uses it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvxfer.cli.app import app
from kvxfer.transports.key_folder import read_keys, short

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


def run(*arguments: str) -> tuple[int, str, str]:
    ran = CliRunner().invoke(app, ["keys", *arguments], env={"COLUMNS": "80"})
    return ran.exit_code, ran.stdout, ran.stderr


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_command_says_what_comes_next(here: Path) -> None:
    told = [run("make", "keys"), run("rotate", "keys", "add")]
    told += [run("rotate", "keys", "use"), run("rotate", "keys", "drop")]
    assert [(status, error) for status, _, error in told] == [(0, "")] * 4
    assert "set curve_keys_dir on every engine" in told[0][1]
    for (_, output, _), step in zip(told, ("add", "use", "drop", "add"), strict=True):
        assert f"kvxfer keys rotate keys {step}" in output
        assert max(map(len, output.splitlines())) <= 80
    key = short(read_keys(here / "keys").current.public)
    assert run("show", "keys") == (0, told[3][1], "")
    assert told[3][1].startswith(f"keys: {key} (current)\n")


def test_no_secret_is_printed(here: Path) -> None:
    run("make", "keys")
    said = "".join(str(run(*command)) for command in (("show", "keys"), ("rotate", "keys", "add")))
    keys = read_keys(here / "keys")
    assert keys.next is not None
    for pair in (keys.current, keys.next):
        assert pair.secret is not None
        assert pair.secret not in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "nowhere"), "kvxfer keys make nowhere makes it"),
        (("make", "keys"), "keys: expected a folder without keys, got current.key_secret"),
        (("rotate", "keys"), "STEP: expected add, got none"),
        (("rotate", "keys", "use"), "STEP: expected add, got use"),
        (("rotate", "keys", "more"), "STEP: expected add, got more"),
        (("show", "open"), "expected a file for its owner and group only, got mode 0644"),
        (
            ("make", "file/keys"),
            "file/keys: expected a folder that this user can read and write, got Not a directory; ",
        ),
    ],
)
def test_mistakes_are_one_sentence(here: Path, arguments: tuple[str, ...], says: str) -> None:
    run("make", "keys")
    run("make", "open")
    (here / "open/current.key_secret").chmod(0o644)
    (here / "file").touch()
    status, output, error = run(*arguments)
    assert (status, output) == (2, "")
    assert error.startswith("kvxfer: error: ")
    assert says in error
    assert len(error.splitlines()) == 1


def test_the_commands_of_the_recipe(here: Path) -> None:
    """As docs/operations.md prints them, in that order."""
    section = OPERATIONS.read_text().partition("## Keys")[2].partition("\n## ")[0]
    commands = [
        shlex.split(each, comments=True)
        for each in re.findall(r"^kvxfer keys (.*)$", section, re.MULTILINE)
    ]
    assert [command[0] for command in commands] == ["make", "rotate", "rotate", "rotate"]
    for command in commands:
        status, _, error = run(*command)
        assert (status, error) == (0, ""), command
