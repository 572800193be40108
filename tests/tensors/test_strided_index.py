"""The rows of dense pieces: as long as the layouts allow, and where they lie by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.tensors.strided_index import dense_order, piece_rows, span_ids, token_pieces
from kvxfer.transfer.plan import DenseOrder
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


@pytest.mark.parametrize(("layout", "tokens", "sink_layout", "sink_tokens", "row_nbytes"), ROWS)
def test_rows_are_as_long_as_the_layouts_allow(
    layout: str, tokens: int, sink_layout: str, sink_tokens: int, row_nbytes: int
) -> None:
    ids = np.arange(50, 0, -1, dtype=np.int64)
    source = tile(layout, tokens, tokens, 8, 256)
    sink = tile(sink_layout, sink_tokens, sink_tokens, 8, 256)
    reads = piece_rows(source, span_ids(source, ids, 0, 384), dense_order(sink), 0, 384)
    writes = piece_rows(sink, span_ids(sink, ids, 0, 384), dense_order(sink), 0, 384)
    assert [rows.row_nbytes for rows in reads.rows] == [row_nbytes]
    assert [rows.row_nbytes for rows in writes.rows] == [sink_tokens * 8 * 256]
    assert reads.rows[0].starts.size * row_nbytes == 384 * 8 * 256


def test_partial_blocks_are_parts_of_their_own() -> None:
    ids = np.array([4, 9, 2], dtype=np.int64)
    hnd = tile("HND", 16, 16, 2, 8)
    piece = piece_rows(hnd, ids, dense_order(hnd), 14, 35)
    # Tokens 14, 15 of block 4, all of block 9, tokens 0..2 of block 2;
    # blocks of 256 bytes, heads of 128.
    got = [(rows.dense_lo, rows.row_nbytes, rows.starts.tolist()) for rows in piece.rows]
    assert got == [
        (0, 16, [4 * 256 + 112, 4 * 256 + 128 + 112]),
        (32, 256, [9 * 256]),
        (288, 24, [2 * 256, 2 * 256 + 128]),
    ]
    assert piece.nbytes == 336
    assert piece.contiguous_at is None


def test_neighbouring_blocks_are_one_run() -> None:
    nhd = tile("NHD", 16, 8, 2, 8)
    order = dense_order(nhd)
    ids = np.array([5, 6, 7], dtype=np.int64)
    assert piece_rows(nhd, ids, order, 3, 40).contiguous_at == 5 * 256 + 3 * 16
    assert piece_rows(nhd, ids[::-1].copy(), order, 3, 40).contiguous_at is None
    assert piece_rows(nhd, ids, DenseOrder(8, token_major=False), 3, 40).contiguous_at is None


def test_the_order_of_a_tile() -> None:
    assert dense_order(tile("HND", 32, 16, 2, 8)) == DenseOrder(16, token_major=False)
    assert dense_order(tile("NHD", 32, 32, 2, 8)) == DenseOrder(32, token_major=True)


def test_pieces_end_where_blocks_end() -> None:
    hnd16, nhd24 = tile("HND", 16, 16, 2, 8), tile("NHD", 24, 24, 2, 8)
    # 16 bytes a token; 100 tokens hold two times lcm(16, 24) = 48.
    got = list(token_pieces(hnd16, nhd24, 5, 300, piece_nbytes=1600))
    assert got == [(5, 96), (96, 192), (192, 288), (288, 300)]
    assert list(token_pieces(hnd16, nhd24, 0, 30, piece_nbytes=16 * 25)) == [(0, 24), (24, 30)]
    assert list(token_pieces(hnd16, nhd24, 0, 3, piece_nbytes=1)) == [(0, 1), (1, 2), (2, 3)]
    assert list(token_pieces(hnd16, nhd24, 7, 7)) == []
