"""The grid: all pairs of engine shapes, one cell each, and what must hold in a cell.

A cell sends three prompts through a prefill and a decode engine, and compares every token with a
single-engine run and every byte of KV with the source's, by digests. Models whose layers have
windows or share KV run in a sample of the shapes. It lives beside the harness, not in the product:
it is a way to test, and it needs the tests' tiny model.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allpairspy import AllPairs

from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.digest import KVDigest, compare, merge_digests
from kvxfer.engine.engine import Engine, Result
from kvxfer.errors import KvxferError
from tests.end_to_end.harness import OFFER, engine_config, prompt, tiny_model

TRANSPORTS = ("shm", "zmq")
TP_SIZES = (1, 2, 4)
BLOCK_SIZES = (8, 16, 24, 32, 64)
LAYOUTS = ("HND", "NHD")
KV_HEADS = (1, 2, 4, 8)  # fewer than ranks, as many, more
SHORT_TOKENS, LONG_TOKENS = 5, 175  # below every block size; a multiple of none
NEW_TOKENS = 4
NUM_BLOCKS = 96  # the three prompts take 32 of the smallest in each of two groups
REQUEST_TIMEOUT_S = 120.0
WINDOW_TOKENS = 48
"""Of the long prompt 174 tokens move, and what follows looks at those from 127 on: kept from 120 in
blocks of 8 or 24, from 112 in blocks of 16, 96 in 32, 64 in 64. So there are pairs whose source
lacks the start of the sink's first block, and pairs whose source has more than the sink wants."""


@dataclass(frozen=True, slots=True)
class GridModel:
    """A model of the grid, written out: its layers' kinds are not asked from what is tested.

    ``windowed``: which layers have a window of WINDOW_TOKENS. The last ``num_sharing`` layers read
    the KV of others. ``token_nbytes``: K and V of one token and one KV head in one layer.
    """

    name: str
    windowed: tuple[bool, ...]
    num_sharing: int
    token_nbytes: int

    @property
    def windowed_layers(self) -> frozenset[str]:
        """Their names."""
        return frozenset(
            f"model.layers.{layer}.self_attn" for layer, is_so in enumerate(self.windowed) if is_so
        )

    @property
    def own(self) -> tuple[bool, ...]:
        """For each layer with KV of its own: does it have a window?"""
        return self.windowed[: len(self.windowed) - self.num_sharing]


FULL = "full"
MODELS = {
    model.name: model
    for model in (
        GridModel(FULL, (False, False), 0, 2 * 16 * 4),
        GridModel("hybrid", (True, False) * 2, 0, 2 * 64 * 4),
        GridModel("kv-sharing", (True, False) * 3, 2, 2 * 64 * 4),
    )
}
WINDOWED = ("hybrid", "kv-sharing")


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid and its wire. As text: ``p2.16.HND-d1.32.NHD-h4-shm``, behind the
    model's name unless it is the one whose layers all see everything.
    """

    prefill_tp: int
    prefill_block: int
    prefill_layout: str
    decode_tp: int
    decode_block: int
    decode_layout: str
    kv_heads: int
    transport: str
    model: str = FULL

    def __str__(self) -> str:
        model = "" if self.model == FULL else f"{self.model}-"
        return (
            f"{model}p{self.prefill_tp}.{self.prefill_block}.{self.prefill_layout}"
            f"-d{self.decode_tp}.{self.decode_block}.{self.decode_layout}-h{self.kv_heads}"
            f"-{self.transport}"
        )

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Shorter than a block, exactly a block of the prefill side, long."""
        return SHORT_TOKENS, self.prefill_block, LONG_TOKENS


VALUES: dict[str, tuple[Any, ...]] = {
    "prefill_tp": TP_SIZES,
    "prefill_block": BLOCK_SIZES,
    "prefill_layout": LAYOUTS,
    "decode_tp": TP_SIZES,
    "decode_block": BLOCK_SIZES,
    "decode_layout": LAYOUTS,
    "kv_heads": KV_HEADS,
}
"""The seven parameters of the grid, in the order of Cell's fields."""


