"""Whom the kernel keeps from a listener, and that nobody else notices."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.transports import syn_filter
from kvxfer.transports.syn_filter import MOST_SHUT, SynFilter, program_of
from tests import zmtp
from tests.helpers import needs_socket_filters

SOON_S = 0.3
"""The kernel would try again after 1 s."""
BAD, GOOD = "127.0.9.1", "127.0.9.2"

# ------------------------------------------------------------------ the program


def run(program: bytes, sender: str) -> int:
    """The oracle: what a machine of classic BPF returns for a packet of this sender."""
    source = ipaddress.ip_address(sender)
    header = bytearray(b"\xa5" * 40)
    header[0] = (source.version << 4) | 5
    at = 12 if source.version == 4 else 8
    header[at : at + len(source.packed)] = source.packed
    code = list(struct.iter_unpack("=HBBI", program))
    here, accumulator, number = 0, 0, 0
    while True:
        what, if_so, if_not, number = code[here]
        here += 1
        match what:
            case 0x20 | 0x30:  # load a word, a byte
                begin, size = number - 0xFFF00000, 4 if what == 0x20 else 1
                accumulator = int.from_bytes(header[begin : begin + size], "big")
            case 0x74:
                accumulator >>= number
            case 0x15:
                here += if_so if accumulator == number else if_not
            case 0x05:
                here += number
            case 0x06:
                return int(number)
            case _:
                raise AssertionError(f"instruction {what:#x}")


ADDRESSES = st.one_of(
    st.ip_addresses(v=4),
    st.ip_addresses(v=6),
    st.integers(0, 3).map(lambda n: ipaddress.ip_address(f"10.0.0.{n}")),
    st.integers(0, 3).map(lambda n: ipaddress.ip_address(f"fd00::{n}:0:0:7")),
).map(str)


@example(shut=["fd00::1:0:0:7", "fd00::2:0:0:7", "10.0.0.1"], sender="fd00::2:0:0:7")
@example(shut=["10.0.0.1", "fd00::1:0:0:7", "10.0.0.2"], sender="10.0.0.2")
@example(shut=["fd00::1:0:0:7"], sender="fd00::1:0:0:8")
@given(shut=st.lists(ADDRESSES, min_size=1, max_size=MOST_SHUT), sender=ADDRESSES)
def test_the_program_drops_those_and_takes_all_else(shut: list[str], sender: str) -> None:
    program = program_of(shut)
    assert program is not None
    same = {str(getattr(ipaddress.ip_address(each), "ipv4_mapped", None) or each) for each in shut}
    assert run(program, sender) == (0 if sender in same else 0xFFFFFFFF)
    assert all(run(program, each) == 0 for each in same)
    assert len(program) <= 8 * 600


def test_of_what_is_no_address_there_is_no_program() -> None:
    assert program_of([]) is None
    assert program_of(["", "localhost:1000:1000:7"]) is None


# ------------------------------------------------------------------ the kernel


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """For both versions of IP, where the host has both."""
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
        server.close()
        server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:
        server = socket.create_server(("127.0.0.1", 0))
    with server:
        yield server


def stands(listener: socket.socket, sender: str) -> bool:
    target = "::1" if ":" in sender else "127.0.0.1"
    with suppress(TimeoutError):
        address = (target, listener.getsockname()[1])
        socket.create_connection(address, SOON_S, (sender, 0)).close()
        return True
    return False


@needs_socket_filters
def test_the_kernel_keeps_them_out_until_they_are_let_in(listener: socket.socket) -> None:
    own = SynFilter()
    own.watch(listener.fileno())
    for shut in ([BAD], ["::1"], [BAD, "::1"], [f"::ffff:{BAD}"], []):
        assert own.keep_out(shut) == bool(shut)
        assert stands(listener, BAD) == (not any(BAD in each for each in shut))
        if listener.family == socket.AF_INET6:
            assert stands(listener, "::1") == ("::1" not in shut)
        assert stands(listener, GOOD)


@needs_socket_filters
def test_what_stands_goes_on(listener: socket.socket) -> None:
    """Of who is kept out now, and of who has come meanwhile."""
    own = SynFilter()
    own.watch(listener.fileno())
    endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    pairs = []
    for shut, sender in (([], BAD), ([BAD], GOOD), ([GOOD], BAD), ([GOOD, BAD], "127.0.9.3")):
        own.keep_out(shut)
        peer = zmtp.open_tcp(endpoint, address=sender)
        pairs.append((peer, listener.accept()[0]))
    for peer, accepted in pairs:
        with closing(peer), closing(accepted):
            peer.sendall(b"question")
            assert zmtp.read(accepted, 8) == b"question"
            accepted.sendall(b"answer")
            assert zmtp.read(peer, 6) == b"answer"


@needs_socket_filters
def test_a_listener_that_comes_later_keeps_them_out_too(listener: socket.socket) -> None:
    own = SynFilter()
    with socket.create_server(("127.0.0.1", 0)) as first:
        own.watch(first.fileno())
        assert own.keep_out([BAD])
        own.watch(listener.fileno())
        assert not stands(listener, BAD)
        own.forget(first.fileno())
    assert own.keep_out([GOOD])
    assert not stands(listener, GOOD)
    assert stands(listener, BAD)


def test_only_sockets_that_listen_for_tcp_are_touched(listener: socket.socket) -> None:
    """A descriptor that was forgotten may be any other file by now."""
    own = SynFilter()
    own.watch(listener.fileno())
    own.forget(listener.fileno())
    with (
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket() as silent,
        open("/dev/null", "rb") as file,
    ):
        unix.bind("\0kvxfer-test-syn-filter")
        unix.listen()
        for other in (unix, silent, file):
            own.watch(other.fileno())
        own.watch(1 << 20)
        assert not own.keep_out([BAD])
    assert stands(listener, BAD)


def test_where_the_kernel_has_no_filters_nobody_is_kept_out(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syn_filter, "_ATTACH", 9999)
    own = SynFilter()
    own.watch(listener.fileno())
    assert not own.keep_out([BAD])
    assert stands(listener, BAD)
