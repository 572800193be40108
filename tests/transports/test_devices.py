"""Which wire is for which memory."""

from __future__ import annotations

import pytest
import torch

from kvxfer.config import Config, load_config
from kvxfer.errors import ConfigError, TransportUnavailable
from kvxfer.testing.faults import injected
from kvxfer.transports.base import LocalMemory
from kvxfer.transports.registry import make_sinks, make_sources


def _make(memory: LocalMemory, config: Config) -> None:
    make_sources(memory, config, None, lambda: None, None)  # type: ignore[arg-type]


def test_host_memory_is_not_for_this_wire() -> None:
    tensor = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(TransportUnavailable, match="expected cuda memory, got memory on cpu"):
        _make(LocalMemory((tensor,), ()), Config(transport="cuda_ipc"))


@pytest.mark.parametrize(
    ("wire", "sentence"),
    [("shm", "shm: expected cpu memory, got .* meta"), ("zmq", "of a CPU or of a CUDA device")],
)
def test_memory_of_other_devices_is_not_for_the_others(wire: str, sentence: str) -> None:
    memory = LocalMemory((torch.zeros(8, dtype=torch.uint8, device="meta"),), ())
    config = load_config({"transport": wire}, {}, {}).config
    with pytest.raises(TransportUnavailable, match=sentence):
        _make(memory, config)
    with pytest.raises(TransportUnavailable, match="expected memory on one of cuda, cpu, got meta"):
        _make(memory, Config())


def test_faults_of_copies_are_refused() -> None:
    memory = LocalMemory((torch.zeros(8, dtype=torch.uint8, device="meta"),), ())
    config = Config(transport="cuda_ipc")
    with (
        injected("read:slow=1s"),
        pytest.raises(ConfigError, match="got read:slow; a GPU's copies take no faults"),
    ):
        make_sinks(memory, config, None, lambda: None, None)  # type: ignore[arg-type]


def test_a_rank_has_one_device() -> None:
    host = torch.zeros(8, dtype=torch.uint8)
    memory = LocalMemory((host, torch.zeros(8, dtype=torch.uint8, device="meta")), ())
    with pytest.raises(ValueError, match="on one device, got cpu, meta"):
        _ = memory.device
    assert LocalMemory((host, host), ()).device == torch.device("cpu")
