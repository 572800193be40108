"""What the trial of the wire between GPUs has mapped is mapped once, and by one owner at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.device_memory import MappedMemory
from kvxfer.testing.peers import PiecesJob
from kvxfer.transfer.costs import WireCosts
from kvxfer.transfer.manifest import CudaIpcHandle, RankManifest
from kvxfer.transports import cuda_ipc_direct
from kvxfer.transports.base import ReadDone
from kvxfer.transports.cuda_ipc_direct import CudaIpcSink
from tests.conftest import HAS_CUDA
from tests.connector.conftest import stand_in_for_gpus
from tests.transports.host_gpu import gpu_of_sink
from tests.transports.pair import Pair, a_move, key_of

__all__ = ["stand_in_for_gpus"]

pytestmark = pytest.mark.skipif(HAS_CUDA, reason="counts what the stand-in for a GPU has mapped")


class Stage:
    """A sink, and a source rank that offers the same memory three times."""

    def __init__(self) -> None:
        self.pair = Pair(Config(transport="cuda_ipc"))
        assert isinstance(self.pair.sink, CudaIpcSink)
        self.sink, self.gpu = self.pair.sink, gpu_of_sink(self.pair.sink)
        self.source: RankManifest = replace(
            self.pair.manifest, memories=self.pair.manifest.memories * 3
        )

    @property
    def num_mapped(self) -> int:
        return self.gpu.num_mapped

    def move(self) -> None:
        """A read of the source, every byte compared."""
        self.pair.manifest = self.source
        move = a_move()
        self.pair.start(key_of(1), move)
        assert isinstance(self.pair.end(key_of(1)), ReadDone)
        assert self.pair.content() == self.pair.expected(move)

    def detached(self) -> None:
        """Unmapped on the copy thread."""
        self.sink.detach(self.source.control_endpoint)
        self.pair.until(lambda: not self.num_mapped)


@pytest.fixture(autouse=True)
def made_up_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of 32 MiB take seconds in Triton's interpreter."""
    costs = WireCosts(1e-6, 0.0, 1e9)
    monkeypatch.setattr(cuda_ipc_direct, "measure_copies", lambda *_: costs)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.pair.close()
    assert stage.num_mapped == 0


def test_attach_takes_over_what_the_trial_has_mapped(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = stage.sink.trial(stage.source, 1.0)
    assert stage.num_mapped == 3
    monkeypatch.setattr(stage.gpu, "map", lambda *_: pytest.fail("mapped again"))
    stage.sink.attach(stage.source, trial=trial)
    assert stage.num_mapped == 3
    stage.move()
    stage.detached()


def test_a_second_trial_of_an_attached_rank_leaves_nothing(stage: Stage) -> None:
    stage.sink.attach(stage.source)
    trial = stage.sink.trial(stage.source, 1.0)
    assert stage.num_mapped == 6
    stage.sink.attach(stage.source, trial=trial)
    assert stage.num_mapped == 3
    stage.detached()


def test_a_trial_that_is_closed_leaves_nothing_and_harms_no_attachment(stage: Stage) -> None:
    stage.sink.attach(stage.source)
    trial = stage.sink.trial(stage.source, 1.0)
    trial.close()
    trial.close()
    assert stage.num_mapped == 3
    stage.move()


@pytest.mark.parametrize("error", [RuntimeError("CUDA is gone"), KeyboardInterrupt()])
def test_a_trial_that_fails_leaves_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cuda_ipc_direct, "measure_copies", fail)
    expected = TransportUnavailable if isinstance(error, RuntimeError) else KeyboardInterrupt
    with pytest.raises(expected):
        stage.sink.trial(stage.source, 1.0)
    assert stage.num_mapped == 0


def test_a_memory_that_cannot_be_mapped_fails_the_trial_and_not_the_attach(stage: Stage) -> None:
    first, second, third = stage.source.memories
    assert isinstance(third.handle, CudaIpcHandle)
    gone = replace(third, handle=replace(third.handle, boot_id="another host"))
    source = replace(stage.source, memories=(first, second, gone))
    with pytest.raises(TransportUnavailable):
        stage.sink.trial(source, 1.0)
    assert stage.num_mapped == 0
    with pytest.raises(TransportUnavailable, match="got none"):
        stage.sink.trial(replace(source, memories=()), 1.0)


def test_a_mapping_that_cannot_be_unmapped_keeps_no_other(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = stage.gpu.map

    def stubborn(handle: CudaIpcHandle) -> MappedMemory:
        mapped = inner(handle)

        def close() -> None:
            mapped.close()
            raise TransportUnavailable("cannot be unmapped")

        return MappedMemory(mapped.memory, close)

    monkeypatch.setattr(stage.gpu, "map", stubborn)
    stage.sink.attach(stage.source)
    assert stage.num_mapped == 3
    stage.detached()


def test_whatever_is_mapped_at_the_end_is_unmapped() -> None:
    """Also while the copy thread has other work, and ends before it comes to this."""
    stage = Stage()
    stage.sink.attach(stage.source)
    go = threading.Event()
    busy = PiecesJob("other work", iter(lambda: go.wait(120), True), lambda job: None)
    stage.pair.copy_thread.submit(busy)
    threading.Timer(0.1, go.set).start()
    stage.pair.close()
    assert stage.num_mapped == 0
