"""Under torchrun: one world for the run, and one verdict of all ranks for each test."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Iterator
from contextlib import suppress

import pytest

from tests.distributed.world import RankFailed, World

pytest.register_assert_rewrite("tests.distributed.driver", "tests.distributed.play")


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """All processes that torchrun has started."""
    made = World()
    yield made
    made.close()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that fails on one rank fails on all, with that rank's words; no rank goes on alone."""
    world = pyfuncitem.funcargs.get("world")
    if not isinstance(world, World):
        return (yield)
    try:
        result = yield
    except Exception as e:
        # What was raised on all ranks alike is said by each of them already.
        words = "as above" if isinstance(e, RankFailed) else traceback.format_exc()
        with suppress(RankFailed):
            world.verdict(pyfuncitem.nodeid, words)
        raise
    world.verdict(pyfuncitem.nodeid, "")
    return result
