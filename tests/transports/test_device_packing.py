"""Chunks that a GPU packs and unpacks: with and without pinned buffers, late, cancelled, failed."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.device_copy import Launched
from kvxfer.tensors.device_launch import HostEvent
from kvxfer.testing.cases import CASES, make_move
from kvxfer.testing.peers import PiecesJob
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.plan import Chunk, DenseOrder
from kvxfer.transfer.wire import Reason
from kvxfer.transports import copy_thread
from kvxfer.transports.base import (
    LocalMemory,
    Packed,
    ReadBroke,
    ReadDone,
    ReadStopped,
    SendStopped,
    Sent,
    TransferKey,
)
from kvxfer.transports.copy_thread import CopyEnd, CopyThread, Mailbox
from kvxfer.transports.stream_packing import ChunkJob, DevicePacker, _BounceQueue, make_packer
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource
from tests.transports.host_packer import (
    HostCopier,
    host_packer,
    made_with,
    packing_pair,
    quick_packer,
)
from tests.transports.pair import (
    ZMQ,
    Pair,
    a_move,
    connections_of,
    key_of,
    link_of,
    load,
    read_request,
    send_request,
)
from tests.wires import use_sink, use_source


@pytest.fixture(params=[True, False], ids=["reaches staging", "through pinned buffers"])
def reaches_host(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def pair(reaches_host: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with packing_pair(partial(quick_packer, reaches_host=reaches_host), monkeypatch) as pair:
        yield pair


@pytest.fixture
def opened() -> threading.Event:
    """Until then the copy thread of ``held`` is busy."""
    return threading.Event()


@pytest.fixture(params=[8])
def held(
    request: pytest.FixtureRequest, opened: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    """Only the sink has pinned buffers, ten of them. There are so many slots, and eight chunks
    wait for the copy thread.
    """
    use_source(monkeypatch, "zmq", partial(made_with, StreamSource, _reaching))
    use_sink(monkeypatch, "zmq", partial(made_with, StreamSink, _with_ten_buffers))
    config = msgspec.structs.replace(ZMQ, staging_slots=request.param, chunk_nbytes=1 << 20)
    pair, entered = Pair(config), threading.Event()

    def pieces() -> Iterator[None]:
        entered.set()
        assert opened.wait(120)
        yield

    pair.copy_thread.submit(PiecesJob("busy", pieces()))
    assert entered.wait(120)
    pair.sink.attach(pair.manifest)
    pair.start(key_of(1), a_move())
    pair.until(lambda: len(_packer(pair.sink)._to_copy._waiting) >= 8)
    yield pair
    opened.set()
    pair.close()


def _reaching(*arguments: Any) -> DevicePacker:
    return quick_packer(*arguments, reaches_host=True)


def _with_ten_buffers(memory: LocalMemory, config: Config, *arguments: Any) -> DevicePacker:
    return quick_packer(memory, msgspec.structs.replace(config, zmq_streams=4), *arguments)


@pytest.fixture
def kernel_pair(reaches_host: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with packing_pair(partial(host_packer, reaches_host=reaches_host), monkeypatch) as pair:
        yield pair


def _packer(end: object) -> DevicePacker:
    packer = vars(end)["_packer"]
    assert isinstance(packer, DevicePacker)
    return packer


def _is_at_rest(packer: DevicePacker, reaches_host: bool) -> bool:
    """Nothing is under way, and every buffer is back."""
    assert packer._num_bounces <= (0 if reaches_host else 4)
    return not (
        packer._jobs
        or packer._gathered
        or packer._waiting
        or packer._ended
        or len(packer._in_flight)
        or len(packer._bounces) != packer._num_bounces
    )


def test_many_transfers_leave_no_buffer_behind(kernel_pair: Pair, reaches_host: bool) -> None:
    pair = kernel_pair
    for numbers in ((1,), (2, 3)):
        pair.sink_pool.tensor.fill_(0xEE)
        for number in numbers:
            pair.start(key_of(number), a_move(numbers[0]))
        for number in numbers:
            assert isinstance(pair.end(key_of(number), 30), ReadDone)
            pair.until(lambda: pair.said_kind(Sent, key_of(number)), 30)  # noqa: B023
        assert pair.content() == pair.expected(a_move(numbers[0]))
    for end in (pair.source, pair.sink):
        assert _is_at_rest(_packer(end), reaches_host)


class Gate(HostEvent):
    """An event of a GPU that takes its time, or fails. ``num_chunks``: how many its launch packs or
    unpacks; ``seen_by``: the threads that looked.
    """

    def __init__(self, *, num_chunks: int = 1, is_open: bool = False) -> None:
        self.num_chunks = num_chunks
        self.is_open = is_open
        self.error: RuntimeError | None = None
        self.seen_by: set[threading.Thread] = set()

    def query(self) -> bool:
        self.seen_by.add(threading.current_thread())
        if self.error is not None:
            raise self.error
        return self.is_open

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.001)


def _held(monkeypatch: pytest.MonkeyPatch, method: str, *, is_open: bool = False) -> list[Gate]:
    """What the copier launches from now on is over when the test says so, or at once."""
    gates: list[Gate] = []
    inner = getattr(HostCopier, method)

    def launch(*args: Any, **kwargs: Any) -> Launched:
        launched = inner(*args, **kwargs)
        num_chunks = len(args) - (4 if method == "unpack" else 5)
        gates.append(Gate(num_chunks=num_chunks, is_open=is_open))
        return Launched(gates[-1], launched.nbytes)

    monkeypatch.setattr(HostCopier, method, launch)
    return gates


def test_chunks_that_wait_are_copied_four_by_a_call(
    held: Pair, opened: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, slept = list[int](), list[float]()
    copy = torch._foreach_copy_
    # It is a second later whenever anybody looks
    moments = count(int(time.perf_counter()) + 10)
    clock = SimpleNamespace(
        perf_counter=lambda: next(moments), monotonic=time.monotonic, sleep=slept.append
    )
    monkeypatch.setattr(copy_thread, "time", clock)

    def counted(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
        copied.append(len(to))
        copy(to, of)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    opened.set()
    assert isinstance(held.end(key_of(1)), ReadDone)
    assert held.content() == held.expected(a_move())
    assert copied[:2] == [4, 4]
    assert sum(copied) >= 9
    assert max(copied) == 4
    assert len(slept) <= 2  # after both pieces of what kept the thread busy


@pytest.mark.parametrize("held", [32], indirect=True)
def test_what_has_come_is_to_be_copied_before_what_was_copied_is_launched(
    held: Pair, opened: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer, source, seen = _packer(held.sink), held.source, list[str]()
    asked = read_request(key_of(1), a_move(), held.manifest)
    chunks = chunk_list(asked.pull_classes, asked.chunk_nbytes, asked.part_tokens)
    held.until(lambda: len(packer._jobs) == len(chunks))
    num_copied = len(packer._to_copy._waiting)
    opened.set()
    deadline_s = time.monotonic() + 120.0
    while packer._copied._items.qsize() < num_copied:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    held.start(key_of(2), a_move(2))
    (dealer,) = link_of(held).dealers
    while not dealer.socket.poll(0):  # only the source works
        for completion in source.poll():
            if isinstance(completion, Packed):
                source.send_packed(completion.key, completion.sequence)
    for name in ("submit", "_launch"):
        monkeypatch.setattr(packer, name, _noted(seen, name, getattr(packer, name)))
    held.seen.extend(held.sink.poll())
    assert seen[0] == "submit"
    assert "_launch" in seen
    assert isinstance(held.end(key_of(2)), ReadDone)


def _noted(seen: list[str], name: str, call: Callable[..., None]) -> Callable[..., None]:
    def noting(*args: object) -> None:
        seen.append(name)
        call(*args)

    return noting


def test_chunks_of_a_stopped_read_are_not_copied_but_waited_for(
    held: Pair, opened: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, _: copied.append(len(to)))
    before = held.content()
    held.sink.stop_read(key_of(1))
    for _ in range(20):
        held.turn()
    assert not any(isinstance(c, ReadStopped) for c in held.seen)  # the copy thread has them
    opened.set()
    assert isinstance(held.end(key_of(1)), ReadStopped)
    assert held.content() == before
    assert copied == []
    held.source.stop_send(key_of(1))
    assert len(_packer(held.sink)._bounces) == _packer(held.sink)._num_bounces == 8


def test_a_copy_that_fails_breaks_its_read_only(held: Pair, opened: threading.Event) -> None:
    held.sink_pool.tensor.fill_(0xEE)
    _packer(held.sink)._to_copy._waiting[3].dense = torch.empty(3, dtype=torch.uint8)
    opened.set()
    end = held.end(key_of(1))
    assert isinstance(end, ReadBroke)
    assert end.reason is Reason.READ_FAILED
    assert "unpacking failed: The size of tensor" in end.detail
    held.source.stop_send(key_of(1))
    load(held, 2)


def test_what_waits_for_a_copy_thread_that_is_closed_ends_uncopied() -> None:
    copied: Mailbox[Any] = Mailbox(lambda: None)
    thread = CopyThread()
    thread.close()
    chunk = SimpleNamespace(cancelled=False)
    chunks: Any = _BounceQueue(thread, copied)
    for _ in range(2):  # the first has left nothing behind
        chunk.cancelled = False
        chunks.submit(chunk)
        assert copied.take() is chunk
        assert chunk.cancelled


def test_a_copy_thread_that_goes_on_says_so(
    held: Pair, opened: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Then the IO thread need not be woken for each call
    copied = _packer(held.sink)._copied
    put, said = copied.put, list[tuple[int, bool]]()

    def noted(*jobs: ChunkJob, more_follows: bool) -> None:
        said.append((len(jobs), more_follows))
        put(*jobs, more_follows=more_follows)

    monkeypatch.setattr(copied, "put", noted)
    opened.set()
    assert isinstance(held.end(key_of(1)), ReadDone)
    assert said[0] == (4, True)
    assert said[-1][1] is False
    assert sum(number for number, _ in said) >= 9


def _num_chunks(gates: Sequence[Gate]) -> int:
    return sum(gate.num_chunks for gate in gates)


def test_a_chunk_is_packed_when_its_kernel_is_over(
    pair: Pair, reaches_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = _held(monkeypatch, "pack")
    pair.start(key_of(1), a_move())
    pair.until(lambda: _num_chunks(gates) == 4)
    for _ in range(20):
        pair.turn()
    assert not any(isinstance(c, Packed) for c in pair.said)
    gates[0].is_open = True
    pair.until(lambda: sum(isinstance(c, Packed) for c in pair.said) == 1)
    pair.source.stop_send(key_of(1))
    for _ in range(20):
        pair.turn()
    assert not pair.said_kind(SendStopped, key_of(1))  # kernels still read the pool
    for gate in gates:
        gate.is_open = True
    pair.until(lambda: pair.said_kind(SendStopped, key_of(1)))
    assert _is_at_rest(_packer(pair.source), reaches_host)
    pair.sink.stop_read(key_of(1))
    assert isinstance(pair.end(key_of(1)), ReadStopped)


Alike = tuple[TransferKey, tuple[int, int]]


@pytest.fixture
def several_copied(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Counter[Alike]:
    """The IO thread looks at copied chunks when four are, all that there are slots for. By the
    tokens of the chunks: in how many launches they were expected to be unpacked.
    """
    packer, expected = _packer(pair.sink), Counter[Alike]()
    copied = packer._copied
    drain = copied.drain

    def late() -> Iterator[Any]:
        if copied._items.qsize() < 4:
            return
        expected.update({(job.key, job.span[1]) for job in packer._jobs})
        yield from drain()

    monkeypatch.setattr(copied, "drain", late)
    return expected


@pytest.mark.parametrize("reaches_host", [False], indirect=True, ids=["through pinned buffers"])
def test_chunks_that_were_copied_meanwhile_are_unpacked_by_one_launch(
    pair: Pair, several_copied: Counter[Alike], monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = _held(monkeypatch, "unpack", is_open=True)
    pair.start(key_of(1), a_move())
    pair.until(lambda: _num_chunks(gates) >= 8)
    assert len(gates) == several_copied.total() < 8


@pytest.mark.parametrize("reaches_host", [False], indirect=True, ids=["through pinned buffers"])
@pytest.mark.usefixtures("several_copied")
def test_a_stopped_read_waits_for_the_launch_of_all_its_chunks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = _held(monkeypatch, "unpack")
    pair.start(key_of(1), a_move())
    pair.until(lambda: bool(gates))
    (gate,) = gates
    assert gate.num_chunks == 4
    pair.sink.stop_read(key_of(1))
    for _ in range(20):
        pair.turn()
    assert not any(isinstance(c, ReadStopped) for c in pair.seen)
    gate.is_open = True
    assert isinstance(pair.end(key_of(1)), ReadStopped)
    pair.source.stop_send(key_of(1))
    assert _is_at_rest(_packer(pair.sink), reaches_host=False)


@pytest.mark.parametrize("reaches_host", [False], indirect=True, ids=["through pinned buffers"])
def test_a_gpu_that_fails_at_a_launch_ends_what_was_to_be_launched_behind_it(
    pair: Pair, several_copied: Counter[Alike], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(HostCopier, "unpack", fail)
    monkeypatch.setattr(HostCopier, "mark", fail)
    pair.start(key_of(1), make_move(CASES[2], 1))  # four slots have chunks of two spans of tokens
    end = pair.end(key_of(1))
    assert isinstance(end, ReadBroke)
    assert "an illegal memory access" in end.detail
    assert len(several_copied) == 2
    pair.source.stop_send(key_of(1))
    assert _is_at_rest(_packer(pair.sink), reaches_host=False)


@pytest.mark.parametrize("reaches_host", [True], indirect=True, ids=["reaches staging"])
def test_a_gpu_that_fails_at_a_launch_ends_what_was_to_be_packed_behind_it(
    roomy_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, launched, move = roomy_pair, list[int](), make_move(CASES[2], 1)
    pack, mark = HostCopier.pack, HostCopier.mark

    def fail_second(*args: Any, **kwargs: Any) -> Launched:
        launched.append(len(args) - 5)
        if len(launched) > 1:
            raise RuntimeError("an illegal memory access")
        return pack(*args, **kwargs)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if len(launched) > 1:
            raise RuntimeError("an illegal memory access")
        return mark(*args, **kwargs)

    monkeypatch.setattr(HostCopier, "pack", fail_second)
    monkeypatch.setattr(HostCopier, "mark", fail)
    pair.start(key_of(1), move)  # the chunks are not all alike
    pair.until(lambda: pair.said_kind(SendStopped, key_of(1)))
    assert launched == [1, 2]  # and the others never
    assert SendStopped(key_of(1), Reason.READ_FAILED) in pair.said
    assert _is_at_rest(_packer(pair.source), reaches_host=True)
    pair.sink.stop_read(key_of(1))
    assert isinstance(pair.end(key_of(1)), ReadStopped)


def test_a_stopped_read_waits_for_the_kernels_that_write_the_pool(
    pair: Pair, reaches_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = _held(monkeypatch, "unpack")
    pair.start(key_of(1), a_move())
    pair.until(lambda: _num_chunks(gates) == 4)
    pair.sink.stop_read(key_of(1))
    for _ in range(20):
        pair.turn()
    assert not any(isinstance(c, ReadStopped) for c in pair.seen)
    for gate in gates:
        gate.is_open = True
    assert isinstance(pair.end(key_of(1)), ReadStopped)
    pair.source.stop_send(key_of(1))
    pair.until(lambda: _is_at_rest(_packer(pair.sink), reaches_host))


def test_a_launch_that_fails_breaks_its_transfer_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Launched:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patched:
        patched.setattr(HostCopier, "unpack", fail)
        pair.start(key_of(1), a_move())
        end = pair.end(key_of(1))
    assert isinstance(end, ReadBroke)
    assert end.reason is Reason.READ_FAILED
    assert "unpacking failed: no such kernel" in end.detail
    pair.source.stop_send(key_of(1))
    with monkeypatch.context() as patched:
        patched.setattr(HostCopier, "pack", fail)
        pair.start(key_of(2), a_move())
        pair.until(lambda: pair.said_kind(SendStopped, key_of(2)))
    pair.sink.stop_read(key_of(2))
    assert isinstance(pair.end(key_of(2)), ReadStopped)
    pair.sink_pool.tensor.fill_(0xEE)
    pair.start(key_of(3), a_move())
    assert isinstance(pair.end(key_of(3)), ReadDone)
    assert pair.content() == pair.expected(a_move())


def _no_memory(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("reaches_host", [False], indirect=True, ids=["through pinned buffers"])
def test_a_read_ends_where_there_is_no_pinned_memory_to_unpack_it_through(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(_packer(pair.sink)._gpu, "pinned", _no_memory)
        pair.start(key_of(1), a_move())
        end = pair.end(key_of(1))
    assert isinstance(end, ReadBroke)
    assert end.reason is Reason.READ_FAILED
    assert "unpacking failed: out of memory" in end.detail
    pair.source.stop_send(key_of(1))
    pair.until(lambda: _is_at_rest(_packer(pair.sink), reaches_host=False))
    load(pair, 2)


@pytest.mark.parametrize("is_staging", [True, False], ids=["staging", "a buffer before it"])
@pytest.mark.parametrize("reaches_host", [False], indirect=True, ids=["through pinned buffers"])
def test_a_transfer_ends_where_there_is_no_pinned_memory_to_pack_it_into(
    pair: Pair, is_staging: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(pair, 3)
    (connection,) = connections_of(pair).all()
    packer = _packer(pair.source)
    packer._bounces.clear()
    packer._num_bounces = 0
    with monkeypatch.context() as patched:
        if is_staging:
            patched.setattr(connection.lane, "staging", _no_memory)
        else:
            patched.setattr(packer._gpu, "pinned", _no_memory)
        pair.start(key_of(1), a_move())
        pair.until(lambda: pair.said_kind(SendStopped, key_of(1)))
    assert SendStopped(key_of(1), Reason.READ_FAILED) in pair.said
    assert pair.source.counts["pack_failed"] == 1
    pair.sink.stop_read(key_of(1))
    assert isinstance(pair.end(key_of(1)), ReadStopped)
    pair.until(lambda: _is_at_rest(_packer(pair.source), reaches_host=False))
    load(pair, 2)


def test_a_gpu_that_fails_ends_everything_that_it_was_to_do(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = _held(monkeypatch, "unpack")
    for number in (1, 2):
        pair.start(key_of(number), a_move(number))
    pair.until(lambda: _num_chunks(gates) == 4)
    for gate in gates:
        gate.error = RuntimeError("an illegal memory access")
    for number in (1, 2):
        end = pair.end(key_of(number))
        assert isinstance(end, ReadBroke)
        assert end.reason is Reason.READ_FAILED
        assert "an illegal memory access" in end.detail
        pair.source.stop_send(key_of(number))
    pair.start(key_of(3), a_move())
    end = pair.end(key_of(3))
    assert isinstance(end, ReadBroke)


def test_the_pool_is_written_behind_what_the_engine_still_does(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[object] = []
    monkeypatch.setattr(HostCopier, "wait", lambda _, stream, event: waited.append(event))
    first, second = object(), object()
    for number, event in enumerate((first, second, second, None, first), 1):
        request = msgspec.structs.replace(
            read_request(key_of(number), a_move(), pair.manifest),
            after=event,
        )
        pair.sink.submit_expect(request)
        pair.source.submit_send(send_request(key_of(number), a_move()))
        assert isinstance(pair.end(key_of(number)), ReadDone)
    # Once for all chunks, which are on one stream
    assert waited == [first, second, first]


def test_only_what_is_not_over_soon_is_waited_for_by_a_thread(
    pair: Pair, reaches_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = _held(monkeypatch, "pack", is_open=True)
    unpacked = _held(monkeypatch, "unpack", is_open=True)
    pair.start(key_of(1), a_move())
    assert isinstance(pair.end(key_of(1)), ReadDone)
    pair.until(lambda: pair.said_kind(Sent, key_of(1)))
    monkeypatch.undo()
    late = _held(monkeypatch, "pack")
    pair.start(key_of(2), a_move(2))
    pair.until(lambda: _num_chunks(late) == 4)
    pair.source.stop_send(key_of(2))
    pair.sink.stop_read(key_of(2))
    own = threading.current_thread()
    for gate in late:  # one after the other: they are on one stream
        pair.until(lambda: gate.seen_by - {own} != set())  # noqa: B023
        gate.is_open = True
    pair.until(lambda: pair.said_kind(SendStopped, key_of(2)))
    # A thread that was to look at one of these has by now: it looks in turn
    assert {thread for gate in packed + unpacked for thread in gate.seen_by} == {own}


@pytest.mark.parametrize("reaches_host", [True], indirect=True, ids=["reaches staging"])
def test_an_end_over_the_link_to_the_host_is_waited_for_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Within a GPU a thread would sleep for an hour first, for so many bytes
    gate = Gate()
    monkeypatch.setattr(HostCopier, "pack", lambda *_, **__: Launched(gate, 1))
    packer = _packer(pair.source)
    packer.submit(_job(f"{1 << 30}a", 0, a_move().pull.order))
    assert list(packer.drain()) == []
    own = threading.current_thread()
    pair.until(lambda: gate.seen_by - {own} != set())
    gate.is_open = True
    (job,) = packer.drain()
    assert job.end is CopyEnd.DONE


@pytest.fixture
def roomy_pair(reaches_host: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """There is a slot for each chunk."""
    config = msgspec.structs.replace(ZMQ, staging_slots=32)
    with packing_pair(
        partial(quick_packer, reaches_host=reaches_host), monkeypatch, config
    ) as pair:
        yield pair


def _launches(chunks: Sequence[Chunk]) -> Iterator[int]:
    """Of how many chunks each is, turn by turn: of one; of those that follow and are like each
    other, four at most; and of the one that is not like them, where they were fewer.
    """
    rest = deque(chunks)
    while rest:
        rest.popleft()
        yield 1
        alike: list[Chunk] = []
        while rest and len(alike) < 4 and rest[0].token_lo == (alike or rest)[0].token_lo:
            alike.append(rest.popleft())
        if alike:
            yield len(alike)
        if rest and len(alike) < 4:
            rest.popleft()
            yield 1


@pytest.mark.parametrize("reaches_host", [True], indirect=True, ids=["reaches staging"])
def test_one_chunk_is_packed_first_and_four_by_the_next_launch(
    roomy_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, gates = roomy_pair, _held(monkeypatch, "pack", is_open=True)
    pair.start(key_of(1), a_move())
    assert isinstance(pair.end(key_of(1)), ReadDone)
    assert pair.content() == pair.expected(a_move())
    asked = read_request(key_of(1), a_move(), pair.manifest)
    chunks = chunk_list(asked.pull_classes, asked.chunk_nbytes, asked.part_tokens)
    assert len({chunk.class_index for chunk in chunks}) == 1
    expected = list(_launches(chunks))
    assert [gate.num_chunks for gate in gates] == expected
    assert max(expected) > 2


@pytest.mark.parametrize("reaches_host", [True], indirect=True, ids=["reaches staging"])
@pytest.mark.parametrize(
    ("chunks", "launched"),
    [
        ("1a 8a 8a 8a", "1a, 8a 8a"),
        ("64a 64a 64a", "64a, 64a"),
        ("1a 7a 8a 2a 1a", "1a, 7a 8a 2a"),
        ("1a 1a 1a 1a 1a 1a", "1a, 1a 1a 1a 1a"),
        ("1a 1b 1a 1b", "1a, 1b, 1a"),
        ("1a 1a 1b 1b", "1a, 1a, 1b"),
        ("1a 1a", "1a, 1a"),
    ],
)
def test_a_turn_has_two_launches_of_16_mib_and_what_is_not_like_them(
    pair: Pair, chunks: str, launched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks by their MiB and their transfer."""
    packer, order = _packer(pair.source), a_move().pull.order
    seen = _launched(packer, monkeypatch)
    packer.begin_turn()
    for slot, said in enumerate(chunks.split()):
        if not packer.takes_more:
            break
        packer.submit(_job(said, slot, order))
    packer.launch()
    assert ", ".join(seen) == launched
    packer._jobs.clear()


