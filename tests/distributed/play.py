"""A whole test: two engines of real ranks, requests from one to the other, bytes looked at."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

from kvxfer.config import Config
from kvxfer.testing.faults import injected
from kvxfer.transfer.manifest import RankManifest
from tests.distributed.content import Pair, assert_same, expected_at_sink, forgive
from tests.distributed.driver import Driver, Params, Story
from tests.distributed.engine import RankEngine
from tests.distributed.world import Half, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """How a test runs, besides its shapes.

    ``sink_faults``: what the sink's wires do wrong, by its tensor-parallel rank. ``between``: what
    ranks do by themselves when everything is prefilled and nothing has been asked for.
    """

    wire: str = "auto"
    sink_faults: Mapping[int, str] | None = None
    between: Callable[[RankEngine], None] | None = None
    loads_per_step: int = 2
    until_ended: bool = False


@dataclass(frozen=True, slots=True)
class Stories:
    """Both engines', on every rank."""

    source: Story
    sink: Story


def run(world: World, pair: Pair, play: Play = Play()) -> Stories:  # noqa: B008  # frozen
    """All of it, on all ranks of the world; those without a seat only meet the others.

    Raises RankFailed on every rank for what goes wrong on one; the bytes of every sink rank have
    been compared when it returns.
    """
    with ExitStack() as stack:
        return _Stage(world, pair, play, stack).run()


class _Stage:
    def __init__(self, world: World, pair: Pair, play: Play, stack: ExitStack) -> None:
        self._world = world
        self._pair = pair
        self._play = play
        self._seat = world.seat(pair.source.tp_size, pair.sink.tp_size)
        self._stack = stack
        self._engine: RankEngine | None = None
        self._driver: Driver | None = None

    def run(self) -> Stories:
        world = self._world
        firsts = {half: world.team(half, 1).driver for half in Half}
        incarnations = world.together("meet", lambda: secrets.token_bytes(16))
        manifests = world.together(
            "register", lambda: self._register({h: incarnations[r] for h, r in firsts.items()})
        )
        world.together("introduce", lambda: self._introduce(manifests))
        prefilled = world.together("prefill", self._prefill)
        params = cast(Params, prefilled[firsts[Half.SOURCE]])
        world.together("between", self._between)
        stories = world.together("move", lambda: self._move(params))
        done = Stories(*(cast(Story, stories[firsts[half]]) for half in (Half.SOURCE, Half.SINK)))
        world.together("compare", lambda: self._compare(done))
        world.together("close", self._stack.close)
        return done

    def _register(self, incarnations: Mapping[Half, bytes]) -> RankManifest | None:
        seat, play = self._seat, self._play
        if seat is None:
            return None
        is_sink = seat.team.half is Half.SINK
        faults = (play.sink_faults or {}).get(seat.tp_rank, "") if is_sink else ""
        with injected(faults) as holds:
            self._engine = RankEngine(
                seat,
                self._pair.sink if is_sink else self._pair.source,
                # What is looked at here are loads beside steps
                Config(port=0, transport=play.wire, load_in_step_s=0),
                incarnation=incarnations[seat.team.half],
                device=self._world.device,
                holds=holds,
            )
        self._stack.callback(self._engine.close)
        return self._engine.worker.get_handshake_metadata()

    def _introduce(self, manifests: list[RankManifest | None]) -> None:
        if self._engine is None or not self._engine.seat.is_driver:
            return
        ours = [manifests[rank] for rank in self._engine.seat.team.ranks]
        self._driver = Driver(self._engine, cast(list[RankManifest], ours), self._world.has_failed)

    def _prefill(self) -> Params | None:
        if self._engine is None or self._engine.seat.team.half is Half.SINK:
            return None
        return self._engine.serve(lambda: self._scheduler.prefill(self._pair.prompts))

    def _between(self) -> None:
        if self._engine is not None and self._play.between is not None:
            self._play.between(self._engine)

    def _move(self, params: Params) -> Story | None:
        if self._engine is None:
            return None
        prompts, play = self._pair.prompts, self._play
        if self._engine.seat.team.half is Half.SOURCE:
            return self._engine.serve(lambda: self._scheduler.await_sent(prompts))
        return self._engine.serve(
            lambda: self._scheduler.load(
                prompts, params, loads_per_step=play.loads_per_step, until_ended=play.until_ended
            )
        )

    def _compare(self, stories: Stories) -> None:
        if self._engine is None or self._engine.seat.team.half is Half.SOURCE:
            return
        prompts, failed = self._pair.prompts, stories.sink.failed
        accepted = [prompt for prompt in prompts if prompt.sink_id not in failed]
        got, regions = self._engine.pool.content(), self._engine.regions
        expected = expected_at_sink(got.size, regions, accepted)
        for prompt in prompts:
            if prompt.sink_id in failed:
                forgive(expected, got, regions, prompt)
        assert_same(got, expected)

    @property
    def _scheduler(self) -> Driver:
        assert self._driver is not None
        return self._driver


def expected_wire(world: World, wire: str) -> str:
    """Which wire carries the bytes here."""
    if wire != "auto":
        return wire
    return "cuda_ipc" if world.device.type == "cuda" else "shm"