def all_cells() -> list[Cell]:
    """The whole grid, in the order in which it is run. One step along any of its axes changes the
    wire.
    """
    points = itertools.product(*(range(len(values)) for values in VALUES.values()))
    return in_run_order(map(_cell_at, points))


def _cell_at(point: tuple[int, ...]) -> Cell:
    chosen = {
        name: values[index] for (name, values), index in zip(VALUES.items(), point, strict=True)
    }
    return Cell(**chosen, transport=TRANSPORTS[sum(point) % len(TRANSPORTS)])


def window_cells() -> list[Cell]:
    """What the whole grid has of models with windows: :func:`pairwise_cells` for each of them."""
    return [cell for model in WINDOWED for cell in pairwise_cells((model,))]


def pairwise_cells(models: tuple[str, ...] = (FULL,)) -> list[Cell]:
    """Few cells, the same ones every time: each pair of values of two parameters, the wire and the
    model counted among them, is in one.
    """
    # The widest parameters first: the package then needs the fewest cells.
    values = {**VALUES, "transport": TRANSPORTS, "model": models}
    names = sorted(values, key=lambda name: -len(values[name]))
    rows = AllPairs([values[name] for name in names])
    return in_run_order(Cell(**dict(zip(names, row, strict=True))) for row in rows)


def in_run_order(cells: Iterable[Cell]) -> list[Cell]:
    """So that the side with more ranks, which takes longer, is reconfigured least."""
    return sorted(cells, key=_run_key)


