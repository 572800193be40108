"""Inputs that are nearly right: mutations of good ones that know how they are built."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

Form = Literal["msgpack", "json", "text", "bytes"]
"""How the good inputs of a decoder are built."""

MOST_NBYTES = 64 << 10
"""Of an input. What decoders do with longer ones is bounded by frame sizes, which others test."""
_DEEP = 600
_NUMBERS = (0, 1, -1, 2**7, 2**15, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_JSON_NUMBERS = (2**64, 10**30, -(10**30), 1e308, 1e-308, float("inf"), float("nan"))
_TEXTS = (
    *("", "x", "\0", " ", "é", "\ud800", "%", "x" * 2000, "0" * 400, "null", "true", "127.0.0.1"),
    *("tcp://127.0.0.1:5700", "tcp://[::1]:1", "tcp://[", "tcp://x:99999999999", "/../..", "-1"),
)
_PIECES = (
    *(b"", b"\0", b"\xff", b"\xc1", b"\xed\xa0\x80", b"%s", b"[", b"]", b"{", b'"', b"=", b","),
    *(b":", b"//", b"@", b"-", b"1e999", b"9" * 400, b"\x91" * _DEEP, b"[" * 1500, b"\xdf" * 5),
    *(b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"),
)


def mutated(chance: random.Random, form: Form, seeds: tuple[bytes, ...]) -> bytes:
    """One input of at most MOST_NBYTES: mostly a good one with up to four parts changed."""
    frame = chance.choice(seeds)
    tree = _parse(form, frame) if chance.random() < 0.9 else None
    if tree is not None:
        others = [each for each in (_parse(form, seed) for seed in seeds) if each is not None]
        box = [tree]
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            _change(chance, form, box, others)
        frame = _write(form, box[0]) or frame
    if tree is None or chance.random() < 0.1:
        for _ in range(chance.randint(1, 4)):
            frame = _damaged(chance, frame)
    return frame[:MOST_NBYTES]


def _parse(form: Form, frame: bytes) -> Any:
    """None for what is no tree, or a deeper one than mutations follow."""
    if form in ("text", "bytes"):
        return None
    try:
        tree = json.loads(frame) if form == "json" else msgspec.msgpack.decode(frame)
        return _copied(tree)  # as deep as this goes: Python's limit is below that of decoders
    except (ValueError, RecursionError):
        return None


def _write(form: Form, tree: Any) -> bytes | None:
    try:
        if form == "json":
            return json.dumps(tree).encode(errors="surrogatepass")
        return msgspec.msgpack.encode(tree)
    except (ValueError, OverflowError, TypeError, RecursionError):  # no message can carry it
        return None


def _change(chance: random.Random, form: Form, box: list[Any], others: list[Any]) -> None:
    """Change one node of the tree in ``box``."""
    places = list(_places(box))
    parent, key = chance.choice(places)
    match chance.randrange(6):
        case 0 | 1:
            parent[key] = _value(chance, form)
        case 2:
            other, at = chance.choice(list(_places([chance.choice(others)])))
            parent[key] = _copied(other[at])
        case 3 if parent is not box:
            del parent[key]
        case 4 if isinstance(parent[key], list) and parent[key]:
            # Of what is nested a few, or 5,000 times 5,000 would take minutes to write
            is_flat = not any(isinstance(each, dict | list) for each in parent[key])
            more = (70, 5000) if is_flat and len(parent[key]) < 5000 else ()
            parent[key] = parent[key] * chance.choice((2, 3, *more))
        case 5 if isinstance(parent[key], dict):
            parent[key][chance.choice(("added", "type", "", "x" * 300))] = _value(chance, form)
        case _:
            parent[key] = _near(chance, parent[key])


def _places(box: list[Any]) -> Iterable[tuple[Any, Any]]:
    """Every node below ``box`` as what holds it and where; of a long list the first eight."""
    waiting: list[Any] = [box]
    while waiting:
        parent = waiting.pop()
        keys = list(parent)[:64] if isinstance(parent, dict) else range(min(len(parent), 8))
        for key in keys:
            yield parent, key
            if isinstance(parent[key], dict | list):
                waiting.append(parent[key])


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _value(chance: random.Random, form: Form) -> Any:
    numbers = _NUMBERS + (_JSON_NUMBERS if form == "json" else ())
    plain: tuple[Any, ...] = (None, True, False, 0.5, -1.5, [], {}, *numbers, *_TEXTS)
    if form == "msgpack":
        plain += (b"", b"n" * 16, b"n" * 65, b"\xff" * 1000)
    value = chance.choice(plain)
    if chance.random() < 0.1:
        for _ in range(chance.choice((1, 3, _DEEP))):
            value = [value]
    return value


def _near(chance: random.Random, value: Any) -> Any:
    """A value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + chance.choice((-1, 1, 2**32, -(2**32), value))
    if isinstance(value, float):
        return value * chance.choice((-1, 2, 1e300))
    if isinstance(value, str | bytes):
        text: Any = value
        cut = chance.randrange(len(text) + 1)
        return text[:cut] + (text[cut + 1 :] if chance.random() < 0.5 else text)
    return value


def _damaged(chance: random.Random, frame: bytes) -> bytes:
    at, to = sorted((chance.randrange(len(frame) + 1), chance.randrange(len(frame) + 1)))
    match chance.randrange(6):
        case 0:
            return frame[:at]
        case 1:
            return frame[:at] + frame[to:]
        case 2:
            return frame[:to] + frame[at:]
        case 3:
            return frame[:at] + chance.choice(_PIECES) + frame[at:]
        case 4:
            return frame[:at] + chance.randbytes(chance.randint(1, 9)) + frame[to:]
        case _:
            return frame[:at] + bytes([chance.randrange(256)]) + frame[at + 1 :]
