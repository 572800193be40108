"""The dashboard, the alerts and the table in the documentation name what engines really export."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
import zmq
from prometheus_client.parser import text_string_to_metric_families

from kvxfer.config import Config
from kvxfer.connector.metrics import METRICS, PHASES, TOTAL, Kind
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.engine import Engine
from kvxfer.errors import ConfigError
from kvxfer.transfer.wire import Reason
from tests import zmtp

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "kvxfer-alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "kvxfer.json"
RULE_TESTS = Path(__file__).parent / "alerts.test.yaml"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
OF_PROMETHEUS = {"job", "instance", "le", "engine", "model_name"}
"""Labels that Prometheus and vLLM add."""
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@dataclass(frozen=True)
class Scrape:
    """What one engine exports. ``kinds``: by name. ``labels``: of each name that has samples."""

    kinds: dict[str, str]
    labels: dict[str, set[str]]
    values: dict[str, float]

    @classmethod
    def of(cls, engine: Engine) -> Scrape:
        with urllib.request.urlopen(engine.group.metrics_endpoint, timeout=120) as reply:
            return cls.read(reply.read().decode())

    @classmethod
    def read(cls, text: str) -> Scrape:
        families = [f for f in text_string_to_metric_families(text) if "_created" not in f.name]
        samples = [s for f in families for s in f.samples if not s.name.endswith("_created")]
        labels: dict[str, set[str]] = {}
        values: dict[str, float] = {}
        for sample in samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return cls({f.name: f.type for f in families}, labels, values)


KEYS = {role.value: [key.decode() for key in zmq.curve_keypair()] for role in Role}


def config(role: Role, wire: Literal["zmq", "shm"]) -> EngineConfig:
    """With CURVE keys. ``engine_id`` is the role."""
    public, secret = KEYS[role.value]
    kv = Config(
        port=0,
        transport=wire,
        log_level="CRITICAL",
        curve_public_key=public,
        curve_secret_key=secret,
        curve_server_keys={name: keys[0] for name, keys in KEYS.items()},
    )
    return EngineConfig(role=role, engine_id=role.value, metrics="127.0.0.1:0", kv=kv)


def lose_the_offer(params: dict[str, Any]) -> dict[str, Any]:
    """Params of an offer that was never made."""
    return params | {"kvxfer": params["kvxfer"] | {"nonce": "00" * 16}}


def wait_for(engine: Engine, name: str) -> Scrape:
    """Scrape until this is above 0."""
    deadline_s = time.monotonic() + 120
    while True:
        scrape = Scrape.of(engine)
        if scrape.values[name]:
            return scrape
        assert time.monotonic() < deadline_s, name


@pytest.fixture(scope="module")
def scrapes() -> Iterator[list[Scrape]]:
    """Of a prefill and a decode engine that moved KV over a stream and over a direct wire, and had
    trouble with both: a load that failed, a request without KV, a stranger at the door.
    """
    found: list[Scrape] = []
    with (
        Engine(config(Role.PREFILL, "zmq")) as prefill,
        Engine(config(Role.DECODE, "zmq")) as decode,
    ):
        for _ in range(2):
            if found:
                prefill.reconfigure(config(Role.PREFILL, "shm"))
                decode.reconfigure(config(Role.DECODE, "shm"))
            for number in range(2):
                prompt = list(range(1, 60 + number))
                params = prefill.generate(prompt, 1, PREFILL).kv_transfer_params
                assert decode.generate(prompt, 2, params).kv_nbytes
            assert params is not None
            decode.generate(list(range(100, 160)), 2, params)  # another prompt's, and read before
            decode.generate(list(range(200, 260)), 2, lose_the_offer(params))
            with pytest.raises(ConnectionError):
                zmtp.connect(prefill.group.kv_endpoint)  # without a key
            held = "kvxfer_boards_open" if found else "kvxfer_staging_bytes"
            found += [wait_for(prefill, "kvxfer_connections_refused_total"), wait_for(decode, held)]
        yield found


def test_an_engine_exports_what_is_declared(scrapes: list[Scrape]) -> None:
    declared = {f"kvxfer_{metric.name}": metric.kind.value for metric in METRICS}
    for scrape in scrapes:
        assert scrape.kinds == declared
        for metric in METRICS:
            name = f"kvxfer_{metric.exported}"
            if metric.kind is Kind.HISTOGRAM:
                name += "_count"
            assert scrape.labels.get(name, set(metric.labels)) == set(metric.labels), name


def test_numbers_tell_what_happened(scrapes: list[Scrape]) -> None:
    for source, sink in (scrapes[:2], scrapes[2:]):
        nbytes = sink.values["kvxfer_loaded_bytes_total"]
        assert nbytes > 0
        assert sink.values["kvxfer_requests_loaded_total"] == 2
        assert sink.values["kvxfer_loads_total"] == 2
        assert sink.values["kvxfer_load_seconds_count"] == 2 * len((TOTAL, *PHASES))
        assert sink.values["kvxfer_read_seconds_total"] > 0
        assert sink.values["kvxfer_requests_plain_total"] == 1
        assert sink.values["kvxfer_requests_failed_total"] == 1
        assert sink.values["kvxfer_loads_failed_total"] == 1
        assert source.values["kvxfer_refusals_total"] >= 1
        assert sink.values["kvxfer_wire_bytes_per_second"] > 1e6
        assert sink.values["kvxfer_peers_ready"] == sink.values["kvxfer_peers_met_total"] == 1
        assert source.values["kvxfer_offers_done_total"] == 2
        assert source.values["kvxfer_offers_held"] == source.values["kvxfer_blocks_held"] == 0
        assert source.values["kvxfer_internal_errors_total"] == 0
    (stream_source, stream_sink, direct_source, direct_sink) = scrapes
    sent = stream_source.values["kvxfer_sent_bytes_total"]
    assert sent == stream_sink.values["kvxfer_loaded_bytes_total"]
    assert stream_sink.values["kvxfer_staging_bytes"] > 0
    assert direct_source.values["kvxfer_board_on"] == direct_sink.values["kvxfer_boards_open"] == 1
    assert stream_source.values["kvxfer_board_on"] == 0
    assert direct_sink.values["kvxfer_board_events_total"] > 0


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        alone = EngineConfig(role=Role.ALONE, engine_id="alone", metrics=address)
        with (
            pytest.raises(ConfigError, match=f"metrics: cannot listen on {address}: .*choose"),
            Engine(alone) as engine,
        ):
            engine.info()


# ------------------------------------------------------------------ what expressions name

_SELECTOR = re.compile(r"\{([^{}]*)\}")
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')
_NAME = re.compile(r"\(vllm:\)\?(kvxfer_\w+)")
_GROUPING = re.compile(r"\b(?:by|on|group_left|ignoring)\s*\(([^()]*)\)")
# A metric of the declaration, its labels and what values are known of them.
_LABELS = {
    f"kvxfer_{metric.exported}{suffix}": set(metric.labels)
    for metric in METRICS
    for suffix in (("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",))
}
_KNOWN = {f"kvxfer_{metric.exported}": set(metric.known) for metric in METRICS if metric.known} | {
    "kvxfer_wire_bytes_per_second": {"shm", "cuda_ipc", "zmq", "ucx", "nixl"},
    "kvxfer_load_seconds": {TOTAL, *PHASES},
    "kvxfer_verdicts_total": {"valid"},
    "kvxfer_wire_problems_total": {"gpu_broken"},
}


def check_expression(expression: str, exported: dict[str, set[str]]) -> set[str]:
    """The metrics that an expression names. Fails for one that is not exported, for a label that it
    does not have, and for a value that it never takes.
    """
    named: set[str] = set()
    labels: set[str] = set()
    for selector in _SELECTOR.findall(expression):
        matchers = _MATCHER.findall(selector)
        assert "".join(_MATCHER.split(selector)[::4]).strip() == "", selector
        (name_matcher,) = [m for m in matchers if m[0] == "__name__"]
        found = _NAME.fullmatch(name_matcher[2])
        assert found is not None, selector
        assert name_matcher[1] == "=~"
        name = found.group(1)
        assert name in exported, f"{name} is not exported"
        named.add(name)
        labels |= exported[name]
        for label, _, value in matchers:
            if label in {"__name__", "job", "instance"}:
                continue
            assert label in exported[name], f"{name} has no label {label}"
            known = _KNOWN[re.sub("_(bucket|sum|count)$", "", name)]
            assert set(value.split("|")) <= known, f"{name}: {label}: {value}"
    rest = _SELECTOR.sub("", expression)
    assert named, expression
    assert "kvxfer" not in rest, f"a name outside of braces: {expression}"
    for grouped in _GROUPING.findall(rest):
        unknown = {each.strip() for each in grouped.split(",") if each.strip()}
        unknown -= labels | OF_PROMETHEUS
        assert not unknown, f"no metric here has {unknown}: {expression}"
    return named


@pytest.fixture(scope="module")
def exported(scrapes: list[Scrape]) -> dict[str, set[str]]:
    """Names and labels: those of samples that were scraped, else those of the declaration, which
    the scraped types confirm.
    """
    found = dict(_LABELS)
    for scrape in scrapes:
        for name, labels in scrape.labels.items():
            found[name] = labels - {"le"}
    return found


def _alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def _panels() -> list[dict[str, Any]]:
    return [each for each in json.loads(DASHBOARD.read_text())["panels"] if each["type"] != "row"]


def test_alerts_name_what_is_exported(exported: dict[str, set[str]]) -> None:
    names = [rule["alert"] for rule in _alerts()]
    assert len(names) == len(set(names))
    for rule in _alerts():
        check_expression(rule["expr"], exported)
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        text = rule["annotations"]["summary"] + rule["annotations"]["description"]
        grouped = {each.strip() for by in _GROUPING.findall(rule["expr"]) for each in by.split(",")}
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= grouped, rule["alert"]


def test_the_dashboard_shows_every_metric_that_is_exported(exported: dict[str, set[str]]) -> None:
    shown: set[str] = set()
    for panel in _panels():
        for target in panel["targets"]:
            named = check_expression(target["expr"].replace("$__rate_interval", "5m"), exported)
            shown |= {re.sub("_(bucket|sum|count)$", "", name) for name in named}
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = _GROUPING.findall(target["expr"])
            assert all(legend <= {each.strip() for each in by.split(",")} for by in grouped)
    assert shown == {f"kvxfer_{metric.exported}" for metric in METRICS}
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            check_expression(variable["query"]["query"].split("(", 1)[1], exported)


def test_panels_do_not_overlap() -> None:
    board = json.loads(DASHBOARD.read_text())
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not own & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= own
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ('{__name__=~"(vllm:)?kvxfer_loads"}', "is not exported"),
        ('{__name__=~"(vllm:)?kvxfer_loads_total", reason="plan"}', "has no label reason"),
        ('{__name__=~"(vllm:)?kvxfer_peers_lost_total", reason="lost"}', "reason: lost"),
        ('sum by (peer) ({__name__=~"(vllm:)?kvxfer_offers_done_total"})', "no metric here has"),
        ('kvxfer_loads_total / {__name__=~"(vllm:)?kvxfer_loads_total"}', "outside of braces"),
    ],
)
def test_wrong_expressions_are_found(expression: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_expression(expression, _LABELS)


def test_every_alert_has_a_test() -> None:
    tested = {
        case["alertname"]
        for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert tested == {rule["alert"] for rule in _alerts()}


@promtool
def test_promtool_takes_the_alerts() -> None:
    for command in (["check", "rules", ALERTS], ["test", "rules", RULE_TESTS]):
        done = subprocess.run(["promtool", *map(str, command)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------ the table


def test_the_documentation_has_every_metric() -> None:
    rows = [
        f"| `{metric.exported}` | {metric.kind} | {metric.unit} | "
        f"{', '.join(f'`{label}`' for label in metric.labels)} | {metric.text} |"
        for metric in METRICS
    ]
    text = (ROOT / "docs" / "operations.md").read_text()
    section = text.split("## Numbers to watch")[1].split("\n## ")[0]
    table = section.split("| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n")[1]
    assert table.split("\n\n")[0].splitlines() == rows, "\n".join(rows)


def test_the_runbook_names_metrics_and_reasons_that_are_there() -> None:
    text = (ROOT / "docs" / "operations.md").read_text().split("## Settings")[0]
    named = set(re.findall(r"`kvxfer_(\w+)`", text))
    assert len(named) > 10
    assert named <= {metric.exported for metric in METRICS}
    table = text.split("| reason | cause | remedy | look at |\n|---|---|---|---|\n")[1]
    told = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE))))
    assert {reason.value for reason in Reason} <= told
