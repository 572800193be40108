"""Small arrays on their way to a GPU: written in pinned memory, copied, and not touched before the
work that reads them is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD_NBYTES = 8


class Event(Protocol):
    """Of ``torch.cuda.Event`` what is used here and by those who wait for a copy."""

    def query(self) -> bool:
        """Is all over that was on the stream before?"""

    def synchronize(self) -> None:
        """Wait until it is."""


class HostEvent:
    """Of work that the host itself has done."""

    def query(self) -> bool:
        """Always over."""
        return True

    def synchronize(self) -> None:
        """Never waits."""


@dataclass(frozen=True, slots=True)
class Slot:
    """``host`` is written, then :meth:`send` copies all of it to ``device``, without waiting."""

    at: int
    host: NDArray[np.int64]
    device: Tensor
    _pinned: Tensor
    _num_used: int

    def send(self) -> None:
        """On the current stream."""
        self.device.copy_(self._pinned, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Given:
    num_used: int
    event: Event


class JobRing:
    """A ring of int64 words in pinned memory and its twin on the GPU. For one thread.

    A slot is used again only after the event that was recorded behind its work. The host waits for
    one only where the whole ring is in use; ``num_waits`` counts that.
    """

    def __init__(self, nbytes: int, device: torch.device, record: Callable[[], Event]) -> None:
        """``record``: make an event and record it on the current stream."""
        self.num_words = nbytes // WORD_NBYTES
        self.num_waits = 0
        on_gpu = device.type == "cuda"
        self._pinned = torch.empty(self.num_words, dtype=torch.int64, pin_memory=on_gpu)
        self._host = self._pinned.numpy()
        self._device = torch.empty(self.num_words, dtype=torch.int64, device=device)
        self._record = record
        self._in_use: deque[_Given] = deque()
        self._head = 0
        self._num_used = 0

    def take(self, num_words: int) -> Slot:
        """A slot of so many words; :meth:`close` it before the next is taken.

        Raises ValueError for more words than the ring has.
        """
        if not 0 < num_words <= self.num_words:
            raise ValueError(f"slot: expected 1 to {self.num_words} words, got {num_words}")
        left = self.num_words - self._head
        # The words at the ring's end are used up, too, where they are too few
        at, used = (self._head, num_words) if num_words <= left else (0, left + num_words)
        while self._num_used and self._num_used + used > self.num_words:
            oldest = self._in_use[0]
            if not oldest.event.query():
                self.num_waits += 1
                oldest.event.synchronize()
            self._in_use.popleft()
            self._num_used -= oldest.num_used
        if not self._num_used:  # as good as new
            at, used = 0, num_words
        where = slice(at, at + num_words)
        return Slot(at, self._host[where], self._device[where], self._pinned[where], used)

    def close(self, slot: Slot) -> Event:
        """All work with the slot is on the current stream: returns the event behind it."""
        event = self._record()
        self._in_use.append(_Given(slot._num_used, event))
        self._num_used += slot._num_used
        self._head = (slot.at + slot.host.size) % self.num_words
        return event
