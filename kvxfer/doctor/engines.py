"""Two engines without a model: one that waits to be met, and one that meets another as loads do.

Both are a rank of the product, whose first contact checks, tries and chooses. No offer is made and
nothing is loaded: an engine in service sees what it sees of every new decode engine.
"""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import zmq

from kvxfer.config import Config
from kvxfer.connector.access import check_host, check_introduction, check_owners
from kvxfer.connector.control import HARD_LIMIT_NBYTES
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.peer import HELLO_AGAIN_S, Peer
from kvxfer.connector.peer_session import Failure
from kvxfer.connector.peers import TRIALS_S
from kvxfer.connector.rank_service import RankService
from kvxfer.connector.records import ConnectorMetadata, Identity, SourceRef
from kvxfer.engine.rpc import RequestRefused, decode_to_client
from kvxfer.errors import ProtocolError
from kvxfer.tensors.shared_memory import make_pool
from kvxfer.transfer import wire
from kvxfer.transfer.layout import Region
from kvxfer.transfer.manifest import CacheFacts, EngineManifest, RankId
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import LocalMemory
from kvxfer.transports.channel import Bounds, Dealer
from kvxfer.transports.choice import Choice
from kvxfer.transports.guard import pinned_keys

_ENGINE_ID = "kvxfer-doctor"
BLOCK_TOKENS = 16
# 128 KiB for each token, as Llama-3-8B has; 32 MiB in all, which the longest trial copies
_POOL = Region(
    layer="all",
    plane="kv",
    group=0,
    memory=0,
    offset=0,
    num_blocks=16,
    block_tokens=BLOCK_TOKENS,
    head_lo=0,
    head_hi=8,
    inner_nbytes=16 << 10,
    stride_block=BLOCK_TOKENS * (128 << 10),
    stride_head=BLOCK_TOKENS * (16 << 10),
    stride_token=16 << 10,
)
FACTS = CacheFacts(
    model=_ENGINE_ID,
    weights="none",
    rope="none",
    dtype="uint8",
    quantisation="none",
    num_kv_heads=_POOL.head_hi,
    head_size=_POOL.inner_nbytes,
    num_layers=1,
)
_REQUEST_PORT = (
    "expected the port of its KV, got the one where it takes requests; name the address that its "
    "first line gives after 'KV at'"
)
Choices = dict[str, Choice]
"""By the rank of the peer, as text."""


def _rank(config: Config, identity: Identity, device: torch.device) -> RankService:
    pool = make_pool(device, _POOL.end)
    memory = LocalMemory((pool.tensor,), (pool.info,))
    return RankService(config, Ledger(), identity, (_POOL,), memory, can_leave_unhashed=True)


def _says(config: Config) -> dict[str, Any]:
    names = (wire.BIND_TOKENS,) if config.bind_tokens else ()
    return {"protocol": (wire.PROTOCOL_MIN, wire.PROTOCOL_MAX), "capabilities": names}


@contextmanager
def waiting(config: Config, device: torch.device) -> Iterator[str]:
    """An engine that can be met until the end; its endpoint. Where engines are known by their keys,
    it has the name that goes with its own key.
    """
    names = {key: name for name, key in (config.curve_server_keys or {}).items()}
    engine_id = names.get(config.curve_public_key or "", _ENGINE_ID)
    identity = Identity(engine_id, secrets.token_bytes(16), RankId(0, 0))
    service = _rank(config, identity, device)
    try:
        manifest = EngineManifest(
            engine_id=engine_id,
            incarnation=identity.incarnation,
            **_says(config),
            facts=FACTS,
            tp_size=1,
            pp_size=1,
            block_tokens=BLOCK_TOKENS,
            layout="HND",
            ranks=(service.manifest,),
        )
        service.carry_out(ConnectorMetadata(manifest=manifest))
        yield service.manifest.control_endpoint
    finally:
        service.shutdown()


@dataclass(frozen=True, slots=True)
class _Greeted:
    """Who listens somewhere. ``has_curve``: whether it has shown a key."""

    manifest: EngineManifest
    hello_s: float
    has_curve: bool


@contextmanager
def greeting(config: Config, endpoint: str) -> Iterator[_Greeted | Failure]:
    """Ask who listens there. Raises PermissionError and IncompatiblePeer as a first contact does
    (``connector.access``) for a place, or an answer, that this engine would not take.
    """
    check_host(config, endpoint)
    check_owners(config, [endpoint], are_up=False)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with ExitStack() as stack:
            answer = _greet(context, config, endpoint, stack)
    finally:
        context.destroy(linger=0)
    if isinstance(answer, _Greeted):
        check_introduction(config, answer.manifest.engine_id, endpoint, answer.manifest)
    yield answer


