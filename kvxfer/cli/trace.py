"""Replay of a request trace: one JSON object a line with ``timestamp`` (ms), ``input_length`` and
``output_length`` (tokens), and ``hash_ids``, one for each 512 tokens of input.

Equal hash ids stand for equal text after an equal beginning, so each becomes the same tokens
wherever it occurs: prefixes that the traced requests shared are shared here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from kvxfer.cli.prompts import Prompt, read_lines
from kvxfer.errors import ConfigError

UNIT_TOKENS = 512
"""Tokens of the traced input that one hash id stands for."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceLine(msgspec.Struct, frozen=True):
    """One traced request; other fields of the line are passed over."""

    timestamp: float
    input_length: Count
    output_length: Count
    hash_ids: tuple[int, ...]


def load_trace(
    path: Path,
    *,
    scale: int,
    time_scale: float,
    limit: int | None,
    vocab_size: int,
    max_new_tokens: int,
) -> list[Prompt]:
    """The first ``limit`` requests of a trace, in order of arrival.

    Lengths are divided by ``scale``; a request asks for its own output length, at most
    ``max_new_tokens``. One second of the trace takes ``time_scale`` seconds; 0: all at once. Raises
    ConfigError naming file and line.
    """
    if not 1 <= scale <= UNIT_TOKENS:
        raise ConfigError(f"--trace-scale: expected 1 to {UNIT_TOKENS}, got {scale}")
    if not time_scale >= 0:
        raise ConfigError(f"--time-scale: expected at least 0, got {time_scale:g}")
    lines = _numbered(path)[:limit]
    if not lines:
        raise ConfigError(f"{path}: expected at least one request, got an empty file")
    start_ms = min(line.timestamp for _, line in lines)
    prompts = [
        Prompt(
            name=f"line {number}",
            token_ids=tuple(_tokens(line, scale, vocab_size)),
            max_new_tokens=max(1, min(line.output_length // scale, max_new_tokens)),
            arrival_s=(line.timestamp - start_ms) / 1000 * time_scale,
        )
        for number, line in lines
    ]
    return sorted(prompts, key=lambda prompt: prompt.arrival_s)


def _numbered(path: Path) -> list[tuple[int, TraceLine]]:
    lines: list[tuple[int, TraceLine]] = []
    for number, text in enumerate(read_lines(path, "--trace"), start=1):
        if text.strip():
            try:
                lines.append((number, _parse(text)))
            except (msgspec.MsgspecError, ValueError) as e:
                raise ConfigError(f"{path}:{number}: {e}") from e
    return lines


def _parse(text: str) -> TraceLine:
    line = msgspec.json.decode(text, type=TraceLine)
    num_units = -(-line.input_length // UNIT_TOKENS)
    if len(line.hash_ids) != num_units:
        raise ValueError(
            f"hash_ids: expected {num_units} for {line.input_length} tokens, "
            f"got {len(line.hash_ids)}"
        )
    return line


def _tokens(line: TraceLine, scale: int, vocab_size: int) -> Iterable[int]:
    unit_tokens = UNIT_TOKENS // scale
    whole = [token for i in line.hash_ids for token in unit(i, unit_tokens, vocab_size)]
    # An empty input, or one that the scale makes empty, still is a request: one token.
    return whole[: line.input_length // scale] or unit(0, 1, vocab_size)


def unit(hash_id: int, num_tokens: int, vocab_size: int) -> list[int]:
    """The tokens that one hash id stands for, the same in every run and on every machine."""
    numbers = random.Random(f"unit {hash_id}")  # noqa: S311 - the same in every run is the point
    return [numbers.randrange(vocab_size) for _ in range(num_tokens)]
