"""Two servers of vLLM on two hosts, behind ``kvxfer proxy``: the tokens of one engine, and what
prefill says of KV that nobody came for.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import zmq

from tests.helpers import needs_nixl
from tests.two_hosts import ADDRESSES, Host, two_hosts_or_skip
from tests.vllm.cases import NEW_TOKENS, References, prompt
from tests.vllm.engines import ENVIRONMENT, OFFER, Connector, EngineConfig
from tests.vllm.processes import Process
from tests.vllm.servers import (
    MODEL,
    START_TIMEOUT_S,
    serve_command,
    serve_environment,
)

PREFILL, DECODE = ADDRESSES
PORTS = {"kv_producer": 8100, "kv_consumer": 8200}
PROXY = "http://127.0.0.1:8000"
KV_PORT = 5700
LEASE_S = 10.0
NBYTES_OF_TOKEN = 4 * 4 * 2 * 32 * 4  # layers, heads, K and V, head size, float32
# Runs on a host, with Python alone: one question, and its answer
CLIENT = """
import sys, urllib.request
url, body = sys.argv[1], sys.argv[2].encode() or None
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""
WAYS: dict[str, dict[str, Any]] = {"zmq": {}, "nixl": {"transport": "nixl", "trust_network": True}}


@dataclass(frozen=True)
class Site:
    """``client``: the host where clients and the proxy are, which is decode's."""

    client: Host
    processes: dict[str, Process]

    def ask(self, url: str, body: object = None) -> str:
        done = self._asked(url, "" if body is None else json.dumps(body))
        assert done.returncode == 0, done.stderr + self.logs()
        return done.stdout

    def wait_ready(self, url: str) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._asked(f"{url}/health", "").returncode:
            assert all(each.is_alive for each in self.processes.values()), self.logs()
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.3)

    def logs(self) -> str:
        return "\n".join(process.log_end() for process in self.processes.values())

    def _asked(self, url: str, body: str) -> subprocess.CompletedProcess[str]:
        return self.client.run(sys.executable, "-I", "-S", "-c", CLIENT, url, body)

    def complete(self, url: str, tokens: Sequence[int], **fields: Any) -> dict[str, Any]:
        body = {
            **{"model": MODEL, "prompt": list(tokens), "max_tokens": NEW_TOKENS, "temperature": 0},
            **{"ignore_eos": True, "detokenize": False, "return_token_ids": True, **fields},
        }
        answer: dict[str, Any] = json.loads(self.ask(f"{url}/v1/completions", body))
        return answer

    def loaded_nbytes(self) -> float:
        text = self.ask(f"http://{DECODE}:{PORTS['kv_consumer']}/metrics")
        values = re.findall(r"^vllm:kvxfer_loaded_bytes_total\{.*\} (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))


def engine(host: Host, role: str, way: str, keys: tuple[bytes, bytes] | None) -> Process:
    (peer,) = {PREFILL, DECODE} - {host.address}
    extra = {"host": host.address, "port": KV_PORT, "allowed_peers": [peer], "lease_s": LEASE_S}
    extra |= WAYS[way]
    if keys is not None:
        extra |= {"curve_public_key": keys[0].decode(), "curve_secret_key": keys[1].decode()}
    config = EngineConfig(
        Connector(role=role, extra=extra),
        block_tokens=32 if role == "kv_producer" else 128,
        in_process=False,
    )
    command = serve_command(config, host.address, PORTS[role], KV_PORT)
    # vLLM finds its own address by the way to the internet, which these hosts have not
    environment = serve_environment(config, KV_PORT) | {"VLLM_HOST_IP": host.address}
    return Process.command(host.inside(tuple(command)), environment)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    yield from two_hosts_or_skip()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("zmq", True), id="zmq with CURVE"),
        pytest.param(("nixl", False), id="nixl", marks=[needs_nixl, pytest.mark.slow]),
    ],
)
def site(request: pytest.FixtureRequest, hosts: tuple[Host, Host]) -> Iterator[Site]:
    way, has_keys = request.param
    keys = zmq.curve_keypair() if has_keys else None
    urls = [
        f"http://{host.address}:{port}" for host, port in zip(hosts, PORTS.values(), strict=True)
    ]
    with ExitStack() as stack:
        found = Site(hosts[1], {})
        for host, role in zip(hosts, PORTS, strict=True):
            found.processes[role] = engine(host, role, way, keys)
            stack.callback(found.processes[role].forget)
        for url in urls:
            found.wait_ready(url)
        listen = PROXY.removeprefix("http://")
        command = ["-m", "kvxfer", "proxy", "--listen", listen]
        command += ["--prefill", urls[0], "--decode", urls[1]]
        inside = hosts[1].inside((sys.executable, *command))
        found.processes["proxy"] = Process.command(inside, dict(ENVIRONMENT))
        stack.callback(found.processes["proxy"].forget)
        found.wait_ready(PROXY)
        yield found


def test_tokens_through_the_proxy_are_those_of_one_engine(
    site: Site, references: References
) -> None:
    prompts = [prompt(num_tokens, seed=90) for num_tokens in (33, 300, 700)]
    want = references.tokens(prompts)
    before = site.loaded_nbytes()
    for tokens, tokens_want in zip(prompts, want, strict=True):
        (choice,) = site.complete(PROXY, tokens)["choices"]
        assert choice["token_ids"] == tokens_want
    moved = site.loaded_nbytes() - before
    assert moved == sum(len(tokens) - 1 for tokens in prompts) * NBYTES_OF_TOKEN
    log = site.processes["kv_consumer"].log()
    assert re.search(
        rf"engine \S+ at tcp://{PREFILL}:{KV_PORT}, met in .*: (zmq over TCP|nixl over) ", log
    )


def test_kv_that_nobody_comes_for_is_a_warning_at_prefill(site: Site) -> None:
    url = f"http://{PREFILL}:{PORTS['kv_producer']}"
    site.complete(url, prompt(64, seed=91), max_tokens=1, kv_transfer_params=OFFER)
    said = re.compile(
        rf"WARNING .*request \S+: KV not taken: expected a decode engine at "
        rf"tcp://{PREFILL}:{KV_PORT} within {LEASE_S:g} s \(lease_s\), none came for it; look "
        "whether it can reach that port"
    )
    deadline_s = time.monotonic() + LEASE_S + 60
    while not said.search(log := site.processes["kv_producer"].log()):
        assert time.monotonic() < deadline_s, log
        time.sleep(0.2)
