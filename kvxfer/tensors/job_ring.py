"""Small arrays on their way to a GPU: written in pinned memory, copied, and not touched before the
work that reads them is over.
"""

from __future__ import annotations

from collections import deque
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
    """``host`` is written, and all of it copied to the GPU; where both are, as words, tensors and
    addresses.
    """

    at: int
    host: NDArray[np.int64]
    host_address: int
    device_address: int
    _ring: JobRing
    _num_used: int

    @property
    def pinned(self) -> Tensor:
        """What ``host`` is, as PyTorch sees it."""
        return self._ring.pinned[self.at : self.at + self.host.size]

    @property
    def device(self) -> Tensor:
        """Its twin on the GPU."""
        return self._ring.device[self.at : self.at + self.host.size]


@dataclass(frozen=True, slots=True)
class _Given:
    num_used: int
    event: Event


class JobRing:
    """A ring of int64 words in pinned memory and its twin on the GPU. For one thread.

    A slot is used again only after the event that was recorded behind its work. The host waits for
    one only where the whole ring is in use; ``num_waits`` counts that.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.num_words = nbytes // WORD_NBYTES
        self.num_waits = 0
        on_gpu = device.type == "cuda"
        self.pinned = torch.empty(self.num_words, dtype=torch.int64, pin_memory=on_gpu)
        self.device = torch.empty(self.num_words, dtype=torch.int64, device=device)
        self._host = self.pinned.numpy()
        self._addresses = self.pinned.data_ptr(), self.device.data_ptr()
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
            self._free_oldest()
        if not self._num_used:  # as good as new
            at, used = 0, num_words
        host_address, device_address = (each + at * WORD_NBYTES for each in self._addresses)
        words = self._host[at : at + num_words]
        return Slot(at, words, host_address, device_address, self, used)

    def has_room(self) -> bool:
        """Whether a slot of a quarter of the ring can be taken without waiting."""
        while self._num_used > self.num_words // 2 and self._in_use[0].event.query():
            self._free_oldest()
        return self._num_used <= self.num_words // 2

    def _free_oldest(self) -> None:
        self._num_used -= self._in_use.popleft().num_used

    def close(self, slot: Slot, event: Event) -> None:
        """All work with the slot is on a stream, and the event behind it."""
        self._in_use.append(_Given(slot._num_used, event))
        self._num_used += slot._num_used
        self._head = (slot.at + slot.host.size) % self.num_words
