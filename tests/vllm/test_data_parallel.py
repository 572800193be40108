"""Data-parallel ranks: to its peers each is an engine of its own, with a port of its own.

vLLM runs the ranks of a dense model as independent engines behind one URL; ranks with URLs of their
own, and offline ones (VLLM_DP_RANK), it refuses. Those of a mixture of experts compute each step
together.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.helpers import free_port
from tests.vllm.cases import (
    NEW_TOKENS,
    References,
    Sources,
    Tokens,
    concurrent_prompts,
    prompt,
    token_ids,
)
from tests.vllm.engines import Connector, Engine, EngineConfig, Fleet
from tests.vllm.servers import Server, forked, proxied

SOURCES = "vllm:prompt_tokens_by_source_total"
LOADED = "vllm:kvxfer_requests_loaded_total"
RANKS = (0, 1)
BOTH = Connector(role="kv_both")
TWO_RANKS = {"data_parallel_size": len(RANKS)}


@pytest.fixture(scope="module")
def kv_port() -> int:
    """A free port with a free one behind it."""
    while True:
        port = free_port()
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port + 1))
            return port


def test_ranks_that_compute_in_step(kv_port: int, fleet: Fleet, references: References) -> None:
    """A rank joins the others' steps while it holds KV, waits for some, or has nothing to do."""
    prompts = concurrent_prompts(8, seed=840)
    want = references.tokens(prompts, model="experts")
    (plain,) = fleet.engines(EngineConfig(BOTH, model="experts", block_tokens=64))
    sources = Sources.of(plain)
    num_tokens = sum(len(tokens) - 1 for tokens in prompts)
    config = EngineConfig(BOTH, model="experts", block_tokens=32, more=TWO_RANKS)
    with forked(config, kv_port) as server, ThreadPoolExecutor(len(prompts)) as pool:
        ranks = [server.of_rank(rank) for rank in RANKS] * (len(prompts) // len(RANKS))
        # All are held at the same time, by both ranks; and loaded by both.
        offered = list(pool.map(Server.prefill, ranks, prompts))
        assert token_ids(plain.generate_all(prompts, NEW_TOKENS, offered)) == want
        assert (Sources.of(plain) - sources).external == num_tokens
        plain.reset()
        offered = [plain.prefill(tokens).params or {} for tokens in prompts]

        def decode(rank: Server, tokens: Tokens, params: dict[str, Any]) -> list[int]:
            return rank.token_ids(tokens, NEW_TOKENS, kv_transfer_params=params)

        # At the rank that has not computed them.
        assert list(pool.map(decode, reversed(ranks), prompts, offered)) == want
        assert sum(_moved(server, rank) for rank in RANKS) == num_tokens


@pytest.fixture(scope="module")
def server(kv_port: int) -> Iterator[Server]:
    """``vllm serve --data-parallel-size 2 --tensor-parallel-size 2``."""
    config = EngineConfig(BOTH, tp_size=2, block_tokens=32, more=TWO_RANKS)
    with forked(config, kv_port) as found:
        yield found


@pytest.fixture
def plain(fleet: Fleet) -> Engine:
    """An engine without ranks, with blocks of another size."""
    (engine,) = fleet.engines(EngineConfig(BOTH, block_tokens=64))
    return engine


def test_each_rank_listens_on_a_port_of_its_own(server: Server, kv_port: int) -> None:
    ports = {kv_port + rank for rank in RANKS}
    listening = {
        connection.laddr.port: process.pid
        for process in server.process.tree()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports
    }
    assert set(listening) == ports
    assert len(set(listening.values())) == len(RANKS)  # each in its own worker
    offered = [server.of_rank(rank).prefill(prompt(40, seed=rank)) for rank in RANKS]
    for rank, params in zip(RANKS, offered, strict=True):
        assert params["remote_port"] == kv_port + rank
        assert params["remote_engine_id"].endswith(f"_dp{rank}")


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_is_a_source(
    server: Server, plain: Engine, references: References, rank: int
) -> None:
    prompts = [prompt(num_tokens, seed=800 + rank) for num_tokens in (33, 128, 300)]
    want = references.tokens(prompts)
    before = Sources.of(plain)
    for tokens, tokens_want in zip(prompts, want, strict=True):
        params = server.of_rank(rank).prefill(tokens)
        assert plain.generate(tokens, NEW_TOKENS, params).token_ids == tokens_want
    assert (Sources.of(plain) - before).external == sum(len(tokens) - 1 for tokens in prompts)


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_is_a_sink(server: Server, plain: Engine, references: References, rank: int) -> None:
    prompts = [prompt(num_tokens, seed=810 + rank) for num_tokens in (33, 128, 300)]
    want = references.tokens(prompts)
    before = [_moved(server, each) for each in RANKS]
    for tokens, tokens_want in zip(prompts, want, strict=True):
        params = plain.prefill(tokens).params
        sink = server.of_rank(rank)
        assert sink.token_ids(tokens, NEW_TOKENS, kv_transfer_params=params) == tokens_want
    moved = [_moved(server, each) - num for each, num in zip(RANKS, before, strict=True)]
    assert moved[rank] == sum(len(tokens) - 1 for tokens in prompts)
    assert moved[1 - rank] == 0


def test_from_rank_to_rank(server: Server, references: References) -> None:
    tokens = prompt(300, seed=820)
    (want,) = references.tokens([tokens])
    before = _moved(server, 1)
    params = server.of_rank(0).prefill(tokens)
    got = server.of_rank(1).token_ids(tokens, NEW_TOKENS, kv_transfer_params=params)
    assert got == want
    assert _moved(server, 1) - before == len(tokens) - 1


def test_behind_the_proxy_any_rank_may_get_a_request(
    server: Server, references: References
) -> None:
    """vLLM chooses ranks by their load: KV comes from any rank to any rank, itself included."""
    prompts = concurrent_prompts(16, seed=830)
    want = references.tokens(prompts)
    before = [server.metric(LOADED, engine=str(rank)) for rank in RANKS]
    with proxied(server, server) as proxy, ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda tokens: proxy.token_ids(tokens, NEW_TOKENS), prompts))
    assert answers == want
    after = [server.metric(LOADED, engine=str(rank)) for rank in RANKS]
    assert all(new > old for new, old in zip(after, before, strict=True))


def _moved(server: Server, rank: int) -> int:
    """Prompt tokens of a rank whose KV came from a peer, by vLLM's own counter."""
    return int(server.metric(SOURCES, source="external_kv_transfer", engine=str(rank)))
