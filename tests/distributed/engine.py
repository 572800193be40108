"""One rank of an engine without a model.

A step is a real one: orders by broadcast, loads begin, a "forward" that sums over the ranks and, at
a source, writes KV; then the ready event, and every rank's output back to the driver.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from kvxfer.config import Config
from kvxfer.connector.records import ConnectorMetadata, KVConnectorOutput
from kvxfer.connector.worker_side import WorkerConnector
from kvxfer.tensors.shared_memory import SharedPool, plain_info
from kvxfer.testing.faults import Holds
from kvxfer.transfer.manifest import RankId
from kvxfer.transports.base import LocalMemory
from tests.builders import EngineShape, build_manifest, build_regions, identity_of
from tests.distributed.content import Bytes, write_tokens
from tests.distributed.world import Half, RankFailed, Seat
from tests.helpers import POISON

UNWRITTEN = 0x5A
"""What a source's pool holds where no request has written; a sink's holds POISON."""

SCRIPT_TIMEOUT_S = 25.0
"""For everything that one engine does between two meetings; below COLLECTIVE_TIMEOUT_S."""

TENSOR_LENGTH = 4096

NUM_SUMS_BESIDE = 20
"""While a load is held."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fill:
    """Tokens ``[lo, hi)`` of request ``number``, which this step computes."""

    number: int
    ids: tuple[int, ...]
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Orders:
    """One step of every rank. ``until_ended``: the forward goes on until every rank's connector has
    something to report. What ``read:hold`` keeps back is let go after NUM_SUMS_BESIDE sums.
    """

    metadata: ConnectorMetadata
    fills: tuple[Fill, ...] = ()
    until_ended: bool = False


@dataclass(slots=True)
class RankReport:
    """What one rank returns from a step. ``collectives_s``: when each sum was there, by this host's
    monotonic clock.
    """

    kv_connector_output: KVConnectorOutput | None
    collectives_s: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Sums:
    """When each sum over the ranks was there, and what was wrong with one."""

    moments_s: tuple[float, ...]
    error: str


class Pool:
    """A rank's KV memory: shared on a CPU, plain on a GPU; ``fill`` in every byte."""

    def __init__(self, nbytes: int, device: torch.device, fill: int) -> None:
        is_cuda = device.type == "cuda"
        self._shared = None if is_cuda else SharedPool.create(nbytes)
        self._host = torch.full((nbytes,), fill, dtype=torch.uint8, pin_memory=is_cuda)
        if self._shared is None:
            self._tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            info = plain_info(self._tensor)
        else:
            self._tensor, info = self._shared.tensor, self._shared.info
        self.memory = LocalMemory((self._tensor,), (info,))
        self.flush()

    @property
    def draft(self) -> Bytes:
        """The bytes on the host, to write to before :meth:`flush`."""
        array: Bytes = self._host.numpy()
        return array

    def flush(self) -> None:
        """Put the draft where ranks read it: on a GPU on the current stream, not waited for."""
        self._tensor.copy_(self._host, non_blocking=True)

    def content(self) -> Bytes:
        """What lies there now."""
        array: Bytes = self._tensor.cpu().numpy()
        return array.copy()

    def close(self) -> None:
        """Give the memory back."""
        if self._shared is not None:
            self._shared.close()


