"""Which peers UCX and NIXL may read bytes from, and which network devices their UCX uses.

Both parse the bytes of a peer in C code, which ends the process if they are malformed. UCX 1.21
asserts that it knows the version of a worker's address; and half of the processes whose TCP port of
UCX got twelve made-up messages ended by SIGABRT or SIGSEGV. A message to that port may also say
where in the process's memory its bytes go. It has no authentication, whatever keys the other ports
require. So there is one rule:

- UCX stays on the loopback device, and addresses are taken from processes of this user on this host
  only: those on the Unix socket beside the stream's TCP port, where the kernel names the user.
- With ``trust_network`` UCX is on the device of ``host`` and on RDMA devices, and addresses are
  taken from every peer that is served.

A variable ``UCX_NET_DEVICES`` takes precedence over the choice of devices. Other users of this host
reach a port on the loopback device.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import zmq

from kvxfer.config import Config, variables_of
from kvxfer.errors import TransportUnavailable
from kvxfer.transports.guard import user_of
from kvxfer.transports.pipe import Pipe, PipeBroken
from kvxfer.transports.syn_filter import lent

RDMA_DEVICES = Path("/sys/class/infiniband")
LOOPBACK = ("lo",)

_SIOCGIFCONF = 0x8912  # netdevice(7): the IPv4 addresses of all devices
_IFREQ_NBYTES, _IFREQ_ADDRESS = 40, 20  # "struct ifreq": a name of 16 bytes, then a sockaddr_in
_MOST_ADDRESSES = 1024
_MOST_DEVICES = 64  # in a list; UCX asserts that there are no more

A = TypeVar("A")


# ------------------------------------------------------------------ who


def needs_own_user(pipe: Pipe, config: Config) -> bool:
    """Whether only processes of this user on this host may use the pipe."""
    return pipe.reads_peers and not config.trust_network


def is_own_user(frame: zmq.Frame | None) -> bool:
    """Whether a process of this user on this host has sent the message, by what the kernel says."""
    try:
        address = "" if frame is None else str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return False
    return user_of(address) == os.geteuid()


def refusal(name: str) -> str:
    return (
        f"{name}: expected a process of the same user on this host, because the library takes "
        "what peers send unchecked; where only trusted hosts reach the network, set trust_network "
        "on both sides, else use zmq"
    )


def check_own_devices(name: str, config: Config, endpoint: str) -> None:
    """Raises TransportUnavailable where UCX stays on this engine's loopback device and the source
    at ``tcp://address:port`` is elsewhere.
    """
    if net_devices(config) != LOOPBACK:
        return
    address = urlsplit(endpoint).hostname or ""
    try:
        if ip_address(address).is_loopback:
            return
    except ValueError:
        return
    raise TransportUnavailable(
        f"{name}: expected host of this engine to be an address that {address} can reach, got "
        f"{config.host}; set host on both sides"
    )


def check_way(name: str, fd: int) -> None:
    """Raises PipeBroken unless the kernel knows a way to the other side of this connection, which
    may be the descriptor of a Unix socket. Nothing is sent.

    Look at once before UCX connects. Where its "connect" is refused at once, for want of a route,
    and the other side had begun a connection that has ended, UCX 1.21 uses what it has freed: 35 of
    260 processes ended by SIGSEGV (``scripts/results/ucx_deaths_cpu_2026-11-24.md``).
    """
    try:
        family, address = _other_side(fd)
        if family == socket.AF_UNIX:
            return
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect(address)
    except OSError as exc:
        raise PipeBroken(f"{name}: expected a way to the other side, got {exc.strerror}") from exc


def _other_side(fd: int) -> tuple[int, Any]:
    """Family and address. Raises OSError, also for what is no connection by now."""
    copy = os.dup(fd)  # stays what it is, whoever gets the number meanwhile
    try:
        with lent(socket.socket(fileno=copy)) as known:
            return known.family, known.getpeername()
    finally:
        os.close(copy)


def parse_address(name: str, address: bytes, kind: type[A]) -> A:
    """Parse the address of the other end of a connection. Raises PipeBroken."""
    try:
        return msgspec.msgpack.decode(address, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise PipeBroken(f"{name}: expected the address of another end, got {exc}") from exc


# ------------------------------------------------------------------ where


def net_devices(config: Config) -> tuple[str, ...]:
    """The network devices that UCX may use, by UCX's names. ("all",): every device; (): those of
    its variable.

    Raises TransportUnavailable if ``host`` is no address of this machine.
    """
    if "UCX_NET_DEVICES" in variables_of("UCX_"):
        return ()
    if not config.trust_network:
        return LOOPBACK
    host = config.host.strip("[]")
    devices = {name for _, name in socket.if_nameindex()}
    if host in devices:  # ZeroMQ takes a device for its address
        return (host, *_rdma_ports())
    try:
        found = socket.getaddrinfo(None if host == "*" else host, 0, flags=socket.AI_PASSIVE)
        addresses = {ip_address(str(each[4][0]).partition("%")[0]) for each in found}
    except (OSError, ValueError) as exc:
        raise TransportUnavailable(f"host: expected an address, got {host!r}: {exc}") from exc
    if any(address.is_unspecified for address in addresses):
        return ("all",)
    if all(address.is_loopback for address in addresses):
        return LOOPBACK
    for device, text in _addresses():
        if ip_address(text) in addresses:
            return (device, *_rdma_ports())
    raise TransportUnavailable(
        f"host: expected an address of this machine, got {host!r}; set host, or UCX_NET_DEVICES"
    )


def _rdma_ports() -> list[str]:
    ports = sorted(f"{path.parts[-3]}:{path.name}" for path in RDMA_DEVICES.glob("*/ports/*"))
    return ports[: _MOST_DEVICES - 1]


def _addresses() -> Iterator[tuple[str, str]]:
    space = array.array("B", bytes(_MOST_ADDRESSES * _IFREQ_NBYTES))
    begin, nbytes = space.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iP", nbytes, begin))
    filled = space.tobytes()[: struct.unpack("iP", answer)[0]]
    for at in range(0, len(filled), _IFREQ_NBYTES):
        label = filled[at : at + 16].partition(b"\0")[0].decode()
        address = filled[at + _IFREQ_ADDRESS : at + _IFREQ_ADDRESS + 4]
        yield label.partition(":")[0], socket.inet_ntoa(address)  # "eth0:1": another of eth0
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:  # no IPv6 here
        return
    for digits, *_, device in map(str.split, lines):
        yield device, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
