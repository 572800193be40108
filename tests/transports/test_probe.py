"""Which wire is taken, and why not another; which wires a worker makes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import ConfigError, TransportUnavailable
from kvxfer.tensors.shared_memory import SharedPool, plain_info
from kvxfer.testing_peer import Context
from kvxfer.transports.base import LocalMemory, SourceTransport
from kvxfer.transports.copy_thread import CopyThread
from kvxfer.transports.probe import Choice, probe
from kvxfer.transports.registry import data_endpoints, make_sinks, make_sources, published_infos
from tests.transports.pair import CONFIG, Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(CONFIG)
    yield pair
    pair.close()


def _probe_beside_a_running_source(pair: Pair, min_gbps: float | None = None) -> Choice:
    """The probe blocks, so it runs beside the source's loop, as it does in life."""
    results: list[Choice | Exception] = []

    def run() -> None:
        try:
            results.append(probe(pair.sinks, pair.manifest, min_gbps=min_gbps, timeout_s=2.0))
        except TransportUnavailable as exc:
            results.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    pair.until(lambda: not thread.is_alive())
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def test_auto_takes_shm_where_it_works(pair: Pair) -> None:
    choice = _probe_beside_a_running_source(pair)
    assert (choice.transport, choice.path) == ("shm", "")
    assert choice.gb_per_s > 0.05
    assert choice.reasons == {"zmq": "shm works and is preferred"}
    assert str(choice).startswith("shm at ")
    assert str(choice).endswith("GB/s; not zmq: shm works and is preferred")


def test_auto_takes_zmq_and_says_why_not_shm(pair: Pair) -> None:
    handle = pair.manifest.memories[0].handle
    assert handle is not None
    elsewhere = msgspec.structs.replace(
        pair.manifest.memories[0], handle=msgspec.structs.replace(handle, boot_id="elsewhere")
    )
    pair.manifest = msgspec.structs.replace(pair.manifest, memories=(elsewhere,))
    choice = _probe_beside_a_running_source(pair)
    assert choice.transport == "zmq"
    assert choice.gb_per_s > 0.01
    assert choice.reasons["shm"].startswith("expected a peer on this host")
    assert str(choice).startswith("zmq over a Unix socket at ")


def test_slow_peers_are_refused_by_policy(pair: Pair) -> None:
    with pytest.raises(TransportUnavailable) as refusal:
        _probe_beside_a_running_source(pair, min_gbps=1e6)
    assert "shm: expected at least min_gbps 1000000.0 GB/s, got" in str(refusal.value)
    assert "zmq: expected at least min_gbps 1000000.0 GB/s, got" in str(refusal.value)


def test_a_named_wire_that_does_not_work_is_an_error(pair: Pair) -> None:
    plain = msgspec.structs.replace(
        pair.manifest, memories=(plain_info(torch.zeros(5, dtype=torch.uint8)),)
    )
    with pytest.raises(TransportUnavailable, match="5701: expected a wire .* shm: .* got none"):
        probe({"shm": pair.sinks["shm"]}, plain)


def test_a_peer_that_does_not_answer_is_given_up(pair: Pair) -> None:
    # Nobody drives the source here: it is connected to, and silent.
    with pytest.raises(TransportUnavailable, match=r"within 0\.2 s, got no answer"):
        probe({"zmq": pair.sinks["zmq"]}, pair.manifest, timeout_s=0.2)


def test_only_the_last_candidate_may_take_all_the_time_that_is_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s: list[float] = []

    def silent(self: object, source: object, timeout_s: float) -> None:
        limits_s.append(timeout_s)
        raise TransportUnavailable("no answer")

    for sink in pair.sinks.values():
        monkeypatch.setattr(type(sink), "trial", silent)
    with pytest.raises(TransportUnavailable):
        probe(pair.sinks, pair.manifest, timeout_s=2.0, last_timeout_s=6.5)
    assert limits_s == [2.0, 6.5]


def test_no_candidates(pair: Pair) -> None:
    with pytest.raises(TransportUnavailable, match="got none: no candidates"):
        probe({}, pair.manifest)


# ------------------------------------------------------------------ registry


class Worker:
    def __init__(self) -> None:
        self.copy_thread = CopyThread()
        self.context: Context = zmq.Context()
        self.pool = SharedPool.create(4096)
        self.shared = LocalMemory((self.pool.tensor,), (self.pool.info,))
        plain = torch.zeros(4096, dtype=torch.uint8)
        self.plain = LocalMemory((plain,), (plain_info(plain),))

    def sources(self, memory: LocalMemory, config: Config) -> dict[str, SourceTransport]:
        return make_sources(memory, config, self.copy_thread, lambda: None, self.context)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.copy_thread.close()
    worker.context.term()
    worker.pool.close()


def test_auto_makes_every_wire_that_the_memory_allows(worker: Worker) -> None:
    for memory, names in ((worker.shared, ["shm", "zmq"]), (worker.plain, ["zmq"])):
        sources = worker.sources(memory, Config())
        assert list(sources) == names
        assert list(data_endpoints(sources)) == ["zmq"]
        assert data_endpoints(sources)["zmq"].startswith("tcp://127.0.0.1:")
        assert published_infos(sources, memory) == memory.infos
        for source in sources.values():
            source.close()


def test_handles_are_not_published_where_shm_is_not_served(worker: Worker) -> None:
    sources = worker.sources(worker.shared, Config(transport="zmq"))
    assert list(sources) == ["zmq"]
    assert [info.handle for info in published_infos(sources, worker.shared)] == [None]
    sources["zmq"].close()


def test_shm_by_name_without_shared_memory(worker: Worker) -> None:
    with pytest.raises(
        TransportUnavailable, match=r"memory 0 in a shared pool.*SharedPool\.create"
    ):
        worker.sources(worker.plain, Config(transport="shm"))


def test_auto_without_a_listening_address_is_an_error(worker: Worker) -> None:
    with pytest.raises(TransportUnavailable, match="cannot be listened on"):
        worker.sources(worker.shared, Config(host="203.0.113.1"))


def test_wires_of_another_version_and_bad_faults(worker: Worker) -> None:
    with pytest.raises(TransportUnavailable, match="one of auto, cuda_ipc, shm, zmq, got ucx"):
        worker.sources(worker.shared, Config(transport="ucx"))
    with pytest.raises(ConfigError, match="faults: "):
        make_sinks(
            worker.shared, Config(faults="x"), worker.copy_thread, lambda: None, worker.context
        )


def test_stream_calls_on_a_direct_wire(worker: Worker) -> None:
    sources = worker.sources(worker.shared, Config(transport="shm"))
    with pytest.raises(NotImplementedError, match="shm is a direct wire"):
        sources["shm"].stop_send(None)  # type: ignore[arg-type]
