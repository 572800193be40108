"""One vLLM engine of the comparison on GPUs, in a process of its own: what the test suite's engine
worker does, and what only this comparison asks for: seeded weights, pools in any order, the times
that the connector's calls take, and a checksum of a request's KV.

Started by :mod:`scripts.benchmarks.vllm_pairs` with a connected socket and its settings as JSON.
"""

# ruff: noqa: ANN401  # vLLM's objects: it has no types where it is not installed
from __future__ import annotations

import copy
import json
import random
import socket
import sys
import time
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tests.vllm.engine_worker import Worker

QKV_STD = 0.03
"""Of the projections to Q, K and V: with heads of 128 channels the scores of a random prompt then
have a deviation of about 3.7, so that a token looks at a few others and not at the mean of all.
"""
OTHER_STD = 0.02
CHUNK_TOKENS = 4096
_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class MeasuredWorker(Worker):
    """See the module. Its engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)."""

    def __init__(self, sock: socket.socket, engine_args: dict[str, Any]) -> None:
        super().__init__(sock, engine_args, idle_step_s=0.0)
        self._times = ConnectorTimes()
        self._block_ids: dict[str, list[int]] = {}
        self._checked: dict[str, int] = {}
        self._checksums: dict[str, str] = {}
        self._watch()

    def _watch(self) -> None:
        """Wrap the connector's calls: the worker's for their times, the scheduler's for the blocks
        of requests that end.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if has_kv_transfer_group():
            self._times.watch(get_kv_transfer_group())
        connector = self._scheduler().connector
        for name in ("request_finished", "request_finished_all_groups"):
            finished = getattr(connector, name, None)
            if finished is not None:
                setattr(connector, name, self._seeing(finished))

    def _seeing(self, finished: Any) -> Any:
        def call(request: Any, block_ids: Any) -> Any:
            outer = getattr(request, "external_req_id", None) or request.request_id
            for name in (outer, outer.rsplit("-", 1)[0]):
                if name in self._checked:
                    ids = block_ids if isinstance(block_ids[0], int) else block_ids[0]
                    self._checksums[name] = self._checksum(ids, self._checked.pop(name))
                    break
            return finished(request, block_ids)

        return call

    # -------------------------------------------------- weights

    def do_seed_weights(self) -> int:
        """Give every parameter values that follow from its name alone; returns how many there are.

        vLLM's dummy weights are all of one tiny size: whatever the KV, such a model soon repeats
        one token.
        """
        num_parameters = 0
        for name, parameter in self._model().named_parameters():
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            with torch.inference_mode():
                if "norm" in name:
                    parameter.data.fill_(1)
                else:
                    std = 1.0 if "embed" in name else QKV_STD if "qkv" in name else OTHER_STD
                    parameter.data.normal_(0, std, generator=generator)
            num_parameters += parameter.numel()
        return num_parameters

    # -------------------------------------------------- blocks

    def do_order_blocks(self, seed: int | None) -> None:
        """Put the free blocks in the order of their ids, or in a random one; forgets the cached."""
        if not self.do_reset_prefix_cache():
            raise RuntimeError(f"blocks are in use: {self.do_blocks()}")
        queue = self._scheduler().kv_cache_manager.block_pool.free_block_queue
        blocks = queue.popleft_n(queue.num_free_blocks)
        blocks.sort(key=lambda block: block.block_id)
        if seed is not None:
            random.Random(seed).shuffle(blocks)
        queue.append_n(blocks)

    def do_check(self, request_id: str, num_tokens: int) -> None:
        """Take a checksum of the first tokens' KV when this request ends."""
        self._checked[request_id] = num_tokens

    def do_checksum(self, request_id: str) -> str:
        """What it was."""
        return self._checksums.pop(request_id)

    def _checksum(self, block_ids: Iterable[int], num_tokens: int) -> str:
        """Of K and V of all layers by layer, token, head and channel: where they lie is no part of
        it, and two that are swapped make another one.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        total = 0
        num_blocks = self._scheduler().kv_cache_manager.block_pool.num_gpu_blocks
        for layer, view in enumerate(self._views()):
            ratio, block_tokens = view.shape[0] // num_blocks, view.shape[2]
            blocks = torch.as_tensor(list(block_ids), device=view.device)
            ids = (blocks[:, None] * ratio + torch.arange(ratio, device=view.device)).flatten()
            step = CHUNK_TOKENS // block_tokens
            for chunk in range(0, -(-num_tokens // block_tokens), step):
                cells = view[ids[chunk : chunk + step]].transpose(1, 2).flatten(0, 1).flatten(1)
                first = chunk * block_tokens
                total += _weighed(cells[: num_tokens - first], layer, first)
        return f"{total % 2**64:016x}"

    def _views(self) -> list[Tensor]:
        return list(self._runner().kv_caches)

    def do_layout(self) -> dict[str, Any]:
        """Of the first layer's view, and of how the engine runs."""
        (view, *_) = self._views()
        config = self._engine.vllm_config
        return {
            "shape": list(view.shape),
            "stride": list(view.stride()),
            "dtype": str(view.dtype),
            "device": str(view.device),
            "num_layers": len(self._views()),
            "num_storages": len({v.untyped_storage().data_ptr() for v in self._views()}),
            "block_tokens": config.cache_config.block_size,
            "is_async": bool(config.scheduler_config.async_scheduling),
            "runner": type(self._runner()).__module__,
        }

    # -------------------------------------------------- times

    def do_take_times(self) -> dict[str, Any]:
        """Of loads since the last call: see :class:`ConnectorTimes`."""
        return self._times.take()

    def _runner(self) -> Any:
        if self._core is None:
            raise RuntimeError("expected an engine in this process")
        worker = self._core.model_executor.driver_worker
        return getattr(worker, "worker", worker).model_runner

    def _model(self) -> Any:
        return self._runner().model


