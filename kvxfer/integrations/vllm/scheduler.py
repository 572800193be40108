"""The connector in vLLM's scheduler process: a door in front of
:class:`~kvxfer.connector.scheduler_side.SchedulerConnector`, which decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import msgspec

from kvxfer.config import Config
from kvxfer.connector.params import is_early
from kvxfer.connector.records import (
    NO_ORDERS,
    ConnectorMetadata,
    FoundOffer,
    KVConnectorOutput,
    KVConnectorStats,
    NearSources,
)
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.compat import (
    KvxferHandshake,
    KvxferMetadata,
    KvxferWorkerMetadata,
    check_groups,
)
from kvxfer.integrations.vllm.drain_flag import DrainFlagView
from kvxfer.integrations.vllm.settings import Settings
from kvxfer.integrations.vllm.stats import Calm, KvxferStats, of_scheduler
from kvxfer.integrations.vllm.step_loads import UnprovenKV
from kvxfer.integrations.vllm.views import (
    BlocksView,
    Pins,
    RequestView,
    StepView,
    Tables,
    drop_last_token,
    pins_of,
    view_request,
    without_last_token,
    without_null,
)
from kvxfer.integrations.vllm.worker import WorkerSide, worker_ahead
from kvxfer.transfer.wire import Reason

_EARLY = "early"
"""Why a request runs plain that came with prefill's, where nobody hears whether it is found."""
_EMBEDDINGS = "prompt_embeds"
"""Why a request runs plain whose prompt is not only tokens: nothing could bind its KV to them."""
_MEDIA = "unnamed_media"
"""Why a request runs plain that has an image, or the like, in an engine that names them by none of
their bytes: nothing binds its KV to them either.
"""
MIN_STATE_TOKENS = 3
"""Of a prompt whose state is offered: prefill drops the last token, and one token alone vLLM 0.32
computes as a step of decode. Linear attention then begins with what its state's block held before.
"""
PIN_AFTER_S = 0.1
"""How long an engine that computes nothing steps for a request's blocks before they are pinned and
the request let go. A sink that is free comes within milliseconds, and is heard at once by an engine
that steps; vLLM's processes spin for a second after any step, so a tenth more is no matter.
"""
ASLEEP_S = 0.1
"""An engine that has not stepped for so long slept. Between two steps it needs 1 ms."""
_log = logging.getLogger("kvxfer.integrations")
_ONLY_COMPUTE = KvxferMetadata(NO_ORDERS, is_idle=False)
"""What most steps tell the workers."""


@dataclass(frozen=True, slots=True)
class _KeptRequest:
    """A finished request that vLLM keeps for us."""

    since_s: float
    tables: Tables


