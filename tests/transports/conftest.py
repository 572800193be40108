"""What most tests of the stream wire begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transports.pair import ZMQ, Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends over ZeroMQ, in one process."""
    pair = Pair(ZMQ)
    yield pair
    pair.close()
