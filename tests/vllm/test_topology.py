"""Several engines on either side, engines that do both, and another connector beside ours."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.cases import Pair, References, Sources, concurrent_prompts, prompt, token_ids
from tests.vllm.engines import MODULE, Connector, EngineConfig, Fleet

BOTH = Connector(role="kv_both")


def test_two_prefill_and_two_decode_engines_in_any_pairing(
    fleet: Fleet, references: References
) -> None:
    prompts = concurrent_prompts(4, seed=500)
    want = references.tokens(prompts)
    sizes = (32, 64, 128, 96)
    first, second, third, fourth = fleet.engines(
        *(EngineConfig(BOTH, block_tokens=size) for size in sizes)
    )
    pairs = [Pair(source, sink) for source in (first, second) for sink in (third, fourth)]
    # All pairs at the same time: each sink reads from both sources, each source serves both.
    params = [pair.offered(tokens) for pair, tokens in zip(pairs, prompts, strict=True)]
    waiting = [
        pair.decode.submit(tokens, 16, param)
        for pair, tokens, param in zip(pairs, prompts, params, strict=True)
    ]
    answers = [
        pair.decode.result(request_id) for pair, request_id in zip(pairs, waiting, strict=True)
    ]
    assert token_ids(answers) == want
    for pair in pairs:
        pair.assert_at_rest()


def test_one_engine_is_source_and_sink(fleet: Fleet, references: References) -> None:
    left, right = fleet.engines(
        EngineConfig(BOTH, block_tokens=32), EngineConfig(BOTH, block_tokens=128)
    )
    prompts = concurrent_prompts(6, seed=600)
    want = references.tokens(prompts)
    before = Sources.of(left), Sources.of(right)
    for number, (tokens, tokens_want) in enumerate(zip(prompts, want, strict=True)):
        pair = Pair(left, right) if number % 2 else Pair(right, left)
        assert pair.run(tokens).token_ids == tokens_want
    for engine, were in zip((left, right), before, strict=True):
        assert (Sources.of(engine) - were).external > 0


def test_beside_another_connector(fleet: Fleet, references: References, tmp_path: Path) -> None:
    """MultiConnector with vLLM's own example connector, which keeps prompts on disk."""
    config = Connector(
        name="MultiConnector",
        module=None,
        extra={
            "connectors": [
                {
                    "kv_connector": "KvxferConnector",
                    "kv_connector_module_path": MODULE,
                    "kv_role": "kv_both",
                },
                {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
                },
            ]
        },
    )
    prefill, decode = fleet.engines(
        EngineConfig(BOTH, block_tokens=32), EngineConfig(config, block_tokens=64)
    )
    pair = Pair(prefill, decode)
    tokens, plain = prompt(300, seed=7), prompt(200, seed=8)
    want = references.tokens([tokens, plain])
    before = Sources.of(decode)
    assert pair.run(tokens).token_ids == want[0]
    assert (Sources.of(decode) - before).external == len(tokens) - 1
    assert decode.generate(plain).token_ids == want[1]
    # Both prompts are on disk now, and the other connector finds them there.
    decode.reset()
    before = Sources.of(decode)
    assert token_ids([decode.generate(tokens), decode.generate(plain)]) == want
    assert (Sources.of(decode) - before).external > 0
    pair.assert_at_rest()
