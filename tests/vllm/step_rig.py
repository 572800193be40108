"""Engines that compute, in a way that is as simple as it can be: vLLM's own scheduler, a real
worker side, and a model whose next token is a checksum of all KV before it.

A token that comes of a wrong byte of KV is a wrong token, so tokens prove what was read.
"""

from __future__ import annotations

import pickle
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvxfer.transfer.manifest import RankId
from tests.builders import build_regions
from tests.vllm.scheduler_rig import Engine

VOCAB = 997


def kv_of(token_id: int, position: int, plane: int, head: int) -> int:
    """The 8 bytes that a token leaves in one plane of one head."""
    return (token_id * 1_000_003 + position * 7_919 + plane * 104_729 + head * 31 + 1) % (1 << 61)


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What one engine alone answers."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        kv = [
            kv_of(token, position, plane, head)
            for position, token in enumerate(tokens)
            for plane in (0, 1)
            for head in (0, 1)
        ]
        tokens.append(zlib.crc32(np.array(kv, np.uint64).tobytes()) % VOCAB)
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Sequence:
    """What the runner knows of a request, as vLLM's does."""

    prompt: list[int]
    table: list[int]
    outputs: list[int] = field(default_factory=list)


class ComputingEngine(Engine):
    """Steps overlap with async scheduling, two deep, as in vLLM's EngineCore."""

    def __init__(self, *args: Any, is_async: bool = False, **settings: Any) -> None:
        self._depth = 2 if is_async else 1
        self._known: dict[str, _Sequence] = {}
        self.begun_at: dict[str, int] = {}
        """Where each request's first step began: what was computed or loaded before."""
        self._new_tokens: dict[str, list[int]] = {}
        self._to_come: deque[tuple[Any, dict[str, list[int]]]] = deque()
        self._in_flight: list[tuple[int, int, int]] = []
        super().__init__(*args, is_async=is_async, **settings)
        regions, _ = build_regions(self.shape, RankId(0, 0))
        tile = self.shape.num_blocks, self.shape.block_tokens, self.shape.num_kv_heads
        self._planes = [
            np.ndarray(
                tile,
                np.uint64,
                self.pool.tensor.numpy().data,
                region.offset,
                (region.stride_block, region.stride_token, region.stride_head),
            )
            for region in regions[:2]
        ]

    def run(self) -> None:  # type: ignore[override]  # the orders of a step are not of interest
        """One round of EngineCore's loop."""
        if self.scheduler.has_requests():
            self.schedule()
            self.launch()
        else:
            self.take_output()

    def launch(self) -> None:
        """What was scheduled; with as many steps in flight as can be, the output of the oldest."""
        reported = self._execute(self.in_flight[-1])
        tokens, self._new_tokens = self._new_tokens, {}
        self._to_come.append((reported, tokens))
        if len(self._to_come) == self._depth:
            self.take_output()

    def run_if_any(self) -> None:
        """A step, if something is to be done."""
        if self.scheduler.has_requests() or self._to_come:
            self.run()

    def preempt(self) -> None:
        """Every running request loses its blocks, and begins again."""
        while self._to_come:
            self.take_output()
        with suppress(RuntimeError):  # offers keep blocks: the cache does not become empty
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def blocks_of(self, name: str) -> list[int]:
        """The blocks that a request has, those of the first group."""
        blocks: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(name)
        return blocks[0]

    def has_kv(self, name: str, tokens: Sequence[int]) -> bool:
        """Whether a request's blocks hold what these tokens leave, from the first one on."""
        table = self.blocks_of(name)
        return all(
            plane[table[position // 16], position % 16, head]
            == kv_of(token, position, number, head)
            for position, token in enumerate(tokens)
            for number, plane in enumerate(self._planes)
            for head in range(2)
        )

    def take_output(self) -> None:
        """Of the oldest step that has none."""
        reported, self._new_tokens = self._to_come.popleft()
        if not self._to_come:
            self._in_flight = []
        self._update(None if reported.is_empty() else pickle.loads(pickle.dumps(reported)))
        self._new_tokens = {}

    def run_out(self) -> None:
        """Until nothing is left to do."""
        while self.scheduler.has_requests() or self._to_come:
            self.run()

    def ruin(self, block_ids: Sequence[int]) -> None:
        """Other requests write to these blocks."""
        for plane in self._planes:
            plane[list(block_ids)] = 0xBAD

    def _sampled(self, step: Any, name: str) -> list[int]:
        return self._new_tokens.get(name, [])

    def compute(self, step: Any) -> None:
        """What the step before writes is written once more: a GPU may run it as late as this."""
        for block, position, token_id in self._in_flight:
            self._put(block, position, token_id)
        self._in_flight = []
        starts = self._learn(step)
        for name, num_new in step.num_scheduled_tokens.items():
            known, start = self._known[name], starts[name]
            tokens = known.prompt + known.outputs
            for position in range(start, start + num_new):
                self._write(known.table, position, tokens[position])
        for name, num_new in step.num_scheduled_tokens.items():
            known = self._known[name]
            num_tokens = len(known.prompt) + len(known.outputs)
            if starts[name] + num_new == num_tokens:
                self._new_tokens[name] = [self._next(known.table, num_tokens)]
                known.outputs += self._new_tokens[name]

    def _learn(self, step: Any) -> dict[str, int]:
        """Where each request of the step begins."""
        for name in step.finished_req_ids:
            self._known.pop(name, None)
        starts: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            self._known[new.req_id] = _Sequence(list(new.prompt_token_ids), list(new.block_ids[0]))
            starts[new.req_id] = self.begun_at[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            known, ids = self._known[name], cached.new_block_ids[number]
            known.table = [
                *([] if name in cached.resumed_req_ids else known.table),
                *(ids[0] if ids is not None else ()),
            ]
            del known.outputs[cached.num_output_tokens[number] :]
            starts[name] = cached.num_computed_tokens[number]
        return starts

    def _write(self, table: list[int], position: int, token_id: int) -> None:
        block = table[position // 16]
        self._in_flight.append((block, position, token_id))
        self._put(block, position, token_id)

    def _put(self, block: int, position: int, token_id: int) -> None:
        slot = position % 16
        for number, plane in enumerate(self._planes):
            for head in range(2):
                plane[block, slot, head] = kv_of(token_id, position, number, head)

    def _next(self, table: list[int], num_tokens: int) -> int:
        both = np.stack([plane[table].reshape(-1, 2)[:num_tokens] for plane in self._planes], 1)
        return zlib.crc32(np.ascontiguousarray(both).tobytes()) % VOCAB
