"""What a person sees at a terminal of 80 columns: help, the bar and the lines above it, and what is
kept at ctrl-C.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvxfer.cli.app import app
from tests.cli.test_app import TIMEOUT_S, assert_nothing_left
from tests.commands import INTERRUPTED, MODEL, ROOT, environment

COLUMNS = 80
TRACE = ROOT / "tests" / "data" / "conversation_trace_excerpt.jsonl"
COMMANDS = sorted(getattr(get_command(app), "commands"))  # noqa: B009 - typer has no type for it


def help_of(*command: str) -> str:
    ran = CliRunner().invoke(app, [*command, "--help"], terminal_width=COLUMNS, prog_name="kvxfer")
    assert ran.exit_code == 0
    return str(ran.output)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_in_full(command: str) -> None:
    text = help_of(command)
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "…" not in text
    assert not re.search(r"\w\.\.\.\s", text)
    found = getattr(get_command(app), "commands")[command]  # noqa: B009
    names = [
        name
        for each in found.params
        for name in (
            (each.metavar,)
            if each.param_type_name == "argument"
            else (*each.opts, *each.secondary_opts)
        )
    ]
    names += getattr(found, "commands", ())  # of a group
    if command == "bench":  # its options are those of its own parser
        names = ["--quick", "--out", "--note"]
    assert names
    for name in names:
        assert re.search(rf"{re.escape(name)}(?![\w-])", text), name


def test_help_says_what_each_command_does() -> None:
    text = help_of()
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert not re.search(r"\w\.\.\.\s", text)
    assert [command for command in COMMANDS if f"\n  {command} " not in text] == []


class Screen:
    """The lines of a terminal that is as high as needed, and wraps none."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0
        self._left = ""

    def write(self, text: str) -> None:
        """Show it; an escape sequence may come in parts."""
        text, self._left = self._left + text, ""
        for part in re.findall(r"\x1b(?:\[[0-9;?]*[a-zA-Z])?|[^\x1b]", text):
            if part == "\x1b":
                self._left = text[text.rindex("\x1b") :]
            elif part.startswith("\x1b"):
                self._control(part)
            elif part == "\n":
                self._row += 1
                self.lines += [""] * (self._row + 1 - len(self.lines))
            elif part == "\r":
                self._column = 0
            else:
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + part + line[self._column + 1 :]
                self._column += 1

    def _control(self, part: str) -> None:
        if part == "\x1b[2K":
            self.lines[self._row] = ""
        elif part.endswith("A"):
            self._row = max(0, self._row - int(part[2:-1] or 1))
        else:
            assert part[-1] in "mhl", part


@contextmanager
def at_a_terminal(
    temporary: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command whose input and output are a terminal of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, COLUMNS, 0, 0))
    variables = {**environment(temporary), "TERM": "xterm"}
    del variables["COLUMNS"]  # the terminal itself says how wide it is
    with subprocess.Popen(
        [sys.executable, "-m", "kvxfer", *arguments],
        env=variables,
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - one thread
    ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()
            os.close(ours)


def read(terminal: int) -> str:
    """What comes next; "" at the end."""
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:  # nobody has the other side any more
        return ""


def test_ctrl_c_keeps_what_is_over_and_no_line_lands_on_the_bar(tmp_path: Path) -> None:
    facts, model = tmp_path / "facts.json", tmp_path / "config.json"
    model.write_bytes(msgspec.json.encode(MODEL))
    screen, shown = Screen(), ""
    # a second of the trace lasts a second: it would run for an hour
    arguments = ("--trace", str(TRACE), "--time-scale", "1", "--log-level", "INFO")
    with at_a_terminal(
        *(tmp_path, "pair", "--model", str(model), *arguments, "--json", str(facts))
    ) as (process, terminal):
        num_asked = 0
        while text := read(terminal):
            screen.write(text)
            shown += text
            if not num_asked and re.search(r"m *[1-9]\d*/\d+\x1b", shown):
                num_asked = os.write(terminal, b"\x03")  # what ctrl-C sends
        assert process.wait(TIMEOUT_S) == INTERRUPTED
    assert_nothing_left(process.pid, tmp_path)
    lines = screen.lines
    # INFO lines of ranks come while the bar is shown; in the end each has a line of its own
    assert any("met in" in line for line in lines)
    assert shown.index("━") < shown.index("met in")
    for line in lines:
        assert "━" not in line
        assert line.count("INFO ") <= 1
        assert "INFO " not in line or line.startswith("INFO ")
    assert lines[-2:] == ["kvxfer: ended by SIGINT", ""]
    # what was over is shown and written; the bar counted requests, not engines
    found = msgspec.json.decode(facts.read_bytes())
    num_over, num_planned = (found["summary"][f"num_{each}"] for each in ("requests", "planned"))
    assert 0 < num_over < num_planned == len(TRACE.read_text().splitlines())
    assert set(re.findall(r"m *\d+/(\d+)\x1b", shown)) == {str(num_planned)}
    assert [line for line in lines if f"ended when {num_over} of {num_planned} requests" in line]
    assert len(found["requests"]) == num_over
    assert all(request["status"].startswith("FINISHED_") for request in found["requests"])
    assert not any(request["tokens_equal"] is False for request in found["requests"])
    assert found["summary"]["is_good"] is False