def _job(said: str, slot: int, order: DenseOrder | None) -> ChunkJob:
    """Of a chunk by its MiB and its transfer."""
    move = a_move()
    first = chunk_list((move.pull,), 1 << 20)[0]
    return ChunkJob(
        owner=said[-1],
        key=key_of(ord(said[-1])),
        chunk=msgspec.structs.replace(first, nbytes=int(said[:-1]) << 20),
        slot=slot,
        side=move.copy_class.source,
        block_ids=np.zeros(1, np.int64),
        dense=torch.empty(1, dtype=torch.uint8),
        order=order,
    )


def _launched(packer: DevicePacker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is launched from now on, which is nothing in truth."""
    seen: list[str] = []

    def launch(*jobs: ChunkJob) -> None:
        seen.append(" ".join(f"{job.chunk.nbytes >> 20}{job.owner}" for job in jobs))

    monkeypatch.setattr(packer, "_launch", launch)
    return seen


def test_a_chunk_that_is_to_be_copied_first_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    # The end of its copy does
    with packing_pair(_with_ten_buffers, monkeypatch) as pair:
        packer, to_copy, wakes = _packer(pair.sink), list[ChunkJob](), list[None]()
        seen = _launched(packer, monkeypatch)
        monkeypatch.setattr(packer._to_copy, "submit", to_copy.append)
        monkeypatch.setattr(packer, "_wake", lambda: wakes.append(None))
        for slot in range(3):
            packer.submit(_job("1a", slot, None))
        assert wakes == []
        packer._copied.put(*to_copy)
        assert list(packer.drain()) == []
        assert seen == ["1a 1a 1a"]
        packer._jobs.clear()


@pytest.mark.parametrize("reaches_host", [True], indirect=True, ids=["reaches staging"])
def test_what_is_packed_leaves_before_more_is_packed(
    roomy_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have slots, and a launch takes the IO thread a while."""
    assert _num_packed_first(roomy_pair, monkeypatch) == 5


@pytest.mark.parametrize("reaches_host", [False], indirect=True, ids=["through pinned buffers"])
def test_through_pinned_buffers_a_pack_takes_another_turn(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _num_packed_first(pair, monkeypatch) == 4  # all that there is room for


def _num_packed_first(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks, before the first is sent."""
    seen = list[str]()
    packer, source = _packer(pair.source), pair.source
    pack, send = packer.submit, source.send_packed

    monkeypatch.setattr(packer, "submit", _noted(seen, "pack", pack))
    monkeypatch.setattr(source, "send_packed", _noted(seen, "send", send))
    pair.sink.submit_expect(read_request(key_of(1), a_move(), pair.manifest))
    source.submit_send(send_request(key_of(1), a_move()))
    assert isinstance(pair.end(key_of(1)), ReadDone)
    assert seen.count("pack") == seen.count("send") >= 9
    return seen.index("send")


def test_preparing_compiles_and_writes_nothing(pair: Pair) -> None:
    before = pair.content()
    _packer(pair.sink).prepare((a_move().copy_class,))
    assert pair.content() == before


def test_memory_of_other_devices_is_refused(pair: Pair) -> None:
    memory = LocalMemory((torch.empty(0, device="meta"),), ())
    with pytest.raises(
        TransportUnavailable, match=r"expected memory of a CPU or .*, got \['meta'\]"
    ):
        make_packer(memory, ZMQ, pair.copy_thread, pair.wake)
