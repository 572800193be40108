"""Replicas of Ray Serve LLM: with the real package where it is installed (see
``scripts/test_integrations``), and with stand-ins that have what it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvxfer.connector.params import OfferWanted, parse_params
from kvxfer.errors import ConfigError
from tests.connector.rig import until

OURS = "kvxfer.integrations.ray_serve"
TRANSFER = "ray.llm._internal.serve.engines.vllm.kv_transfer"
NODE = "10.1.2.3"


class StandInBackend:
    """As DefaultConnectorBackend of Ray 2.60."""

    def __init__(self, llm_config: Any) -> None:
        self.llm_config = llm_config

    @property
    def kv_transfer_config(self) -> Any:
        return self.llm_config.engine_kwargs["kv_transfer_config"]


class StandInFactory:
    """As KVConnectorBackendFactory."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}

    def is_registered(self, name: str) -> bool:
        return name in self.paths

    def register_backend(self, name: str, path: str) -> None:
        assert name not in self.paths, f"{name} is already registered"
        self.paths[name] = path

    def create_backend(self, name: str, llm_config: Any) -> Any:
        module, _, attribute = self.paths[name].partition(":")
        return getattr(import_module(module), attribute)(llm_config)

    def unregister_backend(self, name: str) -> None:
        del self.paths[name]


def install_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, dict[str, Any]] = {
        "ray": {},
        "ray.serve": {},
        "ray.util": {},
        f"{TRANSFER}.base": {"DefaultConnectorBackend": StandInBackend},
        f"{TRANSFER}.factory": {"KVConnectorBackendFactory": StandInFactory()},
    }
    parts = TRANSFER.split(".")
    packages = [".".join(parts[:number]) for number in range(2, len(parts) + 1)]
    modules = {name: ModuleType(name) for name in (*contents, *packages)}
    for name, module in modules.items():
        for attribute, value in contents.get(name, {}).items():
            setattr(module, attribute, value)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(params=["real", "stand-in"])
def ray_serve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our module, in a replica number 3 on a node with the address NODE."""
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    if request.param == "real":
        pytest.importorskip(
            f"{TRANSFER}.factory", reason="no ray[serve] here; scripts/test_integrations has it"
        )
    else:
        install_stand_ins(monkeypatch)
    module: Any = import_module(OURS)
    monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: NODE, raising=False)
    replica = SimpleNamespace(rank=SimpleNamespace(rank=3))
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: replica, raising=False)
    return module


@pytest.fixture
def set_up(ray_serve: Any) -> Any:
    """Create the backend as Ray does, and let it set a replica with these settings up."""
    ray_serve.register()
    ray_serve.register()
    factory = ray_serve.KVConnectorBackendFactory

    def set_up(transfer: dict[str, Any], **engine_kwargs: Any) -> dict[str, Any]:
        transfer = {"kv_connector": "KvxferConnector", **transfer}
        engine_kwargs["kv_transfer_config"] = transfer
        llm_config = SimpleNamespace(engine_kwargs=engine_kwargs)
        backend = factory.create_backend("KvxferConnector", llm_config)
        assert isinstance(backend, ray_serve.Backend)
        backend.setup()
        return transfer

    yield set_up
    factory.unregister_backend("KvxferConnector")


SetUp = Callable[..., dict[str, Any]]


def test_a_replica_listens_on_its_node_and_on_a_port_of_its_own(set_up: SetUp) -> None:
    transfer = set_up({"kv_role": "kv_producer"})
    assert transfer["kv_connector_extra_config"] == {"host": NODE, "port": 0}
    assert "engine_id" not in transfer  # vLLM makes one for each engine


def test_what_is_set_stays(set_up: SetUp, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"host": "10.9.9.9", "port": 5701, "allowed_peers": ["10.0.0.0/8"]}
    transfer = set_up({"kv_connector_extra_config": extra})
    assert transfer["kv_connector_extra_config"] == extra
    monkeypatch.setenv("KVXFER_HOST", "10.8.8.8")
    monkeypatch.setenv("KVXFER_PORT", "5702")
    assert set_up({})["kv_connector_extra_config"] == {}


def test_engines_have_names_of_their_own(set_up: SetUp) -> None:
    assert set_up({"engine_id": "prefill"})["engine_id"] == "prefill-3"
    # vLLM adds the rank itself
    assert set_up({"engine_id": "prefill"}, data_parallel_rank=1)["engine_id"] == "prefill"


def test_the_config_of_other_replicas_is_not_touched(set_up: SetUp) -> None:
    shared = {"allowed_peers": ["10.0.0.0/8"]}
    set_up({"kv_connector_extra_config": shared})
    assert shared == {"allowed_peers": ["10.0.0.0/8"]}


def test_a_setting_that_cannot_work_ends_the_replica(set_up: SetUp) -> None:
    with pytest.raises(ConfigError, match="port: "):
        set_up({"kv_connector_extra_config": {"port": 70000}})


def test_requests_are_shaped_as_for_nixl(ray_serve: Any) -> None:
    """By Ray's own class: nothing of it is ours."""
    if ray_serve.Backend.__mro__[1] is StandInBackend:
        assert (
            set(vars(ray_serve.Backend))
            & {
                "prepare_prefill_request",
                "prepare_decode_request",
            }
            == set()
        )
        return

    class Request(SimpleNamespace):
        def model_copy(self, *, deep: bool) -> Request:
            return Request(**vars(self))

    backend = ray_serve.Backend(SimpleNamespace(engine_kwargs={}))
    assert (backend.requires_peer_binding, backend.concurrent_handoff) == (False, False)
    request = Request(kv_transfer_params=None, max_tokens=50, stream=True)
    asked = backend.prepare_prefill_request(request=request, peer=None)
    assert (asked.max_tokens, asked.stream) == (1, False)
    assert parse_params(asked.kv_transfer_params) == OfferWanted()
    answered = SimpleNamespace(kv_transfer_params={"do_remote_prefill": True, "kvxfer": {"a": 1}})
    decode = backend.prepare_decode_request(request=request, peer=None, prefill_response=answered)
    assert decode.kv_transfer_params == answered.kv_transfer_params


