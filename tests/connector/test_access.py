"""Who is served and who is connected to."""

from __future__ import annotations

import os

import pytest
import zmq

from kvxfer.config import Config
from kvxfer.connector.access import may_connect, server_key_of
from kvxfer.transports.zmq_listeners import why_refused

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
)
def test_with_keys_addresses_do_not_matter(address: str, key: str | None, expected: bool) -> None:
    config = Config(**CURVE, curve_server_keys={"e": OTHER})  # type: ignore[arg-type]
    assert (why_refused(config, address, key) is None) is expected


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://127.0.0.1:5700", True),
        ("tcp://10.1.2.3:5700", True),
        ("tcp://8.8.8.8:5700", False),
        ("tcp://somewhere.example:5700", False),
        ("ipc:///tmp/x", False),
        ("tcp://127.0.0.1", False),
        ("", False),
    ],
)
def test_connected_to(endpoint: str, expected: bool) -> None:
    assert may_connect(Config(), endpoint) is expected


def test_keys_by_engine() -> None:
    other = zmq.curve_keypair()[0].decode()
    assert server_key_of(Config(), "e") is None
    assert server_key_of(Config(**CURVE), "e") == PUBLIC  # type: ignore[arg-type]
    pinned = Config(**CURVE, curve_server_keys={"e": other})  # type: ignore[arg-type]
    assert server_key_of(pinned, "e") == other
    with pytest.raises(KeyError):
        server_key_of(pinned, "f")
