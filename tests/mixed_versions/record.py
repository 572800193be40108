"""A conversation of protocol 1: what a sink says to a rank that gives KV, and what that answers.

    PYTHONPATH=TREE python tests/mixed_versions/record.py > tests/mixed_versions/protocol_1.golden

records it with the kvxfer of TREE, a version's whole tree, whose tests have the engine without a
model. What is random in a real conversation is written down here. Of the answers only the manifest
differs from run to run (ports, process, descriptor).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import zmq

from kvxfer.connector.records import ConnectorMetadata, NewOffer, OfferBlocks
from kvxfer.transfer import wire
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.plan import DenseOrder, PullClass, RegionName
from kvxfer.transports import stream_wire
from tests.builders import EngineShape
from tests.connector.rig import DIGEST, Engine

WIRES = ("shm", "zmq")
SOURCE_LIFE, SINK_LIFE = b"source-life-0001", b"sink-life-000001"
FIRST, SECOND, OTHER = (
    wire.OfferRef(b"nonce-%010d" % number, SOURCE_LIFE) for number in range(1, 4)
)
RANK = RankId(0, 0)
CONSUMER = wire.Consumer(SINK_LIFE, RANK)
NUM_TOKENS, BLOCK_IDS = 40, (5, 2, 7)
CLASS = PullClass(
    regions=tuple(RegionName(f"layers.{n}", (plane,)) for n in (0, 1) for plane in "kv"),
    head_lo=0,
    head_hi=2,
    inner_nbytes=8,
    order=DenseOrder(16, True),
    token_lo=8,
    token_hi=40,
)
TIMEOUT_MS = 60_000


@dataclass(frozen=True)
class Said:
    """One message: by whom (``>`` the sink, ``<`` the source), on which socket, its frames."""

    by: str
    socket: str
    name: str
    frames: tuple[bytes, ...]


def told_by_a_sink(transport: str) -> list[tuple[Said, tuple[str, ...]]]:
    """What a sink says, in order, and the sockets that answer it."""
    pull = partial(wire.Pull, consumer=CONSUMER, claim=(RANK,), digest=DIGEST, transport=transport)
    if transport == "zmq":
        pull = partial(pull, classes=(CLASS,), chunk_nbytes=4096)
    begin: list[tuple[str, wire.ToSource, tuple[str, ...]]] = [
        ("ping", wire.Ping(), ("control",)),
        ("hello", wire.Hello((1, 1), (wire.BIND_TOKENS,), "decode", SINK_LIFE), ("control",)),
        ("pull of another prompt", pull(offer=FIRST, digest=b"x" * 32), ("control",)),
        ("keep", wire.Keep((FIRST,), SINK_LIFE, 30.0, {FIRST.nonce: DIGEST}), ()),
        ("cancel", wire.Cancel(OTHER, SINK_LIFE, wire.Reason.CANCELLED, DIGEST), ()),
        ("pull of who knows nothing", pull(offer=OTHER), ("control",)),
    ]
    ask, release = wire.encode(pull(offer=FIRST)), wire.encode(wire.Release(FIRST, CONSUMER))
    again = wire.encode(pull(offer=SECOND, is_null=True, classes=(), transport="", chunk_nbytes=0))
    attach = stream_wire.Attach(stream_wire.STREAM_VERSION, 4, 1 << 20, "zmq")
    expect = stream_wire.Expect(FIRST.nonce, SINK_LIFE, str(RANK))
    credit = stream_wire.Credit((0,))
    reads: dict[str, list[tuple[str, str, bytes, tuple[str, ...]]]] = {
        "shm": [
            ("control", "pull", ask, ("control",)),
            ("control", "release", release, ("control",)),
        ],
        "zmq": [
            ("data", "attach", stream_wire.encode(attach), ()),
            ("data", "expect", stream_wire.encode(expect), ()),
            ("control", "pull", ask, ("control", "data", "data")),
            ("data", "credit", stream_wire.encode(credit), ()),
        ],
    }
    return [
        *((Said(">", "control", name, (wire.encode(m),)), answers) for name, m, answers in begin),
        *(
            (Said(">", socket, name, (frame,)), answers)
            for socket, name, frame, answers in reads[transport]
        ),
        (Said(">", "control", "pull of nothing", (again,)), ("control",)),
        (Said(">", "control", "garbage", (b"\xc1",)), ("control",)),
    ]


def converse(transport: str, recorded: Mapping[str, tuple[bytes, ...]]) -> list[Said]:
    """Talk to a rank of this kvxfer. ``recorded``: frames of the sink by name, which are said in
    place of those that this kvxfer would encode.
    """
    said: list[Said] = []
    with (
        Engine(
            EngineShape(),
            "prefill",
            fill=None,
            incarnation=SOURCE_LIFE,
            transport=transport,
            peer_silent_s=60.0,
        ) as source,
        zmq.Context() as context,
    ):
        for name, offer in (("first", FIRST), ("second", SECOND)):
            order = NewOffer(
                request_id=name, nonce=offer.nonce, num_tokens=NUM_TOKENS, digest=DIGEST
            )
            source.nonces[name] = offer.nonce
            blocks = OfferBlocks(name, (BLOCK_IDS,))
            source.step(ConnectorMetadata(offers=(order,), blocks=(blocks,)))
        source.compute("first", "second")
        endpoints = {"control": source.endpoint}
        endpoints["data"] = source.manifest.ranks[0].data_endpoints.get("zmq", source.endpoint)
        sockets: dict[str, zmq.Socket[bytes]] = {}
        for name, endpoint in endpoints.items():
            sockets[name] = context.socket(zmq.DEALER)
            sockets[name].linger = 0
            sockets[name].connect(endpoint)

        def hear(name: str, why: str) -> None:
            assert sockets[name].poll(TIMEOUT_MS), f"{transport} {why}: no answer on {name}"
            frames = tuple(sockets[name].recv_multipart())
            said.append(Said("<", name, f"answer to {why}", frames))

        for own, answers in told_by_a_sink(transport):
            told = replace(own, frames=recorded.get(own.name, own.frames))
            said.append(told)
            sockets[told.socket].send_multipart(told.frames)
            for name in answers:
                hear(name, told.name)
        source.end("second", wire.Reason.PREEMPTED)
        hear("control", "the end of the offer")
        for socket in sockets.values():
            socket.close()
    return said


def lines(transport: str, said: list[Said]) -> list[str]:
    """For the golden file."""
    return [
        f"{transport} {each.by} {each.socket} {each.name}: "
        + " ".join(frame.hex() for frame in each.frames)
        for each in said
    ]


def read_lines(text: str) -> dict[str, list[Said]]:
    """The other way: by transport."""
    recorded: dict[str, list[Said]] = {transport: [] for transport in WIRES}
    for line in text.splitlines():
        head, _, frames = line.partition(": ")
        transport, by, socket, name = head.split(" ", 3)
        parts = tuple(bytes.fromhex(frame) for frame in frames.split(" "))
        recorded[transport].append(Said(by, socket, name, parts))
    return recorded


if __name__ == "__main__":
    for each in WIRES:
        sys.stdout.write("\n".join(lines(each, converse(each, {}))) + "\n")
