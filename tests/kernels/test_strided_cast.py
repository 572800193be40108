"""What the compiler makes of the casting kernel, for a GPU that need not be there."""

from __future__ import annotations

import pytest

from tests.kernels.compiling import printed_without_interpreter

PTX = """
import re
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvxfer.kernels import strided_cast as module
capability, native = int(sys.argv[1]), sys.argv[2] == "native"
source, sink = "bfloat16", "float8_e4m3fn"
consts = dict(SOURCE=source, SINK=sink)
consts |= dict(SOURCE_ELEMENT=module._WORDS[source], SINK_ELEMENT=module._WORDS[sink])
consts |= dict(SOURCE_SCALES=0, SINK_SCALES=1, VEC=8, SOURCE_APART=False, SINK_APART=False)
consts |= dict(ROWS=256, CHANNELS=128, NATIVE=native)
names = ["numbers", "source_table", "sink_table", "source_ids", "sink_ids"]
ast = ASTSource(
    fn=module._cast_kernel,
    signature={name: "*i64" for name in names} | {name: "constexpr" for name in consts},
    constexprs={(5 + at,): value for at, value in enumerate(consts.values())},
)
target = GPUTarget("cuda", capability, 32)
ptx = triton.compile(ast, target=target, options=dict(num_warps=8, num_stages=1)).asm["ptx"]
for access in ("ld.global.v4.b32", "st.global.v2.b32", "satfinite.e4m3x2", "div.rn.f32"):
    print(ptx.count(access))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "how", "conversions"), [(90, "native", 64), (80, "integers", 0)]
)
def test_rows_are_read_by_16_bytes_and_converted_in_pairs(
    capability: int, how: str, conversions: int
) -> None:
    """256 rows of 128 elements by 256 threads: 128 elements a thread, 8 in an access."""
    printed = printed_without_interpreter(PTX, str(capability), how).split()
    assert list(map(int, printed)) == [16, 16, conversions, 128]
