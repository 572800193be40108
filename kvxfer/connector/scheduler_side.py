"""The scheduler side of the connector: decides what is offered, loaded, held and given up; owns no
socket.

Method names and semantics are those of vLLM's V1 connector contract, so that the plugin is
translation. Everything that the workers must do leaves in
:meth:`SchedulerConnector.build_connector_meta`; everything that happened comes back in
:meth:`SchedulerConnector.update_connector_output`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvxfer.config import Config, not_admitted
from kvxfer.connector.contract import BlocksLike, RequestLike, SchedulerOutputLike
from kvxfer.connector.loads import READ_BEFORE, LoadBook, LoadState, StepLoads
from kvxfer.connector.offers import STATE_PASSED, Offer, OfferBook
from kvxfer.connector.params import (
    NOT_OFFERED_PARAMS,
    LoadWanted,
    OfferWanted,
    Plain,
    make_params,
    parse_params,
)
from kvxfer.connector.records import (
    ConnectorMetadata,
    GroupBlockIds,
    KVConnectorOutput,
    KVConnectorStats,
    SourceRef,
)
from kvxfer.connector.unused_kv import NOT_OFFERED, NOT_USED, Line, UnusedKV
from kvxfer.errors import ConfigError
from kvxfer.transfer.manifest import EngineIdentity, EngineManifest, RankId, RankManifest
from kvxfer.transfer.windows import group_keepings
from kvxfer.transfer.wire import (
    BIND_TOKENS,
    CAPABILITIES,
    PROTOCOL_MAX,
    OfferRef,
    Reason,
    first_protocol,
)

_DRAINS = Plain("draining", "this engine drains, and takes nothing new")

log = logging.getLogger("kvxfer.connector")


class SchedulerConnector:
    """One per engine, in the scheduler's process.

    Args:
        can_send, can_receive: the role; params of the other role make a plain request, counted.
        num_own_tokens: at the end of a prompt, which this engine computes itself.
        begins_ahead: the engine gives :meth:`take_load_orders` to its rank while it still schedules
          the step.
        now: seconds of a clock that does not go back.

    A request that does not get the KV that it asked for is logged as a warning, limited by
    :class:`~kvxfer.connector.unused_kv.UnusedKV`. The log is written here, because here a load that
    fails on all ranks counts once.
    """

    def __init__(
        self,
        config: Config,
        engine: EngineIdentity,
        *,
        can_send: bool,
        can_receive: bool,
        num_own_tokens: int = 1,
        begins_ahead: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._engine = engine
        self._can_send, self._can_receive = can_send, can_receive
        self._manifest: EngineManifest | None = None
        self._manifest_is_new = False
        self._offers = OfferBook(engine.incarnation, grows=config.grow_offers)
        self._loads = LoadBook()
        self._loads.num_own_tokens = num_own_tokens
        self._step_loads = StepLoads(config.load_in_step_s, begins_ahead=begins_ahead)
        self._ranks: frozenset[str] = frozenset()
        self._reasons: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._unused = UnusedKV()
        self._now = now
        # Addresses are compared with ranges, and engines are few
        self._refusal_at = lru_cache(maxsize=1024)(self._look_up)
        self.is_draining = False
        self._told_open: int | None = None
        self._not_offered: set[str] = set()

    def set_xfer_handshake_metadata_pp_aware(
        self, ranks: Mapping[tuple[int, int], RankManifest]
    ) -> None:
        """Take the manifests of all ranks by (pp, tp), once their workers listen. They also state
        what each group keeps.

        Raises ConfigError when one is missing or two do not agree.
        """
        engine = self._engine
        expected = {(pp, tp) for pp in range(engine.pp_size) for tp in range(engine.tp_size)}
        if set(ranks) != expected:
            raise ConfigError(
                f"ranks: expected (pp, tp) {sorted(expected)}, got {sorted(ranks)}; "
                "every worker must register its caches first"
            )
        try:
            keepings = group_keepings(r for rank in ranks.values() for r in rank.regions)
        except ValueError as e:
            raise ConfigError(f"the ranks' regions: {e}") from e
        self._offers.keep(keepings)
        has_states = any(keeping.is_state for keeping in keepings.values())
        self._loads.has_states = has_states
        regions = [region for rank in ranks.values() for region in rank.regions]
        kept = [each for each in regions if each.window is None and not each.is_state] or regions
        most_tokens = min((region.num_blocks * region.table_tokens for region in kept), default=0)
        self._loads.most_growing_tokens = self._config.early_share * most_tokens
        self._loads.most_presumed_tokens = self._config.early_ahead * most_tokens
        self._manifest = EngineManifest(
            **msgspec.structs.asdict(engine),
            protocol=(first_protocol(regions), PROTOCOL_MAX),
            capabilities=(*((BIND_TOKENS,) if self._config.bind_tokens else ()), *CAPABILITIES),
            ranks=tuple(ranks[key] for key in sorted(ranks)),
        )
        self._manifest_is_new = True
        self._ranks = frozenset(str(rank.rank) for rank in ranks.values())

    @property
    def keeps_states(self) -> bool:
        """Layers keep a state: a request must be offered without its last token, and computed no
        further. The sink computes that token, from the state before it.
        """
        return self._loads.has_states

    def is_offered(self, request_id: str) -> bool:
        return request_id in self._offers

    def drain(self) -> None:
        """Offer and load nothing new from now on. What was asked for before goes on to its end:
        offers are served, loads and the requests that wait for theirs are finished. There is no way
        back.
        """
        if not self.is_draining:
            self.is_draining = True
            log.info("drain: offers and loads nothing new; %d are open", self.num_open)

    @property
    def num_open(self) -> int:
        """Requests whose KV is still to be offered, given or taken."""
        return self._offers.num_open + self._loads.num_open

    def get_finished_count(self) -> int | None:
        """None: every rank reports every request."""
        return None

    def reject_request(self, request: RequestLike) -> None:
        """This request will not run here: give up its offer, whatever its tokens."""
        params = parse_params(request.kv_transfer_params, self._config.params_key)
        if not isinstance(params, LoadWanted):
            return
        plain = self._refusal(params.source)
        if plain is None:
            self._reject(request, params)
            plain = Plain(Reason.CANCELLED, "its engine turned it away")
        self._count(request, plain.reason, plain.detail)

    def _reject(self, request: RequestLike, params: LoadWanted) -> None:
        if params.is_early:
            self._loads.reject_early(request, params.source)
        else:
            self._loads.reject(request.request_id, params.source)

    def refuse_request(self, request: RequestLike, reason: str, detail: str) -> None:
        """Run this request without transferred KV, whatever its params ask for; counted."""
        self._warn(request.request_id, Plain(reason, detail))

    def on_new_request(self, request: RequestLike) -> Plain | None:
        """A request has arrived: from now on its offer at the source is kept alive.

        Returns why it runs plain, if its params asked for more.
        """
        params = parse_params(request.kv_transfer_params, self._config.params_key)
        if isinstance(params, Plain):
            if params.reason == "null_params":
                self._count(request, params.reason, params.detail)
            if params.reason in ("no_params", "null_params"):
                return None
            return self._warn(request.request_id, params)
        if isinstance(params, OfferWanted):
            plain = self._offer(request, params.name)
            return plain and self._warn(request.request_id, plain, what=NOT_OFFERED)
        plain = self._refusal(params.source)
        if plain is None and self.is_draining:
            self._reject(request, params)
            plain = _DRAINS
        if plain is None and params.is_early:
            self._loads.find(request, params.source, has_named_nonce=params.has_named_nonce)
            return None
        plain = plain or self._want(request, params.source)
        return plain and self._warn(request.request_id, plain, params.source)

    def _offer(self, request: RequestLike, name: bytes) -> Plain | None:
        if not self._can_send:
            return Plain("role", "this engine does not offer KV")
        if self.is_draining:
            self._not_offered.add(request.request_id)
            return _DRAINS
        if not self._offers.want(request, name):
            return Plain("id_in_use", "the KV of another request of its id is held")
        return None

    def _refusal(self, source: SourceRef) -> Plain | None:
        """Why nothing may be loaded from there, whatever the request."""
        if not self._can_receive:
            return Plain("role", "this engine does not load KV")
        return self._refusal_at(source.endpoint)

    def _look_up(self, endpoint: str) -> Plain | None:
        host = urlsplit(endpoint).hostname or ""
        if self._config.peer_allowed(host):
            return None
        return Plain(Reason.NOT_ALLOWED, not_admitted(host))

    def _want(self, request: RequestLike, source: SourceRef) -> Plain | None:
        reason = self._loads.want(request, source)
        if reason is None:
            return None
        detail = READ_BEFORE
        if reason is Reason.TOKENS:
            num_tokens = request.num_prompt_tokens
            detail = f"{source.num_tokens} tokens offered, the prompt has {num_tokens}"
            if source.num_tokens == num_tokens:
                detail += ": a state moves only of fewer, for this side computes the last token"
        return Plain(reason, detail)

    def get_num_new_matched_tokens(
        self, request: RequestLike, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the locally cached ones can be loaded, and whether that is
        asynchronous. If not, the load is part of this step: see
        :mod:`~kvxfer.connector.loads`. None: another request loads them, or they are not to be
        had yet; ask again later.

        For a request that is to be offered: what is cached can be read before its first step.

        May be called any number of times; the last call counts in update_state_after_alloc.
        """
        num_tokens = self._loads.num_more_tokens(request.request_id, num_computed_tokens)
        if not num_tokens:
            self._offers.cached(request.request_id, num_computed_tokens)
            return num_tokens, False
        load = self._loads.wanted(request.request_id)
        assert load is not None  # it has tokens to load
        # What is left of the prompt is computed in this step, with nothing in between to be named
        is_whole = num_computed_tokens + num_tokens == request.num_prompt_tokens - 1
        time_s = self._step_loads.time_s(load.source, num_tokens, self._ranks, self._now())
        load.in_step_s = time_s if is_whole and self._step_loads.can_promise(time_s) else None
        load.wait_s = self._step_loads.wait_s(time_s) if load.in_step_s is None else 0.0
        return num_tokens, load.in_step_s is None

    def loaded_in_step(self, request_id: str) -> int | None:
        """The first token of a request's load that is part of the step; None: no such."""
        load = self._loads.handed(request_id)
        return load.num_local_tokens if load is not None and load.is_in_step else None

    def update_state_after_alloc(
        self, request: RequestLike, blocks: BlocksLike, num_external_tokens: int
    ) -> Plain | None:
        """Blocks are allocated. With external tokens the load goes to the workers, else the offer
        is given up. Returns why the request runs plain, if it has missed its KV.
        """
        load = self._loads.wanted(request.request_id)
        if load is None:  # a table of thousands of blocks need not be read for it
            reason = self._loads.runs(request.request_id)
            if reason is not None:
                self._count(request, reason, "")
            return None
        if num_external_tokens:
            self._step_loads.promise(load.in_step_s or load.wait_s)
        reason = self._loads.allocated(
            request.request_id, blocks.get_block_ids(), num_external_tokens
        )
        if reason is Reason.ENDED:
            plain = Plain(reason, READ_BEFORE)
            return self._warn(request.request_id, plain, load.source)
        if reason is not None:
            self._count(request, reason, "")
        return None

    def take_load_orders(self) -> ConnectorMetadata | None:
        """What the ranks must do for loads by now; :meth:`build_connector_meta` has the rest. None
        where that cannot come first: a load begins within a block, and the engine may copy the
        tokens before it there in the step that comes; an offer may end with the step, whose blocks
        others can read until then; the ranks do not know their engine yet.
        """
        if self._offers.num_open or self._manifest_is_new:
            return None
        return self._loads.step_ahead(self._engine.block_tokens)

    def request_finished(
        self, request: RequestLike, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """:meth:`request_finished_all_groups` for an engine with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: RequestLike, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Called once per request, before its blocks are freed. ``block_ids``: its tables by group,
        -1 for a block that it neither has nor keeps.

        Returns whether the engine must keep the blocks until finished_sending, and the params for
        the decode side. An aborted load is still reported through finished_recving; its blocks stay
        with the engine until then.
        """
        self._step_loads.ended(request.request_id)
        if request.request_id in self._not_offered:
            self._not_offered.remove(request.request_id)
            return False, dict(NOT_OFFERED_PARAMS)
        reason = self._loads.finish(request.request_id)
        if reason is not None:
            self._count(request, reason, "ended before its KV was loaded")
        finish = self._offers.finish(request, block_ids)
        if finish.reason is not None:
            detail = "its window's first block is gone"
            if finish.reason == STATE_PASSED:
                detail = "its engine went on, and holds the state of more tokens; ask for one token"
            self._warn(request.request_id, Plain(finish.reason, detail), what=NOT_OFFERED)
        if finish.offer is None or self._manifest is None:
            return finish.keep_blocks, None
        return finish.keep_blocks, make_params(
            self._source_ref(self._manifest, finish.offer),
            request_id=request.request_id,
            number=finish.offer.number,
            tp_size=self._engine.tp_size,
            pp_size=self._engine.pp_size,
            key=self._config.params_key,
        )

    def edge_of_offer(self, request_id: str) -> GroupBlockIds:
        """Blocks of an offer in ``computed`` that the engine must keep although its own rule for
        windows frees them after this step; by group and position, -1 for every other block.

        An engine that cannot keep them says -1 for them when the request has finished, and the
        request is not offered.
        """
        return self._offers.edge(request_id)

    def withdraw_offer(self, request_id: str) -> None:
        """No sink will read the KV of this finished request: its blocks come back through
        finished_sending at once, not after its lease.
        """
        self._offers.withdraw(request_id)

    def forget_request(self, request_id: str) -> None:
        """The engine forgets a finished request before finished_sending, and keeps its blocks by
        other means until then. Only for one that request_finished has said to keep.
        """
        self._offers.forget(request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutputLike) -> ConnectorMetadata:
        """NO_ORDERS itself where there are none. ``scheduler_output`` is only read."""
        self._step_loads.begin_step(scheduler_output.num_scheduled_tokens, self._now())
        orders = self._loads.step(self._offers.step(scheduler_output))
        if self._must_tell():
            self._told_open = self.num_open
            orders = msgspec.structs.replace(orders, num_open=self._told_open)
        if self._manifest_is_new:
            self._manifest_is_new = False
            orders = msgspec.structs.replace(orders, manifest=self._manifest)
        return orders

    def update_connector_output(self, output: KVConnectorOutput) -> dict[str, Plain]:
        """Take the aggregated reports of the ranks. Returns why requests will run plain whose offer
        was looked for in vain.
        """
        missed: dict[str, Plain] = {}
        if output.must_drain:
            self.drain()
        if output.near:
            self._step_loads.learn(output.near)
        for name, found in (output.found or {}).items():
            for request_id, source, plain in self._loads.found(name, found):
                missed[request_id] = self._warn(request_id, plain, source)
        failed = output.failed_recving or {}
        details = output.failure_details or {}
        for request_id in output.finished_recving or ():
            load, reason = self._loads.handed(request_id), failed.get(request_id)
            if load is None:
                continue  # the output of another connector
            was_aborted = load.state is LoadState.ABORTED
            self._loads.ended(request_id, reason)
            if load.is_in_step:
                self._counts["requests.in_step"] += 1
                if reason == Reason.DEADLINE:
                    self._step_loads.was_late(load.source, self._now())
            if reason is None:
                self._counts["requests.loaded"] += 1
                self._unused.works(load.source)
                continue
            self._reasons[reason] += 1
            self._failed[reason] += 1
            if was_aborted and reason == Reason.CANCELLED:
                continue  # its client has gone: not a failure
            detail = details.get(request_id, "")
            self._tell(self._unused.note(self._now(), request_id, reason, detail, load.source))
        for request_id in output.finished_sending or ():
            self._offers.sent(request_id)
        return missed

    def has_orders(self) -> bool:
        """Something waits for the next metadata: an idle engine should run one step."""
        has_news = self._manifest_is_new or self._must_tell()
        return has_news or self._offers.has_orders() or self._loads.has_orders()

    def _must_tell(self) -> bool:
        """What the ranks know of an engine that drains is not so any more."""
        return self.is_draining and self._told_open != self.num_open

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """How many requests were loaded, and why others ran without transferred KV, since the last
        call. Once a step: it also writes the summaries that are due.
        """
        self._tell(self._unused.due(self._now()))
        if not (self._reasons or self._counts):
            return None
        num_new_pairs = self._unused.take_new_pairs()
        if num_new_pairs:
            self._counts["pairs.unusable"] = num_new_pairs
        taken = [dict(each) for each in (self._counts, self._reasons, self._failed)]
        self._counts, self._reasons, self._failed = Counter(), Counter(), Counter()
        return KVConnectorStats(counts=taken[0], reasons=taken[1], failed=taken[2])

    def take_events(self) -> tuple[Any, ...]:
        """None: block events are the engine's own."""
        return ()

    def reset_cache(self) -> bool:
        """Break every offer; kept blocks come back through finished_sending."""
        self._offers.reset()
        return True

    def shutdown(self) -> None:
        """Write the summaries of warnings that were only counted. Offers end in the workers."""
        self._step_loads.close()
        self._tell(self._unused.rest())

    def _source_ref(self, manifest: EngineManifest, offer: Offer) -> SourceRef:
        front_door = manifest.rank(RankId(0, 0))
        may_be_another = self._config.curve_keys_dir is not None
        return SourceRef(
            engine_id=self._engine.engine_id,
            endpoint=front_door.control_endpoint,
            offer=OfferRef(offer.nonce, self._engine.incarnation),
            num_tokens=offer.num_tokens,
            digest=offer.digest,
            curve_public_key=front_door.curve_public_key if may_be_another else None,
        )

    def _count(self, request: RequestLike, reason: str, detail: str) -> None:
        """Count a reason that needs no warning."""
        self._reasons[str(reason)] += 1
        if detail:
            log.debug("request %s: KV not used: %s: %s", request.request_id, reason, detail)

    def _warn(
        self,
        request_id: str,
        plain: Plain,
        source: SourceRef | None = None,
        what: str = NOT_USED,
    ) -> Plain:
        reason, now_s = str(plain.reason), self._now()
        self._reasons[reason] += 1
        self._tell(self._unused.note(now_s, request_id, reason, plain.detail, source, what))
        return plain

    def _tell(self, lines: Iterable[Line]) -> None:
        for line in lines:
            log.log(line.level, "%s", line.text)
