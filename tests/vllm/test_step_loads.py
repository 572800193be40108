"""Loads that are part of a step, with vLLM's own scheduler: no token ever comes of KV that was not
proven, whoever could have seen it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.connector.board import BoardView
from kvxfer.transports import shm_direct
from tests.connector.rig import until
from tests.vllm.scheduler_rig import BLOCK, OFFERED, Status
from tests.vllm.step_rig import ComputingEngine, expected_tokens

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NUM_NEW = 4
MODES = [("fail", False), ("fail", True), ("recompute", False), ("recompute", True)]
CAN = [mode for mode in MODES if mode != ("recompute", True)]
"""Policies and kinds of scheduling of engines that have such loads; the other one falls back."""
Make = Callable[..., ComputingEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[ComputingEngine] = []

    def make_one(**settings: Any) -> ComputingEngine:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(ComputingEngine(folder, **settings))
        return made[-1]

    yield make_one
    for engine in made:
        engine.close()


class Pair:
    """A source and a sink that have met. ``tear``: what happens to the source's offers in the middle
    of the next copy.
    """

    def __init__(self, make: Make, patch: pytest.MonkeyPatch, mode: tuple[str, bool], **more: Any):
        policy, is_async = mode
        self.source = make(role="kv_producer")
        self.sink = make(
            role="kv_consumer", policy=policy, is_async=is_async, load_in_step_s=0.5, **more
        )
        self.board = BoardView.open(self.source.worker.get_handshake_metadata().manifest.board)
        self.tears_after: bool | None = None
        self.num_torn = 0
        self._copy = shm_direct.strided_copy
        patch.setattr(shm_direct, "strided_copy", self._torn_copy)
        self.load("first", prompt_of(random.Random(0)))
        self.sink.run_out()

    def _torn_copy(self, *args: Any, **named: Any) -> int:
        tears_after, self.tears_after = self.tears_after, None
        if tears_after is False:
            self._end_offers()
        nbytes = self._copy(*args, **named)
        if tears_after:
            self._end_offers()
        return nbytes

    def _end_offers(self) -> None:
        """The source's engine takes its blocks back, and others write to them at once."""
        self.num_torn += 1
        self.source.connector.reset_cache()
        self.source.run()
        self.source.ruin(range(1, self.source.shape.num_blocks))

    def params(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """Of an offer that stands on the board."""
        self.source.request(f"p{name}", tokens, OFFERED, max_tokens=1)
        self.source.run()
        params = self.source.params_of(f"p{name}")
        assert params is not None
        self.source.run()
        nonce = bytes.fromhex(params["kvxfer"]["nonce"])
        assert self.board is not None
        until(lambda: self.board.find(nonce))  # type: ignore[union-attr]
        return params

    def load(self, name: str, tokens: list[int]) -> Any:
        return self.sink.request(name, tokens, self.params(name, tokens), max_tokens=NUM_NEW)

    @property
    def num_in_step(self) -> float:
        return sum(self.sink.stats.get("requests_in_step", {}).values())

    def settle(self) -> None:
        """Both sides are at rest."""
        self.sink.run_out()
        while self.source.scheduler.has_requests():
            self.source.run()


def prompt_of(rng: random.Random) -> list[int]:
    return [rng.randrange(900) for _ in range(rng.randrange(18, 70))]


def assert_right(request: Any) -> None:
    want = expected_tokens(request.prompt_token_ids, request.max_tokens)
    assert list(request.output_token_ids) == want


def try_once(pair: Pair, rng: random.Random, name: str, policy: str) -> None:
    """One load beside requests for the same tokens that load nothing, and a load of other ones."""
    tokens = prompt_of(rng)
    is_torn = rng.random() < 0.8
    request = pair.load(name, tokens)
    is_torn_after = rng.random() < 0.5
    pair.tears_after = is_torn_after if is_torn else None
    shares = [*tokens[: rng.randrange(1, len(tokens) + 1)], *prompt_of(rng)[: rng.randrange(3)]]
    others = []
    for number in range(rng.randrange(3)):
        if rng.random() < 0.6:
            pair.sink.run()
        others.append(pair.sink.request(f"{name}o{number}", shares, max_tokens=NUM_NEW))
    pair.sink.run_out()
    if is_torn and policy == "fail":
        assert request.status == Status.FINISHED_ERROR
        assert not request.output_token_ids
    else:
        assert_right(request)
    for other in others:
        assert_right(other)
    later = pair.sink.request(f"{name}l", tokens, max_tokens=1)
    pair.settle()
    assert_right(later)
    assert pair.sink.is_quiet()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "num_tries", [25, pytest.param(1000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_token_comes_of_kv_that_is_not_proven(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: tuple[str, bool], num_tries: int
) -> None:
    """The offer ends before the copy or behind it, and the blocks are overwritten."""
    pair = Pair(make, monkeypatch, mode)
    rng = random.Random(num_tries)
    for number in range(num_tries):
        try_once(pair, rng, f"d{number}", mode[0])
    assert pair.num_torn > num_tries / 2
    assert pair.num_in_step == (num_tries if mode in CAN else 0)