class SchedulerSide:
    """One per engine, made before its ranks are known; from
    :meth:`set_xfer_handshake_metadata_pp_aware` on it works.

    While vLLM keeps a finished request it steps without pause. What is held for long by an engine
    that computes nothing is therefore pinned in the block pool, and vLLM is told that it was sent.
    It sleeps then; what the workers report of a pinned request later is for the pin alone.

    Args:
        num_groups: KV cache groups of the model.
        can_pin: one more reference to a block means nothing else to this vLLM.
        no_step_loads: why no load can be part of a step; None if some can.
        no_early: why no offer can be looked for; None if it can.
        num_own_tokens: at the end of a prompt, which this engine computes itself.
        now: seconds of a clock that never goes back.

    Raises:
        ConfigError: several groups in a version that cannot report a failed load of theirs.
    """

    def __init__(
        self,
        settings: Settings,
        num_groups: int,
        *,
        can_pin: bool = True,
        no_step_loads: str | None = None,
        no_early: str | None = None,
        num_own_tokens: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        check_groups(num_groups)
        self._settings = settings
        self._group_ids = tuple(range(num_groups))
        self._core: SchedulerConnector | None = None
        self._drain_flags: tuple[DrainFlagView, ...] = ()
        self._incarnation = b""
        self._has_draft = False
        self._failures: dict[str, str] = {}
        self._details: dict[str, str] = {}
        self._can_pin = can_pin
        self._now = now
        self._pins: Pins | None = None
        self._edges: Pins | None = None
        self._no_step_loads, self._no_early = no_step_loads, no_early
        self._num_own_tokens = num_own_tokens
        self._unproven: UnprovenKV | None = None
        self._worker: WorkerSide | None = None
        self._held: dict[str, _KeptRequest] = {}
        self._num_pinned = 0
        self._has_loaded = False
        """Loads were part of the step whose output was taken in last, and tokens come of them."""
        self._calm = Calm()
        self._is_idle = False
        self._was_woken = False
        self._last_step_s = now()

    def bind_block_pool(self, pool: Any) -> None:
        """vLLM's block pool, of all groups together. Without it blocks are never pinned."""
        self._pins = pins_of(pool) if self._can_pin else None
        self._edges = None if self._pins is None else Pins(pool)
        self._unproven = UnprovenKV.of(pool)

    def set_xfer_handshake_metadata_pp_aware(self, ranks: Mapping[tuple[int, int], object]) -> None:
        """What the ranks say of themselves, by (pp, tp). Raises ConfigError if one is missing, is
        another connector's, or two do not agree.
        """
        known = {key: _ours(key, said) for key, said in ranks.items()}
        engines = {(said.incarnation, said.facts) for said in known.values()}
        if len(engines) != 1:
            raise ConfigError(f"ranks: expected to be of one engine, got {len(engines)}")
        ((incarnation, facts),) = engines
        if self._core is None or incarnation != self._incarnation:
            settings = self._settings
            self._incarnation = incarnation
            self._has_draft = bool(facts.draft_layers)
            can_be_ahead = len(known) == 1 and self._no_step_loads is None
            self._worker = worker_ahead(incarnation) if can_be_ahead else None
            self._held.clear()
            for pins in filter(None, (self._pins, self._edges)):
                pins.unpin_all()  # whoever read them has lost the pool they were in
            self._core = SchedulerConnector(
                self._with_step_loads(settings.config),
                settings.engine(incarnation, facts),
                can_send=settings.can_send,
                can_receive=settings.can_receive,
                num_own_tokens=self._num_own_tokens,
                begins_ahead=self._worker is not None,
            )
        self._core.set_xfer_handshake_metadata_pp_aware(
            {key: said.manifest for key, said in known.items()}
        )
        self._close_flags()
        found = (DrainFlagView.open(said.drain_flag) for said in known.values())
        self._drain_flags = tuple(flag for flag in found if flag is not None)

    def _close_flags(self) -> None:
        for flag in self._drain_flags:
            flag.close()
        self._drain_flags = ()

    def _with_step_loads(self, config: Config) -> Config:
        """Without them, and a line in the log, where this engine cannot have any."""
        why = self._no_step_loads
        if not self._settings.prefix_caching:
            self._unproven = UnprovenKV(None)
        elif self._unproven is None:
            why = why or "vLLM's block pool is not as kvxfer knows it"
        if not (why and config.load_in_step_s != 0 and self._settings.can_receive):
            return config
        _log.info("loads are asynchronous, never part of a step: %s", why)
        return msgspec.structs.replace(config, load_in_step_s=0.0)

    # -------------------------------------------------- requests

    def on_new_request(self, request: Any) -> None:
        """A request has arrived. One that cannot be described is run plain, and counted."""
        if self._core is None or not request.kv_transfer_params:
            return
        if not self._core.is_draining and any(flag.is_set for flag in self._drain_flags):
            self._core.drain()  # a rank's report would come with the next step only
        view = view_request(request)
        try:
            if view.is_rejected:
                self._core.reject_request(view)
            else:
                self._take(self._core, request, view)
        except (AttributeError, TypeError, ValueError) as e:
            # From whoever made the request: the engine must not end for it.
            self._core.refuse_request(view, Reason.BAD_PARAMS, str(e))

    def _take(self, core: SchedulerConnector, request: Any, view: RequestView) -> None:
        """One that will run here. Raises what its token ids and extra keys raise."""
        if view.has_embeddings:
            core.refuse_request(view, _EMBEDDINGS, "its prompt is not only tokens")
            return
        if view.mm_features and not self._settings.names_media:
            detail = (
                "vLLM does not look into its images where both of its caches are off; set "
                "--mm-processor-cache-gb above 0, or --enable-prefix-caching"
            )
            core.refuse_request(view, _MEDIA, detail)
            return
        if self._no_early and is_early(request.kv_transfer_params):
            core.refuse_request(view, _EARLY, self._no_early)
            return
        is_shorter = core.keeps_states and view.wants_offer
        if is_shorter and view.num_prompt_tokens < MIN_STATE_TOKENS:
            detail = f"its prompt has {view.num_prompt_tokens} of {MIN_STATE_TOKENS} tokens"
            core.refuse_request(view, "state", detail)
            return
        core.on_new_request(without_last_token(view) if is_shorter else view)
        if is_shorter and core.is_offered(view.request_id):
            drop_last_token(request, has_draft=self._has_draft)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond the local ones, whether that is asynchronous); changes
        nothing, and never (0, True). None: another request loads them; vLLM asks again.
        """
        if self._core is None or not request.kv_transfer_params:
            return 0, False
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False  # wants every prompt token computed; 0.26 asks all the same
        return self._core.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are allocated: the load goes to the workers, or the offer is given up."""
        if self._core is None or not request.kv_transfer_params:
            return
        view = BlocksView(blocks)
        self._core.update_state_after_alloc(request, view, num_external_tokens)
        token_lo = self._core.loaded_in_step(request.request_id)
        if token_lo is not None and self._unproven is not None:
            position = token_lo // self._settings.block_tokens
            self._unproven.begin(request, view.get_block_ids(), position)
        if num_external_tokens and self._worker is not None:
            orders = self._core.take_load_orders()
            if orders is not None:
                self._worker.begin_ahead(orders)

    def request_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(whether its blocks stay until finished_sending, params for the decode side)."""
        if self._core is None or not request.kv_transfer_params:
            return False, None
        tables = self._with_edges(request.request_id, without_null(block_ids))
        must_keep, params = self._core.request_finished_all_groups(view_request(request), tables)
        if must_keep:
            self._held[request.request_id] = _KeptRequest(self._now(), tables)
        return must_keep, params

    def loaded_group_ids(self) -> tuple[int, ...]:
        return self._group_ids

    # -------------------------------------------------- steps

    def build_connector_meta(self, step: Any) -> KvxferMetadata:
        """This step's orders. Steps that compute and have none share one record."""
        if self._core is None:
            raise ConfigError("connector: expected the ranks' handshake before the first step")
        self._is_idle = not step.total_num_scheduled_tokens
        self._was_woken = self._is_idle and self._must_look()
        self._last_step_s = self._now()
        if self._unproven is not None:
            self._unproven.drop_tokens_of_preempted()
        orders = self._core.build_connector_meta(StepView(step))
        if orders.computed or orders.ended:
            self._pin_edges(orders)
        if orders is NO_ORDERS and not self._is_idle:
            return _ONLY_COMPUTE
        return KvxferMetadata(orders, is_idle=self._is_idle, wants_answer=bool(self._due()))

    def update_connector_output(self, output: Any) -> None:
        """What the ranks reported, aggregated; sets whose blocks vLLM frees next."""
        if self._core is None:
            return
        self._last_step_s = self._now()
        said = getattr(output, "kv_connector_worker_meta", None)
        if not (said or output.finished_recving or output.finished_sending or self._is_idle):
            return  # nothing was reported, and nothing is pinned while the engine computes
        received = output.finished_recving or set()
        near: dict[str, NearSources] = {}
        found: dict[str, FoundOffer] = {}
        must_drain = False
        if isinstance(said, KvxferWorkerMetadata):
            self._failures.update(said.failures)
            self._details.update(said.details)
            received, near = received.union(said.in_step), said.near
            must_drain, found = said.must_drain, said.found
            self._has_loaded = any(i not in said.failures for i in said.in_step)
        failed = self._failed(received, getattr(output, "failed_recving", None) or set())
        details = {i: self._details.pop(i) for i in failed if i in self._details}
        sent = set(output.finished_sending or ())
        self._core.update_connector_output(
            KVConnectorOutput(
                finished_sending=sent,
                finished_recving=received,
                failed_recving=failed,
                failure_details=details,
                must_drain=must_drain,
                near=near,
                found=found,
            )
        )
        if self._unproven is not None:
            for request_id in received:
                self._unproven.end(request_id, is_valid=request_id not in failed)
        for request_id in sent:
            self._held.pop(request_id, None)
        if self._edges:
            self._edges.unpin(sent)
        if self._pins is not None:
            # vLLM has forgotten those that were pinned, or knows another request by that id.
            told = sent - self._pins.unpin(sent) | self._pin_due(self._pins)
            output.finished_sending = told or None

    def _pin_edges(self, orders: ConnectorMetadata) -> None:
        """Keep what vLLM is about to let go of and the offers of this step need: the step's tables
        hold it still, and the next step may give it to somebody else.
        """
        if self._edges is None or self._core is None:
            return
        self._edges.unpin(end.request_id for end in orders.ended if end.reason == Reason.PREEMPTED)
        for request_id in orders.computed:
            edge = self._core.edge_of_offer(request_id)
            if any(edge):
                self._edges.pin(request_id, edge)

    def _with_edges(self, request_id: str, tables: Tables) -> Tables:
        """A finished request's tables with what is pinned in the place of what was let go of."""
        edge = self._edges.tables(request_id) if self._edges else ()
        if not edge:
            return tables
        return tuple(
            tuple(map(max, ids, chain(pinned, repeat(-1))))
            for ids, pinned in zip(tables, edge, strict=True)
        )

    def _due(self) -> list[str]:
        """Requests that are to be pinned in this step."""
        if self._pins is None or not self._is_idle:
            return []
        since_s = self._now() - PIN_AFTER_S
        return [request_id for request_id, held in self._held.items() if held.since_s <= since_s]

    def _pin_due(self, pins: Pins) -> set[str]:
        assert self._core is not None
        due = self._due()
        for request_id in due:
            pins.pin(request_id, self._held.pop(request_id).tables)
            self._core.forget_request(request_id)
        self._num_pinned += len(due)
        return set(due)

    def _must_look(self) -> bool:
        """Something woke an engine that slept beside its pins. A pause, a reset or the end of the
        engine waits until vLLM has no work, and a pin is work: steps go on until all are given
        back, as they would for a request. A request that computes ends that.
        """
        if not self._pins:
            return False
        return self._was_woken or self._now() - self._last_step_s > ASLEEP_S

    def _failed(self, received: set[str], failed: set[str]) -> dict[str, str]:
        """Why loads failed that are over on all ranks; one rank may have said so steps ago."""
        reasons = {i: self._failures.pop(i) for i in received if i in self._failures}
        return reasons | {i: Reason.READ_FAILED.value for i in failed if i not in reasons}

    def has_pending_push_work(self) -> bool:
        """Something waits for the next step: an idle engine must make one."""
        return self._core is not None and (self._core.has_orders() or self._must_look())

    def get_kv_connector_stats(self) -> KvxferStats | None:
        """Requests that were loaded, failed or ran plain, and offers that were pinned, since the
        last call; of loads that were part of a step some steps later. vLLM asks at the end of each.
        """
        if self._core is None:
            return None
        self._last_step_s = self._now()
        has_loaded, self._has_loaded = self._has_loaded, False
        if not self._calm.is_now(has_loaded=has_loaded):
            return None
        stats = self._core.get_kv_connector_stats()
        num_pinned, self._num_pinned = self._num_pinned, 0
        if num_pinned:
            pinned = KVConnectorStats(counts={"offers.pinned": num_pinned})
            stats = pinned if stats is None else stats.aggregate(pinned)
        return of_scheduler(stats)

    def reset_cache(self) -> bool:
        """Break every offer; always True."""
        if self._core is not None:
            self._core.reset_cache()
        return True

    def shutdown(self) -> None:
        """Idempotent."""
        self._close_flags()
        if self._core is not None:
            self._core.shutdown()


def _ours(key: tuple[int, int], said: object) -> KvxferHandshake:
    if not isinstance(said, KvxferHandshake):
        raise ConfigError(
            f"rank pp{key[0]}tp{key[1]}: expected kvxfer's handshake metadata, got "
            f"{type(said).__name__}; MultiConnector passes on that of its first connector only: "
            "put KvxferConnector before it"
        )
    return said
