"""Which KV an engine uses: params of no KV, of other KV, of other tokens; and proof that the KV
that was transferred is what decode works with.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from tests.vllm.cases import NEW_TOKENS, Pair, References, Sources, prompt
from tests.vllm.engines import OFFER, Connector, EngineConfig, Fleet

# Offers that are refused are kept until their lease ends, which both sides say.
LEASE = {"lease_s": 3.0, "keep_s": 1.0}
PREFILL = EngineConfig(Connector(extra=LEASE), block_tokens=32)
DECODE = EngineConfig(Connector(extra=LEASE, policy="recompute"), block_tokens=128)


@pytest.fixture
def pair(fleet: Fleet) -> Pair:
    return Pair(*fleet.engines(PREFILL, DECODE))


def other_tokens(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Another prompt of this length that ends with the same token."""
    return (*prompt(len(tokens) - 1, seed=99), tokens[-1])


@pytest.mark.parametrize("num_tokens", [33, 300])
def test_decode_continues_the_kv_it_gets_and_not_the_tokens(
    fleet: Fleet, references: References, num_tokens: int
) -> None:
    """The control: with wrong tokens but prefill's KV, decode says what prefill would say."""
    unbound = Connector(extra={"bind_tokens": False})
    pair = Pair(
        *fleet.engines(
            EngineConfig(unbound, block_tokens=32), EngineConfig(unbound, block_tokens=128)
        )
    )
    tokens = prompt(num_tokens, seed=20)
    wrong = other_tokens(tokens)
    right_answer, wrong_answer = references.tokens([tokens, wrong])
    assert right_answer != wrong_answer
    answer = pair.decode.generate(wrong, NEW_TOKENS, pair.offered(tokens))
    assert answer.token_ids == right_answer
    pair.decode.reset()
    assert pair.decode.generate(wrong).token_ids == wrong_answer


def test_params_of_other_tokens_are_refused(pair: Pair, references: References) -> None:
    tokens = prompt(300, seed=21)
    wrong = other_tokens(tokens)
    before = Sources.of(pair.decode)
    answer = pair.decode.generate(wrong, NEW_TOKENS, pair.offered(tokens))
    assert [answer.token_ids] == references.tokens([wrong])
    assert (Sources.of(pair.decode) - before).external == 0
    pair.assert_at_rest()


def test_our_counters_tell_what_travelled(pair: Pair) -> None:
    before = pair.decode.metrics()
    pair.run(prompt(300, seed=22))
    after = pair.decode.metrics()

    def added(name: str) -> float:
        """Over all peers and wires."""
        now, then = (
            sum(value for each, value in some.items() if each.partition("{")[0] == name)
            for some in (after, before)
        )
        return now - then

    assert added("vllm:kvxfer_requests_loaded_total") == 1
    # 4 layers, 4 heads, K and V of 32 float32 each.
    assert added("vllm:kvxfer_loaded_bytes_total") == 299 * 4 * 4 * 2 * 32 * 4


FOREIGN: dict[str, Any] = {"some_connector": {"key": 7}, "transfer_id": "abc"}


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(None, id="none"),
        pytest.param({}, id="empty"),
        pytest.param({**OFFER, "do_remote_decode": False}, id="null"),
        pytest.param(FOREIGN, id="foreign"),
        pytest.param(
            {
                **OFFER,
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": "e",
                "remote_block_ids": [[1, 2]],
                "remote_request_id": "r",
                "remote_host": "127.0.0.1",
                "remote_port": 1,
            },
            id="of-nixl",
        ),
        pytest.param({"do_remote_prefill": True, "kvxfer": 7}, id="malformed"),
    ],
)
def test_other_params_run_plain(
    pair: Pair, references: References, params: dict[str, Any] | None
) -> None:
    tokens = prompt(100, seed=23)
    before = Sources.of(pair.decode)
    answer = pair.decode.generate(tokens, NEW_TOKENS, params)
    assert [answer.token_ids] == references.tokens([tokens])
    assert Sources.of(pair.decode) - before == Sources(0, 0, len(tokens))
    pair.assert_at_rest()


def test_an_offer_is_read_once(pair: Pair, references: References) -> None:
    tokens = prompt(200, seed=24)
    params = pair.offered(tokens)
    want = references.tokens([tokens])
    assert [pair.decode.generate(tokens, NEW_TOKENS, params).token_ids] == want
    pair.decode.reset()
    before = Sources.of(pair.decode)
    assert [pair.decode.generate(tokens, NEW_TOKENS, params).token_ids] == want
    assert (Sources.of(pair.decode) - before).external == 0
    pair.assert_at_rest()


def test_prompt_logprobs_do_not_use_transferred_kv(pair: Pair, references: References) -> None:
    """They need every prompt token computed; the offer is released, not leaked."""
    tokens = prompt(150, seed=25)
    before = Sources.of(pair.decode)
    request_id = pair.decode.submit(tokens, NEW_TOKENS, pair.offered(tokens), prompt_logprobs=1)
    assert [pair.decode.result(request_id).token_ids] == references.tokens([tokens])
    assert (Sources.of(pair.decode) - before).external == 0
    pair.assert_at_rest()


def test_the_connector_is_found_by_name(fleet: Fleet, references: References) -> None:
    """Through the entry point of an installed kvxfer, without a module path."""
    points = metadata.entry_points(group="vllm.general_plugins")
    if "kvxfer" not in points.names:
        pytest.skip("kvxfer is not installed in this environment")
    by_name = Connector(module=None)
    pair = Pair(*fleet.engines(EngineConfig(by_name, block_tokens=96), EngineConfig(by_name)))
    tokens = prompt(200, seed=26)
    before = Sources.of(pair.decode)
    assert [pair.run(tokens).token_ids] == references.tokens([tokens])
    assert (Sources.of(pair.decode) - before).external == len(tokens) - 1
