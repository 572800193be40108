"""kvxfer doctor with real processes and real peers: no row hangs, and each says what is wrong."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from kvxfer.cli.doctor import run_doctor
from kvxfer.cli.options import DoctorOptions
from kvxfer.config import Config
from kvxfer.connector.peer_session import Failure
from kvxfer.connector.records import ConnectorMetadata
from kvxfer.doctor import child as child_module
from kvxfer.doctor import engines, examine, host
from kvxfer.doctor.child import Child, call
from kvxfer.doctor.rows import Row, State, status
from kvxfer.engine.rpc import RpcServer
from kvxfer.errors import ConfigError
from kvxfer.transfer import wire
from kvxfer.transfer.wire import Reason
from kvxfer.transports.key_folder import ADD, USE, make_keys, rotate_keys
from tests.builders import EngineShape
from tests.connector.rig import Engine, until

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
QUICK = {"connect_timeout_s": 1.0}
"""Where silence is what is to be found, and PATIENT where an answer comes."""
PATIENT = {"connect_timeout_s": 30.0}


def look(peer: str | None = None, **settings: Any) -> dict[str, Row]:
    """The rows by thing."""
    rows = list(examine.examine(Config(**{"port": 0, **settings}), peer))
    assert len({row.thing for row in rows}) == len(rows)
    return {row.thing: row for row in rows}


def failing(rows: dict[str, Row]) -> list[str]:
    return [thing for thing, row in rows.items() if row.state is State.FAIL]


@contextmanager
def engine(shape: EngineShape | None = None, **settings: Any) -> Iterator[Engine]:
    made = Engine(shape or EngineShape(), "prefill", fill=None, **settings)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def listener(answer: bytes = b"") -> Iterator[int]:
    """A TCP port that is not kvxfer's: it says ``answer`` to whoever comes."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@contextmanager
def requests_at() -> Iterator[str]:
    """The request channel of a reference engine, which answers what it does not understand."""
    ended = threading.Event()
    with zmq.Context() as context, closing(RpcServer(context, "127.0.0.1", 0)) as server:

        def serve() -> None:
            while not ended.is_set():
                server.socket.poll(20)
                server.receive()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.endpoint
        finally:
            ended.set()
            thread.join()


# ------------------------------------------------------------------ on one host


@pytest.mark.parametrize(
    "wires", [("shm", "zmq"), pytest.param(("shm", "zmq", "ucx", "nixl"), marks=pytest.mark.slow)]
)
def test_one_host_without_a_gpu(wires: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "AUTO", {"cpu": wires})
    rows = look()
    assert failing(rows) == []
    for name in ("shm", "zmq"):
        row = rows[f"wire {name}"]
        assert row.state is State.OK, row
        assert (row.gb_per_s or 0) > 0
        assert (row.latency_us or 0) > 0
    for name in wires[2:]:  # with their library; auto would not take them here
        row = rows[f"wire {name}"]
        is_there = all(host.versions(name).values())
        assert row.state is (State.OK if is_there else State.SKIPPED), row
        assert "auto does not try it here" in row.seen or not is_there
    assert rows["choice"].seen.startswith("auto: shm at ")
    assert "not zmq: not tried, because shm works" in rows["choice"].seen
    assert {"limit memlock", "limit memory", "port", "data_port", "library zmq"} < set(rows)


def test_a_wire_by_name_and_a_speed_that_nothing_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "AUTO", {"cpu": ("shm", "zmq")})
    rows = look(transport="zmq", min_gbps=1e6)
    assert failing(rows) == ["wire zmq", "choice"]
    assert "expected 1e+06 GB/s" in rows["wire zmq"].remedy
    assert "expected at least min_gbps" in rows["choice"].seen
    assert look(min_gbps=1e6)["choice"].seen.count("expected at least min_gbps") == 2
    assert rows["wire shm"].state is State.WARN
    assert rows["wire shm"].gb_per_s is not None


def test_a_port_that_is_taken_and_by_whom() -> None:
    with listener() as port:
        config = Config(port=port, host="127.0.0.1")
        row = next(row for row in examine.examine(config, None) if row.thing == "port")
    assert row.state is State.FAIL
    assert f"process {os.getpid()} (" in row.seen


