"""Tests follow behaviour: they look at nothing private of a room that is not theirs, and what they
replace is at the border of the process.

A room's tests are those of ``tests/<room>``, helpers included. Borders are other packages: sockets,
clocks, the environment, CUDA, UCX.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS_OF = {"vllm": "integrations"}
"""Folders of tests with another name than their room's."""
PATCHES = {"setattr", "delattr", "setitem", "delitem"}
CLOCK = "time"
"""The module, by which a test gives another clock to one module."""

# ------------------------------------------------------------------ what may be

FROM_INSIDE: Mapping[str, str] = {
    "tests/planted.py": "plants faults in the arithmetic of copies, which oracles have to find",
    "tests/chaos/planted.py": "plants faults in the tables, which storms have to find",
    "tests/chaos/child.py": "slows copies down, so that storms come in the middle of them",
    "tests/chaos/mangling.py": "loses and repeats messages in processes of their own",
    "tests/vllm/storm_worker.py": "finds the connector that an engine of vLLM makes",
    "tests/wires.py": "names wires of tests beside kvxfer's own",
}
"""Files that change whatever they like, and why."""

# Bounds and waits that a test would meet after minutes, or with thousands of peers; or at any
# moment on a busy machine
_BOUNDS = """
    bench.cache.NUM_REQUESTS cli.replay.STALLED_S connector.control.LINGER_S
    connector.given_offer.MAX_EARLY connector.keeper.MAX_ASKED connector.loads.MAX_PRESUMED
    connector.io_thread.LEISURE_S connector.peers.BACK_OFF_S connector.rank_service.DRAIN_S
    connector.rank_service.LATE_S connector.sink.RETRY_S connector.worker_side.ASIDE_S
    connector.worker_side.LATE_S
    doctor.child.END_S doctor.child.START_S engine.rpc.HEARTBEAT_S
    kernels.rewrite_kernel.MAX_PLANES proxy.server.ABANDONED_S
    transports.guard.ALL_PACE_S transports.guard.BEGUN_S transports.guard.MOST_LATE
    transports.guard.MOST_LATE_OF transports.guard.MOST_PENALTY_S
    transports.guard.PACE_S transports.guard.PENALTY_S transports.guard.PROMPT
    transports.guard.REFILL_S
    transports.nixl_pipe.KEPT_S
    transports.shm_direct.JOB_NBYTES transports.stream_source.MAX_CONNECTIONS
    transports.ucx_pipe.CLOSE_S transports.ucx_pipe.KEPT_S transports.ucx_pipe.SPIN_S
    transports.ucx_pipe.TURN_S transports.visitors.LISTENER_TURN_S
    transports.visitors.MOST_OF_ADDRESS transports.visitors.TURN_S
"""
# What this machine is, or the version of a library, or has been compiled or named before
_MACHINE = """
    connector.worker_side.stream_of doctor.examine.AUTO
    integrations.vllm.compat.REPORTS_FAILED_REQUESTS
    integrations.vllm.regions.READABLE_DEVICES integrations.vllm.regions.layer_specs
    integrations.vllm.regions.trace_cpu integrations.vllm.step_loads.PASSES_WORKER_METADATA
    integrations.vllm.worker.REPORTS_FAILED_REQUESTS tensors.device_launch._binaries
    tensors.device_launch._binary_of tensors.device_launch._launch_by_triton
    tensors.device_launch.launch_copy
    transports.syn_filter._ATTACH
"""
# Copies that write the wrong bytes, or take as long as a test wants
_COPIES = """
    tensors.device_copy.DeviceCopier.has_room tensors.device_copy.DeviceCopier.launches
    tensors.device_copy.DeviceCopier.mark tensors.device_copy.are_blocks
    transports.cuda_ipc_direct.* transports.cuda_ipc_direct.DeviceCopier
    transports.cuda_ipc_direct.measure_copies transports.launches.Launches.add
"""
# Failures of kvxfer's own code, looks at what was done in which order, and what ends the process
_OWN_CODE = """
    bench.command.benchmark connector.peer.ControlClient connector.peers.start_trial
    connector.source.read_pull engine.rank._end_late engine.runner.Runner.execute
    transfer.source_session.OfferSession.step
"""
PATCHED = frozenset(f"{_BOUNDS} {_MACHINE} {_COPIES} {_OWN_CODE}".split())
"""Names of kvxfer that tests replace because nothing at a border does. It shrinks."""


@dataclass(frozen=True, slots=True)
class Module:
    """One file of tests: its path, the room that it is for ("" for none), its syntax."""

    path: str
    room: str
    nodes: tuple[ast.AST, ...]

    @property
    def imports(self) -> dict[str, str]:
        """Names that it has imported anywhere: what they are."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name if alias.asname else alias.name.partition(".")[0]
                    found[alias.asname or whole] = whole
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return found


def module_of(path: Path, root: Path = ROOT) -> Module:
    parts = path.relative_to(root).parts
    folder = parts[1] if len(parts) > 2 else ""
    return Module("/".join(parts), TESTS_OF.get(folder, folder), _nodes(path))


LOOKED_AT = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Attribute, ast.Name),
    *(ast.For, ast.Assign, ast.Call),
)


def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """Of a file's tree, which has a million in all: those that anything here looks at."""
    tree = ast.parse(path.read_text(), str(path))
    return tuple(node for node in ast.walk(tree) if isinstance(node, LOOKED_AT))


