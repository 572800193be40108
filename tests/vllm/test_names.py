"""Block names and events beside vLLM's own, for the same requests and the same histories."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvxfer.cache.block_pool import BlockPool
from kvxfer.cache.hashing import get_hash_fn_by_name, hash_request_tokens
from kvxfer.cache.kv_events import KVEventBatch, KVEventLog
from kvxfer.cache.specs import FullAttentionSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM loads parts of torch that other parts call deprecated
    from vllm import SamplingParams
    from vllm.distributed import kv_events as theirs
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils import hashing as their_hashing
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.block_pool import BlockPool as TheirPool
    from vllm.v1.request import Request

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
BLOCK = 4
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype="float32")


def hasher(algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, with its root from ``seed``."""
    if "xxhash" in algorithm:
        pytest.importorskip("xxhash")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    function = their_hashing.get_hash_fn_by_name(algorithm)
    # What the process had comes back afterwards.
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    kv_cache_utils.init_none_hash(function)
    return kv_cache_utils.get_request_block_hasher(BLOCK, function)


def item(name: str, offset: int, length: int) -> Any:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=name,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def make_request(number: int, tokens: list[int], block_hasher: Any, **more: Any) -> Any:
    sampling = SamplingParams(max_tokens=1)
    return Request(f"r{number}", tokens, sampling, None, block_hasher=block_hasher, **more)


def random_request(number: int, generator: random.Random, block_hasher: Any) -> Any:
    num_tokens = generator.randrange(1, 60)
    tokens = [
        generator.choice([0, 23, 24, 255, 256, 65535, 65536, 151_999]) for _ in range(num_tokens)
    ]
    more: dict[str, Any] = {}
    if generator.random() < 0.4:
        offset, items = 0, []
        while (offset := offset + generator.randrange(9)) < num_tokens:
            length = generator.randrange(1, 9)
            items.append(item(generator.choice(["img", "video"]), offset, length))
            offset += length
        more["mm_features"] = items
    if generator.random() < 0.3:
        path = generator.choice(["/adapters/one", "p"])
        more["lora_request"] = LoRARequest(lora_name="l", lora_int_id=3, lora_path=path)
    if generator.random() < 0.3:
        more["cache_salt"] = generator.choice(["salt", "\u00e4"])
    if generator.random() < 0.2:
        more["prompt_embeds"] = torch.rand(num_tokens, 3)
    return make_request(number, tokens, block_hasher, **more)


