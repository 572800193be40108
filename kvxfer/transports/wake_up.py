"""What a thread that polls for itself is woken by."""

from __future__ import annotations

import os

_ONCE = (1).to_bytes(8, "little")  # eventfd(2): eight bytes, added to a counter


class WakeUp:
    """A descriptor that can be read after a wake."""

    def __init__(self) -> None:
        # A file, which knows that it is closed: its number may be another one's by then
        number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._file = open(number, "r+b", buffering=0)  # noqa: SIM115  # until ``close``
        self.fd = number
        """Can be read after a wake, until it is cleared."""

    def __call__(self) -> None:
        """From any thread."""
        try:
            self._file.write(_ONCE)
        except ValueError:  # closed: nobody will look
            return

    def clear(self) -> None:
        """Before looking for what one was woken for."""
        self._file.read(8)

    def close(self) -> None:
        """Later wakes do nothing."""
        self._file.close()
