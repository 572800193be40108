"""One load of a sink rank: its session, and what is needed to perform what the session says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from kvxfer.connector.io_thread import Timer
from kvxfer.connector.load_routes import RouteRun
from kvxfer.connector.peer import Peer, Waiter
from kvxfer.connector.peer_session import Failure
from kvxfer.connector.records import BlockPlaces, LoadReport, NewLoad
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.session import SinkEvent
from kvxfer.transfer.sink_session import LoadSession
from kvxfer.transfer.wire import OfferRef, Reason
from kvxfer.transports.base import TransferKey


@dataclass(slots=True, eq=False)
class SinkLoad:
    """One load. ``waiter`` is there until its peer is ready, the session and its routes from then
    on. ``detail``: the first thing that a person should read when it fails. ``is_begun``: the peer
    counts it among those that wait for answers. ``after``: on a GPU, what must have run before the
    blocks are written. The moments are the report's.
    """

    order: NewLoad
    after: torch.cuda.Event | None = None
    waiter: Waiter | None = None
    peer: Peer | None = None
    session: LoadSession | None = None
    routes: Mapping[RankId, RouteRun] = field(default_factory=dict)
    detail: str = ""
    handed_s: float = 0.0
    started_s: float = 0.0
    placed_s: float = 0.0
    timer: Timer | None = None
    is_begun: bool = False
    is_undrained: bool = False

    def note(self, detail: str) -> None:
        """Keep the first detail."""
        self.detail = self.detail or detail

    def report(self, reason: Reason | None, finished_s: float) -> LoadReport:
        """How it went."""
        wires = {run.pull.transport for run in self.routes.values() if not run.pull.is_null}
        return LoadReport(
            request_id=self.order.request_id,
            reason=reason,
            detail="" if reason is None else self.detail,
            nbytes=sum(run.nbytes for run in self.routes.values()),
            handed_s=self.handed_s,
            started_s=self.started_s,
            placed_s=self.placed_s,
            finished_s=finished_s,
            transports=tuple(sorted(wires)),
            incomplete_blocks=self._incomplete() if reason is None else (),
        )

    def _incomplete(self) -> BlockPlaces:
        places = {place for run in self.routes.values() for place in run.incomplete}
        return tuple(sorted(places))


StepLoad = Callable[[SinkLoad, SinkEvent], None]
"""Give an event to a load's session and perform what comes of it."""


def span_failure(order: NewLoad) -> Failure | None:
    """What is wrong with the tokens that are to be loaded."""
    if 0 <= order.token_lo < order.token_hi <= order.source.num_tokens:
        return None
    return Failure(
        Reason.PLAN,
        f"tokens: expected a span within the offered {order.source.num_tokens}, "
        f"got [{order.token_lo}, {order.token_hi})",
    )


class Loads:
    """All loads that were not reported yet, and what messages and wires call them."""

    def __init__(self) -> None:
        self.by_request: dict[str, SinkLoad] = {}
        self.by_offer: dict[OfferRef, SinkLoad] = {}
        self.by_key: dict[TransferKey, tuple[SinkLoad, RankId]] = {}

    def begin(self, load: SinkLoad, peer: Peer, routes: Mapping[RankId, RouteRun]) -> None:
        """It has its routes: from now on it has a session."""
        load.session = LoadSession(
            list(routes), frozenset(rank for rank, run in routes.items() if run.pull.is_null)
        )
        load.peer, load.routes = peer, routes
        for rank, run in routes.items():
            run.progressed_s = load.started_s
            self.by_key[run.key] = (load, rank)

    def remove(self, load: SinkLoad) -> bool:
        """Forget it; False if it was forgotten before."""
        order = load.order
        if self.by_request.get(order.request_id) is not load:
            return False
        del self.by_request[order.request_id]
        if self.by_offer.get(order.source.offer) is load:
            del self.by_offer[order.source.offer]
        for run in load.routes.values():
            self.by_key.pop(run.key, None)
        return True
