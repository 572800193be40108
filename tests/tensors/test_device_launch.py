"""Launches by the driver: the same bytes as by Triton, on any stream, from any thread."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.tensors import device_launch
from kvxfer.tensors.cuda_driver import CudaError, Driver, PointerArguments
from kvxfer.tensors.device_copy import DeviceCopier, flat_copy
from kvxfer.tensors.device_digest import DeviceDigester
from kvxfer.tensors.device_launch import GpuLauncher, HostEvent, JobRing, _binary_of
from kvxfer.tensors.kv_digest import cells_of
from tests.tensors.strided_cases import copy_classes_of
from tests.tensors.test_kv_digest import CASE, host_digests, pool_of, wanted_of

NBYTES = 1 << 20


def compiled(**metadata: Any) -> SimpleNamespace:
    target = SimpleNamespace(warp_size=32)
    plain = {"num_warps": 8, "shared": 128, "num_ctas": 1, "target": target}
    return SimpleNamespace(function=7, metadata=SimpleNamespace(**(plain | metadata)))


def test_a_plain_binary_is_launched_by_the_driver() -> None:
    binary = _binary_of(compiled(global_scratch_size=0))
    assert binary is not None
    assert (binary.function, binary.num_threads, binary.shared_nbytes) == (7, 256, 128)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_ctas", 2),
        ("global_scratch_size", 64),
        ("profile_scratch_size", 8),
        ("launch_cooperative_grid", True),
        ("launch_pdl", True),
    ],
)
def test_what_needs_more_is_left_to_triton(name: str, value: object) -> None:
    assert _binary_of(compiled(**{name: value})) is None


def test_a_kernel_finds_its_arguments_and_null_behind_them() -> None:
    arguments = PointerArguments(3)
    for addresses in ([11, 12, 13], [1 << 40, 2, 3]):
        where = list(arguments.set(addresses))
        found = [device_launch_value(each) for each in where]
        assert found[:3] == addresses
        assert set(found[3:]) == {0}
        assert len(found) >= 6


def device_launch_value(address: int | None) -> int:
    assert address is not None
    return ctypes.c_uint64.from_address(address).value


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_the_error_names_it() -> None:
    with pytest.raises(CudaError, match=r"the CUDA driver: expected libcuda.so.1, got "):
        Driver()


def test_words_of_a_slot_come_back_from_where_they_lie() -> None:
    """By a driver whose device is the host."""

    class HostDriver:
        def call(self, name: str, to: int, given: int, nbytes: int, stream: int) -> None:
            assert (name, stream) == ("cuMemcpyDtoHAsync_v2", 7)
            ctypes.memmove(to, given, nbytes)

    launcher = GpuLauncher.__new__(GpuLauncher)
    launcher._driver, launcher._current = HostDriver(), nullcontext()  # type: ignore[assignment]
    launcher._stream = (None, 7)
    ring = JobRing(64, torch.device("cpu"))
    for _ in range(2):  # the second one does not begin where the ring does
        slot = ring.take(3)
        slot.host[:], slot.device[:] = 1, torch.tensor([2, 3, 4])
        launcher.read_back(slot, 1, None)
        assert slot.host.tolist() == [1, 3, 4]
        ring.close(slot, HostEvent())


# ------------------------------------------------------------------ on a GPU


class Rig:
    """Two MiB of a GPU, and copies between them."""

    def __init__(self, number: int = 0) -> None:
        self.device = torch.device("cuda", number)
        self.given = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device=self.device)
        self.taken = torch.zeros_like(self.given)
        self.bound = flat_copy(self.given.data_ptr(), self.taken.data_ptr(), NBYTES)
        self.copier = DeviceCopier(self.device)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)

    def copy(self) -> Any:
        ids = np.zeros(1, np.int64)
        num_tokens = self.bound.sink.tile.block_tokens
        return self.copier.copy(self.bound, ids, ids, (0, num_tokens), stream=self.stream).event

    def is_copied(self) -> bool:
        return bool((self.given == self.taken).all())


@pytest.fixture
def triton_launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Those that Triton made."""
    seen: list[object] = []
    first = device_launch._launch_by_triton

    def launch(*args: Any) -> object:
        seen.append(args)
        return first(*args)

    monkeypatch.setattr(device_launch, "_binaries", {})
    monkeypatch.setattr(device_launch, "_launch_by_triton", launch)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(2))
