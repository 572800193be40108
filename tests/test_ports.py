"""What ``port`` and ``data_port`` say, against ports by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.config import Config, load_config
from kvxfer.errors import ConfigError
from kvxfer.ports import parse_ports

PORTS = st.integers(1, 65535)


def ports(config: Config) -> tuple[list[int], list[int]]:
    """Of control and data, in the order in which they are tried."""
    return list(config.control_ports.in_order), list(config.data_ports.in_order)


@pytest.mark.parametrize(
    ("text", "tried"),
    [
        (0, [0]),
        ("0", [0]),
        (5700, [5700]),
        ("5700", [5700]),
        ("5700-5702", [5700, 5701, 5702]),
        (" 5700 - 5702 ", [5700, 5701, 5702]),
        ("5700-5700", [5700]),
        ("65535", [65535]),
    ],
)
def test_ports_of_rank_0(text: int | str, tried: list[int]) -> None:
    config = load_config({"port": text, "data_port": text}, {}, {}).config
    assert ports(config.for_rank(0)) == (tried, tried)


@pytest.mark.parametrize(
    "text",
    [
        *("x", "", "-1", "65536", "70000", "5700-", "-5700", "5710-5700", "0-5", "0+rank"),
        *("5700+ranks", "5700+1", "5700,5701", "5700-65536", "65536+rank", "²", "5700-5710+rank"),
        *("tcp://10.0.0.1:5700", "5.7"),
    ],
)
def test_what_is_no_port(text: str) -> None:
    for name in ("port", "data_port"):
        with pytest.raises(ConfigError, match=f"^{name}: expected 0 .* got '") as refused:
            parse_ports(name, text)
        assert repr(text) in str(refused.value)


def test_a_wrong_port_is_refused_when_it_is_read() -> None:
    for values in ({"port": 70000}, {"data_port": "5710-5700"}, {"port": -1}):
        with pytest.raises(ConfigError, match=f"^{next(iter(values))}: expected 0"):
            Config(**values)


@pytest.mark.parametrize(
    ("port", "gives_kv", "expected"),
    [(None, True, 5700), (None, False, 0), (0, True, 0), (9, True, 9), (9, False, 9)],
)
def test_front_door(port: int | None, gives_kv: bool, expected: int) -> None:
    config = Config(port=port).for_engine(gives_kv=gives_kv, num_ranks=1)
    assert config.port == expected


def test_a_single_port_is_rank_0_s() -> None:
    """It knows the others' ports, so nobody needs to choose them."""
    engine = Config(port=5700).for_engine(gives_kv=True, num_ranks=3)
    assert [ports(engine.for_rank(rank))[0] for rank in range(3)] == [[5700], [0], [0]]


@given(first=st.integers(1, 60000), num_ranks=st.integers(1, 8), num_replicas=st.integers(1, 8))
def test_each_rank_of_each_replica_has_its_own(
    first: int, num_ranks: int, num_replicas: int
) -> None:
    taken = {"port": [], "data_port": []}  # type: dict[str, list[int]]
    config = Config(port=f"{first}+rank", data_port=f"{first + 100}+rank")
    for replica in range(num_replicas):
        engine = config.for_engine(gives_kv=True, num_ranks=num_ranks, replica=replica)
        for rank in range(num_ranks):
            control, data = ports(engine.for_rank(rank))
            taken["port"] += control
            taken["data_port"] += data
    num_all = num_ranks * num_replicas
    assert taken["port"] == list(range(first, first + num_all))
    assert taken["data_port"] == list(range(first + 100, first + 100 + num_all))


@given(first=PORTS, replica=st.integers(0, 9))
def test_replicas_count_on_from_a_single_port(first: int, replica: int) -> None:
    config = Config(port=first, data_port=first)
    if first + replica <= 65535:
        engine = config.for_engine(gives_kv=True, num_ranks=1, replica=replica)
        assert ports(engine.for_rank(0)) == ([first + replica], [first + replica])
    else:
        with pytest.raises(ConfigError, match=f"port: expected at most {65535 - replica}"):
            config.for_engine(gives_kv=True, num_ranks=1, replica=replica)


@given(
    first=st.integers(1, 65534),
    num=st.integers(1, 50),
    rank=st.integers(0, 99),
    replica=st.integers(0, 9),
)
def test_a_range_and_any_free_port_serve_everybody(
    first: int, num: int, rank: int, replica: int
) -> None:
    last = min(first + num, 65535)
    for config, tried in (
        (Config(port=f"{first}-{last}", data_port=f"{first}-{last}"), range(first, last + 1)),
        (Config(port=0, data_port=0), [0]),
    ):
        engine = config.for_engine(gives_kv=True, num_ranks=2, replica=replica)
        assert ports(engine.for_rank(rank)) == (list(tried), list(tried))


def test_several_ranks_need_several_data_ports() -> None:
    with pytest.raises(
        ConfigError, match="^data_port: .* each of 2 ranks, got 5800; say 5800.rank"
    ):
        Config(data_port=5800).for_engine(gives_kv=True, num_ranks=2)


def test_a_rank_beyond_the_last_port() -> None:
    engine = Config(port="65535+rank").for_engine(gives_kv=True, num_ranks=2)
    assert ports(engine.for_rank(0))[0] == [65535]
    with pytest.raises(ConfigError, match=r"^port: expected at most 65534.*got 65535\+rank"):
        engine.for_rank(1)
