"""Performing what the session of a load says, with retries and deadlines. Runs on the IO thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import assert_never

from kvxfer.config import Config
from kvxfer.connector.board import BoardView
from kvxfer.connector.io_thread import IoThread
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.load_routes import Addressing, RouteRun
from kvxfer.connector.peer import Peer
from kvxfer.connector.peer_session import Failure
from kvxfer.connector.sink_load import SinkLoad, StepLoad
from kvxfer.errors import KvxferError
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.session import (
    Abort,
    DeadlinePassed,
    FinishedRecving,
    RetryDue,
    RouteState,
    SendCancel,
    SendPull,
    SendRelease,
    SinkAction,
    StartRead,
    StopRead,
    VerdictArrived,
)
from kvxfer.transfer.wire import Cancel, Grant, Reason, Release
from kvxfer.transports.base import SinkTransport

RETRY_S = 1.0
"""An answer that is this late is asked for again: the connection may have been replaced."""

_ASKING = (RouteState.ASKED, RouteState.RELEASING)
_WAITING = (RouteState.IDLE, *_ASKING, RouteState.READING)
_log = logging.getLogger("kvxfer.connector")


class LoadActions:
    """Performs actions with the peers and wires of one rank.

    Args:
        step: gives an event to a load's session.
        granted: takes a Grant for a route of a load.
        report: called once when a load is over and drained, with the reason if it failed.
    """

    def __init__(
        self,
        io: IoThread,
        config: Config,
        ledger: Ledger,
        *,
        addressing: Addressing,
        step: StepLoad,
        granted: Callable[[SinkLoad, RankId, Grant], None],
        report: Callable[[SinkLoad, Reason | None], None],
    ) -> None:
        self._io = io
        self._timeout_s = config.pull_timeout_s
        self._ledger = ledger
        self._addressing = addressing
        self._step = step
        self._granted = granted
        self._report = report

    def perform(self, load: SinkLoad, peer: Peer, action: SinkAction) -> None:
        """One action. What a wire does not take fails the load; whatever an action raises, the next
        one still has its turn.
        """
        try:
            self._perform(load, peer, action)
        except Exception as e:  # noqa: BLE001  # a load must end whatever fails
            if not isinstance(e, KvxferError | ValueError):
                self._ledger.count("loads.unforeseen")
                _log.exception("request %s: %s failed", load.order.request_id, action)
            load.note(str(e) or type(e).__name__)
            self._step(load, Abort(Reason.READ_FAILED))

    def _perform(self, load: SinkLoad, peer: Peer, action: SinkAction) -> None:
        match action:
            case SendPull(source):
                # An earlier action of the same event may have ended the load.
                if self._is_in(load, source, RouteState.ASKED):
                    self._ask(load, peer, source)
            case StartRead(source):
                run = load.routes[source]
                if run.request is not None and self._is_in(load, source, RouteState.READING):
                    self._wire(run).submit_read(run.request)
            case StopRead(source):
                run = load.routes[source]
                self._wire(run).stop_read(run.key)
            case SendRelease(source):
                if self._is_in(load, source, RouteState.RELEASING):
                    self._release(load, peer, source)
            case SendCancel(source, reason):
                life, wanted = self._addressing.consumer.incarnation, load.order.source
                peer.send(source, Cancel(wanted.offer, life, reason, wanted.digest))
            case FinishedRecving(reason):
                self._report(load, reason)
            case _:
                assert_never(action)

    def _ask(self, load: SinkLoad, peer: Peer, source: RankId) -> None:
        run = load.routes[source]
        is_first, run.asked_s = not run.asked_s, self._io.now()
        if is_first and run.request is not None and self._wire(run).is_stream:
            # Before the Pull: the first chunks may overtake the Grant.
            self._wire(run).submit_expect(run.request)
        board = _board(run, peer, source)
        posted = board.find(run.pull.offer.nonce) if board is not None else None
        if posted is None or posted.digest not in (None, run.pull.digest):
            peer.send(source, run.pull)  # its answer will say what is to be done
            return
        grant = Grant(run.pull.offer, run.pull.consumer, posted.block_ids, posted.num_tokens)
        if run.pull.is_null:
            peer.send_later(source, run.pull)  # the Release follows at once
        self._granted(load, source, grant)
        if self._is_in(load, source, RouteState.READING):  # a null route never is
            peer.send_later(source, run.pull)
        self._ledger.count("board.grants")  # last, like all that the copy need not wait for

    def _release(self, load: SinkLoad, peer: Peer, source: RankId) -> None:
        run = load.routes[source]
        run.asked_s = self._io.now()
        board = _board(run, peer, source)
        release = Release(run.pull.offer, run.pull.consumer)
        if board is None or not board.is_open(run.pull.offer.nonce):
            peer.send(source, release)
            return
        self._step(load, VerdictArrived(source, True, None))
        peer.send_later(source, release)
        self._ledger.count("board.verdicts")

    def _is_in(self, load: SinkLoad, source: RankId, state: RouteState) -> bool:
        return load.session is not None and load.session.state_of(source) is state

    def _wire(self, run: RouteRun) -> SinkTransport:
        return self._addressing.transports[run.pull.transport]

    # -------------------------------------------------- clocks

    def watch(self, load: SinkLoad) -> None:
        """Retries and deadlines of a load that begins."""
        delay_s = max(min(RETRY_S, self._timeout_s), 0.001)
        load.timer = self._io.after(delay_s, partial(self._watch, load))

    def _watch(self, load: SinkLoad) -> None:
        """What is due now, and when to look again."""
        load.timer = self._io.after(RETRY_S, partial(self._watch, load))  # whatever happens below
        for source in load.routes:
            if load.session is not None and not load.session.is_finished:
                self._look(load, source, load.session.state_of(source))
        load.timer.cancel()
        if load.session is None or load.session.is_finished:
            return
        ends_s = [
            run.progressed_s + self._timeout_s
            for source, run in load.routes.items()
            if load.session.state_of(source) in _WAITING
        ]
        delay_s = min([RETRY_S, *(end_s - self._io.now() for end_s in ends_s)])
        load.timer = self._io.after(max(delay_s, 0.001), partial(self._watch, load))

    def _look(self, load: SinkLoad, source: RankId, state: RouteState) -> None:
        run, now_s = load.routes[source], self._io.now()
        quiet_s = now_s - run.progressed_s
        if quiet_s >= self._timeout_s:
            if state in _WAITING:
                load.note(f"rank {source}: nothing for {quiet_s:.1f} s")
                self._step(load, DeadlinePassed(source))
            elif state is RouteState.DRAINING:
                self._complain(load)
        elif state in _ASKING and now_s - run.asked_s >= RETRY_S:
            self._ledger.count("control.retries")
            self._step(load, RetryDue(source))

    def _complain(self, load: SinkLoad) -> None:
        """A read does not end. Its blocks stay with the wire that may still write them; the peer is
        marked down.
        """
        if load.is_undrained or load.peer is None:
            return
        load.is_undrained = True
        self._ledger.count("loads.undrained")
        _log.error("request %s: expected its read to end, and it does not", load.order.request_id)
        load.peer.end(Failure(Reason.PEER_LOST, "a read from it does not end"))


def _board(run: RouteRun, peer: Peer, source: RankId) -> BoardView | None:
    """Where to see whether the offer is open; a stream is sent, and certified, by its source."""
    return None if run.pull.classes else peer.board(source)
