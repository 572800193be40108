"""Which bytes of a sink's cache a load and the steps after it touch: the cache begins as poison.

The source is a process; the sink runs here, step by step, so that its memory can be looked at.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest

from kvxfer.connector.aggregator import KVOutputAggregator
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.digest import DIGEST_NBYTES
from kvxfer.engine.kv_plan import plan_kv_caches
from kvxfer.engine.model_config import load_model_config
from kvxfer.engine.request import Event, Finished, NewToken, Request
from kvxfer.engine.runner import Runner, engine_identity
from kvxfer.engine.scheduler import Scheduler
from kvxfer.engine.steps import DigestOrder, GroupIds, SchedulerOutput
from tests.end_to_end.harness import OFFER, LiveEngine, engine_config, prompt

BLOCK_TOKENS = 24
NUM_BLOCKS = 30
POISON = 0xFF  # as float32 no number: whoever reads it says nonsense
TIMEOUT_S = 120.0


def token_digest(byte: int) -> bytes:
    return blake2b(bytes([byte]) * (64 * 4), digest_size=DIGEST_NBYTES).digest()


KINDS = {token_digest(POISON): "poison", token_digest(0): "zero"}


@dataclass
class Sink:
    """A decode engine of one rank, without its loop; ``table``: of its one request, by group."""

    runner: Runner
    scheduler: Scheduler
    aggregator: KVOutputAggregator
    table: list[list[int]] = field(default_factory=list)

    def step(self) -> list[Event]:
        """One step, if there is something to do."""
        step = self.scheduler.schedule()
        output = self.runner.execute(step)
        for new in step.scheduled_new_reqs:
            self.table = [list(ids) for ids in new.block_ids]
        for more in step.scheduled_cached_reqs.new_block_ids:
            for table, ids in zip(self.table, more or (), strict=more is not None):
                table += ids
        self.aggregator.aggregate([output])
        return self.scheduler.update(step, [output])

    def step_until_token(self) -> int:
        """Steps until the request has one more token."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for event in self.step():
                if isinstance(event, NewToken):
                    return event.token_id
                assert isinstance(event, Finished)
                assert event.request.failure is None
            time.sleep(0.001)
        raise AssertionError("no token in time")

    def kinds(self, tables: GroupIds, num_tokens: int) -> dict[tuple[str, int], set[str]]:
        """What the slots of the tables' tokens hold, by layer and token: poison, zero or value."""
        order = DigestOrder("look", tables, num_tokens)
        digest = self.runner.execute(SchedulerOutput(digests=(order,))).digests["look"]
        found: dict[tuple[str, int], set[str]] = {}
        for plane in digest.planes:
            for token in range(plane.first_token, plane.end):
                begin = (token - plane.first_token) * DIGEST_NBYTES
                each = plane.tokens[begin : begin + DIGEST_NBYTES]
                found.setdefault((plane.layer, token), set()).add(KINDS.get(each, "value"))
        return found


@contextmanager
def sink(config: EngineConfig) -> Iterator[Sink]:
    incarnation = secrets.token_bytes(16)
    model = load_model_config(config.model, num_kv_heads=config.num_kv_heads)
    runner = Runner(config, tp_rank=0, incarnation=incarnation, all_reduce=None)
    try:
        connector = SchedulerConnector(
            config.kv,
            engine_identity(config, model, incarnation),
            can_send=False,
            can_receive=True,
        )
        manifest = runner.manifest
        assert manifest is not None
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): manifest})
        scheduler = Scheduler(config, connector, plan_kv_caches(config, model)[0])
        runner.cache.buffer.fill_(POISON)
        yield Sink(runner, scheduler, KVOutputAggregator(1))
    finally:
        runner.close()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize(("model", "num_layers"), [("hybrid", 4), ("kv-sharing", 6)])
def test_a_load_writes_its_tokens_and_other_new_blocks_are_zeroed(
    model: str, num_layers: int, transport: str
) -> None:
    """137 tokens, of which 136 move: into blocks 0 to 5 of the table, in layers with a window from
    token 80 on, which is in block 3. Then one token at a time; token 144 needs a new block.
    """
    kv = {"transport": transport, "log_level": "WARNING"}
    tokens = prompt(137)
    windowed = {f"model.layers.{layer}.self_attn" for layer in range(0, num_layers, 2)}
    full = {f"model.layers.{layer}.self_attn" for layer in range(1, num_layers, 2)}
    source = LiveEngine(engine_config(Role.PREFILL, model, kv=kv, num_kv_heads=2))
    try:
        expected = source.generate(tokens, 12).token_ids
        params = source.generate(tokens, 1, OFFER).kv_transfer_params
        config = engine_config(
            Role.DECODE,
            model,
            kv=kv,
            num_kv_heads=2,
            block_size=BLOCK_TOKENS,
            layout="NHD",
            num_blocks=NUM_BLOCKS,
        )
        with sink(config) as here:
            here.scheduler.add(Request("r", tokens, 12, params))
            said = [here.step_until_token()]
            ids = tuple(tuple(table) for table in here.table)
            assert sorted(table.count(-1) for table in ids) == [0, 3]
            found = here.kinds(ids, 144)
            for layer in windowed:
                # Never written, and not zeroed: 8 tokens that no token of this request looks at.
                assert [found[layer, token] for token in range(72, 80)] == [{"poison"}] * 8
                assert (layer, 71) not in found
            for layer in windowed | full:
                start = 80 if layer in windowed else 0
                # The last of these is the prompt's last token, computed here.
                assert {kind for at in range(start, 137) for kind in found[layer, at]} == {"value"}
                # The rest of the load's last block, as it was.
                assert {kind for at in range(137, 144) for kind in found[layer, at]} == {"poison"}

            said += [here.step_until_token() for _ in range(8)]
            ids = tuple(tuple(table) for table in here.table)
            assert [len(table) for table in ids] == [7, 7]
            found = here.kinds(ids, 168)
            for layer in windowed | full:
                assert {kind for at in range(137, 145) for kind in found[layer, at]} == {"value"}
                # Taken for a step, not for a load.
                assert {kind for at in range(145, 168) for kind in found[layer, at]} == {"zero"}

            used = {block_id for table in ids for block_id in table}
            others = tuple(block_id for block_id in range(NUM_BLOCKS) if block_id not in used)
            # The two tables share nothing, and a block that a window dropped is taken first again.
            assert len(others) == NUM_BLOCKS - 7 - 3
            untouched = here.kinds((others, others), len(others) * BLOCK_TOKENS)
            assert set().union(*untouched.values()) == {"poison"}

            said += [here.step_until_token() for _ in range(3)]
            assert tuple(said) == expected
            here.step()
            assert here.scheduler.num_free_blocks == NUM_BLOCKS - 1
    finally:
        source.close()
