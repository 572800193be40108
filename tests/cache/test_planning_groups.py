"""Which layers come together, with the groups written out."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cache import (
    create_kv_cache_group_specs,
    get_kv_cache_groups,
    is_kv_cache_type_uniform,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)
from kvxfer.cache.specs import KVCacheGroupSpec, KVCacheSpec, MLAAttentionSpec
from tests.cache.planning_cases import (
    Unchanged,
    alternating,
    chunked,
    config,
    full,
    latent,
    layers,
    state,
    window,
)


def names(groups: list[KVCacheGroupSpec]) -> list[str]:
    return [" ".join(group.layer_names) for group in groups]


# ---------------------------------------------------------------------------- one type


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        pytest.param([], True, id="none"),
        pytest.param([full(), full()], True, id="equal"),
        pytest.param([full(), full(num_kv_heads=2)], True, id="other-heads"),
        pytest.param([full(), full(sliding_window=4)], True, id="whole-with-window"),
        pytest.param([full(sliding_window=4), full(sliding_window=8)], True, id="whole-2-windows"),
        pytest.param([full(), latent()], True, id="latent-beside-full"),
        pytest.param([full(), full(block_size=32)], False, id="other-blocks"),
        pytest.param([full(), window()], False, id="window-beside-full"),
        pytest.param([window(4), window(4, num_kv_heads=2)], True, id="equal-windows"),
        pytest.param([window(4), window(8)], False, id="other-windows"),
        pytest.param([chunked(4), chunked(4)], True, id="equal-chunks"),
        pytest.param([chunked(4), chunked(8)], False, id="other-chunks"),
        pytest.param([chunked(4), window(4)], False, id="chunk-beside-window"),
        pytest.param([state(), state(8)], True, id="states-of-other-bytes"),
        pytest.param([state(), state(num_speculative_blocks=1)], False, id="other-speculation"),
        pytest.param([state(block_size=16), full()], False, id="state-beside-full"),
    ],
)
def test_is_kv_cache_type_uniform(specs: list[KVCacheSpec], expected: bool) -> None:
    assert is_kv_cache_type_uniform({str(at): spec for at, spec in enumerate(specs)}) is expected


# ---------------------------------------------------------------------------- given groups


def test_create_groups() -> None:
    spec = alternating(2, full(), window())
    assert create_kv_cache_group_specs(spec, [["0", "2"], ["3"], ["1"]]) == [
        KVCacheGroupSpec(["0", "2"], full()),
        KVCacheGroupSpec(["3"], window()),
        KVCacheGroupSpec(["1"], window()),
    ]
    assert create_kv_cache_group_specs(spec, []) == []


def test_group_of_a_layer_that_computes_a_window() -> None:
    spec = {"a": full(), "b": full(sliding_window=48), "c": full()}
    [group] = create_kv_cache_group_specs(spec, [["a", "b", "c"]])
    assert group.kv_cache_spec == full(sliding_window=48)
    assert [group.spec_of(name) for name in "abc"] == [full(), full(sliding_window=48), full()]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        pytest.param(
            [["0"], ["9"]], "expected one of the layers of kv_cache_spec, 0, 1, 2, 3; give it"
        ),
        pytest.param([["0"], []], "group 1: expected one layer or more, got none"),
        pytest.param([["0"], ["1"], ["0"]], "layer 0: expected it once, got it in groups 0 and 2"),
        pytest.param([["0", "0"]], "layer 0: expected it once, got it in groups 0 and 0"),
        pytest.param(
            [["1"], ["0", "2", "3"]],
            "group 1: layer 3: expected a spec that agrees with layer 0's FullAttentionSpec(",
        ),
    ],
)
def test_bad_groups(groups: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        create_kv_cache_group_specs(alternating(2, full(), window()), groups)


def test_two_windows_do_not_merge() -> None:
    spec = {"a": full(), "b": full(sliding_window=4), "c": full(attention_chunk_size=4)}
    with pytest.raises(ValueError, match="layer c: expected a spec that agrees with layer b's"):
        create_kv_cache_group_specs(spec, [["a", "b", "c"]])


# ---------------------------------------------------------------------------- everything kept


def test_unify_hybrid() -> None:
    spec: dict[str, KVCacheSpec] = {
        "f": full(),
        "s": window(48, num_kv_heads=2, page_size_padded=600),
        "c": chunked(64),
        "l": latent(),
    }
    unify_hybrid_kv_cache_specs(spec)
    assert spec == {
        "f": full(),
        "s": full(2, sliding_window=48, page_size_padded=600),
        "c": full(attention_chunk_size=64),
        "l": latent(),
    }
    assert isinstance(spec["l"], MLAAttentionSpec)


def test_unify_gives_windows_the_block_size_of_those_that_keep_all() -> None:
    """A padded block stays padded, and is never smaller than what it holds."""
    spec: dict[str, KVCacheSpec] = {
        "s": window(48),
        "p": window(48, page_size_padded=600),
        "w": window(48, page_size_padded=5000),
        "c": replace(chunked(64), block_size=128),
        "f": full(block_size=64),
    }
    unify_hybrid_kv_cache_specs(spec)
    kept = full(block_size=64, sliding_window=48)
    assert spec == {
        "s": kept,
        "p": replace(kept, page_size_padded=kept.page_size_bytes),
        "w": replace(kept, page_size_padded=5000),
        "c": full(block_size=64, attention_chunk_size=64),
        "f": full(block_size=64),
    }


@pytest.mark.parametrize(
    "spec",
    [
        {},
        layers((2, full())),
        layers((2, window())),
        layers((1, chunked()), (1, chunked(num_kv_heads=2))),
        layers((3, state())),
    ],
)
def test_unify_leaves_one_type_alone(spec: dict[str, KVCacheSpec]) -> None:
    with Unchanged(spec):
        unify_hybrid_kv_cache_specs(spec)


def test_unify_two_windows() -> None:
    spec: dict[str, KVCacheSpec] = {"a": window(4), "b": window(8)}
    unify_hybrid_kv_cache_specs(spec)
    assert spec == {"a": full(sliding_window=4), "b": full(sliding_window=8)}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"a": full(), "b": window(), "c": state()},
            "layer c: expected attention, which can keep all tokens, got MambaSpec; unset "
            "disable_hybrid_kv_cache_manager",
        ),
        (
            {"a": window(), "b": full(), "c": full(block_size=32)},
            "layer c: expected block_size 16, as layer a has, got 32",
        ),
        (
            {"a": window(), "b": replace(chunked(), block_size=32)},
            "layer b: expected block_size 16, as layer a has, got 32",
        ),
    ],
)
def test_unify_refuses(spec: dict[str, KVCacheSpec], message: str) -> None:
    with Unchanged(spec), pytest.raises(ValueError, match=re.escape(message)):
        unify_hybrid_kv_cache_specs(spec)


# ---------------------------------------------------------------------------- equal bytes


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([full(), window()], [full(), window()], id="equal-already"),
        # 256 and 1024 bytes: four times the tokens
        pytest.param([full(), window(num_kv_heads=4)], [full(1, 64), window(num_kv_heads=4)]),
        # 512 and 768 bytes
        pytest.param(
            [window(num_kv_heads=2), full(3)],
            [window(num_kv_heads=2, page_size_padded=768), full(3)],
            id="attention-padded",
        ),
        # 300 and 600 bytes
        pytest.param(
            [full(page_size_padded=300), full(2, page_size_padded=600)],
            [full(block_size=32, page_size_padded=600), full(2, page_size_padded=600)],
            id="padded-grows",
        ),
        # 256 and 512 bytes: a state has no tokens that could become more
        pytest.param([state(), full(2)], [state(page_size_padded=512), full(2)], id="state-padded"),
        # 512 and 256 bytes
        pytest.param([state(256), full()], [state(256), full(block_size=32)], id="large-state"),
        # 256 and 512 bytes
        pytest.param(
            [latent(), window(num_kv_heads=2)],
            [
                MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype="float16"),
                window(num_kv_heads=2),
            ],
            id="latent-grows",
        ),
        # 300 and 512 bytes
        pytest.param(
            [latent(page_size_padded=300), window(num_kv_heads=2)],
            [latent(page_size_padded=512), window(num_kv_heads=2)],
            id="latent-that-may-be-padded",
        ),
    ],
)
def test_equal_bytes(before: list[KVCacheSpec], after: list[KVCacheSpec]) -> None:
    spec = {str(at): one for at, one in enumerate(before)}
    with Unchanged(spec):
        unified = unify_kv_cache_spec_page_size(spec)
    assert unified == {str(at): one for at, one in enumerate(after)}
    assert len({one.page_size_bytes for one in unified.values()}) == 1


def test_bytes_that_cannot_be_equal() -> None:
    # 288 bytes do not divide 512.
    spec = {"big": full(2), "a": latent(9), "b": window(), "c": latent(9)}
    message = (
        "bytes of a block: expected divisors of the 512 of layer big, got a with 288, c with 288; "
        "choose block sizes so that they divide, or set page_size_padded of these layers"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        unify_kv_cache_spec_page_size(spec)
    with pytest.raises(ValueError, match=re.escape(message)):
        get_kv_cache_groups(config(), spec)


def test_no_layers_no_bytes() -> None:
    assert unify_kv_cache_spec_page_size({}) == {}


# ---------------------------------------------------------------------------- groups of a model


def test_one_spec_is_one_group() -> None:
    assert get_kv_cache_groups(config(), layers((3, window()))) == [
        KVCacheGroupSpec(["0", "1", "2"], window())
    ]
    assert get_kv_cache_groups(config(), {}) == []


def test_one_type_is_one_group() -> None:
    [group] = get_kv_cache_groups(config(), {"a": full(), "b": full(2), "c": full()})
    assert group == KVCacheGroupSpec(["a", "b", "c"], full(), {"b": full(2)})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # S F S F
        pytest.param(alternating(2, window(), full()), ["0 2", "1 3"], id="as-many"),
        # S S S F S S S F: groups of 2; the six S in turn
        pytest.param(
            alternating(2, window(), window(), window(), full()),
            ["0 4", "1 5", "2 6", "3 7"],
            id="three-to-one",
        ),
        # groups of 2, five S: 2 + 2 + 1
        pytest.param(
            layers((2, full()), (5, window())), ["0 1", "2 5", "3 6", "4"], id="cut-with-rest"
        ),
        # 4 < 1.5 * 3: not cut
        pytest.param(layers((3, full()), (4, window())), ["0 1 2", "3 4 5 6"], id="nearly-equal"),
        # 3 = 1.5 * 2: cut in 2 + 1
        pytest.param(layers((2, full()), (3, window())), ["0 1", "2 4", "3"], id="half-as-many"),
        pytest.param(
            layers((2, full()), (2, window()), (2, chunked()), (2, state())),
            ["0 1", "2 3", "4 5", "6 7"],
            id="four-kinds",
        ),
        pytest.param(
            layers((1, full()), (1, window(4)), (1, window(8))), ["0", "1", "2"], id="two-windows"
        ),
        # Four times the tokens in the blocks of layers 0 and 1: no longer equal to layers 2 and 3
        pytest.param(
            layers((2, full()), (2, full(4)), (2, window(num_kv_heads=4))),
            ["0 1", "2 3", "4 5"],
            id="two-block-sizes",
        ),
    ],
)
def test_groups(spec: dict[str, KVCacheSpec], expected: list[str]) -> None:
    with Unchanged(spec):
        assert names(get_kv_cache_groups(config(), spec)) == expected


@pytest.mark.parametrize("disabled", [False, None, "missing"])
def test_hybrid_groups_unless_disabled(disabled: bool | str | None) -> None:
    settings: Any = config(disable_hybrid_kv_cache_manager=False)
    if disabled == "missing":
        settings.scheduler_config = SimpleNamespace(max_num_batched_tokens=64)
    else:
        settings.scheduler_config.disable_hybrid_kv_cache_manager = disabled
    assert len(get_kv_cache_groups(settings, alternating(2, window(), full()))) == 2


def test_one_group_where_hybrid_is_disabled() -> None:
    spec = alternating(2, window(), full())
    with Unchanged(spec):
        [group] = get_kv_cache_groups(config(disable_hybrid_kv_cache_manager=True), spec)
    windowed = full(sliding_window=48)
    assert group == KVCacheGroupSpec(["0", "1", "2", "3"], windowed, {"1": full(), "3": full()})
    with pytest.raises(ValueError, match="layer 1: expected attention, which can keep all"):
        get_kv_cache_groups(
            config(disable_hybrid_kv_cache_manager=True), alternating(2, full(), state())
        )


KINDS = (full(), full(2), window(), window(8), window(num_kv_heads=3), chunked(), state(), latent())


@given(st.lists(st.sampled_from(KINDS), max_size=12))
def test_every_layer_is_in_one_group(drawn: list[KVCacheSpec]) -> None:
    spec = {f"layer{at}": one for at, one in enumerate(drawn)}
    try:
        groups = get_kv_cache_groups(config(), spec)
    except ValueError:
        # Latent attention is the only kind here that can be stuck.
        assert latent() in drawn
        return
    assert sorted(name for group in groups for name in group.layer_names) == sorted(spec)
    for group in groups:
        for name in group.layer_names:
            own = group.spec_of(name)
            assert own.kept == spec[name].kept == group.kv_cache_spec.kept
            assert own.block_size == group.kv_cache_spec.block_size
            if len(groups) > 1:
                assert own.page_size_bytes == groups[0].kv_cache_spec.page_size_bytes
