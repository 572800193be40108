"""What the plugin is told, and what it refuses before anything starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.config import Config
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
    for name in ("KVXFER_PORT", "KVXFER_LEASE_S", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)


def test_everything_at_its_default() -> None:
    assert read_settings(vllm_config()) == Settings(
        config=Config(),
        engine_id="E",
        can_send=True,
        can_receive=True,
        tp_size=2,
        pp_size=1,
        prefix_caching=True,
        block_tokens=128,
    )


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
    ("port", "index", "expected"), [(5700, 3, 5703), (0, 3, 0), (5700, 0, 5700)]
)
def test_each_data_parallel_rank_has_its_port(port: int, index: int, expected: int) -> None:
    config = vllm_config(extra={"port": port}, parallel={"data_parallel_index": index})
    assert read_settings(config).config.port == expected


def test_ranks_that_are_not_independent_compute_in_step() -> None:
    assert not read_settings(vllm_config()).is_in_step
    assert not read_settings(vllm_config(parallel={"data_parallel_size": 1})).is_in_step
    assert read_settings(vllm_config(parallel={"data_parallel_size": 2})).is_in_step


def test_older_versions_call_the_index_a_rank() -> None:
    config = vllm_config(parallel={"data_parallel_rank": 2})
    del config.parallel_config.data_parallel_index
    assert read_settings(config).config.port == 5702


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": {"backends": ["UCX"]}}, "backends: expected a setting of kvxfer"),
        ({"extra": {"lease_s": "long"}}, r"lease_s: expected `float`.* \(engine\)"),
        ({"extra": {"weights_identity": 3.5}}, "kv_connector_extra_config: .*weights_identity"),
        ({"extra": {"switch_interval_s": 0}}, "switch_interval_s: expected above 0"),
        ({"extra": {"port": 65535}, "parallel": {"data_parallel_index": 1}}, "at most 65534"),
        ({"transfer": {"kv_role": None}}, "kv_role: expected kv_producer, kv_consumer or kv_both"),
        ({"transfer": {"engine_id": None}}, "engine_id: expected a name"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_.*: expected 1, got 2"),
        ({"parallel": {"prefill_context_parallel_size": 4}}, "prefill_context_.*expected 1, got 4"),
        ({"model": {"is_encoder_decoder": True}}, "got an encoder-decoder"),
        ({"model": {"is_attention_free": True}}, "got one without attention"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(vllm_config(**changes))


@pytest.mark.parametrize(("draft_tp", "is_refused"), [(2, False), (1, True)])
def test_a_draft_is_as_parallel_as_its_model(draft_tp: int, is_refused: bool) -> None:
    draft = SimpleNamespace(draft_parallel_config=SimpleNamespace(tensor_parallel_size=draft_tp))
    config = vllm_config(speculative_config=draft)
    if is_refused:
        with pytest.raises(ConfigError, match="draft_tensor_parallel_size: expected 2.* got 1"):
            read_settings(config)
    else:
        read_settings(config)


def test_with_vllm_s_own_configs() -> None:
    pytest.importorskip("vllm")
    from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig

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
