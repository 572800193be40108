"""The contract of a wire: it moves bytes and reports completions; it knows no offers or leases.

Two kinds, with a contract for each. On a *direct* wire the sink maps the source's memory and reads
it (:class:`DirectSource`, :class:`DirectSink`). On a *stream* wire the source packs chunks into
staging and sends them, the sink scatters them into its pool (:class:`SendingSource`,
:class:`ReceivingSink`). Wires are driven by the IO thread of a worker:

- ``submit``-like calls never block; work on KV runs in jobs of at most ``JOB_NBYTES`` on the
  :class:`CopyThread`, or at once where it is small;
- ``pollables()`` are sockets and file descriptors that the IO thread polls for reading; ``poll()``
  handles what has arrived and returns the completions since the last call. A transport calls
  ``wake`` (given when it is made) from any thread when a poll would return something.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
import zmq

from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.cuda_driver import StreamEvent
from kvxfer.transfer.chunks import CHUNK_TOKENS
from kvxfer.transfer.costs import Staging, StagingBounds, WireCosts
from kvxfer.transfer.manifest import MemoryHandle, MemoryInfo, RankManifest
from kvxfer.transfer.plan import ALL, CopyClass, PullClass, Side
from kvxfer.transfer.wire import Reason
from kvxfer.transports.visitors import DEALER_LOOK_S, LOOK_S

TRIAL_NBYTES = 4 << 20
"""The large message of a trial: a millisecond or two, enough to tell one wire from another."""
TRIAL_SMALL_NBYTES = 64 << 10
"""The small one, whose time is mostly the wire's latency."""

JOB_NBYTES = 64 << 20
"""The largest piece of copying between two looks at the cancel flag (about 10 ms on a CPU)."""

Wake = Callable[[], None]
Readable = zmq.Socket[bytes] | int
"""A socket, or a file descriptor."""


class TransferKey(msgspec.Struct, frozen=True):
    """One read of one route: (nonce, sink incarnation, sink rank as text, source rank as text).

    Never reused. ``piece``: on direct wires, what opens of an offer is a read of its own.
    """

    nonce: bytes
    incarnation: bytes
    sink_rank: str
    source_rank: str
    piece: int = 0


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """This rank's memories in the order of its manifest.

    Flat uint8 tensors, and the manifest's record of each.
    """

    tensors: tuple[torch.Tensor, ...]
    infos: tuple[MemoryInfo, ...]

    @property
    def device(self) -> torch.device:
        """The device of all memories. Raises ValueError unless there is exactly one."""
        devices = {tensor.device for tensor in self.tensors}
        if len(devices) != 1:
            listed = ", ".join(sorted(map(str, devices))) or "none"
            raise ValueError(f"memory: expected all of it on one device, got {listed}")
        return devices.pop()

    def require(self, transport: str, device_type: str) -> None:
        """Raises TransportUnavailable unless all of it lies on that type of device."""
        for tensor in self.tensors:
            if tensor.device.type != device_type:
                raise TransportUnavailable(
                    f"{transport}: expected {device_type} memory, got memory on {tensor.device}"
                )


def kind_of(device: str) -> str:
    """The kind of a device, ``cpu`` or ``cuda``, from its name in manifests."""
    return device.partition(":")[0]


