"""Pools that another process of this host can map and read: files behind ``/proc/PID/fd/N``.

A :class:`SharedPool` is a memfd: it has no name in any file system, so nothing is left behind after
a kill, and no container limit for ``/dev/shm`` applies. Its first page is a header with a random
nonce, by which :func:`open_shared` proves that it mapped the right file: a process id or a
descriptor may have been used again, or may belong to another container. The file is sealed against
shrinking, so a reader never takes SIGBUS for what the owner does, and against writers that come
after its owner: another process can map it to read only, and cannot write to its descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.manifest import MemfdHandle, MemoryHandle, MemoryInfo

HEADER_NBYTES = 4096
MAGIC = b"kvxfer pool v1\0\0"
NONCE_NBYTES = 16
_NAME = "kvxfer-pool"
_NOT_PERMITTED = "not permitted; it needs the same user and permission to trace the process"
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_F_SEAL_FUTURE_WRITE = 0x10
"""Of fcntl(2), since Linux 5.1: mappings that exist stay writable, and no new one is. The module
``fcntl`` of Python 3.11 does not have it."""
_log = logging.getLogger("kvxfer.tensors")


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Random, of this host's life; containers share it. Empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def check_same_host(transport: str, handle: MemoryHandle) -> None:
    """Memory of another host's life cannot be mapped. Raises TransportUnavailable."""
    here = boot_id()
    if not here or handle.boot_id != here:
        raise TransportUnavailable(
            f"{transport}: expected a peer on this host (boot {here or 'unknown'}), "
            f"got boot {handle.boot_id or 'unknown'}"
        )


class SharedPool:
    """Memory that this process writes and others can only read; made by :meth:`create`."""

    def __init__(self, fd: int, memory: mmap.mmap, nonce: bytes) -> None:
        self._fd: int | None = fd
        self._nbytes = len(memory) - HEADER_NBYTES
        # The tensor keeps the mapping alive, and views of the tensor keep the tensor's storage.
        self._tensor: Tensor | None = torch.frombuffer(
            memory, dtype=torch.uint8, offset=HEADER_NBYTES
        )
        self._info = MemoryInfo(
            device="cpu",
            nbytes=self._nbytes,
            handle=MemfdHandle(
                boot_id=boot_id(), pid=os.getpid(), fd=fd, nbytes=self._nbytes, nonce=nonce
            ),
        )

    @classmethod
    def create(cls, nbytes: int) -> SharedPool:
        """Zeroed. ValueError for a size that cannot be, OSError without memory."""
        if nbytes <= 0:
            raise ValueError(f"nbytes: expected more than 0, got {nbytes}")
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, HEADER_NBYTES + nbytes)
            memory = mmap.mmap(fd, HEADER_NBYTES + nbytes)  # the only one that may write
            _seal(fd)
            nonce = secrets.token_bytes(NONCE_NBYTES)
            memory[: len(MAGIC) + NONCE_NBYTES] = MAGIC + nonce
            return cls(fd, memory, nonce)
        except BaseException:
            os.close(fd)
            raise

    @property
    def tensor(self) -> Tensor:
        """Flat uint8, writable, without the header."""
        if self._tensor is None:
            raise ValueError("pool: expected an open one, got a closed one")
        return self._tensor

    @property
    def info(self) -> MemoryInfo:
        """What the manifest says of it."""
        return self._info

    def close(self) -> None:
        """Nobody maps it any more; the bytes live on while a tensor or a mapping needs them."""
        fd, self._fd, self._tensor = self._fd, None, None
        if fd is not None:
            os.close(fd)


class MappedPool:
    """Another process's, of :func:`open_shared`. Writing to its tensor is a SIGSEGV."""

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        self._tensor: Tensor | None = _readonly_tensor(memory, HEADER_NBYTES, nbytes)

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            raise ValueError("mapping: expected an open one, got a closed one")
        return self._tensor

    def close(self) -> None:
        """Drop the mapping: at once, or when the last view goes (a copy that still runs on it)."""
        self._tensor = None


