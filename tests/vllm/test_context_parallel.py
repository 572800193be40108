"""Context parallelism as vLLM has it: its own code says which tokens a rank keeps, and where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.transfer.interleave import WHOLE, Interleave, shared

# vLLM loads parts of torch that other parts of torch call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.mark.parametrize(("size", "run"), [(2, 1), (4, 1), (2, 16), (3, 4)])
def test_a_rank_keeps_as_many_tokens_as_vllm_counts(size: int, run: int) -> None:
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    num_tokens = torch.tensor([1, 15, 16, 17, 100, 255])
    counted = get_dcp_local_seq_lens(num_tokens, size, cp_kv_cache_interleave_size=run)
    for rank in range(size):
        kept = shared(Interleave(size, rank, run), WHOLE)
        assert kept is not None
        assert counted[:, rank].tolist() == [kept.count(each) for each in num_tokens.tolist()]


class _Pointer:
    """What Triton makes of an array: an address that numbers are added to."""

    def __init__(self, array: Any, at: Any = 0) -> None:
        self.array, self.at = array, at

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.array, self.at + more)


def _slots_of_vllm(table: Any, kept: Interleave, block_tokens: int, num_tokens: int) -> Any:
    """Where vLLM's own kernel has a rank write the tokens of one request; -1: nowhere."""
    from vllm.v1.worker import block_table

    slots = np.full(num_tokens, -2)

    def load(pointer: _Pointer, mask: Any = True, other: int = 0) -> Any:
        at = np.where(mask, pointer.at, 0)
        return torch.from_numpy(np.asarray(np.where(mask, pointer.array[at], other)))

    def store(pointer: _Pointer, values: Any, mask: Any) -> None:
        np.copyto(slots, np.where(mask, values, slots))

    names = block_table.ComputeSlotMappingKernel.kernel.__globals__
    language = SimpleNamespace(
        program_id=lambda axis: 0,
        num_programs=lambda axis: 2,
        arange=lambda lo, hi: torch.arange(lo, hi),
        int64=torch.int64,
        load=load,
        store=store,
        where=lambda condition, yes, no: torch.where(condition, yes, no),
        constexpr=int,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(names, "tl", language)
        block_table.ComputeSlotMappingKernel.kernel(
            *(num_tokens, num_tokens, _Pointer(np.array([0, num_tokens]))),
            *(_Pointer(np.arange(num_tokens)), _Pointer(np.array(table)), len(table)),
            _Pointer(slots),
            KV_CACHE_BLOCK_SIZE=block_tokens,
            TOTAL_CP_WORLD_SIZE=kept.size,
            TOTAL_CP_RANK=kept.index,
            CP_KV_CACHE_INTERLEAVE_SIZE=kept.run,
            PAD_ID=-1,
            BLOCK_SIZE=num_tokens,
        )
    return slots


@pytest.mark.parametrize("run", [1, 4, 16])
@pytest.mark.parametrize("size", [2, 4])
def test_a_token_lies_where_vllms_kernel_writes_it(size: int, run: int) -> None:
    """Unit by unit of what each rank gives to one that keeps all tokens."""
    table, num_tokens, block_tokens = [7, 2, 5, 1, 3], 80, 16
    for rank in range(size):
        kept = Interleave(size, rank, run)
        slots = _slots_of_vllm(table, kept, block_tokens, num_tokens)
        found = {
            token: table[kept.own(token) // block_tokens] * block_tokens
            + kept.own(token) % block_tokens
            for token in range(num_tokens)
            if token // run % size == rank
        }
        assert dict(enumerate(slots.tolist())) == dict.fromkeys(range(num_tokens), -1) | found
