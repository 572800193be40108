"""A prefill engine and a decode engine as real processes, and a client that plays the router
between them.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.config import load_config
from kvxfer.engine.config import EngineConfig, OnLoadFailure, Role
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.rpc import Abort, Done, Generate, Info, Refused, RpcClient, Token

VOCAB_SIZE = 512
TIMEOUT_S = 60.0


def tiny_model(folder: Path, *, num_kv_heads: int = 4) -> str:
    """A two-layer model: small enough that an engine starts and answers in well under a second."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    path = folder / f"tiny-{num_kv_heads}.json"
    path.write_bytes(msgspec.json.encode(config))
    return str(path)


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens."""
    rng = random.Random(f"{seed}/{num_tokens}")
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's end and its tokens."""

    done: Done
    token_ids: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """KV bytes that moved, all ranks."""
        return sum(load.nbytes for load in self.done.loads)


@dataclass
class Engine:
    """One engine and its client. ``restart`` gives it a new life on the same KV port."""

    config: EngineConfig
    group: EngineGroup
    client: RpcClient
    answers: dict[str, Answer] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def start(cls, config: EngineConfig) -> Engine:
        group = EngineGroup(config)
        return cls(config, group, RpcClient(group.endpoint, connect_timeout_s=10))

    def close(self) -> None:
        self.client.close()
        self.group.close()

    def restart(self) -> None:
        self.close()
        self.group = EngineGroup(self.config)
        self.client = RpcClient(self.group.endpoint, connect_timeout_s=10)

    def reconfigure(self, config: EngineConfig) -> None:
        """A new life in the same processes."""
        self.client.close()
        self.config = config
        self.group.reconfigure(config)
        self.client = RpcClient(self.group.endpoint, connect_timeout_s=10)

    def send(self, request_id: str, tokens: tuple[int, ...], **kwargs: Any) -> None:
        kwargs.setdefault("max_new_tokens", 1)
        self.tokens[request_id] = []
        self.client.send(Generate(request_id, tokens, **kwargs))

    def abort(self, request_id: str) -> None:
        self.client.send(Abort(request_id))

    def wait_for(self, request_id: str, timeout_s: float = TIMEOUT_S) -> Answer:
        """The end of one request; others that end meanwhile are kept."""
        deadline_s = time.monotonic() + timeout_s
        while request_id not in self.answers:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"request {request_id}: no end within {timeout_s:g} s"
            self.hear(left_s)
        return self.answers.pop(request_id)

    def hear(self, timeout_s: float) -> None:
        for message in self.client.poll(timeout_s):
            match message:
                case Token(request_id=request_id, token_id=token_id):
                    self.tokens[request_id].append(token_id)
                case Done(request_id=request_id):
                    self.answers[request_id] = Answer(message, tuple(self.tokens.pop(request_id)))
                case Refused():
                    raise AssertionError(f"refused: {message.error}")

    def info(self) -> Info:
        """The engine as it stands, while no request is in flight."""
        return self.client.ask(10)

    def wait_for_info(self, holds: Callable[[Info], bool], timeout_s: float) -> Info:
        """Ask until ``holds``; fails with the last answer."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            info = self.info()
            if holds(info):
                return info
            assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {info}"
            time.sleep(0.02)


@dataclass
class Pair:
    """Both engines."""

    prefill: Engine
    decode: Engine
    ids: Iterator[int] = field(default_factory=itertools.count)

    def new_id(self) -> str:
        return f"r{next(self.ids)}"

    def prefilled(self, tokens: tuple[int, ...]) -> Answer:
        """Prefill a prompt; the answer's kv_transfer_params are what a router would forward."""
        request_id = self.new_id()
        self.prefill.send(request_id, tokens, kv_transfer_params={"do_remote_decode": True})
        return self.prefill.wait_for(request_id)

    def start_decode(
        self, tokens: tuple[int, ...], params: dict[str, Any] | None, max_new_tokens: int = 8
    ) -> str:
        request_id = self.new_id()
        self.decode.send(
            request_id, tokens, max_new_tokens=max_new_tokens, kv_transfer_params=params
        )
        return request_id

    def decoded(
        self, tokens: tuple[int, ...], params: dict[str, Any] | None, max_new_tokens: int = 8
    ) -> Answer:
        return self.decode.wait_for(self.start_decode(tokens, params, max_new_tokens))

    def run(self, tokens: tuple[int, ...], max_new_tokens: int = 8) -> Answer:
        """Through both engines."""
        params = self.prefilled(tokens).done.kv_transfer_params
        assert params is not None
        return self.decoded(tokens, params, max_new_tokens)


def engine_config(
    role: Role, model: str | None, *, kv: dict[str, Any] | None = None, **kwargs: Any
) -> EngineConfig:
    """An engine of a test. ``model``: None is the built-in one; ``kv``: connector settings."""
    settings = {"port": 0, "transport": "shm", **(kv or {})}
    kwargs.setdefault("num_blocks", 200)
    kwargs.setdefault("max_model_len", 2048)
    return EngineConfig(
        role=role,
        engine_id=str(role),
        model=model,
        kv=load_config(settings).config,
        **kwargs,
    )


@contextmanager
def pair(prefill: EngineConfig, decode: EngineConfig) -> Iterator[Pair]:
    """Start both engines; end them whatever happens."""
    engines = []
    try:
        engines.append(Engine.start(prefill))
        engines.append(Engine.start(decode))
        yield Pair(engines[0], engines[1])
    finally:
        for engine in engines:
            engine.close()


PREFILL: dict[str, Any] = {"block_size": 16, "layout": "HND"}
DECODE: dict[str, Any] = {"block_size": 32, "layout": "NHD"}
ON_FAILURE_FAIL: dict[str, Any] = {"on_load_failure": OnLoadFailure.FAIL}
