"""Pairs of vLLM engines for the comparison: how they are set up, started, asked and ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

from tests.vllm.engines import (
    ENVIRONMENT,
    MODULE,
    NIXL,
    OFFER,
    ROOT,
    Connector,
    Engine,
    EngineConfig,
    Finished,
)
from tests.vllm.processes import Process

START_TIMEOUT_S = 150.0
_GPU_SHARE = 0.45
CALL_TIMEOUT_S = 60.0
CONNECTORS = {
    "nixl": NIXL,
    "kvxfer": Connector(module=MODULE),
}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": ENVIRONMENT["PYTHONPATH"],
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model and the load on it.

    Attributes:
        config: the fields of its config.json, which it then has seeded weights for; empty: ``path``
            is a model with weights.
        lengths: tokens of KV that are transferred; prompts have one more, which decode computes.
        together: how many requests at once, where not one alone.
        repeats: of single requests, by length.
    """

    name: str
    config: dict[str, Any]
    path: str
    dtype: str
    lengths: tuple[int, ...]
    together: int
    repeats: tuple[int, ...]
    kv_nbytes: int
    max_model_len: int
    max_batched_tokens: int
    block_tokens: tuple[int, int]
    """Of the usual pair, and of the decode engine of the unlike one."""
    layouts: tuple[str, str]
    """The same."""
    vocab_size: int


LLAMA_8B = Geometry(
    name="Llama-3-8B",
    config={
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "hidden_act": "silu",
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 40960,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    },
    path="",
    dtype="bfloat16",
    lengths=(128, 1024, 8192, 32768),
    together=4,
    repeats=(5, 5, 5, 3),
    kv_nbytes=20 << 30,
    max_model_len=40960,
    max_batched_tokens=8192,
    block_tokens=(16, 64),
    layouts=("HND", "NHD"),
    vocab_size=128000,
)