def _greet(
    context: zmq.Context[zmq.Socket[bytes]], config: Config, endpoint: str, stack: ExitStack
) -> _Greeted | Failure:
    """Over a connection for each key that it may have: its name, and so its key, is not known."""
    began_s = time.monotonic()
    until_s = began_s + config.connect_timeout_s
    said = _says(config)
    hello = wire.encode(
        wire.Hello(said["protocol"], said["capabilities"], _ENGINE_ID, secrets.token_bytes(16))
    )
    bounds = Bounds(HARD_LIMIT_NBYTES, HARD_LIMIT_NBYTES, 1000)
    dealers = {
        key: Dealer(
            context, config, bounds, endpoint, key, word=wire.encode(wire.Ping()), reconnects=True
        )
        for key in pinned_keys(config) or (None,)
    }
    for dealer in dealers.values():
        stack.callback(dealer.close)
        dealer.send(hello)
    why: str | None = None
    while why is None and time.monotonic() < until_s:
        time.sleep(0.001)
        for key, dealer in dealers.items():
            for message in _heard(dealer):
                match message:
                    case wire.Manifest(manifest):
                        return _Greeted(manifest, time.monotonic() - began_s, key is not None)
                    case wire.NotReady():
                        dealer.problem = "it is starting; try again when its ranks are up"
                        time.sleep(HELLO_AGAIN_S)
                        dealer.send(hello)
                    case wire.Malformed(detail):
                        return Failure(Reason.INCOMPATIBLE, f"{endpoint}: {detail}")
            why = why or dealer.why_ended()
    is_refused = any(dealer.is_refused for dealer in dealers.values())
    if why is None:
        problems = sorted({dealer.problem for dealer in dealers.values()} - {""})
        why = f"it did not say within {config.connect_timeout_s:g} s who it is"
        why = ": ".join([why, *problems])
    return Failure(Reason.NOT_ALLOWED if is_refused else Reason.PEER_LOST, f"{endpoint}: {why}")


def _heard(dealer: Dealer) -> Iterator[object]:
    """Messages of the protocol; Malformed, as if the other side had said so, for any other."""
    frame = b""
    try:
        for frames in dealer.receive():
            frame = frames[0].bytes
            yield wire.decode_to_sink(frame)
    except ProtocolError as exc:
        yield wire.Malformed(_REQUEST_PORT if _takes_requests(frame) else str(exc))


def _takes_requests(frame: bytes) -> bool:
    """Whether a reference engine says on its request channel that it does not understand."""
    try:
        return isinstance(decode_to_client(frame, ""), RequestRefused)
    except ProtocolError:
        return False


@contextmanager
def meeting(config: Config, endpoint: str, device: torch.device) -> Iterator[Choices | Failure]:
    """Meet every rank of the peer as a decode engine of its shape, up to where loads could begin:
    what was chosen for each. Raises TransportUnavailable for a wire that cannot be had here.
    """
    choices: Choices = {}
    answer: Choices | Failure = choices
    with greeting(config, endpoint) as greeted:
        if isinstance(greeted, Failure):
            yield greeted
            return
    for entry in greeted.manifest.ranks:
        found = _meet(config, greeted.manifest, endpoint, entry.rank, device)
        if isinstance(found, Failure):
            answer = found
            break
        choices |= found
    yield answer


def contact_s(config: Config) -> float:
    """What meeting a rank may take: the product's own bound, and a second to tell of it."""
    return config.connect_timeout_s + TRIALS_S + 1.0


def _meet(
    config: Config, manifest: EngineManifest, endpoint: str, rank: RankId, device: torch.device
) -> Choices | Failure:
    """The wires to what this rank of a decode engine of the same shape reads."""
    me = Identity(_ENGINE_ID, secrets.token_bytes(16), rank)
    own = msgspec.structs.replace(
        manifest, engine_id=me.engine_id, incarnation=me.incarnation, **_says(config)
    )
    offer = wire.OfferRef(secrets.token_bytes(16), manifest.incarnation)  # it is never asked for
    source = SourceRef(
        engine_id=manifest.engine_id,
        endpoint=endpoint,
        offer=offer,
        num_tokens=0,
        curve_public_key=manifest.rank(RankId(0, 0)).curve_public_key,
    )
    found: queue.SimpleQueue[Choices | Failure] = queue.SimpleQueue()

    def tell(met: Peer | Failure) -> None:
        if isinstance(met, Failure):
            found.put(met)
            return
        bare = {  # what a trial holds open belongs to the wire by now
            str(rank): replace(choice, trial=replace(choice.trial, held=()))
            for rank, choice in met.choices.items()
        }
        found.put(bare)

    service = _rank(config, me, device)
    try:
        service.meet(own, source, tell)
        return found.get(timeout=contact_s(config))
    except queue.Empty:
        return Failure(Reason.DEADLINE, f"{endpoint}: the first contact did not end")
    finally:
        service.shutdown()
