"""Where the ranks of an engine compute. Free of torch: decided before a process starts."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import cycle, islice

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


def collectives_of(devices: Collection[str]) -> str:
    """What sums over ranks on these devices: nccl for several with a GPU each, which is the only
    way that it works; gloo for all others.
    """
    have_own_gpus = CPU not in devices and len(set(devices)) == len(devices) > 1
    return "nccl" if have_own_gpus else "gloo"


def place_ranks(num_ranks: int, num_devices: int, taken: Collection[int] = ()) -> tuple[int, ...]:
    """CUDA devices for the ranks of one engine, first those that are not ``taken`` by others.

    Where they do not suffice, ranks share: each device has its first one before any has a second.
    Raises ConfigError where there are none.
    """
    if num_devices < 1:
        raise ConfigError("device: expected at least one CUDA device, got none; say device cpu")
    order = sorted(range(num_devices), key=lambda number: (number in taken, number))
    return tuple(islice(cycle(order), num_ranks))


def count_cuda_devices() -> int:
    """How many this process sees. Loads torch."""
    import torch  # only who asks pays its second or two

    return torch.cuda.device_count()


def _listed(devices: tuple[int, ...]) -> str:
    return ",".join(map(str, devices))
