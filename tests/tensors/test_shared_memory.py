"""Shared pools: a mapping shows what the owner wrote, and every refusal has its reason."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from kvxfer.connector.board import Board
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.shared_memory import (
    HEADER_NBYTES,
    MAGIC,
    SharedPool,
    boot_id,
    open_shared,
    plain_info,
)
from kvxfer.transfer.manifest import MemfdHandle, MemoryInfo


def _handle(pool: SharedPool) -> MemfdHandle:
    assert isinstance(pool.info.handle, MemfdHandle)
    return pool.info.handle


@pytest.fixture
def pool() -> SharedPool:
    return SharedPool.create(10_000)


def test_is_zeroed_writable_and_of_its_size(pool: SharedPool) -> None:
    assert pool.tensor.dtype == torch.uint8
    assert pool.tensor.shape == (10_000,)
    assert not pool.tensor.any()
    pool.tensor[9_999] = 7
    assert pool.info.nbytes == 10_000
    assert pool.info.device == "cpu"
    assert _handle(pool).pid == os.getpid()
    assert _handle(pool).boot_id == boot_id()
    pool.close()


def test_mapping_sees_what_is_written_later_and_not_the_header(pool: SharedPool) -> None:
    pool.tensor.fill_(0xEE)
    mapped = open_shared(_handle(pool))
    assert mapped.tensor.shape == (10_000,)
    assert bytes(mapped.tensor.numpy()) == b"\xee" * 10_000
    pool.tensor[[0, 9_999]] = torch.tensor([1, 2], dtype=torch.uint8)
    assert mapped.tensor[[0, 9_999]].tolist() == [1, 2]
    mapped.close()
    pool.close()


def test_another_process_maps_it(pool: SharedPool) -> None:
    pool.tensor.copy_(torch.arange(10_000).to(torch.uint8))
    script = (
        "import sys, msgspec\n"
        "from kvxfer.tensors.shared_memory import open_shared\n"
        "from kvxfer.transfer.manifest import MemfdHandle\n"
        "handle = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=MemfdHandle)\n"
        "sys.stdout.buffer.write(bytes(open_shared(handle).tensor.numpy()))\n"
    )
    packed = msgspec.msgpack.encode(_handle(pool)).hex()
    command = [sys.executable, "-W", "error", "-c", script, packed]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert done.stdout == bytes(range(256)) * 39 + bytes(range(16))
    pool.close()


def test_writing_through_a_mapping_ends_the_writer(pool: SharedPool) -> None:
    script = (
        "import sys, msgspec\n"
        "from kvxfer.tensors.shared_memory import open_shared\n"
        "from kvxfer.transfer.manifest import MemfdHandle\n"
        "handle = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=MemfdHandle)\n"
        "open_shared(handle).tensor[0] = 1\n"
    )
    packed = msgspec.msgpack.encode(_handle(pool)).hex()
    done = subprocess.run([sys.executable, "-c", script, packed], timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert pool.tensor[0] == 0
    pool.close()


_WRITES = """
import mmap, os, sys
fd = os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDWR)
for number, write in enumerate((
    lambda: mmap.mmap(fd, 0),
    lambda: os.pwrite(fd, b"x", 5000),
    lambda: os.ftruncate(fd, 0),
)):
    try:
        write()
    except PermissionError:
        continue
    sys.exit(number + 1)
