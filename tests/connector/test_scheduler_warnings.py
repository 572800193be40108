"""What the log says of requests that do not get the KV that they asked for."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvxfer.connector.params import Plain
from kvxfer.connector.records import KVConnectorOutput
from kvxfer.connector.scheduler_side import SchedulerConnector
from tests.connector.scheduler import PROMPT, Blocks, Request, connector, handed, wanting


def warned(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and text of what was written from WARNING on."""
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.levelno >= logging.WARNING]


AT = "(engine p at tcp://127.0.0.1:5700)"


def fails(c: SchedulerConnector, name: str, reason: str, detail: str = "why") -> None:
    """Every rank has reported that load, and that it failed."""
    c.update_connector_output(
        KVConnectorOutput(
            finished_recving={name},
            failed_recving={name: reason},
            failure_details={name: detail},
        )
    )


def test_a_failed_load_is_one_warning_with_peer_reason_and_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    c = connector()
    for name in ("a", "b", "c"):
        handed(c, name[:1].encode() * 16, request_id=name)
        fails(c, name, "peer_lost", f"{name} waited for 3 s")
    assert warned(caplog) == [
        ("WARNING", f"request a: KV not used: peer_lost: a waited for 3 s {AT}"),
    ]
    c.shutdown()
    assert warned(caplog)[1:] == [("WARNING", f"KV not used: peer_lost: 2 more like this {AT}")]


def test_what_was_left_out_is_told_in_a_later_step(caplog: pytest.LogCaptureFixture) -> None:
    times_s = [0.0]
    c = connector(now=lambda: times_s[0])
    for name in ("a", "b"):
        handed(c, name[:1].encode() * 16, request_id=name)
        fails(c, name, "expired")
    c.get_kv_connector_stats()
    assert len(warned(caplog)) == 1
    times_s[0] = 61.0
    assert c.get_kv_connector_stats() is None
    assert warned(caplog)[1:] == [("WARNING", f"KV not used: expired: 1 more like this {AT}")]


def test_a_pair_that_cannot_work_is_an_error_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    c = connector()
    for name in ("a", "b"):
        handed(c, name[:1].encode() * 16, request_id=name)
        fails(c, name, "incompatible", "dtype: source has x, sink has y")
    ((level, text),) = warned(caplog)
    assert level == "ERROR"
    assert f"incompatible: dtype: source has x, sink has y {AT}" in text
    stats = c.get_kv_connector_stats()
    assert stats is not None
    assert stats.counts == {"pairs.unusable": 1}
    handed(c, b"g" * 16, request_id="good")
    c.update_connector_output(KVConnectorOutput(finished_recving={"good"}))
    handed(c, b"o" * 16, request_id="again")
    fails(c, "again", "incompatible")
    assert [level for level, _ in warned(caplog)] == ["ERROR", "ERROR"]
    stats = c.get_kv_connector_stats()
    assert stats is not None
    assert stats.counts == {"requests.loaded": 1, "pairs.unusable": 1}


@pytest.mark.parametrize(
    ("params", "reason", "line"),
    [
        ({"do_remote_prefill": True}, "other_connector", "KV not used: other_connector"),
        ({"do_remote_prefill": "x"}, "bad_params", "KV not used: bad_params: kv_transfer_params: "),
        ({"do_remote_decode": True}, "role", "KV not offered: role: this engine does not offer KV"),
        (wanting().kv_transfer_params, "tokens", "KV not used: tokens: 40 tokens offered, the"),
        ({"do_remote_prefill": False}, None, None),
        (None, None, None),
    ],
)
def test_a_request_that_runs_plain_is_a_warning_and_says_why(
    params: dict[str, Any] | None,
    reason: str | None,
    line: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    c = connector(can_send=False)
    plain = c.on_new_request(Request(prompt_token_ids=PROMPT[:9], kv_transfer_params=params))
    assert (plain.reason if plain else None) == reason
    found = warned(caplog)
    assert len(found) == (line is not None)
    for level, text in found:
        assert level == "WARNING"
        assert text.startswith(f"request r: {line}")


def test_a_peer_that_is_not_allowed_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    c = connector()
    params = wanting().kv_transfer_params or {}
    params["kvxfer"]["endpoint"] = "tcp://8.8.8.8:5700"
    for _ in range(2):
        plain = c.on_new_request(Request(kv_transfer_params=params))
        assert plain is not None
        assert plain.reason == "not_allowed"
        assert plain.detail.startswith("allowed_peers of this engine does not admit 8.8.8.8; set")
    assert [level for level, _ in warned(caplog)] == ["ERROR"]


def test_who_needs_no_kv_or_has_gone_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    c = connector()
    cached = wanting(request_id="cached")
    assert c.on_new_request(cached) is None
    c.get_num_new_matched_tokens(cached, 39)
    c.update_state_after_alloc(cached, Blocks([5, 6, 7]), 0)
    unscheduled = wanting(request_id="unscheduled", status="FINISHED_ABORTED")
    assert c.on_new_request(unscheduled) is None
    c.request_finished(unscheduled, [])
    aborted = handed(c, b"x" * 16, request_id="aborted", status="FINISHED_ABORTED")
    c.request_finished(aborted, [5, 6, 7])
    fails(c, "aborted", "cancelled")
    c.shutdown()
    assert warned(caplog) == []


@pytest.mark.parametrize("reason", ["cancelled", "peer_lost"])
def test_a_load_that_fails_its_request_is_told_in_either_order(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine may end the request first. A cancel that nobody here asked for is a failure too."""
    c = connector()
    request = handed(c, status="FINISHED_ERROR")
    if reason == "peer_lost":
        c.request_finished(request, [5, 6, 7])
    fails(c, "r", reason)
    assert warned(caplog) == [("WARNING", f"request r: KV not used: {reason}: why {AT}")]


def test_who_waited_for_anothers_load_and_got_nothing_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    c = connector()
    handed(c, request_id="first")
    second = wanting(request_id="second")
    assert c.on_new_request(second) is None
    assert c.get_num_new_matched_tokens(second, 0) == (None, False)
    c.update_connector_output(KVConnectorOutput(finished_recving={"first"}))
    assert c.get_num_new_matched_tokens(second, 0) == (0, False)
    plain = c.update_state_after_alloc(second, Blocks([8, 9, 10]), 0)
    assert plain == Plain("ended", "another request of this engine has read the offer")
    ((level, text),) = warned(caplog)
    assert (level, text.startswith("request second: KV not used: ended: another")) == (
        "WARNING",
        True,
    )
    third = wanting(request_id="third")
    plain = c.on_new_request(third)
    assert plain is not None
    assert plain.reason == "ended"
