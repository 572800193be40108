"""From a load order and a plan to the Pull and the read of each source rank."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kvxfer.connector.board import nonce_of_digests
from kvxfer.connector.peer import Peer
from kvxfer.connector.records import GroupBlockIds, NewLoad
from kvxfer.connector.verifier import Digests
from kvxfer.errors import ProtocolError
from kvxfer.tensors.cuda_driver import StreamEvent
from kvxfer.tensors.kv_digest import Cells, cells_of, seed_of
from kvxfer.transfer.chunks import CHUNK_TOKENS
from kvxfer.transfer.layout import Interior
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transfer.plan import ALL, CopyClass, PullClass, Route
from kvxfer.transfer.pull import (
    block_chunk_nbytes,
    check_table,
    open_to,
    pull_class,
    route_nbytes,
    token_nbytes,
)
from kvxfer.transfer.windows import Clipped, Missing, Whole, group_move, held_ids
from kvxfer.transfer.wire import Consumer, Grant, Pull, Verdict, Verify
from kvxfer.transports.base import (
    DirectSink,
    ReadRequest,
    ReceivingSink,
    SinkTransport,
    TransferKey,
)
from kvxfer.transports.choice import Choice

GROWING_PARTS, LEAST_GROWING_NBYTES = 8, 64 << 10
"""A growing offer is sent in chunks of at most this part of its tokens, unless they would have less
than that. What is left when the last token is computed is up to such a part. Where the source
cannot cut so, a chunk has one region then: 16 parts were twice as many chunks, and each takes the
interpreter from prefill's steps.
"""
NULL_TRANSPORT = "null"
"""What the Pull of a null route names: nothing is read."""


@dataclass(frozen=True, slots=True)
class Addressing:
    """The identity of this sink rank, and the wires by which it reads.

    ``can_leave_unhashed``: its engine can keep single blocks from prefix reuse. ``verify_every``:
    one token in so many is verified; 0: nothing is.
    """

    consumer: Consumer
    transports: Mapping[str, SinkTransport]
    can_leave_unhashed: bool
    verify_every: int = 0


@dataclass(frozen=True, slots=True)
class Way:
    """What all loads from one source rank of a peer have in common. ``choice`` None: a null route,
    nothing is read. ``is_quick``: a read begins within microseconds. ``direct``: the wire, where it
    copies by itself (to ask a wire of what kind it is takes 15 us of a cold processor).
    ``verify_every``: as :class:`Addressing` has it; 0 where the source cannot. ``can_cut``: at
    fewer tokens than CHUNK_TOKENS.
    """

    route: Route
    source: RankManifest
    claim: tuple[RankId, ...]
    sink_rank: str
    source_rank: str
    choice: Choice | None
    is_stream: bool
    is_quick: bool
    direct: DirectSink | None = None
    verify_every: int = 0
    can_cut: bool = False


class Digesting(enum.Enum):
    """How far this rank is with the digests of a read."""

    NOT_BEGUN = "not begun"
    RUNS = "runs"
    OVER = "over"


@dataclass(slots=True, eq=False)
class RouteRun:
    """One route of one load: its Pull, which retries send unchanged, its read by ``wire`` (None: a
    null route; ``direct``: the same, where it copies by itself), and its progress (times of
    ``time.monotonic``). ``incomplete``: (group, position) of the blocks that the route fills only
    partly. ``owes_pull``: the board has answered the Pull, so the Pull may be sent behind the read.
    ``digests``: of what lies here after the read, where that is verified; None if they could not be
    made. ``verdict``: waits for them. ``shown_as``: where a board has the source's.

    ``key``: of the read that runs, or ran last. ``granted_ids``: of what is open; ``is_growing``:
    more will be than ``open_tokens``, or the whole that is verified. ``asked_tokens``: up to where
    it is read; ``read_nbytes``: of the reads before.
    """

    pull: Pull
    key: TransferKey
    request: ReadRequest | None
    wire: SinkTransport | None
    direct: DirectSink | None
    incomplete: frozenset[tuple[int, int]] = frozenset()
    asked_s: float = 0.0
    progressed_s: float = 0.0
    nbytes: int = 0
    owes_pull: bool = False
    digesting: Digesting = Digesting.NOT_BEGUN
    digests: Digests | None = None
    shown_as: bytes = b""
    verdict: Verdict | None = None
    is_growing: bool = False
    granted_ids: GroupBlockIds = ()
    open_tokens: int = 0
    asked_tokens: int = 0
    read_nbytes: int = 0


def ways_of(peer: Peer, addressing: Addressing) -> tuple[Way, ...]:
    """One way for each source rank of a peer that is ready, in the order of its plan."""
    return tuple(_way(peer, route, addressing) for route in peer.routes)


def _way(peer: Peer, route: Route, addressing: Addressing) -> Way:
    rank = route.source_rank
    choice = peer.choices[rank] if not route.is_null else None
    wire = addressing.transports[choice.transport] if choice is not None else None
    direct = wire if isinstance(wire, DirectSink) else None
    return Way(
        route=route,
        source=peer.entries[rank],
        claim=peer.plan.consumers(rank),
        sink_rank=str(addressing.consumer.rank),
        source_rank=str(rank),
        choice=choice,
        is_stream=isinstance(wire, ReceivingSink),
        is_quick=wire is None or (direct is not None and direct.is_quick),
        direct=direct,
        verify_every=addressing.verify_every if peer.can_verify else 0,
        can_cut=peer.can_cut,
    )


def make_routes(
    order: NewLoad,
    ways: Sequence[Way],
    addressing: Addressing,
    *,
    after: StreamEvent | None = None,
) -> dict[RankId, RouteRun]:
    """One run for each source rank. Every block id of this side is checked here, before a Pull is
    sent. ``after``: as ``ReadRequest`` has it.

    Raises ProtocolError or ValueError.
    """
    return {way.route.source_rank: _make_run(order, way, addressing, after) for way in ways}


def _make_run(
    order: NewLoad, way: Way, addressing: Addressing, after: StreamEvent | None
) -> RouteRun:
    route, consumer = way.route, addressing.consumer
    key = TransferKey(
        order.source.offer.nonce, consumer.incarnation, way.sink_rank, way.source_rank
    )
    wanted, incomplete = _wanted(order, route, addressing)
    nbytes = route_nbytes(wanted)
    choice = way.choice if nbytes else None  # with windows a load may need nothing of the offer
    request: ReadRequest | None = None
    states = {c.sink.group: c.sink.keeping for c in route.classes if c.sink.state_tokens}
    sink_ids = held_ids(order.block_ids, states, order.token_hi) if states else order.block_ids
    if choice is not None:
        for copied, asked in zip(route.classes, wanted, strict=True):
            check_table(copied.sink, sink_ids, asked.token_lo, asked.token_hi)
        size = _chunk_size(order, way, choice, nbytes, wanted)
        request = ReadRequest(
            key=key,
            source=way.source,
            classes=route.classes,
            pull_classes=wanted,
            source_ids=(),
            sink_ids=sink_ids,
            chunk_nbytes=size.nbytes,
            after=after,
            part_tokens=size.part_tokens,
        )
    pull = Pull(
        offer=order.source.offer,
        consumer=consumer,
        claim=way.claim,
        digest=order.source.digest,
        transport=choice.transport if choice is not None else NULL_TRANSPORT,
        is_null=choice is None,
        classes=wanted if choice is not None and way.is_stream else (),
        chunk_nbytes=request.chunk_nbytes if request is not None else 0,
        verify=_verify(order, way, wanted) if choice is not None else UNSET,
        grows=order.grows or UNSET,
        part_tokens=_said(request),
    )
    wire = addressing.transports.get(pull.transport)
    direct = way.direct if choice is not None else None
    verify, shown_as = pull.verify, b""
    if not isinstance(verify, UnsetType) and not pull.classes:  # streams have no board
        shown_as = nonce_of_digests(pull.offer.nonce, verify)
    return RouteRun(
        *(pull, key, request, wire, direct, incomplete), is_growing=order.grows, shown_as=shown_as
    )


class ChunkSize(NamedTuple):
    """Chunks have at most ``nbytes``; ``part_tokens``: as :func:`chunk_list` has it."""

    nbytes: int
    part_tokens: int = CHUNK_TOKENS


def _chunk_size(
    order: NewLoad, way: Way, choice: Choice, nbytes: int, wanted: Sequence[PullClass]
) -> ChunkSize:
    """Of few tokens for an offer that grows: a chunk leaves when its last token is open. But over a
    fast wire the whole prompt is sent in the time that many small chunks take.
    """
    best_nbytes = choice.chunk_nbytes(nbytes)
    if not order.grows or not way.is_stream:
        return ChunkSize(best_nbytes)
    cut_tokens = min(max(map(_part_tokens, wanted)), CHUNK_TOKENS) if way.can_cut else CHUNK_TOKENS
    least_nbytes = max(
        LEAST_GROWING_NBYTES, block_chunk_nbytes(wanted), choice.least_growing_nbytes
    )
    parts_nbytes = (_part_nbytes(asked, cut_tokens) for asked in wanted)
    return ChunkSize(min(best_nbytes, max(least_nbytes, *parts_nbytes)), cut_tokens)


def _part_nbytes(wanted: PullClass, cut_tokens: int) -> int:
    """The largest chunk that has no more than a part of the tokens of a growing offer. A chunk of
    one region has as many tokens as fit, but no more than ``cut_tokens``; then it has more regions.
    """
    part_tokens = _part_tokens(wanted)
    num_regions = len(wanted.regions) if part_tokens >= cut_tokens else 1
    return token_nbytes(wanted) * part_tokens * num_regions


def _part_tokens(wanted: PullClass) -> int:
    """Whole kernel blocks of the sink."""
    part_tokens = -(-(wanted.token_hi - wanted.token_lo) // GROWING_PARTS)
    return -(-part_tokens // wanted.order.kernel_tokens) * wanted.order.kernel_tokens


def _said(request: ReadRequest | None) -> int | UnsetType:
    """Where the source is to cut, unless it does so unasked."""
    if request is None or request.part_tokens == CHUNK_TOKENS:
        return UNSET
    return request.part_tokens


def _verify(order: NewLoad, way: Way, wanted: Sequence[PullClass]) -> Verify | UnsetType:
    """What is verified of a read. Of opaque blocks only those that the load fills: the source may
    write the rest of the last one meanwhile.
    """
    if not way.verify_every:
        return UNSET
    classes = list(wanted)
    for number, copied in enumerate(way.route.classes):
        if copied.interior is Interior.OPAQUE:
            block = copied.sink.tile.block_tokens
            num_wanted = wanted[number].count(order.token_hi)
            whole = max(wanted[number].token_lo, num_wanted // block * block)
            classes[number] = replace(wanted[number], token_hi=whole)
    return Verify(way.verify_every, tuple(classes))


def read_cells(run: RouteRun, verify: Verify) -> list[Cells]:
    """Where a verified read has put its bytes. Raises ValueError for blocks that are not there."""
    assert run.request is not None
    seed = seed_of(run.pull.offer.nonce)
    return [
        cells_of(copied.sink, wanted, run.request.sink_ids, verify.every, seed)
        for copied, wanted in zip(run.request.classes, verify.classes, strict=True)
    ]


def _wanted(
    order: NewLoad, route: Route, addressing: Addressing
) -> tuple[tuple[PullClass, ...], frozenset[tuple[int, int]]]:
    """What to ask of each class, and which blocks that leaves incomplete. Of a windowed group only
    the tokens that this side keeps and the source holds are asked for.

    Raises ProtocolError that names a layer of which the source lacks tokens that this side needs.
    """
    asked: list[PullClass] = []
    incomplete: set[tuple[int, int]] = set()
    for copied in route.classes:
        if copied.sink.state_tokens and order.token_hi != order.source.num_tokens:
            raise ProtocolError(
                f"{copied.names[0].layer}: expected to load the state of the "
                f"{order.source.num_tokens} tokens that are offered, got a load of "
                f"{order.token_hi}: a state cannot be cut"
            )
        if copied.source.window is copied.sink.window is None:  # both sides keep everything
            asked.append(pull_class(copied, order.token_lo, order.token_hi))
            continue
        move = group_move(
            order.token_lo,
            order.token_hi,
            order.source.num_tokens,
            sink=copied.sink.keeping,
            source=copied.source.keeping,
        )
        layer = copied.names[0].layer
        match move:
            case Missing():
                raise ProtocolError(move.explain(layer))
            case Clipped():
                if not addressing.can_leave_unhashed:
                    raise ProtocolError(
                        f"{layer}: expected all of block {move.position}, got its tokens from "
                        f"{move.token_lo} on, and this engine cannot keep it from prefix reuse: "
                        f"the source keeps {copied.source.keeping}, this side "
                        f"{copied.sink.keeping}"
                    )
                incomplete.add((copied.sink.group, move.position))
            case Whole():
                pass
            case _:
                assert_never(move)
        asked.append(pull_class(copied, move.token_lo, move.token_hi))
    return tuple(asked), frozenset(incomplete)


def open_tokens_of(grant: Grant, run: RouteRun) -> int:
    """Up to where a Grant opens what this route wants; ALL: all of it, whole opaque blocks too."""
    open_tokens = grant.open_tokens
    wanted = run.request.pull_classes if run.request is not None else ()
    if isinstance(open_tokens, UnsetType):
        return ALL
    is_all = all(asked.token_hi <= asked.count(open_tokens) for asked in wanted)
    return ALL if is_all else open_tokens


def take_granted_ids(run: RouteRun, block_ids: GroupBlockIds, open_tokens: int) -> None:
    """Note the ids of the Grant, each checked against the source's own manifest.

    Raises ProtocolError. Streams and null routes need no ids.
    """
    read = run.request
    if read is None or run.pull.classes or not open_tokens:
        return
    for copied, asked in zip(read.classes, read.pull_classes, strict=True):
        hi = asked.token_hi if open_tokens == ALL else _open_to(copied, asked, open_tokens)
        check_table(copied.source, block_ids, asked.token_lo, hi)
    for before, now in zip(run.granted_ids, block_ids, strict=False):
        if now[: len(before)] != before:
            raise ProtocolError(
                "grant: expected the block ids of the Grant before and more behind them, got others"
            )
    run.granted_ids = block_ids


def next_read(run: RouteRun, token_lo: int, token_hi: int) -> ReadRequest | None:
    """The read of what tokens ``[token_lo, token_hi)`` are of each class. None: nothing is.

    Opaque blocks move when they are full, or with the end.
    """
    whole = run.request
    if whole is None or (token_lo, token_hi) == (0, ALL):
        return whole and replace(whole, source_ids=run.granted_ids)
    wanted = [
        replace(
            asked,
            token_lo=_open_to(copied, asked, token_lo),
            token_hi=_open_to(copied, asked, token_hi),
        )
        for copied, asked in zip(whole.classes, whole.pull_classes, strict=True)
    ]
    if all(asked.token_lo == asked.token_hi for asked in wanted):
        return None
    key = replace(run.key, piece=run.key.piece + 1)
    return replace(whole, key=key, pull_classes=tuple(wanted), source_ids=run.granted_ids)


def _open_to(copied: CopyClass, asked: PullClass, open_tokens: int) -> int:
    """Where the open part of a class ends."""
    is_whole = copied.interior is Interior.OPAQUE
    return open_to(asked, open_tokens, copied.sink.tile.block_tokens if is_whole else 1)


def check_granted(order: NewLoad, grant: Grant, run: RouteRun) -> None:
    """Check that the source has offered the tokens that this load wants; the request's params do
    not prove it.

    Raises ProtocolError.
    """
    has_state = run.request and any(each.is_state for each in run.request.pull_classes)
    if has_state and grant.num_tokens not in (0, order.token_hi):
        raise ProtocolError(
            f"grant: expected a state of {order.token_hi} tokens, got one of {grant.num_tokens}"
        )
    if 0 < grant.num_tokens < order.token_hi:
        raise ProtocolError(
            f"grant: expected at least the {order.token_hi} tokens that the params offer, "
            f"got {grant.num_tokens}"
        )
