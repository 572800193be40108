"""The processes that torchrun has started, as one: half of them are a source engine, half a sink.

Objects (orders, manifests, reports, verdicts) travel over gloo groups on every machine; tensors
over nccl where every rank has a GPU of its own, else over gloo.

Whatever one rank does alone it does within :meth:`World.together`, which ends on all ranks alike:
with everybody's results, or with the same :class:`RankFailed` that names the culprits. A rank that
fails anywhere else is at :meth:`World.verdict` while the others are still in the test; they learn
it at their next ``together``, fail too, and everybody meets at the verdict.
"""

from __future__ import annotations

import enum
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

UNDER_TORCHRUN = dist.is_torchelastic_launched() and {"RANK", "WORLD_SIZE"} <= os.environ.keys()
WHY_SKIPPED = "runs under torchrun; test_launch.py starts it so"
NUM_RANKS = int(os.environ["WORLD_SIZE"]) if UNDER_TORCHRUN else 4
"""How many processes there are; without torchrun as many as test_launch.py starts."""

COLLECTIVE_TIMEOUT_S = 60.0
"""A rank that has died or hangs fails the others after this; nothing here takes half as long."""

T = TypeVar("T")


class RankFailed(AssertionError):
    """Some ranks have failed; raised on every rank, with their words."""


class Half(enum.Enum):
    """Which engine a rank belongs to."""

    SOURCE = "source"
    SINK = "sink"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this process computes.

    ``tensor_backend``: what reduces tensors between ranks.
    """

    device: torch.device
    tensor_backend: str

    @classmethod
    def choose(cls, local_rank: int, num_local_ranks: int) -> Placement:
        """A GPU of its own, a shared one (which nccl refuses), or none."""
        num_gpus = torch.cuda.device_count()
        if num_gpus == 0:
            return cls(torch.device("cpu"), "gloo")
        device = torch.device("cuda", local_rank % num_gpus)
        return cls(device, "nccl" if num_gpus >= num_local_ranks else "gloo")


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a rank brings to a meeting; ``error`` is empty if all went well."""

    meeting: str
    value: Any
    error: str