class RankEngine:
    """This process's rank of an engine; listens from the moment it exists."""

    def __init__(
        self,
        seat: Seat,
        shape: EngineShape,
        config: Config,
        *,
        incarnation: bytes,
        device: torch.device,
        holds: Holds,
    ) -> None:
        self.seat = seat
        self._holds = holds
        self.shape = shape
        self.config = config
        self.incarnation = incarnation
        self.device = device
        self.nonces: dict[str, bytes] = {}
        self.identity = identity_of(
            build_manifest(shape, seat.team.half.value), incarnation=incarnation
        )
        self.regions, nbytes = build_regions(shape, RankId(0, seat.tp_rank))
        is_source = seat.team.half is Half.SOURCE
        self.pool = Pool(nbytes, device, UNWRITTEN if is_source else POISON)
        self.worker = WorkerConnector(
            config,
            self.identity,
            RankId(0, seat.tp_rank),
            device=device,
        )
        self.worker.register_kv_caches(self.regions, self.pool.memory)

    @property
    def engine_id(self) -> str:
        """Source or sink."""
        return self.seat.team.half.value

    def serve(self, script: Callable[[], T]) -> T | None:
        """Run the script on the driver, and every step of it on all ranks; the others return None
        when it has ended, well or not.
        """
        if not self.seat.is_driver:
            self._follow()
            return None
        try:
            return script()
        finally:
            self.seat.team.broadcast(None)

    def step(self, orders: Orders) -> list[RankReport]:
        """One step of all ranks, on the driver: their reports, by rank. Raises RankFailed."""
        self.seat.team.broadcast(orders)
        reports = self.seat.team.gather(self.execute(orders))
        errors = [f"{self.engine_id} tp{i}: {r.error}" for i, r in enumerate(reports) if r.error]
        if errors:
            raise RankFailed("\n".join(errors))
        return reports

    def execute(self, orders: Orders) -> RankReport:
        """One step of this rank. What goes wrong is in the report; this rank takes part in the sums
        all the same, or the others would wait for it.
        """
        error = _error_of(lambda: self._begin(orders.metadata))
        sums = self._sum_up(is_broken=bool(error), until_ended=orders.until_ended)
        report = RankReport(None, sums.moments_s, error or sums.error)
        if not report.error:
            report.error = _error_of(lambda: self._end(orders.fills, report))
        return report

    def close(self) -> None:
        """End offers, loads and threads, then give the memory back."""
        self.worker.shutdown()
        self.pool.close()

    def _follow(self) -> None:
        team = self.seat.team
        while (orders := team.broadcast(_OVER)) is not None:
            team.gather(self.execute(orders))

    def _begin(self, metadata: ConnectorMetadata) -> None:
        self.nonces |= {offer.request_id: offer.nonce for offer in metadata.offers}
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv()

    def _sum_up(self, *, is_broken: bool, until_ended: bool) -> Sums:
        """The collectives of a forward: one, or as many as there is time for until every rank has
        something to report. The sum itself says so: all ranks stop after the same one.
        """
        num_ranks = len(self.seat.team.ranks)
        moments_s: list[float] = []
        num_beside = 0
        deadline_s = time.monotonic() + SCRIPT_TIMEOUT_S / 2
        error = ""
        while True:
            if time.monotonic() > deadline_s:
                error = "loads: expected one to end on every rank during this step, got none"
            mine = torch.arange(TENSOR_LENGTH, dtype=torch.float32, device=self.device)
            mine += self.seat.tp_rank
            mine[0] = float(self.worker.wait_for_activity(0))
            mine[1] = float(is_broken or bool(error))
            num_beside = num_beside + 1 if self._holds else 0
            total = self.seat.team.sum(mine).cpu()
            moments_s.append(time.monotonic())
            if num_beside == NUM_SUMS_BESIDE:
                self._holds.let_go()
            expected = torch.arange(TENSOR_LENGTH, dtype=torch.float32) * num_ranks
            expected += sum(range(num_ranks))
            if not torch.equal(total[2:], expected[2:]):
                error = f"sum over {num_ranks} ranks: got {total[2:6]}, expected {expected[2:6]}"
            if not until_ended or total[0] == num_ranks or total[1]:
                return Sums(tuple(moments_s), error)

    def _end(self, fills: tuple[Fill, ...], report: RankReport) -> None:
        """The KV that this step computes, behind the sums on a GPU's stream; then the output."""
        for fill in fills:
            write_tokens(self.pool.draft, self.regions, fill.ids, fill.number, fill.lo, fill.hi)
        if fills:
            self.pool.flush()
        self.worker.wait_for_save()
        report.kv_connector_output = self.worker.build_output(())
        self.worker.clear_connector_metadata()


def _error_of(act: Callable[[], object]) -> str:
    """What went wrong, for the driver; empty if nothing did."""
    try:
        act()
    except Exception:  # noqa: BLE001  # said by the driver, for all ranks
        return traceback.format_exc()
    return ""


_OVER: Orders | None = None
