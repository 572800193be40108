"""The geometry of a strided copy, and what one launch of it does, as numbers: width of an access,
division. The copy on the CPU goes by the same geometry.

Pure: plain integers, no tensor. A *pair* is one region and one head: source and sink address of its
token 0. All pairs of a launch share the offsets of their tokens, which are worked out once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

_WORDS_NBYTES = (16, 8, 4, 2, 1)
WHOLE_GPU = 0
"""In the place of a number of programs: as many as there is work for, within one GPU's memory."""
# Tokens x words of a program's tile, and the pairs that it copies at a time, if there are so many.
# A step is 64 KiB at 16 bytes a word, 256 bytes for each of 256 threads: 24 programs have 1.5 MiB
# in flight. Between two H200s 16, 24, 32 and 48 such programs made 0.94, 0.948, 0.95 and 0.95 of a
# memcpy, those of half the step 0.80, 0.933, 0.942 and 0.947; with 4 MiB in flight it is less.
# Narrow words, of which a thread has as many as it can hold soon, are faster by four pairs: rows of
# 132 bytes that cannot be joined reached 0.68 to 0.70 instead of 0.53 to 0.63 within a GPU.
_TILE_LANES = 512
_TILE_PAIRS = (8, 4, 1)
WARPS = 8
# On a whole GPU many programs of 4 KiB each, which begin in the order of memory, are faster: 1 GiB
# took 0.533 ms on an H200, 264 programs of large steps 0.57 to 0.58, memcpy 0.51. 8 KiB were as
# good or up to 3 % worse.
_ALONE_LANES = 256
ALONE_WARPS = 4
MANY = 264
"""Programs on a whole GPU where words are narrower: two for each SM of an H200."""
# Lanes along 3 tokens of 2 bytes took each word from another row: 0.15 of a memcpy between GPUs.
# Where the source has those together, lanes along channels fetched each sector once for each of
# them: 0.30. Lanes that follow the source made 0.84, in twos 0.93.
_LEAST_RUN_TOKENS = 8
# A word of 2 bytes takes a program as long as one of 16: between two H200s 32 programs made 0.26 of
# a memcpy, 64 of them 0.51, 128 0.82, 264 0.84. Words of 4 bytes were as fast with 32 as with 264.
_NARROW_NBYTES, _NARROW_TIMES = 2, 8
# Two words of 2 bytes that lie side by side at the source alone are loaded at once: channels of a
# token made 0.94 of a memcpy between two H200s, one by one 0.84, four at once 0.93 to 0.94 and
# eight less
_RUN_WORDS = 2
# A quotient is (number * magic) >> shift, for numbers below 2**31: see divisor
_NUMBER_BITS = 31
# So that words, tokens and lanes behind the last word are such numbers
MAX_REGION_NBYTES = 1 << 30