def plain_info(tensor: Tensor) -> MemoryInfo:
    """What the manifest says of memory that nobody else can map."""
    return MemoryInfo(device=tensor.device.type, nbytes=tensor.numel(), handle=None)


@dataclass(frozen=True, slots=True)
class PlainPool:
    """Memory that a wire exports by itself, as on a GPU, or nobody else maps."""

    tensor: Tensor
    info: MemoryInfo

    def close(self) -> None:
        """Nothing: the tensor goes when nobody has it any more."""


def make_pool(
    device: torch.device | str, nbytes: int, *, is_shared: bool = True
) -> SharedPool | PlainPool:
    """Zeroed memory of that device; host memory that others can map, if ``is_shared``."""
    device = torch.device(device)
    if device.type == "cpu" and is_shared:
        return SharedPool.create(nbytes)
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return PlainPool(tensor, plain_info(tensor))


def open_shared(handle: MemfdHandle) -> MappedPool:
    """Map a peer's pool read-only and prove that it is the one the handle names.

    Raises TransportUnavailable with the reason: other host, process or descriptor gone, no
    permission, wrong file.
    """
    check_same_host("shm", handle)
    if handle.nbytes <= 0:
        raise TransportUnavailable(f"shm: expected a pool of 1 byte or more, got {handle.nbytes}")
    where = f"/proc/{handle.pid}/fd/{handle.fd}"
    fd = _open_memfd(where)
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransportUnavailable(f"shm: expected {where} sealed against shrinking, got none")
        found_nbytes = os.fstat(fd).st_size
        if found_nbytes != HEADER_NBYTES + handle.nbytes:
            raise TransportUnavailable(
                f"shm: expected {HEADER_NBYTES + handle.nbytes} bytes in {where}, "
                f"got {found_nbytes}"
            )
        try:
            memory = mmap.mmap(fd, found_nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as exc:
            raise TransportUnavailable(f"shm: {where} cannot be mapped: {exc.strerror}") from exc
    finally:
        os.close(fd)
    proof = MAGIC + handle.nonce
    if memory[: len(proof)] != proof or len(handle.nonce) != NONCE_NBYTES:
        memory.close()
        raise TransportUnavailable(
            f"shm: expected the pool's nonce in {where}, got another; "
            "the peer ended, or is in another process namespace"
        )
    return MappedPool(memory, handle.nbytes)


def _seal(fd: int) -> None:
    """For ever: of this size, and no writer but the mappings that exist."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        _log.debug("a shared pool stays open to writers of this user: no F_SEAL_FUTURE_WRITE here")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)


def _open_memfd(where: str) -> int:
    """A descriptor; looks at the link first, so that nothing else is ever opened."""
    try:
        target = os.readlink(where)
        if not target.startswith(f"/memfd:{_NAME}"):
            raise TransportUnavailable(f"shm: expected a pool behind {where}, got {target}")
        return os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        reasons = {
            errno.ENOENT: "no such process or descriptor (ended, or in another namespace)",
            errno.ESRCH: "the process ended",
            errno.EACCES: _NOT_PERMITTED,
            errno.EPERM: _NOT_PERMITTED,
        }
        reason = reasons.get(exc.errno or 0, exc.strerror)
        raise TransportUnavailable(f"shm: {where} cannot be opened: {reason}") from exc


def _readonly_tensor(memory: mmap.mmap, offset: int, nbytes: int) -> Tensor:
    """Torch warns about read-only buffers, so it is shown the address instead."""
    view = np.frombuffer(memory, dtype=np.uint8, count=nbytes, offset=offset)
    window = (ctypes.c_uint8 * nbytes).from_address(view.ctypes.data)
    # from_address owns nothing: the tensor keeps the window, the window keeps the view.
    window.owner = view  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=torch.uint8)
