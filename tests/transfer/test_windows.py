"""What windows keep and what moves: against two engines that drop their blocks token by token."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.transfer.layout import Region
from kvxfer.transfer.windows import (
    Clipped,
    Keeping,
    Missing,
    Whole,
    edge_ids,
    group_keepings,
    group_move,
    held_ids,
    may_clip,
)
from tests.builders import EngineShape, build_manifest
from tests.transfer.naive_windows import kept_tokens, simulated, visible_tokens

WINDOWS = (None, 1, 2, 5, 7, 16, 23, 64)
BLOCKS = (1, 2, 3, 4, 6, 8)
KEEPINGS = [
    Keeping(block_tokens, window, is_chunk=is_chunk)
    for window, block_tokens, is_chunk in product(WINDOWS, BLOCKS, (False, True))
    if window in (5, 16) or not is_chunk
]


@pytest.mark.parametrize(
    ("num_computed", "window", "block_tokens", "expected"),
    [
        (100, None, 16, 0),
        (0, 4, 16, 0),
        (47, 48, 16, 0),
        (48, 48, 16, 0),  # the next token, 48, sees 1 to 48
        (63, 48, 16, 16),  # token 63 sees 16 to 63
        (62, 48, 16, 0),  # token 62 sees 15
        (100, 48, 16, 48),
        (100, 48, 32, 32),
        (100, 48, 24, 48),
        (96, 1, 16, 96),  # only itself
        (95, 1, 16, 80),
        (10, 1000, 8, 0),
    ],
)
def test_kept_start(
    num_computed: int, window: int | None, block_tokens: int, expected: int
) -> None:
    assert Keeping(block_tokens, window).kept_start(num_computed) == expected


def test_the_edge_is_what_the_step_of_the_last_offered_token_drops() -> None:
    for keeping, num_offered in product(KEEPINGS, range(1, 40)):
        before, after = (
            {token // keeping.block_tokens for token in kept_tokens(number, keeping)}
            for number in (num_offered - 1, num_offered)
        )
        before.add((num_offered - 1) // keeping.block_tokens)  # that of the last token itself
        assert set(keeping.edge(num_offered)) == before - after


def test_edge_ids_by_group() -> None:
    keepings = {0: Keeping(16), 1: Keeping(16, 32), 2: Keeping(16, 33)}
    tables = [[5, 6, 7, 8, 9, 10]] * 4  # of group 3 nothing is known
    # Of 95 tokens the last sees 63 to 94 through 32; the next one will see 64 to 95.
    assert edge_ids(tables, keepings, 95) == ((), (-1, -1, -1, 8), (), ())
    assert edge_ids(tables, keepings, 96) == ((), (), (-1, -1, -1, 8), ())
    assert edge_ids(tables, keepings, 94) == edge_ids(tables, keepings, 97) == ((),) * 4


def test_kept_start_is_what_dropping_token_by_token_leaves() -> None:
    for keeping, num_computed in product(KEEPINGS, range(0, 40, 3)):
        start = keeping.kept_start(num_computed)
        assert kept_tokens(num_computed, keeping) == set(range(start, num_computed))


def test_chunks_by_hand() -> None:
    k16, k24, k32 = (Keeping(tokens, 48, is_chunk=True) for tokens in (16, 24, 32))
    assert [k32.kept_start(n) for n in (47, 48, 95, 96)] == [0, 32, 32, 96]
    # 97 offered: token 96 begins a chunk, and needs nothing before it
    assert group_move(0, 96, 97, sink=k16, source=k16) == Whole(96, 96)
    # 96 offered: token 95 is computed again, and sees 48 to 95; the source holds the chunk that
    # an engine with 96 tokens lets go of
    assert group_move(0, 95, 96, sink=k16, source=k16) == Whole(48, 95)
    assert k16.edge(96) == range(3, 6)
    assert held_ids(((1, 2, 3, 4, 5, 6),), {0: k16}, 96) == ((-1, -1, -1, 4, 5, 6),)
    assert edge_ids(((1, 2, 3, 4, 5, 6),), {0: k16}, 96) == ((-1, -1, -1, 4, 5, 6),)
    # blocks of 32 do not begin with each chunk: the sink's first kept block has 32 to 63
    assert group_move(0, 70, 71, sink=k32, source=k16) == Clipped(48, 70, 1)
    assert group_move(0, 70, 71, sink=k32, source=k24) == Clipped(48, 70, 1)
    assert group_move(0, 70, 71, sink=k16, source=k32) == Whole(48, 70)
    assert str(k16) == "chunks of 48 tokens in blocks of 16"


def test_who_keeps_a_chunk_keeps_no_window_and_the_reverse() -> None:
    """What an engine includes, it has for every next token."""
    kinds = [Keeping(1), *(Keeping(1, w, is_chunk=c) for w in (2, 3, 4, 6) for c in (False, True))]
    for source, sink in product(kinds, kinds):
        holds = all(visible_tokens(n, sink) <= visible_tokens(n, source) for n in range(14))
        assert source.includes(sink) == holds, (source, sink)


def test_a_move_is_whole_clipped_or_missing() -> None:
    k16, k24, k32 = (Keeping(tokens, 48) for tokens in (16, 24, 32))
    # 101 offered: token 100 is computed again, and sees 53 to 100.
    assert group_move(0, 100, 101, sink=k16, source=k32) == Whole(48, 100)
    assert group_move(0, 100, 101, sink=k32, source=k16) == Clipped(48, 100, 1)
    assert group_move(64, 100, 101, sink=k32, source=k16) == Whole(64, 100)
    assert group_move(40, 100, 101, sink=k32, source=k16) == Clipped(48, 100, 1)
    assert group_move(0, 100, 101, sink=k24, source=k16) == Whole(48, 100)
    # 121 offered: token 120 sees 73 to 120
    assert group_move(0, 120, 121, sink=k32, source=k24) == Clipped(72, 120, 2)
    assert group_move(0, 120, 121, sink=k24, source=k16) == Whole(72, 120)
    assert group_move(0, 120, 121, sink=k16, source=k24) == Clipped(72, 120, 4)
    # who keeps everything gives and takes everything
    assert group_move(16, 100, 101, sink=k32, source=Keeping(16)) == Whole(32, 100)
    assert group_move(16, 100, 101, sink=Keeping(16), source=Keeping(32)) == Whole(16, 100)
    assert group_move(0, 100, 101, sink=Keeping(8), source=k16) == Missing(0, 48, Keeping(8), k16)
    # only a part is wanted, whose window the source has let go of
    assert group_move(0, 80, 201, sink=k16, source=k16) == Missing(33, 144, k16, k16)
    # a window of one token needs none
    one = Keeping(16, 1)
    assert group_move(0, 96, 97, sink=one, source=one) == Whole(96, 96)
    assert group_move(0, 100, 101, sink=one, source=one) == Whole(96, 100)
    assert group_move(0, 100, 101, sink=one, source=Keeping(1, 1)) == Clipped(100, 100, 6)


def test_what_is_missing_is_told_with_layer_tokens_and_blocks() -> None:
    missing = Missing(0, 48, Keeping(24), Keeping(16, 48))
    assert missing.explain("layers.3") == (
        "layers.3: expected tokens from 0 on, which the sink needs (it keeps everything in blocks "
        "of 24); the source has let go of those before 48 (it keeps a window of 48 tokens in "
        "blocks of 16)"
    )


windows = st.one_of(st.none(), st.integers(1, 40))
blocks = st.integers(1, 12)
keepings = st.builds(
    lambda tokens, window, is_chunk: Keeping(tokens, window, is_chunk=is_chunk and bool(window)),
    *(blocks, windows, st.booleans()),
)


@given(keepings, keepings, st.integers(1, 70), st.data())
@settings(max_examples=300)
def test_moves_are_those_of_the_simulation(
    sink: Keeping, source: Keeping, offered: int, data: st.DataObject
) -> None:
    hi = data.draw(st.integers(1, offered), "hi")
    lo = data.draw(st.integers(0, hi - 1), "lo")
    assert group_move(lo, hi, offered, sink=sink, source=source) == simulated(
        lo, hi, offered, sink, source
    )


def test_moves_over_a_grid() -> None:
    for bk, bs, window, more, offered in product(
        (1, 2, 4, 6), (1, 3, 4, 8), (1, 2, 5, 9), (0, 1, 4), range(2, 24, 3)
    ):
        sink, source = Keeping(bk, window), Keeping(bs, window + more)
        for lo, hi in {(0, offered - 1), (0, offered), (offered // 2, offered)}:
            got = group_move(lo, hi, offered, sink=sink, source=source)
            assert got == simulated(lo, hi, offered, sink, source)
            # Whoever keeps at least the sink's window can always serve it.
            assert not isinstance(got, Missing)


def test_may_clip_is_exact() -> None:
    for bk, bs, window, more in product(range(1, 9), range(1, 9), (1, 3, 8, 13), range(0, 9)):
        sink, source = Keeping(bk, window), Keeping(bs, window + more)
        clips = any(
            isinstance(group_move(0, offered - 1, offered, sink=sink, source=source), Clipped)
            for offered in range(2, 2 + window + more + 2 * bk * bs)
        )
        assert clips == may_clip(sink, source), (sink, source)
    for bk, bs, chunk in product(range(1, 10), range(1, 10), range(1, 14)):
        sink, source = (Keeping(tokens, chunk, is_chunk=True) for tokens in (bk, bs))
        clips = any(
            isinstance(group_move(0, n - 1, n, sink=sink, source=source), Clipped)
            for n in range(2, 2 + bk * bs * chunk, 1 if chunk == 1 else chunk - 1)
        )
        assert clips <= may_clip(sink, source), (sink, source)
    assert not may_clip(Keeping(32, 8), Keeping(16))
    assert not may_clip(Keeping(32), Keeping(16, 8))


def test_ids_of_blocks_that_were_let_go_do_not_stay_in_the_table() -> None:
    table = ((3, 1, 4, 15, 9, 2), (6, 5, 35, 8, 97, 93), (7, 7))
    keepings = {0: Keeping(16), 1: Keeping(16, 48), 5: Keeping(16, 1)}
    # 81 offered: token 80 sees 33 to 80, so blocks 0 and 1 are gone.
    assert held_ids(table, keepings, 81) == (
        (3, 1, 4, 15, 9, 2),
        (-1, -1, 35, 8, 97, 93),
        (7, 7),
    )
    assert held_ids(((1,),), {0: Keeping(16, 4)}, 100) == ((-1,),)  # as far as it has grown
    assert held_ids(((1,),), {0: Keeping(16, 4)}, 0) == ((1,),)


def test_groups_agree_on_what_they_keep() -> None:
    regions = build_manifest(EngineShape(groups=(0, 1), windows=(None, 48))).ranks[0].regions
    assert group_keepings(regions) == {0: Keeping(16), 1: Keeping(16, 48)}
    assert group_keepings(()) == {}
    mixed: tuple[Region, ...] = (
        *regions,
        *build_manifest(EngineShape(windows=(4,), block_tokens=8)).ranks[0].regions,
    )
    with pytest.raises(ValueError, match=r"group 0: expected all layers to keep everything in bl"):
        group_keepings(mixed)