HEAD_PARAMS = 15
SIDE_PARAMS = 12
NUM_PARAMS = HEAD_PARAMS + 2 * SIDE_PARAMS


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySide:
    """How one side lies; strides in bytes.

    Token t of the id array (counted from slot 0 of its first block) is in block
    ``ids[t // block_tokens]``, in its kernel block ``t % block_tokens // kernel_tokens``.
    ``first_token``: where in that count the copy begins.
    """

    block_tokens: int
    kernel_tokens: int
    stride_block: int
    stride_head: int
    stride_token: int
    stride_channel: int = 0
    first_token: int = 0

    def __post_init__(self) -> None:
        if (
            self.kernel_tokens < 1
            or self.block_tokens % self.kernel_tokens
            or not (self.block_tokens > 0)
        ):
            raise ValueError(
                f"block_tokens: expected a multiple of {self.kernel_tokens} kernel tokens, "
                f"got {self.block_tokens}"
            )
        if self.first_token < 0:
            raise ValueError(f"first_token: expected 0 or more, got {self.first_token}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWork:
    """Both sides, and how much: ``num_tokens`` of ``num_heads`` heads of ``inner_nbytes``.

    ``channel_nbytes``: where a side has channels apart, their size, and both sides say how far the
    next one is; else 0. ``align_nbytes`` divides every address of both tables.
    """

    source: CopySide
    sink: CopySide
    num_tokens: int
    num_heads: int
    inner_nbytes: int
    channel_nbytes: int = 0
    align_nbytes: int = 16

    def __post_init__(self) -> None:
        for name, value, least in (
            ("num_tokens", self.num_tokens, 0),
            ("num_heads", self.num_heads, 1),
            ("inner_nbytes", self.inner_nbytes, 1),
            ("align_nbytes", self.align_nbytes, 1),
        ):
            if value < least:
                raise ValueError(f"{name}: expected {least} or more, got {value}")
        if self.channel_nbytes and self.inner_nbytes % self.channel_nbytes:
            raise ValueError(
                f"channel_nbytes: expected a divisor of {self.inner_nbytes} inner bytes, "
                f"got {self.channel_nbytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch: what is compiled in, and ``params``, which the kernel reads from memory.

    Nothing but ``binary`` is compiled in: any two engines share a few binaries. ``run_words``: how
    many words are loaded at once and stored apart. ``tokens_first``: lanes run along tokens of a
    word, and not along the words of a token. ``alone``: each program copies one tile of one pair.
    """

    params: tuple[int, ...]
    word_nbytes: int
    run_words: int
    lanes: int
    pairs: int
    by_channel: bool
    tokens_first: bool
    alone: bool
    num_programs: int

    @property
    def warps(self) -> int:
        return ALONE_WARPS if self.alone else WARPS

    @property
    def binary(self) -> tuple[object, ...]:
        """Everything that is compiled in: launches with equal values share one binary."""
        how = (self.by_channel, self.tokens_first, self.alone)
        return self.word_nbytes, self.run_words, self.lanes, self.pairs, *how


def plan_launch(work: CopyWork, num_regions: int, num_programs: int) -> Launch:
    """The launch for ``num_regions`` regions of one geometry, with the widest access there is.

    ``num_programs``: at most, which is how many SMs it may keep busy; or WHOLE_GPU. Words of one or
    two bytes have eight times as many, as such a word takes as long as a wide one. Raises
    ValueError below 0, and for more bytes of a region than its numbers hold.
    """
    if num_programs < 0:
        raise ValueError(f"num_programs: expected {WHOLE_GPU} or more, got {num_programs}")
    region_nbytes = work.num_tokens * work.num_heads * work.inner_nbytes
    last_token = work.num_tokens + max(work.source.first_token, work.sink.first_token)
    if max(region_nbytes, last_token) > MAX_REGION_NBYTES:
        raise ValueError(
            f"num_tokens: expected at most {MAX_REGION_NBYTES} bytes of a region, got "
            f"{work.num_tokens} tokens of {work.num_heads} x {work.inner_nbytes}; cut the copy"
        )
    joined = widest(work)
    word = word_nbytes(joined)
    run_tokens = _run_tokens(joined)
    run = _run_words(joined, word, run_tokens)
    inner_words = joined.inner_nbytes // word
    num_lanes = joined.num_tokens * inner_words // run
    num_pairs = num_regions * joined.num_heads
    alone = num_programs == WHOLE_GPU and word == _WORDS_NBYTES[0]
    if alone:
        pairs, lanes = 1, _ALONE_LANES
    else:
        most = min(num_pairs, _TILE_PAIRS[0] if word == _WORDS_NBYTES[0] else _TILE_PAIRS[1])
        pairs = next(size for size in _TILE_PAIRS if size <= max(1, most))
        # Twice the lanes where a step has less: of narrow words, or of few pairs
        lanes = _TILE_LANES * (1 if pairs == _TILE_PAIRS[0] else 2) // run
    most_programs = num_programs or MANY
    if word <= _NARROW_NBYTES:
        most_programs = max(most_programs, min(MANY, _NARROW_TIMES * most_programs))
    num_tiles, num_groups = -(-num_lanes // lanes), -(-num_pairs // pairs)
    num_units = num_tiles * num_groups
    by_channel = joined.channel_nbytes > 0
    params = (
        num_lanes,
        num_groups,
        num_pairs,
        *divisor(joined.num_heads),
        *divisor(max(1, run_tokens)),
        *divisor(inner_words),
        *divisor(joined.channel_nbytes // word if by_channel else inner_words),
        *side_params(joined.source),
        *side_params(joined.sink),
    )
    return Launch(
        params=params,
        word_nbytes=word,
        run_words=run,
        lanes=lanes,
        pairs=pairs,
        by_channel=by_channel,
        tokens_first=run_tokens > 0,
        alone=alone,
        num_programs=max(1, num_units if alone else min(most_programs, num_units)),
    )


def widest(work: CopyWork) -> CopyWork:
    """The same copy with fewer and longer pieces: heads that lie side by side on both sides become
    one, and so do tokens where that allows wider words (132 bytes: 4; 16 tokens of them: 16). Heads
    that stay narrow become channels of one head, so that lanes run along them: the convolution
    state of a Mamba layer is 8,192 heads of 2 bytes in blocks of 3 tokens.
    """
    if work.channel_nbytes:
        return work
    heads = _heads_joined(work)
    tokens = _heads_joined(_tokens_joined(heads))
    joined = tokens if word_nbytes(tokens) > word_nbytes(heads) else heads
    return joined if joined.inner_nbytes >= _WORDS_NBYTES[0] else _heads_as_channels(joined)


def _heads_joined(work: CopyWork) -> CopyWork:
    sides = (work.source, work.sink)
    if any(side.stride_head != work.inner_nbytes for side in sides):
        return work
    return replace(work, inner_nbytes=work.inner_nbytes * work.num_heads, num_heads=1)


def _tokens_joined(work: CopyWork) -> CopyWork:
    sides = (work.source, work.sink)
    unit = math.gcd(
        work.num_tokens,
        *(number for side in sides for number in (side.kernel_tokens, side.first_token)),
    )
    if unit < 2 or any(side.stride_token != work.inner_nbytes for side in sides):
        return work
    inner = work.inner_nbytes * unit
    return replace(
        work,
        source=_joined(work.source, unit, inner),
        sink=_joined(work.sink, unit, inner),
        num_tokens=work.num_tokens // unit,
        inner_nbytes=inner,
    )


def _heads_as_channels(work: CopyWork) -> CopyWork:
    if work.num_heads == 1:
        return work
    source, sink = (
        replace(side, stride_channel=side.stride_head) for side in (work.source, work.sink)
    )
    return replace(
        work,
        source=source,
        sink=sink,
        num_heads=1,
        inner_nbytes=work.inner_nbytes * work.num_heads,
        channel_nbytes=work.inner_nbytes,
    )


def word_nbytes(work: CopyWork) -> int:
    """The widest access that every address, stride and size allows."""
    numbers = [work.align_nbytes, work.channel_nbytes or work.inner_nbytes]
    for side in (work.source, work.sink):
        numbers += _steps(work, side)
        if work.channel_nbytes:
            numbers.append(side.stride_channel)
    common = math.gcd(*numbers)
    return next(word for word in _WORDS_NBYTES if common % word == 0)


def _steps(work: CopyWork, side: CopySide, *, by_token: bool = True) -> Iterator[int]:
    """The strides of a side that are taken, but that of channels. ``by_token``: tokens' too."""
    yield side.stride_block
    if work.num_heads > 1:
        yield side.stride_head
    if by_token and side.kernel_tokens > 1:
        yield side.stride_token


def _run_tokens(work: CopyWork) -> int:
    """Along how many tokens of a channel lanes run; 0: along the words of a token.

    Along all of them where the sink has those together, and more than a few in a block; else along
    those of a block where the source alone has them together, and only whole ones are copied.
    """
    source, sink = work.source, work.sink
    if not work.channel_nbytes:
        return 0
    if sink.stride_token < sink.stride_channel:
        return max(1, work.num_tokens) if sink.kernel_tokens >= _LEAST_RUN_TOKENS else 0
    has_together = source.stride_token < source.stride_channel
    are_whole = math.gcd(work.num_tokens, source.first_token) % source.kernel_tokens == 0
    return source.kernel_tokens if has_together and are_whole else 0


def _run_words(work: CopyWork, word: int, run_tokens: int) -> int:
    """How many narrow words, each of a channel, are loaded by one access: those that follow each
    other at the source alone, in the order of the lanes.
    """
    source, sink = work.source, work.sink
    if word != work.channel_nbytes or word > _NARROW_NBYTES:
        return 1
    if run_tokens == 0:
        is_run = word == source.stride_channel < sink.stride_channel
    else:  # whole blocks: behind a channel's tokens come those of the next one
        are_near = run_tokens * word == source.stride_channel
        is_run = are_near and word == source.stride_token < sink.stride_token
    steps = _steps(work, source, by_token=run_tokens == 0)
    common = math.gcd(work.align_nbytes, work.inner_nbytes * max(1, run_tokens), *steps)
    return _RUN_WORDS if is_run and common % (word * _RUN_WORDS) == 0 else 1


def _joined(side: CopySide, unit: int, stride_token: int) -> CopySide:
    return replace(
        side,
        block_tokens=side.block_tokens // unit,
        kernel_tokens=side.kernel_tokens // unit,
        first_token=side.first_token // unit,
        stride_token=stride_token,
    )


def side_params(side: CopySide) -> tuple[int, ...]:
    return (
        *divisor(side.block_tokens),
        *divisor(side.kernel_tokens),
        side.block_tokens // side.kernel_tokens,
        side.first_token,
        side.stride_block,
        side.stride_token,
        side.stride_channel,
        side.stride_head,
    )


def divisor(number: int) -> tuple[int, int, int]:
    """(number, magic, shift): dividing by a number known at run time costs a GPU some 30
    instructions, a multiplication and a shift four.

    With magic = ceil(2**(31 + l) / d) and 2**l >= d, n * magic >> (31 + l) is n // d for all n
    below 2**31 (Granlund and Montgomery 1994, theorem 4.2), and the product is below 2**63.
    """
    log2 = (number - 1).bit_length()
    shift = _NUMBER_BITS + log2
    return number, -(-(1 << shift) // number), shift
