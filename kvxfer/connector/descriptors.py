"""Grow the table of file descriptors before a first contact would have to wait for that."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

NUM_DESCRIPTORS = 4096
"""A source rank takes about 15; the table takes 32 KiB."""


MOST_DESCRIPTORS = 65536
"""What the process's soft limit is raised to, where its hard limit allows: the usual soft limit is
1024, which is for programs that call select().
"""


def make_room() -> None:
    """Raise the soft limit, and let the process have NUM_DESCRIPTORS, or as many as its limit
    allows, without a pause.

    Where threads share its table, Linux grows it only when every processor has seen the old one go
    (``synchronize_rcu``): 9 to 16 ms at each of 64, 256, 512 and 1024 descriptors. An engine with a
    GPU has more than 200, so its first contact with a peer met one of these pauses. A table never
    shrinks.
    """
    last = min(NUM_DESCRIPTORS, _raise_limit()) - 1
    with contextlib.suppress(OSError):  # no descriptor is left: the next call that needs one raises
        known = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.close(fcntl.fcntl(known, fcntl.F_DUPFD_CLOEXEC, last))
        finally:
            os.close(known)


def _raise_limit() -> int:
    """Raise the soft limit; return how many descriptors the process may have now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
