"""What stays of a storm is told from what others make at the same time."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from pathlib import Path

from tests.chaos.names import SHARED_MEMORY, Names

NOBODY = 1 << 30
"""No process has this number."""


def test_a_file_with_the_number_of_a_process_is_its_own() -> None:
    names, mark = Names(), secrets.token_hex(4)
    own, other = (SHARED_MEMORY / f"kvxfer-{mark}x-{pid}" for pid in (NOBODY, NOBODY + 1))
    own.touch()
    other.touch()
    try:
        assert names.left({NOBODY}) == [str(own)]
        assert not own.exists()
        assert other.exists()
    finally:
        other.unlink()


def test_what_was_there_before_does_not_count() -> None:
    with tempfile.NamedTemporaryFile(prefix=f"kvxfer-{NOBODY}-", dir=SHARED_MEMORY):
        assert Names().left({NOBODY}) == []


def test_what_a_process_holds_or_has_made_is_its_own() -> None:
    """Its name says nothing: a socket, a file, a folder."""
    names, address = Names(), f"kvxfer-{secrets.token_hex(8)}x-0"
    with (
        socket.socket(socket.AF_UNIX) as sock,
        tempfile.NamedTemporaryFile(prefix="kvxfer-", dir=SHARED_MEMORY, delete=False) as file,
        tempfile.TemporaryDirectory(prefix="kvxfer-") as folder,
    ):
        sock.bind(f"\0{address}")
        names.look_at(os.getpid())
        names.made(folder)
        assert names.left(set()) == sorted([f"@{address}", file.name, folder])
    assert not Path(file.name).exists()
    assert names.left(set()) == []


def test_another_socket_by_a_port_that_was_given_back_is_somebody_elses() -> None:
    """Also where the port has the number of a process."""
    names, address = Names(), f"\0kvxfer-{secrets.token_hex(8)}-127.0.0.1:{NOBODY}"
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(address)
        names.look_at(os.getpid())
        assert names.left({NOBODY}) == [f"@{address[1:]}"]
    assert names.left({NOBODY}) == []
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(address)
        assert names.left({NOBODY}) == []
