"""The wire between GPUs runs here without them too, and a loop that is ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.connector.io_thread import IoThread
from kvxfer.kernels.strided_copy import launch_copy
from kvxfer.tensors import device_launch
from tests.transports.host_gpu import serve_without_gpu
from tests.wires import keep_wires


@pytest.fixture(autouse=True)
def stand_in_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_wires(monkeypatch)
    monkeypatch.setattr(device_launch, "launch_copy", launch_copy)
    serve_without_gpu()


@pytest.fixture
def io() -> Iterator[IoThread]:
    thread = IoThread("io", lambda: None)
    yield thread
    assert thread.stop(60)
    assert thread.stop(60)
