"""kvxfer doctor where there are GPUs."""

from __future__ import annotations

import pytest
import torch

from kvxfer.config import Config
from kvxfer.connector.peer_session import Failure
from kvxfer.doctor import gpus
from kvxfer.doctor.child import Child, call
from kvxfer.doctor.rows import State
from tests.doctor.test_doctor import failing, look

pytestmark = pytest.mark.gpu
LOUD = Config(log_level="DEBUG")


def test_every_gpu_reads_every_other_ones_memory() -> None:
    found = call(LOUD, 60, gpus.looking)
    assert not isinstance(found, Failure), found
    assert [gpu.number for gpu in found] == list(range(torch.cuda.device_count()))
    with Child(LOUD, gpus.lending) as lender:
        lent = lender.answer(60)
        assert not isinstance(lent, Failure), lent
        tries = call(LOUD, 60, gpus.borrowing, lent)
        assert not isinstance(tries, Failure), tries
        reached = {(gpu.number, other) for gpu in found for other in (gpu.number, *gpu.reaches)}
        for each in tries:
            is_good = each.is_equal and each.gb_per_s > 1
            assert is_good == ((each.sink, each.source) in reached), each
        # What GPU 0 has is not what a second one would have
        wrong = call(LOUD, 60, gpus.borrowing, (lent[0], lent[0]))
        assert not isinstance(wrong, Failure), wrong
        assert not any(each.is_equal for each in wrong if each.source == 1)


def test_a_host_with_a_gpu() -> None:
    rows = look()
    assert failing(rows) == []
    assert rows["gpu 0"].state is not State.FAIL
    assert rows["cuda ipc"].state is State.OK
    assert rows["wire cuda_ipc"].state is State.OK
    assert rows["choice"].seen.startswith("auto: cuda_ipc at ")
