"""The two commands on two hosts: equal tokens over each wire, and what both sides say of a setting
that keeps them apart.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.commands import (
    DIFFERENT,
    INTERRUPTED,
    OK,
    ROOT,
    WRONG,
    environment,
    small_model,
)
from tests.helpers import needs_nixl, needs_ucxx
from tests.pages import FIRST_CONTACT
from tests.two_hosts import ADDRESSES, NAMES, Host, interrupt, two_hosts_or_skip

PREFILL, DECODE = ADDRESSES
PORT, KV_PORT = 6000, 5700
ALLOWED = {"KVXFER_ALLOWED_PEERS": "10.98.0.0/24"}
TRUSTED = {"KVXFER_TRUST_NETWORK": "1"}
QUICK = {"KVXFER_CONNECT_TIMEOUT_S": "1"}

Hosts = tuple[Host, Host]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    yield from two_hosts_or_skip()


@dataclass(frozen=True)
class Key:
    """A CURVE pair."""

    public: str
    secret: str

    @classmethod
    def make(cls) -> Key:
        return cls(*(key.decode() for key in zmq.curve_keypair()))

    def beside(self, engine_id: str, public: str) -> dict[str, str]:
        """The variables of the engine that has this pair and knows that one key."""
        return {
            "KVXFER_CURVE_PUBLIC_KEY": self.public,
            "KVXFER_CURVE_SECRET_KEY": self.secret,
            "KVXFER_CURVE_SERVER_KEYS": f"{engine_id}={public}",
        }


OF_PREFILL, OF_DECODE, OF_NOBODY = Key.make(), Key.make(), Key.make()
PREFILL_KEYS = OF_PREFILL.beside("decode", OF_DECODE.public)
DECODE_KEYS = OF_DECODE.beside("prefill", OF_PREFILL.public)


def command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "kvxfer", *arguments)


@contextmanager
def prefill(
    host: Host, folder: Path, variables: Mapping[str, str], *options: str
) -> Iterator[subprocess.Popen[str]]:
    """``kvxfer prefill`` that serves."""
    arguments = command("prefill", "--listen", f"{PREFILL}:{PORT}", "--digests", *options)
    with host.started(*arguments, env={**environment(folder), **variables}, cwd=ROOT) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith(f"prefill: tcp://{PREFILL}:{PORT} serves "), process.communicate()
        yield process


def decode(
    host: Host, folder: Path, variables: Mapping[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    arguments = command("decode", "--prefill", f"{PREFILL}:{PORT}", "--limit", "3", *options)
    return host.run(*arguments, env={**environment(folder), **variables}, cwd=ROOT)


def summary(path: Path) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(path.read_bytes())["summary"]
    return found


def test_nothing_of_one_host_is_seen_on_the_other(hosts: Hosts, tmp_path: Path) -> None:
    first, second = hosts
    serve = (
        "import socket, sys, time\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory('of-prefill', create=True, size=1)\n"
        "unix = socket.socket(socket.AF_UNIX)\n"
        "unix.bind('\\0kvxfer-test')\n"
        "tcp = socket.create_server(('0.0.0.0', 5700))\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    look = (
        "import os, socket\n"
        "def fails(act):\n"
        "    try:\n        act()\n"
        "    except OSError as e:\n        return type(e).__name__\n"
        "def unix():\n"
        "    with socket.socket(socket.AF_UNIX) as sock:\n"
        "        sock.connect('\\0kvxfer-test')\n"
        "print(fails(unix), fails(lambda: socket.create_connection(('127.0.0.1', 5700))),\n"
        f"      fails(lambda: socket.create_connection(('{PREFILL}', 5700), 10)),\n"
        "      os.listdir('/dev/shm'), socket.gethostname(),\n"
        "      sorted(os.listdir('/sys/class/net')))\n"
        "print(sorted(int(name) for name in os.listdir('/proc') if name.isdecimal())[:-1])\n"
    )
    with first.started(sys.executable, "-c", serve) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        seen = second.run(sys.executable, "-c", look)
    assert seen.stdout == (
        "ConnectionRefusedError ConnectionRefusedError None "
        f"[] {NAMES[1]} ['eth0', 'lo']\n[1]\n"  # beside the process that looks
    ), seen.stderr


def test_nothing_is_left_of_hosts_whose_test_was_killed(hosts: Hosts) -> None:
    seconds = f"{100 + random.SystemRandom().random()}"  # tells this one apart
    code = (
        "import time\n"
        "from tests.two_hosts import two_hosts\n"
        f"with two_hosts() as (first, _), first.started('sleep', '{seconds}'):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(100)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
    deadline_s = time.monotonic() + 120
    while commands_with(f"sleep\0{seconds}"):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def commands_with(text: str) -> list[str]:
    """All processes of this machine that have it in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.append(path.read_text(errors="replace"))
    return [line for line in found if text in line]


