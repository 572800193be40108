"""Reference engines of other types: the prefill engine computes in float32, decode in bfloat16, or
the reverse. Rounding may turn a near tie, and then all tokens behind it are others.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.engine.config import OnLoadFailure, Role
from scripts.benchmarks.load_stats import leading
from tests.end_to_end.harness import DECODE, PREFILL, engine_config, pair, prompt

NUM_TOKENS = (17, 33, 65, 100, 200)
NEW_TOKENS = 8


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize(
    ("given", "taken"), [("float32", "bfloat16"), ("bfloat16", "float32")], ids=str
)
def test_engines_of_other_types_load_from_each_other(
    transport: str, given: str, taken: str
) -> None:
    kv: dict[str, Any] = {"transport": transport, "log_level": "WARNING", "allow_cast": True}
    configs = (
        engine_config(Role.PREFILL, None, kv=kv, dtype=given, tp_size=2, **PREFILL),
        engine_config(
            Role.DECODE,
            None,
            kv=kv,
            dtype=taken,
            on_load_failure=OnLoadFailure.FAIL,
            enable_prefix_caching=False,
            **DECODE,
        ),
    )
    with pair(*configs) as engines:
        equal = []
        for num_tokens in NUM_TOKENS:
            answer = engines.run(prompt(num_tokens), NEW_TOKENS)
            assert answer.done.failure is None
            assert answer.done.num_external_tokens == num_tokens - 1
            alone = engines.decode.generate(prompt(num_tokens), NEW_TOKENS)
            assert alone.done.num_external_tokens == 0
            equal.append(leading(answer.token_ids, alone.token_ids))
    assert min(equal) >= 1
    assert sum(equal) > NEW_TOKENS * len(NUM_TOKENS) // 2
