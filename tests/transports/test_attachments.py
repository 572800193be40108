"""Whose bytes a read takes, and who is sent the chunks of a transfer, whatever peers say."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.tensors.shared_memory import SharedPool
from kvxfer.testing.cases import POOL_NBYTES
from kvxfer.transfer.costs import Staging
from kvxfer.transfer.wire import Reason
from kvxfer.transports import stream_source
from kvxfer.transports.base import (
    TRIAL_NBYTES,
    TRIAL_SMALL_NBYTES,
    Packed,
    PeerGone,
    ReadBroke,
    ReadDone,
    SendRequest,
    SendStopped,
    Sent,
)
from kvxfer.transports.channel import Socket
from kvxfer.transports.pipe import Slots
from kvxfer.transports.stream_connections import (
    MAX_EXPECTED,
    MAX_STAGING_NBYTES,
    MAX_TRIAL_NBYTES,
    MAX_TRIALS,
    TRIAL_S,
)
from kvxfer.transports.stream_machine import SourceSlot
from kvxfer.transports.stream_wire import (
    FRAME_MAX_NBYTES,
    AskTrial,
    Attached,
    ChunkHeader,
    Credit,
    Expect,
    Refused,
    ToSource,
    TrialHeader,
    decode_to_sink,
    encode,
)
from tests.spoken import watch_frames
from tests.transports.pair import (
    ATTACH,
    CONFIG,
    ZMQ,
    Pair,
    a_move,
    connections_of,
    expect_of,
    forget_sink,
    key_of,
    read_request,
    send_request,
)

SHM = msgspec.structs.replace(CONFIG, transport="shm")
TRIAL = msgspec.structs.replace(ATTACH, is_trial=True)
NOT_ATTACHED = "the source rank is not attached"


class Client:
    """Anybody who connects to the source."""

    def __init__(self, pair: Pair, *messages: ToSource) -> None:
        endpoint = pair.source.data_endpoint()
        assert endpoint is not None
        self.socket: Socket = pair.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.connect(endpoint)
        self.say(*messages)

    def say(self, *messages: ToSource) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def heard(self) -> list[list[bytes]]:
        messages = []
        while self.socket.poll(0):
            messages.append(self.socket.recv_multipart())
        return messages

    def chunks(self) -> int:
        """How many of the messages that came are chunks."""
        headers = [decode_to_sink(memoryview(m[0])) for m in self.heard() if len(m) == 2]
        return sum(isinstance(header, ChunkHeader) for header in headers)


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    clients: list[Client] = []
    yield clients
    for client in clients:
        client.socket.close()


def _rest(pair: Pair, duration_s: float = 0.1) -> None:
    deadline_s = time.monotonic() + duration_s
    while time.monotonic() < deadline_s:
        pair.turn()
        time.sleep(0.002)


# ------------------------------------------------------------------ whose bytes a read takes


def test_shm_reads_only_the_pools_that_the_manifest_of_the_read_names() -> None:
    pair = Pair(SHM)
    evil_pool = SharedPool.create(POOL_NBYTES)
    try:
        evil_pool.tensor.fill_(0x66)
        evil = msgspec.structs.replace(pair.manifest, memories=(evil_pool.info,))
        pair.sink.attach(pair.manifest)
        pair.sink.attach(evil)  # the same control endpoint, stated by another
        before = pair.content()
        pair.start(key_of(1), a_move())
        assert pair.end(key_of(1)) == ReadBroke(key_of(1), Reason.PEER_LOST, NOT_ATTACHED)
        assert pair.content() == before
        pair.sink.attach(pair.manifest)
        pair.start(key_of(2), a_move())
        assert isinstance(pair.end(key_of(2)), ReadDone)
        assert pair.content() == pair.expected(a_move())
    finally:
        pair.close()
        evil_pool.close()


@pytest.mark.parametrize("change", [{"pid": 1}, {"fd": 999}, {"boot_id": "x"}, {"nonce": b"x"}])
def test_shm_compares_the_whole_handle(change: dict[str, object]) -> None:
    pair = Pair(SHM)
    try:
        pair.sink.attach(pair.manifest)
        info = pair.manifest.memories[0]
        assert info.handle is not None
        handle = msgspec.structs.replace(info.handle, **change)
        other = msgspec.structs.replace(
            pair.manifest, memories=(msgspec.structs.replace(info, handle=handle),)
        )
        pair.sink.submit_read(read_request(key_of(1), a_move(), other, is_stream=False))
        assert pair.end(key_of(1)) == ReadBroke(key_of(1), Reason.PEER_LOST, NOT_ATTACHED)
    finally:
        pair.close()


def test_zmq_expects_chunks_only_from_the_data_endpoint_of_the_read(
    pair: Pair, clients: list[Client]
) -> None:
    with pair.context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        evil = msgspec.structs.replace(
            pair.manifest, data_endpoints={"zmq": f"tcp://127.0.0.1:{port}"}
        )
        pair.sink.attach(pair.manifest)
        pair.sink.submit_expect(read_request(key_of(1), a_move(), pair.manifest))
        pair.sink.attach(evil)
        pair.end(key_of(1))  # it broke with the connection that it was expected on
        pair.sink.submit_expect(read_request(key_of(2), a_move(), pair.manifest))
        assert pair.end(key_of(2)) == ReadBroke(key_of(2), Reason.PEER_LOST, NOT_ATTACHED)
        pair.sink.attach(pair.manifest)
        pair.start(key_of(3), a_move())
        assert isinstance(pair.end(key_of(3)), ReadDone)
        assert pair.content() == pair.expected(a_move())


# ------------------------------------------------------------------ who is sent chunks


def test_nobody_gets_the_chunks_of_a_sink_without_the_nonce(
    pair: Pair, clients: list[Client]
) -> None:
    key = key_of(1)
    thief = Client(
        pair, ATTACH, Expect(b"guess", key.incarnation, key.sink_rank), expect_of(key_of(2))
    )
    clients.append(thief)
    _rest(pair)
    pair.sink.attach(pair.manifest)
    pair.start(key, a_move())
    thief.say(Expect(b"another guess", key.incarnation, key.sink_rank))
    assert isinstance(pair.end(key), ReadDone)
    assert pair.content() == pair.expected(a_move())
    assert thief.chunks() == 0


def test_a_read_that_a_living_sink_has_named_is_not_another_s(
    pair: Pair, clients: list[Client]
) -> None:
    key = key_of(1)
    pair.sink.attach(pair.manifest)
    pair.sink.submit_expect(read_request(key, a_move(), pair.manifest))
    pair.until(lambda: connections_of(pair).of_read(_name(1)) is not None)
    thief = Client(pair, ATTACH, expect_of(key))
    clients.append(thief)
    pair.until(lambda: pair.source.counts["expected_twice"] == 1)
    pair.source.submit_send(send_request(key, a_move()))
    assert isinstance(pair.end(key), ReadDone)
    assert thief.chunks() == 0


def test_a_sink_that_comes_back_is_served_and_takes_over_what_died(
    pair: Pair, clients: list[Client]
) -> None:
    first = Client(pair, ATTACH, expect_of(key_of(1)))
    pair.until(lambda: connections_of(pair).of_read(_name(1)) is not None)
    pair.source.submit_send(send_request(key_of(2), a_move()))  # waits for whoever names it
    first.socket.close()
    pair.until(lambda: not len(connections_of(pair)))
    again = Client(pair, ATTACH, expect_of(key_of(1)), expect_of(key_of(2)))
    clients.append(again)
    got = 0

    def chunks() -> bool:
        nonlocal got
        got += again.chunks()
        return got == 4

    pair.until(chunks)
    assert pair.source.counts["expected_twice"] == 0


def test_who_comes_back_before_anybody_looked_takes_over_what_died(
    pair: Pair, clients: list[Client]
) -> None:
    """The end of the first and the word of the second are found by one poll."""
    first = Client(pair, ATTACH, expect_of(key_of(1)))
    pair.until(lambda: connections_of(pair).of_read(_name(1)) is not None)
    (owner,) = connections_of(pair).all()
    first.socket.close()
    time.sleep(0.2)
    clients.append(Client(pair, ATTACH, expect_of(key_of(1))))
    time.sleep(0.2)
    pair.until(lambda: owner.is_lost)
    pair.until(lambda: connections_of(pair).of_read(_name(1)) is not None)
    assert pair.source.counts["expected_twice"] == 0


def _name(number: int) -> tuple[bytes, bytes, str]:
    key = key_of(number)
    return key.nonce, key.incarnation, key.sink_rank


# ------------------------------------------------------------------ what a connection may ask


def test_one_connection_gets_so_many_trials_and_no_more(pair: Pair, clients: list[Client]) -> None:
    clients.append(Client(pair, TRIAL))
    heard: list[list[bytes]] = []
    sizes = (TRIAL_NBYTES, TRIAL_SMALL_NBYTES)
    for count in range(MAX_TRIALS):
        clients[0].say(AskTrial(sizes[count % 2]))

        def has_come() -> bool:
            heard.extend(clients[0].heard())
            return len(heard) == 2 + count  # noqa: B023

        pair.until(has_come)
        clients[0].say(Credit((count % 2,)))
    for size in sizes:
        clients[0].say(AskTrial(size))
    pair.until(lambda: pair.source.counts["too_many_trials"] == 2)
    _rest(pair)
    assert clients[0].heard() == []
    assert heard[0] == [encode(Attached(b""))]
    # Each size in the slot that was filled with it
    for count, message in enumerate(heard[1:]):
        header = TrialHeader(sizes[count % 2], slot=count % 2, generation=count // 2)
        assert message == [encode(header), bytes(range(256)) * (sizes[count % 2] // 256)]


def test_a_trial_waits_for_its_slot(pair: Pair, clients: list[Client]) -> None:
    clients.append(Client(pair, TRIAL, *[AskTrial(TRIAL_SMALL_NBYTES)] * 6))
    pair.until(lambda: pair.source.counts["malformed"] == 2)  # there are four slots
    small = msgspec.structs.replace(TRIAL, slot_nbytes=TRIAL_NBYTES - 1)
    clients.append(Client(pair, small, AskTrial(TRIAL_NBYTES)))
    pair.until(lambda: pair.source.counts["malformed"] == 3)


def test_announced_reads_of_a_connection_are_bounded_oldest_first(
    pair: Pair, clients: list[Client]
) -> None:
    last = MAX_EXPECTED + 2
    numbers = [*range(1, MAX_EXPECTED + 1), MAX_EXPECTED, MAX_EXPECTED + 1, last]
    clients.append(Client(pair, ATTACH, *[expect_of(key_of(n)) for n in numbers]))
    pair.until(lambda: pair.source.counts["expected_too_much"] == 2)
    of_read = connections_of(pair).of_read
    assert [n for n in numbers if of_read(_name(n)) is None] == [1, 2]
    clients[0].socket.close()
    pair.until(lambda: not len(connections_of(pair)))
    assert of_read(_name(last)) is None


def test_reads_that_ended_are_forgotten(pair: Pair) -> None:
    pair.sink.attach(pair.manifest)
    pair.start(key_of(1), a_move())
    assert isinstance(pair.end(key_of(1)), ReadDone)
    pair.until(lambda: pair.said_kind(Sent, key_of(1)))
    pair.hold = True
    pair.start(key_of(2), a_move())
    pair.until(lambda: pair.said_kind(Packed, key_of(2)))
    pair.source.stop_send(key_of(2))
    pair.until(lambda: pair.said_kind(SendStopped, key_of(2)))
    assert [connection.expected for connection in connections_of(pair).all()] == [{}]


def test_the_oldest_idle_sink_makes_room_and_busy_ones_stay(
    pair: Pair, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_source, "MAX_CONNECTIONS", 2)
    pair.hold = True
    clients.append(Client(pair, ATTACH, expect_of(key_of(1))))
    pair.source.submit_send(send_request(key_of(1), a_move()))
    pair.until(lambda: pair.said_kind(Packed, key_of(1)))
    pair.sink.attach(pair.manifest)
    pair.until(lambda: len(connections_of(pair)) == 2)
    clients.append(Client(pair, ATTACH, expect_of(key_of(2))))
    pair.until(lambda: PeerGone(pair.manifest.control_endpoint) in pair.seen)
    assert pair.source.counts["sent_away"] == 1
    pair.source.submit_send(send_request(key_of(2), a_move()))
    pair.until(lambda: pair.said_kind(Packed, key_of(2)))
    clients.append(Client(pair, ATTACH))
    pair.until(lambda: pair.source.counts["too_many_sinks"] == 1)
    assert clients[2].socket.poll(120_000)
    assert b"at most 2 sinks" in clients[2].heard()[0][0]
    assert len(connections_of(pair)) == 2


def test_the_first_that_never_had_a_chunk_makes_room_before_who_had_one(
    pair: Pair, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_source, "MAX_CONNECTIONS", 3)
    pair.sink.attach(pair.manifest)
    pair.start(key_of(1), a_move())
    assert isinstance(pair.end(key_of(1)), ReadDone)

    def attach(num_connections: int) -> None:
        clients.append(Client(pair, ATTACH))
        pair.until(lambda: len(connections_of(pair)) == num_connections)

    attach(2)
    attach(3)
    clients.append(Client(pair, ATTACH))
    pair.until(lambda: pair.source.counts["sent_away"] == 1)
    assert clients[0].socket.poll(120_000)
    assert b"idle, and too many others" in clients[0].heard()[0][0]
    pair.start(key_of(2), a_move())
    assert isinstance(pair.end(key_of(2)), ReadDone)
    assert PeerGone(pair.manifest.control_endpoint) not in pair.seen
    assert not any(client.heard() for client in clients[1:])


# ------------------------------------------------------------------ lost, full, forgotten


def test_a_full_queue_is_not_taken_for_a_lost_connection(
    pair: Pair, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients.append(Client(pair, ATTACH))
    pair.until(lambda: len(connections_of(pair)) == 1)
    (connection,) = connections_of(pair).all()

    def full(_: object) -> None:
        raise zmq.Again

    watch_frames(monkeypatch, full)
    other = Client(pair, Credit(()))  # it is told to attach first, if it can be
    pair.until(lambda: pair.source.counts["send_failed"] > 0)
    other.socket.close()
    _rest(pair)
    assert connections_of(pair).all() == [connection]
    assert not connection.is_lost


def test_each_sink_that_has_gone_is_lost_at_once_and_no_other(
    pair: Pair, clients: list[Client]
) -> None:
    """None of them is asked for that: the listener knows which connection has ended."""
    for number in range(3):  # one after the other, so that their order is known
        clients.append(Client(pair, ATTACH))
        pair.until(lambda number=number: len(connections_of(pair)) > number)  # type: ignore[misc]
    first, second, third = connections_of(pair).all()
    clients[1].socket.close()
    pair.until(lambda: second.is_lost)
    assert connections_of(pair).all() == [first, third]
    clients[0].socket.close()
    pair.until(lambda: first.is_lost)
    assert connections_of(pair).all() == [third]
    assert clients[2].heard() == []


def test_an_attach_that_is_read_after_its_connection_has_ended_leaves_nothing(pair: Pair) -> None:
    client = Client(pair, ATTACH)
    time.sleep(0.1)
    client.socket.close()
    time.sleep(0.1)
    _rest(pair)
    pair.until(lambda: not len(connections_of(pair)))
    pair.until(lambda: pair.source.is_idle)


@pytest.mark.parametrize("message", [Credit((0,)), expect_of(key_of(1))], ids=["credit", "expect"])
def test_who_is_not_attached_is_told_so(
    pair: Pair, clients: list[Client], message: ToSource
) -> None:
    clients.append(Client(pair, message))
    pair.until(lambda: pair.source.counts["not_attached"] == 1)
    assert clients[0].socket.poll(120_000)
    assert clients[0].heard() == [[encode(Refused("expected an attach first; attach anew"))]]


def test_a_sink_that_the_source_forgot_attaches_anew(pair: Pair) -> None:
    pair.sink.attach(pair.manifest)
    pair.hold = True
    pair.start(key_of(1), a_move())
    pair.until(lambda: pair.said_kind(Packed, key_of(1)))
    forget_sink(pair)
    pair.until(lambda: pair.said_kind(SendStopped, key_of(1)))
    pair.hold = False
    pair.start(key_of(2), a_move())
    for number in (1, 2):
        end = pair.end(key_of(number))
        assert isinstance(end, ReadBroke)
        assert end.reason is Reason.PEER_LOST
        assert "refuses the connection" in end.detail
    assert PeerGone(pair.manifest.control_endpoint) in pair.seen
    assert pair.sink.counts["refused"] == 1
    pair.source.stop_send(key_of(2))
    pair.sink.attach(pair.manifest)
    pair.start(key_of(3), a_move())
    assert isinstance(pair.end(key_of(3)), ReadDone)
    assert pair.content() == pair.expected(a_move())


# ------------------------------------------------------------------ staging of those who are silent


def _staging_nbytes(pair: Pair) -> int:
    return sum(each.slots.nbytes for each in connections_of(pair).with_staging())


def test_trials_that_are_never_credited_take_a_small_part_and_hinder_no_other(
    pair: Pair, clients: list[Client]
) -> None:
    num_room, rest = divmod(MAX_TRIAL_NBYTES, TRIAL.num_slots * TRIAL.slot_nbytes)
    assert not rest
    for _ in range(num_room + 7):
        clients.append(Client(pair, TRIAL, AskTrial(TRIAL_SMALL_NBYTES)))
    pair.until(lambda: pair.source.counts["sent_away"] == 7)
    assert _staging_nbytes(pair) == MAX_TRIAL_NBYTES
    assert pair.trial().costs.bytes_per_s > 0
    pair.sink.attach(pair.manifest)
    pair.start(key_of(1), a_move())
    assert isinstance(pair.end(key_of(1)), ReadDone)
    for client in clients:
        client.socket.close()
    pair.until(lambda: _staging_nbytes(pair) == ATTACH.num_slots * ATTACH.slot_nbytes)


def test_a_trial_has_an_end(
    pair: Pair, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients.append(Client(pair, ATTACH))
    clients.append(Client(pair, TRIAL, AskTrial(TRIAL_NBYTES)))
    pair.until(lambda: len(connections_of(pair)) == 2 and _staging_nbytes(pair) > 0)
    pair.source.inspect()
    assert [each.is_trial for each in connections_of(pair).all()] == [False, True]
    late_s = time.monotonic() + TRIAL_S
    monkeypatch.setattr(stream_source, "time", SimpleNamespace(monotonic=lambda: late_s))
    pair.source.inspect()
    assert [each.is_trial for each in connections_of(pair).all()] == [False]
    assert clients[1].socket.poll(120_000)
    pair.until(lambda: b"a trial to end" in b"".join(sum(clients[1].heard(), [])))


def test_a_sink_whose_message_makes_no_sense_attaches_anew(
    pair: Pair, clients: list[Client]
) -> None:
    """It may have been a credit. Without it the slot would never come back."""
    clients.append(Client(pair, ATTACH))
    pair.until(lambda: len(connections_of(pair)) == 1)
    clients[0].socket.send(b"\xc1")
    pair.until(lambda: len(connections_of(pair)) == 0)
    assert clients[0].socket.poll(120_000)
    assert b"attach anew" in b"".join(sum(clients[0].heard(), []))


def test_who_attached_for_transfers_gets_no_trial(pair: Pair, clients: list[Client]) -> None:
    clients.append(Client(pair, ATTACH, AskTrial(TRIAL_NBYTES)))
    pair.until(lambda: pair.source.counts["malformed"] == 1)
    assert _staging_nbytes(pair) == 0


def test_staging_that_is_never_credited_comes_back_for_others(clients: list[Client]) -> None:
    """Also that of a sink which has named a transfer's nonce; it has more than half of all."""
    half_slots = MAX_STAGING_NBYTES // 2 // FRAME_MAX_NBYTES
    num_slots = half_slots + 1
    slots = {"staging_slots": num_slots, "staging_nbytes": MAX_STAGING_NBYTES}
    pair = Pair(msgspec.structs.replace(ZMQ, pull_timeout_s=0.2, **slots))
    attach = msgspec.structs.replace(ATTACH, num_slots=num_slots, slot_nbytes=FRAME_MAX_NBYTES)
    try:
        clients.append(Client(pair, attach, expect_of(key_of(1))))
        pair.source.submit_send(replace(send_request(key_of(1), a_move()), chunk_nbytes=128))
        pair.until(lambda: clients[0].chunks() > 0)
        (silent,) = connections_of(pair).all()
        pair.until(lambda: silent.table.num[SourceSlot.IN_FLIGHT] == num_slots)
        _rest(pair, 0.3)
        pair.sink.attach(pair.manifest, Staging(half_slots, FRAME_MAX_NBYTES, None))
        pair.start(key_of(2), a_move())
        assert isinstance(pair.end(key_of(2)), ReadDone)
        assert silent.is_lost
        assert pair.said_kind(SendStopped, key_of(1))
    finally:
        for client in clients:
            client.socket.close(linger=0)
        pair.close()