# ------------------------------------------------------------------ equal tokens

WIRES = [
    pytest.param("auto", False, (), ()),
    pytest.param("ucx", True, (), (), marks=needs_ucxx),
    *(
        pytest.param(*case, marks=[pytest.mark.slow, *marks])
        for *case, marks in (
            ("auto", True, (), (), ()),
            ("zmq", False, (), (), ()),
            ("zmq", True, (), (), ()),
            ("ucx", False, (), (), [needs_ucxx]),
            ("nixl", False, (), (), [needs_nixl]),
            ("nixl", True, (), (), [needs_nixl]),
            ("zmq", True, ("--model", "hybrid"), ("--model", "hybrid"), ()),
            ("zmq", False, ("--tp", "1", "--layout", "NHD"), ("--tp", "2", "--layout", "HND"), ()),
        )
    ),
]


@pytest.mark.parametrize(("wire", "has_keys", "of_prefill", "of_decode"), WIRES)
def test_tokens_and_kv_are_equal(
    hosts: Hosts,
    tmp_path: Path,
    wire: str,
    has_keys: bool,
    of_prefill: tuple[str, ...],
    of_decode: tuple[str, ...],
) -> None:
    both = ALLOWED | (TRUSTED if wire in ("ucx", "nixl") else {})
    model = () if "--model" in of_prefill else ("--model", small_model(tmp_path))
    facts = tmp_path / "facts.json"
    with prefill(
        *(hosts[0], tmp_path, both | (PREFILL_KEYS if has_keys else {})),
        *(*model, "--transport", wire, *of_prefill),
    ) as process:
        ran = decode(
            *(hosts[1], tmp_path, both | (DECODE_KEYS if has_keys else {})),
            *(*model, "--transport", wire, *of_decode),
            *("--verify", "--log-level", "INFO", "--json", str(facts)),
        )
        status, _, said = interrupt(process)
    assert (ran.returncode, status) == (OK, INTERRUPTED), ran.stderr + said
    found = summary(facts)
    assert found["wires"] == ["zmq" if wire == "auto" else wire]
    assert (found["num_equal_tokens"], found["num_equal_kv"], found["num_transfers"]) == (3, 3, 3)
    line = next(line for line in ran.stderr.splitlines() if ", met in " in line)
    line = re.sub(r"^INFO decode rank \d: ", "", line)
    assert line.startswith(f"engine prefill at tcp://{PREFILL}:{KV_PORT}, met in")
    assert FIRST_CONTACT.fullmatch(line)  # which pages show
    if wire == "auto":
        assert "not shm: " in ran.stderr  # the process has the same number there, or none
    warnings = re.findall("^(?:WARNING|ERROR) .*", ran.stderr + said, re.MULTILINE)
    assert [each for each in warnings if has_keys or "there are no CURVE keys" not in each] == []


# ------------------------------------------------------------------ kept apart


@dataclass(frozen=True)
class Apart:
    """What keeps them apart, and what each side says of it. ``closed``: source ports whose packets
    leave the first host no more, as behind a firewall.
    """

    of_prefill: Mapping[str, str]
    of_decode: Mapping[str, str]
    prefill_says: str
    decode_says: str
    reason: str = "not_allowed"
    options: tuple[str, ...] = ()
    more_of_decode: tuple[str, ...] = ()
    closed: tuple[str, ...] = field(default=())


