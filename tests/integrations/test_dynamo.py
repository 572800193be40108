"""Dynamo's vLLM workers take KvxferConnector: with the real package where it is installed (see
``scripts/test_integrations``), and with a stand-in that has its table of connectors.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvxfer.connector.params import LoadWanted, OfferWanted, make_params, parse_params
from kvxfer.connector.records import SourceRef
from kvxfer.integrations import dynamo
from kvxfer.integrations.vllm import plugin
from kvxfer.transfer.wire import OfferRef

PARAMS = make_params(
    SourceRef(
        engine_id="prefill",
        endpoint="tcp://10.0.0.5:5700",
        offer=OfferRef(b"n" * 16, b"i" * 16),
        num_tokens=70,
        digest=b"d" * 32,
    ),
    request_id="r",
    number=1,
    tp_size=1,
    pp_size=1,
)
MODULE = "dynamo.vllm.kv_connector_protocols"


class StandInProtocol:
    """As NixlConnectorProtocol of ai-dynamo 1.3 to 1.6."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def prefill_request_kv_transfer_params(self) -> dict[str, Any]:
        unknown = ("engine_id", "block_ids", "host", "port")
        return {"do_remote_decode": True, "do_remote_prefill": False} | {
            f"remote_{name}": None for name in unknown
        }

    def decode_request_kv_transfer_params(self, prefill_response: Any) -> dict[str, Any] | None:
        params: dict[str, Any] | None = prefill_response.kv_transfer_params
        return params


def stand_in() -> Any:
    module: Any = ModuleType(MODULE)
    module.KV_CONNECTOR_PROTOCOLS = {"NixlConnector": StandInProtocol}

    def make(vllm_config: Any) -> Any:
        name = vllm_config.kv_transfer_config.kv_connector
        if name not in module.KV_CONNECTOR_PROTOCOLS:
            raise ValueError(f"Unsupported kv_connector={name!r} for PD.")
        return module.KV_CONNECTOR_PROTOCOLS[name](vllm_config)

    module.make_kv_connector_protocol = make
    return module


def install(monkeypatch: pytest.MonkeyPatch, protocols: ModuleType | None) -> None:
    """Modules of that name; None: a Dynamo without the table."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    package, vllm = ModuleType("dynamo"), ModuleType("dynamo.vllm")
    monkeypatch.setitem(sys.modules, "dynamo", package)
    monkeypatch.setitem(sys.modules, "dynamo.vllm", vllm)
    if protocols is not None:
        monkeypatch.setitem(sys.modules, MODULE, protocols)
        monkeypatch.setattr(vllm, "kv_connector_protocols", protocols, raising=False)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the package that is installed, with a table for this test alone."""
    why = "no ai-dynamo here; scripts/test_integrations has it"
    module: Any = pytest.importorskip(MODULE, reason=why)
    known = dict(module.KV_CONNECTOR_PROTOCOLS)
    monkeypatch.setattr(module, "KV_CONNECTOR_PROTOCOLS", known)
    return module


@pytest.fixture(params=["real", "stand-in"])
def protocols(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "real":
        return request.getfixturevalue("real")
    module = stand_in()
    install(monkeypatch, module)
    return module


def config(name: str, **extra: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)
    )


def test_a_prefill_worker_hands_our_params_to_decode(protocols: Any) -> None:
    with pytest.raises(ValueError, match="Unsupported kv_connector='KvxferConnector'"):
        protocols.make_kv_connector_protocol(config("KvxferConnector"))
    for _ in range(2):
        assert dynamo.register("KvxferConnector")
    protocol = protocols.make_kv_connector_protocol(config("KvxferConnector"))
    asked = protocol.prefill_request_kv_transfer_params()
    assert parse_params(asked) == OfferWanted()
    answered = SimpleNamespace(kv_transfer_params=PARAMS)
    handed = protocol.decode_request_kv_transfer_params(answered)
    assert isinstance(parse_params(handed), LoadWanted)
    assert handed == PARAMS


def test_within_a_multi_connector(real: Any) -> None:
    dynamo.register("KvxferConnector")
    children = [{"kv_connector": "KvxferConnector"}, {"kv_connector": "OffloadingConnector"}]
    protocol = real.make_kv_connector_protocol(config("MultiConnector", connectors=children))
    assert parse_params(protocol.prefill_request_kv_transfer_params()) == OfferWanted()


def test_others_stay_as_they_are(protocols: Any) -> None:
    table = protocols.KV_CONNECTOR_PROTOCOLS
    before = dict(table)
    dynamo.register("KvxferConnector")
    assert {name: each for name, each in table.items() if name != "KvxferConnector"} == before
    table["KvxferConnector"] = own = object()  # a Dynamo that knows it
    dynamo.register("KvxferConnector")
    assert table["KvxferConnector"] is own


def test_without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dynamo", None)
    for name in [name for name in sys.modules if name.startswith("dynamo.")]:
        monkeypatch.delitem(sys.modules, name)
    assert not dynamo.register("KvxferConnector")


@pytest.mark.parametrize(
    ("table", "got"),
    [(None, "NoneType"), ({}, r"\[\]"), ({"OtherConnector": object}, r"\['OtherConnector'\]")],
)
def test_a_dynamo_that_has_changed_is_named(
    monkeypatch: pytest.MonkeyPatch, table: Any, got: str
) -> None:
    module: Any = ModuleType(MODULE)
    module.KV_CONNECTOR_PROTOCOLS = table
    install(monkeypatch, module)
    with pytest.raises(dynamo.UnknownDynamo, match=f"with NixlConnector, got {got}; its workers"):
        dynamo.register("KvxferConnector")


def test_a_dynamo_without_the_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(dynamo.UnknownDynamo, match="expected a table of connectors, got"):
        dynamo.register("KvxferConnector")


def test_the_plugin_registers_it_and_vllm_goes_on_whatever_dynamo_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered: list[tuple[str, ...]] = []
    factory: Any = ModuleType("vllm.distributed.kv_transfer.kv_connector.factory")
    factory.KVConnectorFactory = SimpleNamespace(
        register_connector=lambda *given: registered.append(given)
    )
    parts = factory.__name__.split(".")
    for number in range(1, len(parts)):
        name = ".".join(parts[:number])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, factory.__name__, factory)
    module: Any = stand_in()
    install(monkeypatch, module)
    plugin.register()
    assert "KvxferConnector" in module.KV_CONNECTOR_PROTOCOLS
    module.KV_CONNECTOR_PROTOCOLS = {}
    with caplog.at_level(logging.WARNING, "kvxfer"):
        plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(registered) == 2
