"""Which digests sinks will ask a source for: what they have asked of its offers before.

A source that begins with them when a sink's Pull has come answers its Release 1.3 ms later, on two
H200s: a thread is woken, the numbers are sent, the kernel runs, and two threads are woken again. So
it begins when the offer is complete, if the sinks of the offers before have verified theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from kvxfer.bounded import Bounded
from kvxfer.connector.verifier import Digests
from kvxfer.transfer.plan import PullClass
from kvxfer.transfer.wire import Consumer, Verify

MOST_KINDS = 4
"""Of questions: the ranks of one engine that verifies ask for other heads each."""
MOST_MISSES = 2
"""Offers one after the other of which nobody has asked for what was foreseen."""


@dataclass(slots=True, eq=False)
class Foreseen:
    """Digests of one offer before a sink has asked for them. ``waiting``: the sinks that have, and
    get them when they are made; ``is_asked``: one has.
    """

    verify: Verify
    digests: Digests | None = None
    is_made: bool = False
    is_asked: bool = False
    waiting: list[Consumer] = field(default_factory=list)


class Foresight:
    """The kinds of questions of the last offers, the last one that was asked at the end."""

    def __init__(self) -> None:
        self._misses: Bounded[Verify, int] = Bounded(MOST_KINDS)
        """Of each kind, whose last token is counted from the end of the offer."""

    def asked(self, verify: Verify, num_tokens: int) -> None:
        """A sink has asked this of an offer of so many tokens."""
        if all(map(_counts_tokens, verify.classes)):
            kind = _moved(verify, num_tokens)
            self._misses.pop(kind, None)
            self._misses[kind] = 0

    def missed(self, verify: Verify, num_tokens: int) -> None:
        """Nobody has asked what was expected of this offer."""
        kind = _moved(verify, num_tokens)
        if kind not in self._misses:
            return
        self._misses[kind] += 1
        if self._misses[kind] >= MOST_MISSES:
            del self._misses[kind]

    def expected(self, num_tokens: int) -> list[Verify]:
        """What will be asked of an offer of so many tokens."""
        return [
            each
            for each in (_moved(kind, num_tokens) for kind in self._misses)
            if all(0 <= part.token_lo < part.token_hi <= num_tokens for part in each.classes)
        ]


def _counts_tokens(wanted: PullClass) -> bool:
    """Whether a class counts the request's own tokens, so that other offers have the like."""
    return wanted.state_of is wanted.cell_tokens is wanted.interleaves is UNSET


def _moved(verify: Verify, num_tokens: int) -> Verify:
    """With each class's last token counted from the other end."""
    classes = [replace(each, token_hi=num_tokens - each.token_hi) for each in verify.classes]
    return replace(verify, classes=tuple(classes))