def tiny(path: str) -> Geometry:
    """A few layers on a CPU, for trying this program out: ``path`` is a model with weights."""
    return Geometry(
        name="tiny",
        config={},
        path=path,
        dtype="float32",
        lengths=(128, 256),
        together=2,
        repeats=(2, 2),
        kv_nbytes=64 << 20,
        max_model_len=1024,
        max_batched_tokens=1024,
        block_tokens=(32, 64),
        layouts=("HND", "HND"),
        vocab_size=1000,
    )


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine of a pair. ``extra``: further keys of kv_connector_extra_config."""

    connector: str
    block_tokens: int
    layout: str
    device: int | None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return f"{self.layout} blocks of {self.block_tokens}"


@dataclass(frozen=True, slots=True)
class MeasuredConfig(EngineConfig):
    """What :class:`~tests.vllm.engines.Engine` asks of its config."""

    setup: Setup | None = None
    geometry: Geometry | None = None

    def engine_args(self, port: int) -> dict[str, Any]:
        setup, geometry = self._given()
        connector = replaced(CONNECTORS[setup.connector], extra=setup.extra)
        return {
            "model": geometry.path,
            "load_format": "dummy" if geometry.config else "auto",
            "dtype": geometry.dtype,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": geometry.max_model_len,
            "max_num_batched_tokens": geometry.max_batched_tokens,
            "max_num_seqs": 16,
            "block_size": setup.block_tokens,
            "seed": 0,
            **self._memory(setup),
            "kv_cache_memory_bytes": geometry.kv_nbytes,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "kv_transfer_config": connector.transfer_config(port),
        }

    def _memory(self, setup: Setup) -> dict[str, float]:
        """What must be free on a GPU for an engine to start: half of it, for two may share one."""
        return {} if setup.device is None else {"gpu_memory_utilization": _GPU_SHARE}

    def environment(self, port: int) -> dict[str, str]:
        setup, _ = self._given()
        found = {
            **_ENVIRONMENT,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
            "VLLM_KV_CACHE_LAYOUT": setup.layout,
        }
        if setup.device is not None:
            return {**found, "CUDA_VISIBLE_DEVICES": str(setup.device)}
        return {**found, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def _given(self) -> tuple[Setup, Geometry]:
        if self.setup is None or self.geometry is None:
            raise ValueError("expected a setup and a geometry")
        return self.setup, self.geometry


class MeasuredEngine(Engine):
    """An engine in a new interpreter: a fork could not use CUDA that its parent has begun to use.

    Args:
        log_path: what it says, which stays.
    """

    def __init__(self, config: MeasuredConfig, log_path: Path) -> None:
        self._log_path = log_path
        super().__init__(config)

    def _launch(self, theirs: socket.socket) -> Process:
        command = [sys.executable, "-m", "scripts.benchmarks.vllm_engine", str(theirs.fileno())]
        with self._log_path.open("wb") as log:
            popen = subprocess.Popen(
                [*command, json.dumps(self.config.engine_args(self.port))],
                cwd=ROOT,
                env=os.environ | self.config.environment(self.port),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return Process.of(popen, self._log_path)

    def close(self) -> None:
        self.process.log_path = self._log_path.with_suffix(".gone")  # what forget() removes
        super().close()

    def order_blocks(self, seed: int | None) -> None:
        """Free blocks by id, or shuffled; waits until all of them are free."""
        self.wait_for_blocks(
            lambda blocks: blocks.num_free == blocks.num_total - 1 and not blocks.num_requests,
            CALL_TIMEOUT_S,
        )
        self.call("order_blocks", seed=seed)

    def checked(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        max_tokens: int,
        params: dict[str, Any] | None,
    ) -> tuple[Finished, str]:
        """One request, and the checksum of the KV of its first tokens at its end."""
        request_id = f"c{next(self._request_ids)}"
        request = {"prompt": list(prompt), "max_tokens": max_tokens, "params": params}
        self.call("check", request_id=request_id, num_tokens=num_tokens)
        self.call("submit", requests=[{"request_id": request_id, **request}])
        answer = self.result(request_id)
        return answer, str(self.call("checksum", request_id=request_id))


@dataclass(frozen=True, slots=True)
class EnginePair:
    """A prefill and a decode engine with one connector, both ready."""

    geometry: Geometry
    setups: tuple[Setup, Setup]
    prefill: MeasuredEngine
    decode: MeasuredEngine
    start_s: float

    @property
    def engines(self) -> tuple[MeasuredEngine, MeasuredEngine]:
        return self.prefill, self.decode

    @property
    def is_like(self) -> bool:
        """Both sides have the same blocks."""
        prefill, decode = self.setups
        return (prefill.block_tokens, prefill.layout) == (decode.block_tokens, decode.layout)

    def offered(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Prefill all of them at once; the params for decode."""
        answers = self.prefill.generate_all(prompts, 1, [OFFER] * len(prompts))
        params = [answer.params for answer in answers]
        if not all(params):
            raise RuntimeError(f"prefill: expected params for decode, got {params}")
        return [found for found in params if found]


@contextmanager
def running(
    geometry: Geometry, setups: tuple[Setup, Setup], folder: Path, name: str
) -> Iterator[EnginePair]:
    """Start both engines at the same time; their logs go to ``folder``.

    Raises EngineDied or TimeoutError, with the end of a log, if one does not start.
    """
    begun_s = time.monotonic()
    engines: list[MeasuredEngine] = []
    try:
        for side, setup in zip(("prefill", "decode"), setups, strict=True):
            config = MeasuredConfig(label=name, setup=setup, geometry=geometry)
            engines.append(MeasuredEngine(config, folder / f"{name}_{side}.log"))
            if setups[0].device == setups[1].device:
                engines[-1].wait_ready(START_TIMEOUT_S)  # each looks at how much memory is free
        prefill, decode = engines
        for engine in engines:
            engine.wait_ready(START_TIMEOUT_S)
        if geometry.config:
            for engine in engines:
                engine.call("seed_weights", timeout_s=CALL_TIMEOUT_S)
        start_s = time.monotonic() - begun_s
        yield EnginePair(geometry, setups, prefill, decode, start_s)
    finally:
        for engine in engines:
            engine.close()


def described(pair: EnginePair) -> dict[str, Any]:
    """For the records: both setups, and what the engines say of themselves."""
    return {
        "setups": [asdict(setup) for setup in pair.setups],
        "layouts": [engine.call("layout") for engine in pair.engines],
        "start_s": round(pair.start_s, 1),
    }
