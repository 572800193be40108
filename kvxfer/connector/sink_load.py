"""One load of a sink rank: its session, and what is needed to perform what the session says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvxfer.connector.io_thread import Timer
from kvxfer.connector.load_routes import RouteRun
from kvxfer.connector.peer import Peer
from kvxfer.connector.peer_records import Waiter
from kvxfer.connector.records import LoadReport, NewLoad
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.session import SinkEvent
from kvxfer.transfer.sink_session import LoadSession
from kvxfer.transfer.wire import Reason


@dataclass(slots=True, eq=False)
class SinkLoad:
    """One load. ``waiter`` is there until its peer is ready, the session and its routes from then
    on. ``detail``: the first thing that a person should read when it fails.
    """

    order: NewLoad
    waiter: Waiter | None = None
    peer: Peer | None = None
    session: LoadSession | None = None
    routes: Mapping[RankId, RouteRun] = field(default_factory=dict)
    detail: str = ""
    started_s: float = 0.0
    timer: Timer | None = None
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
            started_s=self.started_s,
            finished_s=finished_s,
            transports=tuple(sorted(wires)),
        )


StepLoad = Callable[[SinkLoad, SinkEvent], None]
"""Give an event to a load's session and perform what comes of it."""
