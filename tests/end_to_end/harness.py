"""A prefill engine and a decode engine as real processes, and a client that plays the router
between them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.config import load_config
from kvxfer.engine.config import EngineConfig, OnLoadFailure, Role
from kvxfer.engine.engine import Engine, Result
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.rpc import Info
from kvxfer.testing.faults import install

VOCAB_SIZE = 512
OFFER = {"do_remote_decode": True}


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


class LiveEngine(Engine):
    """An engine that can be restarted and watched. ``faults``: of its wires, in all its lives."""

    def __init__(self, config: EngineConfig, faults: str = "") -> None:
        self.faults = faults
        super().__init__(config, set_up=partial(install, faults))

    def restart(self) -> None:
        """New processes, the same KV port."""
        self.close()
        self.group = EngineGroup(self.config, set_up=partial(install, self.faults))

    def wait_for_info(self, holds: Callable[[Info], bool], timeout_s: float) -> Info:
        """Ask until ``holds``; fails with the last answer."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            info = self.info()
            if holds(info):
                return info
            assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {info}"
            time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Pair:
    """Both engines."""

    prefill: LiveEngine
    decode: LiveEngine

    def prefilled(self, tokens: tuple[int, ...]) -> Result:
        """Prefill a prompt; the result's kv_transfer_params are what a router would forward."""
        return self.prefill.generate(tokens, 1, OFFER)

    def decoded(
        self, tokens: tuple[int, ...], params: dict[str, Any] | None, max_new_tokens: int = 8
    ) -> Result:
        return self.decode.generate(tokens, max_new_tokens, params)

    def run(self, tokens: tuple[int, ...], max_new_tokens: int = 8) -> Result:
        """Through both engines."""
        params = self.prefilled(tokens).kv_transfer_params
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
def pair(prefill: EngineConfig, decode: EngineConfig, *, decode_faults: str = "") -> Iterator[Pair]:
    """Start both engines; end them whatever happens."""
    engines = []
    try:
        engines.append(LiveEngine(prefill))
        engines.append(LiveEngine(decode, decode_faults))
        yield Pair(engines[0], engines[1])
    finally:
        for engine in engines:
            engine.close()


PREFILL: dict[str, Any] = {"block_size": 16, "layout": "HND"}
DECODE: dict[str, Any] = {"block_size": 32, "layout": "NHD"}
ON_FAILURE_FAIL: dict[str, Any] = {"on_load_failure": OnLoadFailure.FAIL}
