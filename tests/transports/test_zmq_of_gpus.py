"""``zmq`` between memories of GPUs: its contract, and its trials."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvxfer.testing import check_transport
from kvxfer.transports.base import LocalMemory
from kvxfer.transports.pipe import CHUNK_S
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource
from kvxfer.transports.stream_wire import AskTrial, Attach, decode_to_source
from tests.conftest import HAS_CUDA
from tests.spoken import watch_dealers
from tests.transports.host_packer import made_with, packing_pair, quick_packer
from tests.transports.pair import ZMQ, connections_of, stream_side, zmq_pipe


def quick(side: Any, memory: LocalMemory, *others: Any) -> Any:
    """A side in host memory, as if it were a GPU's."""
    return made_with(side, quick_packer, memory, ZMQ, *others)


@pytest.mark.skipif(HAS_CUDA, reason="kernels run on the GPU")
def test_zmq_without_a_gpu_keeps_every_promise() -> None:
    check_transport(partial(quick, StreamSource), partial(quick, StreamSink))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("source_device", "sink_device"),
    [
        pytest.param("cuda:0", "cuda:0", id="one GPU"),
        pytest.param("cuda:0", "cuda:1", id="two GPUs"),
        pytest.param("cuda:0", "cpu", id="GPU to CPU"),
        pytest.param("cpu", "cuda:0", id="CPU to GPU"),
    ],
)
def test_zmq_between_gpus_keeps_every_promise(source_device: str, sink_device: str) -> None:
    if "1" in sink_device and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_transport(
        partial(stream_side, StreamSource, zmq_pipe, ZMQ),
        partial(stream_side, StreamSink, zmq_pipe, ZMQ),
        source_device=source_device,
        sink_device=sink_device,
    )


@pytest.mark.parametrize(
    ("source_type", "sink_type", "large_nbytes"),
    [
        ("cpu", "cpu", 4 << 20),
        ("cpu", "cuda", 4 << 20),
        ("cuda", "cpu", 4 << 20),
        ("cuda", "cuda", 32 << 20),
    ],
)
def test_a_trial_asks_for_what_the_memory_of_both_sides_admits(
    source_type: str, sink_type: str, large_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[tuple[int, int]] = []
    asked: list[int] = []

    def say(_: object, frame: bytes) -> None:
        message = decode_to_source(memoryview(frame))
        if isinstance(message, Attach):
            attached.append((message.num_slots, message.slot_nbytes))
        if isinstance(message, AskTrial):
            asked.append(message.nbytes)

    with packing_pair(quick_packer, monkeypatch) as pair:
        pair.until(lambda: bool(len(connections_of(pair))))  # the sink is attached
        watch_dealers(monkeypatch, lambda *_: None, say)
        # Both are in host memory; they and the manifest say otherwise
        on_device = SimpleNamespace(device=torch.device(sink_type))
        monkeypatch.setattr(pair.sink, "_memory", on_device)
        monkeypatch.setattr(vars(pair.source)["_admission"], "_device_type", source_type)
        memories = tuple(
            msgspec.structs.replace(each, device="cpu" if source_type == "cpu" else "cuda:1")
            for each in pair.manifest.memories
        )
        pair.manifest = msgspec.structs.replace(pair.manifest, memories=memories)
        costs = pair.trial(10.0).costs
        assert costs.bytes_per_s > 0
        assert costs.message_s == CHUNK_S * (1 if {source_type, sink_type} == {"cpu"} else 4)
    assert attached == [(2, large_nbytes)]
    assert set(asked) == {large_nbytes, 64 << 10}
