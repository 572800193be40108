"""What one load moves between two engines, which wires can carry it and in what time: by the code
that refuses, plans, cuts and chooses when engines meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.resources import files

import msgspec

from kvxfer.cache.specs import ceil_div
from kvxfer.config import Config
from kvxfer.connector.access import check_partner
from kvxfer.connector.load_routes import Addressing, Way, make_routes
from kvxfer.connector.peer import workload_of
from kvxfer.connector.records import NewLoad, SourceRef
from kvxfer.errors import IncompatiblePeer, ProtocolError
from kvxfer.plan.geometry import Geometry, layer_number, make_manifest
from kvxfer.tensors.strided_index import launch_pieces
from kvxfer.transfer.chunks import num_chunks
from kvxfer.transfer.compatibility import Difference, differences, unhashable
from kvxfer.transfer.costs import StagingBounds, WireCosts
from kvxfer.transfer.manifest import EngineManifest, validate_manifest
from kvxfer.transfer.plan import CopyClass, PullClass, make_plan
from kvxfer.transfer.pull import route_nbytes
from kvxfer.transfer.windows import group_keepings
from kvxfer.transfer.wire import Consumer, OfferRef
from kvxfer.transports.base import ReadRequest, Trial
from kvxfer.transports.choice import make_choice
from kvxfer.transports.nixl_pipe import NixlPipe
from kvxfer.transports.pipe import Pipe, chunk_s, staging_bounds
from kvxfer.transports.registry import AUTO, is_for_tcp
from kvxfer.transports.shm_direct import job_spans
from kvxfer.transports.tcp_pipe import TcpPipe
from kvxfer.transports.ucx_pipe import UcxPipe
from kvxfer.transports.zmq_pipe import ZmqPipe

STREAMS: dict[str, type[Pipe]] = {
    "zmq": ZmqPipe,
    "tcp": TcpPipe,
    "ucx": UcxPipe,
    "nixl": NixlPipe,
}
_LIFE = b"-" * 16


class WireFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How a wire was measured between memories of one kind, for one host or for two.
    ``num_streams``: over which it carried the chunks of a pair of ranks. ``most_off``: how many
    times longer or shorter any measured time was than these figures say.
    """

    wire: str
    device: str
    num_hosts: int
    num_streams: int
    latency_s: float
    bytes_per_s: float
    most_off: float
    hardware: str
    date: str
    results: str


class Move(msgspec.Struct, frozen=True):
    """Regions alike that one rank gives to another: of these layers heads and tokens [lo, hi), of
    which both ranks hold ``num_tokens``: not all where ranks share tokens out (``dcp``). Without
    layers the source rank is only told that it may let go.
    """

    source: str
    sink: str
    layers: tuple[int, ...] = ()
    planes: tuple[str, ...] = ()
    heads: tuple[int, int] = (0, 0)
    tokens: tuple[int, int] = (0, 0)
    num_tokens: int = 0
    window: int | None = None
    num_regions: int = 0
    nbytes: int = 0

    @property
    def words(self) -> tuple[str, str, str]:
        """Layers, heads and tokens, from first to last; what is not in a row by number."""
        layers = _words((self.layers[0], self.layers[-1] + 1), len(self.layers))
        heads = _words(self.heads, self.heads[1] - self.heads[0])
        is_latent = self.planes == ("latent",)
        return layers, "latent" if is_latent else heads, _words(self.tokens, self.num_tokens)


def _words(span: tuple[int, int], count: int) -> str:
    lo, hi = span
    text = f"{lo}-{hi - 1}" if hi - lo > 1 else str(lo)
    return text if count == hi - lo else f"{count} of {text}"


class Cut(msgspec.Struct, frozen=True):
    """How a wire carries all that one rank gives to another. ``terms_s``: what its time would be
    the sum of if it were alone. On a direct wire there are neither chunks nor slots.
    """

    source: str
    sink: str
    num_pieces: int
    chunk_nbytes: int
    num_slots: int
    slot_nbytes: int
    terms_s: dict[str, float]


class WirePlan(msgspec.Struct, frozen=True):
    """How a wire carries the load. ``pieces``: what a cut counts. ``terms_s``: what the time is the
    sum of at ``busiest``, the last rank to be ready, and ``limit`` the largest of them.
    """

    wire: str
    pieces: str
    duration_s: float
    limit: str
    busiest: str
    terms_s: dict[str, float]
    figures: WireFigures
    cuts: tuple[Cut, ...]