FROM_DECODE = rf"a connection from {DECODE} was (refused|closed): "
TOLD = rf"KV not taken: engine decode on {NAMES[1]}: "
APART = {
    "prefill does not admit the address": Apart(
        {},
        ALLOWED,
        FROM_DECODE + "expected a peer on this host, got another; name it in allowed_peers",
        "it does not admit this engine's address; name it in allowed_peers there",
    ),
    "decode does not admit the address": Apart(
        ALLOWED,
        {},
        TOLD + f"not_allowed: allowed_peers of this engine does not admit {PREFILL}; set it on",
        f"allowed_peers of this engine does not admit {PREFILL}; set it on both sides",
    ),
    "the port is closed": Apart(
        ALLOWED,
        ALLOWED | QUICK,
        TOLD + rf"peer_lost: tcp://{PREFILL}:{KV_PORT} did not answer within 1.0 s",
        rf"tcp://{PREFILL}:{KV_PORT} did not answer within 1.0 s",
        reason="peer_lost",
        closed=(str(KV_PORT),),
    ),
    "the data ports are closed": Apart(
        ALLOWED,
        ALLOWED | QUICK,
        rf"the decode engine at {DECODE} cannot use it: transport; its log says what to set",
        rf"zmq: trial with tcp://{PREFILL}:\d+: expected an answer, got none: no connection; can "
        "that port be reached from here",
        reason="transport",
        closed=("6001-65534",),
    ),
    "ucx without a trusted network": Apart(
        ALLOWED,
        ALLOWED,
        rf"the decode engine at {DECODE} cannot use it: transport; its log says what to set",
        "set trust_network on both sides, else use zmq",
        reason="transport",
        options=("--transport", "ucx"),
    ),
    "ucx that stays on the loopback": Apart(
        ALLOWED | TRUSTED,
        ALLOWED | TRUSTED | {"KVXFER_HOST": "127.0.0.1"},
        rf"the decode engine at {DECODE} cannot use it: transport; its log says what to set",
        f"expected host of this engine to be an address that {PREFILL} can reach, got 127.0.0.1; "
        "set host on both sides",
        reason="transport",
        options=("--transport", "ucx"),
    ),
    "other heads": Apart(
        ALLOWED,
        ALLOWED,
        rf"the decode engine at {DECODE} cannot use it: incompatible; its log says what to set",
        "heads",
        reason="incompatible",
        more_of_decode=("--kv-heads", "2"),
    ),
}


