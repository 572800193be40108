"""How one reference engine is set up, and where its ranks compute. One frozen record; every rank
gets the same one. Free of torch: all of it is decided before a process starts.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from itertools import cycle, islice

import msgspec

from kvxfer.cache.hashing import get_hash_fn_by_name
from kvxfer.config import Config
from kvxfer.errors import ConfigError

CPU, CUDA = "cpu", "cuda"
_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]*))?", re.ASCII)


def check_device(name: str, text: str) -> str:
    """The device, if it is cpu, cuda or cuda:N; else ConfigError. ``name``: of the setting."""
    if not _DEVICE.fullmatch(text):
        raise ConfigError(f"{name}: expected cpu, cuda or cuda:N, got {text!r}")
    return text


def rank_devices(device: str, devices: tuple[int, ...], num_ranks: int) -> tuple[str, ...]:
    """The device of each rank.

    ``devices`` has the number of each rank's CUDA device, and goes with ``device`` "cuda"; without
    them rank r is on cuda:r, or, where ``device`` says which, all are on that one. Raises
    ConfigError for another number of devices than ranks, and for devices beside anything but
    "cuda". Whether a device exists is for its rank to find out.
    """
    check_device("device", device)
    if not devices:
        return tuple(f"cuda:{rank}" if device == CUDA else device for rank in range(num_ranks))
    if device != CUDA:
        raise ConfigError(
            f"devices: expected none with device {device}, got {_listed(devices)}; say device cuda"
        )
    if len(devices) != num_ranks:
        raise ConfigError(
            f"devices: expected one for each of {num_ranks} ranks, got {_listed(devices)}"
        )
    if min(devices) < 0:
        raise ConfigError(f"devices: expected numbers from 0 on, got {_listed(devices)}")
    return tuple(f"cuda:{number}" for number in devices)


def place_ranks(num_ranks: int, num_devices: int, taken: Collection[int] = ()) -> tuple[int, ...]:
    """CUDA devices for the ranks of one engine, first those that are not ``taken`` by others.

    Where they do not suffice, ranks share: each device has its first one before any has a second.
    Raises ConfigError where there are none.
    """
    if num_devices < 1:
        raise ConfigError("device: expected at least one CUDA device, got none; say cpu")
    order = sorted(range(num_devices), key=lambda number: (number in taken, number))
    return tuple(islice(cycle(order), num_ranks))


def count_cuda_devices() -> int:
    """How many this process sees. Loads torch."""
    import torch  # imported here: the import takes a second or two

    return torch.cuda.device_count()


def _listed(devices: tuple[int, ...]) -> str:
    return ",".join(map(str, devices))


class Role(enum.StrEnum):
    """What the engine does with KV besides computing it."""

    PREFILL = "prefill"  # offers KV
    DECODE = "decode"  # loads KV
    BOTH = "both"
    ALONE = "alone"  # no connector: the single-engine run that others are compared with


class OnLoadFailure(enum.StrEnum):
    """What happens to a request whose KV could not be loaded."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine.

    ``model``: a Hugging Face directory, a config.json, the name of a built-in model, or None for
    the tiny one. ``num_blocks`` is per rank and counts the null block.
    ``disable_hybrid_kv_cache_manager``: one block table for all layers, so that those with a
    window keep all tokens too. ``prefix_caching_hash_algo``: one of vLLM's, so that blocks have
    its names; None for kvxfer's own. ``enable_kv_cache_events``: the scheduler's ``take_events``
    has the names that come and go. ``digests``: also digest each request's KV through the naive
    reader, to compare both sides. ``metrics``: HOST:PORT of its ``/metrics``. ``device``: cpu, cuda
    or cuda:N; ``devices``: the number of each rank's CUDA device, rank r on the r-th if not given.

    The properties at the end are the names under which the cache utilities look for settings; the
    sections that they expect are this record itself.
    """

    role: Role
    engine_id: str
    model: str | None = None
    num_kv_heads: int | None = None
    dtype: str = "float32"
    tp_size: int = 1
    block_size: int = 16
    layout: str = "HND"
    num_blocks: int = 512
    disable_hybrid_kv_cache_manager: bool = False
    max_model_len: int = 4096
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str | None = None
    enable_kv_cache_events: bool = False
    on_load_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE
    digests: bool = False
    metrics: str | None = None
    seed: int = 0
    device: str = "cpu"
    devices: tuple[int, ...] = ()
    kv: Config = Config()

    def __post_init__(self) -> None:
        for name in ("tp_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks: expected at least 2 (block 0 is never used), got {self.num_blocks}"
            )
        if self.block_size < 8 or self.block_size % 8:
            raise ConfigError(f"block_size: expected a multiple of 8, got {self.block_size}")
        if self.layout not in {"HND", "NHD"}:
            raise ConfigError(f"layout: expected HND or NHD, got {self.layout!r}")
        if self.prefix_caching_hash_algo is not None:
            try:
                get_hash_fn_by_name(self.prefix_caching_hash_algo)
            except (ValueError, ModuleNotFoundError) as e:
                raise ConfigError(f"prefix_caching_hash_algo: {e}") from e
        rank_devices(self.device, self.devices, self.tp_size)

    @property
    def rank_devices(self) -> tuple[str, ...]:
        return rank_devices(self.device, self.devices, self.tp_size)

    @property
    def collectives(self) -> str:
        """What sums over the ranks. nccl works only with a GPU for each of several; else gloo."""
        devices = self.rank_devices
        have_own_gpus = CPU not in devices and len(set(devices)) == len(devices) > 1
        return "nccl" if have_own_gpus else "gloo"

    @property
    def cache_config(self) -> EngineConfig:
        return self

    model_config = scheduler_config = cache_config

    @property
    def num_gpu_blocks_override(self) -> int:
        return self.num_blocks
