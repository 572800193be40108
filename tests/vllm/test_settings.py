"""What the plugin is told, and what it refuses before anything starts."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.config import Config, variables_of
from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.settings import Settings, plugin_settings, read_settings

# vLLM loads parts of torch that other parts of torch call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def vllm_config(
    *,
    extra: dict[str, Any] | None = None,
    transfer: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **others: Any,
) -> SimpleNamespace:
    """A ``VllmConfig`` of one decode engine, as far as it is read."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            **(
                {"kv_role": "kv_both", "engine_id": "E", "kv_connector_extra_config": extra or {}}
                | (transfer or {})
            )
        ),
        parallel_config=SimpleNamespace(
            **(
                {
                    "tensor_parallel_size": 2,
                    "pipeline_parallel_size": 1,
                    "prefill_context_parallel_size": 1,
                    "decode_context_parallel_size": 1,
                    "data_parallel_index": 0,
                }
                | (parallel or {})
            )
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=128),
        model_config=SimpleNamespace(
            **({"is_encoder_decoder": False, "is_attention_free": False} | (model or {}))
        ),
        **({"speculative_config": None} | others),
    )


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("KVXFER_PORT", "KVXFER_LEASE_S", "PYTHONHASHSEED")
    for name in (*ours, *variables_of("VLLM_NIXL_")):
        monkeypatch.delenv(name, raising=False)


def test_everything_at_its_default() -> None:
    assert read_settings(vllm_config()) == Settings(
        config=Config(port=5700, early_ahead=0.0),
        engine_id="E",
        can_send=True,
        can_receive=True,
        tp_size=2,
        pp_size=1,
        prefix_caching=True,
        block_tokens=128,
    )


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_no_request_fails_for_what_it_has_presumed(policy: str) -> None:
    settings = read_settings(
        vllm_config(extra={"early_ahead": 0.5}, transfer={"kv_load_failure_policy": policy})
    )
    assert settings.config.early_ahead == (0.5 if policy == "recompute" else 0.0)


