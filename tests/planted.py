"""Faults in the arithmetic of copies, which the oracles have to find. Each function plants one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed

from kvxfer.integrations.vllm import interior
from kvxfer.kernels import cast_work
from kvxfer.tensors import element_cast, strided_index
from kvxfer.tensors import strided_copy as copying
from kvxfer.tensors.strided_copy import Bytes
from kvxfer.tensors.strided_index import Ids
from kvxfer.transfer import interleave
from kvxfer.transfer import plan as planning
from kvxfer.transfer.casts import Values
from kvxfer.transfer.interleave import Interleave, Shared
from kvxfer.transfer.layout import Region
from kvxfer.transfer.plan import Side, Tile
from tests.builders import EngineShape

Plant = Callable[[pytest.MonkeyPatch], None]


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """With the fault, and nothing that was found before and is remembered."""
    _forget()
    try:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            yield
    finally:
        _forget()


def _forget() -> None:
    copies = sys.modules.get(_DEVICE_COPY)  # where there is Triton
    for each in (
        strided_index._first_units,
        interleave.shared,
        *([vars(copies)["_plan_cast"]] if copies is not None else []),
    ):
        each.cache_clear()


_DEVICE_COPY = "kvxfer.tensors.device_copy"


# ---------------------------------------------------------------- casts


def heads_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head has the scale of another one."""
    scales_of = copying._scales

    def scales(values: Values, region: int) -> torch.Tensor | None:
        found = scales_of(values, region)
        return None if found is None else found.flip(0)

    monkeypatch.setattr(copying, "_scales", scales)


def scales_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink's elements are made with the source's scales."""
    sides_of_pair = planning._sides

    def sides(pair: planning._Pair) -> tuple[Side, Side]:
        source, sink = sides_of_pair(pair)
        assert source.values
        assert sink.values
        return source, changed(sink, values=changed(sink.values, scales=source.values.scales))

    monkeypatch.setattr(planning, "_sides", sides)


def truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    """To bfloat16 by leaving the lower half of each float32 out."""
    quantised = element_cast.quantised

    def cut(values: torch.Tensor, dtype: str, *more: Any, **options: Any) -> Bytes:
        values.view(torch.int32).bitwise_and_(-65536)
        return quantised(values, dtype, *more, **options)

    monkeypatch.setattr(copying, "quantised", cut)


def nothing_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger than the largest number of a type becomes an infinity."""
    monkeypatch.setattr(element_cast, "LARGEST", {})


def times_the_reciprocal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a scale that is no power of two, where it has to be divided."""

    def words(values: Values, num_heads: int, *, is_sink: bool) -> tuple[int, Ids]:
        if not is_sink or not values.scales:
            return cast_work.ONE, np.zeros(0, np.int64)
        scales = 1 / np.array([each * num_heads for each in values.scales], np.float32)
        return cast_work.INVERSE, scales.reshape(-1).view(np.int32).astype(np.int64)

    monkeypatch.setattr(f"{_DEVICE_COPY}._scale_words", words)


def channels_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes channels that are apart for those of a cell."""
    monkeypatch.setattr(cast_work.CastEnd, "has_channels_apart", False)


# ---------------------------------------------------------------- interleaves


def runs_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's own tokens are counted as if each run had one."""
    monkeypatch.setattr(Interleave, "own", lambda kept, token: token // kept.size)


def whole_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what two ranks share the tokens behind the last whole period are not counted."""
    monkeypatch.setattr(Shared, "count", lambda each, end: end // each.period * each.num_tokens)


def ranks_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank has the first run."""
    runs = interleave._runs

    def swapped(kept: Interleave, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        return runs(changed(kept, index=kept.size - 1 - kept.index), lo, hi)

    monkeypatch.setattr(interleave, "_runs", swapped)


def one_unit_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each period the second unit is taken for the first."""
    first_units = strided_index._first_units
    monkeypatch.setattr(
        strided_index, "_first_units", lambda stripe: np.roll(first_units(stripe), -1)
    )


# ---------------------------------------------------------------- drafts


def of_the_models_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink rank reads the draft of the source ranks that have its share of the model only."""
    cover = planning._cover_heads

    def covered(
        taker: planning._Holder,
        givers: Sequence[planning._Holder],
        takers: Sequence[planning._Holder],
    ) -> Iterator[tuple[planning._Holder | None, int, int]]:
        for giver, lo, hi in cover(taker, givers, takers):
            if not taker.region.is_draft or (giver and giver.rank == taker.rank):
                yield giver, lo, hi

    monkeypatch.setattr(planning, "_cover_heads", covered)


def blocks_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's blocks have as many tokens as the model's."""
    tile_of = planning.side_tile

    def tile(region: Region, *more: int) -> Tile:
        found, tokens = tile_of(region, *more), EngineShape(num_kv_heads=1).block_tokens
        if not region.is_draft:
            return found
        return changed(found, block_tokens=tokens, kernel_tokens=tokens)

    monkeypatch.setattr(planning, "side_tile", tile)


def table_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's blocks are looked up among those of the model's group."""
    side_of = planning.plain_side

    def side(*args: Any) -> Side:
        return changed(side_of(*args), group=0)

    monkeypatch.setattr(planning, "plain_side", side)


def no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's layers are left out."""
    aliases = planning._aliases
    monkeypatch.setattr(
        planning,
        "_aliases",
        lambda regions: [each for each in aliases(regions) if not each[0].is_draft],
    )


# ---------------------------------------------------------------- latents


def no_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of scales do not move."""
    planes = interior.packed_planes
    monkeypatch.setattr(interior, "packed_planes", lambda *args: planes(*args)[:1])


def scales_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of scales are looked for before those of values."""
    turned = {kind: parts[::-1] for kind, parts in interior._PACKED.items()}
    monkeypatch.setattr(interior, "_PACKED", turned)


def cells_of_twice_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many tokens are taken to share a state."""
    side_of = planning.plain_side

    def side(*args: Any) -> Side:
        found = side_of(*args)
        return changed(found, cell_tokens=found.cell_tokens * (1 + (found.cell_tokens > 1)))

    monkeypatch.setattr(planning, "plain_side", side)
