"""Pipeline stages: each has the KV of its own layers, and several steps are under way at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers import free_port
from tests.vllm.cases import NEW_TOKENS, References, Tokens, concurrent_prompts, prompt
from tests.vllm.engines import Connector, EngineConfig
from tests.vllm.servers import Server, forked

BOTH = Connector(role="kv_both")
NUM_STAGES = 2
# Of eager models vLLM's CPU build runs no stage but the first: the other one's input buffers are
# made while a compiled model warms up. Dynamo's eager backend compiles nothing.
STAGES = {
    "pipeline_parallel_size": NUM_STAGES,
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}


@dataclass(frozen=True, slots=True)
class Sides:
    """Two stages with all heads of two layers each; two ranks with two heads of all layers."""

    stages: Server
    ranks: Server


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    with (
        forked(EngineConfig(BOTH, block_tokens=32, more=STAGES), free_port()) as stages,
        forked(EngineConfig(BOTH, block_tokens=64, tp_size=2), free_port()) as ranks,
    ):
        yield Sides(stages, ranks)


@pytest.fixture(scope="module")
def uneven() -> Iterator[Server]:
    """Stages of three layers and of one, two ranks each."""
    layers = {"VLLM_PP_LAYER_PARTITION": "3,1"}
    config = EngineConfig(BOTH, block_tokens=64, tp_size=2, more=STAGES, variables=layers)
    with forked(config, free_port()) as server:
        yield server


@pytest.mark.parametrize("stages_are_source", [True, False], ids=["source", "sink"])
def test_tokens_are_those_of_one_engine(
    sides: Sides, references: References, stages_are_source: bool
) -> None:
    source, sink = sides.stages, sides.ranks
    if not stages_are_source:
        source, sink = sink, source
    offered = _serve(source, sink, references, 850 + stages_are_source)
    assert {params["pp_size"] for params in offered} == {NUM_STAGES if stages_are_source else 1}


@pytest.mark.slow
@pytest.mark.parametrize("uneven_is_source", [True, False], ids=["source", "sink"])
def test_stages_of_other_layers_on_both_sides(
    sides: Sides, uneven: Server, references: References, uneven_is_source: bool
) -> None:
    """Every sink rank reads from several source ranks: its layers are in two stages there, or its
    stage's heads on two ranks.
    """
    source, sink = (uneven, sides.stages) if uneven_is_source else (sides.stages, uneven)
    offered = _serve(source, sink, references, 860 + uneven_is_source)
    assert {params["pp_size"] for params in offered} == {NUM_STAGES}
    assert {params["tp_size"] for params in offered} == {2 if uneven_is_source else 1}


def _serve(source: Server, sink: Server, references: References, seed: int) -> list[dict[str, Any]]:
    """Prompts of their own, else the sink has them in its prefix cache: all of their KV comes from
    the source, and the tokens are those of one engine. Returns what the source has offered.
    """
    prompts = [prompt(1, seed), prompt(700, seed), *concurrent_prompts(6, seed)]
    want = references.tokens(prompts)

    def decode(tokens: Tokens, params: dict[str, Any]) -> list[int]:
        return sink.token_ids(tokens, NEW_TOKENS, kv_transfer_params=params)

    before = _moved(sink)
    with ThreadPoolExecutor(len(prompts)) as pool:
        offered = list(pool.map(source.prefill, prompts))
        assert list(pool.map(decode, prompts, offered)) == want
    assert _moved(sink) - before == sum(len(tokens) - 1 for tokens in prompts)
    return offered


def _moved(server: Server) -> int:
    """Prompt tokens whose KV came from a peer, by vLLM's own counter."""
    return int(server.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))
