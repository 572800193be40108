"""The current configuration's layout, the model's backend, the requests of a step."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connector.utils import (
    get_current_attn_backend,
    get_kv_connector_cache_layout,
    set_current_config,
    yield_req_data,
)


def settings(connector: object | None, **model: bool) -> Any:
    return SimpleNamespace(kv_transfer_config=connector, model_config=SimpleNamespace(**model))


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (settings(object()), "HND"),
        (settings(object(), use_mla=False), "HND"),
        (settings(object(), use_mla=True), "NHD"),
        (settings(None), "NHD"),
        (settings(None, use_mla=True), "NHD"),
    ],
)
def test_layout(config: Any, want: str) -> None:
    with set_current_config(config):
        assert get_kv_connector_cache_layout() == want


def test_the_current_config_ends_with_its_context() -> None:
    assert get_kv_connector_cache_layout() == "NHD"
    with set_current_config(settings(object())):
        with set_current_config(settings(None)):
            assert get_kv_connector_cache_layout() == "NHD"
        assert get_kv_connector_cache_layout() == "HND"
        with pytest.raises(ZeroDivisionError), set_current_config(settings(None)):
            1 / 0  # noqa: B018
        assert get_kv_connector_cache_layout() == "HND"
        elsewhere: list[str] = []
        thread = threading.Thread(target=lambda: elsewhere.append(get_kv_connector_cache_layout()))
        thread.start()
        thread.join(120)
        assert elsewhere == ["NHD"]
    assert get_kv_connector_cache_layout() == "NHD"


class First:
    """Stands for a backend's class."""


class Second:
    """Another one."""


def layer(backend: type) -> SimpleNamespace:
    return SimpleNamespace(num_kv_heads=2, head_size=8, get_attn_backend=lambda: backend)


def forward(layers: dict[str, Any]) -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def test_the_first_attention_layers_backend() -> None:
    context = {"experts": SimpleNamespace(), "b": layer(First), "a": layer(Second)}
    assert get_current_attn_backend(forward(context)) is First  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("context", [{}, {"experts": SimpleNamespace()}])
def test_a_model_without_attention_has_no_backend(context: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="static_forward_context: expected at least one attention"):
        get_current_attn_backend(forward(context))


def step(new: list[tuple[str, Any]], cached: list[tuple[str, Any]], resumed: set[str]) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=ids) for name, ids in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in cached],
            new_block_ids=[ids for _, ids in cached],
            resumed_req_ids=resumed,
        ),
    )


def test_requests_of_a_step() -> None:
    output = step(
        new=[("a", ([1, 2], [3])), ("b", ([], [4]))],
        cached=[("c", ([5], [])), ("d", None), ("e", ([6, 7], [8]))],
        resumed={"e"},
    )
    assert list(yield_req_data(output)) == [
        ("a", ([1, 2], [3]), False),
        ("b", ([], [4]), False),
        ("c", ([5], []), False),
        ("d", None, False),
        ("e", ([6, 7], [8]), True),
    ]


def test_an_idle_step_has_no_requests() -> None:
    assert list(yield_req_data(step([], [], set()))) == []


def test_lists_of_cached_requests_have_one_length() -> None:
    output = step([], [("a", None), ("b", None)], set())
    output.scheduled_cached_reqs.new_block_ids.pop()
    with pytest.raises(
        ValueError, match="new_block_ids: expected one entry for each of 2 cached re"
    ):
        list(yield_req_data(output))