@dataclass(frozen=True, slots=True)
class Team:
    """The active ranks of one engine, by tensor-parallel rank; its first one drives."""

    half: Half
    ranks: tuple[int, ...]
    objects: dist.ProcessGroup
    tensors: dist.ProcessGroup
    tensors_on: torch.device

    @property
    def driver(self) -> int:
        """The rank of the world that has the scheduler."""
        return self.ranks[0]

    def broadcast(self, value: T) -> T:
        """The driver's value, on all ranks of the team, whatever the others brought."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=self.driver, group=self.objects)
        return cast(T, box[0])

    def gather(self, value: T) -> list[T]:
        """Everybody's, in order, on the driver; nothing elsewhere."""
        is_driver = dist.get_rank() == self.driver
        box: list[Any] | None = [None] * len(self.ranks) if is_driver else None
        dist.gather_object(value, box, dst=self.driver, group=self.objects)
        return [] if box is None else box

    def sum(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors added: with nccl on this thread's current stream, in order with what
        was launched there.
        """
        reduced = tensor.to(self.tensors_on)
        dist.all_reduce(reduced, group=self.tensors)
        return reduced.to(tensor.device)


@dataclass(frozen=True, slots=True)
class Seat:
    """This process in one test: which engine's rank it is."""

    team: Team
    tp_rank: int

    @property
    def is_driver(self) -> bool:
        """Has the engine's scheduler."""
        return self.tp_rank == 0


def team_sizes(num_ranks: int) -> tuple[int, ...]:
    """The tensor-parallel sizes that one half of the world has ranks for."""
    sizes = [1]
    while sizes[-1] * 2 <= num_ranks // 2:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


class World:
    """All processes. One per process and run: joins the process group, or fails within a minute."""

    def __init__(self) -> None:
        num_local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        if NUM_RANKS % 2 or num_local_ranks != NUM_RANKS:
            raise ValueError(
                f"torchrun: expected an even number of ranks on one host, got {NUM_RANKS} of which "
                f"{num_local_ranks} are here"
            )
        self.placement = Placement.choose(int(os.environ["LOCAL_RANK"]), num_local_ranks)
        # Where a host's own name is unknown gloo warns, and warnings are errors.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store, self.rank, self.size = next(rendezvous("env://", timeout=timeout))
        self._failures = PrefixStore("kvxfer-tests", store)
        self._num_meetings = 0
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.size, timeout=timeout
        )
        self._objects = _group(range(self.size), "gloo")
        # Every rank makes every group, its own or not, in the same order.
        first_of = {Half.SOURCE: 0, Half.SINK: self.size // 2}
        self._teams = {
            (half, tp_size): self._team(half, tuple(range(first, first + tp_size)))
            for half, first in first_of.items()
            for tp_size in team_sizes(self.size)
        }

    def _team(self, half: Half, ranks: tuple[int, ...]) -> Team:
        backend = self.placement.tensor_backend
        return Team(
            half=half,
            ranks=ranks,
            objects=_group(ranks, "gloo"),
            tensors=_group(ranks, backend),
            tensors_on=self.device if backend == "nccl" else torch.device("cpu"),
        )

    @property
    def device(self) -> torch.device:
        """Where this rank's pool lies."""
        return self.placement.device

    def team(self, half: Half, tp_size: int) -> Team:
        """The active ranks of an engine of that size."""
        return self._teams[half, tp_size]

    def seat(self, source_tp: int, sink_tp: int) -> Seat | None:
        """This process's, or None if it has nothing to do in such a test."""
        for team in (self.team(Half.SOURCE, source_tp), self.team(Half.SINK, sink_tp)):
            if self.rank in team.ranks:
                return Seat(team, team.ranks.index(self.rank))
        return None

    # ------------------------------------------------------------------ ends that all ranks share

    def together(self, what: str, act: Callable[[], T]) -> list[T]:
        """Everybody's results, by rank. Raises RankFailed on all ranks if one has failed, or is
        not here.
        """
        value, error = None, ""
        try:
            value = act()
        except Exception:  # noqa: BLE001  # said on every rank
            error = traceback.format_exc()
            self._failures.set(str(self._num_meetings), "")
        outcomes = self._meet(_Outcome(what, value, error))
        self._check(what, outcomes)
        return [cast(T, outcome.value) for outcome in outcomes]

    def has_failed(self) -> bool:
        """Within :meth:`together`: has another rank failed? Then nothing is worth waiting for."""
        return self._failures.check([str(self._num_meetings)])

    def verdict(self, test: str, error: str) -> None:
        """The end of a test; returns when all ranks are here. Raises RankFailed if one of them has
        an error, or has run another test.
        """
        meeting = f"{_END_OF}{test}"
        while True:
            outcomes = self._meet(_Outcome(meeting, None, error))
            if all(outcome.meeting.startswith(_END_OF) for outcome in outcomes):
                break
        self._check(meeting, outcomes)

    def _meet(self, mine: _Outcome) -> list[_Outcome]:
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, mine, group=self._objects)
        self._num_meetings += 1
        return box

    def _check(self, meeting: str, outcomes: Sequence[_Outcome]) -> None:
        problems = [
            f"rank {rank} ({outcome.meeting}): {outcome.error.strip() or 'is elsewhere'}"
            for rank, outcome in enumerate(outcomes)
            if outcome.error or outcome.meeting != meeting
        ]
        if problems:
            raise RankFailed(f"{meeting}: " + "\n".join(problems))

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


_END_OF = "end of "


def _group(ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    made = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    group = cast(dist.ProcessGroup, made)
    if backend == "nccl" and dist.get_rank() in ranks:
        # nccl connects with its first sum, which takes a second: not in the middle of a test
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        torch.cuda.synchronize()
    return group