# --------------------------------------------------- what the source side is asked to send


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Pack and send one route.

    ``sides[i]`` is this rank's side of ``classes[i]``; block ids are by source group. Chunks with
    tokens from ``open_tokens`` on wait for ``grow_send``.
    """

    key: TransferKey
    classes: tuple[PullClass, ...]
    sides: tuple[Side, ...]
    block_ids: tuple[tuple[int, ...], ...]
    chunk_nbytes: int
    open_tokens: int = ALL
    part_tokens: int = CHUNK_TOKENS


class Packed(msgspec.Struct, frozen=True):
    """A chunk lies in staging; answer with ``send_packed`` or ``drop_packed``."""

    key: TransferKey
    sequence: int


class Sent(msgspec.Struct, frozen=True):
    """Every chunk has been handed to the wire; the pool is not needed any more."""

    key: TransferKey
    nbytes: int


class SendStopped(msgspec.Struct, frozen=True):
    """After ``stop_send`` or a failure: nothing of this transfer touches the pool any more."""

    key: TransferKey
    reason: Reason | None


SourceCompletion = Packed | Sent | SendStopped


@dataclass(frozen=True, slots=True)
class DirectSource:
    """The giving side of a direct wire on one rank: memory that sinks map, and nothing to do.

    ``handles``: for the manifest, one for each memory.
    """

    name: str
    handles: tuple[MemoryHandle, ...]


class SendingSource(ABC):
    """The giving side of a stream wire on one rank."""

    name: str
    staging_nbytes: int = 0
    """Of all connections at the last ``inspect``; for metrics."""
    counts: Counter[str]
    """What was dropped or refused, by reason; for metrics."""
    is_settled: bool = True
    """Sinks have taken all that was sent to them: nothing of it is lost with this process."""
    can_grow: bool = False
    """It has ``grow_send``. If not, it is asked to send only what is complete."""
    look_s: float = LOOK_S
    """When ``inspect`` is due again."""
    has_more: bool = False
    """The next ``poll`` packs at once, and what the one before has reported is to leave first."""

    @abstractmethod
    def data_endpoint(self) -> str:
        """Where sinks attach, as ``tcp://host:port``; stands in the manifest."""

    @abstractmethod
    def pollables(self) -> Sequence[Readable]:
        """What the IO thread polls for reading."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether ``poll`` has nothing to do until one of ``pollables`` can be read or another
        method is called; then it need not be called.
        """

    @abstractmethod
    def submit_send(self, request: SendRequest) -> None:
        """Begin to pack; each packed chunk is reported as Packed. The caller has checked the ids.

        Raises ProtocolError for chunk sizes out of bounds.
        """

    def grow_send(
        self, key: TransferKey, block_ids: tuple[tuple[int, ...], ...], open_tokens: int
    ) -> None:
        """Tokens before ``open_tokens`` are open now, and have these blocks: those of before, and
        more. An unknown key is ignored.
        """
        raise NotImplementedError(f"{self.name}: can_grow is False")

    @abstractmethod
    def send_packed(self, key: TransferKey, sequence: int) -> None:
        """The offer is open: send the chunk."""

    @abstractmethod
    def drop_packed(self, key: TransferKey, sequence: int) -> None:
        """The offer is over: the chunk is discarded, and no more of this transfer is packed."""

    @abstractmethod
    def stop_send(self, key: TransferKey) -> None:
        """Stop; SendStopped follows, at once or after the running job. Unknown keys get it too.

        A key that was just reported as Sent is unknown.
        """

    @abstractmethod
    def poll(self) -> list[SourceCompletion]:
        """What happened since the last call. Never blocks."""

    @abstractmethod
    def inspect(self) -> None:
        """End connections held without use."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; running jobs are waited for."""


SourceTransport = DirectSource | SendingSource


# --------------------------------------------------- what the sink side is asked to read


class ReadRequest(msgspec.Struct, frozen=True):
    """Read one route into this rank's pool.

    ``source_ids`` by source group (empty on stream wires), ``sink_ids`` by sink group; both
    positional from the request's first token. ``pull_classes[i]`` is the record in the Pull for
    ``classes[i]``, and says which tokens. ``after``: on a GPU, an event that must be over before
    the pool is written; it is not recorded again.
    """

    key: TransferKey
    source: RankManifest
    classes: tuple[CopyClass, ...]
    pull_classes: tuple[PullClass, ...]
    source_ids: tuple[tuple[int, ...], ...]
    sink_ids: tuple[tuple[int, ...], ...]
    chunk_nbytes: int
    after: StreamEvent | None = None
    part_tokens: int = CHUNK_TOKENS


class Progress(msgspec.Struct, frozen=True):
    """How many bytes of a read are in place. Each report restarts the deadline."""

    key: TransferKey
    nbytes: int


class ReadDone(msgspec.Struct, frozen=True):
    """Everything is in place.

    ``certified``: the read is valid without a verdict of the source (stream wires).
    """

    key: TransferKey
    nbytes: int
    certified: bool


class ReadBroke(msgspec.Struct, frozen=True):
    """The read failed and nothing of it is in flight any more."""

    key: TransferKey
    reason: Reason
    detail: str


class ReadStopped(msgspec.Struct, frozen=True):
    """After ``stop_read``: nothing of this read can write the pool any more."""

    key: TransferKey


