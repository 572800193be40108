import itertools

import pytest

from kvxfer.errors import UnknownEngine
from kvxfer.transfer.topology import TpKVTopology

TP_SIZES = [1, 2, 4, 8, 16, 32]
HEADS = [1, 2, 4, 8]


def topology(
    *,
    tp_rank: int = 0,
    tp: int = 1,
    remote_tp: int = 1,
    heads: int = 8,
    block: int = 16,
    remote_block: int = 16,
    is_mla: bool = False,
) -> TpKVTopology:
    return TpKVTopology(
        tp_rank=tp_rank,
        remote_tp_size={"own": tp, "peer": remote_tp},
        is_mla=is_mla,
        total_num_kv_heads=heads,
        attn_backend=None,
        engine_id="own",
        remote_block_size={"own": block, "peer": remote_block},
    )


def heads_of_rank(rank: int, tp: int, heads: int) -> set[int]:
    """Deal the heads out one at a time: owners are found by counting, not by formula."""
    copies = max(1, tp // heads)
    share = max(1, heads // tp)
    owners: list[list[int]] = []  # by slot: the heads of each rank in order
    dealt = iter(range(heads))
    while (own := list(itertools.islice(dealt, share))) != []:
        owners += [own] * copies
    assert len(owners) == tp
    return set(owners[rank])


def target_ranks_by_hand(tp_rank: int, tp: int, remote_tp: int) -> list[int]:
    """Lay both engines' ranks over one line of tp * remote_tp cells; targets overlap."""
    cells = range(tp * remote_tp)
    mine = {cell for cell in cells if cell // remote_tp == tp_rank}
    return sorted({cell // tp for cell in mine})


@pytest.mark.parametrize("is_mla", [False, True], ids=["heads", "mla"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("remote_tp", TP_SIZES)
@pytest.mark.parametrize("tp", TP_SIZES)
def test_grid(tp: int, remote_tp: int, heads: int, is_mla: bool) -> None:
    reached: list[int] = []
    for rank in range(tp):
        here = topology(tp_rank=rank, tp=tp, remote_tp=remote_tp, heads=heads, is_mla=is_mla)
        assert here.tp_size == tp
        ranks = here.get_target_remote_ranks(remote_tp)
        assert ranks == target_ranks_by_hand(rank, tp, remote_tp)
        assert here.get_target_remote_ranks_from_engine_id("peer") == ranks
        reached += ranks

        held = [heads_of_rank(remote, remote_tp, heads) for remote in ranks]
        wanted = heads_of_rank(rank, tp, heads)
        assert wanted <= set().union(*held)
        if remote_tp > tp:  # nothing is asked of a rank that holds none of it
            assert set().union(*held) == wanted

        owners = [heads_of_rank(remote, remote_tp, heads) for remote in range(remote_tp)]
        shared = sum(map(len, owners)) > heads
        assert here.is_kv_replicated("peer") is shared
        assert here.replicates_kv_cache("peer") is (is_mla or shared)
    assert set(reached) == set(range(remote_tp))  # every remote rank has somebody to release it


@pytest.mark.parametrize(
    ("tp", "remote_tp", "ratio"),
    [(1, 1, 1), (4, 4, 1), (4, 2, 2), (8, 1, 8), (6, 2, 3), (1, 2, -2), (2, 8, -4), (2, 6, -3)],
)
def test_tp_ratio(tp: int, remote_tp: int, ratio: int) -> None:
    here = topology(tp=tp, remote_tp=remote_tp)
    assert here.tp_ratio(remote_tp) == ratio
    assert here.tp_ratio_from_engine_id("peer") == ratio
    assert here.tp_ratio_from_engine_id("own") == 1


@pytest.mark.parametrize(
    ("tp", "tp_rank", "remote_tp", "ranks"),
    [
        (1, 0, 1, [0]),
        (2, 1, 2, [1]),
        (4, 3, 2, [1]),
        (4, 1, 2, [0]),
        (8, 7, 1, [0]),
        (1, 0, 4, [0, 1, 2, 3]),
        (2, 1, 4, [2, 3]),
        (3, 2, 6, [4, 5]),
    ],
)
def test_target_remote_ranks(tp: int, tp_rank: int, remote_tp: int, ranks: list[int]) -> None:
    here = topology(tp=tp, tp_rank=tp_rank, remote_tp=remote_tp)
    assert here.get_target_remote_ranks(remote_tp) == ranks


@pytest.mark.parametrize(("tp", "remote_tp"), [(2, 3), (3, 2), (4, 6), (8, 12)])
@pytest.mark.parametrize("is_mla", [False, True], ids=["heads", "mla"])
def test_tp_sizes_that_do_not_divide(tp: int, remote_tp: int, is_mla: bool) -> None:
    here = topology(tp=tp, remote_tp=remote_tp, is_mla=is_mla)
    sentence = f"tp_size: expected .* multiple of the other, got local {tp} and remote {remote_tp}"
    for call in (here.tp_ratio, here.get_target_remote_ranks):
        with pytest.raises(ValueError, match=sentence):
            call(remote_tp)
    for by_engine in (here.tp_ratio_from_engine_id, here.get_target_remote_ranks_from_engine_id):
        with pytest.raises(ValueError, match=sentence):
            by_engine("peer")


@pytest.mark.parametrize(("block", "remote", "ratio"), [(16, 16, 1), (64, 16, 4), (24, 8, 3)])
def test_block_size_ratio(block: int, remote: int, ratio: int) -> None:
    here = topology(block=block, remote_block=remote)
    assert here.block_size == block
    assert here.block_size_ratio(remote) == ratio
    assert here.block_size_ratio_from_engine_id("peer") == ratio
    assert here.block_size_ratio_from_engine_id("own") == 1


@pytest.mark.parametrize(("block", "remote"), [(16, 64), (24, 16), (64, 24)])
def test_block_sizes_that_do_not_divide(block: int, remote: int) -> None:
    here = topology(block=block, remote_block=remote)
    sentence = f"block_size: expected .* got local {block} and remote {remote}"
    with pytest.raises(ValueError, match=sentence):
        here.block_size_ratio(remote)
    with pytest.raises(ValueError, match=sentence):
        here.block_size_ratio_from_engine_id("peer")


@pytest.mark.parametrize(
    ("remote_tp", "heads", "replicated"),
    [(4, 8, False), (8, 8, False), (16, 8, True), (2, 1, True)],
)
def test_replication_is_strict(remote_tp: int, heads: int, replicated: bool) -> None:
    here = topology(remote_tp=remote_tp, heads=heads)
    assert here.is_kv_replicated("peer") is replicated
    assert here.replicates_kv_cache("peer") is replicated


def test_replication_is_asked_of_the_remote_engine() -> None:
    here = topology(tp=8, remote_tp=2, heads=4)
    assert here.is_kv_replicated("own")
    assert not here.is_kv_replicated("peer")


def test_mla_replicates_but_has_no_replicated_heads() -> None:
    here = topology(tp=2, remote_tp=2, heads=8, is_mla=True)
    assert not here.is_kv_replicated("peer")
    assert here.replicates_kv_cache("peer")


@pytest.mark.parametrize("is_mla", [False, True], ids=["heads", "mla"])
@pytest.mark.parametrize(
    "name",
    [
        "tp_ratio_from_engine_id",
        "block_size_ratio_from_engine_id",
        "is_kv_replicated",
        "replicates_kv_cache",
        "get_target_remote_ranks_from_engine_id",
    ],
)
def test_unknown_engine(name: str, is_mla: bool) -> None:
    with pytest.raises(UnknownEngine, match=r"expected a known one \(own, peer\), got 'other'"):
        getattr(topology(is_mla=is_mla), name)("other")


def test_engines_may_be_met_later() -> None:
    here = topology(tp=4)
    here.remote_tp_size["new"] = 2
    here.remote_block_size["new"] = 8
    assert here.tp_ratio_from_engine_id("new") == 2
    assert here.block_size_ratio_from_engine_id("new") == 2


def test_positional_order_of_the_fields() -> None:
    here = TpKVTopology(1, {"e": 2}, False, 8, "FLASH", "e", {"e": 16})
    assert (here.tp_rank, here.tp_size, here.block_size) == (1, 2, 16)
    assert (here.is_mla, here.total_num_kv_heads) == (False, 8)
    assert (here.attn_backend, here.engine_id) == ("FLASH", "e")


def test_own_engine_must_be_known() -> None:
    with pytest.raises(UnknownEngine, match=r"\(a\), got 'e'"):
        TpKVTopology(0, {"a": 2}, False, 8, None, "e", {"e": 16})
    with pytest.raises(UnknownEngine, match=r"\(none\), got 'e'"):
        TpKVTopology(0, {"e": 2}, False, 8, None, "e", {})


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"tp_rank": 2, "tp": 2}, r"tp_rank: expected 0 to 1 \(tp_size 2\), got 2"),
        ({"tp_rank": -1, "tp": 2}, r"tp_rank: expected 0 to 1 \(tp_size 2\), got -1"),
        ({"tp": 0}, "tp_size: expected at least 1, got 0"),
        ({"block": 0}, "block_size: expected at least 1, got 0"),
        ({"heads": 0}, "total_num_kv_heads: expected at least 1, got 0"),
    ],
)
def test_refuses_own_sizes(wrong: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        topology(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1])
def test_refuses_remote_sizes(size: int) -> None:
    with pytest.raises(ValueError, match=f"remote tp_size: expected at least 1, got {size}"):
        topology().tp_ratio(size)
    with pytest.raises(ValueError, match=f"remote block_size: expected at least 1, got {size}"):
        topology().block_size_ratio(size)
