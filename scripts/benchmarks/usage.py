"""What a process holds: memory, threads, descriptors."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass

_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Usage:
    """``rss_nbytes``: resident memory, all of it."""

    rss_nbytes: int
    num_threads: int
    num_descriptors: int


def usage_now() -> Usage:
    """Of this process, after everything that can be given back was."""
    gc.collect()
    if hasattr(_libc, "malloc_trim"):  # glibc keeps what was freed, more or less of it by chance
        _libc.malloc_trim(0)
    with open("/proc/self/statm", "rb") as file:
        num_resident = int(file.read().split()[1])
    return Usage(
        rss_nbytes=num_resident * os.sysconf("SC_PAGE_SIZE"),
        num_threads=len(os.listdir("/proc/self/task")),
        num_descriptors=len(os.listdir("/proc/self/fd")) - 1,  # one is the listing's
    )
