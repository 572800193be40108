"""Context parallelism as vLLM has it: its own code says which tokens a rank keeps, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.transfer.interleave import WHOLE, Interleave, shared
from kvxfer.transfer.manifest import RankId

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
    """Unit by unit of what each rank gives to one that keeps all tokens; and so do engines of which
    vLLM has no kernel for CPUs (test_shared_tokens.py).
    """
    from tests.vllm.shared_tokens import slots_of

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
        given = torch.arange(num_tokens), torch.tensor(table), block_tokens
        assert slots_of(*given, size, rank, run).tolist() == slots.tolist()


RUN = 4


def _parallel(tp: int, pcp: int, dcp: int) -> Any:
    return SimpleNamespace(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        cp_kv_cache_interleave_size=RUN,
        enable_elastic_ep=False,
        enable_eplb=False,
        use_all2all=False,
    )


def _ranks_of_vllm(parallel: Any, patch: pytest.MonkeyPatch) -> Any:
    """For each process: the key of vLLM's handshake, our name, and its place among the ranks that
    share tokens, in groups that vLLM itself has made.
    """
    from vllm.distributed import parallel_state
    from vllm.v1.worker import gpu_worker

    from kvxfer.integrations.vllm.connector import agree_on_rank, cp_rank_of

    sizes = (parallel.tensor_parallel_size, 1, parallel.prefill_context_parallel_size)
    world_size = sizes[0] * sizes[2]
    config = SimpleNamespace(parallel_config=parallel, engram_config=None, model_config=None)
    connector = SimpleNamespace(get_handshake_metadata=lambda: "said")
    patch.setattr(parallel_state, "get_current_vllm_config", lambda: config, raising=False)
    patch.setattr("vllm.config.get_current_vllm_config", lambda: config)
    patch.setattr(gpu_worker, "has_kv_transfer_group", lambda: True)
    patch.setattr(gpu_worker, "get_kv_transfer_group", lambda: connector)
    patch.setattr(torch.distributed, "is_initialized", lambda: True)
    patch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    patch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    patch.setattr(
        parallel_state,
        "get_world_group",
        lambda: SimpleNamespace(local_rank=0, device_group=None),
    )
    for rank in range(world_size):

        def group_of(groups: Sequence[list[int]], *_: Any, rank: int = rank, **__: Any) -> Any:
            (ranks,) = (ranks for ranks in groups if rank in ranks)
            return SimpleNamespace(
                world_size=len(ranks),
                rank_in_group=ranks.index(rank),
                broadcast_object=lambda incarnation, src: incarnation,
            )

        patch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        patch.setattr(parallel_state, "init_model_parallel_group", group_of)
        for name in ("_TP", "_ETP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB", "_ENGRAM_DP"):
            patch.setattr(parallel_state, name, None, raising=False)
        parallel_state.initialize_model_parallel(*sizes, parallel.decode_context_parallel_size)
        said = gpu_worker.Worker.get_kv_connector_handshake_metadata(
            SimpleNamespace(vllm_config=config)
        )
        (key,) = said
        yield key, agree_on_rank(parallel, b"")[1], cp_rank_of(config)


@pytest.mark.parametrize(("tp", "pcp", "dcp"), [(1, 2, 2), (2, 2, 2), (2, 2, 4), (1, 4, 4)])
def test_ranks_of_prefill_context_parallelism(
    tp: int, pcp: int, dcp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a name of its own, which is that of vLLM's handshake; those that share tokens are
    vLLM's, and each token is on as many as vLLM means it to be.
    """
    parallel = _parallel(tp, pcp, dcp)
    found = list(_ranks_of_vllm(parallel, monkeypatch))
    assert [ours for _, ours, _ in found] == [RankId(*key) for key, _, _ in found]
    assert sorted(ours.tp for _, ours, _ in found) == list(range(tp * pcp))
    table, num_tokens, block_tokens = [7, 2, 5, 1, 3], 80, 16
    holders: Counter[int] = Counter()
    for _, _, index in found:
        kept = Interleave(dcp, index, RUN)
        slots = _slots_of_vllms_runner(table, kept, block_tokens, num_tokens)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                own = kept.own(token)
                assert slot == table[own // block_tokens] * block_tokens + own % block_tokens
                holders[token] += 1
    assert holders == dict.fromkeys(range(num_tokens), tp * pcp // dcp)


def _slots_of_vllms_runner(
    table: list[int], kept: Interleave, block_tokens: int, num_tokens: int
) -> Any:
    """As :func:`_slots_of_vllm`, of the V2 runner, which alone has prefill context parallelism."""
    from vllm.v1.worker.gpu import block_table

    slots = np.full(num_tokens, -2)

    def load(pointer: _Pointer, mask: Any = True, other: int = 0) -> Any:
        at = np.where(mask, pointer.at, 0)
        found = pointer.array[at]
        return torch.from_numpy(np.asarray(np.where(mask, found, found.dtype.type(other))))

    def store(pointer: _Pointer, values: Any, mask: Any) -> None:
        np.copyto(slots, np.where(mask, values, slots))

    kernel = block_table._compute_slot_mappings_kernel
    language = SimpleNamespace(
        program_id=lambda axis: 0,
        num_programs=lambda axis: 2,
        arange=lambda lo, hi: torch.arange(lo, hi),
        load=load,
        store=store,
        where=lambda condition, yes, no: torch.where(torch.as_tensor(condition), yes, no),
        int32=None,
        constexpr=int,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernel.__globals__, "tl", language)
        patch.setitem(kernel.__globals__, "_load_ptr", lambda pointer, _: _Pointer(np.array(table)))
        kernel(
            *(num_tokens, _Pointer(np.array([0])), _Pointer(np.array([0, num_tokens]))),
            *(_Pointer(np.arange(num_tokens)), _Pointer(np.array([0])), _Pointer(np.array([0]))),
            *(_Pointer(np.array([block_tokens])), _Pointer(np.array([True]))),
            *(_Pointer(np.array([True])), _Pointer(slots), num_tokens, kept.index),
            CP_SIZE=kept.size,
            CP_INTERLEAVE=kept.run,
            PAD_ID=-1,
            TRITON_BLOCK_SIZE=num_tokens,
        )
    return slots


def test_vllm_serves_no_windows_with_decode_context_parallelism() -> None:
    """But for those of a draft that it does not shard, which each rank keeps whole."""
    from vllm.v1 import kv_cache_interface as interface

    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=2),
        model_config=SimpleNamespace(max_model_len=1024),
        max_in_flight_tokens=64,
    )
    fields: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    fields |= {"block_size": 16, "sliding_window": 64}
    for kind in (interface.SlidingWindowSpec, interface.SlidingWindowMLASpec):
        with pytest.raises(AssertionError, match="DCP not support sliding window"):
            kind(**fields).max_memory_usage_bytes(config)
        assert kind(**fields, dcp_sharded=False).max_memory_usage_bytes(config)
