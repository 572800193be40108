"""Two network namespaces joined by a slow link, for measuring what a wire makes of a network.

A process of its own makes both namespaces and an Ethernet device (tap) in each, and relays what one
of them sends to the other: as fast as the link is, and as late. Frames of up to 64 KiB pass with
the work of cutting them up left undone (virtio headers, as between virtual machines), so that
Python keeps up: a link of 1 Gbit/s takes 2000 of them a second. The queue before the link is
bounded, as a switch's is; what does not fit is dropped and counted.

Nothing of it has a name outside: namespaces and devices go with the processes that hold them, and
these end with the one that began, also when that is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import select
import signal
import statistics
import struct
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

from kvxfer.bench.core import ContenderLost
from kvxfer.bench.frame import option
from kvxfer.bench.sockets import Address, connect, listen
from kvxfer.bench.workers import FORK_SERVER, Worker, close_all

ADDRESSES = ("10.99.0.1", "10.99.0.2")
"""Of the source's namespace and of the sink's."""
DEVICE = "link0"
_MTU_NBYTES = 1500
_FRAME_OVERHEAD_NBYTES = 24
"""Preamble, checksum and gap around each Ethernet frame."""
_NUM_TRIPS = 50
_KEPT_FRAMES = 1 << 16
QUEUE_S = 0.01
"""How much may wait before the link; a switch has about as much for each port."""
START_S = 60.0
END_S = 5.0

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CAN_CHECKSUM, _CAN_CUT_TCP4, _CAN_CUT_TCP6 = 1, 2, 4
_VIRTIO = struct.Struct("<BBHHHH")  # flags, kind, header, segment, checksum from, checksum at
_READ_NBYTES = 1 << 17
_libc = ctypes.CDLL(None, use_errno=True)


class LinkUnavailable(RuntimeError):
    """This machine cannot have such a link; the message says why."""


@dataclass(frozen=True, slots=True)
class Speed:
    """``delay_s``: one way."""

    bits_per_s: float
    delay_s: float

    @property
    def words(self) -> str:
        return f"{self.bits_per_s / 1e9:g} Gbit/s, {self.delay_s * 1e3:g} ms each way"


LINK_OPTIONS = (
    option("--gbit", 1.0, type=float, help="of the link, a second (default 1)"),
    option("--delay-ms", 1.0, type=float, help="one way (default 1)"),
)


def speed_of(options: argparse.Namespace) -> Speed:
    """As LINK_OPTIONS say it."""
    return Speed(options.gbit * 1e9, options.delay_ms / 1e3)


@dataclass(frozen=True, slots=True)
class _Relayed:
    """Frames that the link has carried and dropped, both ways; a frame may be 64 KiB long.
    ``latest_s``: how late the latest one was handed over, at most. ``frames``: when the first byte
    of each one of the source's was on the link, and its bytes; since the last time, as many as are
    kept.
    """

    num_carried: int
    num_dropped: int
    latest_s: float
    frames: tuple[tuple[float, int], ...]

    @property
    def words(self) -> str:
        late_ms = self.latest_s * 1e3
        return (
            f"{self.num_carried} carried, {self.num_dropped} dropped, the latest {late_ms:.1f} ms "
            "late"
        )


@contextlib.contextmanager
def slow_link(speed: Speed, who: str) -> Iterator[SlowLink]:
    """For a command: raises SystemExit where there can be no link, or where it or who needs it is
    lost. ``who``: of what is said then.
    """
    try:
        link = SlowLink(speed)
    except LinkUnavailable as exc:
        raise SystemExit(f"{who}: {exc}") from None
    try:
        yield link
    except ContenderLost as exc:
        raise SystemExit(f"{who}: {exc}") from None
    finally:
        link.close()


class SlowLink:
    """The link; ``close`` ends it. Raises LinkUnavailable."""

    def __init__(self, speed: Speed) -> None:
        if os.geteuid() != 0:
            raise LinkUnavailable(
                "link: expected root, which network namespaces need, got user "
                f"{os.geteuid()}; run it with sudo"
            )
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_relay, args=(theirs, speed), daemon=True)
        self._process.start()
        theirs.close()
        try:
            answer: tuple[int, ...] | str = self._pipe.recv() if self._pipe.poll(START_S) else ""
        except EOFError:
            answer = "the relay ended"
        if isinstance(answer, str):
            self.close()
            raise LinkUnavailable(f"link: expected two namespaces, got {answer or 'no answer'}")
        self._namespaces = tuple(f"/proc/{self._process.pid}/fd/{fd}" for fd in answer)

    def inside(self, side: int, make: Callable[..., object]) -> Callable[..., object]:
        """``make``, called in that side's namespace: for a process that was just started."""
        return Inside(self._namespaces[side], make)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def relayed(self) -> _Relayed:
        self._pipe.send(None)
        found: _Relayed = self._pipe.recv()
        return found

    def close(self) -> None:
        """The namespaces go with the last process in them."""
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_S)


@dataclass(frozen=True, slots=True)
class Inside:
    """Enters a namespace, before the process has threads, and ends with its parent."""

    namespace: str
    make: Callable[..., object]

    def __call__(self, *arguments: object) -> object:
        _end_with_parent()
        with open(self.namespace, "rb") as namespace:
            _check(_libc.setns(namespace.fileno(), _CLONE_NEWNET), "setns")
        # UCX looks for devices in /sys, which shows those of the namespace that it was mounted in.
        _check(_libc.unshare(_CLONE_NEWNS), "unshare")
        _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")
        _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount /sys")
        return self.make(*arguments)


