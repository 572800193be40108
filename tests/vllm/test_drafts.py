"""Drafts that keep KV, on real engines: EAGLE heads, modules for multi-token prediction and draft
models. Their KV moves with the model's, so as many of their tokens are accepted as in one engine
that has computed the prompt itself. The drafts here say nearly what their model says, as long as
they see the prompt: tests.vllm.models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.vllm import models
from tests.vllm.cases import (
    PROMPT_TOKENS,
    Pair,
    Sources,
    Tokens,
    concurrent_prompts,
    prompt,
    token_ids,
)
from tests.vllm.engines import Connector, Engine, EngineConfig, Fleet

NEW_TOKENS = 32
COUNTER = "vllm:spec_decode_num_"
CHUNKS = {"max_num_batched_tokens": 128}
WHOLE = {"max_num_batched_tokens": 4096}
"""Of all that are prefilled in one step."""


def eagle(name: str = "eagle", **fields: Any) -> dict[str, Any]:
    return speculative("eagle", model=str(models.make(name)), **fields)


def speculative(method: str, num_tokens: int = 3, **fields: Any) -> dict[str, Any]:
    config = {"method": method, "num_speculative_tokens": num_tokens, **fields}
    return {"speculative_config": config}


def side(draft: dict[str, Any], model: str = "drafted", **fields: Any) -> EngineConfig:
    more = draft | fields.pop("more", {})
    return EngineConfig(Connector(policy="fail"), model=model, more=more, **fields)


@dataclass(frozen=True, slots=True)
class Guessed:
    """What an engine's draft has proposed, and what of it was accepted, by position."""

    num_drafts: int
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, engine: Engine) -> Guessed:
        metrics = engine.metrics()
        by_position = f"{COUNTER}accepted_tokens_per_pos_total"
        return cls(
            int(metrics.get(f"{COUNTER}drafts_total", 0)),
            tuple(int(metrics.get(f"{by_position}{{position={at}}}", 0)) for at in range(3)),
        )

    def __sub__(self, other: Guessed) -> Guessed:
        return Guessed(
            self.num_drafts - other.num_drafts,
            tuple(
                ours - theirs for ours, theirs in zip(self.accepted, other.accepted, strict=True)
            ),
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens of a step, the model's own included."""
        return 1 + sum(self.accepted) / self.num_drafts


@dataclass(frozen=True, slots=True)
class Drafting:
    """Two engines, and one that does all by itself."""

    pair: Pair
    alone: Engine

    def expected(self, prompts: list[Tokens]) -> tuple[list[list[int]], Guessed]:
        """One after the other: which drafts are made does not depend on other requests then."""
        before = Guessed.of(self.alone)
        answers = [self.alone.generate(each, NEW_TOKENS) for each in prompts]
        return token_ids(answers), Guessed.of(self.alone) - before

    def moved(
        self, prompts: list[Tokens], *, at_once: bool = False
    ) -> tuple[list[list[int]], Guessed]:
        """vLLM pads the first step of a request that has one token to compute, and counts that as
        a draft of which nothing is accepted.
        """
        before = Guessed.of(self.pair.decode)
        if at_once:
            answers = self.pair.run_all(prompts, NEW_TOKENS)
        else:
            answers = [self.pair.run(each, NEW_TOKENS) for each in prompts]
        padded = Guessed(sum(len(tokens) > 1 for tokens in prompts), (0, 0, 0))
        return token_ids(answers), Guessed.of(self.pair.decode) - before - padded


def drafting(fleet: Fleet, prefill: EngineConfig, decode: EngineConfig) -> Drafting:
    """Prefill, decode whose pool is full of other KV, and one with a draft and without a connector
    that computes prompts as prefill does.
    """
    drafted = prefill if "speculative_config" in prefill.more else decode
    more = {name: prefill.more[name] for name in CHUNKS if name in prefill.more}
    alone = replace(drafted, connector=None, tp_size=1, more=drafted.more | more, label="alone")
    label = "prefill" if prefill == decode else ""
    first, second, single = fleet.engines(replace(prefill, label=label), decode, alone)
    if decode.in_process and decode.tp_size == 1:
        poison(second, 7.0, "self_attn")
    return Drafting(Pair(first, second), single)


def poison(engine: Engine, value: float, *layers: str) -> None:
    """Fill the pool of an engine in one process."""
    assert engine.call("poison", layers=layers, value=value) >= len(layers)


def assert_all_is_equal(engines: Drafting, *, is_chunked: bool) -> None:
    """One request at a time, then a second turn, then all at once. At the end of a chunk vLLM's V1
    runner makes the draft's KV with the last token of the prompt, and where chunks end depends on
    the other requests.
    """
    pair = engines.pair
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    before = Sources.of(pair.decode)
    answers, guessed = engines.moved(prompts)
    expected, guessed_alone = engines.expected(prompts)
    assert answers == expected
    assert Sources.of(pair.decode) - before == Sources(
        sum(PROMPT_TOKENS) - len(prompts), 0, len(prompts)
    )
    assert guessed == guessed_alone
    assert guessed.acceptance_length > 2
    second = [prompts[-1] + tuple(answers[-1]) + prompt(50, seed=2)]
    before = Sources.of(pair.decode)
    assert engines.moved(second) == engines.expected(second)
    hit = (Sources.of(pair.decode) - before).local_hits
    assert hit >= 512 or pair.decode.config.more.get("enable_prefix_caching") is False
    prompts = list(concurrent_prompts(16))
    got, guessed = engines.moved(prompts, at_once=True)
    expected, guessed_alone = engines.expected(prompts)
    assert got == expected
    assert is_chunked or guessed == guessed_alone
    assert guessed.acceptance_length > 0.95 * guessed_alone.acceptance_length
    pair.assert_at_rest()


def test_a_draft_at_prefill_alone(fleet: Fleet) -> None:
    """Its layers are not read."""
    engines = drafting(fleet, side(eagle(), more=CHUNKS), side({}))
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    before = Sources.of(engines.pair.decode)
    answers, _ = engines.moved(prompts)
    assert answers == engines.expected(prompts)[0]
    moved = Sources.of(engines.pair.decode) - before
    assert moved == Sources(sum(PROMPT_TOKENS) - len(prompts), 0, len(prompts))


def test_as_much_is_accepted_as_in_one_engine(fleet: Fleet) -> None:
    prefill = side(eagle(), more=CHUNKS)
    assert_all_is_equal(drafting(fleet, prefill, side(eagle())), is_chunked=True)


def test_a_draft_at_decode_alone(fleet: Fleet) -> None:
    """It begins with KV of zeros: the tokens are right, and fewer guesses are accepted."""
    engines = drafting(fleet, side({}, more=CHUNKS), side(eagle()))
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    expected, _ = engines.expected(prompts)
    found = []
    for value in (7.0, -50.0):
        engines.pair.decode.reset()
        poison(engines.pair.decode, value, "layers.2.", "layers.3.")  # the draft's
        before = Sources.of(engines.pair.decode)
        answers, guessed = engines.moved(prompts)
        assert answers == expected
        moved = Sources.of(engines.pair.decode) - before
        assert moved == Sources(sum(PROMPT_TOKENS) - len(prompts), 0, len(prompts))
        found.append(guessed)
    assert found[0] == found[1]
    assert 1 < found[0].acceptance_length < 1.5
    assert "expected the draft of this engine, got none" in engines.pair.decode.process.log()


MTP = speculative("mtp", 2)


@pytest.mark.parametrize("prefill", [WHOLE, CHUNKS], ids=["whole", "in-chunks"])
def test_as_much_is_accepted_of_multi_token_prediction(
    fleet: Fleet, prefill: dict[str, int]
) -> None:
    engines = drafting(fleet, side(MTP, "mtp", more=prefill), side(MTP, "mtp", more=WHOLE))
    assert_all_is_equal(engines, is_chunked=prefill is CHUNKS)


DRAFT_MODEL = speculative("draft_model", model=str(models.make("drafted")))
WIDE, WIDE_NOT_PARALLEL = eagle("wide-eagle"), eagle("wide-eagle", draft_tensor_parallel_size=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(
            side(WIDE, tp_size=2, block_tokens=32), side(WIDE, block_tokens=128), id="tp2-to-tp1"
        ),
        pytest.param(
            side(WIDE, block_tokens=128),
            side(WIDE_NOT_PARALLEL, tp_size=2, block_tokens=32),
            id="tp1-to-tp2",
        ),
        pytest.param(side(DRAFT_MODEL), side(DRAFT_MODEL, block_tokens=32), id="draft-model"),
    ],
)
def test_drafts_of_other_heads_in_other_blocks(
    fleet: Fleet, prefill: EngineConfig, decode: EngineConfig
) -> None:
    prefill = replace(prefill, more=prefill.more | WHOLE)
    assert_all_is_equal(drafting(fleet, prefill, decode), is_chunked=False)


@pytest.mark.slow
def test_decode_computes_what_later_modules_look_behind(fleet: Fleet) -> None:
    """Two modules: the KV of the last two tokens of a prompt was made with a guess."""
    config = side(MTP, "modules", more=WHOLE)
    engines = drafting(fleet, config, config)
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS if num_tokens > 2]
    before = Sources.of(engines.pair.decode)
    (answers, _), (expected, _) = engines.moved(prompts), engines.expected(prompts)
    assert answers == expected
    moved = Sources.of(engines.pair.decode) - before
    assert moved == Sources(sum(map(len, prompts)) - 2 * len(prompts), 0, 2 * len(prompts))