@pytest.mark.parametrize("seed", ["0", "77", None])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_names_are_equal(algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    block_hasher = hasher(algorithm, seed, monkeypatch)
    function = get_hash_fn_by_name(algorithm)
    root = function.none_hash(seed)
    if seed is None and not function.resists_collisions:
        return  # random, here and there
    assert root == kv_cache_utils.NONE_HASH
    generator = random.Random(algorithm)
    for number in range(200):
        request = random_request(number, generator, block_hasher)
        names = hash_request_tokens(function, BLOCK, request, root=root)
        assert names == request.block_hashes


class Both:
    """The same pool twice: theirs and ours."""

    def __init__(self, num_blocks: int, *, int_block_hashes: bool) -> None:
        self.theirs = TheirPool(num_blocks, True, BLOCK, enable_kv_cache_events=True)
        self.ours = BlockPool(num_blocks, True, KVEventLog(int_block_hashes=int_block_hashes))

    def get(self, num_blocks: int) -> list[int]:
        ids = [block.block_id for block in self.ours.get_new_blocks(num_blocks)]
        assert [block.block_id for block in self.theirs.get_new_blocks(num_blocks)] == ids
        return ids

    def name(self, request: Any, ids: Sequence[int], start: int, end: int) -> None:
        blocks = [self.theirs.blocks[block_id] for block_id in ids]
        self.theirs.cache_full_blocks(request, blocks, start, end, BLOCK, 0)
        own = [self.ours.blocks[block_id] for block_id in ids]
        self.ours.cache_full_blocks(own, request.block_hashes, start, end, 0, request, SPEC)

    def free(self, ids: Sequence[int]) -> None:
        self.theirs.free_blocks([self.theirs.blocks[block_id] for block_id in reversed(ids)])
        self.ours.free_blocks([self.ours.blocks[block_id] for block_id in reversed(ids)])

    def evict(self, block_id: int) -> None:
        self.theirs.evict_blocks({block_id})
        self.ours.evict_blocks([block_id])

    def hit(self, request: Any) -> list[int]:
        """The known prefix, held from now on."""
        found = []
        for name in request.block_hashes:
            other = self.theirs.get_cached_block(name, [0])
            block = self.ours.get_cached_block(name)
            assert (other and other[0].block_id) == (block and block.block_id)
            if block is None or other is None:
                break
            self.ours.touch([block])
            self.theirs.touch(other)
            found.append(block.block_id)
        return found

    def check(self) -> list[Any]:
        """Equal queues and equal events, also when theirs decode our bytes; the events."""
        free = [block.block_id for block in self.ours.get_free_blocks()]
        their_queue = self.theirs.free_block_queue.get_all_free_blocks()
        assert [block.block_id for block in their_queue] == free
        want = self.theirs.take_events()
        for event in want:  # as vLLM's manager completes what its pool notes
            if isinstance(event, theirs.BlockStored):
                event.kv_cache_spec_kind = "full_attention"
        batch = KVEventBatch(1.0, self.ours.take_events(), 0)  # type: ignore[arg-type]
        packed = msgspec.msgpack.encode(batch)
        assert packed == msgspec.msgpack.encode(
            theirs.KVEventBatch(ts=1.0, events=want, data_parallel_rank=0)
        )
        decoded = msgspec.msgpack.decode(packed, type=theirs.KVEventBatch)
        assert [type(event).__name__ for event in decoded.events] == [
            type(event).__name__ for event in want
        ]
        return list(want)


@pytest.mark.parametrize("int_block_hashes", [False, True])
def test_events_of_a_history(int_block_hashes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(int_block_hashes)))
    block_hasher = hasher("sha256", "0", monkeypatch)
    generator = random.Random(1)
    both = Both(40, int_block_hashes=int_block_hashes)
    held: list[tuple[Any, list[int]]] = []
    kinds: set[str] = set()
    for number in range(600):
        request = random_request(number, generator, block_hasher)
        if generator.random() < 0.6 and held:  # a prompt that continues one that is known
            known = generator.choice(held)[0]
            tokens = known.all_token_ids[:] + request.all_token_ids[:]
            request = make_request(number, list(tokens), block_hasher)
        found, num_blocks = both.hit(request), -(-request.num_tokens // BLOCK)
        while held and num_blocks - len(found) > both.ours.num_free_blocks:
            both.free(held.pop(generator.randrange(len(held)))[1])
        if num_blocks - len(found) > both.ours.num_free_blocks:
            both.free(found)
            continue
        ids = found + both.get(num_blocks - len(found))
        num_full = len(request.block_hashes)
        if len(found) < num_full:
            middle = generator.randint(len(found), num_full)
            for start, end in ((len(found), middle), (middle, num_full)):
                if start < end:
                    both.name(request, ids, start, end)
        held.append((request, ids))
        if generator.random() < 0.2:
            both.evict(generator.randrange(1, 40))
        if generator.random() < 0.05:
            while held:
                both.free(held.pop()[1])
            assert both.theirs.reset_prefix_cache()
            assert both.ours.reset_prefix_cache()
        kinds |= {type(event).__name__ for event in both.check()}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_a_request_of_theirs_is_hashable_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field that decides a name is read under the name that vLLM gives it."""
    function, embeds = get_hash_fn_by_name("sha256"), torch.rand(8, 2)
    hasher("sha256", "0", monkeypatch)
    plain = SimpleNamespace(all_token_ids=[1] * 8)
    variants: list[dict[str, Any]] = [
        {"cache_salt": "s"},
        {"mm_features": [item("img", 0, 3)]},
        {"lora_request": LoRARequest(lora_name="l", lora_int_id=3, lora_path="p")},
        {"prompt_embeds": embeds},
    ]
    root = function.none_hash("0")
    names = {
        hash_request_tokens(function, BLOCK, make_request(0, [1] * 8, None, **more), root=root)[1]
        for more in variants
    }
    assert len(names - set(hash_request_tokens(function, BLOCK, plain, root=root))) == len(variants)
