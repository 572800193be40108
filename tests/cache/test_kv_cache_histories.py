"""Random histories of requests over the groups of random plans, against what a step may read and
write.

Every block has a record of what was written to it: for each slot the group and all tokens up to it
(for a state: all tokens before the state). The record is poisoned when a block is handed out anew.
Whatever a step reads must be right, whatever it writes must be its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvxfer.cache import get_kv_cache_config
from kvxfer.cache.kv_cache_manager import KVCacheManager
from kvxfer.cache.kv_events import BlockRemoved, BlockStored, KVEventLog
from kvxfer.cache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from tests.cache.planning_cases import config

BLOCK_SIZE = 3
Content = tuple[int, tuple[int, ...]] | None


def sizes(head_size: int) -> dict[str, Any]:
    """Blocks of layers with smaller heads get more tokens: 3, 6 and 12 in one plan."""
    return {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": 1,
        "head_size": head_size,
        "dtype": "float32",
    }


def full(head_size: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(**sizes(head_size))


def sliding(window: int, head_size: int = 1) -> SlidingWindowSpec:
    return SlidingWindowSpec(**sizes(head_size), sliding_window=window)


def chunked(chunk: int, head_size: int = 1) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(**sizes(head_size), attention_chunk_size=chunk)


def latent(head_size: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(**sizes(head_size))


def state(block_size: int) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((1,),), dtypes=("float32",))


# Many share a beginning; some with a block of another one in the middle.
PROMPTS = [
    *([0] * 2, [0] * 7, [0] * 10, [0] * 10 + [1], [0] * 13, [0] * 14, [0] * 6 + [1] * 6),
    *([0] * 18, [0] * 25, [0] * 26, [0] * 24 + [1] * 14, [0] * 38),
]
# What the planner makes groups of, and the tokens of a block in each of them.
PLANS: list[tuple[tuple[KVCacheSpec, ...], list[int]]] = [
    ((full(),), [3]),
    ((sliding(5),), [3]),
    ((full(), sliding(5)), [3, 3]),
    ((sliding(1), full(), sliding(8)), [3, 3, 3]),
    ((full(), chunked(4)), [3, 3]),
    ((full(), state(3)), [3, 3]),
    ((sliding(4), state(3)), [3, 3]),
    ((full(2), sliding(5)), [3, 6]),
    ((full(), sliding(5, 4)), [12, 3]),
    ((full(), sliding(5, 3)), [9, 3]),
    ((full(2), sliding(5, 3)), [3, 3]),  # padded
    ((full(4), sliding(7, 2), sliding(2)), [3, 6, 12]),
    ((full(), full(), full(), sliding(5, 2)), [6, 6, 6, 3]),
    ((full(), state(12)), [3, 12]),
    ((full(), state(4)), [3, 4]),
    ((full(2), chunked(4)), [3, 6]),
    ((chunked(8, 2), full(), state(6)), [3, 6, 6]),
    ((sliding(9, 2), sliding(4), state(9)), [3, 6, 9]),
    ((latent(4), sliding(5, 1)), [3, 6]),
    ((full(), replace(full(2), block_size=4)), [3, 4]),
]
LAYERS = st.one_of(
    st.sampled_from([specs for specs, _ in PLANS]),
    st.lists(
        st.one_of(
            st.builds(full, st.sampled_from([1, 2, 3, 4])),
            st.builds(sliding, st.integers(1, 14), st.sampled_from([1, 2, 3, 4])),
            st.builds(chunked, st.integers(1, 14), st.sampled_from([1, 2, 4])),
            st.builds(state, st.sampled_from([2, 3, 6, 12, 40])),
        ),
        min_size=1,
        max_size=4,
    ).map(tuple),
)


def first_seen(spec: KVCacheSpec, token: int) -> int:
    """The first token that ``token`` looks at."""
    match spec:
        case SlidingWindowSpec():
            return max(0, token - spec.sliding_window + 1)
        case ChunkedLocalAttentionSpec():
            return token // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


def names(tokens: list[int], hash_block_size: int) -> list[bytes]:
    return [bytes(tokens[:end]) for end in range(hash_block_size, len(tokens) + 1, hash_block_size)]


@dataclass
class Held:
    """``tokens``: all that it will ever have. ``load_from``: where the tokens begin that a load is
    bringing, None when it is over. ``held_tokens``: its window must stay from there.
    """

    tokens: list[int]
    num_computed: int
    held_tokens: int | None
    step: int
    load_from: int | None = None
    has_ended: bool = False


class Histories(RuleBasedStateMachine):
    """Requests come with hits and loads, compute, are offered, end and leave."""

    @initialize(layers=LAYERS, num_blocks=st.integers(8, 45), step=st.sampled_from(range(1, 15)))
    def start(self, layers: Sequence[KVCacheSpec], num_blocks: int, step: int) -> None:
        settings_of = config(max_model_len=1, num_gpu_blocks_override=num_blocks + 1)
        plan = get_kv_cache_config(settings_of, {str(i): spec for i, spec in enumerate(layers)}, 0)
        self.specs = [group.kv_cache_spec for group in plan.kv_cache_groups]
        self.sizes, self.step = [spec.block_size for spec in self.specs], step
        log = KVEventLog(int_block_hashes=False)
        self.manager = KVCacheManager(plan, enable_caching=True, max_step_tokens=step, events=log)
        self.router: Counter[tuple[int, bytes]] = Counter()
        self.num_blocks = num_blocks
        self.slots: dict[int, list[Content]] = {}
        self.poison(list(range(1, num_blocks + 1)))
        self.held: dict[str, Held] = {}
        self.serial = 0

    def names(self, tokens: list[int]) -> list[bytes]:
        return names(tokens, self.manager.hash_block_size)

    def name(self, request_id: str, num_computed: int) -> None:
        tokens = self.held[request_id].tokens
        request = SimpleNamespace(all_token_ids=tokens)
        self.manager.cache_blocks(request_id, self.names(tokens), num_computed, request)

    # --- the oracle ---------------------------------------------------------------------------

    def is_complete(self, group: int, tokens: list[int], block: int) -> bool:
        """Whether the pool names a block of the group for this block of this prefix."""
        name = bytes(tokens[: (block + 1) * self.sizes[group]])
        return self.manager.pool.get_cached_block(name, group) is not None

    def longest(self, tokens: list[int], max_tokens: int) -> int:
        for num_tokens in range(max_tokens, 0, -1):
            if any(num_tokens % size for size in self.sizes):
                continue
            if all(
                self.is_complete(group, tokens, token // size)
                for group, size in enumerate(self.sizes)
                for token in self.readable(group, num_tokens)
            ):
                return num_tokens
        return 0

    def readable(self, group: int, num_computed: int) -> range:
        """The tokens before ``num_computed`` that the next token reads."""
        if isinstance(self.specs[group], MambaSpec):
            return range(max(0, num_computed - 1), num_computed)
        return range(first_seen(self.specs[group], num_computed), num_computed)

    def check_readable(
        self, request_id: str, num_computed: int, *, with_states: bool = True
    ) -> None:
        tables, tokens = self.manager.block_ids(request_id), self.held[request_id].tokens
        for group, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec) and not with_states:
                continue  # a later step may write over it
            for token in self.readable(group, num_computed):
                block = tables[group][token // spec.block_size]
                assert block != -1
                want = (group, tuple(tokens[: token + 1]))
                assert self.slots[block][token % spec.block_size] == want

    def write(self, request_id: str, start: int, end: int) -> None:
        """Tokens [start, end) are computed or loaded, wherever there is a block for them."""
        tables, tokens = self.manager.block_ids(request_id), self.held[request_id].tokens
        for group, spec in enumerate(self.specs):
            is_state = isinstance(spec, MambaSpec)
            for token in range(max(start, end - 1) if is_state else start, end):
                block = tables[group][token // spec.block_size]
                if block != -1:
                    written = (group, tuple(tokens[: token + 1]))
                    self.slots[block][token % spec.block_size] = written

    def poison(self, ids: list[int]) -> None:
        for block in ids:
            if block != -1:
                self.slots[block] = [None] * max(self.sizes)

    # --- what happens -------------------------------------------------------------------------

    @rule(
        prompt=st.sampled_from(PROMPTS),
        num_more=st.integers(0, 9),
        external=st.sampled_from([0, 0, 1, 4, 9]),
        offered=st.booleans(),
        num_steps=st.integers(0, 5),
    )
    def come(
        self, prompt: list[int], num_more: int, external: int, offered: bool, num_steps: int
    ) -> None:
        tokens = prompt + [self.serial % 2] * num_more
        request_id = f"r{self.serial}"
        self.serial += 1
        hit = self.manager.find_longest_cache_hit(self.names(tokens), len(prompt) - 1)
        assert hit.num_tokens == self.longest(tokens, len(prompt) - 1)
        external = min(external, len(prompt) - 1 - hit.num_tokens)
        held_tokens = len(prompt) - 1 if offered else None
        step = self.step if self.serial % 3 else 1
        unpromised = self.manager.num_unpromised_blocks
        is_in = self.manager.admit(
            request_id,
            num_tokens=len(tokens),
            hit=hit,
            num_external_tokens=external,
            num_held_tokens=held_tokens,
            max_step_tokens=step,
        )
        if not is_in:
            most = self.manager.blocks_needed(len(tokens), held_tokens)
            assert most > unpromised
            assert self.held or most > self.num_blocks
            assert self.manager.num_unpromised_blocks == unpromised
            return
        ready = hit.num_tokens + external
        self.held[request_id] = held = Held(tokens, hit.num_tokens, held_tokens, step)
        for group, table in enumerate(self.manager.block_ids(request_id)):
            size = self.sizes[group]
            assert all(table[token // size] != -1 for token in self.readable(group, ready))
            self.poison(list(table[hit.num_tokens // size :]))
        if external:
            held.load_from = hit.num_tokens
            held.num_computed = ready
            return
        self.check_readable(request_id, ready)
        for _ in range(num_steps):
            self.compute_step(request_id, self.step)

    @precondition(lambda self: any(h.load_from is not None for h in self.held.values()))
    @rule(data=st.data(), outcome=st.sampled_from(["accepted", "incomplete", "failed"]))
    def load_ends(self, data: st.DataObject, outcome: str) -> None:
        loading = sorted(i for i, held in self.held.items() if held.load_from is not None)
        request_id = data.draw(st.sampled_from(loading))
        held = self.held[request_id]
        if held.has_ended or outcome == "failed":
            self.manager.free(request_id)
            del self.held[request_id]
            return
        start, end = held.load_from, held.num_computed
        held.load_from = None
        assert start is not None
        self.write(request_id, start, end)
        if outcome == "incomplete":
            self.lose_what_is_before_the_window(request_id, start)
        self.name(request_id, end)

    def lose_what_is_before_the_window(self, request_id: str, start: int) -> None:
        """The source had no more than the window: the rest of its first block was not filled."""
        end = self.held[request_id].num_computed
        for group, table in enumerate(self.manager.block_ids(request_id)):
            kept, spec = self.readable(group, end).start, self.specs[group]
            block, before = divmod(kept, spec.block_size)
            is_new = block * spec.block_size >= start and block < len(table)
            if before and is_new and not isinstance(spec, MambaSpec):
                self.slots[table[block]][:before] = [None] * before
                self.manager.leave_unhashed(request_id, group, [block])

    def running(self) -> list[str]:
        return sorted(
            i
            for i, held in self.held.items()
            if held.load_from is None
            and not held.has_ended
            and held.num_computed < len(held.tokens)
        )

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.running()))
        self.compute_step(request_id, data.draw(st.integers(1, self.step)))

    @precondition(lambda self: self.running())
    @rule(num_new=st.integers(1, 7), times=st.integers(1, 9))
    def compute_all(self, num_new: int, times: int) -> None:
        for _ in range(times):
            for request_id in self.running():
                self.compute_step(request_id, num_new)

    def compute_step(self, request_id: str, num_new: int) -> None:
        held = self.held[request_id]
        start = held.num_computed
        end = min(start + min(num_new, held.step), len(held.tokens))
        if start == end:
            return
        before = self.manager.block_ids(request_id)
        added = self.manager.grow(request_id, start, end)  # never raises
        for ids in added:
            self.poison(list(ids))
        tables = self.manager.block_ids(request_id)
        for table, old, new in zip(tables, before, added, strict=True):
            assert len(table) == len(old) + len(new)
        self.check_readable(request_id, start)
        self.check_own(tables, start, end)
        self.write(request_id, start, end)
        held.num_computed = end
        self.name(request_id, end)

    def check_own(self, tables: tuple[tuple[int, ...], ...], start: int, end: int) -> None:
        for group, spec in enumerate(self.specs):
            for token in range(end - 1 if isinstance(spec, MambaSpec) else start, end):
                block = self.manager.pool.blocks[tables[group][token // spec.block_size]]
                assert not block.is_null
                assert (block.ref_cnt, block.block_hash) == (1, None)

    @precondition(lambda self: len(self.held) > 2)
    @rule(data=st.data(), is_kept=st.booleans())
    def end(self, data: st.DataObject, is_kept: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[request_id]
        if held.has_ended:
            return
        if is_kept or held.load_from is not None:
            held.has_ended = True
            computed = held.num_computed if held.load_from is None else held.load_from
            self.manager.stop_growing(request_id, computed)
        else:
            self.manager.free(request_id)
            del self.held[request_id]

    @rule()
    def kept_ones_leave(self) -> None:
        for request_id, held in sorted(self.held.items()):
            if held.has_ended and held.load_from is None:
                self.manager.free(request_id)
                del self.held[request_id]

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.manager.pool.evict_blocks(
            data.draw(st.lists(st.sampled_from(sorted(self.slots)), max_size=2))
        )

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def counts_are_exact(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        users: Counter[int] = Counter()
        groups_of: dict[int, set[int]] = {}
        for request_id in self.held:
            for group, table in enumerate(manager.block_ids(request_id)):
                ids = [block for block in table if block != -1]
                assert len(set(ids)) == len(ids)
                users.update(ids)
                for block_id in ids:
                    groups_of.setdefault(block_id, set()).add(group)
        assert all(len(groups) == 1 for groups in groups_of.values())
        for block in manager.pool.blocks[1:]:
            assert block.ref_cnt == users[block.block_id]
        free = {block.block_id for block in manager.pool.get_free_blocks()}
        assert free == set(self.slots) - set(users)
        assert manager.num_free_blocks == len(free)
        assert 0 <= manager.num_unpromised_blocks <= len(free)
        for group, each in enumerate(manager.groups):
            assert each.num_used_blocks == sum(groups == {group} for groups in groups_of.values())
        if not self.held:
            assert manager.num_free_blocks == manager.num_unpromised_blocks == self.num_blocks

    @invariant()
    def names_are_true(self) -> None:
        if not hasattr(self, "manager"):
            return
        for block in self.manager.pool.blocks[1:]:
            if block.block_hash is None:
                continue
            tokens, group = list(block.block_hash), block.group_id
            size, is_state = self.sizes[group], isinstance(self.specs[group], MambaSpec)
            want = [(group, tuple(tokens[: end + 1])) for end in range(len(tokens))][-size:]
            got = self.slots[block.block_id][:size]
            assert (got[-1:] == want[-1:]) if is_state else (got == want)

    @invariant()
    def a_router_knows_the_names(self) -> None:
        if not hasattr(self, "manager"):
            return
        for event in self.manager.take_events():
            match event:
                case BlockStored(group_idx=int(group), block_hashes=stored, block_size=size):
                    tokens = bytes(event.token_ids)
                    assert len(tokens) == len(stored) * size == len(stored) * self.sizes[group]
                    for at, name in enumerate(stored):
                        assert isinstance(name, bytes)
                        assert name[-size:] == tokens[at * size : (at + 1) * size]
                        parent = stored[at - 1] if at else event.parent_block_hash or b""
                        assert name[:-size] == parent
                        self.router[group, name] += 1
                case BlockRemoved(group_idx=int(group), block_hashes=[bytes(name)]):
                    self.router[group, name] -= 1
        named = [block for block in self.manager.pool.blocks if block.block_hash is not None]
        assert +self.router == Counter((block.group_id, block.block_hash) for block in named)

    @invariant()
    def held_windows_are_there(self) -> None:
        for request_id, held in getattr(self, "held", {}).items():
            is_computed = held.load_from is None and held.num_computed >= (held.held_tokens or 0)
            if held.held_tokens is not None and is_computed:
                self.check_readable(request_id, held.held_tokens, with_states=False)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for request_id in sorted(self.held):
                self.manager.free(request_id)
            assert self.manager.num_free_blocks == self.num_blocks
            assert self.manager.num_unpromised_blocks == self.num_blocks


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("layers", "block_sizes"), PLANS)
def test_plans_have_these_blocks(layers: Sequence[KVCacheSpec], block_sizes: list[int]) -> None:
    specs = {str(i): spec for i, spec in enumerate(layers)}
    plan = get_kv_cache_config(config(max_model_len=1, num_gpu_blocks_override=20), specs, 0)
    assert [group.kv_cache_spec.block_size for group in plan.kv_cache_groups] == block_sizes


def test_names_of_the_oracle() -> None:
    assert names([0, 1, 0, 1, 1, 1, 0], 3) == [b"\0\1\0", b"\0\1\0\1\1\1"]
    assert [first_seen(sliding(4), token) for token in (2, 3, 4)] == [0, 0, 1]
    assert [first_seen(chunked(4), token) for token in (3, 4, 9)] == [0, 4, 8]
