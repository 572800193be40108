"""A rank's device, and sums over the ranks of an engine."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from kvxfer.engine.links import RankSpec
from kvxfer.errors import ConfigError, PeerLost

AllReduce: TypeAlias = Callable[[Tensor], Tensor]
"""Returns the sum of its argument over all ranks; its argument may have become that."""

COLLECTIVE_TIMEOUT_S = 60.0
_PEER_GRACE_S = 1.0
"""Ranks that are told to end do so at slightly different times."""

log = logging.getLogger("kvxfer.engine")


def claim_device(name: str) -> torch.device:
    """Make ``name`` ("cpu", "cuda:N") the device of this thread, set up for exact arithmetic.

    Raises ConfigError for a CUDA device that is not there, RuntimeError for one that does not work.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return device
    num_devices = torch.cuda.device_count()
    if device.index >= num_devices:
        raise ConfigError(f"device: expected one of {num_devices} CUDA devices, got {name}")
    torch.cuda.set_device(device)  # what is wrong with the driver is said here
    # float32 means float32, so that greedy tokens do not depend on how a prompt is cut into steps.
    # No TF32 in products: off by default, but TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which some images
    # set, would turn it on. And attention by plain products: torch's fused kernels make a float32
    # product of three TF32 ones.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_math_sdp(True)
    return device


def join(spec: RankSpec, device: torch.device, stack: ExitStack) -> AllReduce | None:
    """Until ``stack`` ends; None with one rank. Raises OSError or RuntimeError."""
    if spec.tp_size == 1:
        return None
    if not Path(spec.store).parent.is_dir():
        # gloo would wait for it for a minute, and keep the interpreter from every thread meanwhile
        raise FileNotFoundError(f"{spec.store}: expected its folder, got none; the parent has gone")
    is_nccl = spec.collectives == "nccl"
    dist.init_process_group(
        spec.collectives,
        init_method=f"file://{spec.store}",
        rank=spec.tp_rank,
        world_size=spec.tp_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        # nccl connects now, so that what is wrong is said before the engine serves.
        device_id=device if is_nccl else None,
    )
    stack.push(_leave_nccl if is_nccl else _leave_gloo)
    return _sum_by_nccl if is_nccl else _sum_by_gloo


def end_with_peers(pids: Sequence[int], is_ending: Callable[[], bool]) -> None:
    """End this process soon after one of ``pids`` has ended, unless this one ``is_ending`` too.

    Between steps nothing else tells a rank that another has gone. In a step gloo's connections
    break; a GPU that waits for another one's over NVLink waits on, and the thread that waits for it
    learns nothing of it.
    """
    Thread(target=_watch, args=(pids, is_ending), name="peers", daemon=True).start()


def _watch(pids: Sequence[int], is_ending: Callable[[], bool]) -> None:
    poller = select.poll()
    watched: dict[int, int] = {}
    gone: list[int] = []
    for pid in pids:
        try:
            watched[fd := os.pidfd_open(pid)] = pid
            poller.register(fd, select.POLLIN)
        except ProcessLookupError:
            gone.append(pid)
    gone = gone or [watched[fd] for fd, _ in poller.poll()]
    time.sleep(_PEER_GRACE_S)
    if not is_ending():
        log.error("process %s, another rank of this engine, has gone", ", ".join(map(str, gone)))
        os._exit(1)


def _sum_by_nccl(partial: Tensor) -> Tensor:
    _all_reduce(partial)
    return partial


def _sum_by_gloo(partial: Tensor) -> Tensor:
    host = partial.cpu()  # itself on a CPU; from a GPU a copy that has waited for what computes it
    _all_reduce(host)
    return partial.copy_(host)


def _all_reduce(partial: Tensor) -> None:
    try:
        dist.all_reduce(partial)
    except RuntimeError as e:
        reason = str(e).partition("\n")[0]
        raise PeerLost(f"sum over the ranks: another rank has gone ({reason})") from e


def _leave_gloo(*_: object) -> None:
    dist.destroy_process_group()


def _leave_nccl(
    _kind: type[BaseException] | None, error: BaseException | None, _at: TracebackType | None
) -> None:
    """After an error other ranks may be in the middle of a sum, and leaving would wait for them
    for ever. The process ends right after this, and its GPU work with it.
    """
    if error is None:
        dist.destroy_process_group()
