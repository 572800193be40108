"""Set-up of every test: device, seeds, and how hard hypothesis looks.

``--long`` (or HYPOTHESIS_PROFILE=long) draws many random examples; the default is quick and the
same every time.
"""

from __future__ import annotations

import importlib.util
import os
import random
import tempfile
import threading
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from kvxfer.errors import TransportUnavailable
from kvxfer.transports.nixl_agent import NixlAgent

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before any test imports a kernel


def _launch_one_at_a_time() -> None:
    """Triton's interpreter replaces hundreds of names of its language at a launch, and puts them
    back at the end: another thread's launch would lose them in its midst.
    """
    from triton.runtime import interpreter

    launch, launching = interpreter.GridExecutor.__call__, threading.Lock()

    def launch_alone(*args: Any, **kwargs: Any) -> None:
        with launching:
            launch(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch_alone


def _patch_once_a_launch() -> None:
    """It replaces them again at each call of one kernel by another, where mostly all are replaced
    already: a fifth of the time.
    """
    from triton import __version__, language
    from triton.runtime import interpreter

    if __version__ != "3.9.0":  # others may do it in another way
        return

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for each in self.fn.__globals__.values():
            is_language = each is language or each is language.core
            if is_language and language.core.is_builtin(each.load):
                interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as exc:
            raise interpreter.InterpreterError(repr(exc)) from exc

    interpreter.InterpretedFunction.__call__ = call


if not HAS_CUDA and importlib.util.find_spec("triton"):
    _launch_one_at_a_time()
    _patch_once_a_launch()

settings.register_profile(
    "ci",
    max_examples=25,
    derandomize=True,
    deadline=None,  # a busy machine is no bug
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long",
    max_examples=1000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="hypothesis draws many examples, new ones in each run"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile", default=None):
        return  # hypothesis loads it
    chosen = "long" if config.getoption("--long") else os.environ.get("HYPOTHESIS_PROFILE", "ci")
    settings.load_profile(chosen)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports go to another process, as UTF-8: what strangers have sent stands in logs as it came,
    also half a surrogate pair.
    """
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session", autouse=True)
def _hooks_in_order() -> None:
    """NIXL's UCX takes the memory hooks of one that was in its process before, which kvxfer then
    refuses to make again; tests make both, in any order. On a machine with a GPU no order is good
    for all: tests of `ucx` come before those of `nixl`, or in processes of their own.
    """
    if HAS_CUDA:
        return
    if importlib.util.find_spec("ucxx") and importlib.util.find_spec("nixl"):
        with suppress(TransportUnavailable):
            NixlAgent(()).close()


@pytest.fixture
def device() -> torch.device:
    """The accelerator where there is one."""
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture
def made_folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The temporary folders that kvxfer has made in this process, in order, with those that have
    gone again.
    """
    made: list[Path] = []
    mkdtemp = tempfile.mkdtemp

    def note(suffix: str | None = None, prefix: str | None = None, dir: str | None = None) -> str:  # noqa: A002 -- as tempfile has it
        folder = mkdtemp(suffix, prefix, dir)
        if (prefix or "").startswith("kvxfer-"):
            made.append(Path(folder))
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", note)
    return made


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random numbers."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
