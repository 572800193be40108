"""Who is served and who is connected to."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvxfer.config import Config
from kvxfer.connector.access import Listeners, check_host, check_owners, server_key_of
from kvxfer.transports.guard import why_refused
from tests.helpers import free_port, needs_root, process_of_another_user
from tests.machine import put

PUBLIC, SECRET = (key.decode() for key in zmq.curve_keypair())
OTHER, STRANGE = (zmq.curve_keypair()[0].decode() for _ in range(2))
CURVE = {"curve_public_key": PUBLIC, "curve_secret_key": SECRET}


@pytest.mark.parametrize(
    ("address", "settings", "expected"),
    [
        ("127.0.0.1", {}, True),
        ("127.8.8.8", {}, True),
        ("::1", {}, True),
        ("10.0.0.1", {}, False),  # private, but nobody said so
        ("192.168.1.1", {}, False),
        ("8.8.8.8", {}, False),
        ("", {}, False),
        ("nonsense", {}, False),
        ("10.0.0.1", {"allowed_peers": ("10.0.0.0/8",)}, True),
        ("10.0.0.1", {"allowed_peers": ("10.0.0.2",)}, False),
        ("127.0.0.1", {"allowed_peers": ("10.0.0.2",)}, True),
        ("10.0.0.5", {"host": "10.0.0.5"}, True),  # this host by its own address
        ("10.0.0.6", {"host": "10.0.0.5"}, False),
        (f"localhost:{os.geteuid()}:0:1", {}, True),
        (f"localhost:{os.geteuid()}:0:1", {"allowed_peers": ("10.0.0.2",)}, True),
        (f"localhost:{os.geteuid() + 1}:0:1", {}, False),
    ],
)
def test_addresses_are_admitted(address: str, settings: dict[str, object], expected: bool) -> None:
    why = why_refused(Config(**settings), address, None)  # type: ignore[arg-type]
    assert (why is None) is expected


@pytest.mark.parametrize(
    ("address", "key", "expected"),
    [
        ("8.8.8.8", PUBLIC, True),  # the keys decide
        ("8.8.8.8", OTHER, True),
        ("8.8.8.8", STRANGE, False),
        ("127.0.0.1", STRANGE, False),
        ("127.0.0.1", None, False),
        (f"localhost:{os.geteuid()}:0:1", None, True),
        (f"localhost:{os.geteuid() + 1}:0:1", PUBLIC, False),
    ],
    ids=["pinned", "also pinned", "strange", "strange here", "no key", "own user", "other user"],
)
def test_with_keys_addresses_do_not_matter(address: str, key: str | None, expected: bool) -> None:
    config = Config(**CURVE, curve_server_keys={"e": OTHER})  # type: ignore[arg-type]
    assert (why_refused(config, address, key) is None) is expected


@pytest.mark.parametrize(
    ("endpoint", "settings", "expected"),
    [
        ("tcp://127.0.0.1:5700", {}, True),
        ("tcp://localhost:5700", {}, True),
        ("tcp://[::1]:5700", {}, True),
        ("tcp://10.1.2.3:5700", {}, False),  # private, but nobody said so
        ("tcp://10.1.2.3:5700", {"host": "10.1.2.3"}, True),
        ("tcp://10.1.2.3:5700", {"allowed_peers": ("10.0.0.0/8",)}, True),
        ("tcp://127.0.0.1:5700", {"allowed_peers": ("10.0.0.0/8",)}, False),
        ("tcp://8.8.8.8:5700", {}, False),
        ("tcp://somewhere.example:5700", {}, False),
        ("ipc:///tmp/x", {}, False),
        ("tcp://127.0.0.1", {}, False),
        ("", {}, False),
    ],
)
def test_connected_to(endpoint: str, settings: dict[str, Any], expected: bool) -> None:
    with nullcontext() if expected else pytest.raises(PermissionError):
        check_host(Config(**settings), endpoint)


def test_a_refusal_says_what_to_set() -> None:
    with pytest.raises(
        PermissionError, match=r"not admit tcp://10\.1\.2\.3:5700; set it on both sides"
    ):
        check_host(Config(), "tcp://10.1.2.3:5700")


# ------------------------------------------------------------------ whose KV other requests find


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[str]:
    """The endpoint of a socket that this process listens on."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        listening = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip(f"no {request.param} on this machine")
    with listening:
        host = f"[{request.param}]" if ":" in request.param else request.param
        yield f"tcp://{host}:{listening.getsockname()[1]}"


