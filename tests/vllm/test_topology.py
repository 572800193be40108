"""Several engines on either side, engines that do both, and another connector beside ours."""

from __future__ import annotations

from pathlib import Path

from kvxfer.connector.params import early_params, mint_request
from tests.vllm.cases import Pair, References, Sources, concurrent_prompts, prompt, token_ids
from tests.vllm.engines import MODULE, OFFER, Connector, EngineConfig, Fleet

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


def beside_another(folder: Path) -> Connector:
    """MultiConnector with vLLM's own example connector, which keeps prompts on disk."""
    return Connector(
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
                    "kv_connector_extra_config": {"shared_storage_path": str(folder)},
                },
            ]
        },
    )


def test_beside_another_connector(fleet: Fleet, references: References, tmp_path: Path) -> None:
    config = beside_another(tmp_path)
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


def test_both_are_asked_at_once_beside_another_connector(
    fleet: Fleet, references: References, tmp_path: Path
) -> None:
    """Prompts in chunks, several at a time; one is known to the other connector alone."""
    prefill, decode = fleet.engines(
        EngineConfig(
            beside_another(tmp_path / "prefill"),
            block_tokens=32,
            more={"max_num_batched_tokens": 64, "enable_chunked_prefill": True},
        ),
        EngineConfig(beside_another(tmp_path / "decode"), block_tokens=64),
    )
    pair = Pair(prefill, decode)
    learned = pair.offered(prompt(40, seed=700))
    assert decode.generate(prompt(40, seed=700), 4, learned).reason == "length"
    on_disk = prompt(200, seed=701)
    want = references.tokens([on_disk])
    assert token_ids([decode.generate(on_disk)]) == want
    decode.reset()
    prompts = concurrent_prompts(4, seed=710)
    names = [mint_request() for _ in prompts]
    decoding = decode.submit_all(prompts, 16, [early_params(learned, name) for name in names])
    prefilling = prefill.submit_all(
        prompts, 1, [{**OFFER, "kvxfer": {"request": name}} for name in names]
    )
    answers = [decode.result(each) for each in decoding]
    assert token_ids(answers) == references.tokens(prompts)
    for each in prefilling:
        prefill.result(each)
    assert sum(each.num_cached_tokens for each in answers) == sum(len(p) - 1 for p in prompts)
    assert token_ids([decode.generate(on_disk)]) == want
    pair.assert_at_rest()
