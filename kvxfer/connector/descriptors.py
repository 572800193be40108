"""Room for file descriptors, made before anybody waits for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

NUM_DESCRIPTORS = 4096
"""A source rank takes about 15; the table takes 32 KiB."""


def make_room() -> None:
    """Let the process have NUM_DESCRIPTORS, or as many as its limit allows, without a pause.

    Where threads share its table, Linux grows it only when every processor has seen the old one go
    (``synchronize_rcu``): 9 to 16 ms at each of 64, 256, 512 and 1024 descriptors. An engine with a
    GPU has more than 200, so that the first contact with a peer met one of these. A table never
    shrinks.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = NUM_DESCRIPTORS - 1 if most < 0 else min(NUM_DESCRIPTORS, most) - 1
    with contextlib.suppress(OSError):  # no descriptor is left: others will say so
        known = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.close(fcntl.fcntl(known, fcntl.F_DUPFD_CLOEXEC, last))
        finally:
            os.close(known)
