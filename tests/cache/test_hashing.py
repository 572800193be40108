"""Block hashes against their bytes written out by hand: lengths, msgpack bytes and chains."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cache import hashing
from kvxfer.cache.hashing import (
    NONE_HASH,
    ExtraKey,
    gen_lora_extra_hash_keys,
    gen_mm_extra_hash_keys,
    gen_prompt_embeds_extra_hash_keys,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    hash_request_tokens,
    init_none_hash,
    need_extra_keys,
    none_hash,
    pack_token_ids,
    sha256,
)

REPOSITORY = Path(__file__).parents[2]
ROOT = none_hash(b"7")
NO_KEYS: tuple[ExtraKey, ...] | None = None


@dataclass(frozen=True)
class Position:
    offset: int
    length: int


@dataclass(frozen=True)
class Feature:
    identifier: str
    mm_position: Position


@dataclass(frozen=True)
class Lora:
    lora_name: str
    lora_path: str


@dataclass(frozen=True)
class Request:
    all_token_ids: Sequence[int]
    mm_features: Sequence[Feature] = ()
    lora_request: Lora | None = None
    cache_salt: str | None = None
    prompt_embeds: Any = None


@dataclass(frozen=True)
class BareRequest:
    all_token_ids: Sequence[int]


def image(identifier: str, offset: int, length: int) -> Feature:
    return Feature(identifier, Position(offset, length))


def plain(data: bytes) -> bytes:
    """sha256 under another identity, so that the path for any hash function runs."""
    return hashlib.sha256(data).digest()


# --- the format ---------------------------------------------------------------------------------


def test_vector_of_two_blocks() -> None:
    # b"7" hashed is the root; tokens 1 2 | 258 4294967295 as uint32 little-endian.
    root = hashlib.sha256(b"7").digest()
    first = hashlib.sha256(root + b"\x01\0\0\0\x02\0\0\0").digest()
    second = hashlib.sha256(first + b"\x02\x01\0\0\xff\xff\xff\xff").digest()
    request = BareRequest([1, 2, 258, 4294967295, 9])
    assert hash_request_tokens(sha256, 2, request, root=root) == [first, second]
    assert hash_block_tokens(sha256, root, [1, 2]) == first
    assert hash_block_tokens(sha256, first, [258, 4294967295]) == second
    # The digits too: a change of the format cannot hide in both sides of a comparison.
    assert first.hex() == "c02322ae8af4941d688a74161cee8d549aec9686086d969b792abd139e684cd7"
    assert second.hex() == "6230beda6261f4d47994a472c422aff405a406ecf6a56017583ddd862eae54cd"


def test_vector_with_every_extra_key() -> None:
    # msgpack by hand: 0x93 array of 3, 0xa4 string of 4, 0xff is -1, 0xaa string of 10.
    packed = b"\x93\x93\xa4lora\xa1a\xa2/p\x93\xa2mm\xa3img\xff\x92\xaacache_salt\xa4salt"
    keys: tuple[ExtraKey, ...] = (("lora", "a", "/p"), ("mm", "img", -1), ("cache_salt", "salt"))
    want = hashlib.sha256(ROOT + b"\x05\0\0\0" + packed).digest()
    assert hash_block_tokens(sha256, ROOT, [5], keys) == want


def test_no_extra_keys_and_empty_ones_add_no_byte() -> None:
    want = hashlib.sha256(ROOT + b"\x05\0\0\0").digest()
    assert hash_block_tokens(sha256, ROOT, [5]) == want
    assert hash_block_tokens(sha256, ROOT, [5], NO_KEYS) == want
    assert hash_block_tokens(sha256, ROOT, [5], ()) == want


def test_roots() -> None:
    assert none_hash(b"0") == hashlib.sha256(b"0").digest()
    assert none_hash(b"") == hashlib.sha256(b"").digest()
    assert len(NONE_HASH) == 32
    assert len({none_hash(None), none_hash(None), NONE_HASH}) == 3


def test_missing_parent_is_the_module_root() -> None:
    want = hashlib.sha256(NONE_HASH + b"\x05\0\0\0").digest()
    assert hash_block_tokens(sha256, None, [5]) == want
    assert hash_request_tokens(sha256, 1, BareRequest([5])) == [want]


IMPORT = "import kvxfer.cache.hashing as h\n"
# Whatever names the root later is one and the same.
SHOW = (
    "from types import SimpleNamespace as N\n"
    "assert h.hash_block_tokens(h.sha256, None, [5]) == h.hash_block_tokens(h.sha256, h.NONE_HASH,"
    " [5])\n"
    "assert h.hash_request_tokens(h.sha256, 1, N(all_token_ids=[5])) == "
    "[h.hash_block_tokens(h.sha256, h.NONE_HASH, [5])]\n"
    "print(h.NONE_HASH.hex(), end='')\n"
)


def run_code(code: str, environ: dict[str, str]) -> str:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONHASHSEED" and not name.startswith("KVXFER_")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=inherited | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("environ", "code", "seed"),
    [
        pytest.param({"PYTHONHASHSEED": "0"}, "", b"0", id="python's"),
        pytest.param({"KVXFER_HASH_SEED": "x", "PYTHONHASHSEED": "0"}, "", b"x", id="ours-first"),
        pytest.param({"PYTHONHASHSEED": "0"}, "h.init_none_hash(b'7')\n", b"7", id="chosen"),
        pytest.param(
            {"PYTHONHASHSEED": "0"},
            "from kvxfer.config import Config\n"
            "h.init_none_hash(Config(hash_seed='\u00e4').hash_seed_bytes)\n"
            "h.init_none_hash(None)\n",
            b"\xc3\xa4",
            id="config's",
        ),
    ],
)
def test_root_of_the_process(environ: dict[str, str], code: str, seed: bytes) -> None:
    assert run_code(IMPORT + code + SHOW, environ) == hashlib.sha256(seed).hexdigest()


def test_root_without_a_seed_is_random() -> None:
    one, other = (
        run_code(IMPORT + SHOW, environ) for environ in ({}, {"PYTHONHASHSEED": "random"})
    )
    assert len(one) == len(other) == 64
    assert one != other


def test_root_that_was_used_stays() -> None:
    used = NONE_HASH
    assert init_none_hash(None) == used
    with pytest.raises(ValueError, match="NONE_HASH: expected to be chosen before it is used"):
        init_none_hash(b"another")
    assert hash_block_tokens(sha256, None, [5]) == hash_block_tokens(sha256, used, [5])
    with pytest.raises(AttributeError, match="no attribute 'NONE_HASHES'"):
        hashing.NONE_HASHES  # type: ignore[attr-defined]  # noqa: B018


def test_vectors_of_the_documentation() -> None:
    """With hashlib and struct alone, as another implementation would read the document."""
    text = (REPOSITORY / "docs" / "protocol.md").read_text()
    row = r"^\| (\w+) \| (\w*) ?\| ([\d ]*?) ?\| (?:`([0-9a-f]+)` )?\| `([0-9a-f]{64})` \|$"
    names: dict[str, bytes] = {}
    for block, parent, token_ids, packed, want in re.findall(row, text, re.MULTILINE):
        tokens = b"".join(struct.pack("<I", int(token)) for token in token_ids.split())
        content = names[parent] + tokens + bytes.fromhex(packed) if parent else b"0"
        names[block] = hashlib.sha256(content).digest()
        assert names[block].hex() == want, block
    assert list(names) == ["root", "a0", "a1", "b1", "c0", "c1", "d0"]

    plain_request = BareRequest(range(1, 9))
    keyed = Request(range(1, 9), [image("img", 2, 4)], Lora("l", "p"), "s")
    root = none_hash(b"0")
    assert root == names["root"]
    assert hash_request_tokens(sha256, 4, plain_request, root=root) == [names["a0"], names["a1"]]
    assert hash_request_tokens(sha256, 4, keyed, root=root) == [names["c0"], names["c1"]]
    lora = (("lora", "l", "p"),)
    assert hash_block_tokens(sha256, names["a0"], [5, 6, 7, 8], lora) == names["b1"]
    assert hash_block_tokens(sha256, root, [0, 258, 1 << 31, (1 << 32) - 1]) == names["d0"]


def test_seeded_chain_is_equal_in_another_process() -> None:
    code = (
        "from types import SimpleNamespace as N\n"
        "r = N(all_token_ids=list(range(32)), cache_salt='s')\n"
        "chain = h.hash_request_tokens(h.sha256, 16, r, root=h.none_hash(b'7'))\n"
        "print(chain[-1].hex(), end='')"
    )
    request = Request(range(32), cache_salt="s")
    assert (
        run_code(IMPORT + code, {}) == hash_request_tokens(sha256, 16, request, root=ROOT)[-1].hex()
    )


# --- the bulk path ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_hashes"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2)]
)
def test_only_full_blocks_are_hashed(num_tokens: int, num_hashes: int) -> None:
    assert len(hash_request_tokens(sha256, 4, BareRequest(range(num_tokens)))) == num_hashes


@st.composite
def requests(draw: st.DrawFn) -> Request:
    token_ids = draw(st.lists(st.integers(0, 2**32 - 1), max_size=40))
    features, start = [], 0
    for name in draw(st.lists(st.sampled_from("abc"), max_size=4)):
        start += draw(st.integers(0, 6))
        length = draw(st.integers(0, 12))
        features.append(image(name, start, length))
        start += length
    lora = draw(st.none() | st.just(Lora("adapter", "/adapter")))
    salt = draw(st.none() | st.sampled_from(["", "salt"]))
    rows = np.arange(draw(st.integers(0, 40)), dtype="<u2").reshape(-1, 1)
    return Request(token_ids, features, lora, salt, draw(st.none() | st.just(rows)))


def naive_keys(request: Request, start: int, end: int) -> tuple[ExtraKey, ...]:
    keys: list[ExtraKey] = []
    if request.lora_request is not None:
        keys.append(("lora", request.lora_request.lora_name, request.lora_request.lora_path))
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if any(start <= token < end for token in range(offset, offset + length)):
            keys.append(("mm", feature.identifier, offset - start))
    if request.cache_salt and start == 0:
        keys.append(("cache_salt", request.cache_salt))
    rows = [] if request.prompt_embeds is None else request.prompt_embeds[:, 0].tolist()
    if inside := [row for token, row in enumerate(rows) if start <= token < end]:
        packed = struct.pack(f"<{len(inside)}H", *inside)
        keys.append(("prompt_embeds", hashlib.sha256(packed).digest()))
    return tuple(keys)


@given(requests(), st.integers(1, 9), st.booleans(), st.integers(0, 40))
def test_bulk_path_is_the_chain(
    request: Request, block_size: int, other_function: bool, num_known: int
) -> None:
    want, parent = [], ROOT
    for start in range(0, len(request.all_token_ids) - block_size + 1, block_size):
        end = start + block_size
        parent = hash_block_tokens(
            sha256, parent, request.all_token_ids[start:end], naive_keys(request, start, end)
        )
        want.append(parent)
    function = plain if other_function else sha256
    assert hash_request_tokens(function, block_size, request, root=ROOT) == want
    known = want[:num_known]
    rest = hash_request_tokens(function, block_size, request, root=ROOT, known=known)
    assert known + rest == want


@pytest.mark.parametrize("num_blocks", [63, 64, 65, 128, 200])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_bulk_path_of_long_prompts(num_blocks: int, block_size: int) -> None:
    token_ids = [7 * token % 1009 for token in range(num_blocks * block_size + block_size - 1)]
    want, parent = [], ROOT
    for start in range(0, num_blocks * block_size, block_size):
        block = struct.pack(f"<{block_size}I", *token_ids[start : start + block_size])
        parent = hashlib.sha256(parent + block).digest()
        want.append(parent)
    request = BareRequest(token_ids)
    assert hash_request_tokens(sha256, block_size, request, root=ROOT) == want
    assert hash_request_tokens(plain, block_size, request, root=ROOT) == want


@pytest.mark.parametrize("kind", [list, tuple, range])
def test_kinds_of_token_sequences(kind: type) -> None:
    token_ids = range(8) if kind is range else kind(range(8))
    want = hash_request_tokens(sha256, 4, BareRequest(list(range(8))), root=ROOT)
    assert hash_request_tokens(sha256, 4, BareRequest(token_ids), root=ROOT) == want
    assert pack_token_ids(token_ids) == struct.pack("<8I", *range(8))


def test_equal_tokens_after_different_prefixes_differ() -> None:
    one = hash_request_tokens(sha256, 2, BareRequest([1, 2, 3, 4]), root=ROOT)
    other = hash_request_tokens(sha256, 2, BareRequest([9, 2, 3, 4]), root=ROOT)
    assert one[1] != other[1]


# --- extra keys ---------------------------------------------------------------------------------


def test_need_extra_keys() -> None:
    assert not need_extra_keys(BareRequest([1]))
    assert not need_extra_keys(Request([1], cache_salt=""))
    assert need_extra_keys(Request([1], cache_salt="s"))
    assert need_extra_keys(Request([1], lora_request=Lora("a", "/a")))
    assert need_extra_keys(Request([1], mm_features=[image("x", 0, 1)]))


def test_lora_keys() -> None:
    assert gen_lora_extra_hash_keys(BareRequest([1])) == []
    request = Request([1], lora_request=Lora("a", "/a"))
    assert gen_lora_extra_hash_keys(request) == [("lora", "a", "/a")]


# Two images: tokens 2..5 and 6..15.
TWO_IMAGES = Request(range(24), mm_features=[image("x", 2, 4), image("y", 6, 10)])


@pytest.mark.parametrize(
    ("start", "end", "start_mm_idx", "keys", "next_mm_idx"),
    [
        pytest.param(0, 2, 0, [], 0, id="before"),
        pytest.param(0, 4, 0, [("mm", "x", 2)], 0, id="first-begins"),
        pytest.param(4, 8, 0, [("mm", "x", -2), ("mm", "y", 2)], 1, id="both"),
        pytest.param(4, 6, 0, [("mm", "x", -2)], 1, id="ends-with-the-block"),
        pytest.param(6, 8, 0, [("mm", "y", 0)], 1, id="first-is-over"),
        pytest.param(8, 12, 1, [("mm", "y", -2)], 1, id="middle"),
        pytest.param(8, 12, -1, [("mm", "y", -2)], 1, id="from-the-end"),
        pytest.param(12, 16, 1, [("mm", "y", -6)], 2, id="last-ends"),
        pytest.param(16, 20, 2, [], 2, id="after"),
        pytest.param(16, 20, 0, [], 2, id="after-from-the-start"),
    ],
)
def test_mm_keys(
    start: int, end: int, start_mm_idx: int, keys: list[ExtraKey], next_mm_idx: int
) -> None:
    got = gen_mm_extra_hash_keys(TWO_IMAGES, start, end, start_mm_idx)
    assert got == (keys, next_mm_idx)


def test_keys_in_order_and_salt_in_the_first_block_only() -> None:
    request = Request(range(8), [image("x", 3, 3)], Lora("a", "/a"), "s")
    first = (("lora", "a", "/a"), ("mm", "x", 3), ("cache_salt", "s"))
    assert generate_block_hash_extra_keys(request, 0, 4, 0) == (first, 0)
    second = (("lora", "a", "/a"), ("mm", "x", -1))
    assert generate_block_hash_extra_keys(request, 4, 8, 0) == (second, 1)
    assert generate_block_hash_extra_keys(BareRequest(range(8)), 0, 4, 0) == (None, 0)


ROWS = [[1.0, -2.0], [0.5, 0.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
BFLOAT16 = {1.0: "803f", -2.0: "00c0", 0.5: "003f", 0.0: "0000", 7.0: "e040", 8.0: "0041"}


def bfloat16_digest(*elements: float) -> bytes:
    return hashlib.sha256(bytes.fromhex("".join(BFLOAT16[at] for at in elements))).digest()


def test_prompt_embeds_keys_by_hand() -> None:
    # The ids of such tokens are placeholders: without the key two prompts would have one name.
    request = Request([0] * 8, prompt_embeds=torch.tensor(ROWS, dtype=torch.bfloat16))
    first = [("prompt_embeds", bfloat16_digest(1.0, -2.0, 0.5, 0.0))]
    assert gen_prompt_embeds_extra_hash_keys(request, 0, 2) == first
    # The last given row lies in a block with a token that has an id.
    last = [("prompt_embeds", bfloat16_digest(7.0, 8.0))]
    assert gen_prompt_embeds_extra_hash_keys(request, 4, 6) == last
    assert gen_prompt_embeds_extra_hash_keys(request, 5, 7) == []
    assert gen_prompt_embeds_extra_hash_keys(request, 6, 8) == []
    assert gen_prompt_embeds_extra_hash_keys(BareRequest([0]), 0, 2) == []


def test_prompt_embeds_of_any_container() -> None:
    wide = torch.tensor(ROWS, dtype=torch.float32).repeat(1, 2)
    rows = np.array(ROWS, dtype=np.float32)
    want = [("prompt_embeds", hashlib.sha256(struct.pack("<4f", 1, -2, 0.5, 0)).digest())]
    for embeds in (rows, np.asfortranarray(rows), torch.from_numpy(rows), wide[:, :2]):
        request = Request([0] * 8, prompt_embeds=embeds)
        assert gen_prompt_embeds_extra_hash_keys(request, 0, 2) == want
    empty = Request([0] * 8, prompt_embeds=rows[:0])
    assert not need_extra_keys(empty)
    assert generate_block_hash_extra_keys(empty, 0, 2, 0) == (None, 0)
    with pytest.raises(
        TypeError, match=r"prompt_embeds: expected a tensor or an array .* got list"
    ):
        gen_prompt_embeds_extra_hash_keys(Request([0] * 8, prompt_embeds=ROWS), 0, 2)


def test_prompts_of_other_embeddings_have_other_names() -> None:
    rows = torch.tensor(ROWS)
    other = rows.clone()
    other[3, 1] += 1
    one = Request([0] * 8, prompt_embeds=rows)
    assert need_extra_keys(one)
    names = hash_request_tokens(sha256, 2, one, root=ROOT)
    others = hash_request_tokens(sha256, 2, Request([0] * 8, prompt_embeds=other), root=ROOT)
    assert names[0] == others[0]
    assert names[1] != others[1]
    assert names[3] != others[3]
    # The salt comes before it, and after the last row its key is gone.
    salted = Request([0] * 8, cache_salt="s", prompt_embeds=rows)
    keys, _ = generate_block_hash_extra_keys(salted, 0, 2, 0)
    assert keys is not None
    assert [key[0] for key in keys] == ["cache_salt", "prompt_embeds"]
    assert generate_block_hash_extra_keys(salted, 6, 8, 0) == (None, 0)


def test_each_extra_fact_changes_the_names() -> None:
    token_ids = range(8)
    variants = [
        Request(token_ids),
        Request(token_ids, cache_salt="s"),
        Request(token_ids, cache_salt="t"),
        Request(token_ids, lora_request=Lora("a", "/a")),
        Request(token_ids, [image("x", 1, 2)]),
        Request(token_ids, [image("x", 2, 2)]),
        Request(token_ids, [image("y", 1, 2)]),
    ]
    chains = [hash_request_tokens(sha256, 4, request, root=ROOT) for request in variants]
    assert len({chain[0] for chain in chains}) == len(variants)
    assert len({chain[1] for chain in chains}) == len(variants)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "error"),
    [
        *((token, ValueError) for token in (-1, 2**32, 2**80)),
        *((token, TypeError) for token in (1.5, 1.0, np.float32(1), "a", None)),
    ],
)
def test_bad_token_is_named_by_position(token: object, error: type[Exception]) -> None:
    token_ids = [0, 4294967295, token, -5]
    message = r"token_ids\[2\]: expected an integer from 0 to 4294967295, got "
    with pytest.raises(error, match=message):
        pack_token_ids(token_ids)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        hash_request_tokens(sha256, 2, BareRequest(token_ids))  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        hash_block_tokens(sha256, ROOT, token_ids)  # type: ignore[arg-type]


def test_bad_token_after_known_blocks_keeps_its_position() -> None:
    request = BareRequest([1, 2, 3, -1])
    with pytest.raises(ValueError, match=r"token_ids\[3\]: .* got -1; pass the tokenizer's ids"):
        hash_request_tokens(sha256, 2, request, known=[ROOT])


@pytest.mark.parametrize("token_ids", [b"1234", bytearray(8), 5])
def test_no_token_sequence(token_ids: object) -> None:
    with pytest.raises(TypeError):
        pack_token_ids(token_ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [0, -16])
def test_bad_block_size(block_size: int) -> None:
    with pytest.raises(
        ValueError, match=f"block_size: expected at least 1, got {block_size}; pass the tokens"
    ):
        hash_request_tokens(sha256, block_size, BareRequest([1]))


def test_an_item_before_the_first() -> None:
    with pytest.raises(ValueError, match="start_mm_idx: expected at least -2, .* got -3; pass 0"):
        gen_mm_extra_hash_keys(TWO_IMAGES, 0, 4, -3)


def test_bad_hashes() -> None:
    with pytest.raises(ValueError, match="parent_block_hash: expected 32 bytes, got 0"):
        hash_block_tokens(sha256, b"", [1])
    with pytest.raises(ValueError, match="root: expected 32 bytes, got 3"):
        hash_request_tokens(sha256, 1, BareRequest([1]), root=b"abc")
    with pytest.raises(ValueError, match=r"known\[-1\]: expected 32 bytes, got 1"):
        hash_request_tokens(sha256, 1, BareRequest([1]), known=[b"x"])
    with pytest.raises(ValueError, match="known: expected at most 1 block hashes for 3 tokens"):
        hash_request_tokens(sha256, 2, BareRequest([1, 2, 3]), known=[ROOT, ROOT])
