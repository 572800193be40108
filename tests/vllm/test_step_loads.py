"""Loads that are part of a step, with vLLM's own scheduler: no token ever comes of KV that was not
proven, whoever could have seen it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace as Bag
from typing import Any

import pytest

from kvxfer.connector.board import BoardView
from kvxfer.transports.copy_thread import CopyJob
from tests.connector.rig import until
from tests.vllm.scheduler_rig import (
    BLOCK,
    OFFERED,
    BlockPool,
    BlockRemoved,
    Request,
    SamplingParams,
    Status,
    UnprovenKV,
    get_request_block_hasher,
    init_none_hash,
    is_engines_own,
    sha256,
    why_never,
    why_not_heard,
)
from tests.vllm.step_rig import ComputingEngine, expected_tokens
from tests.wires import run_pieces

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NUM_NEW = 4
MODES = [("fail", False), ("fail", True), ("recompute", False), ("recompute", True)]
CAN = [mode for mode in MODES if mode != ("recompute", True)]
"""Policies and kinds of scheduling of engines that have such loads; the other one falls back."""
Make = Callable[..., ComputingEngine]


class Pair:
    """A source and a sink that have met. ``tears_after``: the source ends its offers behind the
    next copy, or before it; None: neither.
    """

    def __init__(
        self, make: Make, patch: pytest.MonkeyPatch, mode: tuple[str, bool], **more: Any
    ) -> None:
        self.tears_after: bool | None = None
        self.num_torn = 0
        run_pieces(patch, "shm", self._torn, at_once=True)
        policy, is_async = mode
        self.source = make(role="kv_producer")
        settings = {"load_in_step_s": 1.0, **more}
        self.sink = make(role="kv_consumer", policy=policy, is_async=is_async, **settings)
        self.board = BoardView.open(self.source.worker.get_handshake_metadata().manifest.board)
        self.load("first", prompt_of(random.Random(0)))
        self.sink.run_out()

    def _torn(self, job: CopyJob) -> bool:
        tears_after, self.tears_after = self.tears_after, None
        if tears_after is False:
            self._end_offers()
        has_more = job.run()
        if tears_after:
            self._end_offers()
        return has_more

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
    """One load beside requests for the same tokens that load nothing; its client may go away."""
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
    if rng.random() < 0.15:
        for _ in range(rng.randrange(3)):
            pair.sink.run()
        pair.sink.abort(name)
    pair.sink.run_out()
    if request.status == Status.FINISHED_ABORTED:
        want = expected_tokens(tokens, NUM_NEW)
        assert list(request.output_token_ids) == want[: len(request.output_token_ids)]
        assert not (is_torn and policy == "fail" and request.output_token_ids)
        pair.tears_after = None
    elif is_torn and policy == "fail":
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
    # Some were aborted before they were scheduled
    assert pair.num_in_step > 0.9 * num_tries if mode in CAN else pair.num_in_step == 0


def test_a_request_that_is_preempted_behind_its_load_is_right(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older request needs a block in the steps after the load's, and there is none."""
    pair = Pair(make, monkeypatch, ("fail", True), num_blocks=6)
    rng, num_preempted = random.Random(1), 0
    for num_tokens in range(17, 33):
        first, second = ([rng.randrange(900) for _ in range(n)] for n in (num_tokens, 40))
        older = pair.sink.request(f"o{num_tokens}", first, max_tokens=20)
        for _ in range(3):
            pair.sink.run()
        request = pair.load(f"d{num_tokens}", second)
        pair.tears_after = bool(num_tokens % 2) if num_tokens % 3 else None
        pair.settle()
        assert_right(older)
        if request.status == Status.FINISHED_ERROR:
            assert not request.output_token_ids
        else:
            assert_right(request)
        num_preempted += request.num_preemptions
        pair.tears_after = None
    assert num_preempted
    assert pair.sink.is_quiet()