# ------------------------------------------------------------------ sizes and addresses


@pytest.mark.parametrize(
    ("own", "most"), [(1 << 20, 8 << 20), (16 << 20, 16 << 20), (None, 64 << 20)]
)
def test_chunks_are_not_larger_than_this_side_allows(own: int | None, most: int) -> None:
    pair = Pair(msgspec.structs.replace(ZMQ, chunk_nbytes=own))
    try:
        good = send_request(key_of(1), a_move())
        sizes = (good.classes, good.sides, good.block_ids)
        with pytest.raises(ProtocolError, match=f"expected at most {most}, got {most + 1}"):
            pair.source.submit_send(SendRequest(good.key, *sizes, most + 1))
        pair.source.submit_send(SendRequest(good.key, *sizes, most))  # the key is still free
    finally:
        pair.close()


MIB = 1 << 20
USUAL = {"chunk_nbytes": None, "staging_slots": None}


@pytest.mark.parametrize(
    ("settings", "asked", "taken"),
    [
        (USUAL, (8, 4 * MIB), 8),
        (USUAL, (9, 4 * MIB), 8),  # 32 MiB is usual in host memory
        (USUAL, (1024, 4096), 64),
        (USUAL, (8, 64 * MIB), 2),  # a block may be that large
        (USUAL | {"staging_slots": 3}, (8, MIB), 3),
        (USUAL | {"staging_slots": 100}, (100, MIB), 32),
        (USUAL | {"staging_slots": 100, "chunk_nbytes": MIB}, (100, MIB), 100),
        (USUAL | {"staging_nbytes": 5 * MIB}, (8, MIB), 5),
        (USUAL | {"staging_nbytes": 5 * MIB}, (2, 5 * MIB // 2), 2),
        (USUAL | {"staging_nbytes": 5 * MIB}, (2, 5 * MIB // 2 + 1), None),
    ],
)
def test_a_sink_gets_no_more_slots_than_this_side_allows(
    settings: dict[str, int | None], asked: tuple[int, int], taken: int | None
) -> None:
    pair = Pair(msgspec.structs.replace(ZMQ, **settings))
    num_slots, slot_nbytes = asked
    attach = msgspec.structs.replace(ATTACH, num_slots=num_slots, slot_nbytes=slot_nbytes)
    client = Client(pair, attach)
    try:
        if taken is None:
            pair.until(lambda: pair.source.counts["malformed"] == 1)
            assert client.socket.poll(120_000)
            (refusal,) = client.heard()
            assert b"staging_nbytes is 5242880 here" in refusal[0]
            return
        pair.until(lambda: len(connections_of(pair)) == 1)
        (connection,) = connections_of(pair).all()
        assert connection.slots == Slots(taken, slot_nbytes)
    finally:
        client.socket.close(linger=0)
        pair.close()


def test_a_trial_has_slots_of_its_own_and_carries_nothing_else() -> None:
    """Its staging is not that of the settings, which would not let it be measured."""
    pair = Pair(msgspec.structs.replace(ZMQ, staging_slots=2, chunk_nbytes=4096))
    clients: list[Client] = []
    try:
        trial = msgspec.structs.replace(ATTACH, num_slots=5, slot_nbytes=4 * MIB, is_trial=True)
        clients.append(Client(pair, trial, *[AskTrial(TRIAL_SMALL_NBYTES)] * 5))
        pair.until(lambda: len(connections_of(pair)) == 1)
        assert connections_of(pair).all()[0].slots == Slots(5, 4 * MIB)
        clients[0].say(expect_of(key_of(1)))
        pair.until(lambda: pair.source.counts["malformed"] == 1)
        for more in ({"num_slots": 6}, {"slot_nbytes": 4 * MIB + 1}):
            clients.append(Client(pair, msgspec.structs.replace(trial, **more)))
        pair.until(lambda: pair.source.counts["malformed"] == 3)
        assert len(connections_of(pair)) == 1
    finally:
        for client in clients:
            client.socket.close(linger=0)
        pair.close()


def test_a_trial_that_is_refused_says_why(pair: Pair) -> None:
    with pair.context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.RCVTIMEO, 120_000)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        manifest = msgspec.structs.replace(
            pair.manifest, data_endpoints={"zmq": f"tcp://127.0.0.1:{port}"}
        )

        def refuse() -> None:
            identity, _ = router.recv_multipart()
            router.send_multipart([identity, encode(Refused("go away"))])

        thread = threading.Thread(target=refuse)
        thread.start()
        try:
            with pytest.raises(TransportUnavailable, match="refuses: go away"):
                pair.sink.trial(manifest, 120.0)
        finally:
            thread.join()