def test_a_range_of_ports_needs_one_that_is_free() -> None:
    with listener() as port:
        rows = look(f"tcp://127.0.0.1:{port}", port=f"{port}-{port + 20}", data_port=port, **QUICK)
        assert rows["port"].state is State.OK
        assert "peer engine" in failing(rows)
        assert rows["data_port"].state is State.FAIL
        assert f"process {os.getpid()} (" in rows["data_port"].seen


def test_an_address_of_another_machine() -> None:
    (row,) = look(host="no-such-host.invalid").values()
    assert (row.thing, row.state) == ("host", State.FAIL)
    assert "no-such-host.invalid" in row.seen
    (row,) = look(host="192.0.2.1").values()
    assert (row.thing, row.state) == ("host", State.FAIL)
    assert row.seen == "expected an address of this machine, got 192.0.2.1"
    assert row.remedy == "name the address of one of its interfaces"


def test_a_library_that_crashes_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("import os\nos.abort()\n")
    (tmp_path / "nixl-9.dist-info").mkdir()
    (tmp_path / "nixl-9.dist-info" / "METADATA").write_text("Name: nixl\nVersion: 9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(examine, "AUTO", {"cpu": ("zmq", "nixl")})
    rows = look()
    assert rows["library nixl"].seen == "nixl 9"
    assert (rows["wire nixl"].state, rows["wire nixl"].seen) == (
        State.WARN,
        "the library crashes: SIGABRT ended its process",
    )
    assert rows["wire zmq"].state is State.OK
    assert failing(rows) == []
    rows = look(transport="nixl")
    assert failing(rows) == ["wire nixl", "choice"]


@pytest.mark.skipif(all(host.versions("cuda_ipc").values()), reason="nothing is missing")
def test_a_library_that_is_missing_and_how_to_have_it() -> None:
    """Without kvxfer's own name: no index has it."""
    with listener() as port:
        pass
    row = look(f"tcp://127.0.0.1:{port}")["library cuda_ipc"]
    assert row.remedy == "if you want it: pip install 'cuda-bindings>=13' 'triton>=3.2'"


# ------------------------------------------------------------------ processes


@contextmanager
def _ending(how: str, is_late: bool) -> Iterator[str]:
    if is_late:
        yield "answer"
    if how == "kill":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "hang":
        time.sleep(600)
    elif how == "raise":
        raise PermissionError("allowed_peers: not you; set it")
    elif how == "surprise":
        raise KeyError("x")
    else:
        os._exit(3)


@pytest.mark.parametrize(
    ("how", "is_late", "reason", "said"),
    [
        ("kill", False, Reason.TRANSPORT, "SIGSEGV ended its process"),
        ("kill", True, Reason.TRANSPORT, "SIGSEGV ended its process"),
        ("hang", False, Reason.DEADLINE, "hangs for 0.1 s"),
        ("hang", True, None, "answer"),
        ("raise", False, Reason.NOT_ALLOWED, "allowed_peers: not you; set it"),
        ("surprise", False, Reason.TRANSPORT, "KeyError: 'x'"),
        ("exit", False, Reason.TRANSPORT, "ended without a word"),
    ],
)
def test_however_a_process_ends(
    how: str, is_late: bool, reason: Reason | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_silent = how == "hang" and not is_late
    monkeypatch.setattr(child_module, "START_S", 0.1 if is_silent else 60.0)
    monkeypatch.setattr(child_module, "END_S", 0.1 if how == "hang" else 60.0)
    found = call(Config(), 0.1, _ending, how, is_late)
    if reason is None:
        assert found == said
    else:
        assert isinstance(found, Failure)
        assert found.reason is reason
        assert said in found.detail


def test_what_nobody_sees_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    call(Config(), 60, _ending, "surprise", False)
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------ a peer


def test_an_engine_in_service_is_met_and_left_as_it_was() -> None:
    with engine(EngineShape(tp_size=2)) as source:
        rows = look(source.endpoint)
        assert failing(rows) == []
        assert rows["peer engine"].seen.startswith("prefill, 2 ranks, CURVE off: says hello in")
        assert rows["peer ports"].seen == "all 4 of its ranks can be reached"
        assert rows["wire ucx"].seen == "the peer does not offer it"
        assert rows["wire zmq"].state is State.OK
        assert "the slowest of 2 over shm" in rows["choice"].seen
        counts = source.take_stats().counts
        assert not [name for name in counts if name.startswith(("offers.", "control.malformed"))]
        assert source.take_stats().counts.get("io.errors", 0) == 0


def test_an_engine_with_the_key_before_is_met(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    keys: dict[str, Any] = {"curve_keys_dir": str(folder), "transport": "zmq"}
    with engine(**keys) as source:
        rotate_keys(folder, ADD)
        rotate_keys(folder, USE)
        rows = look(source.endpoint, **keys, **PATIENT)
    assert failing(rows) == []
    assert "CURVE on" in rows["peer engine"].seen


def test_a_folder_without_keys_is_a_row(tmp_path: Path) -> None:
    assert failing(look(curve_keys_dir=str(tmp_path))) == ["keys"]


def test_a_doctor_that_waits_is_known_by_its_key() -> None:
    (mine, secret), (theirs, their_secret) = (_keys(), _keys())
    table = {"prefill": theirs, "decode": mine}
    shared: dict[str, Any] = {"curve_server_keys": table, **PATIENT}
    there = Config(curve_public_key=theirs, curve_secret_key=their_secret, **shared)
    with Child(there, engines.waiting, there, CPU) as child:
        endpoint = child.answer(60)
        assert isinstance(endpoint, str), endpoint
        rows = look(endpoint, curve_public_key=mine, curve_secret_key=secret, **shared)
        assert failing(rows) == []
        assert rows["peer engine"].seen.startswith("prefill, 1 ranks, CURVE on")
        assert rows["wire zmq"].state is State.OK
        stranger, strange_secret = _keys()
        keys = {"curve_public_key": stranger, "curve_secret_key": strange_secret}
        refused = look(endpoint, curve_server_keys=table, **keys, **PATIENT)
        assert failing(refused) == ["peer engine"]
        assert "does not admit this engine's CURVE key" in refused["peer engine"].seen
        assert "curve_server_keys" in refused["peer engine"].remedy
        wrong = look(endpoint, curve_server_keys={"prefill": stranger}, **keys, **QUICK)
        assert "the handshake failed" in wrong["peer engine"].seen
        bare = look(endpoint, **PATIENT)
        assert "it has CURVE keys, and this engine has none" in bare["peer engine"].seen


def _keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def test_a_port_where_nobody_listens() -> None:
    with listener() as port:
        pass
    row = look(f"tcp://127.0.0.1:{port}")["peer address"]
    assert (row.state, row.remedy) == (State.FAIL, "start the engine, or name its port")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3])
def test_a_port_that_is_not_kvxfers(answer: bytes) -> None:
    with listener(answer) as port:
        rows = look(f"tcp://127.0.0.1:{port}", **QUICK)
    assert rows["peer address"].state is State.OK
    row = rows["peer engine"]
    assert row.state is State.FAIL
    assert "did not say within 1 s who it is" in row.seen
    assert "kvxfer engine" in row.seen + row.remedy


def test_the_port_where_a_reference_engine_takes_requests() -> None:
    with requests_at() as endpoint:
        row = look(endpoint, **PATIENT)["peer engine"]
    assert row.state is State.FAIL
    assert row.seen.endswith("expected the port of its KV, got the one where it takes requests")
    assert row.remedy == "name the address that its first line gives after 'KV at'"


def test_a_peer_that_the_settings_do_not_admit() -> None:
    rows = look("tcp://192.0.2.1:5700", connect_timeout_s=0.2)
    assert rows["peer address"].state is State.FAIL
    with engine() as source:
        rows = look(source.endpoint, allowed_peers=["192.0.2.7"])
    row = rows["peer engine"]
    assert (row.state, "allowed_peers" in row.seen) == (State.FAIL, True)
    assert row.remedy.startswith("set it on both sides")
    stranger = Config(allowed_peers=("192.0.2.7",), connect_timeout_s=0.1)
    with listener() as port, pytest.raises(PermissionError, match="does not admit"):  # unasked
        engines.greeting(stranger, f"tcp://127.0.0.1:{port}").__enter__()


def test_a_peer_of_another_protocol() -> None:
    with engine(announce=False) as source:
        rows = look(source.endpoint, connect_timeout_s=10.0)
        assert "it is starting" in rows["peer engine"].seen
        versions = (wire.PROTOCOL_MAX + 1, wire.PROTOCOL_MAX + 2)
        later = msgspec.structs.replace(source.manifest, protocol=versions)
        source.step(ConnectorMetadata(manifest=later))
        rows = look(source.endpoint)
    assert "choice" in failing(rows)
    theirs, ours = f"{versions[0]} to {versions[1]}", f"1 to {wire.PROTOCOL_MAX}"
    said = f"protocol: source has versions {theirs}, sink has versions {ours}"
    assert said in rows["choice"].seen
    assert rows["choice"].remedy == "upgrade the older side"


def test_a_rank_behind_a_closed_port() -> None:
    with engine() as source:
        entry = source.manifest.ranks[0]
        with listener() as port:
            closed = f"tcp://127.0.0.1:{port}"
        ends = {**entry.data_endpoints, "zmq": closed}
        moved = msgspec.structs.replace(entry, data_endpoints=ends)
        source.step(
            ConnectorMetadata(manifest=msgspec.structs.replace(source.manifest, ranks=(moved,)))
        )
        assert "got another's or none" in look(source.endpoint)["peer engine"].seen
        rows = look(source.endpoint, allowed_peers=["127.0.0.1"])
    assert rows["peer ports"].state is State.FAIL
    assert f"{closed}, zmq of rank pp0tp0" in rows["peer ports"].seen


# ------------------------------------------------------------------ the command


def test_json_is_the_rows_and_the_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVXFER_PORT", "0")
    with listener() as port:
        pass
    options = DoctorOptions(peer=f"127.0.0.1:{port}", json=True)
    assert not run_doctor(options)
    facts = msgspec.json.decode(capsys.readouterr().out)
    rows = msgspec.convert(facts["rows"], list[Row])
    assert facts["status"] == status(rows) == 1
    assert not run_doctor(DoctorOptions(peer=f"tcp://127.0.0.1:{port}"))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert all(row.thing in shown for row in rows)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"peer": "nonsense"}, "--peer: expected HOST:PORT, got 'nonsense'"),
        ({"peer": "127.0.0.1:0"}, "--peer: expected the port of an engine"),
        ({"listen": True, "peer": "127.0.0.1:1"}, "--listen: expected neither --peer nor --json"),
        ({"min_gbps": -1.0}, "--min-gbps: expected a finite number above 0, got -1.0"),
    ],
)
def test_wrong_use(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        run_doctor(DoctorOptions(**options))


def test_a_variable_is_named_as_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_TRANSPORT", "foo")
    with pytest.raises(ConfigError, match="^KVXFER_TRANSPORT: expected one of auto, .*got 'foo'$"):
        run_doctor(DoctorOptions())


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvxfer", "doctor", *arguments]


def environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVXFER_")}
    return {**kept, "KVXFER_PORT": "0", "PYTHONPATH": str(ROOT), **variables}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [([], 0), (["--min-gbps", "1000000"], 1), (["--peer", "x"], 2), (["--nonsense"], 2)],
)
def test_the_exit_status(arguments: list[str], code: int) -> None:
    done = subprocess.run(
        command(*arguments),
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines()), default=0) <= 80
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_it_and_its_processes() -> None:
    with subprocess.Popen(
        command("--listen"),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = process.stdout.readline()
        address = said.partition("waits at ")[2].partition(";")[0]
        assert failing(look(address)) == []
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read().splitlines() == ["kvxfer: ended by SIGINT"]
        with pytest.raises(ProcessLookupError):
            until(lambda: os.killpg(process.pid, 0))
