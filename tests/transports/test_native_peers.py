"""Who gets bytes to UCX and NIXL, what does not end a process, and where sockets listen."""

from __future__ import annotations

import errno
import gc
import os
import random
import select
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.testing.peers import Context
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transports.base import PeerGone, ReadDone
from kvxfer.transports.channel import bind_unix
from kvxfer.transports.guard import nearest_endpoint, unix_endpoint
from kvxfer.transports.native_peers import check_own_devices, check_way, net_devices
from kvxfer.transports.nixl_agent import Area
from kvxfer.transports.nixl_pipe import Address
from kvxfer.transports.pipe import Pipe, PipeBroken, trial_slots
from kvxfer.transports.stream_wire import (
    STREAM_VERSION,
    AskTrial,
    Attach,
    Attached,
    Refused,
    decode_to_sink,
    encode,
)
from tests.chaos.network import enter_network
from tests.far_peers import use_tcp
from tests.helpers import needs_nixl, needs_ucxx, run_pair
from tests.machine import RDMA, put
from tests.transports.pair import CONFIG, Pair, a_move, key_of
from tests.transports.pipe_contract import Held
from tests.two_hosts import Network, two_networks_or_skip

WIRES = [pytest.param("ucx", marks=needs_ucxx), pytest.param("nixl", marks=needs_nixl)]
CPU = torch.device("cpu")
SLOTS = trial_slots("cpu")
WAIT_MS = 30_000
NOT_ALLOWED = "expected a process of the same user on this host"
pack = msgspec.msgpack.encode


def config_of(wire: str, **settings: object) -> Config:
    changed = msgspec.structs.replace(CONFIG, transport=wire, **settings)
    return msgspec.structs.replace(changed, connect_timeout_s=30.0, peer_silent_s=30.0)


# ------------------------------------------------------------------ addresses of every form


@contextmanager
def good_address(wire: str) -> Iterator[bytes]:
    """Of a sink's end that is there."""
    pipe = _pipe(wire)
    with closing(pipe):
        yield pipe.open_sink(SLOTS).address


def _pipe(wire: str) -> Pipe:  # the libraries need not be there
    if wire == "ucx":
        from kvxfer.transports.ucx_pipe import UcxPipe

        return UcxPipe(CPU, Config(), lambda: None)
    from kvxfer.transports.nixl_pipe import NixlPipe

    return NixlPipe(CPU, Config())


