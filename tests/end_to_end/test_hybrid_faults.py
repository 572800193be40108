"""Models with windows when something is in the way: engines that keep different things, few blocks,
failing and aborted loads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvxfer.engine.config import OnLoadFailure, Role
from tests.end_to_end.harness import OFFER, Pair, prompt
from tests.end_to_end.hybrid import REQUEST_TIMEOUT_S, Bench, Fleet, Shape, Side

MODELS = ("hybrid", "kv-sharing")
KEEPS_ALL = {"disable_hybrid_kv_cache_manager": True}
STEPS = {"max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def shape(model: str, transport: str = "shm") -> Shape:
    return Shape(model, Side(1, 16, "HND"), Side(1, 24, "NHD"), transport)


# ------------------------------------------------------------------ sides that keep other things


@pytest.mark.parametrize("policy", list(OnLoadFailure))
def test_a_sink_that_keeps_all_tokens_refuses_a_source_with_windows(
    fleet: Fleet, policy: OnLoadFailure
) -> None:
    hybrid, lease = shape("hybrid"), {"lease_s": 1.0, "keep_s": 0.3}
    pair = fleet.pair(
        hybrid,
        decode={**KEEPS_ALL, "on_load_failure": policy},
        prefill_kv=lease,
        decode_kv=lease,
    )
    bench = Bench(fleet, hybrid, pair)
    tokens = prompt(175, seed=1)
    params = bench.prefill(tokens).kv_transfer_params
    answer = pair.decode.generate(tokens, 8, params, REQUEST_TIMEOUT_S)
    assert answer.done.failure == "incompatible"
    (load,) = answer.done.loads
    assert "window of model.layers.0.self_attn, model.layers.2.self_attn" in load.detail
    assert "source has 48 tokens, sink has all tokens" in load.detail
    if policy is OnLoadFailure.FAIL:
        assert (answer.done.status, answer.token_ids) == ("FINISHED_ERROR", ())
    else:
        assert answer.done.status == "FINISHED_LENGTH_CAPPED"
        assert answer.token_ids == fleet.single(hybrid, tokens, 8)
    bench.check_all_free()  # the offer that nobody took ends with its lease of 1 s


def test_a_source_whose_layers_see_other_tokens_is_refused(fleet: Fleet) -> None:
    """The weights have another name as well; what layers see is said by its own."""
    plain = Shape(None, Side(1, 16, "HND"), Side(1, 24, "NHD"), "shm")
    pair = Pair(
        fleet.engine(Role.PREFILL, plain, plain.prefill),
        fleet.engine(Role.DECODE, shape("hybrid"), plain.decode),
    )
    answer = pair.run(prompt(60, seed=26))
    assert answer.done.failure == "incompatible"
    (load,) = answer.done.loads
    assert (
        "attention: source has full, sink has 48, full, 48, full; serve the same model"
        in load.detail
    )


def test_parameters_of_another_prompt_are_refused_and_leave_the_offer_alone(fleet: Fleet) -> None:
    """The tables of the load begin at its windows; those of the recomputation do not."""
    bench = Bench(fleet, shape("hybrid"), fleet.pair(shape("hybrid")))
    right, wrong = prompt(260, seed=24), prompt(260, seed=25)
    offered = bench.prefill(right)
    refused = bench.pair.decoded(wrong, offered.kv_transfer_params)
    assert refused.done.failure == "tokens"
    assert refused.token_ids == fleet.single(bench.shape, wrong, 8)
    bench.run(wrong[:220])
    (accepted,) = bench.decode_all([(right, offered)])
    assert accepted.decode.done.num_external_tokens == 259
    bench.check_all_free()


@pytest.mark.parametrize("model", MODELS)
def test_a_sink_with_windows_takes_them_from_a_source_that_keeps_all(
    fleet: Fleet, model: str
) -> None:
    """175 tokens: what follows looks at those from 127 on, the sink keeps from 120, and nothing is
    missing at the source, so a hit of 144 is blocks 4 (from 96: gone) and 5, but one of 168 is 5
    and 6.
    """
    bench = Bench(fleet, shape(model), fleet.pair(shape(model), prefill={**KEEPS_ALL, **STEPS}))
    answer = bench.run(prompt(175, seed=2))
    assert answer.window_starts == ({0}, {0, 120})
    assert answer.incomplete == set()
    assert answer.decode.kv_nbytes == (2 * 174 + 2 * 54) * bench.shape.token_nbytes
    # Where the source has let go of the start of block 3, which is 72, here it has not.
    whole = bench.run(prompt(137, seed=3))
    assert (whole.window_starts, whole.incomplete) == (({0}, {0, 72}), set())
    hits = bench.run(prompt(137, seed=3)[:125] + prompt(9, seed=4)).hits
    assert hits == (112, 120)
    bench.check_all_free()


# ------------------------------------------------------------------ few blocks


@pytest.mark.parametrize("model", MODELS)
def test_a_long_prompt_fits_where_only_its_windows_do(fleet: Fleet, model: str) -> None:
    """701 tokens and the answer take 45 blocks of 16, or 30 of 24, in the group without windows;
    all of them in both groups would be 90 and 60.
    """
    for _ in range(2):  # the second time with everything in use before
        bench = Bench(
            fleet,
            shape(model),
            fleet.pair(
                shape(model),
                prefill={"num_blocks": 56, **STEPS},
                decode={"num_blocks": 38, **STEPS},
            ),
        )
    for seed in (5, 6):
        bench.run(prompt(701, seed))
    bench.check_all_free()


@pytest.mark.parametrize("model", MODELS)
def test_an_offer_keeps_its_windows_while_other_requests_take_what_was_dropped(
    fleet: Fleet, model: str
) -> None:
    """Offered requests that go on for 40 tokens at the source, so that their own windows are far
    behind the offer's end; others in between and after use every free block several times.
    """
    bench = Bench(
        fleet, shape(model), fleet.pair(shape(model), prefill={"num_blocks": 80, **STEPS})
    )
    engine = bench.pair.prefill
    prompts = [prompt(num, seed=7) for num in (137, 150, 175)]
    others = [prompt(60, seed) for seed in range(100, 130)]
    offered = [engine.submit(tokens, 40, OFFER) for tokens in prompts]
    between = [engine.submit(tokens, 4) for tokens in others[:10]]
    prefilled = [engine.result(request_id, REQUEST_TIMEOUT_S) for request_id in offered]
    for tokens, result in zip(prompts, prefilled, strict=True):
        assert result.token_ids == fleet.single(bench.shape, tokens, 40)
    after = [engine.submit(tokens, 4) for tokens in others[10:]]
    for tokens, request_id in zip(others, between + after, strict=True):
        result = engine.result(request_id, REQUEST_TIMEOUT_S)
        assert result.token_ids == fleet.single(bench.shape, tokens, 4)
    info = engine.info()
    # 20 requests that take 8 blocks each after the offers were done, of what those leave free.
    assert info.num_free_blocks < 20 * 8 // 3
    # Their windows: 137 tokens see from 89 on, 150 from 102, 175 from 127.
    starts = [
        answer.window_starts
        for answer in bench.decode_all(list(zip(prompts, prefilled, strict=True)))
    ]
    assert starts == [({0, 80}, {0, 72}), ({0, 96}, {0, 96}), ({0, 112}, {0, 120})]
    bench.check_all_free()


# ------------------------------------------------------------------ loads that do not end well


@pytest.mark.parametrize(
    ("model", "transport", "faults"),
    [
        ("hybrid", "shm", "read:fail;nth=1"),
        ("kv-sharing", "zmq", "read:fail;nth=1"),
        ("hybrid", "zmq", "chunk:drop"),
        ("states", "shm", "read:fail;nth=1"),
        pytest.param("chunked", "zmq", "read:fail;nth=1", marks=pytest.mark.slow),
    ],
)
def test_a_failed_load_is_computed_from_the_first_token(
    fleet: Fleet, model: str, transport: str, faults: str
) -> None:
    """Its tables begin where the load's windows did; the computation needs, and names, all."""
    of_source = faults.startswith("chunk")
    bench = Bench(
        fleet,
        shape(model, transport),
        fleet.pair(
            shape(model, transport),
            decode_kv={"pull_timeout_s": 1.0} if of_source else {},
            prefill_faults=faults if of_source else "",
            decode_faults="" if of_source else faults,
            decode=STEPS,
        ),
    )
    tokens = prompt(137, seed=8)
    params = bench.prefill(tokens).kv_transfer_params
    failed = bench.pair.decode.generate(tokens, 8, params, REQUEST_TIMEOUT_S)
    assert failed.done.failure is not None
    assert failed.done.status == "FINISHED_LENGTH_CAPPED"
    assert failed.token_ids == fleet.single(bench.shape, tokens, 8)
    # A hit of 120 is blocks 3 and 4. Of a load from this source block 3 would be incomplete.
    again = tokens[:125] + prompt(20, seed=9)
    result = bench.plain(bench.pair.decode, again)
    assert result.done.num_cached_tokens == 120
    if not of_source:
        assert bench.run(prompt(301, seed=10)).decode.done.num_external_tokens == 300
    bench.check_all_free()


@pytest.mark.parametrize(
    ("model", "transport"),
    [
        ("hybrid", "zmq"),
        ("kv-sharing", "shm"),
        pytest.param("states", "zmq", marks=pytest.mark.slow),
    ],
)
def test_a_load_that_is_aborted_gives_every_block_back(
    fleet: Fleet, model: str, transport: str
) -> None:
    bench = Bench(
        fleet,
        shape(model, transport),
        fleet.pair(
            shape(model, transport),
            prefill={"num_blocks": 140, **STEPS},
            prefill_kv={"chunk_nbytes": 65536},
            decode_kv={"chunk_nbytes": 65536},
            decode_faults="read:slow=500ms",
        ),
    )
    decode = bench.pair.decode
    for number, delay_s in enumerate((0.0, 0.03, 0.1, 0.2)):
        tokens = prompt(400, seed=20 + number)
        params = bench.prefill(tokens).kv_transfer_params
        request_id = decode.submit(tokens, 8, params)
        time.sleep(delay_s)
        decode.abort(request_id)
        assert decode.result(request_id, REQUEST_TIMEOUT_S).done.status == "FINISHED_ABORTED"
    bench.check_all_free()
    bench.run(prompt(60, seed=30))
    bench.check_all_free()