class TransferPlan(msgspec.Struct, frozen=True, tag_field="result", tag="planned"):
    """One load. ``gbps``: what the link of each rank to the other host carries, in 1e9 bytes a
    second; None: one host. ``wires``: the fastest first.
    """

    source: Geometry
    sink: Geometry
    num_tokens: int
    gbps: float | None
    nbytes: int
    moves: tuple[Move, ...]
    wires: tuple[WirePlan, ...]


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag_field="result", tag="refused"):
    """Why the sink would not use KV of the source, in the words of an engine."""

    reason: str
    differences: tuple[Difference, ...] = ()


def plan_transfer(
    source: Geometry, sink: Geometry, num_tokens: int, gbps: float | None = None
) -> TransferPlan | Refusal:
    """Raises ConfigError for a geometry that no engine can have."""
    given = make_manifest("--source", source, num_tokens)
    taken = make_manifest("--sink", sink, num_tokens)
    can_leave = sink.engine == "kvxfer" or not sink.prefix_caching
    try:
        for manifest in (given, taken):
            validate_manifest(manifest)
        check_partner(Config(), given, taken, can_leave_unhashed=can_leave)
        load = _Load(given, taken, num_tokens, can_leave_unhashed=can_leave)
        wires = [load.carried(each, gbps) for each in _candidates(source, sink, gbps)]
    except (IncompatiblePeer, ProtocolError) as exc:
        found = differences(given, taken) + (() if can_leave else unhashable(given, taken))
        return Refusal(reason=str(exc), differences=found)
    wires.sort(key=lambda wire: wire.duration_s)
    nbytes = sum(move.nbytes for move in load.moves)
    return TransferPlan(source, sink, num_tokens, gbps, nbytes, tuple(load.moves), tuple(wires))


def load_figures() -> tuple[WireFigures, ...]:
    """Those of the committed results, which ``scripts/wire_figures.py`` collects."""
    text = files("kvxfer.plan").joinpath("wire_figures.json").read_bytes()
    return msgspec.json.decode(text, type=tuple[WireFigures, ...])


def _candidates(source: Geometry, sink: Geometry, gbps: float | None) -> Iterator[WireFigures]:
    """What ``auto`` may take between such memories."""
    kinds = {source.device, sink.device}
    for each in load_figures():
        is_of_kind = each.device == ("cpu" if kinds == {"cpu"} else "cuda")
        is_of_way = each.num_hosts == (1 if gbps is None else 2)
        if is_of_kind and is_of_way and all(_is_candidate(each, kind) for kind in kinds):
            yield each


def _is_candidate(figures: WireFigures, kind: str) -> bool:
    """Whether a side without CURVE keys has this wire, for memory of this kind."""
    if figures.wire == "tcp":
        return is_for_tcp(kind, figures.num_streams)
    return figures.wire in AUTO[kind]


class _Load:
    """Nothing of ``num_tokens`` is at the sink yet. Raises IncompatiblePeer and ProtocolError."""

    def __init__(
        self,
        given: EngineManifest,
        taken: EngineManifest,
        num_tokens: int,
        *,
        can_leave_unhashed: bool,
    ) -> None:
        self._given, self._taken, self._plan = given, taken, make_plan(given, taken)
        self._can_leave_unhashed = can_leave_unhashed
        keepings = group_keepings(each for rank in taken.ranks for each in rank.regions)
        num_blocks = [
            ceil_div(num_tokens, kept.block_tokens) for _, kept in sorted(keepings.items())
        ]
        self._order = NewLoad(
            request_id="plan",
            source=SourceRef(
                engine_id=given.engine_id,
                endpoint=given.ranks[0].control_endpoint,
                offer=OfferRef(_LIFE, given.incarnation),
                num_tokens=num_tokens,
            ),
            token_lo=0,
            token_hi=num_tokens,
            block_ids=tuple(tuple(range(1, 1 + count)) for count in num_blocks),
        )
        direct = Trial(WireCosts(0, 0, 1))
        self.moves = [move for each in self._routes("", direct, None) for move in _moves(*each)]

    def carried(self, figures: WireFigures, gbps: float | None) -> WirePlan:
        """By this wire, at the rate of the link if that is less than the wire's own."""
        kinds = {rank.memories[0].device for rank in (self._given.ranks[0], self._taken.ranks[0])}
        pipe, bounds, message_s = STREAMS.get(figures.wire), None, 0.0
        if pipe is not None:
            bounds = staging_bounds(Config(), pipe, kinds, figures.num_streams)
            message_s = chunk_s(kinds)
        bytes_per_s = min(figures.bytes_per_s, math.inf if gbps is None else gbps * 1e9)
        trial = Trial(WireCosts(figures.latency_s, message_s, bytes_per_s))
        cuts = [_cut(*each) for each in self._routes(figures.wire, trial, bounds)]
        busiest, terms_s = _busiest(cuts)
        if bytes_per_s < figures.bytes_per_s:
            terms_s["link"] = terms_s.pop("wire")
        pieces = {"cuda_ipc": "launches", "shm": "jobs"}.get(figures.wire, "chunks")
        duration_s, limit = sum(terms_s.values()), max(terms_s, key=lambda term: terms_s[term])
        return WirePlan(
            figures.wire, pieces, duration_s, limit, busiest, terms_s, figures, tuple(cuts)
        )

    def _routes(
        self, wire: str, trial: Trial, bounds: StagingBounds | None
    ) -> Iterator[tuple[Way, ReadRequest | None]]:
        """What the connector of each sink rank asks of each source rank, over this wire."""
        for entry in self._taken.ranks:
            ways: list[Way] = []
            for route in self._plan.of_sink(entry.rank):
                given, claim = route.source_rank, self._plan.consumers(route.source_rank)
                choice = make_choice(wire, bounds, trial, workload_of(route))
                of_route = route, self._given.rank(given), claim, str(entry.rank), str(given)
                is_stream = bounds is not None
                ways.append(Way(*of_route, None if route.is_null else choice, is_stream, False))
            asking = Addressing(Consumer(_LIFE, entry.rank), {}, self._can_leave_unhashed)
            runs = make_routes(self._order, ways, asking)
            for way in ways:
                yield way, runs[way.route.source_rank].request