def unreadable(wire: str, good: bytes) -> list[bytes]:
    """Addresses that are none, from whomever they come."""
    shortened = [good[: len(good) * eighth // 8] for eighth in range(8)]
    chaos = random.Random(5)
    return [
        *shortened,
        b"\xff",
        b"\x91" * 5000,  # deeper than a parser may go
        *(chaos.randbytes(size) for size in (1, 60, 500, 16 << 10)),
        *(_of_ucx(good) if wire == "ucx" else _of_nixl(good)),
    ]


def _of_ucx(good: bytes) -> list[bytes]:
    *connection, worker = msgspec.msgpack.decode(good)  # a source's end does not name it
    versions = [bytes([worker[0] & 0xF0 | version]) + worker[1:] for version in range(2, 16)]
    workers = [b"", worker[:1], worker[:20], *versions]
    return [
        *(pack([*connection, each]) for each in workers),
        pack([-1, worker]),
        pack([1 << 63, worker]),
        b"\x92\x01\xa4\xff\xfe\xfd\xfc",  # a text that is no UTF-8 instead of the worker
    ]


def _of_nixl(good: bytes) -> list[bytes]:
    address = msgspec.msgpack.decode(good, type=Address)
    area = address.area
    beyond = Area(2**64 - SLOTS.slot_nbytes, area.nbytes, 0, "DRAM")
    texts = pack(["x"]) + good[1:]
    return [
        texts,
        good.replace(b"\xa5WRITE", b"\xa5\xff\xfeITE"),  # no UTF-8
        good.replace(b"\xa4DRAM", b"\xa4\xff\xfe\xfd\xfc"),
        *(
            pack([address.connection, "WRITE", address.metadata, each, SLOTS.slot_nbytes])
            for each in (
                [-1, area.nbytes, 0, "DRAM"],
                [area.address, -area.nbytes, 0, "DRAM"],
                [area.address, area.nbytes, -1, "DRAM"],
            )
        ),
        pack(msgspec.structs.replace(address, area=beyond)),
        pack(msgspec.structs.replace(address, connection=b"")),
        # Last: NIXL keeps the name of an agent whose metadata it could not read
        *(pack(msgspec.structs.replace(address, metadata=each)) for each in _metadata(address)),
    ]


def _metadata(address: Address) -> list[bytes]:
    """What NIXL itself finds to be none, and an agent whose name is no text."""
    known = address.metadata
    name = known.index(b"kvxfer-")
    nameless = known[:name] + b"\xff\xfe" + known[name + 2 :]
    return [b"", known[:9], known[:-9], nameless]


def deadly(wire: str, good: bytes) -> list[bytes]:
    """What would end the process if its library read it, and what might."""
    flipped = []
    for at in range(0, len(good), max(1, len(good) // 24)):
        changed = bytearray(good)
        changed[at] ^= 1 << at % 8
        flipped.append(bytes(changed))
    return [*flipped, *unreadable(wire, good), good]


# ------------------------------------------------------------------ a source and hostile sinks


def _serve(channel: Connection, wire: str) -> None:
    """A source, until its peer has had enough of it."""
    pair = Pair(config_of(wire))
    channel.send(pair.manifest)
    while not channel.poll():
        pair.turn()
        time.sleep(0.001)
    channel.send(dict(pair.source.counts))
    pair.close()


def _answer_to(endpoint: str, context: Context, wire: str, address: bytes) -> str:
    """What the source refuses a sink with."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send(encode(Attach(STREAM_VERSION, 2, SLOTS.slot_nbytes, wire, address, True)))
        dealer.send(encode(AskTrial(64 << 10)))
        frame = b""
        while not frame:  # that is how a source asks whether its sink is there
            assert dealer.poll(WAIT_MS), f"no answer to {address[:40]!r}"
            frame = dealer.recv()
        answer = decode_to_sink(memoryview(frame))
    assert isinstance(answer, Refused), answer
    return answer.detail


def _hostile_sinks(channel: Connection, wire: str) -> None:
    manifest: RankManifest = channel.recv()
    tcp = manifest.data_endpoints[wire]
    context: Context = zmq.Context()
    with good_address(wire) as good:
        for address in deadly(wire, good):
            assert NOT_ALLOWED in _answer_to(tcp, context, wire, address)
        for address in unreadable(wire, good):
            detail = _answer_to(unix_endpoint(tcp), context, wire, address)
            assert detail.startswith(f"{wire}: expected"), detail
    context.term()
    # Those who mean well are served as before
    pair = Pair(config_of(wire))
    assert pair.sink.trial(manifest, 60.0).costs.bytes_per_s > 0
    pair.close()
    channel.send("enough")
    counts = channel.recv()
    assert counts["not_trusted"] > 30
    assert counts["pipe_failed"] > 15


@pytest.mark.parametrize("wire", WIRES)
def test_no_sink_ends_a_source_by_its_address(wire: str) -> None:
    run_pair(partial(_serve, wire=wire), partial(_hostile_sinks, wire=wire), timeout_s=120.0)


# ------------------------------------------------------------------ a sink and a hostile source


def _hostile_source(channel: Connection, wire: str) -> None:
    """Answers each attach with the next address."""
    context: Context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.bind("tcp://127.0.0.1:*")
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
    with good_address(wire) as sinks, closing(_pipe(wire)) as pipe:
        good = pipe.open_source(sinks, SLOTS).address
        for addresses in (deadly(wire, good), unreadable(wire, good)):
            channel.send((endpoint, len(addresses)))
            for address in addresses:
                assert router.poll(WAIT_MS), "nobody attaches"
                identity, _ = router.recv_multipart()
                router.send_multipart([identity, encode(Attached(address))])
            if channel.recv() == "next":
                assert bind_unix(router, endpoint)
    router.close()
    context.term()


def _be_there_at_first(patch: pytest.MonkeyPatch) -> None:
    """Who looks for a Unix socket finds one of this user, and who looks again does not."""
    connect, is_there = socket.socket.connect, cycle((True, False))
    own = struct.pack("3i", os.getpid(), os.geteuid(), os.getegid())

    def connect_at_first(sock: socket.socket, address: Any) -> None:
        if sock.family != socket.AF_UNIX or not next(is_there):
            connect(sock, address)

    patch.setattr(socket.socket, "connect", connect_at_first)
    patch.setattr(socket.socket, "getsockopt", lambda *_: own)


def _meet(channel: Connection, wire: str) -> None:
    pair = Pair(config_of(wire))

    def attach_all(manifest: RankManifest, num_addresses: int) -> None:
        for number in range(1, num_addresses + 1):
            pair.sink.attach(manifest)
            pair.until(lambda: any(isinstance(each, PeerGone) for each in pair.seen), 60.0)
            pair.seen.clear()
            assert pair.sink.counts["pipe_broken"] == number
        pair.sink.counts.clear()

    endpoint, num_addresses = channel.recv()
    manifest = msgspec.structs.replace(pair.manifest, data_endpoints={wire: endpoint})
    with pytest.raises(TransportUnavailable, match=NOT_ALLOWED):
        pair.sink.attach(manifest)
    with pytest.raises(TransportUnavailable, match=NOT_ALLOWED):
        pair.sink.trial(manifest, 5.0)
    # He whose socket was found has gone since, and another one has come
    with pytest.MonkeyPatch.context() as patch:
        _be_there_at_first(patch)
        attach_all(manifest, num_addresses)
    channel.send("next")
    _, num_addresses = channel.recv()
    deadline_s = time.monotonic() + 60.0
    while nearest_endpoint(endpoint) == endpoint:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    attach_all(manifest, num_addresses)
    channel.send("done")
    pair.close()


@pytest.mark.parametrize("wire", WIRES)
def test_no_source_ends_a_sink_by_its_address(wire: str) -> None:
    run_pair(partial(_hostile_source, wire=wire), partial(_meet, wire=wire), timeout_s=120.0)


# ------------------------------------------------------------------ where it listens


def own_address() -> str:
    """An address of this machine that is not loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("needs a network device beside the loopback one")
        address: str = probe.getsockname()[0]
        return address


def listening() -> set[str]:
    """The addresses at which sockets of this process wait for connections."""
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    inodes = {link.rpartition("[")[2][:-1] for link in links if "socket:[" in link}
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                digits = fields[1].partition(":")[0]
                words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
                found.add(socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)))
    return found


def _listen(channel: Connection, wire: str) -> None:
    for settings, rdma in iter(channel.recv, None):
        with pytest.MonkeyPatch.context() as patch:
            put(patch, RDMA, Path(rdma))
            channel.send(_listening_while_reading(config_of(wire, **settings)))
        gc.collect()  # objects of ucxx end with it
        assert not any(name.startswith("UCX_") for name in os.environ)


def _listening_while_reading(config: Config) -> set[str]:
    with closing(Pair(config)) as pair:
        pair.sink.attach(pair.manifest)
        pair.start(key_of(1), a_move())
        assert isinstance(pair.end(key_of(1), 60.0), ReadDone)
        return listening()


Case = tuple[dict[str, object], str, set[str]]
"""Settings, where the devices of RDMA stand, who is to listen."""


def _ask(channel: Connection, cases: list[Case]) -> None:
    for settings, rdma, expected in cases:
        channel.send((settings, rdma))
        found = channel.recv()
        assert found == expected, (settings, found)
    channel.send(None)


@pytest.mark.parametrize("wire", ["zmq", "shm", *WIRES])
def test_every_listener_stands_where_host_says(wire: str, tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    own, loopback = own_address(), "127.0.0.1"
    outside: dict[str, object] = {"host": own, "allowed_peers": (own,)}
    trusted = outside | {"trust_network": True}
    none: set[str] = set()
    streams = {own}
    is_native = wire in ("ucx", "nixl")
    cases: list[Case] = [
        ({"host": loopback}, "/nowhere", {loopback}),
        ({"host": loopback, "trust_network": True}, "/nowhere", {loopback}),
        (outside, "/nowhere", streams | ({loopback} if is_native else none)),
        (trusted, "/nowhere", streams),
        (trusted, str(tmp_path), streams),
    ]
    if wire == "shm":
        cases = [(settings, rdma, none) for settings, rdma, _ in cases]
    run_pair(partial(_listen, wire=wire), partial(_ask, cases=cases), timeout_s=120.0)


@pytest.mark.parametrize(
    ("host", "devices"),
    [
        ("127.3.4.5", ("lo",)),
        ("localhost", ("lo",)),
        ("[::1]", ("lo",)),
        ("lo", ("lo",)),
        ("0.0.0.0", ("all",)),
        ("::", ("all",)),
        ("*", ("all",)),
    ],
)
def test_devices_of_a_trusted_network(
    host: str, devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(monkeypatch, RDMA, tmp_path)
    assert net_devices(Config(host=host, trust_network=True)) == devices
    assert net_devices(Config(host=host)) == ("lo",)


def test_the_variable_of_ucx_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert net_devices(Config()) == ()


def test_no_more_devices_than_ucx_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in range(70):
        (tmp_path / f"mlx5_{number}" / "ports" / "1").mkdir(parents=True)
    put(monkeypatch, RDMA, tmp_path)
    assert len(net_devices(Config(host="lo", trust_network=True))) == 64


@pytest.mark.parametrize(
    ("host", "source", "is_refused"),
    [
        ("127.0.0.1", "tcp://10.0.0.5:5700", True),
        ("127.0.0.1", "tcp://[fd00::5]:5700", True),
        ("127.0.0.1", "tcp://127.0.0.1:5700", False),
        ("127.0.0.1", "tcp://[::1]:5700", False),
        ("*", "tcp://10.0.0.5:5700", False),
    ],
)
def test_a_loopback_host_reaches_no_other(host: str, source: str, is_refused: bool) -> None:
    config = Config(host=host, trust_network=True)
    if not is_refused:
        check_own_devices("ucx", config, source)
        return
    with pytest.raises(
        TransportUnavailable, match=r"ucx: expected host .* can reach, got 127.0.0.1; set host on"
    ):
        check_own_devices("ucx", config, source)


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_a_host_that_is_not_here_is_named(host: str) -> None:
    with pytest.raises(TransportUnavailable, match=f"host: expected an address.* got '{host}'"):
        net_devices(Config(host=host, trust_network=True))


# ------------------------------------------------------------------ a way to the other side


networks = pytest.fixture(two_networks_or_skip)


@pytest.mark.parametrize(
    ("cut", "mend"),
    [
        ("link set eth0 down", "link set eth0 up"),
        ("route add blackhole {}", "route del blackhole {}"),
        ("route add unreachable {}", "route del unreachable {}"),
    ],
)
def test_a_way_is_looked_for_without_a_word(
    networks: tuple[Network, Network], cut: str, mend: str
) -> None:
    own, other = networks
    inside = [ThreadPoolExecutor(1, "net", enter_network, (each.pid,)) for each in networks]
    with inside[0] as here, inside[1] as there:
        listener = here.submit(socket.create_server, (own.address, 0)).result()
        joining = there.submit(socket.create_connection, listener.getsockname())
        with listener, listener.accept()[0] as accepted, joining.result():

            def look() -> None:
                here.submit(check_way, "ucx", accepted.fileno()).result()

            look()
            own.ip(cut.format(other.address))
            with pytest.raises(PipeBroken, match="ucx: expected a way to the other side, got "):
                look()
            own.ip(mend.format(other.address))
            look()


def test_a_unix_socket_has_a_way_and_what_is_closed_has_none() -> None:
    one, two = socket.socketpair()
    with one, two:
        check_way("ucx", one.fileno())
        one.sendall(b"still here")
        assert two.recv(100) == b"still here"
        number = one.fileno()
    with pytest.raises(PipeBroken, match="expected a way"):
        check_way("ucx", number)


def test_what_has_the_descriptor_of_a_closed_connection_has_no_way_and_is_left_alone() -> None:
    """A copy of such a descriptor stayed once."""
    kind = "anon_inode:[eventpoll]"
    with select.epoll() as other:
        before = Held.now().fds[kind]
        with pytest.raises(PipeBroken, match="expected a way"):
            check_way("ucx", other.fileno())
        assert Held.now().fds[kind] == before
        assert other.poll(0) == []


@pytest.mark.parametrize("wire", [pytest.param("ucx", marks=needs_ucxx), "zmq"])
@pytest.mark.parametrize("looks", [0, 1], ids=["source", "sink"])
def test_ucx_does_not_connect_where_there_is_no_way(
    wire: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source looks first. ZeroMQ, which has connected, goes on over a way that comes back."""
    use_tcp(monkeypatch)
    connect, looked = socket.socket.connect, list[object]()

    def connects(own: socket.socket, address: Any) -> None:
        if own.type == socket.SOCK_DGRAM:
            looked.append(address)
            if len(looked) > looks:
                raise OSError(errno.ENETUNREACH, "Network is unreachable")
        connect(own, address)

    monkeypatch.setattr(socket.socket, "connect", connects)
    config = msgspec.structs.replace(CONFIG, transport=wire, trust_network=True)
    with closing(Pair(config)) as pair:
        if wire == "zmq":
            pair.trial().close()
            assert not looked
            return
        with pytest.raises(TransportUnavailable, match="other side, got Network is unr") as found:
            pair.trial()
        assert ("refuses" in str(found.value)) == (looks == 0)
        assert len(looked) == looks + 1
