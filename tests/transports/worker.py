"""What a worker has, of which wires are made."""

from __future__ import annotations

import torch
import zmq

from kvxfer.config import Config
from kvxfer.tensors.shared_memory import SharedPool, plain_info
from kvxfer.testing.peers import Context
from kvxfer.transports.base import LocalMemory, SinkTransport, SourceTransport
from kvxfer.transports.copy_thread import CopyThread
from kvxfer.transports.registry import make_sinks, make_sources


class Worker:
    def __init__(self) -> None:
        self.copy_thread = CopyThread()
        self.context: Context = zmq.Context()
        self.pool = SharedPool.create(4096)
        self.shared = LocalMemory((self.pool.tensor,), (self.pool.info,))
        plain = torch.zeros(4096, dtype=torch.uint8)
        self.plain = LocalMemory((plain,), (plain_info(plain),))

    def sources(self, memory: LocalMemory, config: Config) -> dict[str, SourceTransport]:
        return make_sources(memory, config, self.copy_thread, lambda: None, self.context)

    def sinks(self, memory: LocalMemory, config: Config) -> dict[str, SinkTransport]:
        return make_sinks(memory, config, self.copy_thread, lambda: None, self.context)

    def close(self) -> None:
        self.copy_thread.close()
        self.context.term()
        self.pool.close()
