"""What several test modules need: poisoned buffers, comparison in bytes, two processes, a port."""

from __future__ import annotations

import ctypes
import math
import multiprocessing as mp
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Literal

import pytest
import torch

POISON = 0xEE
needs_ucxx = pytest.mark.skipif(find_spec("ucxx") is None, reason="needs ucxx: install kvxfer[ucx]")
needs_nixl = pytest.mark.skipif(
    find_spec("nixl") is None, reason="needs NIXL: install kvxfer[nixl]"
)
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)
# A side that fails leaves the other one waiting for it; it gets this long to notice.
_GRACE_S = 10.0


class Opened:
    """What is open until it is closed, once or often."""

    def __init__(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


def _has_socket_filters() -> bool:
    """Whether the kernel takes a program of one instruction, which keeps all."""
    take_all = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0xFFFFFFFF))
    program = struct.pack("@HP", 1, ctypes.addressof(take_all))
    with socket.create_server(("127.0.0.1", 0)) as server, suppress(OSError):
        server.setsockopt(socket.SOL_SOCKET, 26, program)
        return True
    return False


needs_socket_filters = pytest.mark.skipif(
    not _has_socket_filters(), reason="needs a kernel with SO_ATTACH_FILTER"
)


def poisoned(
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.uint8,
) -> torch.Tensor:
    """A buffer of 0xEE bytes: a byte that was forgotten, or wrongly touched, is seen."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.full((nbytes,), POISON, dtype=torch.uint8, device=device)
    return raw.view(dtype).view(shape)


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal shape, dtype and bytes (so NaN equals NaN, and 0.0 differs from -0.0)."""
    assert got.shape == want.shape, f"shape: got {tuple(got.shape)}, want {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"dtype: got {got.dtype}, want {want.dtype}"
    got_bytes, want_bytes = _as_bytes(got), _as_bytes(want)
    bad = (got_bytes != want_bytes).nonzero().flatten()
    if bad.numel():
        first = int(bad[0])
        raise AssertionError(
            f"{bad.numel()} of {got_bytes.numel()} bytes differ; first at {first}: "
            f"got {int(got_bytes[first])}, want {int(want_bytes[first])}"
        )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def run_pair(
    prefill: Callable[[Connection], None],
    decode: Callable[[Connection], None],
    *,
    timeout_s: float = 240.0,
    exit_codes: tuple[int, int] = (0, 0),
    method: Literal["forkserver", "spawn"] = "forkserver",
) -> None:
    """Run the two sides in two processes, joined by a pipe.

    Each side is a function of a test module and gets its end of the pipe. Fails when an exit code
    is not the expected one (-9: killed), or a side still runs after ``timeout_s`` (shown as None).
    """
    ctx = _context(method)
    ends = ctx.Pipe()
    sides = [
        ctx.Process(target=side, args=(end,))
        for side, end in zip((prefill, decode), ends, strict=True)
    ]
    try:
        for side, end in zip(sides, ends, strict=True):
            side.start()
            end.close()  # so that a side sees the other one's end as the end of the pipe
        deadline = time.monotonic() + timeout_s
        while running := [side for side in sides if side.exitcode is None]:
            codes = zip(sides, exit_codes, strict=True)
            if any(side.exitcode not in (None, want) for side, want in codes):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not connection.wait([s.sentinel for s in running], left_s):
                break
            for side in running:
                side.join(0)
        got = tuple(side.exitcode for side in sides)
    finally:
        for side in sides:
            if side.pid is not None:
                side.kill()
                side.join()
                side.close()
    assert got == exit_codes, f"prefill, decode exit codes: {got}, expected {exit_codes}"


def _context(method: Literal["forkserver", "spawn"]) -> ForkServerContext | SpawnContext:
    if method == "spawn":
        return mp.get_context("spawn")
    ctx = mp.get_context("forkserver")
    ctx.set_forkserver_preload(["torch"])  # seconds for each process otherwise
    return ctx


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody used a moment ago.

    Below 32768, where Linux takes ports for outgoing connections from: an engine that starts takes
    seconds to bind, and one of those had it by then.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # not of random's state, which forks share
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def stop_process(pid: int) -> None:
    """Until every thread of it stands: on a busy machine some go on for a while."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    deadline_s = time.monotonic() + 120.0
    while any(") T " not in (each / "stat").read_text() for each in threads.iterdir()):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def group_members(group: int) -> dict[int, str]:
    """The processes of a process group that are not over: id and command."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found[int(folder.name)] = command
    return found


@contextmanager
def held_ports(number: int) -> Iterator[list[socket.socket]]:
    """So many ports in a row, each held by a socket; close one to use it."""
    with ExitStack() as stack:
        yield _hold(number, stack)


def _hold(number: int, stack: ExitStack) -> list[socket.socket]:
    first = 20_000 + secrets.randbelow(12_000 - number)
    held = [stack.enter_context(socket.socket()) for _ in range(number)]
    try:
        for port, sock in enumerate(held, start=first):
            sock.bind(("127.0.0.1", port))
            sock.listen()  # so that ZeroMQ, which sets SO_REUSEADDR, finds it taken too
    except OSError:  # somebody has one of them
        return _hold(number, stack)
    return held


@contextmanager
def process_of_another_user(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process of the user ``nobody`` that runs ``code``; killed in the end. It can import
    nothing by itself where Python lies in a folder of root's.
    """
    start = "import asyncio, os, socket, sys, time; os.setuid(65534)\n"
    command = [sys.executable, "-c", start + code, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()
