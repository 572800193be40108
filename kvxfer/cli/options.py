"""What the commands were asked for, parsed: one record per thing. Free of torch and sockets."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvxfer.errors import ConfigError


class Layout(enum.StrEnum):
    """Order of heads and tokens in a block."""

    HND = "HND"
    NHD = "NHD"


class Dtype(enum.StrEnum):
    """Of weights and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    AUTO = "auto"


class Wire(enum.StrEnum):
    """What KV travels by. The same names as in the settings."""

    AUTO = "auto"
    ZMQ = "zmq"
    SHM = "shm"
    CUDA_IPC = "cuda_ipc"
    UCX = "ucx"
    NIXL = "nixl"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model every engine of the run computes."""

    model: str | None
    num_kv_heads: int | None
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class SideOptions:
    """One engine. ``num_blocks`` None: sized from the workload."""

    tp_size: int
    block_size: int
    layout: Layout
    num_blocks: int | None
    prefix_caching: bool
    faults: str


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """What is sent, and what is done with the answers."""

    prompts: Path | None
    trace: Path | None
    trace_scale: int
    time_scale: float
    limit: int | None
    max_new_tokens: int
    in_flight: int
    verify: bool
    json: Path | None

    def __post_init__(self) -> None:
        if self.prompts is not None and self.trace is not None:
            raise ConfigError("--prompts: expected one source of prompts, got --trace as well")
        for option, value in (
            ("--limit", self.limit),
            ("--max-new-tokens", self.max_new_tokens),
            ("--in-flight", self.in_flight),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{option}: expected at least 1, got {value}")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise ConfigError(f"--json: {self.json.parent} is no folder; make it first")


@dataclass(frozen=True, slots=True)
class Address:
    """``HOST:PORT``; IPv6 hosts in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


_EVERYWHERE = {"*", "0.0.0.0", "[::]", "::"}  # noqa: S104 - refused, not bound


def parse_address(option: str, text: str, *, everywhere: bool = False) -> Address:
    """The address of an option. Raises ConfigError, also for one that nobody can connect to.

    ``everywhere`` allows those, for a server that only listens and tells nobody where.
    """
    try:
        url = urlsplit(f"tcp://{text}")
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if not host or port is None or url.path or url.username:
        raise ConfigError(f"{option}: expected HOST:PORT, got {text!r}")
    if host in _EVERYWHERE and not everywhere:
        raise ConfigError(
            f"{option}: expected an address of this host that the other side can connect to, "
            f"got {host}"
        )
    return Address(f"[{host}]" if ":" in host else host, port)