@pytest.mark.parametrize(
    ("status", "expected"), [("PREEMPTED", (1, 0)), ("RUNNING", (0, 1)), ("FINISHED_ERROR", (0, 1))]
)
def test_the_token_of_a_preempted_request_is_dropped(
    status: str, expected: tuple[int, int]
) -> None:
    """Where vLLM preempts what a step computes, 0.26; until the verdict is there."""
    request = Bag(
        request_id="d", status=status, async_tokens_to_discard=0, num_output_placeholders=1
    )
    unproven = UnprovenKV(None)
    unproven.begin(request, ((1, 2),), 0)
    unproven.drop_tokens_of_preempted()
    assert (request.async_tokens_to_discard, request.num_output_placeholders) == expected
    unproven.end("d", is_valid=True)
    request.status, request.async_tokens_to_discard = "PREEMPTED", 0
    unproven.drop_tokens_of_preempted()
    assert request.async_tokens_to_discard == 0


@pytest.mark.parametrize("mode", CAN)
def test_blocks_are_found_from_the_verdict_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: tuple[str, bool]
) -> None:
    pair = Pair(make, monkeypatch, mode)
    tokens = list(range(50))
    pair.load("d", tokens)
    early = pair.sink.request("early", tokens, max_tokens=1)
    pair.sink.run()
    pair.sink.run_out()
    assert pair.sink.begun_at["d"] == 49
    assert pair.sink.begun_at["early"] == 0  # scheduled in the very step of the load
    late = pair.sink.request("late", tokens, max_tokens=1)
    pair.settle()
    assert_right(early)
    assert_right(late)
    assert pair.sink.begun_at["late"] == 3 * BLOCK


@pytest.mark.parametrize("is_async", [False, True])
def test_numbers_are_told_when_its_token_is_out(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Nothing that is to be told keeps its token, and nothing is lost or told twice."""
    pair = Pair(make, monkeypatch, ("fail", is_async))
    before = pair.sink.stats["requests_loaded"][""]
    assert before == 1
    pair.sink.reported.clear()
    for number in range(3):
        request = pair.load(f"d{number}", prompt_of(random.Random(number)))
        pair.sink.run_out()
        assert_right(request)
    pair.sink.request("own", prompt_of(random.Random(9)), max_tokens=8)
    pair.sink.run_out()
    in_step = [bool(report.kv_connector_worker_meta) for report in pair.sink.reported]
    told = [
        sum(report.kv_connector_stats.data["loads"].values())
        if report.kv_connector_stats and "loads" in report.kv_connector_stats.data
        else 0
        for report in pair.sink.reported
    ]
    assert in_step.count(True) == sum(told) == 3
    for place, number in enumerate(told):
        assert not (number and any(in_step[max(0, place - 2) : place + 1]))
    last = max(place for place, is_so in enumerate(in_step) if is_so)
    assert told[last + 3]
    assert sum(pair.sink.stats["loads"].values()) == 3 + before
    pickups = [key for key in pair.sink.stats["load_seconds"] if key.startswith("pickup")]
    assert pickups


def test_other_engines_say_why_they_have_none(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(role="kv_consumer", policy="recompute", is_async=True)
    make(role="kv_producer", policy="recompute", is_async=True)  # it loads nothing at all
    make(role="kv_consumer", policy="recompute", is_async=True, load_in_step_s=0)  # asked for
    lines = [line for line in caplog.messages if "never part of a step" in line]
    assert len(lines) == 1
    assert "--no-async-scheduling" in lines[0]


def config_of(**changes: Any) -> Any:
    values = {
        "policy": "fail",
        "is_async": True,
        "pp_size": 1,
        "dcp_size": 1,
        "draft": None,
        "v2": False,
    } | changes
    return Bag(
        kv_transfer_config=Bag(kv_load_failure_policy=values["policy"]),
        scheduler_config=Bag(async_scheduling=values["is_async"]),
        parallel_config=Bag(
            pipeline_parallel_size=values["pp_size"],
            decode_context_parallel_size=values["dcp_size"],
        ),
        speculative_config=values["draft"],
        use_v2_model_runner=values["v2"],
    )


@pytest.mark.parametrize(
    ("changes", "num_groups", "word"),
    [
        ({}, 1, None),
        ({"v2": True}, 1, None),
        ({"policy": "recompute", "is_async": False}, 1, None),
        ({"policy": "recompute"}, 1, "async scheduling"),
        ({"policy": "recompute", "is_async": False, "v2": True}, 1, "V2"),
        ({}, 2, "2 KV cache groups"),
        ({"pp_size": 2}, 1, "pipeline"),
        ({"dcp_size": 2}, 1, "share the tokens"),
        ({"draft": object()}, 1, "draft"),
    ],
)
def test_where_a_failed_load_could_not_be_handled_there_is_none(
    changes: dict[str, Any], num_groups: int, word: str | None
) -> None:
    why = why_never(config_of(**changes), num_groups, is_own=True)
    assert (why is None) == (word is None)
    assert word is None or word in str(why)


@pytest.mark.parametrize("mode", MODES)
def test_within_multi_connector_there_is_none(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: tuple[str, bool],
) -> None:
    """vLLM goes by the policy beside MultiConnector's name, and the child has the default."""
    child = {
        "kv_connector": "KvxferConnector",
        "kv_connector_module_path": "kvxfer.integrations.vllm",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"port": 0, "load_in_step_s": 1.0},
    }
    pair = Pair(make, monkeypatch, mode, connectors=[child])
    (line,) = [line for line in caplog.messages if "never part of a step" in line]
    assert "MultiConnector" in line
    rng = random.Random(3)
    for number in range(12):
        try_once(pair, rng, f"d{number}", mode[0])
    assert pair.num_torn > 6
    assert pair.num_in_step == 0
    # Each load once: vLLM 53049 asserts of a second report that its request waits
    told = [pair.sink.reports_of("finished_recving", f"d{number}") for number in range(12)]
    assert max(told) == 1


