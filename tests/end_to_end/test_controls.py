"""Controls: right tokens prove nothing if any KV gives them, or if the model says one thing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from hashlib import blake2b

import pytest

from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.digest import DIGEST_NBYTES
from kvxfer.engine.engine import Result
from kvxfer.engine.model_config import load_model_config
from tests.end_to_end.harness import DECODE, PREFILL, LiveEngine, Pair, engine_config, pair, prompt

NUM_TOKENS = (17, 18, 24, 31, 32, 33, 40, 48, 64, 65, 96, 127, 150, 200, 257, 400)
"""Each longer than a block of the prefill side."""
NEW_TOKENS = 16
MODEL = load_model_config(None)  # the built-in one, which needs no files
NUM_PLANES = 2 * MODEL.num_layers * MODEL.num_kv_heads


def decode_config(transport: str) -> EngineConfig:
    """No prefix cache, so that no prompt finds KV of the one before. Pools begin as zeros."""
    return engine_config(
        Role.DECODE,
        None,
        kv={"transport": transport, "log_level": "WARNING"},
        enable_prefix_caching=False,
        digests=True,
        **DECODE,
    )


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    kv = {"transport": "auto", "log_level": "WARNING"}
    with pair(
        engine_config(Role.PREFILL, None, kv=kv, tp_size=2, **PREFILL), decode_config("shm")
    ) as engines:
        yield engines


@pytest.fixture(scope="module")
def right(engines: Pair) -> dict[int, Result]:
    """What is said when nothing goes wrong, by number of prompt tokens."""
    return answers(engines)


def answers(engines: Pair, each_with: EngineConfig | None = None) -> dict[int, Result]:
    """By number of prompt tokens. ``each_with``: each in a new life of the decode engine, whose
    blocks nobody has written.
    """
    found: dict[int, Result] = {}
    for num_tokens in NUM_TOKENS:
        if each_with is not None:
            engines.decode.reconfigure(each_with)
        found[num_tokens] = engines.run(prompt(num_tokens), NEW_TOKENS)
    for num_tokens, answer in found.items():
        assert answer.done.failure is None
        assert answer.done.num_external_tokens == num_tokens - 1
    return found


def is_blank(answer: Result) -> bool:
    """Is all KV that should have come zeros? By the digests, taken before anything was computed."""
    (digest,) = answer.done.digests
    assert len(digest.planes) == NUM_PLANES
    zeros = blake2b(bytes(4 * MODEL.head_size), digest_size=DIGEST_NBYTES).digest()
    return all(plane.tokens == zeros * digest.num_tokens for plane in digest.planes)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_zeros_for_kv_change_the_tokens_of_every_prompt_longer_than_a_block(
    engines: Pair, right: dict[int, Result], transport: str
) -> None:
    config = decode_config(transport)
    with closing(LiveEngine(config, "read:blank")) as blank:
        wrong = answers(Pair(engines.prefill, blank), config)
    for num_tokens in NUM_TOKENS:
        assert is_blank(wrong[num_tokens])
        assert not is_blank(right[num_tokens])
    equal = [num for num in NUM_TOKENS if wrong[num].token_ids == right[num].token_ids]
    assert equal == []


def test_the_right_tokens_come_back_with_the_kv(engines: Pair, right: dict[int, Result]) -> None:
    """What differs is the KV, not the life of the engine."""
    engines.decode.reconfigure(decode_config("zmq"))
    again = answers(engines)
    assert {num: answer.token_ids for num, answer in again.items()} == {
        num: answer.token_ids for num, answer in right.items()
    }


def test_at_least_half_of_the_tokens_of_an_output_are_distinct(right: dict[int, Result]) -> None:
    for answer in right.values():
        assert len(answer.token_ids) == NEW_TOKENS
        assert len(set(answer.token_ids)) >= NEW_TOKENS / 2
    # And prompts do not all get the same ones.
    assert len({answer.token_ids for answer in right.values()}) == len(NUM_TOKENS)
