"""When blocks are rewritten as a whole, and what that asks of memory: bases and distances of any
alignment, and bytes of others all around.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kvxfer.kernels import postprocess, rewrite_gather
from kvxfer.kernels.block_rewrite import BlockRewrite
from kvxfer.kernels.postprocess import CyclePrograms, rewrite_blocks
from kvxfer.kernels.rewrite_gather import gathers, sources_of_words
from kvxfer.kernels.segments import Segments, segments_of
from tests.helpers import POISON, assert_same_bytes, poisoned
from tests.kernels.compiling import printed_without_interpreter
from tests.kernels.rewrite_cases import Case, check, naive, order, received, sources_of_rows

USED = Case(order("HND 4"), order("NHD 16"), num_heads=4, width=132)


def segments_for(case: Case, device: torch.device) -> Segments:
    return segments_of([received(case, device)[..., : case.width]])


@pytest.mark.parametrize(
    ("case", "as_a_whole"),
    [
        pytest.param(USED, True, id="units of 4 bytes"),
        pytest.param(replace(USED, width=136), True, id="units of 8 bytes"),
        pytest.param(replace(USED, width=5), True, id="single bytes"),
        pytest.param(replace(USED, num_covered=20), True, id="covered in part"),
        pytest.param(replace(USED, local=order("HND 16")), True, id="by head"),
        pytest.param(Case(order("NHD 4"), order("HND 4"), width=132), True, id="from by token"),
        pytest.param(replace(USED, num_heads=16, width=252), True, id="63 KiB"),
        pytest.param(replace(USED, num_heads=32, width=128 - 4), True, id="62 KiB"),
        pytest.param(replace(USED, num_heads=16, width=260), False, id="65 KiB"),
        pytest.param(replace(USED, width=144), False, id="units of 16 bytes"),
        pytest.param(replace(USED, gap=4), False, id="gaps"),
        pytest.param(replace(USED, width=128, gap=4), False, id="narrow because of gaps"),
        pytest.param(replace(USED, received=order("HND 24")), False, id="several blocks a set"),
        pytest.param(replace(USED, received=order("HND 32")), False, id="two blocks a set"),
        pytest.param(replace(USED, received=order("NHD 4")), False, id="nothing moves"),
    ],
)
def test_the_choice(
    case: Case, as_a_whole: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *_arguments: chosen.append(name)

    monkeypatch.setattr(postprocess, "gather_blocks", noted("whole"))
    monkeypatch.setattr(postprocess, "_move_cycles", noted("cycles"))
    segments = segments_for(case, device)
    ids = torch.tensor(case.block_ids, device=device)
    # Blocks of which nothing moves are written only where not covered
    covered = len(ids) * 16 - 1 if case.rewrite.moves_nothing else case.num_covered
    rewrite_blocks(segments, ids, case.rewrite, covered)
    rewrite_blocks(segments, ids, case.rewrite, covered, programs=CyclePrograms())
    assert chosen == ["whole" if as_a_whole else "cycles", "cycles"]
    assert gathers(segments, case.rewrite) == as_a_whole


@pytest.mark.parametrize("num_covered", [None, 0, 16, 37])
@pytest.mark.parametrize("local", ["HND 16", "NHD 16"])
@pytest.mark.parametrize(
    ("num_heads", "width"),
    [
        pytest.param(4, 132, id="lanes left"),
        pytest.param(4, 64 + 2, id="two bytes"),
        pytest.param(4, 136, id="eight bytes"),
        pytest.param(3, 7, id="odd"),
        pytest.param(8, 8, id="all lanes"),
        pytest.param(32, 124, id="62 KiB"),
    ],
)
def test_whole_blocks(
    num_heads: int, width: int, local: str, num_covered: int | None, device: torch.device
) -> None:
    case = replace(
        USED,
        local=order(local),
        num_heads=num_heads,
        width=width,
        num_sets=3,
        num_covered=num_covered,
        num_segments=2,
        tile_nbytes=32768,
    )
    assert gathers(segments_for(case, device), case.rewrite)
    check(case, device)


@dataclass(frozen=True)
class Placement:
    """How blocks lie: the first one ``offset`` bytes from 64, the next ``apart`` behind its end."""

    offset: int
    apart: int
    alignment: int
    width: int = 132


@pytest.mark.parametrize(
    "at",
    [
        Placement(0, 0, 16),
        Placement(4, 0, 4),
        Placement(8, 0, 8),
        Placement(12, 64, 4),
        Placement(0, 4, 4),
        Placement(16, 8, 8),
        Placement(0, 1056, 16),
        Placement(0, 0, 16, width=7),
        Placement(2, 0, 2, width=6),
        Placement(3, 32, 1, width=6),
        Placement(16, 24, 8, width=136),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_covered", [None, 21])
def test_blocks_of_any_alignment(
    at: Placement, num_covered: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is told what holds for every block; a wrong promise is an error on a GPU."""
    case = replace(USED, width=at.width, num_covered=num_covered)
    sent = received(case, device)
    num_blocks, block_nbytes = len(sent), sent[0].nbytes
    memory = poisoned((at.offset + num_blocks * (block_nbytes + at.apart),), device)
    assert memory.data_ptr() % 64 == 0
    blocks = memory[at.offset :].view(num_blocks, -1)[:, :block_nbytes]
    view = blocks.view(sent.shape)
    view.copy_(sent)
    promised: list[int] = []
    kernel = rewrite_gather.gather_kernel

    class Noting:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            def launch(*arguments: object, ALIGNMENT: int, **options: object) -> None:  # noqa: N803
                promised.append(ALIGNMENT)
                kernel[grid](*arguments, ALIGNMENT=ALIGNMENT, **options)

            return launch

    monkeypatch.setattr(rewrite_gather, "gather_kernel", Noting())
    rewrite_blocks(
        segments_of([view]), torch.tensor(case.block_ids, device=device), case.rewrite, num_covered
    )
    assert promised == [at.alignment]
    assert_same_bytes(view.contiguous(), naive(case, sent).to(device))
    view.fill_(POISON)
    assert bool((memory == POISON).all())


