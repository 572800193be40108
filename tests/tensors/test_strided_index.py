"""The rows of dense pieces: as long as the layouts allow, and where they lie by hand."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from kvxfer.tensors.strided_index import Piece, token_pieces, write_piece
from kvxfer.transfer.plan import DenseOrder, Tile
from tests.tensors.strided_cases import tile

# (source layout, source tokens, sink layout, sink tokens) -> bytes of a row at the source
ROWS = [
    ("HND", 16, "HND", 16, 16 * 8 * 256),  # whole blocks
    ("NHD", 16, "NHD", 16, 16 * 8 * 256),
    ("NHD", 16, "NHD", 24, 16 * 8 * 256),  # token-major bytes do not know blocks
    ("HND", 16, "HND", 32, 16 * 256),  # the tokens that both blocks share
    ("HND", 24, "HND", 16, 8 * 256),
    ("HND", 16, "NHD", 32, 256),  # one head of one token
    ("NHD", 16, "HND", 32, 256),
]


def row_sizes(piece: Piece) -> list[int]:
    """Of the parts that are rows."""
    return [part.element_nbytes for part in piece.parts if not part.shape]


@pytest.mark.parametrize(("layout", "tokens", "sink_layout", "sink_tokens", "row_nbytes"), ROWS)
def test_rows_are_as_long_as_the_layouts_allow(
    layout: str, tokens: int, sink_layout: str, sink_tokens: int, row_nbytes: int
) -> None:
    ids = np.arange(50, 0, -1, dtype=np.int64)
    source = tile(layout, tokens, tokens, 8, 256)
    sink = tile(sink_layout, sink_tokens, sink_tokens, 8, 256)
    reads = write_piece(source, ids, sink.order, 0, 384)
    writes = write_piece(sink, ids, sink.order, 0, 384)
    assert row_sizes(reads) == [row_nbytes]
    assert row_sizes(writes) == [sink_tokens * 8 * 256]
    assert reads.parts[0].starts.size * row_nbytes == 384 * 8 * 256


def test_partial_blocks_are_parts_of_their_own() -> None:
    ids = np.array([4, 9, 2], dtype=np.int64)
    hnd = tile("HND", 16, 16, 2, 8)
    piece = write_piece(hnd, ids, hnd.order, 14, 35)
    # Tokens 14, 15 of block 4, all of block 9, tokens 0..2 of block 2;
    # blocks of 256 bytes, heads of 128.
    got = [
        (rows.dense_lo, rows.element_nbytes, rows.starts.tolist())
        for rows in piece.parts
        if not rows.shape
    ]
    assert got == [
        (0, 16, [4 * 256 + 112, 4 * 256 + 128 + 112]),
        (32, 256, [9 * 256]),
        (288, 24, [2 * 256, 2 * 256 + 128]),
    ]
    assert piece.nbytes == 336
    assert piece.contiguous_at is None


def test_neighbouring_blocks_are_one_run() -> None:
    nhd = tile("NHD", 16, 8, 2, 8)
    order = nhd.order
    ids = np.array([5, 6, 7], dtype=np.int64)
    assert write_piece(nhd, ids, order, 3, 40).contiguous_at == 5 * 256 + 3 * 16
    assert write_piece(nhd, ids[::-1].copy(), order, 3, 40).contiguous_at is None
    assert write_piece(nhd, ids, DenseOrder(8, token_major=False), 3, 40).contiguous_at is None


def turned(tokens: int, num_heads: int, inner: int, *, is_apart: bool = True) -> Tile:
    """[head][channel][token], channels of 4 bytes; or HND beside such a side."""
    hnd = tile("HND", tokens, tokens, num_heads, inner)
    if not is_apart:
        return replace(hnd, channel_nbytes=4, stride_channel=4)
    return replace(hnd, stride_token=4, channel_nbytes=4, stride_channel=4 * tokens)


# (source tokens, sink tokens) -> bytes of a row at the source, of 8 heads of 64 channels of 4 bytes
CHANNEL_ROWS = [
    (16, 16, 16 * 8 * 256),  # whole blocks
    (16, 64, 16 * 4),
    (128, 32, 32 * 4),
    (32, 128, 32 * 4),
    (96, 64, 32 * 4),
]


@pytest.mark.parametrize(("source_tokens", "sink_tokens", "row_nbytes"), CHANNEL_ROWS)
def test_rows_of_channels_apart(source_tokens: int, sink_tokens: int, row_nbytes: int) -> None:
    ids = np.arange(50, 0, -1, dtype=np.int64)
    source, sink = turned(source_tokens, 8, 256), turned(sink_tokens, 8, 256)
    reads = write_piece(source, ids, sink.order, 0, 384)
    writes = write_piece(sink, ids, sink.order, 0, 384)
    assert row_sizes(reads) == [row_nbytes]
    assert row_sizes(writes) == [sink_tokens * 8 * 256]
    assert len(reads.parts) == len(writes.parts) == 1


@pytest.mark.parametrize("span", [(0, 384), (13, 384), (13, 379), (40, 41)])
@pytest.mark.parametrize("source_is_apart", [False, True])
@pytest.mark.parametrize("sink_is_apart", [False, True])
def test_addresses_are_not_as_many_as_channels(
    source_is_apart: bool, sink_is_apart: bool, span: tuple[int, int]
) -> None:
    """8 bytes of address for a channel of 4 would be more to read than the channels."""
    ids = np.arange(50, 0, -1, dtype=np.int64)
    source = turned(24, 8, 256, is_apart=source_is_apart)
    sink = turned(64, 8, 256, is_apart=sink_is_apart)
    for side in (source, sink):
        piece = write_piece(side, ids, sink.order, *span)
        num_addresses = sum(rows.starts.size for rows in piece.parts)
        assert num_addresses <= (span[1] - span[0]) * 8 + 8 * 64 * len(piece.parts)
        assert piece.nbytes == (span[1] - span[0]) * 8 * 256


def test_a_clipped_block_by_hand() -> None:
    """Tokens 1, 2 of block 3 of 4 tokens, one head of two channels."""
    side = turned(4, 1, 8)
    (rows,) = write_piece(side, np.array([3], dtype=np.int64), side.order, 1, 3).parts
    assert not rows.shape
    # A block is 32 bytes, a channel's tokens 16: [c0 t1 t2] [c1 t1 t2]
    assert (rows.element_nbytes, rows.starts.tolist()) == (8, [3 * 32 + 4, 3 * 32 + 16 + 4])


def test_the_order_of_a_tile() -> None:
    assert turned(32, 2, 8).order == DenseOrder(32, token_major=False, channel_nbytes=4)
    assert turned(32, 2, 8, is_apart=False).order == DenseOrder(32, token_major=False)
    assert tile("HND", 32, 16, 2, 8).order == DenseOrder(16, token_major=False)
    assert tile("NHD", 32, 32, 2, 8).order == DenseOrder(32, token_major=True)


def test_pieces_end_where_blocks_end() -> None:
    hnd16, nhd24 = tile("HND", 16, 16, 2, 8), tile("NHD", 24, 24, 2, 8)
    # 16 bytes a token; 100 tokens hold two times lcm(16, 24) = 48.
    got = list(token_pieces(hnd16, nhd24, 5, 300, piece_nbytes=1600))
    assert got == [(5, 96), (96, 192), (192, 288), (288, 300)]
    assert list(token_pieces(hnd16, nhd24, 0, 30, piece_nbytes=16 * 25)) == [(0, 24), (24, 30)]
    assert list(token_pieces(hnd16, nhd24, 0, 3, piece_nbytes=1)) == [(0, 1), (1, 2), (2, 3)]
    assert list(token_pieces(hnd16, nhd24, 7, 7)) == []
