"""Which layers share a block table.

All layers of a pool take their blocks from the same ids, so a block has the same bytes in every
group, or there is one group only. From the layers' specs to groups, the first that applies:

- one group whose layers share one spec;
- one group of one type: the layers keep the same tokens in blocks of as many tokens, but have other
  heads, hence other bytes;
- several groups (full attention beside windows or states): blocks are made equally large, layers
  with equal specs are together, and long lists of them are cut so that every group has about as
  many layers, since a group with fewer leaves the rest of its blocks' bytes unused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from kvxfer.cache.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    PlanningConfig,
    SlidingWindowSpec,
    ceil_div,
)

_MOST_GROUP_SIZE_RATIO = 1.5
"""Below this, one group of each kind wastes less than cutting the larger kind in two: with 20 and
25 layers, groups of 25 leave 5 of 50 places unused, groups of 20 (20, 13 and 12 layers) 15 of 60.
"""


def get_kv_cache_groups(
    config: PlanningConfig, kv_cache_spec: Mapping[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """The groups of a model's layers; none for a model without a cache. ``config``: read is
    ``scheduler_config.disable_hybrid_kv_cache_manager`` (missing: False); when set, there is one
    group, see :func:`unify_hybrid_kv_cache_specs`. Raises ValueError for layers whose blocks cannot
    be made equally large, or not be put in one group.
    """
    specs = dict(kv_cache_spec)
    if getattr(config.scheduler_config, "disable_hybrid_kv_cache_manager", False):
        unify_hybrid_kv_cache_specs(specs)
    if not specs:
        return []
    if is_kv_cache_type_uniform(specs):
        return [uniform_type_group(specs)]
    specs = unify_kv_cache_spec_page_size(specs)
    return create_kv_cache_group_specs(specs, _cut_evenly(_layers_by_spec(specs)))


def is_kv_cache_type_uniform(kv_cache_spec: Mapping[str, KVCacheSpec]) -> bool:
    """Whether all keep the same tokens, in blocks of as many; True without layers."""
    return len({table_key(spec) for spec in kv_cache_spec.values()}) <= 1


def uniform_type_group(kv_cache_spec: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    """All as one group. ValueError for no layers, or two that cannot share a table."""
    if not kv_cache_spec:
        raise ValueError("kv_cache_spec: expected one layer or more, got none")
    first_name, first = next(iter(kv_cache_spec.items()))
    for name, spec in kv_cache_spec.items():
        if table_key(spec) != table_key(first):
            raise ValueError(
                f"layer {name}: expected {table_words(first)}, as layer {first_name} has, got "
                f"{table_words(spec)}; plan layers of several kinds with get_kv_cache_config"
            )
    return _group(kv_cache_spec, list(kv_cache_spec), _merge_specs(list(kv_cache_spec.values())))


def create_kv_cache_group_specs(
    kv_cache_spec: Mapping[str, KVCacheSpec], grouped_layer_names: Sequence[Sequence[str]]
) -> list[KVCacheGroupSpec]:
    """One group for each list of layers, whose specs are equal, or differ only in the window that
    layers which keep everything compute. Raises ValueError for an unknown layer, one that is named
    twice, an empty group, or layers of a group that cannot share one spec.
    """
    groups: list[KVCacheGroupSpec] = []
    group_of: dict[str, int] = {}
    for group_id, layer_names in enumerate(grouped_layer_names):
        if not layer_names:
            raise ValueError(f"group {group_id}: expected one layer or more, got none")
        for name in layer_names:
            if name not in kv_cache_spec:
                raise ValueError(
                    f"layer {name} of group {group_id}: expected one of the layers of "
                    f"kv_cache_spec, {', '.join(kv_cache_spec) or 'none'}; give it a spec or take "
                    "it out of grouped_layer_names"
                )
            if name in group_of:
                raise ValueError(
                    f"layer {name}: expected it once, got it in groups {group_of[name]} and "
                    f"{group_id}"
                )
            group_of[name] = group_id
        merged = _merge_specs([kv_cache_spec[name] for name in layer_names])
        if merged is None:
            raise ValueError(f"group {group_id}: {_first_difference(kv_cache_spec, layer_names)}")
        groups.append(_group(kv_cache_spec, list(layer_names), merged))
    return groups


def _merge_specs(specs: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
    """Layers that keep everything may compute one window beside none. None: no one spec."""
    first = specs[0]
    if all(spec == first for spec in specs):
        return first
    whole = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    if len(whole) != len(specs) or len({_computing_all(spec) for spec in whole}) > 1:
        return None
    windows = {(spec.sliding_window, spec.attention_chunk_size) for spec in whole} - {(None, None)}
    if len(windows) > 1:
        return None
    [(sliding_window, attention_chunk_size)] = windows
    return replace(
        whole[0], sliding_window=sliding_window, attention_chunk_size=attention_chunk_size
    )


def unify_hybrid_kv_cache_specs(kv_cache_spec: dict[str, KVCacheSpec]) -> None:
    """Make layers of several kinds one type, in place: those with a window or chunks then keep all
    tokens, and still compute what they did. They get the block size of the layers that kept all
    tokens already, where these have one. Layers of one type stay as they are. Raises ValueError for
    a state layer beside others, or blocks of other sizes. Nothing has changed then.
    """
    if is_kv_cache_type_uniform(kv_cache_spec):
        return
    whole = {s.block_size for s in kv_cache_spec.values() if isinstance(s, FullAttentionSpec)}
    block_size = whole.pop() if len(whole) == 1 else None
    unified = {
        name: _keep_everything(name, spec, block_size) for name, spec in kv_cache_spec.items()
    }
    first_name, first = next(iter(unified.items()))
    for name, spec in unified.items():
        if spec.block_size != first.block_size:
            raise ValueError(
                f"layer {name}: expected block_size {first.block_size}, as layer {first_name} has, "
                f"got {spec.block_size}; layers of one group need blocks of as many tokens, so "
                "unset disable_hybrid_kv_cache_manager or give all layers one block_size"
            )
    kv_cache_spec.update(unified)


def unify_kv_cache_spec_page_size(
    kv_cache_spec: Mapping[str, KVCacheSpec],
) -> dict[str, KVCacheSpec]:
    """The specs with blocks of equal bytes in all layers: as large as the largest.

    A smaller block gets more tokens where it then has exactly these bytes, and is padded where not.
    Latent attention can be padded only where its spec has ``page_size_padded`` already, which says
    that its backend takes it; a state has no tokens and is always padded.

    Raises:
        ValueError: layers whose blocks can neither grow nor be padded; names them with both sizes.
    """
    if not kv_cache_spec:
        return {}
    largest = max(kv_cache_spec, key=lambda name: kv_cache_spec[name].page_size_bytes)
    nbytes = kv_cache_spec[largest].page_size_bytes
    unified = {name: _with_block_nbytes(spec, nbytes) for name, spec in kv_cache_spec.items()}
    stuck = [name for name, spec in unified.items() if spec is None]
    if stuck:
        sizes = ", ".join(f"{name} with {kv_cache_spec[name].page_size_bytes}" for name in stuck)
        raise ValueError(
            f"bytes of a block: expected divisors of the {nbytes} of layer {largest}, got {sizes}; "
            "choose block sizes so that they divide, or set page_size_padded of these layers"
        )
    return {name: spec for name, spec in unified.items() if spec is not None}


def _with_block_nbytes(spec: KVCacheSpec, nbytes: int) -> KVCacheSpec | None:
    """``spec`` with blocks of ``nbytes``, at least its own, or None."""
    ratio, rest = divmod(nbytes, spec.page_size_bytes)
    if (ratio, rest) == (1, 0):
        return spec
    match spec:
        case AttentionSpec() if rest == 0:
            padded = nbytes if spec.page_size_padded is not None else None
            return replace(spec, block_size=spec.block_size * ratio, page_size_padded=padded)
        case MLAAttentionSpec(page_size_padded=None):
            return None
        case AttentionSpec() | MambaSpec():
            return replace(spec, page_size_padded=nbytes)
    return None


def _keep_everything(name: str, spec: KVCacheSpec, block_size: int | None) -> FullAttentionSpec:
    """``spec`` without its window, in blocks of ``block_size`` tokens (None: its own)."""
    match spec:
        case FullAttentionSpec():
            return spec
        case SlidingWindowSpec() | ChunkedLocalAttentionSpec():
            same = {at.name: getattr(spec, at.name) for at in fields(spec)}
            unpadded = replace(
                spec, block_size=block_size or spec.block_size, page_size_padded=None
            )
            if spec.page_size_padded is not None:
                same["page_size_padded"] = max(spec.page_size_padded, unpadded.page_size_bytes)
            return FullAttentionSpec(**{**same, "block_size": unpadded.block_size})
    raise ValueError(
        f"layer {name}: expected attention, which can keep all tokens, got {type(spec).__name__}; "
        "unset disable_hybrid_kv_cache_manager"
    )


def _computing_all(spec: FullAttentionSpec) -> FullAttentionSpec:
    return replace(spec, sliding_window=None, attention_chunk_size=None)


def table_key(spec: KVCacheSpec) -> tuple[int, str]:
    """Equal for layers that can share a block table."""
    return spec.block_size, spec.kept


def table_words(spec: KVCacheSpec) -> str:
    """What :func:`table_key` tells apart, in words."""
    return f"{spec.kept} in blocks of {spec.block_size} tokens"


def _group(
    kv_cache_spec: Mapping[str, KVCacheSpec], layer_names: list[str], merged: KVCacheSpec | None
) -> KVCacheGroupSpec:
    shared = merged or kv_cache_spec[layer_names[0]]
    own = {name: kv_cache_spec[name] for name in layer_names if kv_cache_spec[name] != shared}
    return KVCacheGroupSpec(layer_names, shared, own)


def _first_difference(kv_cache_spec: Mapping[str, KVCacheSpec], layer_names: Sequence[str]) -> str:
    # With three windows a layer may agree with the very first one.
    other, name = next(
        (other, name)
        for at, name in enumerate(layer_names)
        for other in layer_names[:at]
        if _merge_specs([kv_cache_spec[other], kv_cache_spec[name]]) is None
    )
    return (
        f"layer {name}: expected a spec that agrees with layer {other}'s {kv_cache_spec[other]}, "
        f"got {kv_cache_spec[name]}"
    )


def _layers_by_spec(kv_cache_spec: Mapping[str, KVCacheSpec]) -> list[list[str]]:
    alike: list[list[str]] = []
    for name, spec in kv_cache_spec.items():
        for names in alike:
            if _merge_specs([*(kv_cache_spec[other] for other in names), spec]) is not None:
                names.append(name)
                break
        else:
            alike.append([name])
    return alike


def _cut_evenly(alike: list[list[str]]) -> list[list[str]]:
    """Groups of as many layers as the shortest list; uncut where all are about equally long."""
    sizes = [len(names) for names in alike]
    fewest, most = min(sizes), max(sizes)
    group_size = most if most < fewest * _MOST_GROUP_SIZE_RATIO else fewest
    groups: list[list[str]] = []
    for names in alike:
        num_groups = ceil_div(len(names), group_size)
        # Every num_groups-th layer: each rank of a pipeline then has layers of all groups.
        groups += [names[at::num_groups] for at in range(num_groups)]
    return groups