def test_the_alignment_of_several_layers(device: torch.device) -> None:
    memory = poisoned((4, 4, 2, 132), device)
    shifted = poisoned((4 + memory.nbytes,), device)[4:].view(memory.shape)
    assert segments_of([memory]).alignment_nbytes == 16
    assert segments_of([memory, shifted]).alignment_nbytes == 4
    # What rows share is less than what blocks share
    assert segments_of([memory]).unit_nbytes == 4


@pytest.mark.parametrize("local", ["HND 8", "NHD 8"])
def test_the_source_of_each_word(local: str) -> None:
    """A gather reads a source for every lane, those without a word too."""
    rewrite = BlockRewrite(3, order("HND 4"), order(local))
    sources = sources_of_words(rewrite, 24 * 5, 128).tolist()
    rows = sources_of_rows(rewrite)
    assert sources[:120] == [rows[row] * 5 + word for row in range(24) for word in range(5)]
    assert sources[120:] == [0] * 8


PTX = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvxfer.kernels import rewrite_gather as module
for alignment in (16, 8, 4):
    consts = dict(NUM_WORDS=4224, LANES=8192, TOKEN_WORDS=264, BLOCK_TOKENS=16, COVERS=True)
    consts |= dict(WORD=module.tl.int32, ALIGNMENT=alignment)
    signature = {"table": "*i64", "block_ids": "*i64", "sources": "*i32"}
    signature |= {"num_covered_tokens": "i32"} | {name: "constexpr" for name in consts}
    source = ASTSource(
        fn=module.gather_kernel,
        signature=signature,
        constexprs={(4 + at,): value for at, value in enumerate(consts.values())},
    )
    target = GPUTarget("cuda", 90, 32)
    kernel = triton.compile(source, target=target, options=dict(num_warps=16))
    stores = re.findall(r"st[.]global[.]([a-z0-9.]+)", kernel.asm["ptx"])
    print(*sorted(set(stores)))
"""


def test_the_compiler_sees_the_alignment() -> None:
    """Compiled for a GPU, which need not be there: 16, 8 and 4 bytes an access."""
    printed = printed_without_interpreter(PTX).splitlines()
    assert printed == ["v4.b32", "v2.b32", "b32"]