def test_whose_config_it_is() -> None:
    """Made by a scheduler: in every test above. Here none is to be found."""
    config = config_of()
    assert not is_engines_own(object(), config)
    assert "MultiConnector" in str(why_never(config, 1, is_own=False))


def test_a_version_that_does_not_pass_on_what_workers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.integrations.vllm.step_loads.PASSES_WORKER_METADATA", False)
    assert "workers say" in str(why_never(config_of(), 1, is_own=True))
    assert "workers say" in str(why_not_heard())


# ------------------------------------------------------------------ the names in vLLM's pool


class Named:
    """vLLM's own pool, with the blocks of one request under names."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self.pool = BlockPool(8, True, BLOCK, enable_kv_cache_events=True)
        self.request = Request(
            request_id="d",
            prompt_token_ids=list(range(3 * BLOCK)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.blocks = self.pool.get_new_blocks(3)
        self.pool.cache_full_blocks(self.request, self.blocks, 0, 3, BLOCK, 0)
        self.pool.take_events()
        unproven = UnprovenKV.of(self.pool)
        assert unproven is not None
        self.unproven = unproven
        self.table = tuple(block.block_id for block in self.blocks)

    def found(self) -> list[bool]:
        hashes = self.request.block_hashes
        return [self.pool.get_cached_block(each, [0]) is not None for each in hashes]


@pytest.mark.parametrize("is_valid", [True, False])
def test_names_are_hidden_until_the_verdict(is_valid: bool) -> None:
    named = Named()
    named.unproven.begin(named.request, (named.table,), 1)
    assert named.found() == [True, False, False]
    named.unproven.end("other", is_valid=False)
    assert named.found() == [True, False, False]
    named.unproven.end("d", is_valid=is_valid)
    assert named.found() == [True, is_valid, is_valid]
    assert [block.block_hash is not None for block in named.blocks] == named.found()
    removed = [event for event in named.pool.take_events() if isinstance(event, BlockRemoved)]
    assert len(removed) == (0 if is_valid else 2)  # a router was told of them when they were named


def test_vllm_may_have_taken_the_names_by_then() -> None:
    """As it does where its policy is to fail."""
    named = Named()
    named.unproven.begin(named.request, (named.table,), 0)
    named.pool.evict_blocks(set(named.table))
    named.unproven.end("d", is_valid=False)
    assert named.found() == [False] * 3
    named.pool.free_blocks(named.blocks)
    assert named.pool.get_num_free_blocks() == 7
    named.pool.get_new_blocks(7)  # every block can be used again


def test_a_pool_that_is_not_as_we_know_it() -> None:
    assert UnprovenKV.of(object()) is None
