"""Who is served and who is connected to."""

from __future__ import annotations

import pytest
import zmq

from kvxfer.config import Config
from kvxfer.connector.access import may_connect, server_key_of
from kvxfer.transports.stream_connections import may_be_served

PUBLIC, SECRET = (key.decode() for key in zmq.curve_keypair())
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
        ("8.8.8.8", CURVE, True),  # the keys decide
    ],
)
def test_served(address: str, settings: dict[str, object], expected: bool) -> None:
    assert may_be_served(Config(**settings), address) is expected  # type: ignore[arg-type]


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