@cache
def modules() -> tuple[Module, ...]:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return tuple(module_of(path) for path in paths if "previous_version" not in path.parts)


# ------------------------------------------------------------------ private names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def owners() -> Mapping[str, frozenset[str]]:
    """The rooms that have something of this private name."""
    found: dict[str, set[str]] = {}
    for top in ("kvxfer", "kernels"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            room = "kernels" if top == "kernels" else parts[1].removesuffix(".py")
            for name in set(_given(_nodes(path))):
                if is_private(name):
                    found.setdefault(name, set()).add(room)
    return {name: frozenset(rooms) for name, rooms in found.items()}


def _given(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that are defined, or assigned to."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def private_reads(module: Module) -> list[str]:
    """What it looks at that is private to another room than its own."""
    own = set(_given(module.nodes))
    found = []
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                continue
            names = [node.attr] if node.attr not in own else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvxfer."):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in filter(is_private, names):
            rooms = owners().get(name, frozenset())
            if rooms and module.room not in rooms:
                found.append(f"{module.path}:{node.lineno}: {name} is of {'/'.join(sorted(rooms))}")
    return found


# ------------------------------------------------------------------ patches


def patches(module: Module) -> list[tuple[int, str]]:
    """Where it replaces something of kvxfer, and what, without "kvxfer"."""
    known = {**module.imports, **_of_loops(module)}
    found = []
    for node in module.nodes:
        for owner, name in _replaced(node):
            first, _, rest = owner.partition(".")
            whole = ".".join(filter(None, (known.get(first, first), rest, name)))
            is_seen = first in known or first == "kvxfer"
            if is_seen and whole.startswith("kvxfer.") and name != CLOCK:
                found.append((getattr(node, "lineno", 0), whole.removeprefix("kvxfer.")))
    return found


def _of_loops(module: Module) -> dict[str, str]:
    """Names of loops over things of kvxfer: the first of these."""
    imports, found = module.imports, {}
    for node in module.nodes:
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            of_kvxfer = [
                imports[name.id]
                for name in ast.walk(node.iter)
                if isinstance(name, ast.Name) and imports.get(name.id, "").startswith("kvxfer.")
            ]
            for target in targets:
                if of_kvxfer and isinstance(target, ast.Name):
                    found[target.id] = of_kvxfer[0]
    return found


def _replaced(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Owner and name of what this call or assignment replaces."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                yield ast.unparse(target.value), target.attr
    if not isinstance(node, ast.Call) or not node.args:
        return
    called, args = node.func, node.args
    name = called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
    if name not in PATCHES:
        return
    if isinstance(args[0], ast.Constant | ast.JoinedStr):
        whole = ast.unparse(args[0]).lstrip("f").strip("'\"")
        owner, _, name = whole.rpartition(".")
        yield owner, name
    else:
        given = args[1] if len(args) > 1 else args[0]
        said = str(given.value) if isinstance(given, ast.Constant) else "*"
        yield ast.unparse(args[0]), said


# ------------------------------------------------------------------ tests

pytestmark = pytest.mark.xdist_group("borders")  # every file is read once


def test_only_a_rooms_own_tests_look_at_what_is_private() -> None:
    found = [private_reads(module) for module in modules() if module.path not in FROM_INSIDE]
    assert sum(found, []) == []


def test_what_is_replaced_is_at_a_border() -> None:
    found = {
        name: f"{module.path}:{line}"
        for module in modules()
        if module.path not in FROM_INSIDE
        for line, name in patches(module)
    }
    assert {name: where for name, where in found.items() if name not in PATCHED} == {}
    assert PATCHED - found.keys() == set(), "of these there is none any more"


PLANTED = [  # (path, code, private reads, patches)
    ("tests/vllm/x.py", "from kvxfer.connector.source import _find", 1, 0),
    ("tests/hostile/x.py", "def f(engine):\n    return engine.source._live", 1, 0),
    ("tests/connector/x.py", "def f(engine):\n    return engine.source._live", 0, 0),
    ("tests/x.py", "from kvxfer.connector import source\nsource.AT_S = 1", 0, 1),
    ("tests/x.py", "from kvxfer.connector import source as s\nsetattr(s, 'A_S', 1)", 0, 1),
    ("tests/x.py", "def f(m):\n    m.setattr('kvxfer.connector.source.AT_S', 1)", 0, 1),
    ("tests/x.py", "def f(m, room):\n    m.setattr(f'kvxfer.{room}.AT_S', 1)", 0, 1),
    (
        "tests/x.py",
        "from kvxfer.connector import a, b\nfor each in (a, b):\n    m.setattr(each, 'A_S', 1)",
        *(0, 1),
    ),
    ("tests/x.py", "import os\ndef f(m):\n    m.setattr(os, 'geteuid', int)", 0, 0),
    ("tests/x.py", "from kvxfer.connector import a\nm.setattr(a, 'time', clock)", 0, 0),
]


@pytest.mark.parametrize(("path", "code", "num_private", "num_patches"), PLANTED)
def test_planted_ones_are_found(
    tmp_path: Path, path: str, code: str, num_private: int, num_patches: int
) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(code)
    module = module_of(tmp_path / path, tmp_path)
    assert len(private_reads(module)) == num_private
    assert len(patches(module)) == num_patches
