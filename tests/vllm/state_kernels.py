"""vLLM's Triton kernels for states, beside what tests.vllm.rejected_tokens puts in their place, and
the steps of a convolution that they look at. As a program: with Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F

WIDTH = 4
NUM_DRAFTED = 3
BLOCKS = [[2, 3, 4, 5], [7, 6, 1, 8]]


def check(convolution: Any, recurrence: Any, device: str) -> None:
    """Of two requests with a draft each, of which 1 and 3 tokens were accepted before. In front of
    a convolution's steps are those that count: the others are no numbers.
    """
    from tests.vllm import rejected_tokens

    torch.manual_seed(0)
    num_tokens, heads, size, elements = 1 + NUM_DRAFTED, 4, 8, 16
    rows = dict(
        conv_state_indices=torch.tensor(BLOCKS, dtype=torch.int32, device=device),
        num_accepted_tokens=torch.tensor([1, 3], dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, num_tokens, 2 * num_tokens], dtype=torch.int32).to(device),
    )
    shape = (9, WIDTH - 1 + NUM_DRAFTED, size)
    states = [torch.randn(shape, device=device)]
    states[0][2, WIDTH - 1 :] = float("nan")
    states.append(states[0].clone())
    x = torch.randn(2 * num_tokens, size, device=device)
    weight = torch.randn(size, WIDTH, device=device)
    found = [
        update(x.clone(), state.transpose(-1, -2), weight, None, "silu", **rows, **more)
        for update, state, more in zip(
            (convolution, rejected_tokens.convolution),
            states,
            ({"max_query_len": num_tokens}, {}),
            strict=True,
        )
    ]
    assert not found[0].isnan().any()
    assert torch.allclose(found[0], found[1], atol=1e-4)
    assert all(torch.equal(states[0][first], states[1][first]) for first, *_ in BLOCKS)

    D, dt_bias = torch.randn(2, heads, 1, device=device).expand(2, heads, size)
    A = -torch.rand(heads, 1, 1, device=device).expand(heads, size, elements)
    B, C = torch.randn(2, 2 * num_tokens, 1, elements, device=device)
    dt = torch.randn(2 * num_tokens, heads, 1, device=device).expand(-1, -1, size)
    x = torch.randn(2 * num_tokens, heads, size, device=device)
    states = [torch.randn(9, heads, size, elements, device=device)]
    states.append(states[0].clone())
    found = [torch.empty_like(x), torch.empty_like(x)]
    blocks = rows.pop("conv_state_indices")
    for update, state, out in zip(
        (recurrence, rejected_tokens.recurrence), states, found, strict=True
    ):
        update(
            *(state, x, dt, A, B, C, D),
            dt_bias=dt_bias,
            dt_softplus=True,
            state_batch_indices=blocks,
            dst_state_batch_indices=blocks,
            out=out,
            num_accepted_tokens=rows["num_accepted_tokens"],
            cu_seqlens=rows["query_start_loc"],
        )
    assert torch.allclose(found[0], found[1], atol=1e-3)
    assert torch.allclose(states[0], states[1], atol=1e-3)


def check_prefill(convolution: Any, device: str) -> None:
    """What prefill leaves is in front, and behind it nothing is written."""
    torch.manual_seed(0)
    num_tokens, size = 21, 64
    state = torch.full((4, WIDTH - 1 + NUM_DRAFTED, size), float("nan"), device=device)
    x = torch.randn(num_tokens, size, device=device)
    weight = torch.randn(size, WIDTH, device=device)
    out = convolution(
        *(x.T, weight, None, state.transpose(-1, -2)),
        torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        cache_indices=torch.tensor([2], dtype=torch.int32, device=device),
        has_initial_state=torch.tensor([False], device=device),
        activation="silu",
    )
    seen = F.pad(x.T, (WIDTH - 1, 0))
    expected = F.silu(F.conv1d(seen[None], weight[:, None], groups=size)[0])
    assert torch.allclose(out, expected, atol=1e-3)
    assert torch.equal(state[2, : WIDTH - 1], x[1 - WIDTH :])
    assert state[2, WIDTH - 1 :].isnan().all()
    assert state[[0, 1, 3]].isnan().all()


class _Interpreter:
    """Triton's, whose masks are of more types than its own loads and stores take."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return self._own.load(pointers, mask.astype(bool), other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        return self._own.store(pointers, values, mask.astype(bool))


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from vllm import triton_utils  # without Triton it has a stand-in

    from tests.vllm.interpreted import TRITON_FOLDER

    sys.path.append(str(TRITON_FOLDER))
    import triton
    from triton.runtime import interpreter

    interpreter._interpreter = _Interpreter(interpreter._interpreter)
    triton.language.math.log1p = lambda value: triton.language.log(value + 1.0)
    triton_utils.triton, triton_utils.tl = triton, triton.language
    from vllm.platforms import current_platform

    type(current_platform).is_cpu = lambda self: False  # else the modules take other functions
    from vllm.model_executor.layers.mamba.ops import causal_conv1d, mamba_ssm

    check(causal_conv1d.causal_conv1d_update, mamba_ssm.selective_state_update, "cpu")


if __name__ == "__main__":
    main()
