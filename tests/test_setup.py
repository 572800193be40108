"""The packaging, and the set-up that the scripts share (as far as it goes without installing)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = [
    "scripts/_setup",
    "scripts/demo",
    "scripts/quick",
    "scripts/test",
    "scripts/test_gpu",
    "scripts/test_integrations",
    "scripts/test_vllm",
    "scripts/check",
    "scripts/grid",
    ".ci/run",
]
STAMPED = ["pyproject.toml", "constraints.txt", "scripts/_setup"]
# torch and its triton belong to the machine: scripts/_setup names their versions.
NOT_PINNED = {"torch", "triton"}


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower() for line in requirements}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower(): version for name, version in pairs}


def test_every_folder_of_code_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "kvxfer").rglob("*.py")} | {ROOT / "kvxfer/kernels"}
    found = {str(folder.relative_to(ROOT)).replace("/", ".") for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_dependencies_and_extras() -> None:
    project = PROJECT["project"]
    base = {"numpy", "torch", "pyzmq", "msgspec", "rich", "typer"}
    assert requirement_names(project["dependencies"]) == base
    extras = {
        extra: requirement_names(names) for extra, names in project["optional-dependencies"].items()
    }
    assert extras == {
        "engine": {"safetensors", "tokenizers"},
        "cuda": {"triton", "cuda-bindings"},
        "ucx": {"ucxx-cu13"},
        "nixl": {"nixl"},
        "bench": {"matplotlib"},
        "proxy": {"aiohttp", "prometheus-client"},
        "metrics": {"prometheus-client"},
        "vllm-names": {"cbor2", "xxhash"},
        "fuzz": {"atheris"},
        "dev": {
            *("allpairspy", "pytest", "hypothesis", "transformers", "mypy", "ruff", "triton"),
            *("aiohttp", "prometheus-client", "cbor2", "xxhash", "opentelemetry-sdk", "pyyaml"),
            "pytest-xdist",
        },
    }
    assert project["scripts"] == {"kvxfer": "kvxfer.cli.app:main"}
    wanted = base.union(*extras.values()) - NOT_PINNED
    assert wanted <= pins().keys()
    assert not NOT_PINNED & pins().keys()


def test_pins_are_complete_and_plain() -> None:
    """What an installed pinned package needs is pinned too; every pin is one version."""
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text
    assert "@" not in text
    # OpenTelemetry's names of attributes have only ever been released as betas
    one = r"[0-9]+(\.[0-9]+)*(\.?post[0-9]+|b[0-9]+)?"
    assert all(re.fullmatch(one, version) for version in pins().values())
    normal = {re.sub(r"[-_.]+", "-", name) for name in pins()}
    for name in [*pins(), "torch"]:
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for need in needs:
            if "extra ==" in need or ";" in need:
                continue
            (other,) = requirement_names([need])
            assert re.sub(r"[-_.]+", "-", other) in normal | NOT_PINNED, f"{name} needs {other}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_and_strict(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert next(line for line in lines[1:] if not line.startswith("#")) == "set -euo pipefail"
    assert "http" not in path.read_text()


def test_ci_runs_these_scripts_and_nothing_else() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    commands = [line for line in lines if not line.startswith(("#", "set ", "root="))]
    names = ("check", "test", "test", "demo", "test_vllm", "test_integrations")
    whole = ["", "", " -m slow tests/cli", "", "", ""]
    assert commands == [
        f'"$root/scripts/{name}"{more}' for name, more in zip(names, whole, strict=True)
    ]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the set-up reads, in a place with a space in its name."""
    root = tmp_path / "the tree"
    (root / "scripts").mkdir(parents=True)
    for name in STAMPED:
        shutil.copy(ROOT / name, root / name)
    return root