def test_the_builder_registers_the_backend_first(
    ray_serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    llm: Any = ModuleType("ray.serve.llm")

    def build(given: dict[str, Any]) -> str:
        is_known = ray_serve.KVConnectorBackendFactory.is_registered("KvxferConnector")
        seen.append((given, is_known))
        return "application"

    llm.build_pd_openai_app = build
    monkeypatch.setitem(sys.modules, "ray.serve.llm", llm)
    try:
        assert ray_serve.build_pd_openai_app({"prefill_config": 1}) == "application"
    finally:
        ray_serve.KVConnectorBackendFactory.unregister_backend("KvxferConnector")
    assert seen == [({"prefill_config": 1}, True)]


def set_up_here(transfer: dict[str, Any]) -> dict[str, Any]:
    """What Ray does in a replica, with what the driver has registered."""
    factory: Any = import_module(f"{TRANSFER}.factory")
    llm_config = SimpleNamespace(engine_kwargs={"kv_transfer_config": transfer})
    factory.KVConnectorBackendFactory.create_backend(transfer["kv_connector"], llm_config).setup()
    return transfer


def test_replicas_of_a_real_cluster_find_the_backend() -> None:
    pytest.importorskip(
        f"{TRANSFER}.factory", reason="no ray[serve] here; scripts/test_integrations has it"
    )
    import ray
    from ray import serve

    ours: Any = import_module(OURS)

    class Replica:
        def __init__(self) -> None:
            given = {"kv_connector": "KvxferConnector", "engine_id": "prefill"}
            self.transfer = set_up_here(given)

        def __call__(self) -> dict[str, Any]:
            return self.transfer

    root = str(Path(__file__).parents[2])
    environment = {"env_vars": {"PYTHONPATH": root}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    try:
        ours.register()
        deployment: Any = serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.1})
        handle = serve.run(deployment(Replica).bind(), route_prefix=None)
        found: dict[str, Any] = {}
        until(lambda: _ask(handle, found) == 2)
        address = ray.util.get_node_ip_address()
    finally:
        serve.shutdown()
        ray.shutdown()
    assert found.keys() == {"prefill-0", "prefill-1"}
    for transfer in found.values():
        assert transfer["kv_connector_extra_config"] == {"host": address, "port": 0}


def _ask(handle: Any, found: dict[str, Any]) -> int:
    """One replica more, perhaps; how many have answered."""
    transfer = handle.remote().result()
    found[transfer["engine_id"]] = transfer
    return len(found)