def _run_key(cell: Cell) -> tuple[object, ...]:
    prefill = (cell.prefill_block, cell.prefill_layout)
    decode = (cell.decode_block, cell.decode_layout, cell.transport)
    sides = (decode, prefill) if cell.decode_tp > cell.prefill_tp else (prefill, decode)
    return (cell.model, cell.prefill_tp, cell.decode_tp, cell.kv_heads, *sides)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One prompt through both engines, and the tokens of the single-engine run."""

    num_prompt_tokens: int
    expected_token_ids: tuple[int, ...]
    prefill: Result
    decode: Result


@dataclass(frozen=True, slots=True)
class Outcome:
    """A cell that has run; no problems means that all was equal."""

    cell: Cell
    wall_s: float
    problems: tuple[str, ...]


class Fleet:
    """The engines of the grid: processes by role and TP size, started when first needed and given
    a new life for each configuration. Works as a context manager.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-grid-")))
        self._models = {heads: tiny_model(folder, num_kv_heads=heads) for heads in KV_HEADS}
        self._engines: dict[tuple[Role, int], Engine] = {}
        self._expected: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def run(self, cell: Cell) -> Outcome:
        """One cell. An engine that fails is a problem of the cell; the next one gets a new one."""
        started_s = time.monotonic()
        try:
            problems = [
                f"prompt of {exchange.num_prompt_tokens}: {problem}"
                for exchange in self.exchanges(cell)
                for problem in problems_of(exchange, cell)
            ]
        except (AssertionError, KvxferError, OSError) as e:
            problems = [f"{type(e).__name__}: {e}"]
            self._drop((Role.PREFILL, cell.prefill_tp))
            self._drop((Role.DECODE, cell.decode_tp))
        return Outcome(cell, time.monotonic() - started_s, tuple(problems))

    def exchanges(self, cell: Cell) -> list[Exchange]:
        """Send the cell's prompts, all at once. Raises what the engines raise."""
        expected = [self._single(cell, num) for num in cell.prompt_lengths]
        prefill, decode = self._at_work(*self._configs(cell))
        prompts = [prompt(num) for num in cell.prompt_lengths]
        ids = [prefill.submit(tokens, 1, OFFER) for tokens in prompts]
        prefilled: list[Result] = []
        decode_ids: list[str] = []
        for request_id, tokens in zip(ids, prompts, strict=True):
            prefilled.append(prefill.result(request_id, REQUEST_TIMEOUT_S))
            params = prefilled[-1].kv_transfer_params
            decode_ids.append(decode.submit(tokens, NEW_TOKENS, params))
        decoded = [decode.result(request_id, REQUEST_TIMEOUT_S) for request_id in decode_ids]
        rows = zip(cell.prompt_lengths, expected, prefilled, decoded, strict=True)
        return [Exchange(*row) for row in rows]

    def pids(self) -> dict[tuple[Role, int], tuple[int, ...]]:
        """The processes of each engine."""
        return {key: engine.group.pids for key, engine in self._engines.items()}

    def kill(self, role: Role, tp_size: int) -> None:
        """SIGKILL one engine, as a fault would."""
        self._engines[(role, tp_size)].group.kill()

    def close(self) -> None:
        """End every engine."""
        for key in list(self._engines):
            self._drop(key)
        self._stack.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _configs(self, cell: Cell) -> tuple[EngineConfig, EngineConfig]:
        prefill = self._config(
            Role.PREFILL,
            cell,
            # Offers every wire, so that it need not change when the decode side's does.
            transport="auto",
            tp_size=cell.prefill_tp,
            block_size=cell.prefill_block,
            layout=cell.prefill_layout,
        )
        decode = self._config(
            Role.DECODE,
            cell,
            transport=cell.transport,
            tp_size=cell.decode_tp,
            block_size=cell.decode_block,
            layout=cell.decode_layout,
        )
        return prefill, decode

    def _config(
        self,
        role: Role,
        cell: Cell,
        *,
        transport: str,
        tp_size: int = 1,
        block_size: int = 16,
        layout: str = "HND",
    ) -> EngineConfig:
        return engine_config(
            role,
            self._models[cell.kv_heads] if cell.model == FULL else cell.model,
            num_kv_heads=None if cell.model == FULL else cell.kv_heads,
            kv={"transport": transport, "log_level": "WARNING", "connect_timeout_s": 60.0},
            tp_size=tp_size,
            block_size=block_size,
            layout=layout,
            num_blocks=NUM_BLOCKS,
            # An engine stays for several cells with the same prompts: each is to be computed.
            enable_prefix_caching=False,
            digests=role is not Role.ALONE,
        )

    def _single(self, cell: Cell, num_tokens: int) -> tuple[int, ...]:
        """What one engine says: TP 1, block 16, HND, one request at a time."""
        key = (cell.model, cell.kv_heads, num_tokens)
        if key not in self._expected:
            (engine,) = self._at_work(self._config(Role.ALONE, cell, transport="auto"))
            result = engine.generate(prompt(num_tokens), NEW_TOKENS, None, REQUEST_TIMEOUT_S)
            self._expected[key] = result.token_ids
        return self._expected[key]

    def _at_work(self, *configs: EngineConfig) -> list[Engine]:
        """Engines with these configurations; those that change do so side by side."""
        engines: list[Engine] = []
        for config in configs:
            key = (config.role, config.tp_size)
            if key not in self._engines:
                self._engines[key] = Engine(config)
            elif self._engines[key].config != config:
                self._engines[key].reconfigure(config)
            engines.append(self._engines[key])
        return engines

    def _drop(self, key: tuple[Role, int]) -> None:
        engine = self._engines.pop(key, None)
        if engine is not None:
            engine.close()


