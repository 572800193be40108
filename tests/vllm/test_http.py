"""Two servers of vLLM behind ``kvxfer proxy``: the tokens of one engine, streamed or not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvxfer.connector.metrics import METRICS, PHASES, TOTAL
from tests.vllm.cases import NEW_TOKENS, References, concurrent_prompts, prompt
from tests.vllm.engines import OFFER, Connector, EngineConfig
from tests.vllm.otlp import Collector, collecting
from tests.vllm.servers import Server, serving

EXTERNAL = "vllm:external_prefix_cache_hits_total"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def servers(collector: Collector) -> Iterator[tuple[Server, Server, Server]]:
    """Block sizes that differ, engines in processes of their own."""
    more = {"otlp_traces_endpoint": collector.url}
    with serving(
        EngineConfig(Connector(role="kv_producer"), block_tokens=32, in_process=False, more=more),
        EngineConfig(Connector(role="kv_consumer"), block_tokens=128, in_process=False, more=more),
    ) as found:
        yield found


@pytest.fixture
def proxy(servers: tuple[Server, Server, Server]) -> Server:
    return servers[2]


def test_streamed_tokens_are_those_of_one_engine(
    servers: tuple[Server, Server, Server], references: References
) -> None:
    _, decode, proxy = servers
    prompts = [prompt(num_tokens, seed=70) for num_tokens in (1, 33, 300, 700)]
    want = references.tokens(prompts)
    before = decode.metric(EXTERNAL)
    for tokens, tokens_want in zip(prompts, want, strict=True):
        events = list(proxy.stream(tokens, NEW_TOKENS))
        assert [token for event in events for token in event] == tokens_want
        assert len([event for event in events if event]) > 1  # as they come, not at the end
    moved = decode.metric(EXTERNAL) - before
    assert moved == sum(len(tokens) - 1 for tokens in prompts)


def test_answers_in_one_piece(proxy: Server, references: References) -> None:
    tokens = prompt(128, seed=71)
    assert [proxy.token_ids(tokens, NEW_TOKENS)] == references.tokens([tokens])


def test_sixteen_clients_at_the_same_time(proxy: Server, references: References) -> None:
    prompts = concurrent_prompts(16)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda tokens: proxy.token_ids(tokens, NEW_TOKENS), prompts))
    assert answers == references.tokens(prompts)


def test_a_router_may_carry_the_params_itself(
    servers: tuple[Server, Server, Server], references: References
) -> None:
    """What llm-d's sidecar and vLLM's proxies do: two requests, params carried verbatim."""
    prefill, decode, _ = servers
    tokens = prompt(200, seed=72)
    params = prefill.complete(tokens, 1, kv_transfer_params=OFFER)["kv_transfer_params"]
    (choice,) = decode.complete(tokens, NEW_TOKENS, kv_transfer_params=params)["choices"]
    assert [choice["token_ids"]] == references.tokens([tokens])


def test_metrics_and_the_log_line_tell_of_transfers(
    servers: tuple[Server, Server, Server],
) -> None:
    _, decode, proxy = servers
    before = decode.metric("vllm:kvxfer_loaded_bytes_total")
    proxy.token_ids(prompt(257, seed=73), 1)
    moved = decode.metric("vllm:kvxfer_loaded_bytes_total") - before
    assert moved == 256 * 4 * 4 * 2 * 32 * 4  # layers, heads, K and V, head size, float32
    for phase in (TOTAL, *PHASES):
        assert decode.metric("vllm:kvxfer_load_seconds_count", phase=phase) > 0
    assert decode.metric("vllm:kvxfer_loads_total", wire="zmq") > 0
    assert decode.metric("vllm:kvxfer_wire_bytes_per_second", rank="pp0tp0") > 1e6


def test_all_metrics_are_there(servers: tuple[Server, Server, Server]) -> None:
    """With their types; what is counted without labels begins at 0."""
    servers[2].token_ids(prompt(257, seed=75), 1)
    for server in servers[:2]:
        text = server.get("/metrics")
        found = dict(re.findall(r"# TYPE vllm:kvxfer_(\S+) (\w+)", text))
        gauges = {name for name in found if name.endswith("_created")}
        want = {metric.exported: metric.kind.value for metric in METRICS}
        assert {name: found[name] for name in found.keys() - gauges} == want
    assert servers[0].metric("vllm:kvxfer_offers_done_total") > 0
    assert servers[0].metric("vllm:kvxfer_offers_held", rank="pp0tp0") == 0
    assert re.search(r"^vllm:kvxfer_loads_undrained_total\{.*\} 0.0$", text, re.MULTILINE)


def test_a_load_continues_the_trace_of_its_http_request(
    servers: tuple[Server, Server, Server], collector: Collector
) -> None:
    """Through proxy, front end and scheduler to the rank, which tells of it."""
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    traced = replace(servers[2], headers={"traceparent": f"00-{trace_id}-{span_id}-01"})
    traced.token_ids(prompt(257, seed=76), 1)
    load = collector.wait_for("kvxfer.load", trace_id)
    assert load.parent_span_id.hex() == span_id
    facts = {each.key: each.value for each in load.attributes}
    assert facts["kvxfer.bytes"].int_value == 256 * 4 * 4 * 2 * 32 * 4
    assert facts["kvxfer.wire"].string_value == "zmq"
    for phase in PHASES:
        child = collector.wait_for(f"kvxfer.{phase}", trace_id)
        assert child.parent_span_id == load.span_id


def test_log_lines_of_both_sides_are_in_the_log_of_vllm(
    servers: tuple[Server, Server, Server],
) -> None:
    """Of a worker, which has chosen a wire, and of the scheduler, which may not load from there; in
    vLLM's format, each once.
    """
    prefill, decode, proxy = servers
    tokens = prompt(60, seed=74)
    proxy.token_ids(tokens, 1)
    params = prefill.complete(tokens, 1, kv_transfer_params=OFFER)["kv_transfer_params"]
    params["kvxfer"]["endpoint"] = "tcp://8.8.8.8:5700"
    for _ in range(2):
        decode.complete(tokens, 1, kv_transfer_params=params)
    log = decode.process.log()
    line = r"{} \d\d-\d\d [\d:]+ \[[\w./]+:\d+\] kvxfer: {}"
    assert len(re.findall(line.format("INFO", r"engine \S+ at \S+, met in \d+ ms"), log)) == 1
    assert len(re.findall(line.format("INFO", r"version \S+: engine \S+ takes KV at"), log)) == 1
    said = r"request \S+: KV not used: not_allowed: allowed_peers of this engine does not admit"
    assert len(re.findall(line.format("ERROR", said), log)) == 1
    assert decode.metric("vllm:kvxfer_pairs_unusable_total") == 1
