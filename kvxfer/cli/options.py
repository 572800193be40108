"""What the commands were asked for, parsed: one record per thing. Free of torch and sockets."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from kvxfer.engine.devices import CPU, CUDA, place_ranks
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
    """One engine. ``num_blocks`` None: sized from the workload; ``devices``: the numbers of its
    ranks' CUDA devices, empty: placed by :func:`place_sides`.
    """

    tp_size: int
    block_size: int
    layout: Layout
    num_blocks: int | None
    prefix_caching: bool
    device: str = CPU
    devices: tuple[int, ...] = ()


def parse_devices(option: str, text: str | None) -> tuple[int, ...]:
    """Numbers of CUDA devices, "0,1"; none where the option was not given. Raises ConfigError."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise ConfigError(f"{option}: expected numbers of CUDA devices, as in 0,1, got {text!r}")
    return tuple(map(int, parts))


def place_sides(
    sides: Sequence[SideOptions], count_devices: Callable[[], int]
) -> tuple[SideOptions, ...]:
    """The engines of a command, each with a device for every rank.

    Who was given devices keeps them. The others take, in order, those that are left, and share
    where none is: with two GPUs and one rank a side, one each; with one GPU all are on that.
    ``count_devices`` is called only where that decides. Raises ConfigError where there are none.
    """
    taken = {number for side in sides for number in side.devices}
    placed = []
    for side in sides:
        if side.device == CUDA and not side.devices:
            devices = place_ranks(side.tp_size, count_devices(), taken)
            side = replace(side, devices=devices)
            taken.update(devices)
        placed.append(side)
    return tuple(placed)


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """What is sent, and what is done with the answers. ``allow_recompute``: KV that was asked for
    and not used is no failure of the run.
    """

    prompts: Path | None
    trace: Path | None
    trace_scale: int
    time_scale: float
    limit: int | None
    max_new_tokens: int
    in_flight: int
    verify: bool
    json: Path | None
    allow_recompute: bool = False

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
