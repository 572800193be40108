"""Engines and reference tokens for the tests of this folder, which need vLLM (scripts/test_vllm).

Where there is no vLLM nothing here is collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from tests.vllm.scheduler_rig import Engine
    from tests.vllm.step_rig import ComputingEngine

Kind = TypeVar("Kind", bound="Engine")
HAS_VLLM = find_spec("vllm") is not None
MEASURED = pytest.StashKey[dict[str, object]]()

collect_ignore_glob = [] if HAS_VLLM else ["*.py"]

if HAS_VLLM:
    from tests.vllm.cases import References
    from tests.vllm.engines import Fleet

    @pytest.fixture(scope="session")
    def fleet() -> Iterator[Fleet]:
        """Engines, kept while they are used."""
        with Fleet() as found:
            yield found

    @pytest.fixture(scope="session")
    def references(fleet: Fleet) -> References:
        """The tokens of one engine without disaggregation."""
        return References(fleet)


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines without a model: vLLM's scheduler and a real worker side."""
    from tests.vllm.scheduler_rig import Engine  # by now loaded, in spite of vLLM's warnings

    yield from _engines(tmp_path, Engine)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ComputingEngine]]:
    """Makes such engines whose steps compute tokens of what lies in the cache."""
    from tests.vllm.step_rig import ComputingEngine

    yield from _engines(tmp_path, ComputingEngine)


def _engines(folder: Path, kind: type[Kind]) -> Iterator[Callable[..., Kind]]:
    made: list[Kind] = []

    def make_one(**settings: Any) -> Kind:
        own = folder / str(len(made))
        own.mkdir()
        made.append(kind(own, **settings))
        return made[-1]

    yield make_one
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> dict[str, object]:
    """Values that the end of the run shows."""
    return pytestconfig.stash.setdefault(MEASURED, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name, value in config.stash.get(MEASURED, {}).items():
        terminalreporter.write_line(f"measured: {name}: {value}")