# ------------------------------------------------------------------ the relay's process


class Queue:
    """One direction: what waits before the link, and what is on the way to ``sink``."""

    def __init__(self, speed: Speed, sink: int) -> None:
        self._speed, self._sink = speed, sink
        self._free_s = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()
        self.num_carried = self.num_dropped = 0
        self.latest_s = 0.0
        self.frames: deque[tuple[float, int]] = deque(maxlen=_KEPT_FRAMES)

    def take(self, frame: bytes, now_s: float) -> None:
        """It stands in the queue now, or is dropped."""
        begin_s = max(now_s, self._free_s)
        if begin_s - now_s > QUEUE_S:
            self.num_dropped += 1
            return
        self._free_s = begin_s + wire_nbytes(frame) * 8 / self._speed.bits_per_s
        self._under_way.append((self._free_s + self._speed.delay_s, frame))
        self.frames.append((begin_s, len(frame)))

    def deliver(self, now_s: float) -> None:
        """Whatever has come to the end."""
        while self._under_way and self._under_way[0][0] <= now_s:
            due_s, frame = self._under_way.popleft()
            self.latest_s = max(self.latest_s, now_s - due_s)
            try:
                os.write(self._sink, frame)
                self.num_carried += 1
            except OSError:  # the device is full, or down
                self.num_dropped += 1

    @property
    def due_s(self) -> float | None:
        """When the next one comes to the end."""
        if not self._under_way:
            return None
        due_s, _ = self._under_way[0]
        return due_s


def wire_nbytes(frame: bytes) -> int:
    """What a frame takes of the link, cut up as a network card would: headers again for each
    segment.
    """
    header: tuple[int, ...] = _VIRTIO.unpack_from(frame)
    _, kind, header_nbytes, segment_nbytes, _, _ = header
    nbytes = len(frame) - _VIRTIO.size
    num_frames = 1
    if kind and segment_nbytes:
        num_frames = max(1, -(-(nbytes - header_nbytes) // segment_nbytes))
    return nbytes + (num_frames - 1) * header_nbytes + num_frames * _FRAME_OVERHEAD_NBYTES


def _relay(pipe: Connection, speed: Speed) -> None:
    _end_with_parent()
    try:
        made = [_namespace(address) for address in ADDRESSES]
    except (OSError, subprocess.CalledProcessError) as exc:
        pipe.send(f"{exc}")
        return
    # It sleeps most of the time, and is no link if it has to wait for those that it serves. Where
    # no process may go first, ``latest_s`` says how late frames were.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    (first_ns, first), (second_ns, second) = made
    pipe.send((first_ns, second_ns))
    ways = {first: Queue(speed, second), second: Queue(speed, first)}
    while True:
        due_s = min((way.due_s for way in ways.values() if way.due_s is not None), default=None)
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        ready, _, _ = select.select((first, second, pipe.fileno()), (), (), timeout_s)
        for tap, way in ways.items():
            if tap in ready:
                way.take(os.read(tap, _READ_NBYTES), time.monotonic())
        for way in ways.values():
            way.deliver(time.monotonic())
        if pipe.fileno() in ready:
            try:
                pipe.recv()
            except EOFError:
                return
            pipe.send(
                _Relayed(
                    sum(way.num_carried for way in ways.values()),
                    sum(way.num_dropped for way in ways.values()),
                    max(way.latest_s for way in ways.values()),
                    tuple(ways[first].frames),
                )
            )
            ways[first].frames.clear()


def _namespace(address: str) -> tuple[int, int]:
    """A new one with a device of that address: descriptors of both. This process is in it then."""
    _check(_libc.unshare(_CLONE_NEWNET), "unshare")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _CAN_CHECKSUM | _CAN_CUT_TCP4 | _CAN_CUT_TCP6)
    for command in (
        "link set lo up",
        f"link set {DEVICE} mtu {_MTU_NBYTES} up",
        f"addr add {address}/24 dev {DEVICE}",
    ):
        subprocess.run(
            ["ip", *command.split()], check=True, capture_output=True, text=True, timeout=START_S
        )
    return namespace, tap


def _end_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


# ------------------------------------------------------------------ how long a round trip takes


class Listener:
    """Takes connections, which is the kernel's work."""

    def __init__(self, host: str) -> None:
        self._listener = listen(host)

    def address(self) -> Address:
        host, port = self._listener.getsockname()
        return host, port

    def close(self) -> None:
        self._listener.close()


class RoundTrips:
    def measure(self, address: Address) -> list[float]:
        """Seconds of connecting: there, and back."""
        taken_s = []
        for _ in range(_NUM_TRIPS):
            started_s = time.perf_counter()
            with connect(address):
                taken_s.append(time.perf_counter() - started_s)
        return taken_s


def round_trip_ms(link: SlowLink) -> float:
    """The median."""
    source = Worker("listener", link.inside(0, Listener), ADDRESSES[0], method=FORK_SERVER)
    sink = Worker("round trips", link.inside(1, RoundTrips), method=FORK_SERVER)
    try:
        taken_s: list[float] = sink.call(list, "measure", source.call(tuple, "address"))
    finally:
        close_all((sink, source))
    return statistics.median(taken_s) * 1e3
