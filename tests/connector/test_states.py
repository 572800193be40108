"""States over real wires: they move once, whole, with the last of the offered tokens. The naive
copy says what has to lie at the sink.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvxfer.config import Config
from kvxfer.connector.params import Plain, make_params
from kvxfer.connector.records import ConnectorMetadata, EndOffer, OfferBlocks
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.transfer.compatibility import differences
from kvxfer.transfer.states import StatePart
from kvxfer.transfer.tokens import token_digest
from kvxfer.transfer.windows import group_keepings
from kvxfer.transfer.wire import Reason
from tests.builders import DELTA_NET, MAMBA1, MAMBA2, EngineShape, build_manifest, identity_of
from tests.connector.rig import POISON, WIRES, Engine, Table, expect_moved, until
from tests.connector.scheduler import PROMPT, SOURCE, Request, step
from tests.connector.sides import table_of

NUM_TOKENS = 41
FOUR_GROUPS = replace(
    MAMBA2, conv=(StatePart("x", 8, 4), StatePart("B", 4, 3), StatePart("C", 4, 3))
)
SHAPES = {
    "mamba1, TP 1 to 2": (
        EngineShape(state=replace(MAMBA1, conv_layout="DS")),
        EngineShape(tp_size=2, state=MAMBA1, block_tokens=8),
    ),
    "mamba2, TP 4 to 1": (
        EngineShape(tp_size=4, num_kv_heads=4, state=FOUR_GROUPS),
        EngineShape(num_kv_heads=4, state=replace(FOUR_GROUPS, state_tokens=1 << 20), layout="NHD"),
    ),
    "delta net, TP 2 to 4": (
        EngineShape(tp_size=2, num_kv_heads=4, state=replace(DELTA_NET, state_tokens=1 << 20)),
        EngineShape(tp_size=4, num_kv_heads=4, state=DELTA_NET),
    ),
}


def tables(source: Engine, sink: Engine) -> tuple[Table, Table]:
    return tuple(  # type: ignore[return-value]
        table_of(replace(each.shape, num_blocks=24), 64, seed)
        for seed, each in enumerate((source, sink))
    )


def engines(
    stack: ExitStack, source: EngineShape, sink: EngineShape, **settings: Any
) -> tuple[Engine, Engine]:
    shapes = [replace(shape, num_blocks=24) for shape in (source, sink)]
    given = stack.enter_context(Engine(shapes[0], "prefill", fill=None, **settings))
    return given, stack.enter_context(Engine(shapes[1], "decode", fill=POISON, **settings))


CASES = [
    *((pair, wire, "off") for pair in SHAPES for wire in ("shm", "zmq")),
    *(("mamba1, TP 1 to 2", wire, "all") for wire in WIRES),
]


@pytest.mark.parametrize(("pair", "wire", "verify"), CASES)
def test_a_load_brings_the_state_of_its_tokens(pair: str, wire: str, verify: str) -> None:
    """Also one that begins in a prefix that the sink has: the state moves whole."""
    with ExitStack() as stack:
        source, sink = engines(stack, *SHAPES[pair], transport=wire, verify=verify)
        given, taken = tables(source, sink)
        ref = source.offer_groups("p", NUM_TOKENS, given)
        source.compute("p")
        sink.load_groups("d", ref, taken, (19, NUM_TOKENS))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        expect_moved(source, sink, given, taken, {0: (19, NUM_TOKENS), 1: (19, NUM_TOKENS)})
        until(lambda: source.sent("p"))
        expected = "verify.equal" if verify == "all" else "loads.accepted"
        assert sink.count(expected) or verify == "off"


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_a_state_cannot_be_cut(wire: str) -> None:
    """A load of fewer tokens than are offered has no state to go on with."""
    with ExitStack() as stack:
        source, sink = engines(stack, *SHAPES["mamba1, TP 1 to 2"], transport=wire)
        given, taken = tables(source, sink)
        ref = source.offer_groups("p", NUM_TOKENS, given)
        source.compute("p")
        sink.load_groups("d", ref, taken, (0, NUM_TOKENS - 1))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"plan"}
        (detail,) = {report.detail for report in sink.reports("d")}
        assert detail == (
            "layers.2: expected to load the state of the 41 tokens that are offered, got a load of "
            "40: a state cannot be cut"
        )


@pytest.mark.parametrize("board", [True, False])
@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_a_state_of_other_tokens_is_refused(wire: str, board: bool) -> None:
    """Parameters that say fewer tokens than are offered, by engines that do not compare digests."""
    with ExitStack() as stack:
        source, sink = engines(
            stack,
            *SHAPES["mamba1, TP 1 to 2"],
            transport=wire,
            bind_tokens=False,
            offer_board=board,
        )
        given, taken = tables(source, sink)
        ref = source.offer_groups("p", NUM_TOKENS, given)
        source.compute("p")
        ref = msgspec.structs.replace(ref, num_tokens=NUM_TOKENS - 1)
        sink.load_groups("d", ref, taken, (0, NUM_TOKENS - 1))
        until(lambda: sink.received("d"))
        assert "plan" in sink.reasons("d") <= {"plan", "ended"}  # one rank cancels for the other
        details = " ".join(report.detail for report in sink.reports("d"))
        expected = {
            "shm": "grant: expected a state of 40 tokens, got one of 41",
            "zmq": "layers.2: expected to be asked for the state of the offered 41 tokens, got ",
        }
        assert expected[wire] in details


def test_the_keeping_of_a_state_is_its_blocks() -> None:
    with ExitStack() as stack:
        source, sink = engines(stack, *SHAPES["mamba2, TP 4 to 1"], transport="zmq")
        kept = [
            group_keepings(r for rank in each.manifest.ranks for r in rank.regions)[1]
            for each in (source, sink)
        ]
        assert [each.block_tokens for each in kept] == [16, 1 << 20]


# ---------------------------------------------------------------- the scheduler side


def scheduler_side() -> SchedulerConnector:
    """Of an engine with attention in blocks of 16 and a state in each 16 tokens."""
    manifest = build_manifest(EngineShape(state=MAMBA1, num_blocks=24))
    made = SchedulerConnector(
        Config(), identity_of(manifest), can_send=True, can_receive=True, now=lambda: 0.0
    )
    made.set_xfer_handshake_metadata_pp_aware({(0, 0): manifest.ranks[0]})
    sent = made.build_connector_meta(step()).manifest
    assert sent is not None
    assert sent.protocol == (2, 3)  # an earlier peer would take states for tokens
    (found,) = differences(sent, manifest)
    assert str(found).startswith("protocol: source has versions 2 to 3, sink has versions 1 to 1")
    return made


def prefilled(side: SchedulerConnector) -> ConnectorMetadata:
    """The whole prompt of 40 tokens in one step."""
    side.on_new_request(Request(kv_transfer_params={"do_remote_decode": True}))
    first = step(new=(("r", [], 0),), counts={"r": 40})
    first.scheduled_new_reqs[0].block_ids = ([5, 6, 7], [9, 10, 11])
    return side.build_connector_meta(first)


def test_an_offer_tells_the_block_of_its_state() -> None:
    side = scheduler_side()
    orders = prefilled(side)
    assert orders.blocks == (OfferBlocks("r", ((5, 6, 7), (11,))),)
    assert orders.computed == ("r",)
    keep, params = side.request_finished_all_groups(Request(), ([5, 6, 7], [-1, -1, 11]))
    assert keep
    assert params is not None


def test_an_engine_that_goes_on_takes_its_offer_back() -> None:
    """The next token would be written into the state that a sink reads."""
    side = scheduler_side()
    nonce = prefilled(side).offers[0].nonce
    more = step(cached=(("r", None, 40),), counts={"r": 1})
    orders = side.build_connector_meta(more)
    assert orders.ended == (EndOffer("r", nonce, Reason.ABORTED),)
    assert side.build_connector_meta(more).ended == ()
    finished = side.request_finished_all_groups(Request(), ([5, 6, 7], [9, 10, 11]))
    assert finished == (True, None)
    stats = side.get_kv_connector_stats()
    assert stats is not None
    assert stats.reasons == {"state": 1}


@pytest.mark.parametrize(("num_tokens", "taken"), [(38, 38), (39, 39), (40, None)])
def test_only_states_of_fewer_tokens_than_the_prompts_are_loaded(
    num_tokens: int, taken: int | None
) -> None:
    """The sink computes the last token of its prompt: the state after it is of no use."""
    side = scheduler_side()
    source = msgspec.structs.replace(SOURCE, num_tokens=num_tokens)
    params = make_params(source, request_id="p", number=1, tp_size=1, pp_size=1)
    request = Request(kv_transfer_params=params)
    plain = side.on_new_request(request)
    if taken is None:
        assert plain == Plain(
            "tokens",
            "40 tokens offered, the prompt has 40: a state moves only of fewer, for this side "
            "computes the last token",
        )
        return
    assert plain is None
    assert side.get_num_new_matched_tokens(request, 16) == (taken - 16, True)


def test_an_early_request_looks_for_the_tokens_before_its_last() -> None:
    side = scheduler_side()
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "kvxfer": {"request": "0a" * 16, "incarnation": "0b" * 16, "endpoint": "tcp://127.0.0.1:7"},
    }
    assert side.on_new_request(Request(kv_transfer_params=params)) is None
    (find,) = side.build_connector_meta(step()).finds
    assert find.source.num_tokens == 39
    assert find.source.digest == token_digest(PROMPT[:39])
