"""Commands in processes that are forked from one that has imported everything: as a person's, but
for the two seconds that the imports take each time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.commands import ROOT, environment

_PARENT = """
import contextlib, json, os, sys
import kvxfer.cli.commands
from kvxfer.cli.app import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(open(os.devnull, "w")):
    sys.argv = ["kvxfer", "pair", "--help"]
    main()  # it imports what it needs to read options
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    arguments, folder = json.loads(line)
    child = os.fork()
    if not child:
        for name, fd in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["kvxfer", *arguments]
        try:
            main()
        except SystemExit as end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Ran:
    returncode: int
    stdout: str
    stderr: str


class Parent:
    """Of the commands of a module, one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self._answer() == "ready"

    def _answer(self) -> object:
        assert self._process.stdout is not None
        answer: object = json.loads(self._process.stdout.readline())
        return answer

    def run(self, folder: Path, *arguments: str) -> Ran:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([arguments, str(folder)]) + "\n")
        self._process.stdin.flush()
        status = self._answer()
        assert isinstance(status, int)
        return Ran(status, *((folder / name).read_text() for name in ("out", "err")))


@contextmanager
def parent(temporary: Path) -> Iterator[Parent]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        env={**environment(temporary), "PYTHONUNBUFFERED": "1"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield Parent(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=120) == 0
