"""A rank that fails fails them all, with its words, and nobody waits for it."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.world import UNDER_TORCHRUN, WHY_SKIPPED, Half, Placement, RankFailed, World

if not UNDER_TORCHRUN:
    pytest.skip(WHY_SKIPPED, allow_module_level=True)


def test_results_come_by_rank(world: World) -> None:
    assert world.together("name", lambda: world.rank) == list(range(world.size))


def test_one_ranks_error_is_everybodys(world: World) -> None:
    def act() -> None:
        if world.rank == world.size - 1:
            raise ValueError("no room here")

    with pytest.raises(RankFailed, match=rf"rank {world.size - 1} \(work\)(.|\n)*no room here"):
        world.together("work", act)


def test_a_rank_that_left_early_is_met_at_the_verdict(world: World) -> None:
    if world.rank == 1:
        with pytest.raises(RankFailed, match=r"rank 1 \(end of case\): it broke"):
            world.verdict("case", "it broke")
        return
    with pytest.raises(RankFailed, match=r"work: rank 1 \(end of case\): it broke"):
        world.together("work", lambda: None)
    with pytest.raises(RankFailed, match=r"end of case: rank 1 \(end of case\): it broke"):
        world.verdict("case", "")


def test_ranks_that_ran_different_tests_fail(world: World) -> None:
    name = "second" if world.rank == 1 else "first"
    with pytest.raises(RankFailed, match="is elsewhere"):
        world.verdict(name, "")


def test_half_of_the_ranks_are_a_source_half_a_sink(world: World) -> None:
    half = world.size // 2
    seats = world.together("seats", lambda: _described(world))
    largest = max(n for n in (1, 2, 4, 8, 16) if n <= half)
    expected = [("source", i) if i < largest else None for i in range(half)]
    expected += [("sink", i) if i < largest else None for i in range(half)]
    assert seats == expected


def _described(world: World) -> tuple[str, int] | None:
    largest = max(n for n in (1, 2, 4, 8, 16) if n <= world.size // 2)
    seat = world.seat(largest, largest)
    return None if seat is None else (seat.team.half.value, seat.tp_rank)


def test_the_sum_over_a_team_is_on_its_device(world: World) -> None:
    seat = world.seat(1, 1)
    placed = world.together("place", lambda: str(world.placement.tensor_backend))
    assert set(placed) == {world.placement.tensor_backend}
    if seat is not None:
        assert seat.team.half in Half
        total = seat.team.sum(torch.full((3,), 2.0, device=world.device))
        assert total.device == world.device
        assert total.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "expected"),
    [
        (0, 4, ["cpu gloo"] * 4),
        (2, 2, ["cuda:0 nccl", "cuda:1 nccl"]),
        (2, 4, ["cuda:0 gloo", "cuda:1 gloo", "cuda:0 gloo", "cuda:1 gloo"]),
        (8, 2, ["cuda:0 nccl", "cuda:1 nccl"]),
    ],
)
def test_ranks_share_gpus_without_nccl(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, num_ranks: int, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    chosen = [Placement.choose(rank, num_ranks) for rank in range(num_ranks)]
    assert [f"{place.device} {place.tensor_backend}" for place in chosen] == expected