"""


def _who_writes(handle: MemfdHandle) -> int:
    """0 if another process of this user cannot write, else the number of the way that it took."""
    command = [sys.executable, "-c", _WRITES, str(handle.pid), str(handle.fd)]
    return subprocess.run(command, timeout=60, check=False).returncode


def test_no_other_process_writes_a_pool_or_a_board(pool: SharedPool) -> None:
    assert _who_writes(_handle(pool)) == 0
    board = Board.make()
    if board is not None:  # only some processors have one
        assert _who_writes(board.handle) == 0
        board.close()
    pool.tensor[5000] = 3  # its owner does
    mapped = open_shared(_handle(pool))
    assert mapped.tensor[5000] == 3
    mapped.close()
    pool.close()


def test_a_kernel_without_the_seal_against_writers_still_has_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = fcntl.fcntl

    def older(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_ADD_SEALS and argument & 0x10:
            raise OSError(errno.EINVAL, "no such seal")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", older)
    pool = SharedPool.create(10_000)
    pool.tensor[7] = 1
    mapped = open_shared(_handle(pool))
    assert mapped.tensor[7] == 1
    mapped.close()
    pool.close()


def test_mapping_outlives_its_owner_after_sigkill() -> None:
    script = (
        "import sys, time, msgspec\n"
        "from kvxfer.tensors.shared_memory import SharedPool\n"
        "pool = SharedPool.create(5000)\n"
        "pool.tensor.fill_(3)\n"
        "print(msgspec.msgpack.encode(pool.info).hex(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        packed = bytes.fromhex(owner.stdout.readline())
        info = msgspec.msgpack.decode(packed, type=MemoryInfo)
        assert isinstance(info.handle, MemfdHandle)
        mapped = open_shared(info.handle)
        owner.kill()
        owner.wait(120)
    assert bytes(mapped.tensor.numpy()) == b"\x03" * 5000
    mapped.close()
    with pytest.raises(TransportUnavailable, match="cannot be opened: no such process"):
        open_shared(info.handle)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"boot_id": "another"}, "expected a peer on this host"),
        ({"boot_id": ""}, "expected a peer on this host"),
        ({"pid": 2**22 + 5}, "cannot be opened: no such process or descriptor"),
        ({"fd": 9_999}, "cannot be opened: no such process or descriptor"),
        ({"nbytes": 9_999}, "expected 14095 bytes in /proc/"),
        ({"nonce": b"0123456789abcdef"}, "expected the pool's nonce"),
        ({"nonce": b""}, "expected the pool's nonce"),
    ],
)
def test_every_refusal_names_its_reason(
    pool: SharedPool, change: dict[str, object], sentence: str
) -> None:
    handle = msgspec.structs.replace(_handle(pool), **change)
    with pytest.raises(TransportUnavailable, match=f"^shm: .*{sentence}"):
        open_shared(handle)
    pool.close()


def test_other_files_are_not_opened(pool: SharedPool, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        handle = msgspec.structs.replace(_handle(pool), fd=file.fileno())
        with pytest.raises(TransportUnavailable, match="expected a pool behind .*, got .*/file"):
            open_shared(handle)
    pool.close()


@pytest.mark.parametrize("nbytes", [0, -4000, -HEADER_NBYTES])
def test_a_pool_of_nothing_is_not_mapped(pool: SharedPool, nbytes: int) -> None:
    """A peer may have such a file: of its header alone, or not even that."""
    nonce = b"0123456789abcdef"
    fd = os.memfd_create("kvxfer-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, (MAGIC + nonce)[: HEADER_NBYTES + nbytes])
    os.ftruncate(fd, HEADER_NBYTES + nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    handle = msgspec.structs.replace(_handle(pool), fd=fd, nbytes=nbytes, nonce=nonce)
    with pytest.raises(
        TransportUnavailable, match=f"^shm: expected .* 1 byte or more, got {nbytes}"
    ):
        open_shared(handle)
    os.close(fd)
    pool.close()


def test_a_file_that_could_shrink_is_refused(pool: SharedPool) -> None:
    fd = os.memfd_create("kvxfer-pool")
    os.ftruncate(fd, HEADER_NBYTES + 10_000)
    handle = msgspec.structs.replace(_handle(pool), fd=fd)
    with pytest.raises(TransportUnavailable, match="sealed against shrinking"):
        open_shared(handle)
    os.close(fd)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(_handle(pool).fd, 100)
    pool.close()


def test_close_gives_everything_back() -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    maps = _num_maps()
    pool = SharedPool.create(1 << 20)
    mapped = open_shared(_handle(pool))
    part = mapped.tensor[100:200]
    for _ in range(2):
        mapped.close()
        pool.close()
    assert part.sum() == 0  # a view keeps the mapping
    with pytest.raises(ValueError, match="expected an open one"):
        _ = pool.tensor
    with pytest.raises(ValueError, match="expected an open one"):
        _ = mapped.tensor
    del part
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= set(before)
    assert _num_maps() <= maps


def _num_maps() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("kvxfer-pool")


def test_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nbytes: expected more than 0, got 0"):
        SharedPool.create(0)


def test_plain_memory_has_no_handle() -> None:
    assert plain_info(torch.zeros(5, dtype=torch.uint8)) == MemoryInfo(device="cpu", nbytes=5)


def test_views_keep_a_closed_pool_alive() -> None:
    pool = SharedPool.create(mmap.PAGESIZE)
    view = pool.tensor[10:20]
    pool.close()
    view.fill_(9)
    assert np.array_equal(view.numpy(), np.full(10, 9))
