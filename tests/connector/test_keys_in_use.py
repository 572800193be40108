"""What somebody on the network can read with keys and without, and engines that change their keys
while they serve.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvxfer.config import Config
from kvxfer.connector.access import protection
from kvxfer.connector.params import LoadWanted, make_params, parse_params
from kvxfer.connector.records import SourceRef
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.wire import OfferRef
from kvxfer.transports.key_folder import STEPS, USE, make_keys, read_keys, rotate_keys, short
from tests.builders import EngineShape
from tests.connector.rig import (
    NIXL,
    POISON,
    UCX,
    Engine,
    is_kept_off,
    pass_s,
    until,
)
from tests.far_peers import use_tcp
from tests.helpers import free_port
from tests.wiretap import Wiretap

ONE = EngineShape()
CONTENT, DIGEST = b"\x5a" * 256, b"\xa5" * 32
MARKER = "a-name-that-nobody-else-has"


@pytest.fixture
def wiretap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wiretap]:
    """Two hosts: nobody finds a Unix socket."""
    use_tcp(monkeypatch)
    tap, connect = Wiretap(), zmq.Socket.connect

    def tapped(dealer: zmq.Socket[bytes], endpoint: str) -> object:
        return connect(dealer, tap.beside(endpoint) if endpoint.startswith("tcp:") else endpoint)

    monkeypatch.setattr(zmq.Socket, "connect", tapped)
    yield tap
    tap.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    make_keys(made)
    return made


def load(source: Engine, sink: Engine) -> set[str | None]:
    """Why a load of this pair ended as it did."""
    name = f"{MARKER}-{next(_numbers)}"
    ref = source.offer(name, 16, [1], DIGEST)
    source.compute(name)
    sink.load(name, ref, [1], (0, 16), DIGEST)
    until(lambda: sink.received(name))
    return sink.reasons(name)


_numbers = itertools.count()


@pytest.mark.parametrize("has_keys", [False, True], ids=["without keys", "with keys"])
@pytest.mark.parametrize("wire", ["zmq", UCX, NIXL])
def test_what_can_be_read_on_the_network(
    wire: str, has_keys: bool, wiretap: Wiretap, folder: Path
) -> None:
    """KV, offers, digests of tokens and names. UCX and NIXL carry payloads on connections of their
    own, beside ZeroMQ.
    """
    common: dict[str, Any] = {"transport": wire, "trust_network": True}
    if has_keys:
        common["curve_keys_dir"] = str(folder)
    with (
        Engine(ONE, f"{MARKER}-p", fill=CONTENT[0], **common) as source,
        Engine(ONE, f"{MARKER}-d", fill=POISON, **common) as sink,
    ):
        assert load(source, sink) == {None}
        nonce = next(iter(source.nonces.values()))
        (rank,) = source.manifest.ranks
    said = {name: bytes(wiretap.heard[at]) for name, at in rank.data_endpoints.items()}
    said["control"] = bytes(wiretap.heard[rank.control_endpoint])
    assert said.keys() == {"control", wire}
    secrets = {
        "control": [nonce, DIGEST, MARKER.encode(), source.incarnation],
        wire: [nonce, *([CONTENT] if wire == "zmq" else [])],
    }
    for port, wanted in secrets.items():
        assert len(said[port]) > 500
        for secret in wanted:
            assert (secret in said[port]) is not has_keys, (port, secret)


# ------------------------------------------------------------------ a rotation


class Host:
    """An engine, and its copy of the operator's folder."""

    def __init__(self, name: str, operator: Path, root: Path) -> None:
        self.name, self._operator, self.folder = name, operator, root / name
        self.copy()
        self.start()

    def copy(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self._operator, self.folder)

    def start(self) -> None:
        fill = 1 if self.name.startswith("prefill") else POISON
        settings: dict[str, Any] = {
            "transport": "zmq",
            "curve_keys_dir": str(self.folder),
        }
        self.engine = Engine(ONE, self.name, fill=fill, **settings)

    def restart(self) -> None:
        self.engine.close()
        self.start()

    @property
    def key(self) -> str | None:
        return self.engine.manifest.ranks[0].curve_public_key


def test_a_fleet_changes_its_key_without_a_load_that_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_tcp(monkeypatch)
    hosts = [Host(n, folder, tmp_path) for n in ("prefill0", "prefill1", "decode0", "decode1")]
    keys: set[tuple[bool, bool]] = set()

    def all_load() -> None:
        for source, sink in itertools.product(hosts[:2], hosts[2:]):
            assert load(source.engine, sink.engine) == {None}, (source.name, sink.name)
            keys.add((source.key == first, sink.key == first))

    try:
        first = hosts[0].key
        all_load()
        for step in STEPS:
            rotate_keys(folder, step)
            for host in hosts:
                host.copy()
                if step == USE:
                    host.restart()
                all_load()
        assert keys == {(True, True), (False, True), (False, False)}  # sinks restart last
        for host in hosts:
            assert host.key == read_keys(folder).current.public
            assert host.engine.count("connections.refused") == 0
    finally:
        for host in hosts:
            host.engine.close()
    assert "was refused" not in caplog.text
    assert "was closed" not in caplog.text


