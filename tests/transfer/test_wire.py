"""The messages of versions 1 and 2: golden files guard the bytes, hostile frames are refused, never
fatal.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.errors import ProtocolError
from kvxfer.transfer.layout import Region
from kvxfer.transfer.manifest import (
    CacheFacts,
    EngineManifest,
    MemfdHandle,
    MemoryInfo,
    RankId,
    RankManifest,
)
from kvxfer.transfer.plan import DenseOrder, PullClass, RegionName
from kvxfer.transfer.wire import (
    Broken,
    Cancel,
    Consumer,
    Drain,
    Draining,
    Find,
    Found,
    Grant,
    Hello,
    Keep,
    Malformed,
    Manifest,
    NotReady,
    OfferRef,
    Ping,
    Pong,
    Pull,
    Reason,
    Refuse,
    Release,
    ToSink,
    ToSource,
    Verdict,
    Verify,
    decode_to_sink,
    decode_to_source,
    encode,
    is_addressed_to,
)

GOLDEN = [Path(__file__).with_name(f"wire_v{version}.golden") for version in (1, 2)]

SOURCE_LIFE, SINK_LIFE = b"source-life-0001", b"sink-life-000001"
OFFER = OfferRef(b"nonce-0123456789", SOURCE_LIFE)
CONSUMER = Consumer(SINK_LIFE, RankId(0, 1))
PULL = Pull(
    offer=OFFER,
    consumer=CONSUMER,
    claim=(RankId(0, 0), RankId(0, 1)),
    digest=b"\x01\x02",
    transport="zmq",
    classes=(
        PullClass(
            regions=(RegionName("model.layers.0", ("k", "v")),),
            head_lo=0,
            head_hi=2,
            inner_nbytes=128,
            order=DenseOrder(16, True),
            token_lo=32,
            token_hi=70,
        ),
    ),
    chunk_nbytes=1 << 20,
)
REGION = Region(
    layer="model.layers.0",
    plane="k",
    group=0,
    memory=0,
    offset=4096,
    num_blocks=64,
    block_tokens=16,
    head_lo=0,
    head_hi=2,
    inner_nbytes=128,
    stride_block=4096,
    stride_head=2048,
    stride_token=128,
)
MANIFEST = EngineManifest(
    engine_id="prefill",
    incarnation=SOURCE_LIFE,
    protocol=(1, 1),
    capabilities=("zmq", "shm"),
    facts=CacheFacts(
        model="tiny",
        weights="seed0",
        rope="10000",
        dtype="float32",
        quantisation="none",
        num_kv_heads=2,
        head_size=32,
        num_layers=1,
    ),
    tp_size=1,
    pp_size=1,
    block_tokens=16,
    layout="HND",
    ranks=(
        RankManifest(
            rank=RankId(0, 0),
            control_endpoint="tcp://127.0.0.1:5700",
            data_endpoints={"zmq": "tcp://127.0.0.1:5701"},
            memories=(
                MemoryInfo(
                    device="cpu",
                    nbytes=266240,
                    handle=MemfdHandle(
                        boot_id="boot", pid=12, fd=3, nbytes=266240, nonce=b"0123456789abcdef"
                    ),
                ),
            ),
            regions=(REGION,),
        ),
    ),
)

BY_CHANNEL = msgspec.structs.replace(REGION, stride_token=4, channel_nbytes=4, stride_channel=64)
MANIFEST_BY_CHANNEL = msgspec.structs.replace(
    MANIFEST, ranks=(msgspec.structs.replace(MANIFEST.ranks[0], regions=(REGION, BY_CHANNEL)),)
)
PULL_BY_CHANNEL = msgspec.structs.replace(
    PULL,
    classes=(msgspec.structs.replace(PULL.classes[0], order=DenseOrder(16, False, 4)),),
)
DECODED_ONLY = {"manifest"}
"""Frames from before regions knew channels: still understood, no longer written."""

TO_SOURCE: dict[str, ToSource] = {
    "hello": Hello((1, 1), ("zmq",), "decode", SINK_LIFE),
    "pull": PULL,
    "pull null": Pull(
        offer=OFFER,
        consumer=CONSUMER,
        claim=(RankId(0, 1),),
        digest=b"",
        transport="",
        is_null=True,
    ),
    "pull verified": msgspec.structs.replace(PULL, verify=Verify(16, PULL.classes)),
    "release": Release(OFFER, CONSUMER),
    "cancel": Cancel(OFFER, SINK_LIFE, Reason.LOCAL_HIT),
    "cancel of who knows the tokens": Cancel(OFFER, SINK_LIFE, Reason.LOCAL_HIT, b"digest"),
    "keep": Keep((OFFER, OFFER), SINK_LIFE, 30.0),
    "keep of who knows the tokens": Keep((OFFER,), SINK_LIFE, 30.0, {OFFER.nonce: b"digest"}),
    "ping": Ping(),
    "pull by channel": PULL_BY_CHANNEL,
    "drain": Drain(),
    "hello of version 2": Hello((1, 2), ("zmq",), "decode", SINK_LIFE),
    "pull of what grows": msgspec.structs.replace(PULL, grows=True),
    "find": Find(b"of-the-router-01", SINK_LIFE, b"digest"),
}
TO_SINK: dict[str, ToSink] = {
    "manifest": Manifest(MANIFEST),
    "not_ready": NotReady(),
    "grant": Grant(OFFER, CONSUMER, ((5, 3, 4000), (-1, 7)), num_tokens=70),
    "refuse": Refuse(OFFER, CONSUMER, Reason.TOKENS, "digest differs"),
    "verdict valid": Verdict(OFFER, CONSUMER, True),
    "verdict invalid": Verdict(OFFER, CONSUMER, False, Reason.EXPIRED),
    "verdict with digests": Verdict(OFFER, CONSUMER, True, digests=(0, 2**64 - 1)),
    "broken": Broken(OFFER, Reason.PREEMPTED, CONSUMER),
    "pong": Pong(SOURCE_LIFE),
    "malformed": Malformed("control frame: truncated"),
    "manifest by channel": Manifest(MANIFEST_BY_CHANNEL),
    "draining": Draining(3, is_heard=True),
    "grant of what grows": Grant(OFFER, CONSUMER, ((5, 3), (-1,)), num_tokens=70, open_tokens=32),
    "found": Found(b"of-the-router-01", SINK_LIFE, OFFER, 70),
    "found none": Found(
        b"of-the-router-01", SINK_LIFE, None, reason=Reason.UNKNOWN, detail="no such request"
    ),
}


def golden() -> dict[str, bytes]:
    """Name -> frame, as this version wrote them when it was fixed."""
    lines = (line.split(": ") for file in GOLDEN for line in file.read_text().splitlines())
    return {name: bytes.fromhex(frame) for name, frame in lines}


def test_the_bytes_of_both_versions_are_fixed() -> None:
    frames = golden()
    messages: dict[str, ToSource | ToSink] = {**TO_SOURCE, **TO_SINK}
    assert frames.keys() == messages.keys()
    assert {name: encode(m).hex() for name, m in messages.items() if name not in DECODED_ONLY} == {
        name: frame.hex() for name, frame in frames.items() if name not in DECODED_ONLY
    }
    for name, message in TO_SOURCE.items():
        assert decode_to_source(frames[name]) == message
    for name, sent in TO_SINK.items():
        assert decode_to_sink(frames[name]) == sent


def test_the_golden_file_has_every_message() -> None:
    messages = [*TO_SOURCE.values(), *TO_SINK.values()]
    assert {type(m) for m in messages} == {*ToSource.__args__, *ToSink.__args__}


@pytest.mark.parametrize("name", [*TO_SOURCE, *TO_SINK])
def test_unknown_fields_are_ignored(name: str) -> None:
    """A later version may add fields: named ones to a message, and at the end of a reference."""
    decode = decode_to_source if name in TO_SOURCE else decode_to_sink
    raw = msgspec.msgpack.decode(golden()[name])
    raw["added_later"] = {"x": [1, None]}
    if raw.get("offer"):
        raw["offer"].append("added later")
    message = {**TO_SOURCE, **TO_SINK}[name]
    assert decode(msgspec.msgpack.encode(raw)) == message


@pytest.mark.parametrize("decode", [decode_to_source, decode_to_sink])
def test_unknown_tags_are_refused(decode: Any) -> None:  # noqa: ANN401
    with pytest.raises(ProtocolError, match="control frame: Invalid value 'push'"):
        decode(msgspec.msgpack.encode({"type": "push"}))
    with pytest.raises(ProtocolError, match="control frame: Object missing required field `type`"):
        decode(msgspec.msgpack.encode({}))


def test_each_side_takes_only_what_is_for_its_side() -> None:
    for message in TO_SINK.values():
        with pytest.raises(ProtocolError):
            decode_to_source(encode(message))
    for sent in TO_SOURCE.values():
        with pytest.raises(ProtocolError):
            decode_to_sink(encode(sent))


def _changed(name: str, **fields: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(golden()[name]), **fields})


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (_changed("keep", lease_s=-1.0), r"`float` >= 0.0 - at `\$.lease_s`"),
        (_changed("keep", lease_s=math.nan), r"at `\$.lease_s`"),
        (_changed("keep", lease_s=math.inf), r"at `\$.lease_s`"),
        (_changed("keep", incarnation=b""), r"length >= 1 - at `\$.incarnation`"),
        (_changed("cancel", offer=[b"n" * 65, b"i"]), r"length <= 64 - at `\$.offer\[0\]`"),
        (_changed("cancel", offer=[b"n"]), r"at `\$.offer`"),
        (_changed("cancel", reason="bored"), r"'bored' - at `\$.reason`"),
        (_changed("pull", chunk_nbytes=-1), r"at `\$.chunk_nbytes`"),
        (_changed("pull", digest=b"d" * 65), r"at `\$.digest`"),
        (_changed("pull", transport="t" * 1025), r"at `\$.transport`"),
        (_changed("pull", claim=[[0, "1"]]), r"got `str` - at `\$.claim\[0\]\[1\]`"),
    ],
)
def test_what_is_wrong_is_named(frame: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode_to_source(frame)


@pytest.mark.parametrize("name", [*TO_SOURCE, *TO_SINK])
def test_every_truncation_is_refused(name: str) -> None:
    decode = decode_to_source if name in TO_SOURCE else decode_to_sink
    frame = golden()[name]
    for nbytes in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:nbytes])
    with pytest.raises(ProtocolError):
        decode(frame + b"\x00")


def _decodes_or_is_refused(frame: bytes) -> None:
    for decode in (decode_to_source, decode_to_sink):
        try:
            message = decode(memoryview(frame))
        except ProtocolError:
            continue
        assert decode(encode(message)) == message


def test_deep_nesting_is_refused() -> None:
    _decodes_or_is_refused(b"\x91" * 100_000)
    _decodes_or_is_refused(b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 100_000 + b"\xc0")


@pytest.mark.parametrize("name", ["grant", "refuse", "verdict valid", "broken"])
def test_an_answer_is_for_one_rank_in_one_life(name: str) -> None:
    message: Any = TO_SINK[name]
    life, rank = message.consumer.incarnation, message.consumer.rank
    assert is_addressed_to(message, Consumer(life, rank))
    assert not is_addressed_to(message, Consumer(SOURCE_LIFE, rank))
    assert not is_addressed_to(message, Consumer(life, RankId(rank.pp, rank.tp + 1)))


def test_an_offer_may_be_broken_for_everybody() -> None:
    assert is_addressed_to(Broken(OFFER, Reason.SHUTDOWN), Consumer(b"any life", RankId(0, 7)))
