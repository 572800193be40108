"""Which wires a worker makes, and why not another."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvxfer.config import Config
from kvxfer.errors import ConfigError, TransportUnavailable
from kvxfer.transports.base import LocalMemory, SendingSource, SourceTransport
from kvxfer.transports.registry import data_endpoints, published_infos
from tests.helpers import needs_nixl, needs_ucxx
from tests.machine import RDMA, put
from tests.transports.pair import CONFIG
from tests.transports.worker import Worker
from tests.wires import use_source


def close(sources: Mapping[str, SourceTransport]) -> None:
    for source in sources.values():
        if isinstance(source, SendingSource):
            source.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(Worker()) as worker:
        yield worker


def test_auto_makes_every_wire_that_the_memory_allows(worker: Worker) -> None:
    for memory, names in ((worker.shared, ["shm", "zmq"]), (worker.plain, ["zmq"])):
        sources = worker.sources(memory, Config(zmq_streams=1))
        assert list(sources) == names
        assert list(data_endpoints(sources)) == ["zmq"]
        assert data_endpoints(sources)["zmq"].startswith("tcp://127.0.0.1:")
        assert published_infos(sources, memory) == memory.infos
        close(sources)


def test_handles_are_not_published_where_shm_is_not_served(worker: Worker) -> None:
    sources = worker.sources(worker.shared, Config(transport="zmq"))
    assert list(sources) == ["zmq"]
    assert [info.handle for info in published_infos(sources, worker.shared)] == [None]
    close(sources)


def test_shm_by_name_without_shared_memory(worker: Worker) -> None:
    with pytest.raises(
        TransportUnavailable, match=r"memory 0 in a shared pool.*SharedPool\.create"
    ):
        worker.sources(worker.plain, Config(transport="shm"))


def test_optional_wires_are_made_where_they_can_gain_something(
    worker: Worker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[str] = []

    def make(name: str, error: type[Exception] = RuntimeError) -> Any:
        def broken(*arguments: object) -> SourceTransport:
            made.append(name)
            raise error("a library that does not work")

        return broken

    for name in ("ucx", "nixl"):
        use_source(monkeypatch, name, make(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "ucxx" or None)
    put(monkeypatch, RDMA, tmp_path / "infiniband")

    def names(*, is_trusted: bool = True) -> list[str]:
        made.clear()
        sources = worker.sources(worker.shared, Config(trust_network=is_trusted, zmq_streams=1))
        close(sources)
        return list(sources)

    assert (names(), made) == (["shm", "zmq"], [])
    (tmp_path / "infiniband").mkdir()
    assert (names(), made) == (["shm", "zmq"], [])
    (tmp_path / "infiniband" / "mlx5_0").mkdir()
    with caplog.at_level(logging.INFO):
        assert (names(), made) == (["shm", "zmq"], ["ucx"])  # NIXL is not installed
    assert "not offered: a library that does not work" in caplog.messages
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert (names(), made) == (["shm", "zmq"], ["nixl", "ucx"])
    # On the loopback device, where UCX stays without that, there is no RDMA
    assert (names(is_trusted=False), made) == (["shm", "zmq"], [])
    # A setting that one of them cannot keep to is no failure of its library
    use_source(monkeypatch, "ucx", make("ucx", ConfigError))
    with pytest.raises(ConfigError, match="does not work"):
        names()
    use_source(monkeypatch, "ucx", make("ucx"))
    # By name it is an error
    with pytest.raises(RuntimeError, match="does not work"):
        worker.sources(worker.shared, Config(transport="ucx"))
    # For memory of a GPU they are made without RDMA too
    made.clear()
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    use_source(monkeypatch, "cuda_ipc", make("cuda_ipc", TransportUnavailable))
    use_source(monkeypatch, "zmq", lambda *_: None)
    (tmp_path / "infiniband" / "mlx5_0").rmdir()
    memory = LocalMemory((on_gpu,), ())
    assert list(worker.sources(memory, Config(zmq_streams=1))) == ["zmq"]
    assert made == ["cuda_ipc", "nixl", "ucx"]


def make_both_sides(rdma: str) -> None:
    """What ``auto`` takes on a host with RDMA, with the order of preference."""
    config = Config(trust_network=True, zmq_streams=1)
    with closing(Worker()) as worker, pytest.MonkeyPatch.context() as patch:
        put(patch, RDMA, Path(rdma))
        sources, sinks = worker.sources(worker.plain, config), worker.sinks(worker.plain, config)
        close(sources)
        for sink in sinks.values():
            sink.close()
        assert list(sources) == ["zmq", "ucx", "nixl"]
        assert list(sinks) == ["shm", "zmq", "ucx", "nixl"]


@needs_ucxx
@needs_nixl
def test_ucx_and_nixl_stand_beside_each_other_on_both_sides(tmp_path: Path) -> None:
    """In a process where there was none before: NIXL's UCX takes the hooks of one that was there.

    The files of RDMA are made up; both go over TCP.
    """
    (tmp_path / "mlx5_0").mkdir()
    code = f"from {__name__} import make_both_sides; make_both_sides({str(tmp_path)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_auto_without_a_listening_address_is_an_error(worker: Worker) -> None:
    with pytest.raises(TransportUnavailable, match="cannot be listened on"):
        worker.sources(worker.shared, Config(host="203.0.113.1"))


def test_wires_of_another_version(worker: Worker) -> None:
    unknown = Config(transport="rdma")
    with pytest.raises(TransportUnavailable, match="shm, zmq, tcp, ucx, nixl, got rdma"):
        worker.sources(worker.shared, unknown)


@pytest.mark.parametrize(("wire", "library"), [("ucx", "ucxx"), ("nixl", "NIXL")])
def test_a_pipe_whose_library_is_missing_says_what_to_install(
    worker: Worker, wire: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"kvxfer.transports.{wire}_pipe", None)
    with pytest.raises(
        TransportUnavailable, match=rf"{wire}: expected {library}, .*; pip install .{wire}"
    ):
        worker.sources(worker.shared, msgspec.structs.replace(CONFIG, transport=wire))
