"""Messages of the channel between a client and an engine, complete ones."""

from __future__ import annotations

from kvxfer.engine.rpc import Done, Info

INFO = Info(
    engine_id="e",
    vocab_size=8,
    max_model_len=8,
    num_blocks=2,
    num_free_blocks=1,
    prefix_hit_rate=0.5,
    pids=(1,),
    counts={},
)
DONE = Done(
    request_id="a",
    status="FINISHED_STOPPED",
    kv_transfer_params={"kvxfer": {"tokens": 3}},
    num_prompt_tokens=3,
    num_cached_tokens=0,
    num_external_tokens=0,
    failure=None,
    loads=(),
    digests=(),
)
