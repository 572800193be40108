"""The kernel of digests, compiled for a GPU. ``tests/tensors/test_kv_digest.py`` runs it."""

from __future__ import annotations

import pytest

from tests.kernels.compiling import printed_without_interpreter

PTX = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvxfer.kernels.kv_digest import CELLS, ELEMENTS, MAX_WORDS, TILES, WARPS, _digest_kernel

align_nbytes = int(sys.argv[1])
element_nbytes = min(8, align_nbytes)
names = _digest_kernel.arg_names
fixed = {
    **{"ELEMENT": ELEMENTS[element_nbytes], "ALIGN": align_nbytes, "CELLS": CELLS, "TILES": TILES},
    **{"WORDS": MAX_WORDS, "BY_CHANNEL": sys.argv[2] == "1"},
}
signature = {name: "constexpr" if name in fixed else "*i64" for name in names}
source = ASTSource(_digest_kernel, signature, fixed)
options = {"num_warps": WARPS}
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
print(len(re.findall(r"ld\\.global\\.b%d" % (8 * element_nbytes), ptx)))
print(len(re.findall(r"ld\\.global\\.v2\\.b64", ptx)))
print(len(re.findall(r"(?:atom|red)\\.(?:\\w+\\.)*add\\.(?:noftz\\.)?[us]64", ptx)))
"""


@pytest.mark.slow  # three compilers' runs, of some seconds each
@pytest.mark.parametrize(("align_nbytes", "by_channel"), [(16, False), (8, False), (1, True)])
def test_it_compiles_for_a_gpu(align_nbytes: int, by_channel: bool) -> None:
    """1,024 words of a tile are 8 for each of 128 threads, two at once where they lie at multiples
    of 16 bytes; one sum leaves a program.
    """
    num_loads, num_pairs, num_adds = map(
        int, printed_without_interpreter(PTX, str(align_nbytes), str(int(by_channel))).split()
    )
    if align_nbytes == 16:
        assert num_pairs >= 4
    else:
        assert num_loads >= 8 * (8 // min(8, align_nbytes))
    assert num_adds == 1