def test_who_listens(listener: str) -> None:
    host, _, port = listener.rpartition(":")
    users = Listeners().users
    assert users(listener) == {os.geteuid()}
    assert users(f"{host}:{free_port()}") == set()
    assert users(f"tcp://10.1.2.3:{port}") == set()
    assert users(f"tcp://prefill:{port}") == {-1}
    assert users("") == {-1}
    if "127" in host:
        assert users(f"tcp://localhost:{port}") == {os.geteuid()}
        assert users(f"tcp://127.0.0.2:{port}") == set()


def test_a_client_does_not_listen() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
    ):
        assert Listeners().users(f"tcp://127.0.0.1:{client.getsockname()[1]}") == set()


def test_any_number_of_listeners_is_looked_through() -> None:
    """More than the kernel tells at once."""
    with ExitStack() as stack:
        many = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(100)]
        for one in many:
            stack.enter_context(socket.create_connection(one.getsockname()))
        users = Listeners().users
        for one in many:
            assert users(f"tcp://127.0.0.1:{one.getsockname()[1]}") == {os.geteuid()}


LISTEN = """
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
time.sleep(600)
"""


@needs_root
def test_another_users_listener_is_seen_as_such() -> None:
    with process_of_another_user(LISTEN) as child:
        assert child.stdout is not None
        endpoint = f"tcp://127.0.0.1:{int(child.stdout.readline())}"
        assert Listeners().users(endpoint) == {65534}
        for are_up in (False, True):
            with pytest.raises(PermissionError, match="expected a process of this user"):
                check_owners(Config(), [endpoint], are_up=are_up)


ROW = "{} 0100007F:1644 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {} 0 1 1 0\n"
"""A listener at 127.0.0.1:5700, and its user."""


@pytest.mark.parametrize("others", [(), (65534,)], ids=["alone", "two"])
def test_two_users_at_one_endpoint_are_one_too_many(
    others: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    users = enumerate((os.geteuid(), *others))
    rows = "".join(ROW.format(f"{number}:", user) for number, user in users)
    (tmp_path / "tcp").write_text(f"sl local_address rem_address st a b c uid\n{rows}")
    put(monkeypatch, "/proc/net/tcp", tmp_path / "tcp")
    may = pytest.raises(PermissionError) if others else nullcontext()
    with may:
        check_owners(Config(), ["tcp://127.0.0.1:5700"], are_up=True)


def test_nobody_need_listen_yet_before_a_source_is_connected_to() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    check_owners(Config(), [endpoint], are_up=False)
    with pytest.raises(PermissionError, match="got another's or none"):
        check_owners(Config(), [endpoint], are_up=True)


@pytest.mark.parametrize(
    "settings", [{"allowed_peers": ("127.0.0.0/8",)}, {"params_key": "k" * 16}, CURVE]
)
def test_somebody_answers_for_a_source_of_another_user(
    settings: dict[str, Any], listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    if "::1" in listener and "allowed_peers" in settings:
        settings = {"allowed_peers": ("::1",)}
    for are_up in (False, True):
        check_owners(Config(**settings), [listener], are_up=are_up)
        with pytest.raises(PermissionError, match="name the host in allowed_peers"):
            check_owners(Config(), [listener], are_up=are_up)


def test_keys_by_engine() -> None:
    other = zmq.curve_keypair()[0].decode()
    assert server_key_of(Config(), "e") is None
    assert server_key_of(Config(**CURVE), "e") == PUBLIC  # type: ignore[arg-type]
    pinned = Config(**CURVE, curve_server_keys={"e": other})  # type: ignore[arg-type]
    assert server_key_of(pinned, "e") == other
    with pytest.raises(PermissionError, match="expected a key of engine f"):
        server_key_of(pinned, "f")