def set_up(tree: Path, python: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(tree / "scripts/_setup")],
        env={**os.environ, "PYTHON": python},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def fake_python(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_no_python(tree: Path) -> None:
    done = set_up(tree, "no-such-python")
    assert done.returncode == 1
    assert "no-such-python: expected Python 3.11 or newer, found no such command" in done.stderr


def test_old_python(tree: Path, tmp_path: Path) -> None:
    old = fake_python(tmp_path, 'if [ "$1" = -V ]; then echo Python 3.9.2; else exit 1; fi')
    done = set_up(tree, old)
    assert done.returncode == 1
    assert "expected Python 3.11 or newer, got Python 3.9.2; set PYTHON to a newer" in done.stderr


def test_python_without_venv(tree: Path, tmp_path: Path) -> None:
    bare = fake_python(tmp_path, 'case "$2" in *venv*) exit 1;; esac')
    done = set_up(tree, bare)
    assert done.returncode == 1
    assert "has no venv module; install it" in done.stderr
    assert "python3-venv" in done.stderr


FAKE_VENV_PYTHON = r"""
here="$(dirname "$0")/.."
case "$*" in
    *"find_spec"*torch) test -e "$here/torch" ;;
    *"find_spec"*triton) exit 0 ;;
    *"pip "*"torch=="*"+cpu") echo "ERROR: @REFUSAL@" >&2; exit 1 ;;
    *"pip "*"torch=="*) echo "$*" >>"$here/log"; touch "$here/torch" ;;
    *"pip "*) echo "$*" >>"$here/log" ;;
    *"-P - "*) echo stamped ;;
esac
"""


def fake_calling_python(folder: Path, refusal: str) -> str:
    """A python3 without torch whose venv has a pip that has no CPU build of it."""
    inner = folder / "inner"
    inner.mkdir()
    fake = fake_python(inner, FAKE_VENV_PYTHON.replace("@REFUSAL@", refusal))
    return fake_python(
        folder,
        'case "$*" in\n'
        "    *find_spec*) exit 1 ;;\n"
        f'    "-m venv"*) for venv; do :; done; mkdir -p "$venv/bin"; cp "{fake}" "$venv/bin" ;;\n'
        "esac",
    )


def test_plain_torch_where_pip_sees_no_cpu_build(tree: Path, tmp_path: Path) -> None:
    refusal = "No matching distribution found for torch==2.13.0+cpu"
    done = set_up(tree, fake_calling_python(tmp_path, refusal))
    assert done.returncode == 0, done.stderr
    assert "about 2.5 GB" in done.stderr
    torch, tools, project, *wires = (tree / ".venv/log").read_text().splitlines()
    assert torch.endswith(" torch==2.13.0")  # first, so that nothing else chooses one
    assert tools.endswith(" setuptools")
    assert project.endswith("[engine,bench,dev]")
    names = ["ucxx-cu13", "libucxx-cu13", "libucx-cu13", "nixl-cu13", "nixl"]
    assert [line.split()[-1] for line in wires] == names
    assert all("--no-deps" in line for line in wires)
    for line in (torch, tools, project, *wires):
        assert f"-c {tree}/constraints.txt" in line
    assert (tree / ".venv/stamp").read_text() == "stamped\n"


def test_another_failure_of_pip_is_shown(tree: Path, tmp_path: Path) -> None:
    done = set_up(tree, fake_calling_python(tmp_path, "Read timed out"))
    assert done.returncode == 1
    assert "Read timed out" in done.stderr
    assert "2.5 GB" not in done.stderr
    assert not (tree / ".venv/stamp").exists()


def make_ready(tree: Path) -> None:
    """What a finished set-up leaves, with the stamp worked out by hand."""
    venv = tree / ".venv"
    (venv / "bin").mkdir(parents=True)
    fake_python(venv / "bin", f'exec "{sys.executable}" "$@"')
    stamp = hashlib.sha256(f"{tree.resolve()}\n{metadata.version('torch')}\n".encode())
    for name in STAMPED:
        stamp.update((tree / name).read_bytes())
    (venv / "stamp").write_text(stamp.hexdigest() + "\n")


def test_ready_is_silent_and_calls_no_python(tree: Path) -> None:
    make_ready(tree)
    done = set_up(tree, "no-such-python")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", STAMPED)
def test_a_change_makes_it_stale(tree: Path, name: str) -> None:
    make_ready(tree)
    with (tree / name).open("a") as file:
        file.write("\n# changed\n")
    assert set_up(tree, "no-such-python").returncode == 1


def test_a_moved_tree_is_stale(tree: Path) -> None:
    make_ready(tree)
    moved = tree.rename(tree.parent / "moved")
    assert set_up(moved, "no-such-python").returncode == 1


def test_a_set_up_that_was_cut_off_is_stale(tree: Path) -> None:
    make_ready(tree)
    (tree / ".venv/stamp").unlink()
    assert set_up(tree, "no-such-python").returncode == 1
