"""The copying kernel, on a GPU or in Triton's interpreter, against the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from kvxfer.kernels.strided_copy import launch_copy
from kvxfer.kernels.strided_work import (
    NUM_PARAMS,
    WHOLE_GPU,
    CopySide,
    CopyWork,
    plan_launch,
    widest,
    word_nbytes,
)
from tests.conftest import HAS_CUDA
from tests.helpers import assert_same_bytes, poisoned
from tests.kernels.compiling import printed_without_interpreter
from tests.oracle import oracle_offset

DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
NUM_REGIONS = 3


def hnd(kernel_tokens: int, num_heads: int, inner: int, **more: int) -> CopySide:
    """Kernel blocks [head][token][inner], one behind the other."""
    return side_of(
        kernel_tokens, num_heads * kernel_tokens * inner, kernel_tokens * inner, inner, **more
    )


def nhd(kernel_tokens: int, num_heads: int, inner: int, **more: int) -> CopySide:
    """Kernel blocks [token][head][inner]."""
    return side_of(
        kernel_tokens, num_heads * kernel_tokens * inner, inner, num_heads * inner, **more
    )


def turned(kernel_tokens: int, num_heads: int, inner: int, channel: int) -> CopySide:
    """Kernel blocks [head][channel][token]."""
    head = kernel_tokens * inner
    stride_channel = kernel_tokens * channel
    return side_of(kernel_tokens, num_heads * head, head, channel, stride_channel=stride_channel)


def side_of(
    kernel_tokens: int,
    block: int,
    head: int,
    token: int,
    kernel_blocks: int = 1,
    padding: int = 0,
    stride_channel: int = 0,
    first_token: int = 0,
) -> CopySide:
    return CopySide(
        block_tokens=kernel_tokens * kernel_blocks,
        kernel_tokens=kernel_tokens,
        stride_block=block + padding,
        stride_head=head,
        stride_token=token,
        stride_channel=stride_channel,
        first_token=first_token,
    )


@dataclass(frozen=True, slots=True)
class Pool:
    """One flat memory with all regions, ids in random order, and a few blocks to spare."""

    memory: Tensor
    bases: Tensor
    ids: Tensor

    @property
    def table(self) -> Tensor:
        return self.bases + self.memory.data_ptr()


def pool_of(side: CopySide, work: CopyWork, seed: int, *, lead: int, poison: bool) -> Pool:
    generator = torch.Generator().manual_seed(seed)
    num_needed = -(-(side.first_token + work.num_tokens) // side.block_tokens)
    num_blocks = num_needed + 2
    region = num_blocks * (side.block_tokens // side.kernel_tokens) * side.stride_block
    region += -region % 16  # whatever the stride, bases are as crooked as the lead
    size = lead + NUM_REGIONS * region
    content = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    memory = poisoned((size,), DEVICE) if poison else content.to(DEVICE)
    bases = lead + torch.arange(NUM_REGIONS) * region
    ids = torch.randperm(num_blocks, generator=generator)[: max(1, num_needed)]
    return Pool(memory, bases.to(DEVICE), ids.to(DEVICE))


def strided_copy(
    source_table: Tensor,
    sink_table: Tensor,
    source_ids: Tensor,
    sink_ids: Tensor,
    work: CopyWork,
    num_programs: int,
) -> None:
    launch = plan_launch(work, source_table.numel(), num_programs)
    params = torch.tensor(launch.params, dtype=torch.int64, device=source_table.device)
    launch_copy(params, source_table, sink_table, source_ids, sink_ids, launch)


def check(work: CopyWork, *, lead: int = 0, programs: int = 3, seed: int = 1) -> int:
    """Against the oracle; returns the width of an access."""
    source = pool_of(work.source, work, seed, lead=lead, poison=False)
    sink = pool_of(work.sink, work, seed + 1, lead=lead, poison=True)
    align = 16
    for pool in (source, sink):
        for address in pool.table.tolist():
            while address % align:
                align //= 2
    work = replace(work, align_nbytes=align)
    before = source.memory.clone()
    want = sink.memory.clone().cpu()
    copy_by_oracle(before.cpu(), want, source.bases, sink.bases, source.ids, sink.ids, work)
    strided_copy(source.table, sink.table, source.ids, sink.ids, work, programs)
    assert_same_bytes(sink.memory, want)
    assert_same_bytes(source.memory, before)
    return plan_launch(work, NUM_REGIONS, programs).word_nbytes


def copy_by_oracle(
    source: Tensor,
    sink: Tensor,
    source_bases: Tensor,
    sink_bases: Tensor,
    source_ids: Tensor,
    sink_ids: Tensor,
    work: CopyWork,
) -> None:
    """Byte runs one at a time between flat uint8 memories; bases [num_regions] are byte offsets."""
    element = work.channel_nbytes or work.inner_nbytes
    runs = list(product(*map(range, (work.num_heads, work.inner_nbytes // element))))
    given_ids, taken_ids = source_ids.tolist(), sink_ids.tolist()
    bases = list(zip(source_bases.tolist(), sink_bases.tolist(), strict=True))
    for token in range(work.num_tokens):
        for head, channel in runs:
            given = oracle_offset(
                work.source, given_ids, work.source.first_token + token, head, channel
            )
            taken = oracle_offset(
                work.sink, taken_ids, work.sink.first_token + token, head, channel
            )
            for given_base, taken_base in bases:
                piece = source[given_base + given : given_base + given + element]
                sink[taken_base + taken : taken_base + taken + element] = piece


def work_of(source: CopySide, sink: CopySide, num_tokens: int, heads: int, inner: int) -> CopyWork:
    return CopyWork(
        source=source, sink=sink, num_tokens=num_tokens, num_heads=heads, inner_nbytes=inner
    )


@pytest.mark.parametrize(
    ("inner", "word"), [(1152, 16), (656, 16), (256, 16), (132, 4), (8, 8), (6, 2), (2, 2), (1, 1)]
)
def test_inner_sizes_and_the_access_they_allow(inner: int, word: int) -> None:
    """Of one region more than a tile; ids of both sides in random order, a partial last block."""
    num_tokens = 37 if inner > 100 else 300
    work = work_of(hnd(16, 2, inner), nhd(24, 2, inner), num_tokens, 2, inner)
    assert check(work) == word


@pytest.mark.parametrize(
    ("lead", "word"), [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1), (3, 1), (48, 16)]
)
def test_crooked_addresses_narrow_the_access(lead: int, word: int) -> None:
    work = work_of(hnd(8, 2, 32), nhd(16, 2, 32), 20, 2, 32)
    assert check(work, lead=lead) == word


@pytest.mark.parametrize(("padding", "word"), [(0, 16), (8, 8), (100, 4), (6, 2), (1, 1)])
def test_crooked_strides_narrow_the_access(padding: int, word: int) -> None:
    work = work_of(hnd(8, 2, 32, padding=padding), nhd(16, 2, 32), 20, 2, 32)
    assert check(work) == word


@pytest.mark.parametrize("programs", [1, 2, 5, 64, 1000, WHOLE_GPU])
def test_any_number_of_programs(programs: int) -> None:
    """5 tiles of 2 groups: programs end inside a tile, and outnumber the units."""
    work = work_of(hnd(16, 2, 132), nhd(24, 2, 132), 141, 2, 132)
    assert plan_launch(work, NUM_REGIONS, programs).num_programs == min(programs or 10, 10)
    check(work, programs=programs)


@pytest.mark.parametrize(
    ("programs", "wide", "narrow"),
    [(1, 1, 8), (24, 24, 192), (100, 100, 264), (1000, 1000, 1000), (WHOLE_GPU, None, 264)],
)
def test_narrow_words_have_more_programs(programs: int, wide: int | None, narrow: int) -> None:
    """The inputs of a convolution, 8,192 channels of 2 bytes, by token and by channel."""
    num_tokens = 3 * 400
    for inner, word, num in ((2, 2, narrow), (16, 16, wide)):
        work = work_of(nhd(3, 8192, inner), hnd(3, 8192, inner), num_tokens, 8192, inner)
        launch = plan_launch(work, NUM_REGIONS, programs)
        assert launch.word_nbytes == word
        assert num is None or launch.num_programs == num


@pytest.mark.parametrize("programs", [1, 3, 100])
@pytest.mark.parametrize(("num_heads", "pairs"), [(1, 1), (2, 4), (5, 8)])
def test_as_many_pairs_at_a_time_as_there_are(num_heads: int, pairs: int, programs: int) -> None:
    """Of 3 regions; 6 and 15 pairs leave some over."""
    work = work_of(hnd(16, num_heads, 48), nhd(24, num_heads, 48), 141, num_heads, 48)
    assert plan_launch(work, NUM_REGIONS, programs).pairs == pairs
    check(work, programs=programs)
    narrow = work_of(hnd(16, num_heads, 44), nhd(24, num_heads, 44), 141, num_heads, 44)
    assert plan_launch(narrow, NUM_REGIONS, programs).pairs == min(pairs, 4)
    check(narrow, programs=programs)


@pytest.mark.parametrize("inner", [256, 16, 144])
def test_on_a_whole_gpu_each_tile_of_a_pair_has_a_program(inner: int) -> None:
    heads = 5
    work = work_of(hnd(64, heads, inner), nhd(16, heads, inner), 200, heads, inner)
    launch = plan_launch(work, NUM_REGIONS, WHOLE_GPU)
    tiles = -(-200 * inner // 16 // launch.lanes)
    assert (launch.pairs, launch.num_programs) == (1, tiles * heads * NUM_REGIONS)
    check(work, programs=WHOLE_GPU)


@pytest.mark.parametrize("programs", [3, WHOLE_GPU])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17])
def test_few_tokens(num_tokens: int, programs: int) -> None:
    work = work_of(hnd(16, 2, 32, first_token=3), nhd(8, 2, 32), num_tokens, 2, 32)
    check(work, programs=programs)


@pytest.mark.parametrize(
    ("source_turned", "sink_turned"), [(True, False), (False, True), (True, True)]
)
@pytest.mark.parametrize("channel", [1, 2, 4])
def test_channels_apart(channel: int, source_turned: bool, sink_turned: bool) -> None:
    inner = 12
    together = replace(hnd(16, 2, inner), stride_channel=channel)
    work = work_of(
        turned(16, 2, inner, channel) if source_turned else together,
        turned(24, 2, inner, channel)
        if sink_turned
        else replace(nhd(24, 2, inner), stride_channel=channel),
        45,
        2,
        inner,
    )
    work = replace(work, channel_nbytes=channel)
    assert plan_launch(work, NUM_REGIONS, 3).tokens_first == sink_turned
    assert check(work) == check(work, programs=WHOLE_GPU) == channel


def test_heads_and_tokens_that_lie_together_are_joined() -> None:
    heads = widest(work_of(nhd(16, 8, 256), nhd(24, 8, 256), 100, 8, 256))
    assert (heads.num_heads, heads.inner_nbytes, heads.num_tokens) == (1, 2048, 100)
    latent = work_of(hnd(16, 1, 132), hnd(64, 1, 132, first_token=32), 160, 1, 132)
    tokens = widest(latent)
    assert (tokens.num_tokens, tokens.inner_nbytes) == (10, 16 * 132)
    assert (tokens.sink.block_tokens, tokens.sink.first_token) == (4, 2)
    assert word_nbytes(latent) == 4
    assert check(latent) == 16
    # 36 and 160 tokens have 4 in common, which is enough
    assert check(replace(latent, sink=replace(latent.sink, first_token=36))) == 16
    assert check(replace(latent, num_tokens=161)) == 4


@pytest.mark.parametrize("programs", [3, WHOLE_GPU])
@pytest.mark.parametrize("inner", [1, 2, 8])
@pytest.mark.parametrize("num_heads", [2, 40, 150])
def test_narrow_heads_are_channels(num_heads: int, inner: int, programs: int) -> None:
    """A convolution's state, whose channels follow each other on one side, and its tokens on the
    other.
    """
    for source, sink in ((nhd, hnd), (hnd, nhd)):
        work = work_of(source(3, num_heads, inner), sink(3, num_heads, inner), 12, num_heads, inner)
        wide = widest(work)
        assert (wide.num_heads, wide.channel_nbytes) == (1, inner)
        launch = plan_launch(work, NUM_REGIONS, programs)
        assert (launch.by_channel, launch.tokens_first) == (True, source is hnd)
        assert check(work, programs=programs) == inner
    # Of more tokens of a block, lanes take those that lie together at the sink
    long = work_of(nhd(16, num_heads, inner), hnd(48, num_heads, inner), 40, num_heads, inner)
    assert plan_launch(long, NUM_REGIONS, programs).tokens_first
    assert check(long, programs=programs) == inner
    # Blocks that are alike are copied whole
    alike = work_of(hnd(3, num_heads, inner), hnd(3, num_heads, inner), 12, num_heads, inner)
    assert widest(alike).inner_nbytes == 3 * num_heads * inner


@pytest.mark.parametrize("programs", [3, WHOLE_GPU])
@pytest.mark.parametrize("inner", [1, 2])
def test_channels_that_the_source_alone_has_together_are_loaded_in_twos(
    inner: int, programs: int
) -> None:
    def run_words(work: CopyWork) -> int:
        return plan_launch(work, NUM_REGIONS, programs).run_words

    together, apart = nhd(3, 700, inner), hnd(3, 700, inner)
    work = work_of(together, apart, 12, 700, inner)
    assert run_words(work) == 2
    check(work, programs=programs)
    others = (
        work_of(nhd(3, 701, inner), hnd(3, 701, inner), 12, 701, inner),
        work_of(nhd(3, 700, inner, padding=inner), apart, 12, 700, inner),
        work_of(nhd(3, 700, 4), hnd(3, 700, 4), 12, 700, 4),
        work_of(nhd(16, 700, inner), hnd(48, 700, inner), 40, 700, inner),
    )
    for other in others:
        assert run_words(other) == 1
        check(other, programs=programs)
    crooked = replace(work, align_nbytes=inner)
    assert run_words(crooked) == 1
    check(crooked, lead=inner, programs=programs)


@pytest.mark.parametrize("programs", [3, WHOLE_GPU])
@pytest.mark.parametrize("inner", [1, 2, 4])
@pytest.mark.parametrize("tokens", [2, 3, 16])
def test_lanes_run_along_the_tokens_of_a_block_that_the_source_alone_has_together(
    tokens: int, inner: int, programs: int
) -> None:
    """So that the source is read in the order of its memory; in twos, where no two of a block are
    cut.
    """

    def lanes(work: CopyWork) -> tuple[bool, int]:
        launch = plan_launch(work, NUM_REGIONS, programs)
        return launch.tokens_first, launch.run_words

    channels = 2 * (350 // tokens)
    source, sink = hnd(tokens, channels, inner), nhd(tokens, channels, inner)
    step = (tokens + 2) * inner
    work = work_of(source, sink, 4 * tokens, channels, inner)
    assert lanes(work) == (True, 2 if inner < 4 else 1)
    check(work, programs=programs)
    one_by_one = [
        replace(work, source=replace(source, first_token=1), num_tokens=2 * tokens),
        work_of(hnd(tokens, channels, inner, padding=inner), sink, 4 * tokens, channels, inner),
        # Half of a block of twice the tokens
        work_of(hnd(2 * tokens, channels, inner), sink, tokens, channels, inner),
        # Room between channels
        replace(work, source=side_of(tokens, channels * step, step, inner)),
    ]
    # Whole blocks or not: both binaries are compiled before they are needed, by 0 tokens and by 1
    assert lanes(replace(work, num_tokens=0)) == lanes(work)
    assert lanes(replace(work, num_tokens=1)) == lanes(one_by_one[0]) == (False, 1)
    if tokens % 2:
        odd = channels + 1
        sides = hnd(tokens, odd, inner), nhd(tokens, odd, inner)
        one_by_one.append(work_of(*sides, 5 * tokens, odd, inner))
    for other in one_by_one:
        assert plan_launch(other, NUM_REGIONS, programs).run_words == 1
        check(other, programs=programs)
    crooked = replace(work, align_nbytes=inner)
    assert lanes(crooked) == (True, 1)
    check(crooked, lead=inner, programs=programs)
    # Kernel blocks of a larger one; and the sink's blocks are of another size
    pieces = hnd(tokens, channels, inner, kernel_blocks=2)
    cut = replace(work, source=pieces, sink=nhd(5, channels, inner))
    assert lanes(cut) == lanes(work)
    check(cut, programs=programs)


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("channel", [1, 2])
def test_the_tokens_of_channels_that_heads_have(heads: int, channel: int) -> None:
    """A key cache [head][channel][token], to one by token."""
    inner = 6 * channel
    sink = replace(nhd(8, heads, inner), stride_channel=channel)
    work = work_of(turned(4, heads, inner, channel), sink, 36, heads, inner)
    work = replace(work, channel_nbytes=channel)
    launch = plan_launch(work, NUM_REGIONS, 3)
    assert (launch.tokens_first, launch.run_words) == (True, 2)
    assert check(work) == channel
    crooked = replace(work, source=replace(work.source, stride_head=work.source.stride_head + 1))
    if channel == 1:
        crooked = replace(
            crooked, source=replace(crooked.source, stride_block=heads * (4 * inner + 1) + 1)
        )
        assert plan_launch(crooked, NUM_REGIONS, 3).run_words == 1
        check(crooked)


def test_division_is_exact() -> None:
    """The quotients that the kernel takes by a multiplication, at the ends of their range."""
    for divisor in (1, 2, 3, 7, 16, 24, 41, 72, 1000, 65535, (1 << 30) - 1, 1 << 30):
        side = CopySide(
            block_tokens=divisor, kernel_tokens=1, stride_block=1, stride_head=1, stride_token=1
        )
        work = work_of(side, hnd(1, 1, 1), 1, 1, 1)
        number, magic, shift = plan_launch(work, 1, 1).params[15:18]
        assert number == divisor
        for value in (0, 1, divisor - 1, divisor, 2 * divisor - 1, (1 << 30) + 1, (1 << 31) - 1):
            assert value * magic < 1 << 63
            assert value * magic >> shift == value // divisor


def test_refusals() -> None:
    side = hnd(16, 2, 16)
    work = work_of(side, side, 16, 2, 16)
    table, ids = (
        torch.zeros(2, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    with pytest.raises(ValueError, match="sink_table: expected 2 regions like the source, got 1"):
        strided_copy(table, table[:1], ids, ids, work, 1)
    with pytest.raises(TypeError, match="expected contiguous 1-D int64, got torch.int32"):
        strided_copy(table, table, ids.int(), ids, work, 1)
    with pytest.raises(TypeError, match=r"1-D int64, got torch.int64 of shape \(2, 1\)"):
        strided_copy(table[:, None], table, ids, ids, work, 1)
    with pytest.raises(ValueError, match="num_programs: expected 0 or more, got -1"):
        strided_copy(table, table, ids, ids, work, -1)
    with pytest.raises(ValueError, match="params: expected 39, got 2"):
        launch_copy(table, table, table, ids, ids, plan_launch(work, 2, 1))
    with pytest.raises(ValueError, match="expected a multiple of 16 kernel tokens, got 24"):
        replace(side, block_tokens=24)
    with pytest.raises(ValueError, match="first_token: expected 0 or more, got -1"):
        replace(side, first_token=-1)
    with pytest.raises(ValueError, match="num_heads: expected 1 or more, got 0"):
        replace(work, num_heads=0)
    with pytest.raises(ValueError, match="channel_nbytes: expected a divisor of 16 inner bytes"):
        replace(work, channel_nbytes=3)
    with pytest.raises(ValueError, match="expected at most 1073741824 bytes of a region, got"):
        plan_launch(replace(work, num_tokens=1 << 26), 1, 1)


PTX = """
import re
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvxfer.kernels import strided_copy as module
from kvxfer.kernels import strided_work
alone, run = sys.argv[1] == "alone", "run" in sys.argv[1]
tile = dict(LANES=256, PAIRS=1) if alone else dict(LANES=512, PAIRS=4 if run else 8)
element, word = (module.tl.int16, 2) if run else (module.tl.int64, 16)
consts = dict(ELEMENT=element, VEC=2, WORD=word, **tile)
consts |= dict(BY_CHANNEL=run, TOKENS_FIRST=sys.argv[1] == "token run", ALONE=alone)
names = ["numbers", "source_table", "sink_table", "source_ids", "sink_ids"]
source = ASTSource(
    fn=module._copy_kernel,
    signature={name: "*i64" for name in names} | {name: "constexpr" for name in consts},
    constexprs={(5 + at,): value for at, value in enumerate(consts.values())},
)
warps = strided_work.ALONE_WARPS if alone else strided_work.WARPS
options = dict(num_warps=warps, num_stages=1)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
ptx = kernel.asm["ptx"]
access = "ld.global.b32|st.global.b16" if run else "(?:ld|st).global.v2.b64"
order = "".join(found[0] for found in re.findall(access, ptx))
print(order, kernel.metadata.shared, ptx.count("bar.sync"))
"""


@pytest.mark.parametrize(("how", "order"), [("few", 16 * "l" + 16 * "s"), ("alone", "llss")])
def test_the_compiler_sees_accesses_of_16_bytes(how: str, order: str) -> None:
    """Compiled for a GPU, which need not be there: 8 pairs x 512 lanes are 16 words a thread, one
    pair x 256 lanes are 2 of half as many threads, all loaded before the first is stored, without
    shared memory or barriers.
    """
    assert printed_without_interpreter(PTX, how).split() == [order, "0", "0"]


@pytest.mark.parametrize("how", ["run", "token run"])
def test_the_compiler_sees_that_two_words_are_one_load(how: str) -> None:
    """4 pairs x 512 lanes are 8 runs a thread. Triton 3.9 lets words change threads before they are
    stored, through shared memory; 3.6 does not.
    """
    order, _, _ = printed_without_interpreter(PTX, how).split()
    assert order == 8 * "l" + 16 * "s"


@pytest.mark.gpu
@pytest.mark.parametrize(("programs", "num_accesses"), [(1, 16), (WHOLE_GPU, 2)])
def test_the_binary_that_runs_has_accesses_of_16_bytes(programs: int, num_accesses: int) -> None:
    work = work_of(hnd(16, 8, 256), nhd(64, 8, 256), 0, 8, 256)
    launch = plan_launch(work, 4, programs)
    numbers = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    numbers[: len(launch.params)] = torch.tensor(launch.params)
    table = numbers[40:44]
    compiled = launch_copy(numbers[:NUM_PARAMS], table, table, table, table, launch)
    ptx = compiled.asm["ptx"]  # type: ignore[attr-defined]
    assert ptx.count("ld.global.v2.b64") == ptx.count("st.global.v2.b64") == num_accesses


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 64, 2000, WHOLE_GPU])
def test_regions_farther_than_2_gib_and_blocks_too(programs: int) -> None:
    """Blocks 300 MiB apart, so that ids from 8 on are beyond 2 GiB; many regions."""
    stride, num_blocks, num_regions, num_tokens = 300 << 20, 20, 48, 70
    memory = torch.zeros(num_blocks * stride, dtype=torch.uint8, device=DEVICE)
    source = replace(hnd(16, 2, 256), stride_block=stride)
    region = 16 * 2 * 256
    sink = nhd(24, 2, 256)
    work = work_of(source, sink, num_tokens, 2, 256)
    source_ids = torch.tensor([19, 0, 8, 12, 9], device=DEVICE)
    sink_ids = torch.tensor([4, 1, 0], device=DEVICE)
    bases = torch.arange(num_regions, device=DEVICE) * region
    for block in source_ids.tolist():
        piece = memory[block * stride : block * stride + num_regions * region]
        piece.random_()
    got = poisoned((num_regions * 5 * 24 * 512,), DEVICE)
    want = got.clone()
    sink_bases = torch.arange(num_regions, device=DEVICE) * 5 * 24 * 512
    tables = (bases + memory.data_ptr(), sink_bases + got.data_ptr())
    strided_copy(*tables, source_ids, sink_ids, work, programs)
    copy_by_oracle(memory, want, bases, sink_bases, source_ids, sink_ids, work)
    assert_same_bytes(got, want)