def test_the_driver_launches_what_triton_has_compiled(
    triton_launches: list[object], number: int
) -> None:
    if number >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    rig = Rig(number)
    for _ in range(3):
        rig.taken.zero_()
        torch.cuda.synchronize(rig.device)
        rig.copy().synchronize()
        assert rig.is_copied()
    assert len(triton_launches) == 1


@pytest.mark.gpu
def test_the_driver_launches_digests(triton_launches: list[object]) -> None:
    pool = pool_of()
    (copied,) = copy_classes_of(CASE, pool, pool).values()
    wanted = wanted_of(CASE, copied.names, copied.sink)
    cells = cells_of(copied.source, wanted, [pool.ids.tolist()], 1, 9)
    digester = DeviceDigester([tensor.to("cuda:0") for tensor in pool.tensors])
    for _ in range(3):
        assert digester.digests([cells], 9) == host_digests(pool, cells, 9)
    assert len(triton_launches) == 1


@pytest.mark.gpu
def test_a_binary_that_is_not_plain_stays_with_triton(
    triton_launches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_launch, "_binary_of", lambda compiled: None)
    rig = Rig()
    for _ in range(3):
        rig.copy().synchronize()
    assert rig.is_copied()
    assert len(triton_launches) == 3


@pytest.mark.gpu
def test_events_wait_in_a_thread_that_has_no_context() -> None:
    rig = Rig()
    rig.copy().synchronize()
    with torch.cuda.stream(rig.stream):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # 0.1 s
    event = rig.copy()
    assert not event.query()
    found: list[bool] = []

    def wait(event: Any) -> None:
        event.synchronize()
        found.append(event.query())

    thread = threading.Thread(target=wait, args=(event,))
    thread.start()
    thread.join(120)
    assert found == [True]
    del event  # destroyed wherever the last reference goes


@pytest.mark.gpu
def test_a_launch_leaves_the_current_device_alone() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    rig = Rig(1)
    rig.copy().synchronize()
    assert torch.cuda.current_device() == 0
    rig.copy().synchronize()
    assert torch.cuda.current_device() == 0
    assert torch.zeros(1, device="cuda").device.index == 0


@pytest.mark.gpu
def test_what_follows_waits_for_an_event_of_pytorch() -> None:
    rig = Rig()
    rig.copy().synchronize()
    rig.taken.zero_()
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        rig.given.fill_(7)
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record()
    rig.copier.wait(rig.stream, written)
    rig.copy().synchronize()
    assert bool((rig.taken == 7).all())


@pytest.mark.gpu
def test_an_error_of_the_driver_is_raised_by_name() -> None:
    launcher = GpuLauncher(torch.device("cuda", 0))
    with pytest.raises(CudaError, match="cuDeviceGet: "):
        launcher._driver.call("cuDeviceGet", PointerArguments(1).set([0]), 4096)


@pytest.mark.gpu
def test_stamps_tell_how_long_the_gpu_took() -> None:
    rig = Rig()
    rig.copy()
    torch.cuda.synchronize()
    with torch.cuda.stream(rig.stream):
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        began_s = time.perf_counter()
        first = rig.copier.stamp(rig.stream)
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # cycles: 10 ms
        last = rig.copier.stamp(rig.stream)
    last.synchronize()
    took_s = time.perf_counter() - began_s
    assert 0.002 < last.since_s(first) <= took_s


def test_stamps_of_the_host_tell_how_long_it_took() -> None:
    copier = DeviceCopier(torch.device("cpu"))
    first = copier.stamp(None)
    time.sleep(0.002)
    last = copier.stamp(None)
    assert last.query()
    assert last.since_s(first) >= 0.002
