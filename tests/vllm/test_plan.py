"""What plans say of vLLM's engines, against vLLM."""

from __future__ import annotations

import pytest

from kvxfer.plan.geometry import stage_layers


@pytest.mark.parametrize("num_layers", [1, 4, 7, 32, 61, 94])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4, 7, 8])
def test_stages_have_the_layers_that_vllm_gives_them(num_layers: int, pp_size: int) -> None:
    from vllm.distributed.utils import get_pp_indices

    if pp_size > num_layers:
        pytest.skip("a stage would have no layer")
    expected = [slice(*get_pp_indices(num_layers, stage, pp_size)) for stage in range(pp_size)]
    assert stage_layers(num_layers, pp_size) == expected
