"""The log lines of a source about offers that no sink could use. Pure: the time is an argument, and
lines are returned.

A sink that may not, or cannot, connect writes to its own log only. Its source learns of it when the
lease of the offer ends, when the sink connects and gives the offer up, or from a client.
"""

from __future__ import annotations

from kvxfer.connector.unused_kv import MAX_KINDS, NEVER_WORKS, printable
from kvxfer.log_limit import LogLimit
from kvxfer.transfer.wire import Reason


class UntakenKV:
    """One per engine. The first line of each kind is written at once, later ones once a minute;
    ``now_s`` is any clock that does not go back, always the same one.
    """

    def __init__(self) -> None:
        self._limit: LogLimit[str] = LogLimit(MAX_KINDS)

    def note(self, now_s: float, request_id: str, why: str) -> str | None:
        """The KV of this request was not used; the line, if one is to be written."""
        why = printable(why)
        num = self._limit.note(why, now_s)
        more = f" ({num - 1} more like this)" if num > 1 else ""
        return f"request {printable(request_id)}: KV not taken: {why}{more}" if num else None


def why_lapsed(endpoint: str, lease_s: float, *, was_wanted: bool) -> str:
    """The lease of an offer of the front door ``endpoint`` has ended. ``was_wanted``: a sink had
    said that it wants it.
    """
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
