"""vLLM's block names, against vectors that vLLM 0.32 computed (tests/vllm/test_names.py asks it
again).
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.cache.hashing import (
    ObjectHash,
    get_hash_fn_by_name,
    hash_block_tokens,
    hash_request_tokens,
    sha256,
)

# By algorithm, with PYTHONHASHSEED=0 and blocks of 4: the root; the names of a plain request; those
# of one with an adapter, an item on tokens 2 to 5 and a salt.
VECTORS = {
    "sha256": (
        "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
        [
            "762b2e7e1520febd3a0aedb7358e8602facf3924440e18538fce057e23bae91d",
            "d004e0ae331b474df1ea66c3216e8d7b153dcfb38a2ec04bbd59709149c5e903",
        ],
        [
            "dece41fc1288318b817d581feb79714ce9be93ee473256bb1808fd0a4c442873",
            "c8f40795c7ca7353c6f10871e693e0b345750458a6979a18ef489503ef231c81",
        ],
    ),
    "sha256_cbor": (
        "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
        [
            "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb",
            "95bab9bc681d1b1043ccf94d05d10d600d53f02b26737b741b8b4a967501bd10",
        ],
        [
            "8bf1e783ae1000a7318688b795f8f4b8c15cc1a53088c92c6a8e7f647e946139",
            "6a83210496745efcf6251fdb7ce3f1e66eedb0984080178ced2655e11e9b50db",
        ],
    ),
    "xxhash": (
        "6fb31cc38bba6066183f7f2104b9c051",
        ["f3856cedd7e636094750c4546e855397", "a37c0c1fbd331bd7fe99c3892f6e6fcc"],
        ["957f9e527e246aac512ca51f94b67aa9", "6239a0b0459229e59fef5a34d1ac3b01"],
    ),
    "xxhash_cbor": (
        "1ebe36576dcb573f26b99533a20aaeca",
        ["0a8577df5ee3430515a8cc1f6e3ac52e", "3d4b3c58e2edabce7427d3ee6a7f8bce"],
        ["30f3af511957805207573cda2ebd19be", "52475e0b8b5f4bd749da2f13bed8b06c"],
    ),
}
# The root where PYTHONHASHSEED is not set.
DEFAULT_ROOTS = {
    "sha256": "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
    "sha256_cbor": "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
}


def request(token_ids: list[int], **more: Any) -> Any:
    return SimpleNamespace(all_token_ids=token_ids, **more)


def keyed_request() -> Any:
    image = SimpleNamespace(identifier="img", mm_position=SimpleNamespace(offset=2, length=4))
    adapter = SimpleNamespace(lora_name="l", lora_path="p")
    more = {"mm_features": [image], "lora_request": adapter, "cache_salt": "s"}
    return request(list(range(1, 9)), **more)


@pytest.fixture(params=VECTORS)
def function(request: pytest.FixtureRequest) -> ObjectHash:
    if "cbor" in request.param:
        pytest.importorskip("cbor2")
    if "xxhash" in request.param:
        pytest.importorskip("xxhash")
    return get_hash_fn_by_name(request.param)


def test_vectors(function: ObjectHash) -> None:
    root, plain, keyed = VECTORS[function.name]
    start = function.none_hash("0")
    assert start.hex() == root
    tokens = [1, 2, 3, 4, 5, 600, 70000, 152000, 9]
    names = hash_request_tokens(function, 4, request(tokens), root=start)
    assert [name.hex() for name in names] == plain
    of_keys = hash_request_tokens(function, 4, keyed_request(), root=start)
    assert [name.hex() for name in of_keys] == keyed


def test_one_block_and_a_growing_request(function: ObjectHash) -> None:
    root, tokens = function.none_hash("0"), list(range(100, 120))
    names = hash_request_tokens(function, 4, request(tokens), root=root)
    assert len(names) == 5
    assert hash_block_tokens(function, root, tokens[:4]) == names[0]
    assert hash_block_tokens(function, root, tokens[:4], ()) == names[0]
    assert hash_block_tokens(function, names[0], tokens[4:8]) == names[1]
    assert hash_request_tokens(function, 4, request(tokens), known=names[:3]) == names[3:]
    keyed = hash_request_tokens(function, 4, keyed_request(), root=root)
    assert hash_request_tokens(function, 4, keyed_request(), known=keyed[:1]) == keyed[1:]


def test_root_without_a_seed(function: ObjectHash) -> None:
    root = function.none_hash(None)
    if function.name in DEFAULT_ROOTS:
        assert root.hex() == DEFAULT_ROOTS[function.name]
    else:
        assert root != function.none_hash(None)


NAMES_OF_A_PROCESS = """
import os
import subprocess
import sys
from types import SimpleNamespace
from kvxfer.cache.hashing import get_hash_fn_by_name, hash_block_tokens, hash_request_tokens

function, tokens = get_hash_fn_by_name(sys.argv[1]), [1, 2, 3, 4]
request = SimpleNamespace(all_token_ids=tokens, lora_request=None, mm_features=[], cache_salt=None)
print(hash_block_tokens(function, None, tokens).hex())
print(*(name.hex() for name in hash_request_tokens(function, 4, request)))
"""


@pytest.mark.parametrize("seed", ["0", None])
def test_root_of_the_process(function: ObjectHash, seed: str | None) -> None:
    own = {"KVXFER_HASH_SEED", "PYTHONHASHSEED"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    command = [sys.executable, "-c", NAMES_OF_A_PROCESS, function.name]
    made = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    name, *of_request = made.stdout.split()
    assert of_request == [name]
    if seed is not None or function.resists_collisions:
        wanted = hash_block_tokens(function, function.none_hash(seed), [1, 2, 3, 4])
        assert name == wanted.hex()


def test_refusals() -> None:
    function = get_hash_fn_by_name("sha256")
    with pytest.raises(ValueError, match="root: expected 32 bytes, got 16"):
        hash_request_tokens(function, 4, request([1]), root=bytes(16))
    with pytest.raises(ValueError, match=r"token_ids\[1\]: expected an integer from 0"):
        hash_request_tokens(function, 2, request([1, -1]), root=bytes(32))
    with pytest.raises(TypeError, match=r"token_ids\[1\]: expected an integer from 0"):
        hash_block_tokens(function, bytes(32), [1, 1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="expected sha256, sha256_cbor, xxhash or xxhash_cbor"):
        get_hash_fn_by_name("md5")
    with pytest.raises(ValueError, match="parent_block_hash: expected 32 bytes, got 16"):
        hash_block_tokens(sha256, bytes(16), [1])


@pytest.mark.parametrize(
    ("name", "package"), [("sha256_cbor", "cbor2"), ("xxhash", "xxhash"), ("xxhash_cbor", "cbor2")]
)
def test_a_package_that_is_not_there(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"the package {package}, got none; pip install "):
        get_hash_fn_by_name(name)
