"""A packer of chunks whose GPU is stood in for, and a pair of ``zmq`` whose sides have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from kvxfer.config import Config
from kvxfer.tensors.device_copy import BoundSide, DeviceCopier, Launched
from kvxfer.tensors.device_launch import HostEvent
from kvxfer.tensors.strided_copy import gather, scatter
from kvxfer.transfer.plan import Base, Side
from kvxfer.transports.base import LocalMemory, Wake
from kvxfer.transports.copy_thread import Copier
from kvxfer.transports.stream_packing import DevicePacker
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource
from tests.transports.host_gpu import HostGpu
from tests.transports.pair import ZMQ, Pair, zmq_pipe
from tests.wires import use_sink, use_source


def host_packer(
    memory: LocalMemory,
    config: Config,
    copy_thread: Copier,
    wake: Wake,
    *,
    reaches_host: bool = False,
) -> DevicePacker:
    """Of a GPU that reaches ordinary memory of the host, or does not."""
    gpu = HostGpu(memory, reaches_host=reaches_host)
    return DevicePacker(memory, config, copy_thread, wake, gpu)


class HostCopier(DeviceCopier):
    """Copies at once: the interpreter takes 20 ms for what a kernel does in 2 us."""

    def __init__(self, memory: LocalMemory) -> None:
        super().__init__(torch.device("cpu"))
        self._tensors = memory.tensors

    def _side(self, bound: BoundSide) -> Side:
        bases = tuple(self._base(int(address)) for address in bound.addresses)
        return Side(group=0, tile=bound.tile, bases=bases)

    def _base(self, address: int) -> Base:
        for index, tensor in enumerate(self._tensors):
            offset = address - tensor.data_ptr()
            if 0 <= offset < tensor.numel():
                return Base(index, offset)
        raise AssertionError(f"no memory at {address:#x}")

    def pack(
        self,
        side: BoundSide,
        block_ids: Any,
        order: Any,
        tokens: tuple[int, int],
        *pieces: Any,
        **_: Any,
    ) -> Launched:
        for regions, dense in pieces:
            gather(self._tensors, self._side(side), block_ids, order, regions, tokens, dense)
        return Launched(HostEvent(), sum(dense.numel() for _, dense in pieces))

    def unpack(
        self, side: BoundSide, block_ids: Any, tokens: tuple[int, int], *pieces: Any, **_: Any
    ) -> Launched:
        for regions, dense in pieces:
            scatter(self._tensors, self._side(side), block_ids, regions, tokens, dense)
        return Launched(HostEvent(), sum(dense.numel() for _, dense in pieces))


def quick_packer(memory: LocalMemory, *arguments: Any, **options: Any) -> DevicePacker:
    """The same, without kernels."""
    packer = host_packer(memory, *arguments, **options)
    packer._copier = HostCopier(memory)
    return packer


@contextmanager
def packing_pair(
    packer: Any, monkeypatch: pytest.MonkeyPatch, config: Config = ZMQ
) -> Iterator[Pair]:
    """Both sides of ``zmq`` have such a packer."""
    use_source(monkeypatch, "zmq", partial(made_with, StreamSource, packer))
    use_sink(monkeypatch, "zmq", partial(made_with, StreamSink, packer))
    pair = Pair(config)
    pair.sink.attach(pair.manifest)
    yield pair
    pair.close()


def made_with(side: Any, packer: Any, *arguments: Any) -> Any:
    """A side of ``zmq``, with this packer."""
    return side(zmq_pipe, *arguments, packer(*arguments[:4]))
