"""The kernel of digests, compiled for a GPU. ``tests/tensors/test_kv_digest.py`` runs it."""

from __future__ import annotations

import pytest

from tests.kernels.compiling import printed_without_interpreter

PTX = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvxfer.kernels.kv_digest import CELLS, ELEMENTS, MAX_WORDS, WARPS, _digest_kernel

element = ELEMENTS[int(sys.argv[1])]
names = _digest_kernel.arg_names
fixed = {"ELEMENT": element, "CELLS": CELLS, "WORDS": MAX_WORDS, "BY_CHANNEL": sys.argv[2] == "1"}
signature = {name: "constexpr" if name in fixed else "*i64" for name in names}
source = ASTSource(_digest_kernel, signature, fixed)
options = {"num_warps": WARPS}
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
print(len(re.findall(r"ld\\.global\\.b%d" % (8 * int(sys.argv[1])), ptx)))
print(len(re.findall(r"(?:atom|red)\\.(?:\\w+\\.)*add\\.(?:noftz\\.)?[us]64", ptx)))
"""


@pytest.mark.slow  # two compilers' runs, of some seconds each
@pytest.mark.parametrize(("element_nbytes", "by_channel"), [(8, False), (1, True)])
def test_it_compiles_for_a_gpu(element_nbytes: int, by_channel: bool) -> None:
    """1,024 words of a program are 8 for each of 128 threads; one sum leaves a program."""
    num_loads, num_adds = map(
        int, printed_without_interpreter(PTX, str(element_nbytes), str(int(by_channel))).split()
    )
    assert num_loads >= 8 * (8 // element_nbytes)
    assert num_adds == 1
