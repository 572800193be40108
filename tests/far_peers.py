"""Peers of this host that come as those of another one do, and how many may."""

from __future__ import annotations

import ipaddress
import resource
import socket
from collections.abc import Callable

import pytest


def use_tcp(patch: pytest.MonkeyPatch) -> None:
    """Nobody finds a Unix socket, as where there are none that name their user."""
    patch.delattr(socket, "SO_PEERCRED", raising=False)  # of two at a time


def limit_descriptors(patch: pytest.MonkeyPatch, number: int) -> None:
    """What this process may have open: an eighth of it are connections of a listener."""
    patch.setattr(resource, "getrlimit", lambda _: (number, number))


def count_as_far(patch: pytest.MonkeyPatch, is_far: Callable[[str], bool]) -> None:
    """These addresses of this host are not its own."""
    own = ipaddress.IPv4Network("127.0.0.0/8")
    is_near = property(lambda address: address in own and not is_far(str(address)))
    patch.setattr(ipaddress.IPv4Address, "is_loopback", is_near)
