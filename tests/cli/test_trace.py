"""A trace becomes prompts: lengths, shared prefixes and arrivals by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.cli.prompts import Prompt, load_trace, unit
from kvxfer.errors import ConfigError

EXCERPT = Path(__file__).parents[1] / "data" / "conversation_trace_excerpt.jsonl"
LINES = """\
{"timestamp": 1000, "input_length": 1000, "output_length": 320, "hash_ids": [0, 7]}
{"timestamp": 4000, "input_length": 1536, "output_length": 9, "hash_ids": [0, 7, 8]}

{"timestamp": 2000, "input_length": 512, "output_length": 64, "hash_ids": [9]}
"""


def load(
    path: Path,
    *,
    scale: int = 16,
    time_scale: float = 0.0,
    limit: int | None = None,
    max_new_tokens: int = 32,
) -> list[Prompt]:
    return load_trace(
        path,
        scale=scale,
        time_scale=time_scale,
        limit=limit,
        vocab_size=2048,
        max_new_tokens=max_new_tokens,
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINES)
    return path


def test_lengths_are_divided_and_units_shared(trace: Path) -> None:
    first, second, third = load(trace)
    assert [p.name for p in (first, second, third)] == ["line 1", "line 2", "line 4"]
    assert [len(p.token_ids) for p in (first, second, third)] == [62, 96, 32]
    assert first.token_ids == (*unit(0, 32, 2048), *unit(7, 32, 2048)[:30])
    assert second.token_ids[:62] == first.token_ids
    assert third.token_ids == tuple(unit(9, 32, 2048))
    # 320/16, at least one, 64/16
    assert [p.max_new_tokens for p in (first, second, third)] == [20, 1, 4]
    assert [p.max_new_tokens for p in load(trace, max_new_tokens=8)] == [8, 1, 4]


def test_scale_one_keeps_the_lengths(trace: Path) -> None:
    assert [len(p.token_ids) for p in load(trace, scale=1)] == [1000, 1536, 512]


def test_a_scale_that_does_not_divide_the_unit(trace: Path) -> None:
    # units of 512 // 100 = 5 tokens; 1000 // 100 = 10, 1536 // 100 = 15, 512 // 100 = 5
    assert [len(p.token_ids) for p in load(trace, scale=100)] == [10, 15, 5]


def test_arrivals(trace: Path) -> None:
    assert [p.arrival_s for p in load(trace)] == [0, 0, 0]
    scaled = load(trace, time_scale=0.5)
    assert [(p.name, p.arrival_s) for p in scaled] == [
        *(("line 1", 0.0), ("line 4", 0.5), ("line 2", 1.5)),
    ]


def test_limit(trace: Path) -> None:
    assert [p.name for p in load(trace, limit=2, time_scale=1)] == ["line 1", "line 2"]


def test_units_are_the_same_everywhere() -> None:
    assert unit(7, 5, 2048) == [416, 382, 961, 1512, 62]
    assert unit(8, 5, 2048) != unit(7, 5, 2048)


def test_the_excerpt() -> None:
    prompts = load(EXCERPT)
    assert len(prompts) == 40
    # every request of this trace begins with the same system prompt
    assert len({prompt.token_ids[:32] for prompt in prompts}) == 1
    assert len({prompt.token_ids[:64] for prompt in prompts}) < 40
    assert max(len(prompt.token_ids) for prompt in prompts) <= 9000 // 16


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{}", "t.jsonl:1: Object missing required field `timestamp`"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "t.jsonl:1: hash_ids: expected 2 for 513 tokens, got 1",
        ),
        (
            '{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": []}',
            "t.jsonl:1: Expected `int` >= 0 - at `\\$.input_length`",
        ),
        ("", "t.jsonl: expected at least one request, got an empty file"),
        ('{"x": ' + "[" * 100_000, "t.jsonl:1: maximum recursion depth exceeded"),
    ],
    ids=["nothing", "hash ids", "a negative length", "no request", "nested too deep"],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "t.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path / "t.jsonl")


def test_scales_that_cannot_be(trace: Path) -> None:
    for scale in (0, 513):
        with pytest.raises(ConfigError, match=f"--trace-scale: expected 1 to 512, got {scale}"):
            load(trace, scale=scale)
    for time_scale in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="--time-scale: expected at least 0, got"):
            load(trace, time_scale=time_scale)
