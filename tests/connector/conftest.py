"""The wire between GPUs runs here without them too."""

from __future__ import annotations

import pytest

from kvxfer.kernels.strided_copy import launch_copy
from kvxfer.tensors import device_launch
from kvxfer.transports import registry
from tests.transports.host_gpu import serve_without_gpu


@pytest.fixture(autouse=True)
def stand_in_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SOURCES", dict(registry._SOURCES))
    monkeypatch.setattr(registry, "_SINKS", dict(registry._SINKS))
    monkeypatch.setattr(device_launch, "launch_copy", launch_copy)
    serve_without_gpu()
