"""Networks of their own for the processes of a storm."""

from __future__ import annotations

import ctypes
import os

_CLONE_FS = 0x200


def enter_network(pid: int) -> None:
    """The network of that process: for this thread, and those that it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_FS):  # else a process of several threads may not have another /sys
        raise OSError(ctypes.get_errno(), "unshare")
    for kind in ("net", "mnt"):
        fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"setns: {kind}")
        os.close(fd)
