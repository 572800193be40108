"""Imports point down only. These lists are the architecture."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path

import pytest

import kvxfer

ROOT = Path(__file__).parents[1]
# A room imports itself and rooms of earlier levels, never another one of its own level.
LEVELS: list[set[str]] = [
    {"errors", "extras", "log_limit", "bounded"},
    {"ports"},
    {"config"},
    {"cache"},
    {"transfer"},
    {"kernels"},
    {"tensors"},
    {"transports"},
    {"testing"},
    {"connector"},
    {"engine", "integrations", "proxy"},
    {"bench", "doctor", "plan"},
    {"cli"},
    {"__init__", "__main__"},
]
PURE = {"errors", "extras", "log_limit", "bounded", "ports", "config", "cache", "transfer"}
HEAVY = {
    *("torch", "triton", "zmq", "ucxx", "nixl", "cuda", "transformers", "tokenizers"),
    *("aiohttp", "prometheus_client"),
}
# Decide in pure code, act at the rim: a wire moves bytes and does not know what they are for.
NOT_FOR: dict[str, set[str]] = {"transports": {"kvxfer.transfer.session"}}
# What makes wires fail is for tests, and for who starts a pair of engines to see them fail.
USES_TESTING = {"kvxfer/cli/commands.py": "kvxfer pair has options for it"}
# Who touches the environment, and why.
ENVIRONMENT = {
    "kvxfer/config.py": "the one reader",
    "kvxfer/bench/workers.py": "a process whose library reads it when it is loaded",
}
# Who sets up logging besides cli, and why.
LOG_SETUP = {
    "kvxfer/doctor/child.py": "the entry of its processes",
    "kvxfer/engine/rank.py": "the entry of a rank's process",
    "kvxfer/integrations/vllm/plugin.py": "vLLM has handlers for its own loggers only",
}
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True)
class Source:
    """One file: its path from the root, its room."""

    root: Path
    path: str
    room: str

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed when a test looks at it: every process that runs tests makes all the sources."""
        return ast.parse((self.root / self.path).read_text(), self.path)

    @property
    def module(self) -> str:
        dotted = self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        return f"kvxfer.{dotted}" if dotted.startswith("kernels") else dotted


@cache
def sources() -> tuple[Source, ...]:
    return tuple(_sources(ROOT))


def _sources(root: Path) -> Iterator[Source]:
    for top in ("kvxfer", "kernels"):
        # Links are not followed: kvxfer/kernels is the second walk.
        for folder, folders, names in os.walk(root / top, followlinks=False):
            folders.sort()
            for name in sorted(names):
                if not name.endswith(".py"):
                    continue
                path = (Path(folder) / name).relative_to(root)
                room = "kernels" if top == "kernels" else path.parts[1].removesuffix(".py")
                yield Source(root, str(path), room)


def imported(source: Source) -> list[str]:
    """Every module, or name of a module, that is imported anywhere in the file."""
    found: list[str] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{source.path}:{node.lineno}: write imports out in full"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def level(room: str) -> int:
    found = [number for number, rooms in enumerate(LEVELS) if room in rooms]
    assert found, f"{room} has no place in LEVELS"
    return found[0]


def complaints(source: Source) -> list[str]:
    """What is wrong with the file's imports."""
    wrong = []
    for name in imported(source):
        top, _, rest = name.partition(".")
        if top == "kvxfer":
            target = rest.split(".")[0]
            if not any(target in rooms for rooms in LEVELS):
                target = "__init__"  # a name of the package itself
            if target != source.room and level(target) >= level(source.room):
                wrong.append(f"imports up: {name}")
        if source.room in PURE and top in HEAVY:
            wrong.append(f"is pure but imports {name}")
        if source.room == "kernels" and not _for_kernels(name):
            wrong.append(f"is a kernel but imports {name}")
        wrong += [
            f"may not use {name}"
            for module in NOT_FOR.get(source.room, ())
            if name == module or name.startswith(f"{module}.")
        ]
    return wrong


def _for_kernels(name: str) -> bool:
    top = name.partition(".")[0]
    standard = top in sys.stdlib_module_names and top != "logging"  # a kernel never logs
    return standard or top in {"torch", "triton"} or name.startswith("kvxfer.kernels.")


def environment_uses(source: Source) -> list[int]:
    """Lines that touch the environment."""
    lines = []
    for node in ast.walk(source.tree):
        named = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES
        direct = (
            isinstance(node, ast.ImportFrom)
            and node.module in ("os", "posix")
            and any(alias.name in ENVIRONMENT_NAMES for alias in node.names)
        )
        if named or direct:
            lines.append(node.lineno)  # type: ignore[attr-defined]
    return lines


def calls(source: Source, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id == name)
            or (isinstance(node.func, ast.Attribute) and node.func.attr == name)
        )
    ]


def by_path(source: Source) -> str:
    return source.path


def test_the_walk_sees_every_depth_once() -> None:
    paths = [source.path for source in sources()]
    assert len(paths) == len(set(paths))
    assert {"kvxfer/__init__.py", "kvxfer/transfer/topology.py"} <= set(paths)
    assert not any(path.startswith("kvxfer/kernels/") for path in paths)
    assert (ROOT / "kvxfer" / "kernels").readlink() == Path("../kernels")
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("source", sources(), ids=by_path)
def test_imports_point_down(source: Source) -> None:
    level(source.room)
    assert complaints(source) == []


def test_nothing_that_serves_imports_the_room_for_tests() -> None:
    users = {
        source.path
        for source in sources()
        if source.room != "testing"
        and any(name.startswith("kvxfer.testing") for name in imported(source))
    }
    assert users == set(USES_TESTING)


