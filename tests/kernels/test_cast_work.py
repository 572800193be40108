"""How many programs a cast has."""

from __future__ import annotations

import pytest

from kvxfer.kernels.cast_work import INVERSE, ONE, TABLE, TOKENS, CastEnd, plan_cast
from kvxfer.kernels.strided_work import WHOLE_GPU, CopySide

CELLS = CopySide(
    block_tokens=16, kernel_tokens=16, stride_block=65536, stride_head=8192, stride_token=512
)


def num_programs(source: int, sink: int, asked: int) -> int:
    """Of a cast by this kind of scales at each side, with as much to do as anybody wants."""
    given, taken = (
        CastEnd(cells=CELLS, dtype=dtype, item_nbytes=nbytes, scales=kind, scale_cells=CELLS)
        for dtype, nbytes, kind in (("bfloat16", 2, source), ("float8_e4m3fn", 1, sink))
    )
    launch = plan_cast(
        *(given, taken),
        num_tokens=1 << 16,
        num_heads=8,
        num_elements=128,
        num_regions=64,
        num_programs=asked,
        is_native=True,
    )
    return launch.num_programs


@pytest.mark.parametrize("source", [ONE, TABLE, TOKENS])
@pytest.mark.parametrize(
    ("sink", "divides"), [(ONE, False), (INVERSE, False), (TABLE, True), (TOKENS, True)]
)
def test_what_divides_is_done_by_the_whole_gpu(source: int, sink: int, divides: bool) -> None:
    """A few programs do not keep a link busy with it."""
    whole = num_programs(source, sink, WHOLE_GPU)
    assert whole > 264
    assert num_programs(source, sink, 24) == (whole if divides else 24)
