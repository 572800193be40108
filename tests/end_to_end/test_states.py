"""A model that keeps states between engines of other ranks, blocks and layouts: what one engine
says, and the source's states bit for bit. The layer computes in whole numbers and never forgets, so
one wrong bit of a state is another answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.connector.params import early_params, mint_request
from tests.end_to_end.harness import OFFER, prompt
from tests.end_to_end.hybrid import REQUEST_TIMEOUT_S, Bench, Fleet, Shape, Side

STEPS = {"max_num_batched_tokens": 64}
IN_PLACE = {"enable_prefix_caching": False}
SHAPES = (
    Shape("states", Side(1, 16, "HND"), Side(2, 32, "NHD"), "shm"),
    Shape("states", Side(2, 24, "NHD"), Side(1, 16, "HND"), "zmq"),
    Shape("states", Side(4, 16, "HND"), Side(1, 24, "NHD"), "zmq", kv_heads=2),
    Shape("states", Side(1, 32, "NHD"), Side(4, 16, "HND"), "shm"),
    Shape("states", Side(4, 8, "NHD"), Side(2, 8, "NHD"), "shm"),
)
LENGTHS = (1, 2, 3, 16, 17, 31, 32, 33, 48, 49, 64, 65, 96, 97, 145, 301)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def bench_of(fleet: Fleet, shape: Shape, prefill: Any = None, decode: Any = None) -> Bench:
    sides = (STEPS | (prefill or {}), STEPS | (decode or {}))
    return Bench(fleet, shape, fleet.pair(shape, prefill=sides[0], decode=sides[1]))


@pytest.mark.parametrize(
    "shape",
    [pytest.param(each, marks=[pytest.mark.slow] * (at > 0)) for at, each in enumerate(SHAPES)],
    ids=str,
)
def test_states_move_with_the_rest(fleet: Fleet, shape: Shape) -> None:
    """16 prompts at once, in chunks of at most 64 tokens; then turns that continue them."""
    bench = bench_of(fleet, shape)
    prefilled = bench.prefill_all([prompt(n) for n in LENGTHS])
    for n, answer in zip(LENGTHS, bench.decode_all(prefilled), strict=True):
        assert answer.decode.done.num_external_tokens == n - 1
    # A state is cached where a step, a load or an answer has ended with a block.
    tokens = prompt(96, seed=3)
    for num_more in (40, 111, 0):
        answer = bench.run(tokens)
        tokens += answer.decode.token_ids + prompt(num_more, seed=4)
    hits = bench.run(tokens[:140] + prompt(7, seed=5)).hits
    assert min(hits) >= 96
    bench.check_all_free()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(IN_PLACE, None), pytest.param(None, IN_PLACE, marks=pytest.mark.slow)],
    ids=["to-blocks", "to-one"],
)
def test_one_state_in_place_and_one_in_each_block(
    fleet: Fleet, prefill: dict[str, bool] | None, decode: dict[str, bool] | None
) -> None:
    """A side without a prefix cache keeps one state of a request, which each step writes over."""
    bench = bench_of(fleet, SHAPES[0], prefill, decode)
    bench.decode_all(bench.prefill_all([prompt(n) for n in (2, 32, 33, 150)]))
    bench.check_all_free()


@pytest.mark.parametrize("wire", ["shm", pytest.param("zmq", marks=pytest.mark.slow)])
def test_an_offer_that_grows_opens_its_state_last(fleet: Fleet, wire: str) -> None:
    """Decode has the request while prefill computes its chunks; the state is that of the end."""
    shape = Shape("states", Side(1, 16, "HND"), Side(2, 32, "NHD"), wire)
    small = {"max_num_batched_tokens": 16}
    bench = bench_of(fleet, shape, prefill=small)
    last = bench.prefill(prompt(20)).kv_transfer_params
    assert last is not None
    for seed in (1, 2):
        tokens, name = prompt(301, seed=seed), mint_request()
        decode, prefill = bench.pair.decode, bench.pair.prefill
        given = prefill.submit(tokens, 1, OFFER | {"kvxfer": {"request": name}})
        taken = decode.submit(tokens, 8, early_params(last, name))
        last = prefill.result(given, REQUEST_TIMEOUT_S).kv_transfer_params
        assert last is not None
        result = decode.result(taken, REQUEST_TIMEOUT_S)
        assert result.done.failure is None
        assert result.done.num_external_tokens == 300
        assert result.token_ids == fleet.single(shape, tokens, 8)
