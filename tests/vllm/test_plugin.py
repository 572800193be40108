"""How vLLM finds the connector, and what the class says of itself."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvxfer.integrations.vllm as package
from kvxfer.connector.records import ConnectorMetadata, NewLoad, SourceRef
from kvxfer.errors import ConfigError
from kvxfer.transfer.wire import OfferRef

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM loads parts of torch that other parts call deprecated
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        supports_hma,
    )

    from kvxfer.integrations.vllm import compat
    from kvxfer.integrations.vllm.compat import (
        KvxferHandshake,
        KvxferMetadata,
        KvxferWorkerMetadata,
    )
    from kvxfer.integrations.vllm.connector import KvxferConnector
    from kvxfer.integrations.vllm.plugin import register
    from kvxfer.integrations.vllm.scheduler import SchedulerSide
    from kvxfer.integrations.vllm.worker import InFlight, failed_block_ids

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ROOT = Path(__file__).parents[2]


def test_found_by_name_and_by_path() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KvxferConnector") is KvxferConnector
    assert package.KvxferConnector is KvxferConnector
    by_path = SimpleNamespace(
        kv_connector="KvxferConnector", kv_connector_module_path="kvxfer.integrations.vllm"
    )
    assert KVConnectorFactory.get_connector_class(by_path) is KvxferConnector
    with pytest.raises(AttributeError, match="Kvxfer"):
        _ = package.KvxferOther


def test_the_entry_point_names_register() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {
        "kvxfer": f"{register.__module__}:{register.__name__}"
    }


def logged(code: str) -> str:
    """What a process writes: one of its own, because pytest's handlers catch everything. Both sides
    of the plugin show their logs, as they do where vLLM has them in one process.
    """
    shown = (
        "from kvxfer.integrations.vllm.plugin import show_logs\n"
        "show_logs('DEBUG'); show_logs('DEBUG')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import logging, sys\n" + code.format(show=shown)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


SAY = "logging.getLogger('kvxfer.connector').debug('wire shm')\n"
BY_VLLM = (
    "theirs = logging.StreamHandler(sys.stdout)\n"
    "theirs.setLevel('ERROR')\n"
    "theirs.setFormatter(logging.Formatter('vllm %(message)s'))\n"
    "logging.getLogger('vllm').addHandler(theirs)\n"
)
ROOT_TOO = "logging.basicConfig(level='ERROR', format='root %(message)s')\n"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (BY_VLLM + "{show}" + SAY, "vllm kvxfer: wire shm"),
        ("{show}" + BY_VLLM + SAY, "vllm kvxfer: wire shm"),
        ("{show}" + SAY, "[kvxfer.connector] wire shm"),
        (BY_VLLM + ROOT_TOO + "{show}" + SAY, "root wire shm"),
        (BY_VLLM + "{show}" + ROOT_TOO + SAY, "vllm kvxfer: wire shm"),
        (BY_VLLM + "logging.getLogger('kvxfer').setLevel('INFO')\n{show}" + SAY, ""),
    ],
)
def test_log_level_says_what_is_seen_and_each_line_once(code: str, line: str) -> None:
    written = logged(code)
    assert line in written
    assert written.count("wire shm") == bool(line)


def test_importing_the_package_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, kvxfer.integrations.vllm, kvxfer.integrations.vllm.plugin\n"
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_every_method_is_one_of_the_base_class() -> None:
    """A method that is spelt wrong would never be called."""
    ours = {name for name in vars(KvxferConnector) if not name.startswith("_")}
    of_later_versions = {"supports_sleep_mode"}
    known = set(dir(KVConnectorBase_V1)) | {"request_finished_all_groups"} | of_later_versions
    assert ours - known == {"scheduler_side", "worker_side"}


def test_what_the_class_says() -> None:
    assert issubclass(KvxferConnector, KVConnectorBase_V1)
    assert supports_hma(KvxferConnector)
    assert KvxferConnector.get_required_kvcache_layout(object()) is None
    assert KvxferConnector.supports_sleep_mode(object()) is False
    assert not KvxferConnector.requires_piecewise_for_cudagraph({"lease_s": 60})
    assert KvxferConnector._cache_hit_source == "p2p"


def test_a_key_that_is_spelt_wrong_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"leas_s: .* did you mean lease_s\?"):
        KvxferConnector.requires_piecewise_for_cudagraph({"leas_s": 60})


def test_several_groups_need_failures_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = SimpleNamespace()
    assert SchedulerSide(settings, 2).loaded_group_ids() == (0, 1)
    monkeypatch.setattr(compat, "REPORTS_FAILED_REQUESTS", False)
    assert SchedulerSide(settings, 1).loaded_group_ids() == (0,)
    with pytest.raises(ConfigError, match="disable-hybrid-kv-cache-manager"):
        SchedulerSide(settings, 2)


def test_before_the_handshake_and_after_shutdown() -> None:
    side = SchedulerSide(SimpleNamespace(), 1)  # type: ignore[arg-type]
    request = SimpleNamespace(kv_transfer_params={"do_remote_decode": True})
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    assert side.request_finished(request, ([1],)) == (False, None)
    assert not side.has_pending_push_work()
    assert side.get_kv_connector_stats() is None
    assert side.reset_cache()
    with pytest.raises(ConfigError, match="handshake"):
        side.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0))
    side.shutdown()
    side.shutdown()


def test_the_wrong_role_is_named() -> None:
    connector = object.__new__(KvxferConnector)
    connector._scheduler = connector._worker = None
    connector._role = KVConnectorRole.WORKER
    with pytest.raises(ConfigError, match="worker's"):
        connector.has_pending_push_work()
    with pytest.raises(ConfigError, match="scheduler's"):
        connector.wait_for_save()
    connector.shutdown()
    connector.shutdown()


def test_vllm_makes_no_calls_in_layers() -> None:
    """It would in every one of them while the base class has metadata."""
    connector = object.__new__(KvxferConnector)
    bound: list[KvxferMetadata] = []
    connector._connector_metadata = connector._scheduler = None
    connector._worker = SimpleNamespace(  # type: ignore[assignment]
        bind_connector_metadata=bound.append, clear_connector_metadata=bound.clear
    )
    metadata = KvxferMetadata(ConnectorMetadata(), False)
    connector.bind_connector_metadata(metadata)
    assert bound == [metadata]
    assert not connector.has_connector_metadata()
    connector.clear_connector_metadata()
    assert bound == []


def test_metadata() -> None:
    assert isinstance(KvxferMetadata(ConnectorMetadata(), True), KVConnectorMetadata)
    for ours, name in (
        (KvxferHandshake, "KVConnectorHandshakeMetadata"),
        (KvxferWorkerMetadata, "KVConnectorWorkerMetadata"),
    ):  # where this version of vLLM knows the name
        assert issubclass(ours, getattr(connector_base, name, object))
    first = KvxferWorkerMetadata({"a": "expired", "b": "plan"}, {"a": "late", "b": "no"})
    second = KvxferWorkerMetadata({"a": "deadline", "c": "tokens"}, {"a": "later", "c": "other"})
    both = first.aggregate(second)
    assert both.failures == {"a": "expired", "b": "plan", "c": "tokens"}
    assert both.details == {"a": "late", "b": "no", "c": "other"}
    assert first.aggregate(object()) is first


def load(request_id: str, token_lo: int, *ids: int) -> NewLoad:
    source = SourceRef(
        engine_id="p", endpoint="tcp://h:1", offer=OfferRef(b"n", b"i"), num_tokens=64
    )
    return NewLoad(
        request_id=request_id,
        source=source,
        token_lo=token_lo,
        token_hi=60,
        block_ids=(ids,),
    )


def test_block_ids_of_failed_loads() -> None:
    loads = [load("a", 0, 5, 6, -1, 7), load("b", 32, 8, 9, 10, 11)]
    assert failed_block_ids(loads, 16) == {5, 6, 7, 10, 11}
    assert failed_block_ids([], 16) == set()


def test_time_with_loads_in_flight() -> None:
    now = [10.0]
    flight = InFlight(lambda: now[0])
    assert flight.take_busy_s() == 0.0
    flight.begin([load("a", 0)])
    now[0] = 11.0
    flight.begin([load("b", 0)])
    assert flight.take_busy_s() == 1.0
    now[0] = 13.0
    assert [order.request_id for order in flight.end(["a", "unknown"])] == ["a"]
    assert not flight.has_news
    now[0] = 14.0
    flight.end(["b"])
    assert flight.has_news
    now[0] = 99.0
    assert flight.take_busy_s() == 3.0
    assert not flight.has_news


@pytest.mark.parametrize(("skips", "expected"), [(True, (0, False)), (False, (64, True))])
def test_who_wants_every_prompt_token_computed_loads_none(
    skips: bool, expected: tuple[int, bool]
) -> None:
    """0.26 asks for such a request all the same."""
    side = SchedulerSide(SimpleNamespace(), 1)  # type: ignore[arg-type]
    core = SimpleNamespace(get_num_new_matched_tokens=lambda *_: (64, True))
    side._core = core  # type: ignore[assignment]
    request = SimpleNamespace(kv_transfer_params={"a": 1}, skip_reading_prefix_cache=skips)
    assert side.get_num_new_matched_tokens(request, 0) == expected