class Held(Protocol):
    """A resource that its holder has to close."""

    def close(self) -> None:
        """Close it, from any thread; may take milliseconds. Idempotent."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a wire costs, measured with bytes that it has moved.

    ``path``: what carried them, for a wire that has several ("TCP"); shown to people only. ``way``:
    which of its pipe's ways was taken, for ``Staging``; "" where there is only one. ``held``: what
    is still open, so that ``attach`` need not open it anew. The caller of ``trial`` owns it until
    ``attach``, the wire from then on. Stream wires keep nothing open.
    """

    costs: WireCosts
    path: str = ""
    way: str = ""
    held: tuple[Held, ...] = ()

    def close(self) -> None:
        """Close what the trial holds, all of it also where one raises: nobody will attach with it.
        Idempotent.
        """
        with ExitStack() as closing_all:
            for each in self.held:
                closing_all.callback(each.close)


class PeerGone(msgspec.Struct, frozen=True):
    """The connection to a source rank ended (its control endpoint names it)."""

    control_endpoint: str


SinkCompletion = Progress | ReadDone | ReadBroke | ReadStopped | PeerGone


class TakingSide(ABC):
    """What the sinks of both kinds of wires have in common."""

    name: str
    counts: Counter[str]
    """What was dropped or refused, by reason; for metrics."""

    @abstractmethod
    def trial(
        self, source: RankManifest, timeout_s: float, classes: Sequence[CopyClass] = ()
    ) -> Trial:
        """Move real bytes from the source rank and time them; keeps nothing open but
        ``Trial.held``. Also compiles the kernels that copies of these classes need, if any.

        May be called from any thread, blocks for at most about ``timeout_s`` and touches neither
        pool nor reads. Raises TransportUnavailable with the reason.
        """

    @abstractmethod
    def detach(self, control_endpoint: str) -> None:
        """Forget a source rank; its unfinished reads end as ReadBroke.

        Mappings close when no copy runs on them any more.
        """

    @abstractmethod
    def stop_read(self, key: TransferKey) -> None:
        """Stop; ReadStopped follows, at once or after the running job.

        Unknown keys get ReadStopped too.
        """

    def pollables(self) -> Sequence[Readable]:
        return ()

    @property
    def is_idle(self) -> bool:
        """Whether ``poll`` has nothing to do until one of ``pollables`` can be read or another
        method is called; then the IO thread need not call it. False if unknown.
        """
        return False

    @abstractmethod
    def poll(self) -> list[SinkCompletion]:
        """What happened since the last call. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; running jobs are waited for."""


class DirectSink(TakingSide):
    """The taking side of a direct wire on one rank: it copies by itself."""

    is_quick: bool = False
    """Whether ``submit_read`` and ``look`` take microseconds and wait for nothing, so that the
    engine's thread may call them in the IO thread's place.
    """

    @abstractmethod
    def attach(self, source: RankManifest, trial: Trial | None = None) -> None:
        """Map the source rank's memory; idempotent.

        ``trial``: a trial of this wire to this rank. The wire owns its ``held`` from now on, even
        if this raises. Raises TransportUnavailable with the reason.
        """

    @abstractmethod
    def submit_read(self, request: ReadRequest) -> None:
        """Start the copy of a granted read; never blocks."""

    def copied(self, keys: Collection[TransferKey]) -> StreamEvent | None:
        """An event behind all copies of these reads; None where not all are on a stream of a GPU
        yet, or the host copies.
        """
        return None

    def look(self) -> list[SinkCompletion]:
        """As ``poll``, but without a wait for copies that are about to end."""
        return self.poll()


class ReceivingSink(TakingSide):
    """The taking side of a stream wire on one rank: the source sends."""

    staging_nbytes: int = 0
    """Of all connections at the last ``inspect``; for metrics."""
    look_s: float = DEALER_LOOK_S
    """When ``inspect`` is due again."""

    @abstractmethod
    def staging_bounds(self, source: RankManifest) -> StagingBounds:
        """The bounds for the staging of a connection to this rank."""

    @abstractmethod
    def attach(self, source: RankManifest, staging: Staging | None = None) -> None:
        """Connect to the source rank; idempotent.

        ``staging``: chosen by the trial's costs and ``way``; None: the settings, or the defaults.
        Raises TransportUnavailable with the reason.
        """

    @abstractmethod
    def submit_expect(self, request: ReadRequest) -> None:
        """Called BEFORE the Pull is sent: chunks may overtake the Grant."""

    @abstractmethod
    def inspect(self) -> None:
        """Drop sources that send too much."""


SinkTransport = DirectSink | ReceivingSink
