"""The prompts that a run sends: built in, from a file, or of a request trace. Every error names the
file and the line.

A trace has one JSON object a line with ``timestamp`` (ms), ``input_length`` and ``output_length``
(tokens), and ``hash_ids``, one for each 512 tokens of input. Equal hash ids stand for equal text
after an equal beginning, so each becomes the same tokens wherever it occurs: prefixes that the
traced requests shared are shared here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from kvxfer.errors import ConfigError
from kvxfer.extras import install

_EncodeText = Callable[[str], Sequence[int]]
_DecodeText = Callable[[Sequence[int]], str]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to come. ``arrival_s``: not before this long after the start of the run."""

    name: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    arrival_s: float = 0.0


# Name, tokens, and how many of them are the beginning of the shared text. Shorter than any block,
# exactly a block of either default side, long. The last two come when others are through: one
# shares a beginning whose length is a multiple of no block size, one is a repetition, fully cached
# by then.
_BUILT_IN = (
    ("tiny", 5, 0),
    ("shared-a", 300, 270),
    ("block-16", 16, 0),
    ("block-32", 32, 0),
    ("block+1", 33, 0),
    ("repeated", 128, 128),
    ("medium", 150, 0),
    ("long", 777, 0),
    ("shared-b", 420, 270),
    ("again", 128, 128),
)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt_token_ids: tuple[int, ...] | None = None
    prompt: str | None = None


def built_in_prompts(vocab_size: int, max_new_tokens: int) -> list[Prompt]:
    """Ten prompts of mixed lengths, the same in every run; some share their beginning."""
    text = _random_ids("shared", max(num_shared for *_, num_shared in _BUILT_IN), vocab_size)
    return [
        Prompt(
            name,
            text[:num_shared] + _random_ids(name, num_tokens - num_shared, vocab_size),
            max_new_tokens,
        )
        for name, num_tokens, num_shared in _BUILT_IN
    ]


def _random_ids(seed: str, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    numbers = random.Random(seed)  # noqa: S311 - the same in every run is the point
    return tuple(numbers.randrange(vocab_size) for _ in range(num_tokens))


def load_prompts(
    path: Path, *, encode: _EncodeText, vocab_size: int, max_new_tokens: int
) -> list[Prompt]:
    """Prompts of a file.

    ``.jsonl``: one object a line, ``{"prompt_token_ids": [...]}`` or ``{"prompt": "text"}``. Any
    other name: plain text, one prompt a line. Empty lines are passed over. Raises ConfigError
    naming file and line.
    """

    def parse(line: str) -> tuple[int, ...]:
        is_json = path.suffix == ".jsonl"
        token_ids = tuple(_read_json_line(line, encode) if is_json else encode(line))
        _check(token_ids, vocab_size)
        return token_ids

    parsed = _parsed_lines("--prompts", path, parse)
    if not parsed:
        raise ConfigError(f"{path}: expected at least one prompt, got an empty file")
    return [Prompt(f"line {number}", token_ids, max_new_tokens) for number, token_ids in parsed]


def _parsed_lines(option: str, path: Path, parse: Callable[[str], _T]) -> list[tuple[int, _T]]:
    """The lines that are not empty, by number."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise ConfigError(f"{option}: {path} cannot be read ({why})") from e
    parsed: list[tuple[int, _T]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                parsed.append((number, parse(line)))
            except (msgspec.MsgspecError, ValueError, RecursionError) as e:
                raise ConfigError(f"{path}:{number}: {e}") from e
    return parsed


def _read_json_line(line: str, encode: _EncodeText) -> Sequence[int]:
    parsed = msgspec.json.decode(line, type=_Line)
    if (parsed.prompt is None) == (parsed.prompt_token_ids is None):
        raise ValueError('expected either "prompt" or "prompt_token_ids", got both or none')
    if parsed.prompt_token_ids is not None:
        return parsed.prompt_token_ids
    return encode(parsed.prompt or "")


def _check(token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        raise ValueError("expected at least one token, got none")
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"expected token ids in [0, {vocab_size}), got {wrong}")


def text_encoder(model: str | None) -> _EncodeText:
    """By the model folder's tokenizer.json, else as UTF-8 bytes. Raises ConfigError."""
    tokenizer = _tokenizer(model)
    if tokenizer is None:
        return lambda text: text.encode()
    return lambda text: list(tokenizer.encode(text).ids)


def text_decoder(model: str | None) -> _DecodeText | None:
    """How token ids become text, by the same file; None without one, or without the package."""
    tokenizer = _tokenizer(model) if find_spec("tokenizers") else None
    return None if tokenizer is None else lambda ids: str(tokenizer.decode(list(ids)))


def _tokenizer(model: str | None) -> Any:  # noqa: ANN401 - the package has no types
    file = Path(model, "tokenizer.json") if model is not None else None
    if file is None or not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise ConfigError(
            f"{file}: expected the package tokenizers to read it, got none; "
            f"{install('engine')}, or give prompt_token_ids"
        ) from e
    try:
        return Tokenizer.from_file(str(file))
    except Exception as e:  # noqa: BLE001 - the package raises Exception itself
        raise ConfigError(f"{file}: {e}") from e


_UNIT_TOKENS = 512
"""Tokens of the traced input that one hash id stands for."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class _TraceLine(msgspec.Struct, frozen=True):
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
    if not 1 <= scale <= _UNIT_TOKENS:
        raise ConfigError(f"--trace-scale: expected 1 to {_UNIT_TOKENS}, got {scale}")
    if not time_scale >= 0:
        raise ConfigError(f"--time-scale: expected at least 0, got {time_scale:g}")
    lines = _parsed_lines("--trace", path, _parse)[:limit]
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


def _parse(text: str) -> _TraceLine:
    line = msgspec.json.decode(text, type=_TraceLine)
    num_units = -(-line.input_length // _UNIT_TOKENS)
    if len(line.hash_ids) != num_units:
        raise ValueError(
            f"hash_ids: expected {num_units} for {line.input_length} tokens, "
            f"got {len(line.hash_ids)}"
        )
    return line


def _tokens(line: _TraceLine, scale: int, vocab_size: int) -> Iterable[int]:
    unit_tokens = _UNIT_TOKENS // scale
    whole = [token for i in line.hash_ids for token in unit(i, unit_tokens, vocab_size)]
    # An empty input, or one that the scale makes empty, still is a request: one token.
    return whole[: line.input_length // scale] or unit(0, 1, vocab_size)


def unit(hash_id: int, num_tokens: int, vocab_size: int) -> list[int]:
    """The tokens that one hash id stands for, the same in every run and on every machine."""
    return list(_random_ids(f"unit {hash_id}", num_tokens, vocab_size))
