"""Rows of multimodal embeddings among placeholders, and what an encoder may return."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvxfer.tensors.placeholders import (
    gather_mm_placeholders,
    sanity_check_mm_encoder_outputs,
    scatter_mm_placeholders,
)
from tests.helpers import assert_same_bytes

NAN = float("nan")


def test_rows_go_where_the_mask_is_true(device: torch.device) -> None:
    embeds = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    is_embed = torch.tensor([False, True, False, True, False])
    want = torch.tensor([[NAN, NAN], [1.0, 2.0], [NAN, NAN], [3.0, 4.0], [NAN, NAN]])
    got = scatter_mm_placeholders(embeds, is_embed)
    assert got.device.type == device.type
    torch.testing.assert_close(got.cpu(), want, equal_nan=True, rtol=0, atol=0)
    assert_same_bytes(gather_mm_placeholders(got, is_embed), embeds)


def test_without_a_mask_nothing_is_copied() -> None:
    embeds = torch.rand(3, 2)
    assert scatter_mm_placeholders(embeds, None) is embeds
    assert gather_mm_placeholders(embeds, None) is embeds


@given(
    mask=st.lists(st.booleans(), max_size=20),
    width=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_gather_inverts_scatter(mask: list[bool], width: int, dtype: torch.dtype) -> None:
    is_embed = torch.tensor(mask, dtype=torch.bool)
    embeds = torch.rand(sum(mask), width).to(dtype)
    placed = scatter_mm_placeholders(embeds, is_embed)
    assert placed.shape == (len(mask), width)
    rows = iter(embeds)
    for row, used in zip(placed, mask, strict=True):
        if used:
            assert_same_bytes(row, next(rows))
        else:
            assert bool(row.isnan().all())
    assert_same_bytes(gather_mm_placeholders(placed, is_embed), embeds)


MASK = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    ("embeds", "mask", "error", "message"),
    [
        (torch.rand(3, 2), MASK, ValueError, "embeds: expected 2 rows, one for each True of is_em"),
        (
            torch.rand(1, 2),
            MASK,
            ValueError,
            "expected 2 rows, one for each True of is_embed, got ",
        ),
        (
            torch.rand(4),
            MASK,
            ValueError,
            "embeds: expected 2 dimensions [rows, D], got shape (4,)",
        ),
        (
            torch.ones(2, 2).int(),
            MASK,
            TypeError,
            "embeds: expected a floating dtype (it must hold",
        ),
        (
            torch.rand(2, 2),
            MASK.int(),
            TypeError,
            "is_embed: expected a tensor of dtype torch.bool, got torch.int32; convert it",
        ),
        (
            torch.rand(2, 2),
            [True, False, True],
            TypeError,
            "is_embed: expected a tensor of dtype torch.bool, got list; convert it",
        ),
        (
            torch.rand(2, 2),
            MASK[None],
            ValueError,
            "is_embed: expected 1 dimension, got shape (1, 3); pass the mask of one item",
        ),
    ],
)
def test_scatter_refuses(
    embeds: Tensor, mask: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        scatter_mm_placeholders(embeds, mask)


@pytest.mark.parametrize(
    ("rows", "mask", "error", "message"),
    [
        (
            2,
            MASK,
            ValueError,
            "placeholders: expected 3 rows, one for each entry of is_embed, got s",
        ),
        (
            4,
            MASK,
            ValueError,
            "placeholders: expected 3 rows, one for each entry of is_embed, got s",
        ),
        (
            3,
            MASK.long(),
            TypeError,
            "is_embed: expected a tensor of dtype torch.bool, got torch.int64",
        ),
        (3, MASK[None], ValueError, "is_embed: expected 1 dimension, got shape (1, 3)"),
    ],
)
def test_gather_refuses(rows: int, mask: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        gather_mm_placeholders(torch.rand(rows, 2), mask)


@pytest.mark.parametrize(
    ("outputs", "num_items"),
    [
        ([torch.rand(3, 4), torch.rand(5, 4)], 2),
        ((torch.rand(3, 4),), 1),
        (torch.rand(2, 3, 4), 2),
        ([], 0),
    ],
    ids=["list", "tuple", "tensor", "none"],
)
def test_sound_encoder_outputs(outputs: Any, num_items: int) -> None:
    sanity_check_mm_encoder_outputs(outputs, num_items)


@pytest.mark.parametrize(
    ("outputs", "num_items", "error", "message"),
    [
        (
            {"a": torch.rand(1, 2)},
            1,
            TypeError,
            "mm_embeddings: expected a list or tuple of 2-D ten",
        ),
        (None, 0, TypeError, "one 3-D tensor, got NoneType"),
        (
            torch.rand(2, 3),
            2,
            ValueError,
            "expected a 3-D tensor [items, rows, D], got shape (2, 3)",
        ),
        ([torch.rand(2, 3)], 2, ValueError, "expected 2 items, one for each input, got 1"),
        (torch.rand(3, 2, 3), 2, ValueError, "expected 2 items, one for each input, got 3"),
        (
            [torch.rand(2, 3), torch.rand(3)],
            2,
            ValueError,
            "mm_embeddings[1]: expected 2 dimensions",
        ),
        ([[1.0]], 1, TypeError, "mm_embeddings[0]: expected a tensor, got list"),
    ],
    ids=["dict", "none", "2-D", "too few", "too many", "1-D item", "no tensor"],
)
def test_unsound_encoder_outputs_name_the_method(
    outputs: Any, num_items: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        sanity_check_mm_encoder_outputs(outputs, num_items)
    assert "; correct the model's embed_multimodal (formerly get_multimodal_" in str(caught.value)
