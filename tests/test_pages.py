"""Every block of README.md and docs/ is what happens: scripts print what stands behind them,
commands run as they are printed, in a tree with nothing but Python and the installed package.

What is not run says why (:data:`tests.pages.RULES`); its options are read by the real parser.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import typer

from kvxfer.cli.app import app
from kvxfer.config import load_config
from tests.conftest import HAS_CUDA
from tests.pages import (
    FIRST_CONTACT,
    PAGES,
    ROOT,
    SETTING,
    Fence,
    How,
    Kind,
    commands,
    fences,
    masked,
    plain,
    rule_of,
    words_of,
)
from tests.test_setup import make_ready
from tests.two_hosts import HostsUnavailable, two_hosts

TIMEOUT_S = 120
(USAGE,) = typer.BadParameter.__bases__
START_S = 60
ALL = [fence for page in PAGES for fence in fences(page)]
RULED = [pytest.param(fence, id=str(fence)) for fence in ALL]


def of_kind(kind: Kind) -> list[Any]:
    return [pytest.param(fence, id=str(fence)) for fence in ALL if fence.kind is kind]


@pytest.mark.parametrize("fence", RULED)
def test_each_block_is_of_a_known_kind(fence: Fence) -> None:
    if fence.kind is Kind.UNKNOWN:
        without = [each for each in commands(fence.text) if rule_of(each) is None]
        pytest.fail(
            f"{fence}: nobody has said how this is tested; add a rule or a kind to tests/pages.py "
            f"(no rule for: {without}; what commands print stands right behind them)"
        )


# ------------------------------------------------------------------ options of commands


@pytest.mark.parametrize("fence", of_kind(Kind.COMMANDS))
def test_commands_are_read_by_their_own_parsers(fence: Fence) -> None:
    for command in commands(fence.text):
        words = shlex.split(plain(command))
        rule = rule_of(command)
        assert rule is not None
        assert rule.how is not How.NOT or rule.why
        if words[0] == "kvxfer":
            parse(words[1:])
        elif words[:2] == ["vllm", "serve"]:
            check_transfer_config(words[words.index("--kv-transfer-config") + 1])
        elif "pip" in words[0] or words[1:3] == ["-m", "pip"]:
            check_extras(words)
        script = next((word for word in words[:2] if word.startswith("scripts/")), None)
        if script is not None:
            assert os.access(ROOT / script, os.X_OK if "python" not in words[0] else os.R_OK)


def parse(words: list[str]) -> None:
    """As the command does it, up to where it would begin."""
    command: Any = typer.main.get_command(app)
    context: Any = None
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        context = command.context_class(command, context, info_name=command.name)
        assert words[0] in command.commands, f"kvxfer has no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    with suppress(typer.Exit):  # --help, --version
        command.make_context(command.name, list(words), context)


def check_transfer_config(text: str) -> None:
    config = json.loads(text)
    assert config["kv_connector"] == "KvxferConnector"
    assert config["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    load_config({}, config.get("kv_connector_extra_config"), {})


def check_extras(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:kvxfer|\.)\[([\w,-]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize(
    "words",
    [
        ["decode", "--prefil", "127.0.0.1:1"],
        ["decode", "--prefill", "127.0.0.1:1", "--layout", "XYZ"],
        ["pair", "--prefill-tp", "two"],
        ["repair"],
    ],
)
def test_the_parser_finds_what_is_wrong(words: list[str]) -> None:
    with pytest.raises((USAGE, AssertionError)):
        parse(words)


def test_a_block_of_a_new_kind_is_found() -> None:
    for text in ("frobnicate --now\n", "scripts/demo\nfrobnicate\n", "key: value\n"):
        assert Fence("x.md", 1, "", text, None).kind is Kind.UNKNOWN
    texts = ("a = 1\n", "a = 2\n")
    assert [Fence("x.md", 1, "python", text, None).kind for text in texts] == [Kind.PYTHON] * 2


# ------------------------------------------------------------------ what is no command


@pytest.mark.parametrize("fence", of_kind(Kind.OPTION))
def test_an_option_of_vllm_is_taken(fence: Fence) -> None:
    matched = SETTING.fullmatch(fence.text.strip())
    assert matched is not None
    assert matched[1] == "--kv-transfer-config"
    (value,) = shlex.split(matched[2])
    check_transfer_config(value)


@pytest.mark.parametrize("fence", of_kind(Kind.LOG))
def test_log_lines_have_the_form_of_the_real_ones(fence: Fence) -> None:
    """test_two_hosts compares the real ones with the same expression."""
    lines = re.split(r"\n(?=engine )", fence.text.strip())
    assert all(FIRST_CONTACT.fullmatch(line.replace("\n", " ")) for line in lines)


@pytest.mark.parametrize("fence", of_kind(Kind.TREE))
def test_the_paths_of_a_tree_are_there(fence: Fence) -> None:
    paths = [ROOT / line.split()[0] for line in fence.text.splitlines()]
    assert [path for path in paths if not path.exists()] == []


@pytest.mark.parametrize("fence", of_kind(Kind.DATA))
def test_data_can_be_read(fence: Fence) -> None:
    if fence.language == "json":
        json.loads(fence.text)
    elif fence.language == "toml":
        tomllib.loads(fence.text)
    else:
        list(pytest.importorskip("yaml").safe_load_all(fence.text))


# ------------------------------------------------------------------ a place to run it


def scripts_of(folder: Path, name: str, body: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@dataclass
class Place:
    """A copy of the tree, with an environment as ``scripts/_setup`` leaves it, on a host of its own
    where the machine has such: every port is free.

    ``enter``: stands before a command. ``said``: in the shell, in front of the next command.
    """

    tree: Path
    enter: list[str]
    variables: dict[str, str]
    said: list[str] = field(default_factory=list)

    def run(self, command: str) -> tuple[str, str]:
        """As typed: output and errors. Fails unless its end is good."""
        done = subprocess.run(
            self._shell(command),
            env=self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert not (command.startswith("curl") and '"error"' in done.stdout), done.stdout
        if re.match(r"(source|\.|export|cd) ", command):
            self.said.append(command)
        return done.stdout, done.stderr

    @contextmanager
    def serving(self, command: str, port: str) -> Iterator[None]:
        """In another terminal, once it listens."""
        with subprocess.Popen(
            self._shell(f"{command.rstrip(' &')}"),
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=(out := (self.tree / "server.log").open("ab")),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                deadline_s = time.monotonic() + START_S
                while not self._listens(port):
                    assert process.poll() is None, (self.tree / "server.log").read_text()
                    assert time.monotonic() < deadline_s, f"{command}: does not listen on {port}"
                yield
            finally:
                out.close()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _listens(self, port: str) -> bool:
        code = (
            "import socket, sys, time\n"
            "time.sleep(0.05)\n"
            f"sys.exit(socket.socket().connect_ex(('127.0.0.1', {port})))\n"
        )
        return (
            subprocess.run([*self.enter, sys.executable, "-c", code], check=False).returncode == 0
        )

    def _shell(self, command: str) -> list[str]:
        text = "\n".join((f"cd {shlex.quote(str(self.tree))}", *self.said, command))
        return [*self.enter, "bash", "-ec", text]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    tree, home = tmp_path / "kvxfer", tmp_path / "home"
    tree.mkdir()
    home.mkdir()
    for path in ROOT.iterdir():
        if path.name not in (".venv", ".venv-vllm", ".git", "scripts"):
            (tree / path.name).symlink_to(path)
    # Their own folder is where they look for the tree
    shutil.copytree(ROOT / "scripts", tree / "scripts", ignore=shutil.ignore_patterns("results"))
    make_ready(tree)
    venv = tree / ".venv/bin"
    with_package = f'export PYTHONPATH="{tree}"\nexec "{sys.executable}"'
    for name in ("python", "python3"):
        scripts_of(venv, name, f'{with_package} "$@"')
    scripts_of(venv, "kvxfer", f'{with_package} -m kvxfer "$@"')
    (venv / "activate").write_text(f'export PATH="{venv}:$PATH"\n')
    # What a stranger has: a Python without packages
    for name in ("python", "python3"):
        scripts_of(tmp_path / "bin", name, f'exec "{sys.executable}" -S "$@"')
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVXFER_")}
    kept.pop("PYTHONPATH", None)
    kept |= {"PATH": f"{tmp_path}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": str(home)}
    with ExitStack() as stack:
        # Short: processes meet at Unix sockets in it, whose names have 107 characters
        short = stack.enter_context(TemporaryDirectory())
        kept |= {"TMPDIR": short, "COLUMNS": "80"}
        enter: list[str] = []
        with suppress(HostsUnavailable):
            enter = stack.enter_context(two_hosts())[0].inside((), tree)
        yield Place(tree, enter, kept)


# ------------------------------------------------------------------ scripts


def output_of(fence: Fence) -> Fence | None:
    """What stands right behind it."""
    after = next((each for each in ALL if each.page == fence.page and each.line > fence.line), None)
    return after if after is not None and after.follows is Kind.PYTHON else None


WHOLE = [each for each in ALL if each.kind is Kind.PYTHON and output_of(each)]
PARTS = [each for each in ALL if each.kind is Kind.PYTHON and not output_of(each)]


@pytest.mark.parametrize("fence", PARTS, ids=str)
def test_a_part_of_a_script_has_names_that_exist(fence: Fence) -> None:
    """Without output it cannot be run: what it works on is the reader's own."""
    for node in ast.walk(ast.parse(fence.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvxfer"):
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("fence", WHOLE, ids=str)
def test_a_script_prints_what_the_page_says(fence: Fence, place: Place) -> None:
    if not place.enter and "Engine(" in fence.text:
        pytest.skip("needs a network of its own: its port may be taken here")
    (place.tree / "example.py").write_text(fence.text)
    printed, _ = place.run(".venv/bin/python example.py")
    output = output_of(fence)
    assert output is not None
    assert printed == output.text


# ------------------------------------------------------------------ commands


def serves_or_computes(page: str) -> bool:
    """Engines start: seconds each."""
    lines = (
        plain(each) for f in fences(page) if f.kind is Kind.COMMANDS for each in commands(f.text)
    )
    return any(re.match(r"kvxfer (pair|prefill|decode|proxy)\b", line) for line in lines)


PAGES_TO_RUN = [
    pytest.param(page, marks=[pytest.mark.slow] if serves_or_computes(page) else [])
    for page in PAGES
    if any(fence.kind is Kind.COMMANDS for fence in fences(page))
]


STAND_IN = """
import asyncio, sys
from tests.proxy.fakes import FakeEngine, give_params, give_text
port, role = sys.argv[1:]
async def main():
    answer = give_params if role == "kv_producer" else give_text
    async with FakeEngine("vllm", answer).running(int(port)):
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.xdist_group("the ports of the pages")
@pytest.mark.parametrize("page", PAGES_TO_RUN)
def test_the_commands_of_a_page_run_as_printed(page: str, place: Place) -> None:
    if not place.enter:
        pytest.skip("needs a network of its own: the ports of the page may be taken here")
    (place.tree / "stand_in.py").write_text(STAND_IN)
    if page != "README.md":  # others begin where the package is installed
        place.said.append(". .venv/bin/activate")
    printed = ""
    with ExitStack() as stack:
        for fence in fences(page):
            if fence.kind is Kind.COMMANDS:
                printed = "\n".join(play(place, stack, each) for each in commands(fence.text))
            elif fence.kind is Kind.OUTPUT and fence.follows is Kind.COMMANDS:
                real = {masked(line) for line in printed.splitlines()}
                shown = [masked(line) for line in fence.text.splitlines()]
                missing = [line for line in shown if line not in ("", "...") and line not in real]
                assert missing == [], f"{fence}: {printed}"


def play(place: Place, stack: ExitStack, command: str) -> str:
    """What it prints; nothing if it serves, or is not run."""
    rule = rule_of(command)
    assert rule is not None
    how = How.RUN if HAS_CUDA and "--device cuda" in command else rule.how
    words = words_of(command)
    if how is How.RUN:
        return "".join(place.run(command))
    if how is How.SERVE:
        address = words[words.index("--listen") + 1]
        stack.enter_context(place.serving(command, address.rpartition(":")[2]))
    if how is How.STAND_IN:
        port = words[words.index("--port") + 1] if "--port" in words else "8000"
        role = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_role"]
        stand_in = f".venv/bin/python stand_in.py {port} {role}"
        stack.enter_context(place.serving(stand_in, port))
    return ""
