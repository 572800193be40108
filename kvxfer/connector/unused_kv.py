"""The log lines about KV that was asked for and not used: the first of each kind at once, then once
a minute how many more there were. Pure: the time is an argument, and lines are returned.

A kind is a reason and the source engine. An engine from which no load can ever work is logged as an
error, once until a load from it works.
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

from kvxfer.connector.records import SourceRef
from kvxfer.log_limit import LogLimit
from kvxfer.transfer.wire import Reason

MAX_KINDS = 256
"""Told apart at a time: clients may name engines that do not exist. All others of a reason are one
kind; about 500 bytes each.
"""
MAX_CHARS = 2000
"""Of a line. What makes two engines incompatible takes about 100 for each differing field."""

NOT_USED = "KV not used"
NOT_OFFERED = "KV not offered"

NEVER_WORKS = frozenset({Reason.INCOMPATIBLE, Reason.NOT_ALLOWED, Reason.TRANSPORT})
"""Reasons that stay until somebody configures one of the two engines differently; but a wire may
also have failed because its other end was going.
"""


class Peer(NamedTuple):
    """A source engine as params name it. Two empty strings: none, or any."""

    engine_id: str = ""
    endpoint: str = ""

    def __str__(self) -> str:
        return f" (engine {self.engine_id} at {self.endpoint})" if self.engine_id else ""


ANY_PEER = Peer()


class Line(NamedTuple):
    """For the log. ``level`` is one of the logging module's."""

    level: int
    text: str


class _Kind(NamedTuple):
    what: str
    reason: str
    peer: Peer


class UnusedKV:
    """One per engine. ``now_s`` is any clock that does not go back, always the same one."""

    def __init__(self) -> None:
        self._limit: LogLimit[_Kind] = LogLimit()
        self._never_works: set[Peer] = set()
        self._num_new_pairs = 0

    def note(
        self,
        now_s: float,
        request_id: str,
        reason: str,
        detail: str,
        source: SourceRef | None = None,
        what: str = NOT_USED,
    ) -> list[Line]:
        """A request runs without KV. ``source``: the engine that it was to come from, if known."""
        lines = self.due(now_s)
        peer = Peer(source.engine_id, source.endpoint) if source is not None else ANY_PEER
        why = f"{reason}: {detail}" if detail else reason
        sentence = f"request {request_id}: {what}: {why}{peer}"
        kind = self._kind(what, reason, peer)
        if self._is_new_pair(peer, reason):
            self._num_new_pairs += 1
            sentence += f"; no load from it can work until {_until(reason)}"
            lines.append(_line(logging.ERROR, sentence))
            if kind not in self._limit:
                self._limit.note(kind, now_s)
        elif self._limit.note(kind, now_s):
            lines.append(_line(logging.WARNING, sentence))
        return lines

    def works(self, source: SourceRef) -> None:
        if self._never_works:
            self._never_works.discard(Peer(source.engine_id, source.endpoint))

    def due(self, now_s: float) -> list[Line]:
        return [
            _line(logging.WARNING, f"{kind.what}: {kind.reason}: {num} more like this{kind.peer}")
            for kind, num in self._limit.due(now_s)
        ]

    def rest(self) -> list[Line]:
        """The summaries of everything that was counted and not logged yet."""
        return self.due(math.inf)

    def take_new_pairs(self) -> int:
        """Engines that were told as an error since the last call."""
        number, self._num_new_pairs = self._num_new_pairs, 0
        return number

    def _is_new_pair(self, peer: Peer, reason: str) -> bool:
        is_new = (
            reason in NEVER_WORKS
            and peer not in self._never_works
            and peer != ANY_PEER
            and len(self._never_works) < MAX_KINDS
        )
        if is_new:
            self._never_works.add(peer)
        return is_new

    def _kind(self, what: str, reason: str, peer: Peer) -> _Kind:
        kind = _Kind(what, reason, peer)
        if kind in self._limit or len(self._limit) < MAX_KINDS:
            return kind
        return _Kind(what, reason, ANY_PEER)


def _until(reason: str) -> str:
    if reason == Reason.TRANSPORT:
        return "a wire between the two works; later requests try again"
    return "one of the two is configured differently"


def _line(level: int, sentence: str) -> Line:
    return Line(level, printable(sentence))


def printable(sentence: str) -> str:
    """On one line and of bounded length: parts of it are a client's or a peer's."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence[:MAX_CHARS])


# ------------------------------------------------------------------ at a source


class UntakenKV:
    """The lines of a source about offers that no sink could use; one per engine, timed as above.
    A sink that cannot connect writes to its own log only: its source learns of it when the lease
    ends, when the sink connects and gives the offer up, or from a client.
    """

    def __init__(self) -> None:
        self._limit: LogLimit[str] = LogLimit(MAX_KINDS)

    def note(self, now_s: float, request_id: str, why: str) -> str | None:
        why = printable(why)
        num = self._limit.note(why, now_s)
        more = f" ({num - 1} more like this)" if num > 1 else ""
        return f"request {printable(request_id)}: KV not taken: {why}{more}" if num else None


def why_lapsed(endpoint: str, lease_s: float, *, was_wanted: bool) -> str:
    """``endpoint``: of the front door. ``was_wanted``: a sink had said that it wants it."""
    if was_wanted:
        return "a decode engine wanted it, and has not read it in time (lease_s, max_hold_s)"
    return (
        f"expected a decode engine at {endpoint} within {lease_s:g} s (lease_s), none came for it; "
        "look whether it can reach that port, and what its allowed_peers and CURVE keys admit"
    )


def why_given_up(address: str, reason: Reason) -> str | None:
    """The sink at this address ("": this host) has given an offer up; None: that is no fault."""
    if reason not in NEVER_WORKS:
        return None
    where = f"at {address}" if address else "on this host"
    return f"the decode engine {where} cannot use it: {reason.value}; its log says what to set"