OTHER_KEYS = {
    "prefill does not know the key": (
        OF_PREFILL.beside("decode", OF_NOBODY.public),
        DECODE_KEYS,
        "WARNING.*" + FROM_DECODE + "expected a CURVE key that is pinned, got another .*; name it",
    ),
    "decode expects another key": (
        PREFILL_KEYS,
        OF_DECODE.beside("prefill", OF_NOBODY.public),
        "WARNING.*" + FROM_DECODE + "it expects another CURVE key .*; give both sides the same",
    ),
    "only decode has keys": (
        {},
        DECODE_KEYS,
        "WARNING.*there are no CURVE keys: who is on the network can read KV.*set curve_keys_dir",
    ),
    # It is decode that sees first that they speak two languages, and hangs up
    "only prefill has keys": (PREFILL_KEYS, {}, "INFO.*protection of.*CURVE encrypts control"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_KEYS)
def test_other_keys_are_refused_at_the_first_door(hosts: Hosts, tmp_path: Path, name: str) -> None:
    """The request channel has the keys of the KV channel."""
    of_prefill, of_decode, prefill_says = OTHER_KEYS[name]
    model = ("--model", small_model(tmp_path))
    with prefill(hosts[0], tmp_path, ALLOWED | of_prefill, *model) as process:
        ran = decode(hosts[1], tmp_path, ALLOWED | of_decode, *model)
        _, _, said = interrupt(process)
    assert ran.returncode == WRONG
    assert ran.stderr.splitlines()[-1] == (
        f"kvxfer: error: engine at tcp://{PREFILL}:{PORT}: the handshake failed; is it a kvxfer "
        "engine, with the CURVE keys of this side? Set the same curve_keys_dir on both, or none"
    )
    assert re.search(prefill_says, said), said
    assert "Traceback" not in ran.stderr + said


@contextmanager
def closed(host: Host, ports: tuple[str, ...]) -> Iterator[None]:
    """Packets from these ports leave that host no more."""
    rules = [("ipproto", "tcp", "sport", port, "blackhole") for port in ports]
    for rule in rules:
        done = host.run("ip", "rule", "add", *rule)
        if done.returncode:
            pytest.skip(f"this kernel has no rules for ports: {done.stderr.strip()}")
    try:
        yield
    finally:
        for rule in rules:
            host.run("ip", "rule", "del", *rule)


def apart_marks(name: str) -> list[pytest.MarkDecorator]:
    slow = [] if name == "prefill does not admit the address" else [pytest.mark.slow]
    return [*slow, *([needs_ucxx] if "ucx" in name else [])]


@pytest.mark.parametrize("name", [pytest.param(each, marks=apart_marks(each)) for each in APART])
def test_both_sides_say_what_keeps_them_apart(hosts: Hosts, tmp_path: Path, name: str) -> None:
    apart = APART[name]
    options = ("--model", small_model(tmp_path), *apart.options)
    with (
        closed(hosts[0], apart.closed),
        prefill(hosts[0], tmp_path, apart.of_prefill, *options) as process,
    ):
        ran = decode(hosts[1], tmp_path, apart.of_decode, *options, *apart.more_of_decode)
        _, _, said = interrupt(process)
    assert ran.returncode == DIFFERENT, ran.stdout + ran.stderr
    assert "wire none: nothing was moved" in ran.stdout
    assert f"KV not used: {apart.reason} x 3" in ran.stdout
    assert re.search(apart.decode_says, ran.stdout)
    line = rf"(ERROR|WARNING) decode rank 0: request \S+: KV not used: {apart.reason}: "
    assert re.search(line + ".*" + apart.decode_says, ran.stderr), ran.stderr
    assert re.search(f"WARNING prefill rank 0: .*{apart.prefill_says}", said), said
    assert "Traceback" not in ran.stderr + said


@pytest.mark.slow
def test_a_prefill_engine_that_nobody_can_reach(hosts: Hosts, tmp_path: Path) -> None:
    with closed(hosts[0], (str(PORT),)), prefill(hosts[0], tmp_path, {}):
        ran = decode(hosts[1], tmp_path, {}, "--wait", "1")
    assert ran.returncode == WRONG
    assert ran.stderr.splitlines()[-1] == (
        f"kvxfer: error: engine at tcp://{PREFILL}:{PORT}: no answer within 1 s; is it running, "
        "and can its port be reached from here?"
    )


@pytest.mark.slow
def test_prefill_that_is_killed_in_mid_run_is_no_good_end(hosts: Hosts, tmp_path: Path) -> None:
    trace = ROOT / "tests" / "data" / "conversation_trace_excerpt.jsonl"
    arguments = command(
        *("decode", "--prefill", f"{PREFILL}:{PORT}", "--trace", str(trace), "--limit", "60"),
        *("--wait", "1", "--log-level", "INFO"),
    )
    with (
        prefill(hosts[0], tmp_path, ALLOWED) as source,
        hosts[1].started(*arguments, env={**environment(tmp_path), **ALLOWED}, cwd=ROOT) as sink,
    ):
        assert sink.stderr is not None
        assert any(", met in " in line for line in sink.stderr)  # KV moves
        os.killpg(source.pid, signal.SIGKILL)
        out, err = sink.communicate(timeout=90)
    assert sink.returncode == DIFFERENT, err
    assert re.search(r"KV not used: prefill_lost x \d+", out)
    assert f"engine prefill at tcp://{PREFILL}:{PORT} has gone" in err


@pytest.mark.slow
def test_one_host_by_its_outer_address(hosts: Hosts, tmp_path: Path) -> None:
    """Nothing is to be allowed: decode listens where prefill sees it, which is the same host."""
    options = ("--model", small_model(tmp_path))
    with prefill(hosts[0], tmp_path, {}, *options, "--kv-port", "6012") as process:
        ran = decode(hosts[0], tmp_path, {}, *options, "--verify")
        interrupt(process)
    assert ran.returncode == OK, ran.stderr
    assert "wire shm: " in ran.stdout
    assert "KV equal to the source's: 3 of 3" in ran.stdout
