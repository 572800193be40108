"""Explore every interleaving of one source rank and its sink ranks over a hostile network.

What is real: ``OfferSession``, ``events_due``, ``LoadSession``, the messages and
``is_addressed_to``. What is modelled, each as an explicit move: the ready event, the end of a lease
or a preemption (``break``), an end that the engine writes while the source's IO thread is stuck,
reuse of the blocks, reads and packs in two steps (so that they can tear), deadlines, aborts, kills,
a transport that stops and drains.

The network is a set to which messages are added and never removed: any message may be delivered at
any time, in any order, any number of times, or never. That covers loss, duplication and reordering
without a bound.

The blocks have a generation: ``2k`` while offer ``k`` is being computed, ``2k + 1`` when it is
whole, ``2k + 2`` when they have been given to somebody else, who may be offer ``k + 1`` under the
same request id. A read is good if the generation was the wanted one at its begin and at its end;
generations only grow, so nothing changed in between.

Three files: the search (here), the moves of a world (``explore_model``), the sessions and the
network behind small integers (``explore_sessions``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tests.transfer.explore_model import Model, World
from tests.transfer.explore_sessions import Scenario
from tests.worlds import trace_to, without_exit


@dataclass
class Result:
    """``trace``: the labels from the first world to the violation; empty if there is none."""

    num_states: int
    num_accepted: int
    violation: str | None = None
    trace: list[str] = field(default_factory=list)


def explore(scenario: Scenario, ignoring: frozenset[str] = frozenset()) -> Result:
    """Breadth first from the initial world: the shortest trace to a violation, or all worlds.

    ``ignoring``: violations that are passed over, to see what else a fault leads to.
    """
    model = Model(scenario)
    first = model.initial()
    parents: dict[World, tuple[World, str] | None] = {first: None}
    exits: dict[World, World] = {}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        for move in model.moves(world):
            after = move.world
            if move.violation is not None and move.violation not in ignoring:
                trace = [*trace_to(world, parents), move.label]
                return Result(len(parents), 0, move.violation, trace)
            if after == world:
                continue
            if move.is_local and world not in exits:
                exits[world] = after
            if after not in parents:
                parents[after] = (world, move.label)
                queue.append(after)
        assert len(parents) <= scenario.max_states, "the scenario is larger than its bound"
    over = {world for world in parents if model.is_over(world)}
    stuck = without_exit(parents, exits, over)
    if stuck is not None:
        return Result(len(parents), 0, "no exit by timers alone", trace_to(stuck, parents))
    return Result(len(parents), sum(model.is_accepted(world) for world in parents))
