"""The digest of a span against its bytes written out by hand."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from kvxfer.cache.hashing import ExtraKey, hash_block_tokens, none_hash, sha256
from kvxfer.transfer.tokens import DIGEST_NBYTES, digest_keys, token_digest

TAG = b"kvxfer.tokens.v1\0"


@pytest.mark.parametrize(
    ("token_ids", "extra_keys", "data"),
    [
        pytest.param([], (), b"\0\0\0\0\0\0\0\0", id="empty"),
        pytest.param([0], (), b"\x01\0\0\0\0\0\0\0\0\0\0\0", id="zero"),
        pytest.param(
            [1, 258, 4294967295],
            (),
            b"\x03\0\0\0\0\0\0\0\x01\0\0\0\x02\x01\0\0\xff\xff\xff\xff",
            id="little-endian",
        ),
        pytest.param(
            [1],
            (("mm", "img", 3), ("cache_salt", "s")),
            # msgpack: array of 2, of them one of 3 and one of 2; 0xa? are string lengths.
            b"\x01\0\0\0\0\0\0\0\x01\0\0\0\x92\x93\xa2mm\xa3img\x03\x92\xaacache_salt\xa1s",
            id="extra-keys",
        ),
    ],
)
def test_vectors(token_ids: list[int], extra_keys: tuple[ExtraKey, ...], data: bytes) -> None:
    digest = token_digest(token_ids, extra_keys)
    assert len(digest) == DIGEST_NBYTES == 32
    assert digest == hashlib.sha256(TAG + data).digest()


def test_vector_in_digits() -> None:
    assert (
        token_digest(range(1, 6)).hex()
        == "3d2f6288255112073d57c67c770d6b7afee8fd7e976c8e44175109f4acd60e91"
    )


def test_kinds_of_sequences_agree() -> None:
    assert token_digest([1, 2, 3]) == token_digest((1, 2, 3)) == token_digest(range(1, 4))


def test_every_difference_shows() -> None:
    digests = {
        token_digest([1, 2]),
        token_digest([2, 1]),
        token_digest([1, 2, 0]),
        token_digest([0, 1, 2]),
        token_digest([1]),
        token_digest([1, 2], (("lora", "a"),)),
        token_digest([1, 2], (("lora", "b"),)),
        token_digest([1, 2], (("mm", "a", 0),)),
        token_digest([1, 2], (("mm", "a", 1),)),
    }
    assert len(digests) == 9


def test_tokens_cannot_pass_for_extra_keys() -> None:
    # msgpack of (("abcd",),) is 91 91 a4 61 62 63 64: the first 4 bytes are also a token.
    with_keys = token_digest([1], (("abcd", 1),))
    assert with_keys != token_digest([1, int.from_bytes(b"\x91\x92\xa4a", "little")])


def test_digest_is_no_block_hash() -> None:
    root = none_hash(b"0")
    assert token_digest([1, 2]) != hash_block_tokens(sha256, root, [1, 2])


@pytest.mark.parametrize("token", [-1, 2**32, "a", 1.7])
def test_bad_token_is_named_by_position(token: object) -> None:
    error = ValueError if isinstance(token, int) else TypeError
    with pytest.raises(error, match=r"token_ids\[1\]: expected an integer from 0 to"):
        token_digest([7, token])  # type: ignore[list-item]


def test_keys_of_a_plain_request() -> None:
    assert digest_keys(SimpleNamespace(prompt_token_ids=[1, 2]), 2) == ()
    nothing: dict[str, object] = {"lora_request": None, "mm_features": [], "prompt_embeds": None}
    assert digest_keys(SimpleNamespace(cache_salt="s", **nothing), 2) == ()


def test_keys_are_what_both_engines_spell_alike() -> None:
    def item(identifier: str, offset: int, length: int) -> SimpleNamespace:
        position = SimpleNamespace(offset=offset, length=length)
        return SimpleNamespace(identifier=identifier, mm_position=position)

    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    request = SimpleNamespace(
        lora_request=SimpleNamespace(lora_name="poet", lora_path="/here"),
        mm_features=[item("cat", 2, 4), item("dog", 9, 3)],
        prompt_embeds=rows,
    )
    first_two = hashlib.sha256(rows[:2].tobytes()).digest()
    assert digest_keys(request, 2) == (("lora", "poet"), ("prompt_embeds", first_two))
    assert digest_keys(request, 9) == (
        ("lora", "poet"),
        ("mm", "cat", 2),
        ("prompt_embeds", hashlib.sha256(rows.tobytes()).digest()),
    )
    assert digest_keys(request, 10)[2] == ("mm", "dog", 9)
    request.lora_request.lora_path = "/there"
    assert digest_keys(request, 2)[0] == ("lora", "poet")