def _moves(way: Way, request: ReadRequest | None) -> Iterator[Move]:
    """Layers of several groups that move alike are one."""
    if request is None:
        yield Move(way.source_rank, way.sink_rank)
        return
    alike: dict[tuple[object, ...], list[tuple[CopyClass, PullClass]]] = {}
    for copied, asked in zip(request.classes, request.pull_classes, strict=True):
        span = (asked.head_lo, asked.head_hi, asked.token_lo, asked.token_hi, copied.sink.window)
        alike.setdefault(span, []).append((copied, asked))
    for members in alike.values():
        (copied, asked), pulls = members[0], [pull for _, pull in members]
        names = [name for pull in pulls for name in pull.regions]
        layers = tuple(sorted({layer_number(name.layer) for name in names}))
        planes = tuple(dict.fromkeys("+".join(name.planes) for name in names))
        num_tokens = asked.token_hi - asked.token_lo
        tokens = asked.token_lo, asked.token_hi
        if num_tokens:
            tokens = asked.token(tokens[0]), asked.token(tokens[1] - 1) + 1
        yield Move(
            *(way.source_rank, way.sink_rank, layers, planes),
            *((asked.head_lo, asked.head_hi), tokens, num_tokens),
            *(copied.sink.window, len(names), route_nbytes(pulls)),
        )


def _cut(way: Way, request: ReadRequest | None) -> Cut:
    num_pieces = chunk_nbytes = 0
    terms_s: dict[str, float] = {}
    staging = way.choice.staging if way.choice is not None else None
    if request is not None and way.choice is not None:
        chunk_nbytes, pulls = request.chunk_nbytes, request.pull_classes
        terms_s = way.choice.costs.terms_s(route_nbytes(pulls), chunk_nbytes)
        pairs = list(zip(request.classes, pulls, strict=True))
        if staging is not None:
            num_pieces = num_chunks(pulls, chunk_nbytes, request.part_tokens)
        elif way.choice.transport == "shm":
            num_pieces = sum(len(list(job_spans(*pair))) for pair in pairs)
        else:
            for each, pull in pairs:
                tiles = each.source.tile, each.sink.tile, len(each.sink.bases)
                num_pieces += len(list(launch_pieces(*tiles, (pull.token_lo, pull.token_hi))))
    slots = (staging.num_slots, staging.slot_nbytes) if staging is not None else (0, 0)
    return Cut(way.source_rank, way.sink_rank, num_pieces, chunk_nbytes, *slots, terms_s)


def _busiest(cuts: Sequence[Cut]) -> tuple[str, dict[str, float]]:
    """The rank that is ready last. Its routes begin together and share its wire: messages and bytes
    add up, the first chunk and the last are waited for once.
    """
    found: dict[str, dict[str, float]] = {}
    for cut in cuts:
        for name in (f"source {cut.source}", f"sink {cut.sink}"):
            terms_s = found.setdefault(name, {})
            for term, more_s in cut.terms_s.items():
                before_s, adds_up = terms_s.get(term, 0.0), term in ("messages", "wire")
                terms_s[term] = before_s + more_s if adds_up else max(before_s, more_s)
    name = max(found, key=lambda name: sum(found[name].values()))
    return name, found[name]
