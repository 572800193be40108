"""The ports of an engine's ranks, as a firewall sees them: those that the settings name, taken or
not, and loads between engines that have them.
"""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from tests.builders import EngineShape
from tests.connector.rig import POISON, Engine, expect_copied, until
from tests.helpers import free_port, held_ports
from tests.machine import RDMA, put

ONE = EngineShape(num_kv_heads=2, num_blocks=16)
TWO = EngineShape(tp_size=2, num_kv_heads=2, num_blocks=16)
STAGES = EngineShape(tp_size=2, pp_size=2, num_kv_heads=2, num_blocks=16)


def ports_of(engine: Engine) -> tuple[list[int], list[int]]:
    """Of control and stream data, by rank, as the manifest tells its peers."""
    ranks = engine.manifest.ranks
    control = [_port(rank.control_endpoint) for rank in ranks]
    return control, [_port(each) for rank in ranks for each in rank.data_endpoints.values()]


def _port(endpoint: str) -> int:
    port = urlsplit(endpoint).port
    assert port
    return port


def number_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def numbers(held: list[socket.socket]) -> list[int]:
    """Their ports, which are free then."""
    found = [number_of(each) for each in held]
    for each in held:
        each.close()
    return found


def engine(shape: EngineShape, engine_id: str, **settings: Any) -> Engine:
    fill = None if engine_id == "source" else POISON
    return Engine(shape, engine_id, fill=fill, transport="zmq", **settings)


def load(source: Engine, sink: Engine) -> None:
    """One load of each rank, with the right bytes."""
    ref = source.offer("r", 32, range(1, 9))
    source.compute("r")
    sink.load("r", ref, range(2, 10), (0, 32))
    until(lambda: sink.received("r"))
    assert sink.reasons("r") == {None}
    expect_copied(source, sink, range(1, 9), range(2, 10), (0, 32))


def test_each_rank_counts_on_from_the_first_port() -> None:
    with held_ports(6) as held:
        free = numbers(held)
        settings = {"port": f"{free[0]}+rank", "data_port": f"{free[3]}+rank"}
        with engine(TWO, "source", **settings) as source, engine(ONE, "sink") as sink:
            assert ports_of(source) == (free[:2], free[3:5])
            load(source, sink)


def test_pipeline_stages_count_on_behind_the_ranks_of_one_stage() -> None:
    with held_ports(8) as held:
        free = numbers(held)
        with engine(
            STAGES, "source", port=f"{free[0]}+rank", data_port=f"{free[4]}+rank"
        ) as source:
            assert ports_of(source) == (free[:4], free[4:])


def test_engines_share_a_range_and_pass_over_what_is_taken() -> None:
    with held_ports(8) as held:
        free, taken = numbers([*held[:3], *held[4:]]), number_of(held[3])
        span = f"{free[0]}-{free[-1]}"
        with (
            engine(TWO, "source", port=span, data_port=span) as source,
            engine(ONE, "sink", port=span, data_port=span) as sink,
        ):
            all_of_them = [
                port for each in (source, sink) for two in ports_of(each) for port in two
            ]
            assert sorted(all_of_them) == free[:6]
            assert taken not in all_of_them
            load(source, sink)


def test_a_single_port_is_the_front_door_s_and_data_may_have_it_own() -> None:
    with held_ports(2) as held:
        port, data_port = numbers(held)
        with engine(ONE, "source", port=port, data_port=data_port) as source:
            assert ports_of(source) == ([port], [data_port])
            with engine(TWO, "sink", port=free_port()) as sink:
                control, data = ports_of(sink)
                assert len({*control, *data}) == 4
                load(source, sink)


@pytest.mark.parametrize("name", ["port", "data_port"])
def test_no_port_of_a_range_is_free(name: str) -> None:
    with held_ports(2) as held:
        span = f"{number_of(held[0])}-{number_of(held[1])}"
        with pytest.raises(
            ConfigError, match=rf"^{name}: expected a free one .* got {span}: Addre"
        ):
            engine(ONE, "source", **{name: span})


def test_auto_does_not_leave_a_wire_out_whose_port_is_taken() -> None:
    """It would be missed only when it is needed."""
    with held_ports(1) as held:
        taken = number_of(held[0])
        with pytest.raises(
            ConfigError, match=f"^data_port: .* for zmq, got {taken}: .*in use; end"
        ):
            Engine(ONE, "source", fill=None, transport="auto", data_port=taken)


def test_a_single_data_port_does_not_do_for_several_wires(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    put(monkeypatch, RDMA, tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # all is installed
    settings: dict[str, Any] = {"data_port": free_port(), "trust_network": True}
    with pytest.raises(ConfigError, match="^data_port: expected a port for each of zmq, ucx, nixl"):
        Engine(ONE, "source", fill=None, transport="auto", **settings)


def test_what_engines_say_of_themselves_is_what_was_set() -> None:
    """A rank's settings are its own: the engine's stay as they were."""
    config = Config(port="5700+rank", data_port="5800+rank")
    rank = config.for_engine(gives_kv=True, num_ranks=2).for_rank(1)
    assert (rank.port, rank.data_port) == (5701, 5801)
    assert (config.port, config.data_port) == ("5700+rank", "5800+rank")