@pytest.mark.parametrize("source", sources(), ids=by_path)
def test_only_config_touches_the_environment(source: Source) -> None:
    if source.path not in ENVIRONMENT:
        assert environment_uses(source) == []


@pytest.mark.parametrize("source", sources(), ids=by_path)
def test_only_cli_and_bench_print_and_handle_logs(source: Source) -> None:
    if source.room in ("cli", "bench"):
        return
    set_up = () if source.path in LOG_SETUP else ("basicConfig", "addHandler")
    for name in ("print", *set_up):
        assert [node.lineno for node in calls(source, name)] == [], name
    for call in calls(source, "getLogger"):
        (logger,) = call.args
        assert isinstance(logger, ast.Constant), f"line {call.lineno}: write the name out"
        if source.path not in LOG_SETUP:
            assert str(logger.value) == f"kvxfer.{source.room}"


PLANTED = [  # (path, code, complaint)
    ("kvxfer/transfer/deep/er/x.py", "import torch.nn", "is pure but imports torch.nn"),
    ("kvxfer/cache/x.py", "def f():\n    from zmq import Context", "is pure but imports zmq.Cont"),
    ("kvxfer/transfer/x.py", "from kvxfer.tensors.copy import y", "imports up: kvxfer.tensors"),
    ("kvxfer/transfer/x.py", "from kvxfer import connector", "imports up: kvxfer.connector"),
    ("kvxfer/engine/x.py", "import kvxfer.integrations.vllm", "imports up: kvxfer.integrations"),
    ("kvxfer/cli/x.py", "from kvxfer import __version__", "imports up: kvxfer.__version__"),
    ("kernels/deep/x.py", "import numpy", "is a kernel but imports numpy"),
    ("kernels/x.py", "from kvxfer.errors import E", "is a kernel but imports kvxfer.errors.E"),
    ("kernels/x.py", "import logging", "is a kernel but imports logging"),
    ("kvxfer/transports/x.py", "from kvxfer.transfer import session", "may not use kvxfer.transf"),
]


@pytest.mark.parametrize(("path", "code", "complaint"), PLANTED)
def test_planted_imports_are_found(tmp_path: Path, path: str, code: str, complaint: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(code)
    (source,) = _sources(tmp_path)
    assert [found[: len(complaint)] for found in complaints(source)] == [complaint]


def test_planted_relative_import_and_unknown_room(tmp_path: Path) -> None:
    (tmp_path / "kvxfer" / "attic").mkdir(parents=True)
    (tmp_path / "kvxfer" / "attic" / "x.py").write_text("from . import y")
    (source,) = _sources(tmp_path)
    with pytest.raises(AssertionError, match="write imports out in full"):
        imported(source)
    with pytest.raises(AssertionError, match="attic has no place"):
        level(source.room)


@pytest.mark.parametrize(
    "code",
    ["import os\nos.environ['A']", "import os as o\no.getenv('A')", "from os import environ as e"],
)
def test_planted_environment_is_found(tmp_path: Path, code: str) -> None:
    (tmp_path / "x.py").write_text(code)
    assert environment_uses(Source(tmp_path, "x.py", "x"))


def run_python(code: str, *arguments: str) -> str:
    """What the code prints in a new process that starts in the root."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADED = f"print(*sorted({HEAVY} & set(sys.modules)))"


def test_import_kvxfer_is_light() -> None:
    assert run_python(f"import sys, kvxfer; kvxfer.__version__; {LOADED}").split() == []


def test_pure_rooms_load_nothing_heavy() -> None:
    modules = [source.module for source in sources() if source.room in PURE]
    code = (
        f"import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n{LOADED}"
    )
    assert run_python(code, *modules).split() == []


def test_what_serves_on_a_cpu_needs_no_triton() -> None:
    modules = [
        *("kvxfer.connector.worker_side", "kvxfer.connector.scheduler_side"),
        *("kvxfer.transports.registry", "kvxfer.engine.engine", "kvxfer.cli.app", "kvxfer.tensors"),
        "kvxfer.plan.drawing",
    ]
    code = (
        "import importlib, sys; sys.modules['triton'] = None\n"
        "for name in sys.argv[1:]: importlib.import_module(name)"
    )
    run_python(code, *modules)


def test_help_is_light() -> None:
    code = (
        "import runpy, sys; sys.argv[1:] = ['--help']\n"
        "try: runpy.run_module('kvxfer', run_name='__main__', alter_sys=True)\n"
        f"except SystemExit as end: assert not end.code, end.code\n{LOADED}"
    )
    *text, loaded = run_python(code).split("\n")[:-1]
    assert "pair" in "\n".join(text)
    assert loaded.split() == []


@pytest.mark.parametrize("name", kvxfer.__all__)
def test_every_lazy_name_resolves(name: str) -> None:
    value = getattr(kvxfer, name)
    if name != "__version__":
        assert value.__name__ == name
    assert name in dir(kvxfer)


def test_lazy_names_are_the_typed_ones() -> None:
    """The names for type checkers, for look-up and for ``import *`` are the same."""
    tree = next(source.tree for source in sources() if source.path == "kvxfer/__init__.py")
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name, module in typed.items():
        assert getattr(kvxfer, name) is getattr(import_module(str(module)), name)
    assert sorted([*typed, "__version__"]) == sorted(kvxfer.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvxfer' has no attribute 'nothing'"):
        kvxfer.nothing  # noqa: B018
