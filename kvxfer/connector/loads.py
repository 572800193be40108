"""What the scheduler side knows of the requests whose KV it wants from elsewhere.

Life: wanted (the offer is held at its source) -> handed to the workers -> ended; or wanted -> given
up. An offer is asked for once: after an accept, a failure or a preemption the request computes by
itself, or it would wait for ever.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.connector.contract import RequestLike
from kvxfer.connector.offers import frozen_ids
from kvxfer.connector.records import AbortLoad, Hold, NewLoad, SourceRef, Unhold
from kvxfer.transfer.tokens import digest_keys, token_digest
from kvxfer.transfer.wire import Reason


class LoadState(enum.Enum):
    """Where a wanted load stands."""

    WANTED = "wanted"  # held at the source, not yet allocated here
    HANDED = "handed"  # given to the workers; they report it once
    ABORTED = "aborted"  # the same, and its request has ended meanwhile
    ENDED = "ended"  # accepted, failed or given up


@dataclass(slots=True)
class Load:
    """One wanted load; ``num_local_tokens`` is what the engine last said that it has itself."""

    source: SourceRef
    digest: bytes
    num_usable_tokens: int
    state: LoadState = LoadState.WANTED
    num_local_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepLoads:
    """What one step's metadata says of loads."""

    loads: tuple[NewLoad, ...] = ()
    aborts: tuple[AbortLoad, ...] = ()
    holds: tuple[Hold, ...] = ()
    unholds: tuple[Unhold, ...] = ()


NO_LOADS = StepLoads()
"""What most steps say of them."""


class LoadBook:
    """All wanted loads of an engine, in the scheduler's process."""

    def __init__(self) -> None:
        self._by_id: dict[str, Load] = {}
        self._loads: list[NewLoad] = []
        self._aborts: list[AbortLoad] = []
        self._holds: list[Hold] = []
        self._unholds: list[Unhold] = []

    def want(self, request: RequestLike, source: SourceRef) -> Reason | None:
        """Hold the offer, or say why it cannot be for this prompt.

        Then the source is told nothing: the offer belongs to another request, which may still come.
        """
        if source.num_tokens > request.num_prompt_tokens:
            return Reason.TOKENS
        self._by_id[request.request_id] = Load(
            source=source,
            digest=token_digest(
                request.prompt_token_ids[: source.num_tokens],
                digest_keys(request, source.num_tokens),
            ),
            # The last prompt token is always computed here, to sample from: its KV is never worth
            # moving.
            num_usable_tokens=min(source.num_tokens, request.num_prompt_tokens - 1),
        )
        self._holds.append(Hold(request.request_id, source))
        return None

    def reject(self, request_id: str, source: SourceRef) -> None:
        """Its engine will never run the request that this offer was meant for."""
        self._unholds.append(Unhold(request_id, source, Reason.CANCELLED))

    def num_more_tokens(self, request_id: str, num_local_tokens: int) -> int:
        """How many tokens beyond the local ones can be loaded. May be asked any number of times."""
        load = self._wanted(request_id)
        if load is None:
            return 0
        load.num_local_tokens = num_local_tokens
        return max(0, load.num_usable_tokens - num_local_tokens)

    def allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> Reason | None:
        """Blocks are there: hand the load over, or give the offer up when nothing is needed (then
        the reason).
        """
        load = self._wanted(request_id)
        if load is None:
            return None
        if num_external_tokens == 0:
            return self._give_up(request_id, load, Reason.LOCAL_HIT)
        load.state = LoadState.HANDED
        self._loads.append(
            NewLoad(
                request_id=request_id,
                source=load.source,
                token_lo=load.num_local_tokens,
                token_hi=load.num_local_tokens + num_external_tokens,
                block_ids=frozen_ids(block_ids),
                digest=load.digest,
            )
        )
        return None

    def is_wanted(self, request_id: str) -> bool:
        """Held at the source, and not yet allocated here."""
        return self._wanted(request_id) is not None

    def ended(self, request_id: str, failure: str | None = None) -> bool:
        """Every rank has reported the load; ``failure`` names what failed it. False if there was no
        such load.

        A rank that failed before it asked has not cancelled, and its engine's claim would hold the
        source's blocks for a lease: rank 0 cancels everywhere. Not for refused tokens: that offer
        belongs to another request.
        """
        load = self._by_id.get(request_id)
        if load is None or load.state not in (LoadState.HANDED, LoadState.ABORTED):
            return False
        if load.state is LoadState.ABORTED:
            del self._by_id[request_id]
        load.state = LoadState.ENDED
        if failure is not None and failure != Reason.TOKENS:
            reason = Reason(failure) if failure in set(Reason) else Reason.CANCELLED
            self._unholds.append(Unhold(request_id, load.source, reason))
        return True

    def finish(self, request_id: str) -> Reason | None:
        """The request ended. A wanted load is given up (then the reason); one in flight is aborted,
        and what its report says counts.

        An engine that fails a request for its load ends it before it passes the report on.
        """
        load = self._by_id.get(request_id)
        if load is None or load.state is LoadState.ABORTED:
            return None
        if load.state is LoadState.HANDED:
            load.state = LoadState.ABORTED
            self._aborts.append(AbortLoad(request_id, Reason.CANCELLED))
            return None
        del self._by_id[request_id]
        if load.state is LoadState.WANTED:
            return self._give_up(request_id, load, Reason.CANCELLED)
        return None

    def has_orders(self) -> bool:
        """Something waits for the next step's metadata."""
        return bool(self._loads or self._aborts or self._holds or self._unholds)

    def step(self) -> StepLoads:
        """What has come up since the last step."""
        if not self.has_orders():
            return NO_LOADS
        orders = StepLoads(
            tuple(self._loads), tuple(self._aborts), tuple(self._holds), tuple(self._unholds)
        )
        for queue in (self._loads, self._aborts, self._holds, self._unholds):
            queue.clear()
        return orders

    def _wanted(self, request_id: str) -> Load | None:
        load = self._by_id.get(request_id)
        return load if load is not None and load.state is LoadState.WANTED else None

    def _give_up(self, request_id: str, load: Load, reason: Reason) -> Reason:
        load.state = LoadState.ENDED
        self._unholds.append(Unhold(request_id, load.source, reason))
        return reason