@pytest.mark.parametrize(
    ("role", "can_send", "can_receive"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_roles(role: str, can_send: bool, can_receive: bool) -> None:
    settings = read_settings(vllm_config(transfer={"kv_role": role}))
    assert (settings.can_send, settings.can_receive) == (can_send, can_receive)


def test_extra_config_before_environment_before_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_LEASE_S", "20")
    monkeypatch.setenv("KVXFER_PORT", "9")
    config = read_settings(vllm_config(extra={"port": 6000, "bind_tokens": False})).config
    assert (config.port, config.lease_s, config.bind_tokens, config.keep_s) == (6000, 20, False, 5)


def test_curve_keys_pass_as_they_are() -> None:
    key = "x" * 40
    extra = {"curve_public_key": key, "curve_secret_key": key, "curve_server_keys": {"P": key}}
    assert read_settings(vllm_config(extra=extra)).config.curve_server_keys == {"P": key}


def test_own_keys_of_the_plugin() -> None:
    config = vllm_config(extra={"weights_identity": "w", "switch_interval_s": "2e-4", "port": 1})
    assert read_settings(config).switch_interval_s == 2e-4
    assert plugin_settings(config).weights_identity == "w"


@pytest.mark.parametrize(
    ("port", "index", "expected"),
    [
        *((5700, 3, 5703), (0, 3, 0), (5700, 0, 5700), ("5700-5710", 3, "5700-5710")),
        ("5700+rank", 3, "5706+rank"),  # two tensor-parallel ranks each
    ],
)
def test_each_data_parallel_rank_has_its_port(
    port: int | str, index: int, expected: int | str
) -> None:
    config = vllm_config(extra={"port": port}, parallel={"data_parallel_index": index})
    assert read_settings(config).config.port == expected


@pytest.mark.parametrize(
    ("role", "extra", "environ", "index", "expected"),
    [
        ("kv_producer", {}, {}, 0, 5700),
        ("kv_both", {}, {}, 0, 5700),
        ("kv_both", {}, {}, 2, 5702),
        ("kv_consumer", {}, {}, 0, 0),
        ("kv_consumer", {}, {}, 2, 0),
        ("kv_consumer", {"port": 5700}, {}, 2, 5702),
        ("kv_consumer", {"port": "5700"}, {}, 0, 5700),
        ("kv_consumer", {}, {"KVXFER_PORT": "6000"}, 1, 6001),
        ("kv_consumer", {}, {"KVXFER_PORT": "tcp://10.0.0.1:5700"}, 0, 0),
        ("kv_producer", {}, {"KVXFER_PORT": "tcp://10.0.0.1:5800"}, 0, 5700),
    ],
)
def test_what_only_takes_kv_takes_a_free_port_unless_told(
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    extra: dict[str, Any],
    environ: dict[str, str],
    index: int,
    expected: int,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = vllm_config(
        extra=extra, transfer={"kv_role": role}, parallel={"data_parallel_index": index}
    )
    assert read_settings(config).config.port == expected


NIXL = {
    "backends": ["UCX"],
    "num_threads": 4,
    "kv_lease_duration": 60,
    "engine_ttl": 3600,
    "enforce_handshake_compat": False,
    "enable_cross_layers_blocks": True,
    "kv_recompute_threshold": 64,
    "bidirectional_kv_xfer": False,
    "decoder_kv_blocks_ttl": 480,
    "push_registration_timeout": 480,
}


def test_nixl_s_keys_are_warnings_that_name_ours(caplog: pytest.LogCaptureFixture) -> None:
    settings = read_settings(vllm_config(extra={**NIXL, "keep_s": 4}))
    assert settings.config == Config(
        keep_s=4, port=5700, early_ahead=0.0
    )  # none of its values is taken over
    said = {record.getMessage() for record in caplog.records}
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert len(said) == len(caplog.records) == len(NIXL)
    for key, ours in (("kv_lease_duration", "lease_s"), ("backends", "transport")):
        assert any(f"{key} is a setting of NixlConnector" in s and f"set {ours}" in s for s in said)


def test_the_keys_of_this_vllm_s_nixl_are_known() -> None:
    """Read from its source: what a config that is carried over can hold."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM")
    folder = Path(spec.origin).parent / "distributed/kv_transfer/kv_connector/v1/nixl"
    asked = re.compile(r'get_from_extra_config\(\s*"(\w+)"')
    found = {key for file in folder.glob("*.py") for key in asked.findall(file.read_text())}
    assert "kv_lease_duration" in found
    read_settings(vllm_config(extra=dict.fromkeys(found, 1)))


@pytest.mark.parametrize(
    ("extra", "environ", "said"),
    [
        ({}, {}, "VLLM_NIXL_SIDE_CHANNEL_HOST, VLLM_NIXL_SIDE_CHANNEL_PORT: of NixlConnector, "),
        ({}, {}, "set host, port in kv_connector_extra_config, or KVXFER_HOST, KVXFER_PORT"),
        (
            {"host": "127.0.0.1"},
            {},
            "VLLM_NIXL_SIDE_CHANNEL_PORT: of NixlConnector, ignored; set p",
        ),
        ({}, {"KVXFER_PORT": "1"}, "VLLM_NIXL_SIDE_CHANNEL_HOST: of NixlConnector, ignored; set h"),
        ({"host": "127.0.0.1", "port": 5700}, {}, None),
    ],
)
def test_nixl_s_side_channel_is_mentioned_and_not_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    extra: dict[str, Any],
    environ: dict[str, str],
    said: str | None,
) -> None:
    nixl = {"HOST": "10.0.0.1", "PORT": "5600"}
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_TIMEOUT", "1")  # of no setting of ours
    for name, value in nixl.items():
        monkeypatch.setenv(f"VLLM_NIXL_SIDE_CHANNEL_{name}", value)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings = read_settings(vllm_config(extra=extra))
    assert (settings.config.host, settings.config.port) == (
        "127.0.0.1",
        int(environ.get("KVXFER_PORT", 5700)),
    )
    told = [record.getMessage() for record in caplog.records]
    assert (len(told) == 1 and said in told[0]) if said else told == []


def test_ranks_that_are_not_independent_compute_in_lockstep() -> None:
    assert not read_settings(vllm_config()).is_lockstep
    assert not read_settings(vllm_config(parallel={"data_parallel_size": 1})).is_lockstep
    assert read_settings(vllm_config(parallel={"data_parallel_size": 2})).is_lockstep


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("cache_gb", [None, 0, 4])
def test_whether_vllm_looks_into_images(cache_gb: float | None, prefix_caching: bool) -> None:
    """As its own code, whose names of two processes are compared here. None: a model of text."""
    media = cache_gb if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
    config = vllm_config(model={"multimodal_config": media})
    config.cache_config.enable_prefix_caching = prefix_caching
    is_named = read_settings(config).names_media
    assert is_named == (cache_gb != 0 or prefix_caching)
    if media is None:
        return
    pytest.importorskip("vllm")
    from vllm.renderers.base import BaseRenderer

    renderer = SimpleNamespace(
        model_config=config.model_config, config=config, _validate_mm_uuids=lambda *_: None
    )
    items = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    names = BaseRenderer._process_mm_uuids(renderer, {}, items, {}, "renderer0-mm-1")
    assert names == ({} if is_named else {"image": ["renderer0-mm-1-image-0"]})


def test_older_versions_call_the_index_a_rank() -> None:
    config = vllm_config(parallel={"data_parallel_rank": 2})
    del config.parallel_config.data_parallel_index
    assert read_settings(config).config.port == 5702


PCP = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}


def test_ranks_of_prefill_context_parallelism_are_ranks_of_a_stage() -> None:
    found = read_settings(vllm_config(parallel=PCP, transfer={"kv_role": "kv_producer"}))
    assert (found.tp_size, found.block_tokens) == (4, 256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": {"lease": 9}}, r"lease: .*\(kv_connector_extra_config\); did you mean lease_s"),
        ({"extra": {"weight_identity": "w"}}, r"did you mean weights_identity\?"),
        ({"extra": {"zzzz": 1}}, "known are transport, .*, weights_identity, switch_interval_s"),
        ({"extra": {"lease_s": "long"}}, r"lease_s: expected `float`.* \(engine\)"),
        ({"extra": {"weights_identity": 3.5}}, "kv_connector_extra_config: .*weights_identity"),
        ({"extra": {"switch_interval_s": 0}}, "switch_interval_s: expected above 0"),
        ({"extra": {"data_port": 5800}}, "data_port: .* each of 2 ranks, got 5800; say 5800.rank"),
        ({"extra": {"port": "all"}}, r"port: expected 0 .* got 'all' \(engine\)"),
        ({"extra": {"port": 65535}, "parallel": {"data_parallel_index": 1}}, "at most 65534"),
        ({"transfer": {"kv_role": None}}, "kv_role: expected kv_producer, kv_consumer or kv_both"),
        ({"transfer": {"engine_id": None}}, "engine_id: expected a name"),
        ({"parallel": {"prefill_context_parallel_size": 4}}, "prefill_context_.*got 4 and 1 in a"),
        ({"parallel": PCP}, "prefill_context_.*a kv_producer .*, got 2 and 2 in a kv_both"),
        ({"model": {"is_encoder_decoder": True}}, "got an encoder-decoder"),
        ({"model": {"is_attention_free": True}}, "got one without attention"),
        ({"model": {"enable_sleep_mode": True}}, "enable_sleep_mode: expected False, got True"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(vllm_config(**changes))


def test_a_block_id_stands_for_a_block_on_each_rank_that_shares_the_tokens() -> None:
    alone = read_settings(vllm_config())
    shared = read_settings(vllm_config(parallel={"decode_context_parallel_size": 2}))
    assert shared.block_tokens == 2 * alone.block_tokens


def test_with_vllm_s_own_configs() -> None:
    pytest.importorskip("vllm")
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig

    assert "enable_sleep_mode" in ModelConfig.__dataclass_fields__
    transfer = KVTransferConfig(
        kv_connector="KvxferConnector",
        kv_role="kv_consumer",
        kv_connector_extra_config={"port": 7000},
    )
    settings = read_settings(
        SimpleNamespace(
            kv_transfer_config=transfer,
            parallel_config=ParallelConfig(),
            cache_config=CacheConfig(block_size=64),
            model_config=SimpleNamespace(),
            speculative_config=None,
        )
    )
    assert (settings.config.port, settings.block_tokens) == (7000, 64)
    assert settings.engine_id == transfer.engine_id
