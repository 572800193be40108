"""What a thread that polls for itself is woken by."""

from __future__ import annotations

import contextlib
import socket as sockets


class WakeUp:
    """A descriptor that can be read after a wake."""

    def __init__(self) -> None:
        self._near, self._far = sockets.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def __call__(self) -> None:
        """From any thread."""
        # Full means that a byte lies there; closed means that nobody will read it
        with contextlib.suppress(BlockingIOError, OSError):
            self._far.send(b"\0")

    @property
    def fd(self) -> int:
        """Can be read after a wake, until it is cleared."""
        return self._near.fileno()

    def clear(self) -> None:
        """Before looking for what one was woken for."""
        with contextlib.suppress(BlockingIOError):
            self._near.recv(4096)

    def close(self) -> None:
        """Later wakes do nothing."""
        self._near.close()
        self._far.close()