def problems_of(exchange: Exchange, cell: Cell) -> list[str]:
    """Everything that is not as it must be, in words; empty if all is equal."""
    prefill, decode = exchange.prefill, exchange.decode
    # The last prompt token is computed by who needs its logits: it does not move.
    num_moved = exchange.num_prompt_tokens - 1
    problems = [
        f"decode side: {what}: expected {expected!r}, got {got!r}"
        for what, expected, got in (
            ("status", "FINISHED_LENGTH_CAPPED", decode.done.status),
            ("failure", None, decode.done.failure),
            ("moved tokens", num_moved, decode.done.num_external_tokens),
            ("moved bytes", _moved_nbytes(cell, num_moved), decode.kv_nbytes),
            (
                "wires",
                {cell.transport},
                {name for load in decode.done.loads for name in load.transports},
            ),
        )
        if got != expected
    ]
    problems += _token_problems(exchange)
    source = [_beginning(digest, num_moved) for digest in prefill.done.digests]
    sink = decode.done.digests
    prefill_side = _Side("prefill side", cell.prefill_tp, cell.prefill_block)
    decode_side = _Side("decode side", cell.decode_tp, cell.decode_block)
    incomplete = [
        *_digest_problems(prefill_side, source, cell, num_moved),
        *_digest_problems(decode_side, sink, cell, num_moved),
    ]
    if incomplete:
        return problems + incomplete
    return problems + [f"KV: {difference}" for difference in compare(source, sink)]


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    num_ranks: int
    block_tokens: int

    def window_start(self, num_moved: int) -> int:
        """The first token that a layer with a window holds after a prompt: the start of the block
        that has the first token that the next one looks at.
        """
        first_seen = max(0, num_moved - WINDOW_TOKENS + 1)
        return first_seen // self.block_tokens * self.block_tokens


def _moved_nbytes(cell: Cell, num_moved: int) -> int:
    """All heads of all own layers, a head once for each rank that has it; of a layer with a window
    what both sides hold.
    """
    model = MODELS[cell.model]
    start = max(
        _Side("", 1, block).window_start(num_moved)
        for block in (cell.prefill_block, cell.decode_block)
    )
    num_tokens = sum(num_moved - start if is_windowed else num_moved for is_windowed in model.own)
    return num_tokens * max(cell.kv_heads, cell.decode_tp) * model.token_nbytes


def _beginning(digest: KVDigest, num_tokens: int) -> KVDigest:
    """Of the first tokens only."""
    planes = tuple(plane.between(0, num_tokens) for plane in digest.planes)
    return KVDigest(num_tokens=min(num_tokens, digest.num_tokens), planes=planes)


def _token_problems(exchange: Exchange) -> list[str]:
    expected = exchange.expected_token_ids
    problems = []
    for side, wanted, got in (
        ("prefill side", expected[:1], exchange.prefill.token_ids),
        ("decode side", expected, exchange.decode.token_ids),
    ):
        if got != wanted:
            problems.append(f"{side}: tokens: expected {list(wanted)}, got {list(got)}")
    return problems


def _digest_problems(
    side: _Side, digests: Sequence[KVDigest], cell: Cell, num_tokens: int
) -> list[str]:
    """Are the digests those of all ranks, all planes of all heads, all tokens that moved, windows
    where they begin? Equal digests of nothing would prove nothing.
    """
    if len(digests) != side.num_ranks:
        return [
            f"{side.name}: digests: expected those of {side.num_ranks} ranks, got {len(digests)}"
        ]
    model = MODELS[cell.model]
    merged, _ = merge_digests(digests)
    # K and V of every layer, those that read another one's included.
    expected = (num_tokens, 2 * len(model.windowed) * cell.kv_heads)
    got = (merged.num_tokens, len(merged.planes))
    if got != expected:
        return [f"{side.name}: digested tokens and planes: expected {expected}, got {got}"]
    problems = []
    for plane in merged.planes:
        is_windowed = plane.layer in model.windowed_layers
        span = (side.window_start(num_tokens) if is_windowed else 0, num_tokens)
        if (plane.first_token, plane.end) != span:
            problems.append(
                f"{side.name}: digested tokens of {plane.layer} {plane.plane} head {plane.head}: "
                f"expected {span}, got {(plane.first_token, plane.end)}"
            )
    return problems
