"""Every decoder of bytes and texts that come from outside of a process, as data.

``SITES`` are the calls in which the code parses something; the test beside this finds them in the
code and wants each one here, in a decoder or among those that need none.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import zmq
import zmq.auth

import kvxfer
from kvxfer.cli.options import parse_address as parse_host_port
from kvxfer.cli.prompts import load_prompts, load_trace
from kvxfer.config import Config, load_config
from kvxfer.connector.access import Listeners, check_host, check_introduction
from kvxfer.connector.board import NUM_SLOTS, SLOT_NBYTES, BoardView, Posted, PostedDigests
from kvxfer.connector.given_offer import PullRefused, asked_of, read_pull
from kvxfer.connector.params import (
    LoadWanted,
    early_params,
    make_params,
    parse_params,
    prefill_params,
)
from kvxfer.connector.records import ConnectorMetadata, SourceRef, Unhold
from kvxfer.engine.model_config import load_model_config
from kvxfer.engine.rpc import Abort, Ask, Generate, RpcServer, Token, decode_to_client
from kvxfer.engine.weights import weight_files
from kvxfer.errors import (
    ConfigError,
    IncompatiblePeer,
    ModelError,
    ProtocolError,
    TransportUnavailable,
    UnknownEngine,
)
from kvxfer.integrations.vllm.settings import split_settings
from kvxfer.plan.geometry import parse_geometry
from kvxfer.proxy.bodies import (
    COMPLETIONS,
    ErrorReply,
    NoKv,
    learned_params,
    parse_body,
    read_params,
)
from kvxfer.proxy.settings import Side, parse_engines
from kvxfer.tensors.shared_memory import SharedPool, open_shared
from kvxfer.transfer import wire
from kvxfer.transfer.manifest import MemfdHandle, parse_endpoint
from kvxfer.transfer.plan import RegionName
from kvxfer.transfer.pull import PullResolver
from kvxfer.transports import stream_wire
from kvxfer.transports.base import SendingSource
from kvxfer.transports.guard import user_of, why_refused
from kvxfer.transports.key_folder import CURRENT, read_keys
from kvxfer.transports.native_peers import parse_address
from kvxfer.transports.nixl_agent import Area
from kvxfer.transports.nixl_pipe import Address
from kvxfer.transports.pipe import PipeBroken
from kvxfer.transports.stream_wire import data_endpoint_of
from kvxfer.transports.ucx_pipe import SinkAddress, SourceAddress, UcxMail
from tests.hostile.mutation import Form
from tests.rpc_messages import DONE, INFO
from tests.transfer.test_wire import MANIFEST, OFFER, PULL, TO_SINK, TO_SOURCE, golden

pack = msgspec.msgpack.encode
_ENGINE_ID = MANIFEST.engine_id
_ENDPOINT = MANIFEST.ranks[0].control_endpoint
_KEY = "sixteen letters."
_Z85 = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


@dataclass(frozen=True, slots=True)
class Decoder:
    """``read(input, folder)`` parses one input; ``refuses``: what it may raise, and nothing else.
    ``sites``: the calls of the code that it goes through, as ``file:function``.
    """

    name: str
    form: Form
    seeds: tuple[bytes, ...]
    read: Callable[[bytes, Path], object]
    refuses: tuple[type[Exception], ...]
    sites: tuple[str, ...]


# ------------------------------------------------------------------ messages between engines


def _control_to_source(frame: bytes, _: Path) -> object:
    message = wire.decode_to_source(memoryview(frame))
    assert wire.decode_to_source(wire.encode(message)) == message
    return message


def _control_to_sink(frame: bytes, _: Path) -> object:
    message = wire.decode_to_sink(memoryview(frame))
    assert wire.decode_to_sink(wire.encode(message)) == message
    return message


def _manifest(frame: bytes, _: Path) -> object:
    """What a sink does with one before it believes it."""
    message = wire.decode_to_sink(frame)
    if isinstance(message, wire.Manifest):
        check_introduction(Config(params_key=_KEY), _ENGINE_ID, _ENDPOINT, message.manifest)
    return message


class _Sends(SendingSource):
    """A stream wire, of which a Pull only needs to know that it is one."""


_Sends.__abstractmethods__ = frozenset()


def _pull(frame: bytes, _: Path) -> object:
    """What a source does with one before it grants it."""
    message = wire.decode_to_source(frame)
    if isinstance(message, wire.Pull):
        resolver = PullResolver(MANIFEST.ranks[0])
        wires = {"zmq": cast(type[Any], _Sends)()}
        return read_pull(asked_of(message, "pp0tp0", wires), resolver, wires, 70)
    return message


def _stream_to_source(frame: bytes, _: Path) -> object:
    return stream_wire.decode_to_source(memoryview(frame))


def _stream_credit(frame: bytes, _: Path) -> object:
    return stream_wire.decode_credit(memoryview(frame))


def _stream_to_sink(frame: bytes, _: Path) -> object:
    return stream_wire.decode_to_sink(memoryview(frame))


def _ucx_mail(frame: bytes, _: Path) -> object:
    """What has arrived in the buffer of a posted receive."""
    posted = 0

    def start_receive(buffer: bytearray, _: int) -> object:
        nonlocal posted
        posted += 1
        if posted == 1:
            buffer[:] = frame[: len(buffer)].ljust(len(buffer), b"\0")
        return SimpleNamespace(completed=posted == 1)

    end = SimpleNamespace(
        ucx=SimpleNamespace(array=lambda buffer: buffer),
        start_receive=start_receive,
        take=lambda _: None,
    )
    mail = UcxMail(cast(Any, end), 0)
    mail.listen()
    (message,) = mail.receive()
    return stream_wire.decode_credit(memoryview(message))


def _native_address(kind: type, frame: bytes, _: Path) -> object:
    return parse_address("pipe", frame, kind)


def _nixl_address(frame: bytes, _: Path) -> object:
    return Address.decode(frame)


@lru_cache(maxsize=1)
def _board() -> tuple[SharedPool, BoardView]:
    """Of a source that writes it by itself."""
    pool = SharedPool.create(NUM_SLOTS * SLOT_NBYTES)
    handle = pool.info.handle
    assert isinstance(handle, MemfdHandle)
    return pool, BoardView(handle)


def _board_entry(frame: bytes, _: Path) -> object:
    """A slot whose source writes into it what it likes: that it is open, the nonce, 8 bytes of
    length, then the offer, or digests.
    """
    pool, view = _board()
    nonce = OFFER.nonce
    begin = int.from_bytes(nonce[:8], sys.byteorder) % NUM_SLOTS * SLOT_NBYTES
    content = (1).to_bytes(8, sys.byteorder) + nonce + frame.ljust(64, b"\0")
    pool.tensor.numpy()[begin : begin + SLOT_NBYTES] = 0
    content = content[:SLOT_NBYTES]
    pool.tensor.numpy()[begin : begin + len(content)] = memoryview(content)
    found, digests = view.find(nonce), view.digests(nonce)
    assert found is None or isinstance(found, Posted)
    assert digests is None or all(isinstance(each, int) for each in digests)
    return found, digests


def _board_seeds() -> Iterator[bytes]:
    for posted in (
        Posted(None, 70, ((5, 3, 4000), (-1, 7))),
        Posted(b"d" * 32, 1, ((),)),
        Posted(b"d" * 32, 60_000, (tuple(range(3800)),)),
        PostedDigests(((1 << 64) - 1, 0, 77)),
    ):
        frame = pack(posted)
        yield len(frame).to_bytes(8, "little") + frame
    deep = b"\x94\xc0\x01\x90" + b"\x91" * 5000 + b"\xc0"
    yield len(deep).to_bytes(8, "little") + deep


def _handle(frame: bytes, _: Path) -> object:
    """A pool of another process: what is behind the descriptor must be one."""
    try:
        handle = msgspec.msgpack.decode(frame, type=MemfdHandle)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(str(exc)) from exc
    mapped = open_shared(handle)
    mapped.close()
    return mapped


@lru_cache(maxsize=1)
def _pool() -> SharedPool:
    return SharedPool.create(8192)


def _handle_seeds() -> Iterator[bytes]:
    handle = _pool().info.handle
    assert isinstance(handle, MemfdHandle)
    yield pack(handle)
    for fd in (0, 1, 2, os.open("/proc/self", os.O_PATH)):
        yield pack(msgspec.structs.replace(handle, fd=fd))
    yield pack(msgspec.structs.replace(handle, pid=1, fd=0))


# ------------------------------------------------------------------ params and bodies of HTTP


SOURCE = SourceRef(
    engine_id=_ENGINE_ID,
    endpoint=_ENDPOINT,
    offer=wire.OfferRef(OFFER.nonce, OFFER.incarnation),
    num_tokens=77,
    digest=bytes(range(32)),
)


def _params(key: str | None, frame: bytes, _: Path) -> object:
    """Whatever they say, the ranks can be told of it."""
    try:
        raw = json.loads(frame)
    except (ValueError, RecursionError) as exc:  # the HTTP server's to refuse
        raise ProtocolError(str(exc)) from exc
    params = parse_params(raw, key)
    if isinstance(params, LoadWanted):
        orders = ConnectorMetadata(unholds=(Unhold("r", params.source, wire.Reason.CANCELLED),))
        again = msgspec.msgpack.decode(pack(orders), type=ConnectorMetadata)
        assert again == orders
    return params


def _params_seeds() -> Iterator[bytes]:
    for key in (None, _KEY):
        made = make_params(SOURCE, request_id="r1", number=3, tp_size=2, pp_size=1, key=key)
        yield json.dumps(made).encode()
        yield json.dumps(early_params(made, "0f" * 16)).encode()
    yield json.dumps({"do_remote_decode": True, "do_remote_prefill": False}).encode()
    yield json.dumps(prefill_params("0f" * 16)).encode()


def _client_body(frame: bytes, _: Path) -> object:
    body = parse_body(COMPLETIONS, frame)
    return body.for_prefill(), body.for_decode(None)


def _prefill_answer(frame: bytes, _: Path) -> object:
    params = read_params("http://e:1", 200, frame)
    return early_params(learned_params(params), "0f" * 16)


# ------------------------------------------------------------------ requests of the engine


def _to_engine(frame: bytes, _: Path) -> object:
    frames = [zmq.Frame(b"client"), zmq.Frame(frame)]
    sent: list[object] = []
    server = SimpleNamespace(
        num_malformed=0,
        _inbox=SimpleNamespace(receive=lambda: [frames]),
        _visitors=SimpleNamespace(meet=lambda: None),
        _look=lambda: None,
        send=lambda *answer: sent.append(answer),
    )
    found = RpcServer.receive(cast(Any, server))
    assert len(found) + len(sent) == 1
    return found


def _to_client(frame: bytes, _: Path) -> object:
    return decode_to_client(frame, "x")


_GENERATE = Generate("a", (1, 2, 3), 4, kv_transfer_params={"do_remote_decode": True})


# ------------------------------------------------------------------ texts of who starts a process


def _text(frame: bytes) -> str:
    """As Python reads arguments and variables."""
    return frame.decode(errors="surrogateescape")


def _settings(frame: bytes, _: Path) -> object:
    """Extra config of an engine, from JSON."""
    try:
        raw = json.loads(frame)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(str(exc)) from exc
    if not isinstance(raw, dict):
        raise ProtocolError("no object")
    plugin, rest = split_settings(raw)
    return plugin, load_config({}, rest, {})


_SETTINGS = {
    "allowed_peers": ["10.0.0.0/8", "::1", "prefill"],
    "transport": "zmq",
    "port": 5700,
    "host": "127.0.0.1",
    "curve_public_key": _Z85,
    "curve_secret_key": _Z85,
    "curve_server_keys": {"e": _Z85},
    "params_key": _KEY,
    "lease_s": 30.0,
    "chunk_nbytes": 1 << 20,
    "staging_slots": 8,
    "hash_seed": "0",
    "switch_interval_s": 0.001,
}


def _variables(frame: bytes, _: Path) -> object:
    """One ``NAME=VALUE`` a line."""
    lines = _text(frame).split("\n")
    environ = dict(line.partition("=")[::2] for line in lines if line)
    return load_config({}, None, environ)


def _as_variable(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={each}" for name, each in value.items())
    return ",".join(value) if isinstance(value, list) else str(value)


def _endpoint(frame: bytes, _: Path) -> object:
    text = _text(frame)
    Listeners().users(text)
    rank = msgspec.structs.replace(MANIFEST.ranks[0], data_endpoints={"zmq": text})
    for check in (partial(check_host, Config()), partial(data_endpoint_of, rank, Config())):
        try:
            check(text if check.func is check_host else "zmq")
        except (PermissionError, TransportUnavailable):
            continue
    return parse_endpoint(text)


def _listening(frame: bytes, _: Path) -> object:
    text = _text(frame)
    return parse_host_port("--listen", text), parse_engines(Side.PREFILL, [f"http://{text}"])


def _peer_address(frame: bytes, _: Path) -> object:
    text = frame.decode(errors="replace")
    return user_of(text), why_refused(Config(allowed_peers=("10.0.0.0/8",)), text, None)


def _geometry(frame: bytes, _: Path) -> object:
    return parse_geometry("--prefill", _text(frame))


def _model_config(frame: bytes, folder: Path) -> object:
    file = folder / "config.json"
    file.write_bytes(frame)
    with suppress(ConfigError, IncompatiblePeer):
        parse_geometry("--prefill", str(file))
    return load_model_config(str(file))


def _key_files() -> tuple[bytes, ...]:
    with tempfile.TemporaryDirectory() as folder:
        secret = zmq.auth.create_certificates(folder, "current")[1]
        return (Path(secret).read_bytes(),)


def _key_file(frame: bytes, folder: Path) -> object:
    (folder / CURRENT).write_bytes(frame)
    (folder / CURRENT).chmod(0o600)
    return read_keys(folder)


def _weight_index(frame: bytes, folder: Path) -> object:
    (folder / "model.safetensors.index.json").write_bytes(frame)
    (folder / "model-1.safetensors").touch()
    return weight_files(folder)


def _prompts(frame: bytes, folder: Path) -> object:
    file = folder / "prompts.jsonl"
    file.write_bytes(frame)
    return load_prompts(file, encode=lambda text: [1], vocab_size=1000, max_new_tokens=1)


def _trace(frame: bytes, folder: Path) -> object:
    file = folder / "trace.jsonl"
    file.write_bytes(frame)
    return load_trace(file, limit=4, scale=16, time_scale=1.0, vocab_size=1000, max_new_tokens=10)


_HF = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": [1, 2],
    "torch_dtype": "float32",
}


def _packed(*messages: object) -> tuple[bytes, ...]:
    return tuple(pack(message) for message in messages)


def _lines(*rows: object) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows)


_STREAM_TO_SOURCE = _packed(
    stream_wire.Attach(stream_wire.STREAM_VERSION, 4, 4 << 20, "ucx", b"address" * 20),
    stream_wire.Expect(b"n" * 16, b"i" * 16, "pp0tp0"),
    stream_wire.Credit(tuple(range(16))),
    stream_wire.AskTrial(64 << 10),
)
_STREAM_TO_SINK = _packed(
    stream_wire.Attached(b"address" * 20),
    stream_wire.ChunkHeader(b"n" * 16, b"i" * 16, "pp0tp0", "pp0tp0", 3, 1 << 20, 1, 0),
    stream_wire.TrialHeader(64 << 10, 1, 0),
    stream_wire.Refused("why"),
)
_WANTED = msgspec.structs.replace(
    PULL.classes[0], regions=(RegionName("model.layers.0", ("k",)),), token_lo=0
)
_SERVED = msgspec.structs.replace(PULL, classes=(_WANTED,))
_PULLS = (wire.encode(_SERVED), golden()["pull"], golden()["pull by channel"])
_REFUSED = (ProtocolError,)

DECODERS = (
    Decoder(
        "control to a source",
        "msgpack",
        tuple(golden()[name] for name in TO_SOURCE),
        _control_to_source,
        _REFUSED,
        ("transfer/wire.py:_decode",),
    ),
    Decoder(
        "control to a sink",
        "msgpack",
        tuple(golden()[name] for name in TO_SINK),
        _control_to_sink,
        _REFUSED,
        ("transfer/wire.py:_decode",),
    ),
    Decoder(
        "manifest",
        "msgpack",
        (golden()["manifest"], golden()["manifest by channel"]),
        _manifest,
        (ProtocolError, IncompatiblePeer, UnknownEngine, PermissionError),
        ("transfer/manifest.py:parse_endpoint", "connector/access.py:Listeners.users"),
    ),
    Decoder("pull", "msgpack", _PULLS, _pull, (ProtocolError, PullRefused), ()),
    Decoder(
        "stream to a source",
        "msgpack",
        _STREAM_TO_SOURCE,
        _stream_to_source,
        _REFUSED,
        ("transports/stream_wire.py:_decoder.decode",),
    ),
    Decoder(
        "stream to a sink",
        "msgpack",
        _STREAM_TO_SINK,
        _stream_to_sink,
        _REFUSED,
        ("transports/stream_wire.py:_decoder.decode",),
    ),
    Decoder("credit", "msgpack", _STREAM_TO_SOURCE[2:3], _stream_credit, _REFUSED, ()),
    Decoder(
        "mail of ucx",
        "bytes",
        tuple(len(f).to_bytes(2, "little") + f for f in _STREAM_TO_SOURCE[2:3]),
        _ucx_mail,
        (ProtocolError, PipeBroken),
        ("transports/ucx_pipe.py:UcxMail.receive",),
    ),
    Decoder(
        "ucx address of a sink",
        "msgpack",
        _packed(SinkAddress(7, b"w" * 80)),
        partial(_native_address, SinkAddress),
        (PipeBroken,),
        ("transports/native_peers.py:parse_address",),
    ),
    Decoder(
        "ucx address of a source",
        "msgpack",
        _packed(SourceAddress(b"w" * 80)),
        partial(_native_address, SourceAddress),
        (PipeBroken,),
        ("transports/native_peers.py:parse_address",),
    ),
    Decoder(
        "nixl address",
        "msgpack",
        _packed(Address(b"c" * 16, "WRITE", b"m" * 300, Area(1 << 40, 1 << 20, 0, "DRAM"), 4096)),
        _nixl_address,
        (PipeBroken,),
        (
            "transports/nixl_pipe.py:NixlSinkLane.connected",
            "transports/nixl_pipe.py:NixlPipe.open_source",
            "transports/native_peers.py:parse_address",
        ),
    ),
    Decoder(
        "board",
        "bytes",
        tuple(_board_seeds()),
        _board_entry,
        (),
        ("connector/board.py:BoardView._read", "connector/board.py:BoardView._find"),
    ),
    Decoder(
        "memory handle",
        "msgpack",
        tuple(_handle_seeds()),
        _handle,
        (ProtocolError, TransportUnavailable),
        (),
    ),
    Decoder(
        "params",
        "json",
        tuple(_params_seeds()),
        partial(_params, None),
        _REFUSED,
        (
            "connector/params.py:parse_params",
            "connector/params.py:_check_endpoint",
            "connector/params.py:_hex",
        ),
    ),
    Decoder(
        "signed params",
        "json",
        tuple(_params_seeds()),
        partial(_params, _KEY),
        _REFUSED,
        ("connector/params.py:parse_params",),
    ),
    Decoder(
        "body of a client",
        "json",
        (_lines({"prompt": [1, 2, 3], "max_tokens": 4, "n": 1, "stream": True}),),
        _client_body,
        (ErrorReply,),
        ("proxy/bodies.py:parse_body",),
    ),
    Decoder(
        "answer of a prefill engine",
        "json",
        tuple(
            _lines({"id": "x", "kv_transfer_params": json.loads(each)}) for each in _params_seeds()
        ),
        _prefill_answer,
        (ErrorReply, NoKv),
        ("proxy/bodies.py:read_params", "proxy/bodies.py:learned_params"),
    ),
    Decoder(
        "request to an engine",
        "msgpack",
        _packed(_GENERATE, Abort("a"), Ask()),
        _to_engine,
        (),
        ("engine/rpc.py:RpcServer.receive",),
    ),
    Decoder(
        "answer of an engine",
        "msgpack",
        _packed(INFO, DONE, Token("a", 1, 2.5)),
        _to_client,
        _REFUSED,
        ("engine/rpc.py:decode_to_client",),
    ),
    Decoder(
        "settings",
        "json",
        (_lines(_SETTINGS),),
        _settings,
        (ProtocolError, ConfigError),
        (
            "config.py:load_config",
            "config.py:_address",
            "config.py:_network",
            "integrations/vllm/settings.py:split_settings",
        ),
    ),
    Decoder(
        "variables",
        "text",
        (
            "\n".join(
                f"KVXFER_{n.upper()}={_as_variable(v)}" for n, v in _SETTINGS.items()
            ).encode(),
        ),
        _variables,
        (ConfigError,),
        ("config.py:load_config",),
    ),
    Decoder(
        "endpoint",
        "text",
        (b"tcp://127.0.0.1:5700", b"tcp://[::1]:5700", b"tcp://prefill.example:80"),
        _endpoint,
        (ValueError,),
        (
            "transfer/manifest.py:parse_endpoint",
            "transports/stream_wire.py:data_endpoint_of",
            "connector/access.py:Listeners.users",
        ),
    ),
    Decoder(
        "addresses of the command line",
        "text",
        (b"127.0.0.1:5700", b"[::1]:80", b"host.example:8000"),
        _listening,
        (ConfigError,),
        ("cli/options.py:parse_address", "proxy/settings.py:_parse_url"),
    ),
    Decoder(
        "address of a peer",
        "text",
        (b"127.0.0.1", b"::1", b"localhost:0:0:17", b"fe80::1%eth0"),
        _peer_address,
        (),
        ("transports/guard.py:why_refused",),
    ),
    Decoder(
        "geometry",
        "text",
        (b"layers=2,kv_heads=2,head_dim=64,tp=2,block=16,dtype=bfloat16", b"layers=1,windows=4"),
        _geometry,
        (ConfigError, IncompatiblePeer),
        ("plan/geometry.py:parse_geometry",),
    ),
    Decoder(
        "model config",
        "json",
        (_lines(_HF),),
        _model_config,
        (ConfigError, ModelError),
        (
            "plan/geometry.py:_from_file",
            "engine/model_config.py:_decode",
            "engine/model_config.py:_rope",
        ),
    ),
    Decoder(
        "key file",
        "text",
        _key_files(),
        _key_file,
        (ConfigError,),
        ("transports/key_folder.py:_read",),
    ),
    Decoder(
        "index of weights",
        "json",
        (_lines({"weight_map": {"a": "model-1.safetensors"}}),),
        _weight_index,
        (ModelError,),
        ("engine/weights.py:weight_files",),
    ),
    Decoder(
        "prompts",
        "json",
        (_lines({"prompt_token_ids": [1, 2, 3]}), _lines({"prompt": "a text"})),
        _prompts,
        (ConfigError,),
        ("cli/prompts.py:_read_json_line",),
    ),
    Decoder(
        "trace",
        "json",
        (_lines({"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}),),
        _trace,
        (ConfigError,),
        ("cli/prompts.py:_parse",),
    ),
)

NO_INPUT: Mapping[str, str] = {
    "bench/early.py:EngineSide.steps": "the other end of a benchmark",
    "bench/nixl_ways.py:NixlMember.meet": "the other end of a benchmark",
    "bench/slow_link.py:wire_nbytes": "a benchmark's own device",
    "bench/sockets.py:SocketSource._serve": "the other end of a benchmark",
    "bench/sockets.py:hear": "the other end of a benchmark",
    "bench/wires.py:Giving._serve": "the other end of a benchmark",
    "bench/wires.py:Taking._ask": "the other end of a benchmark",
    "cli/doctor.py:as_json": "what it has encoded itself",
    "cli/prompts.py:text_decoder": "tokens of this process",
    "cli/terminal.py:_print_lines": "lines of its own child",
    "connector/access.py:protection": "settings have been parsed",
    "tensors/kv_digest.py:_hashes": "a hash that it has made itself",
    "tensors/kv_digest.py:seed_of": "a hash that it has made itself",
    "transports/external.py:_loaded": "code that an installed package names",
    "transports/key_folder.py:_write": "keys of this process",
    "cache/hashing.py:_cut": "this process's own bytes",
    "cache/kv_events.py:KVEventLog._external": "a hash of this process",
    "cli/plan.py:run_plan": "what it has encoded itself",
    "connector/board.py:Board.post": "a nonce that this process has drawn",
    "connector/params.py:make_params": "this engine's own endpoint",
    "connector/records.py:FindOffer.name": "what it has encoded itself",
    "connector/scheduler_side.py:SchedulerConnector._look_up": "params have been parsed",
    "engine/group.py:EngineGroup._read_report": "a pipe to its own child",
    "engine/links.py:DriverLink.receive": "a socket to its own child",
    "engine/links.py:RankLink.receive": "a socket to its own parent",
    "engine/rank.py:_Orders._listen": "a pipe to its own parent",
    "engine/rpc.py:RpcClient.poll": "an event of ZeroMQ",
    "engine/weights.py:RandomWeights.read": "a hash of this process",
    "integrations/vllm/facts.py:_files_identity": "the model that vLLM has loaded",
    "integrations/vllm/facts.py:_weight_files": "the model that vLLM has loaded",
    "plan/geometry.py:_stage_regions": "memory of this process",
    "plan/transfer_plan.py:load_figures": "a file of the package",
    "cli/options.py:address_towards": "an address that was parsed",
    "tensors/cuda_driver.py:Driver._reason": "a text of the driver",
    "tensors/device_memory.py:_call": "a text of the driver",
    "tensors/shared_memory.py:SharedPool.__init__": "memory of this process",
    "tensors/shared_memory.py:_readonly_tensor": "bytes without a form",
    "tensors/strided_index.py:_piece": "memory of this process",
    "testing/peers.py:serve_source": "a test's own bytes",
    "transports/channel.py:Dealer.why_ended": "an event of ZeroMQ",
    "transports/channel.py:bind_address": "the setting host, which is looked up",
    "transports/channel.py:_bind": "a text of ZeroMQ",
    "transports/guard.py:Guard._answer": "fields that ZeroMQ has made; 'address of a peer'",
    "transports/guard.py:_address_of": "the same",
    "transports/guard.py:_name": "an endpoint that was parsed",
    "transports/guard.py:_is_here": "a record of the kernel",
    "transports/native_peers.py:check_own_devices": "an endpoint that was parsed",
    "transports/native_peers.py:net_devices": "the setting host, which is looked up",
    "transports/native_peers.py:_addresses": "records of the kernel",
    "transports/pipe.py:make_staging": "memory of this process",
    "transports/stream_packing.py:DevicePacker._launch": "no parser: a kernel",
    "transports/tcp_listener.py:Listener._prove": "32 bytes, all of which have a meaning",
    "transports/tcp_listener.py:numeric": "the kernel reads it; test_tcp_pipe has what is none",
    "transports/tcp_pipe.py:TcpSinkLane._serve": "512 bytes, each field is tried by test_tcp_pipe",
    "transports/ucx_library.py:Ucx.connect": "test_native_peers: a process ends if it is wrong",
    "transports/syn_filter.py:_parsed": "an address that the kernel or ZeroMQ has told",
    "transports/syn_filter.py:program_of": "the bytes of such an address",
    "transports/visitors.py:_received": "a record of the kernel",
    "transports/visitors.py:Visitors._take_events": "an event of ZeroMQ",
    "transports/visitors.py:Visitors._has_ended": "a number that the ROUTER gave",
    "transports/zmq_pipe.py:ZmqSourceLane.staging": "bytes without a form",
    "transports/zmq_pipe.py:ZmqSinkLane.payload": "bytes without a form",
}
"""Calls that parse nothing from outside, and why."""

_PARSERS = {
    *("decode", "convert", "loads", "load", "unpack", "unpack_from", "iter_unpack", "fromhex"),
    *("from_bytes", "frombuffer", "from_buffer", "from_buffer_copy", "create_from_buffer"),
    *("urlsplit", "urlparse", "ip_address", "ip_network", "getaddrinfo", "literal_eval"),
    *("fromstring", "safe_load", "b64decode", "unhexlify", "parse_qs"),
}


def parsing_calls() -> Iterator[str]:
    """Every ``file:function`` of the package that calls a parser, by name."""
    root = Path(kvxfer.__file__).parent
    for file in sorted(root.rglob("*.py")):
        where = file.relative_to(root).as_posix()
        yield from (f"{where}:{name}" for name in _functions(ast.parse(file.read_bytes()), ""))


def _functions(node: ast.AST, inside: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{child.name}" if inside else child.name
        if isinstance(child, ast.Call):
            called = child.func
            text = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if text in _PARSERS:
                yield inside
        yield from _functions(child, name)


def outcome(decoder: Decoder, frame: bytes, folder: Path) -> str:
    """How one input ended: "taken", or the name of the error. Anything else is raised."""
    try:
        decoder.read(frame, folder)
    except decoder.refuses as exc:
        return type(exc).__name__
    return "taken"
