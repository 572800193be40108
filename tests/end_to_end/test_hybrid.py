"""Models with windows and with shared KV between engines of other blocks, layouts and ranks: what
moves is what the windows need, and nothing is found by prefix that did not move.

Windows have 48 tokens. After a prompt of n tokens n - 1 have moved, and the next token looks at
those from n - 48 on; each side keeps them from the start of its own block that has token n - 48.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvxfer.engine.config import Role
from tests.end_to_end.harness import Pair, prompt
from tests.end_to_end.hybrid import Bench, Fleet, Shape, Side

SHAPES = (
    Shape("hybrid", Side(1, 16, "HND"), Side(2, 32, "NHD"), "shm"),
    Shape("kv-sharing", Side(2, 16, "NHD"), Side(1, 32, "HND"), "zmq"),
    Shape("hybrid", Side(2, 32, "HND"), Side(1, 16, "HND"), "zmq"),
    Shape("kv-sharing", Side(1, 32, "NHD"), Side(2, 16, "HND"), "shm", kv_heads=1),
    Shape("hybrid", Side(2, 16, "HND"), Side(1, 24, "NHD"), "zmq", kv_heads=1),
    Shape("kv-sharing", Side(1, 16, "HND"), Side(1, 24, "NHD"), "shm"),
    Shape("hybrid", Side(1, 24, "NHD"), Side(2, 16, "HND"), "shm"),
    Shape("kv-sharing", Side(1, 24, "NHD"), Side(1, 16, "NHD"), "zmq"),
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def bench(request: pytest.FixtureRequest, fleet: Fleet) -> Bench:
    """Steps of at most 64 tokens: longer prompts take several, and drop blocks on the way."""
    steps = {"max_num_batched_tokens": 64}
    return Bench(fleet, request.param, fleet.pair(request.param, prefill=steps, decode=steps))


# For each pair of block sizes and number of prompt tokens: the first token that moves in a layer
# with a window, and the position of the sink's block that cannot be filled from its start.
Moves = dict[int, tuple[int, int | None]]
FROM_ZERO: Moves = dict.fromkeys((2, 5, 17, 47, 48, 49, 63), (0, None))
MOVES: dict[tuple[int, int], Moves] = {
    # Windows begin at 16 (prompt of 64), 89 (137), 127 (175), 253 (301) and 652 (700).
    (16, 32): {64: (16, 0), 137: (80, 2), 175: (112, 3), 301: (240, 7), 700: (640, None)},
    (32, 16): {
        64: (16, None),
        137: (80, None),
        175: (112, None),
        301: (240, None),
        700: (640, None),
    },
    (16, 24): {64: (16, 0), 137: (80, 3), 175: (120, None), 301: (240, None), 700: (648, None)},
    (24, 16): {64: (16, None), 137: (80, None), 175: (120, 7), 301: (240, None), 700: (648, 40)},
}


def test_only_windows_move_and_blocks_that_lack_their_start_are_told(bench: Bench) -> None:
    """All prompts at once, on pools that could not hold all tokens of all layers."""
    moves = FROM_ZERO | MOVES[bench.shape.blocks]
    prefilled = bench.prefill_all([prompt(num_tokens) for num_tokens in moves])
    for answer in bench.decode_all(prefilled):
        num_moved = answer.decode.done.num_prompt_tokens - 1
        start, position = moves[num_moved + 1]
        assert answer.decode.done.num_external_tokens == num_moved
        # Two layers with a window, two without; layers that share KV move nothing.
        expected = (2 * num_moved + 2 * (num_moved - start)) * bench.shape.token_nbytes
        assert answer.decode.kv_nbytes == expected
        assert answer.incomplete == (set() if position is None else {position})
        source_block, sink_block = bench.shape.blocks
        first_seen = max(0, num_moved - 47)
        assert answer.window_starts == (
            {0, first_seen // source_block * source_block},
            {0, first_seen // sink_block * sink_block},
        )


def test_a_prompt_of_one_token_moves_nothing(bench: Bench) -> None:
    answer = bench.run(prompt(1))
    assert (answer.decode.done.num_external_tokens, answer.decode.kv_nbytes) == (0, 0)


# ------------------------------------------------------------------ blocks that are found by prefix


@dataclass(frozen=True)
class Reuse:
    """A prompt of ``num_tokens`` and its answer of ``num_new``; then a prompt that begins with the
    first ``num_shared`` of them, and what it finds on either side.
    """

    num_tokens: int
    num_new: int
    num_shared: int
    hits: tuple[int, int]


REUSES: dict[tuple[int, int], tuple[Reuse, ...]] = {
    (16, 32): (
        # 69 tokens move, in windows from 16 on: block 0 lacks its first half. A hit of 32 would be
        # block 0, and token 32 would look at all of it.
        Reuse(70, 30, 40, (32, 0)),
        # A hit of 96 is blocks 1 and 2: from 49 on.
        Reuse(70, 30, 100, (64, 96)),
    ),
    (32, 16): (
        # The source has more than is wanted: block 7 is whole, and a hit of 160 is blocks 7 to 9.
        Reuse(175, 8, 165, (160, 160)),
        Reuse(175, 8, 183, (160, 176)),
    ),
    (16, 24): (
        # In windows from 80 on: block 3 has not its first 8. A hit of 120 would be blocks 3 and 4,
        # and token 120 would look at those from 73 on.
        Reuse(137, 8, 125, (112, 0)),
        Reuse(137, 8, 145, (128, 144)),
    ),
    (24, 16): (
        # From 120 on: block 7 has not its first 8. A hit of 160 would be blocks 7 to 9, from 113.
        Reuse(175, 8, 165, (144, 0)),
        Reuse(175, 8, 183, (168, 176)),
    ),
}


@pytest.mark.parametrize("index", [0, 1])
def test_a_block_that_lacks_its_start_is_never_found(bench: Bench, index: int) -> None:
    reuse = REUSES[bench.shape.blocks][index]
    first = prompt(reuse.num_tokens, seed=100 + index)
    said = first + bench.run(first, reuse.num_new).decode.token_ids
    second = said[: reuse.num_shared] + prompt(30, seed=200 + index)
    assert bench.run(second).hits == reuse.hits
    # And what the second one left is right as well.
    bench.run(second + prompt(70, seed=300))


# Four turns of 100, 145, 355 and 368 tokens: what they find on either side, and the first token
# that moves in layers with a window, which begin at 52, 97, 307 and 320.
TURNS: dict[tuple[int, int], tuple[tuple[tuple[int, int], int], ...]] = {
    # The first turn's windows leave block 1 incomplete, the third's block 9: hits end before them,
    # where older blocks are still there.
    (16, 32): (((0, 0), 48), ((96, 0), 96), ((144, 128), 304), ((352, 128), 320)),
    (32, 16): (((0, 0), 48), ((96, 96), 96), ((128, 144), 304), ((352, 352), 352)),
    # The third turn leaves block 12 incomplete; a hit of 360 is blocks 13 and 14.
    (16, 24): (((0, 0), 48), ((96, 96), 96), ((144, 144), 304), ((352, 360), 360)),
    (24, 16): (((0, 0), 48), ((96, 96), 96), ((144, 144), 304), ((336, 352), 352)),
}


def test_every_turn_continues_the_one_before(bench: Bench) -> None:
    tokens = prompt(100, seed=3)
    for num_more, (hits, start) in zip((37, 202, 5, 0), TURNS[bench.shape.blocks], strict=True):
        answer = bench.run(tokens)
        assert answer.hits == hits
        num_moved = 2 * (len(tokens) - 1 - hits[1]) + 2 * (len(tokens) - 1 - start)
        assert answer.decode.kv_nbytes == num_moved * bench.shape.token_nbytes
        tokens += answer.decode.token_ids + prompt(num_more, seed=4)


def test_the_same_prompt_again(bench: Bench) -> None:
    """192 tokens move, in windows from 144 on, or from 145 on if that were enough: for blocks of 32
    at the sink the one that begins at 128 is incomplete, and nothing is found. The others have
    all 192.
    """
    tokens = prompt(193, seed=5)
    assert bench.run(tokens).hits == (0, 0)
    again = bench.run(tokens)
    if bench.shape.blocks == (16, 32):
        assert again.hits == (192, 0)
        assert again.decode.kv_nbytes == (2 * 192 + 2 * 48) * bench.shape.token_nbytes
    else:
        assert again.hits == (192, 192)
        assert again.decode.kv_nbytes == 0


def test_everything_is_given_back(bench: Bench) -> None:
    bench.check_all_free()


# ------------------------------------------------------------------ blocks larger than the window


def test_an_incomplete_block_that_decoding_fills_is_not_found_either(fleet: Fleet) -> None:
    """Blocks of 8 at the source and 64 at the sink: one block of the sink is more than a window."""
    shape = Shape("hybrid", Side(1, 8, "HND"), Side(1, 64, "NHD"))
    more = {"num_blocks": 100}
    bench = Bench(fleet, shape, fleet.pair(shape, prefill=more, decode=more))
    # Windows from 72 on, in block 1, which the answer fills up.
    answer = bench.run(prompt(120, seed=6), 20)
    assert answer.incomplete == {1}
    said = prompt(120, seed=6) + answer.decode.token_ids
    assert bench.run(said[:130] + prompt(20, seed=7)).hits == (120, 0)
    # From 88 on; a hit of 128 is block 1, and token 128 would look at those from 81 on.
    answer = bench.run(prompt(140, seed=8))
    assert answer.incomplete == {1}
    assert bench.run(prompt(140, seed=8)[:135] + prompt(20, seed=9)).hits == (128, 0)
    bench.check_all_free()


# ------------------------------------------------------------------ an engine that is both


@pytest.mark.parametrize("model", ["hybrid", "kv-sharing"])
def test_what_was_loaded_is_offered_in_turn(fleet: Fleet, model: str) -> None:
    """From an engine with blocks of 16 to one with 24, and from there to one with 16. In the middle
    the first 8 tokens of block 3 are missing in layers with a window.
    """
    shape = Shape(model, Side(1, 16, "HND"), Side(1, 24, "NHD"))
    back = Shape(model, Side(1, 24, "NHD"), Side(1, 16, "HND"), "zmq")
    kv = {"transport": "auto"}
    first = fleet.engine(Role.PREFILL, shape, shape.prefill)
    both = fleet.engine(Role.BOTH, shape, shape.decode, kv=kv, more={"num_blocks": 60})
    last = fleet.engine(Role.DECODE, back, back.decode)
    there, onward = Bench(fleet, shape, Pair(first, both)), Bench(fleet, back, Pair(both, last))
    tokens = prompt(137, seed=10)
    answer = there.run(tokens)
    assert answer.incomplete == {3}
    # 144 are known in the middle. What follows 185 tokens looks at those from 137 on: held there
    # from 120, wanted from 128.
    longer = tokens + answer.decode.token_ids + prompt(40, seed=11)
    turn = onward.run(longer)
    assert turn.hits == (144, 0)
    assert turn.decode.kv_nbytes == (2 * 184 + 2 * 56) * back.token_nbytes
    # Nothing is known in the middle, because a hit of 120 would begin with block 3, and nothing at
    # the end, whose windows began at 128: computed and offered.
    assert onward.run(tokens[:125] + prompt(12, seed=12)).hits == (0, 0)
    there.check_all_free()
    onward.check_all_free()


# ------------------------------------------------------------------ chunks in place of windows


CHUNKED = (
    Shape("chunked", Side(1, 16, "HND"), Side(2, 32, "NHD"), "shm"),
    Shape("chunked", Side(2, 24, "NHD"), Side(1, 16, "HND"), "zmq"),
    Shape("chunked", Side(4, 32, "HND"), Side(1, 16, "NHD"), "shm", kv_heads=2),
    Shape("chunked", Side(1, 16, "NHD"), Side(4, 24, "HND"), "zmq"),
)
QUICK = 1


@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=[pytest.mark.slow] * (i >= QUICK)) for i, s in enumerate(CHUNKED)],
    ids=str,
)
def test_only_the_last_chunk_moves(fleet: Fleet, shape: Shape) -> None:
    """Chunks of 48 tokens, steps of at most 64; 16 prompts at once, then turns that find them."""
    steps = {"max_num_batched_tokens": 64}
    bench = Bench(fleet, shape, fleet.pair(shape, prefill=steps, decode=steps))
    lengths = (2, 17, 47, 48, 49, 50, 63, 64, 65, 95, 96, 97, 98, 137, 145, 301)
    prefilled = bench.prefill_all([prompt(n) for n in lengths])
    for n, answer in zip(lengths, bench.decode_all(prefilled), strict=True):
        begin = (n - 1) // 48 * 48  # of the chunk of the token that decode computes
        held, kept = (begin // block * block for block in shape.blocks)
        start = min(max(held, kept), n - 1)
        moved = 2 * (n - 1) + 2 * (n - 1 - start)
        assert answer.decode.kv_nbytes == moved * shape.token_nbytes
        assert answer.incomplete == ({kept // shape.blocks[1]} if kept < start else set())
    tokens = prompt(100, seed=3)
    for num_more in (37, 202, 0):
        answer = bench.run(tokens)
        tokens += answer.decode.token_ids + prompt(num_more, seed=4)
    # 145 tokens are known, of which 96 to 144 begin a chunk, and 144 end one.
    assert min(bench.run(tokens[:345]).hits) >= 288
    bench.check_all_free()
