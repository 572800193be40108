"""The engines of both sides: who is up, and whose turn it is. Pure: what is seen is told to it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from kvxfer.proxy.bodies import ErrorReply, Reason
from kvxfer.proxy.settings import Engine, Side


class State(enum.StrEnum):
    UNKNOWN = "unknown"
    UP = "up"
    DRAINING = "draining"  # it serves, offers nothing, and is going to end
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at an engine. ``detail`` says why it is not up."""

    state: State
    detail: str = ""


UP = Seen(State.UP)
_NO_ENGINE = {
    Side.PREFILL: Reason.NO_PREFILL_ENGINE,
    Side.DECODE: Reason.NO_DECODE_ENGINE,
}


class EnginePool:
    """Round robin over each side's engines that were up when last seen."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._seen = {engine: Seen(State.UNKNOWN, "not asked yet") for engine in engines}
        self._next = dict.fromkeys(Side, 0)

    def see(self, engine: Engine, seen: Seen) -> bool:
        """Remember the last look. Returns whether the engine's state changed."""
        changed = self._seen[engine].state is not seen.state
        self._seen[engine] = seen
        return changed

    def pick(self, side: Side) -> Engine:
        """Whose turn it is. An engine that is skipped loses its turn, and nobody else's turn moves.
        One that drains has its turn where no other is up.

        Raises ErrorReply (503) naming every engine of the side when none is up.
        """
        engines = [engine for engine in self._seen if engine.side is side]
        for state in (State.UP, State.DRAINING):
            for step in range(len(engines)):
                position = (self._next[side] + step) % len(engines)
                if self._seen[engines[position]].state is state:
                    self._next[side] = position + 1
                    return engines[position]
        states = ", ".join(f"{e.url} {self._seen[e].detail}" for e in engines)
        raise ErrorReply(503, _NO_ENGINE[side], f"no {side} engine is up: {states}")

    def require(self, side: Side) -> None:
        """Raise as ``pick`` would, and use up nobody's turn."""
        turn = self._next[side]
        self.pick(side)
        self._next[side] = turn

    def has_another(self, engine: Engine) -> bool:
        return any(
            other.side is engine.side and other != engine and seen.state is State.UP
            for other, seen in self._seen.items()
        )

    def is_serving(self, side: Side) -> bool:
        serving = (State.UP, State.DRAINING)
        return any(e.side is side and seen.state in serving for e, seen in self._seen.items())

    @property
    def is_healthy(self) -> bool:
        """Both sides have an engine that takes requests."""
        return all(map(self.is_serving, Side))

    def report(self) -> list[dict[str, str]]:
        """Every engine with its state, for people and monitors."""
        return [
            {"side": engine.side, "url": engine.url, "state": seen.state, "detail": seen.detail}
            for engine, seen in self._seen.items()
        ]