def _weighed(cells: Tensor, layer: int, first_token: int) -> int:
    """A sum in which every element's place counts; ``cells`` [tokens, heads and channels]."""
    integers = {2: torch.int16, 4: torch.int32}[cells.element_size()]
    values = cells.contiguous().view(integers).to(torch.int64)
    tokens = torch.arange(values.shape[0], device=cells.device)[:, None] + first_token
    places = torch.arange(values.shape[1], device=cells.device)
    weights = tokens * _PRIMES[0] + places * _PRIMES[1] + (layer + 1) * _PRIMES[2]
    weights ^= weights >> 15
    return int((values * (weights * 2 + 1)).sum())


class ConnectorTimes:
    """How long loads take as the engine sees it, the same for every connector: from the call that
    hands one over (``start_load_kv``) to the return of the call that reports it; beside it what the
    connector counts itself.
    """

    def __init__(self) -> None:
        self._handed_s: dict[str, float] = {}
        self._loads_s: list[float] = []
        self._stats: list[dict[str, Any]] = []

    def watch(self, connector: Any) -> None:
        bind, stats = connector.bind_connector_metadata, connector.get_kv_connector_stats
        start, ordered = connector.start_load_kv, list[str]()

        def bind_connector_metadata(metadata: Any) -> Any:
            ordered[:] = _ordered(metadata)  # not every connector keeps it where others could look
            return bind(metadata)

        def start_load_kv(*args: Any, **kwargs: Any) -> Any:
            now_s = time.perf_counter()
            self._handed_s.update((request_id, now_s) for request_id in ordered)
            ordered.clear()
            return start(*args, **kwargs)

        def get_kv_connector_stats() -> Any:
            found = stats()
            if found is not None and found.data:
                self._stats.append(copy.deepcopy(found.data))
            return found

        connector.bind_connector_metadata = bind_connector_metadata
        connector.start_load_kv = start_load_kv
        connector.get_kv_connector_stats = get_kv_connector_stats
        for name in ("get_transfer_results", "get_finished"):
            if hasattr(connector, name):
                setattr(connector, name, self._reporting(getattr(connector, name)))

    def _reporting(self, report: Any) -> Any:
        def call(finished_req_ids: Any) -> Any:
            found = report(finished_req_ids)
            received = found[1] if isinstance(found, tuple) else found.finished_recving
            now_s = time.perf_counter()
            for request_id in received or ():
                if request_id in self._handed_s:
                    self._loads_s.append(now_s - self._handed_s.pop(request_id))
            return found

        return call

    def take(self) -> dict[str, Any]:
        """``loads_s`` in the order of their ends; ``stats``: the connector's, of each step."""
        found = {"loads_s": self._loads_s, "stats": self._stats}
        self._loads_s, self._stats = [], []
        return found


def _ordered(metadata: Any) -> list[str]:
    """The requests whose loads a step begins: of kvxfer's metadata, or of NixlConnector's."""
    orders = getattr(metadata, "orders", None)
    if orders is not None:
        return [load.request_id for load in orders.loads]
    return list(getattr(metadata, "reqs_to_recv", None) or ())


def main() -> None:
    """``fd settings``: serve until the socket closes."""
    settings = json.loads(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        worker = MeasuredWorker(sock, settings)
        try:
            worker.run()
        finally:
            worker.shutdown()


if __name__ == "__main__":
    main()
