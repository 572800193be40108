"""Wires of other packages: found by their entry points, checked like kvxfer's own, never fatal."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvxfer.config import load_config
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.engine import Engine
from kvxfer.errors import ConfigError, TransportUnavailable
from kvxfer.tensors.shared_memory import SharedPool
from kvxfer.testing import check_transport
from kvxfer.transports.base import DirectSource, LocalMemory
from kvxfer.transports.copy_thread import CopyThread
from kvxfer.transports.external import external_wires
from kvxfer.transports.registry import make_sinks, make_sources

WIRE_FILE = Path(__file__).with_name("deflate_wire.py")


class Site:
    """A folder of packages, as ``pip install`` would fill it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, package: str, entry_points: str, **modules: str) -> None:
        info = self.folder / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvxfer.wires]\n{entry_points}\n")
        for module, text in modules.items():
            (self.folder / f"{module}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))
    external_wires.cache_clear()
    yield Site(tmp_path)
    external_wires.cache_clear()


@pytest.fixture
def deflate(site: Site) -> Site:
    site.install("deflate-wire", "deflate = deflate_wire:WIRE", deflate_wire=WIRE_FILE.read_text())
    return site


def made(transport: str) -> tuple[list[str], list[str]]:
    """The names of the wires that a worker makes: of its source side, and of its sink side."""
    config = load_config({"transport": transport}).config
    pool, copy_thread = SharedPool.create(4096), CopyThread()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    memory = LocalMemory((pool.tensor,), (pool.info,))
    try:
        sources = make_sources(memory, config, copy_thread, lambda: None, context)
        sinks = make_sinks(memory, config, copy_thread, lambda: None, context)
        for side in (*sources.values(), *sinks.values()):
            if not isinstance(side, DirectSource):
                side.close()
        return list(sources), list(sinks)
    finally:
        copy_thread.close()
        context.term()
        pool.close()


def test_an_installed_wire_keeps_every_promise(deflate: Site) -> None:
    wire = importlib.import_module("deflate_wire")
    check_transport(wire.make_source, wire.make_sink)


def test_an_installed_wire_is_taken_by_name_and_tried_by_auto(deflate: Site) -> None:
    assert made("deflate") == (["deflate"], ["deflate"])
    assert made("auto") == (["shm", "zmq", "deflate"],) * 2
    assert made("shm") == (["shm"],) * 2


@pytest.mark.slow
def test_two_engines_move_kv_over_it(deflate: Site) -> None:
    kv = load_config({"transport": "deflate", "port": 0}).config
    with (
        Engine(EngineConfig(role=Role.PREFILL, engine_id="p", kv=kv)) as prefill,
        Engine(EngineConfig(role=Role.DECODE, engine_id="d", block_size=32, kv=kv)) as decode,
    ):
        prompt = list(range(100, 200))
        first = prefill.generate(prompt, 1, {"do_remote_decode": True})
        answer = decode.generate(prompt, 4, first.kv_transfer_params)
        alone = decode.generate(prompt, 4)
    assert answer.done.loads[0].transports == ("deflate",)
    assert answer.kv_nbytes > 0
    assert answer.token_ids == alone.token_ids


def test_nothing_is_loaded_for_who_names_a_wire_of_kvxfer(site: Site) -> None:
    site.install("loud", "loud = loud:WIRE", loud="raise RuntimeError('was imported')")
    made("zmq")
    assert external_wires.cache_info().misses == 0


@pytest.mark.parametrize(
    ("entry", "text", "reason"),
    [
        ("bad = bad:WIRE", "raise OSError('no such card')", "OSError: no such card"),
        ("bad = bad:WIRE", "import nowhere_at_all", "ModuleNotFoundError: No module named"),
        ("bad = bad:OTHER", "WIRE = 1", "AttributeError: module 'bad' has no attribute"),
        ("bad = bad:WIRE", "WIRE = 1", "TypeError: expected kvxfer.transports.external.Wire, got"),
        ("shm = bad:WIRE", "WIRE = 1", "ValueError: expected a name of its own, got shm"),
        ("bad = bad:", "WIRE = 1", "bad: cannot be used: "),
    ],
)
def test_a_broken_one_is_one_warning(
    deflate: Site, entry: str, text: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    deflate.install("bad-wire", entry, bad=text)
    with caplog.at_level(logging.WARNING, "kvxfer"):
        for _ in range(2):
            assert made("auto") == (["shm", "zmq", "deflate"],) * 2
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("kvxfer.wires: ")
    assert reason in said
    assert said.endswith("; mend or remove the package bad-wire")


def test_a_broken_one_by_name_is_an_error(site: Site) -> None:
    site.install("bad-wire", "bad = bad:WIRE", bad="raise OSError('no such card')")
    with pytest.raises(TransportUnavailable, match="transport: expected .*, got bad; "):
        made("bad")


def test_two_packages_with_one_name_are_told(
    deflate: Site, caplog: pytest.LogCaptureFixture
) -> None:
    deflate.install("deflate-too", "deflate = deflate_wire:WIRE")
    with caplog.at_level(logging.WARNING, "kvxfer"):
        assert made("auto") == (["shm", "zmq"],) * 2
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == [
        "deflate-too",
        "deflate-wire",
    ]


def test_a_wire_that_calls_itself_otherwise_is_refused(deflate: Site) -> None:
    deflate.install("gzip-wire", "gzip = deflate_wire:WIRE")
    assert made("auto") == (["shm", "zmq", "deflate"],) * 2
    with pytest.raises(TransportUnavailable, match="gzip: expected .* itself so, got deflate"):
        made("gzip")


def test_a_wire_that_nobody_has_is_refused_with_the_known_ones(deflate: Site) -> None:
    with pytest.raises(
        ConfigError, match="auto, zmq, tcp, shm, cuda_ipc, ucx, nixl, deflate, got 'x'"
    ):
        load_config({"transport": "x"})
