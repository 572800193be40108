"""Random histories of requests over several groups, against what a step may read and write.

Every block has a record of what was written to it: for each slot the group and all tokens up to it
(for a state: all tokens before the state). The record is poisoned when a block is handed out anew.
Whatever a step reads must be right, whatever it writes must be its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvxfer.cache.kv_cache_manager import KVCacheManager
from kvxfer.cache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

BLOCK_SIZE = 3
Content = tuple[int, tuple[int, ...]] | None
POISON: list[Content] = [None] * BLOCK_SIZE


def sliding(window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
        sliding_window=window,
    )


def chunked(chunk: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
        attention_chunk_size=chunk,
    )


FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype="float32")
STATE = MambaSpec(block_size=BLOCK_SIZE, shapes=((1,),), dtypes=("float32",))
# Many share a beginning; some with a block of another one in the middle.
PROMPTS = [[0] * 2, [0] * 7, [0] * 10, [0] * 10 + [1], [0] * 13, [0] * 14, [0] * 6 + [1] * 6]
GROUPS: list[tuple[KVCacheSpec, ...]] = [
    (FULL,),
    (sliding(5),),
    (FULL, sliding(5)),
    (sliding(1), FULL, sliding(8)),
    (FULL, chunked(4)),
    (FULL, STATE),
    (sliding(4), STATE),
]


def first_seen(spec: KVCacheSpec, token: int) -> int:
    """The first token that ``token`` looks at."""
    match spec:
        case SlidingWindowSpec():
            return max(0, token - spec.sliding_window + 1)
        case ChunkedLocalAttentionSpec():
            return token // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


def names(tokens: list[int]) -> list[bytes]:
    return [bytes(tokens[:end]) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)]


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

    @initialize(
        specs=st.sampled_from(GROUPS), num_blocks=st.integers(8, 45), step=st.integers(1, 7)
    )
    def start(self, specs: tuple[KVCacheSpec, ...], num_blocks: int, step: int) -> None:
        self.specs, self.step = specs, step
        groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]
        config = KVCacheConfig(num_blocks + 1, [], groups)
        self.manager = KVCacheManager(config, enable_caching=True, max_step_tokens=step)
        self.num_blocks = num_blocks
        self.slots: dict[int, list[Content]] = {b: list(POISON) for b in range(1, num_blocks + 1)}
        self.held: dict[str, Held] = {}
        self.serial = 0

    # --- the oracle ---------------------------------------------------------------------------

    def is_complete(self, group: int, tokens: list[int], block: int) -> bool:
        """Whether the pool names a block of the group for this block of this prefix."""
        name = bytes(tokens[: (block + 1) * BLOCK_SIZE])
        return self.manager.pool.get_cached_block(name, group) is not None

    def longest(self, tokens: list[int], max_tokens: int) -> int:
        for num_blocks in range(max_tokens // BLOCK_SIZE, 0, -1):
            if all(
                self.is_complete(group, tokens, token // BLOCK_SIZE)
                for group in range(len(self.specs))
                for token in self.readable(group, num_blocks * BLOCK_SIZE)
            ):
                return num_blocks * BLOCK_SIZE
        return 0

    def readable(self, group: int, num_computed: int) -> range:
        """The tokens before ``num_computed`` that the next token reads."""
        if self.specs[group] is STATE:
            return range(max(0, num_computed - 1), num_computed)
        return range(first_seen(self.specs[group], num_computed), num_computed)

    def check_readable(
        self, request_id: str, num_computed: int, *, with_states: bool = True
    ) -> None:
        tables, tokens = self.manager.block_ids(request_id), self.held[request_id].tokens
        for group, spec in enumerate(self.specs):
            if spec is STATE and not with_states:
                continue  # a later step may write over it
            for token in self.readable(group, num_computed):
                block = tables[group][token // BLOCK_SIZE]
                assert block != -1
                want = (group, tuple(tokens[: token + 1]))
                assert self.slots[block][token % BLOCK_SIZE] == want

    def write(self, request_id: str, start: int, end: int) -> None:
        """Tokens [start, end) are computed or loaded, wherever there is a block for them."""
        tables, tokens = self.manager.block_ids(request_id), self.held[request_id].tokens
        for group, spec in enumerate(self.specs):
            for token in range(max(start, end - 1) if spec is STATE else start, end):
                block = tables[group][token // BLOCK_SIZE]
                if block != -1:
                    self.slots[block][token % BLOCK_SIZE] = (group, tuple(tokens[: token + 1]))

    def poison(self, ids: list[int]) -> None:
        for block in ids:
            if block != -1:
                self.slots[block] = list(POISON)

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
        hit = self.manager.find_longest_cache_hit(names(tokens), len(prompt) - 1)
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
            assert all(table[token // BLOCK_SIZE] != -1 for token in self.readable(group, ready))
            self.poison(list(table[hit.num_tokens // BLOCK_SIZE :]))
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
        self.manager.cache_blocks(request_id, names(held.tokens), end)

    def lose_what_is_before_the_window(self, request_id: str, start: int) -> None:
        """The source had no more than the window: the rest of its first block was not filled."""
        end = self.held[request_id].num_computed
        for group, table in enumerate(self.manager.block_ids(request_id)):
            kept = self.readable(group, end).start
            block = kept // BLOCK_SIZE
            if kept % BLOCK_SIZE and block * BLOCK_SIZE >= start and self.specs[group] is not STATE:
                self.slots[table[block]][: kept % BLOCK_SIZE] = [None] * (kept % BLOCK_SIZE)
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
        self.manager.cache_blocks(request_id, names(held.tokens), end)

    def check_own(self, tables: tuple[tuple[int, ...], ...], start: int, end: int) -> None:
        for group, spec in enumerate(self.specs):
            for token in range(end - 1 if spec is STATE else start, end):
                block = self.manager.pool.blocks[tables[group][token // BLOCK_SIZE]]
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
            want = [(group, tuple(tokens[: end + 1])) for end in range(len(tokens))][-BLOCK_SIZE:]
            got = self.slots[block.block_id]
            assert (got[-1:] == want[-1:]) if self.specs[group] is STATE else (got == want)

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


def test_names_of_the_oracle() -> None:
    assert names([0, 1, 0, 1, 1, 1, 0]) == [b"\0\1\0", b"\0\1\0\1\1\1"]
    assert [first_seen(sliding(4), token) for token in (2, 3, 4)] == [0, 0, 1]
    assert [first_seen(chunked(4), token) for token in (3, 4, 9)] == [0, 4, 8]