def test_ranks_of_one_engine_may_have_started_with_both_keys(folder: Path) -> None:
    def rotate(rank: RankId) -> None:
        for step in STEPS[:2] if rank.tp else ():
            rotate_keys(folder, step)

    common: dict[str, Any] = {"transport": "zmq", "curve_keys_dir": str(folder)}
    with (
        Engine(EngineShape(tp_size=2), "prefill", fill=1, before=rotate, **common) as source,
        Engine(ONE, "decode", fill=POISON, **common) as sink,
    ):
        assert len({rank.curve_public_key for rank in source.manifest.ranks}) == 2
        assert load(source, sink) == {None}


def test_loads_of_an_engine_that_started_anew_do_not_wait_for_its_old_key(folder: Path) -> None:
    """A load whose params name the old key still tries to connect when the engine is back."""
    common: dict[str, Any] = {"transport": "zmq", "curve_keys_dir": str(folder)}
    port = free_port()
    with Engine(ONE, "decode", fill=POISON, **common) as sink:
        before = SourceRef(
            engine_id="prefill",
            endpoint=f"tcp://127.0.0.1:{port}",
            offer=OfferRef(b"n" * 16, b"i" * 16),
            num_tokens=16,
            curve_public_key=read_keys(folder).current.public,
        )
        sink.load("before", before, [2], (0, 16))
        for step in STEPS[:2]:
            rotate_keys(folder, step)
        with Engine(ONE, "prefill", fill=1, port=port, **common) as source:
            assert load(source, sink) == {None}
        assert not sink.received("before")


def test_an_engine_with_the_keys_of_another_folder_is_named_on_both_sides(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    make_keys(other)
    with (
        Engine(ONE, "prefill", fill=1, transport="zmq", curve_keys_dir=str(folder)) as source,
        Engine(
            ONE, "decode", fill=POISON, curve_keys_dir=str(other), connect_timeout_s=60.0
        ) as sink,
    ):
        sink.load("d", source.offer("p", 16, [1], DIGEST), [1], (0, 16), DIGEST)
        until(lambda: is_kept_off(sink) or sink.received("d"))
        pass_s(sink, 60.0)  # until then it goes on trying
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"not_allowed"}
        (report,) = sink.take_stats().loads
        until(lambda: "expects another CURVE key here" in caplog.text)
    theirs, ours = (short(read_keys(each).current.public) for each in (folder, other))
    assert f"another one than this engine expects ({ours}); copy {other}" in report.detail
    expected = f"127.0.0.1 was closed: it expects another CURVE key here than {theirs}"
    assert expected in caplog.text


def test_params_say_which_key_only_where_there_may_be_several(folder: Path) -> None:
    """The signature covers it, and is as it was where it is left out."""
    plain = SourceRef(
        engine_id="p",
        endpoint="tcp://10.0.0.1:5700",
        offer=OfferRef(b"n" * 16, b"i" * 16),
        num_tokens=16,
        digest=DIGEST,
    )
    secret = "a secret of all engines"
    for key in (None, read_keys(folder).current.public):
        source = msgspec.structs.replace(plain, curve_public_key=key)
        params = make_params(source, request_id="r", number=1, tp_size=1, pp_size=1, key=secret)
        assert ("curve_public_key" in params["kvxfer"]) is (key is not None)
        assert parse_params(params, secret) == LoadWanted(source)
        changed = {**params, "kvxfer": {**params["kvxfer"], "curve_public_key": "another"}}
        assert getattr(parse_params(changed, secret), "reason", None) == "bad_signature"


# ------------------------------------------------------------------ what the start says


@pytest.mark.parametrize(
    ("host", "has_keys", "level", "words"),
    [
        ("127.0.0.1", False, logging.DEBUG, "no CURVE keys"),
        ("[::1]", False, logging.DEBUG, "no CURVE keys"),
        ("10.0.0.5", False, logging.WARNING, "kvxfer keys make DIR, and set curve_keys_dir"),
        ("[fe80::1%eth0]", False, logging.WARNING, "host: "),
        ("10.0.0.5", True, logging.INFO, "CURVE encrypts control, zmq's data, ucx's messages; "),
        ("127.0.0.1", True, logging.INFO, "in clear: ucx's payloads on this host's loopback"),
    ],
)
def test_what_is_protected(host: str, has_keys: bool, level: int, words: str) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys: dict[str, Any] = {"curve_public_key": public, "curve_secret_key": secret}
    said = protection(
        Config(host=host, **(keys if has_keys else {})), f"tcp://{host}:5700", ["shm", "zmq", "ucx"]
    )
    assert said.level == level
    assert words in said.text
    assert (short(public) in said.text) is has_keys
    assert secret not in said.text


def test_the_start_says_it_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Engine(EngineShape(tp_size=2), "p", fill=1, curve_keys_dir=str(folder)) as engine:
        (line,) = [each for each in caplog.messages if "CURVE" in each]
    assert line.startswith(f"protection of engine p at {engine.endpoint}: CURVE encrypts control")
    assert f"key of this engine: {short(read_keys(folder).current.public)}" in line
