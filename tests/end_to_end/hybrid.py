"""Engines for models whose layers have windows or share KV, and what must hold for every request:
the single engine's tokens, and the source's KV.

The built-in models have a window of 48 tokens in every other layer and two more layers, with KV of
their own, that see everything.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.digest import KVDigest, compare
from kvxfer.engine.engine import Result
from tests.end_to_end.harness import OFFER, LiveEngine, Pair, engine_config

REQUEST_TIMEOUT_S = 120.0
NUM_BLOCKS = 180
_PATIENT: dict[str, Any] = {"log_level": "ERROR", "connect_timeout_s": 60.0}
"""The machine is shared: a peer and its wires were not ready within 7 s once in 8,000 tests."""
HEAD_NBYTES = 2 * 64 * 4  # K and V of one token and one head in one layer, 64 floats of 4 bytes


@dataclass(frozen=True, slots=True)
class Side:
    """How one engine of a pair is set up. ``devices``: its ranks' GPUs; none: it is on the CPU."""

    tp_size: int
    block_size: int
    layout: str
    devices: tuple[int, ...] = ()

    @property
    def device(self) -> str:
        """The kind of device, as in the engine's settings."""
        return "cuda" if self.devices else "cpu"


@dataclass(frozen=True, slots=True)
class Shape:
    """A pair of engines, its model and its wire."""

    model: str | None
    prefill: Side
    decode: Side
    transport: str = "shm"
    kv_heads: int = 8

    def __str__(self) -> str:
        sides = "-".join(
            f"{name}{side.tp_size}.{side.block_size}.{side.layout}"
            + (f"@{'+'.join(map(str, side.devices))}" if side.devices else "")
            for name, side in (("p", self.prefill), ("d", self.decode))
        )
        return f"{self.model}-{sides}-h{self.kv_heads}-{self.transport}"

    @property
    def blocks(self) -> tuple[int, int]:
        """Tokens of a block at the source and at the sink."""
        return self.prefill.block_size, self.decode.block_size

    @property
    def token_nbytes(self) -> int:
        """Of one layer; a head that several ranks of the decode side have moves to each of them."""
        return max(self.kv_heads, self.decode.tp_size) * HEAD_NBYTES


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt through both engines."""

    prefill: Result
    decode: Result

    @property
    def hits(self) -> tuple[int, int]:
        """Tokens that were found by prefix, on either side."""
        return self.prefill.done.num_cached_tokens, self.decode.done.num_cached_tokens

    @property
    def incomplete(self) -> set[int]:
        """Positions of the blocks that the load could fill only in part, of all ranks."""
        places = {place for load in self.decode.done.loads for place in load.incomplete_blocks}
        return {position for _, position in places}

    @property
    def window_starts(self) -> tuple[set[int], set[int]]:
        """The first digested tokens of the layers, on either side."""
        return first_tokens(self.prefill.done.digests), first_tokens(self.decode.done.digests)


class Fleet:
    """Engines by role and devices of their ranks, started when first needed and then given new
    lives. A context manager.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._engines: dict[tuple[Role, tuple[str, ...], str], LiveEngine] = {}
        self._single: dict[tuple[object, ...], tuple[int, ...]] = {}

    def pair(
        self,
        shape: Shape,
        *,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        prefill_kv: dict[str, Any] | None = None,
        decode_kv: dict[str, Any] | None = None,
        prefill_faults: str = "",
        decode_faults: str = "",
    ) -> Pair:
        """Both engines, in a life that nothing has happened in yet."""
        return Pair(
            self.engine(
                *(Role.PREFILL, shape, shape.prefill),
                kv=prefill_kv,
                more=prefill,
                faults=prefill_faults,
            ),
            self.engine(
                *(Role.DECODE, shape, shape.decode), kv=decode_kv, more=decode, faults=decode_faults
            ),
        )

    def engine(
        self,
        role: Role,
        shape: Shape,
        side: Side,
        *,
        kv: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
        faults: str = "",
    ) -> LiveEngine:
        """One engine, in a new life. ``kv`` and ``more``: settings beside those of the shape;
        ``faults``: of its wires, which takes processes of its own.
        """
        config = engine_config(
            role,
            shape.model,
            num_kv_heads=shape.kv_heads,
            kv=_PATIENT | {"transport": shape.transport, **(kv or {})},
            tp_size=side.tp_size,
            block_size=side.block_size,
            layout=side.layout,
            device=side.device,
            devices=side.devices,
            digests=True,
            **{"num_blocks": NUM_BLOCKS, **(more or {})},
        )
        return self._at_work(config, faults=faults)

    def single(self, shape: Shape, tokens: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
        """What one engine says, with nothing cached, a window's blocks never shared."""
        # One GPU will do for all of them.
        device = "cuda:0" if shape.prefill.devices else "cpu"
        key = (shape.model, shape.kv_heads, device, tokens, max_new_tokens)
        if key not in self._single:
            engine = self._at_work(
                engine_config(
                    Role.ALONE,
                    shape.model,
                    num_kv_heads=shape.kv_heads,
                    kv=_PATIENT,
                    device=device,
                    enable_prefix_caching=False,
                    disable_hybrid_kv_cache_manager=shape.model != "states",
                ),
                is_fresh=False,
            )
            result = engine.generate(tokens, max_new_tokens, None, REQUEST_TIMEOUT_S)
            self._single[key] = result.token_ids
        return self._single[key]

    def _at_work(
        self, config: EngineConfig, *, is_fresh: bool = True, faults: str = ""
    ) -> LiveEngine:
        key = (config.role, config.rank_devices, faults)
        engine = self._engines.get(key)
        if engine is None:
            engine = self._engines[key] = LiveEngine(config, faults)
            self._stack.callback(engine.close)
        elif is_fresh or engine.config != config:
            engine.reconfigure(config)
        return engine

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Bench:
    """A running pair, and what one engine says to the same."""

    fleet: Fleet
    shape: Shape
    pair: Pair

    def prefill(self, tokens: tuple[int, ...], max_new_tokens: int = 1) -> Result:
        """Prefill a prompt and keep its KV; the tokens must be the single engine's."""
        ((_, result),) = self.prefill_all([tokens], max_new_tokens)
        return result

    def prefill_all(
        self, prompts: list[tuple[int, ...]], max_new_tokens: int = 1
    ) -> list[tuple[tuple[int, ...], Result]]:
        """All at once. What a prefill of states answers is that of a prompt without its last token,
        of which nothing is offered where there is one.
        """
        cut = -1 if self.shape.model == "states" else None
        engine = self.pair.prefill
        ids = [engine.submit(tokens, max_new_tokens, OFFER) for tokens in prompts]
        results = [engine.result(request_id, REQUEST_TIMEOUT_S) for request_id in ids]
        for tokens, result in zip(prompts, results, strict=True):
            asked = tokens[:cut] or tokens
            assert result.token_ids == self.fleet.single(self.shape, asked, max_new_tokens)
        return list(zip(prompts, results, strict=True))

    def decode_all(
        self, prefilled: list[tuple[tuple[int, ...], Result]], max_new_tokens: int = 8
    ) -> list[Answer]:
        """All at once; the tokens must be the single engine's, and KV that moved the source's."""
        engine = self.pair.decode
        ids = [
            engine.submit(tokens, max_new_tokens, source.kv_transfer_params)
            for tokens, source in prefilled
        ]
        answers = []
        for request_id, (tokens, source) in zip(ids, prefilled, strict=True):
            result = engine.result(request_id, REQUEST_TIMEOUT_S)
            assert result.done.failure is None
            assert result.token_ids == self.fleet.single(self.shape, tokens, max_new_tokens)
            if result.done.num_external_tokens:
                assert result.done.num_external_tokens == len(tokens) - 1 - (
                    result.done.num_cached_tokens
                )
                assert kv_differences(source, result) == []
            answers.append(Answer(source, result))
        return answers

    def run(self, tokens: tuple[int, ...], max_new_tokens: int = 8) -> Answer:
        """One prompt through both."""
        (answer,) = self.decode_all(self.prefill_all([tokens]), max_new_tokens)
        return answer

    def plain(self, engine: LiveEngine, tokens: tuple[int, ...], max_new_tokens: int = 8) -> Result:
        """One prompt on one side of the pair, which has nothing to load; the tokens must be the
        single engine's.
        """
        result = engine.generate(tokens, max_new_tokens, None, REQUEST_TIMEOUT_S)
        assert result.token_ids == self.fleet.single(self.shape, tokens, max_new_tokens)
        return result

    def check_all_free(self) -> None:
        """Every block of both sides, the null block apart, comes back."""
        for engine in (self.pair.prefill, self.pair.decode):
            engine.wait_for_info(
                lambda info: info.num_free_blocks == info.num_blocks - 1, timeout_s=28
            )


def kv_differences(source: Result, sink: Result) -> list[str]:
    """Of the tokens that were to move, in whatever both sides hold. What the sink had found by
    prefix may be its own computation, one token at a time: equal, but not in every bit.
    """
    num_tokens = sink.done.digests[0].num_tokens
    both = [
        [
            KVDigest(
                num_tokens=num_tokens,
                planes=tuple(
                    plane.between(sink.done.num_cached_tokens, num_tokens)
                    for plane in digest.planes
                ),
            )
            for digest in side.done.digests
        ]
        for side in (source, sink)
    ]
    return [str(difference) for difference in compare(*both)]


def first_tokens(digests: tuple[KVDigest, ...]) -> set[int]:
    """Where the digested tokens of the planes begin."""
    return {plane.first_token for digest in digests for plane in digest.planes}
