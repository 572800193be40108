"""vLLM's own records as :mod:`kvxfer.connector` reads them, and pins in its block pool. The
attributes named here are all that the plugin touches of a request, a block table, a step or a pool.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from typing import Any

import msgspec

_NULL_BLOCK = 0
"""vLLM's block that stands for none: out of a window, or never there."""

Tables = tuple[tuple[int, ...], ...]


def without_null(block_ids: Sequence[Sequence[int]]) -> Tables:
    """Block tables by group, -1 where vLLM has its null block."""
    return tuple(
        tuple(-1 if block_id == _NULL_BLOCK else block_id for block_id in ids) for ids in block_ids
    )


class RequestView(msgspec.Struct, frozen=True):
    """What is read of a vLLM request, at one moment.

    ``has_embeddings``: some of its prompt is not tokens. ``is_rejected``: it was turned away before
    it could run, and is here only to give its offer up; its tokens mean nothing.
    """

    request_id: str
    kv_transfer_params: Mapping[str, Any] | None
    prompt_token_ids: Sequence[int]
    num_prompt_tokens: int
    status: object
    lora_request: object
    mm_features: Sequence[Any]
    trace_headers: Mapping[str, str] | None
    has_embeddings: bool
    is_rejected: bool

    @property
    def wants_offer(self) -> bool:
        return bool((self.kv_transfer_params or {}).get("do_remote_decode"))


def view_request(request: Any) -> RequestView:
    token_ids = request.prompt_token_ids
    return RequestView(
        request_id=request.request_id,
        kv_transfer_params=request.kv_transfer_params,
        prompt_token_ids=() if token_ids is None else token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        status=request.status,
        lora_request=getattr(request, "lora_request", None),
        mm_features=getattr(request, "mm_features", None) or (),
        trace_headers=getattr(request, "trace_headers", None),
        has_embeddings=token_ids is None or getattr(request, "prompt_embeds", None) is not None,
        is_rejected=bool(getattr(request, "abort_immediately", False)),
    )


def without_last_token(view: RequestView) -> RequestView:
    """What is offered of a request whose state moves: decode computes the last token itself."""
    tokens = view.prompt_token_ids[:-1]
    return msgspec.structs.replace(view, prompt_token_ids=tokens, num_prompt_tokens=len(tokens))


def drop_last_token(request: Any, *, has_draft: bool) -> None:
    """Have a request computed up to its last prompt token, and no further: its answer is one token,
    which nobody uses but a draft. That makes the KV of the last token that is computed with the
    answer, so the answer is to be the token that is dropped. The caller's own list of tokens and
    sampling parameters stay as they are.
    """
    is_text = not getattr(request, "mm_features", None)  # others may be in no vocabulary
    if has_draft and is_text and not request.use_structured_output:
        params = request.sampling_params = copy(request.sampling_params)
        params.allowed_token_ids = [request.prompt_token_ids[-1]]
        params.temperature, params.min_tokens = 0.0, 0
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1]  # noqa: SLF001  # as vLLM's own connector does it
    request.num_prompt_tokens -= 1
    request.max_tokens = 1


class BlocksView(msgspec.Struct, frozen=True):
    """vLLM's ``KVCacheBlocks`` as kvxfer reads them: ids without the null block's."""

    blocks: Any

    def get_block_ids(self) -> Tables:
        return without_null(self.blocks.get_block_ids())


class _NewRequest(msgspec.Struct, frozen=True):
    req_id: str
    block_ids: Tables
    num_computed_tokens: int


class _CachedRequests(msgspec.Struct, frozen=True):
    """vLLM's CachedRequestData; its tables are looked at only if somebody asks for them."""

    cached: Any

    @property
    def req_ids(self) -> Sequence[str]:
        return self.cached.req_ids  # type: ignore[no-any-return]

    @property
    def new_block_ids(self) -> Sequence[Tables | None]:
        return [None if ids is None else without_null(ids) for ids in self.cached.new_block_ids]

    @property
    def resumed_req_ids(self) -> AbstractSet[str]:
        return self.cached.resumed_req_ids  # type: ignore[no-any-return]

    @property
    def num_computed_tokens(self) -> Sequence[int]:
        return self.cached.num_computed_tokens  # type: ignore[no-any-return]


class StepView(msgspec.Struct, frozen=True):
    """vLLM's ``SchedulerOutput`` as kvxfer reads it."""

    step: Any

    @property
    def scheduled_new_reqs(self) -> Sequence[_NewRequest]:
        return [
            _NewRequest(new.req_id, without_null(new.block_ids), new.num_computed_tokens)
            for new in self.step.scheduled_new_reqs
        ]

    @property
    def scheduled_cached_reqs(self) -> _CachedRequests:
        return _CachedRequests(self.step.scheduled_cached_reqs)

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        return self.step.num_scheduled_tokens  # type: ignore[no-any-return]

    @property
    def preempted_req_ids(self) -> AbstractSet[str] | None:
        """Requests whose blocks were taken back since the last step."""
        return getattr(self.step, "preempted_req_ids", None)


_NEEDED = ("blocks", "touch", "free_blocks")
"""What is used of vLLM's block pool: the list of its blocks by id, one reference more, one less."""

_log = logging.getLogger("kvxfer.integrations")


def pins_of(pool: Any) -> Pins | None:
    """Pins in vLLM's block pool; None, with a line in the log, if it is not as we know it."""
    missing = [name for name in _NEEDED if not hasattr(pool, name)]
    if missing:
        _log.info(
            "vLLM's block pool: expected %s; without them the engine steps while it holds blocks, "
            "and offers no prompt whose window begins at the edge of a block",
            ", ".join(missing),
        )
        return None
    return Pins(pool)


class Pins:
    """The pinned blocks of an engine, by request. True while there are some.

    While vLLM itself keeps a finished request it steps without pause. A pin is one reference more
    to the blocks alone, so that vLLM can forget the request and sleep. A block that a window has
    left behind is kept likewise. ``pool``: vLLM's BlockPool, of all KV cache groups together.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._tables: dict[str, Tables] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def tables(self, request_id: str) -> Tables:
        """What :meth:`pin` was given for this request; nothing without a pin."""
        return self._tables.get(request_id, ())

    def pin(self, request_id: str, tables: Tables) -> None:
        """Keep these blocks, in use now (-1: none). ValueError for a request with a pin."""
        if request_id in self._tables:
            raise ValueError(f"request {request_id}: expected no pin, got a second one")
        self._pool.touch(self._blocks(tables))
        self._tables[request_id] = tables

    def unpin(self, request_ids: Iterable[str]) -> set[str]:
        """Give back what these requests have pinned: those of them that had a pin."""
        unpinned = {request_id for request_id in request_ids if request_id in self._tables}
        for request_id in unpinned:
            # The last first, as vLLM frees a request: a prefix is worth more than its end.
            self._pool.free_blocks(reversed(self._blocks(self._tables.pop(request_id))))
        return unpinned

    def unpin_all(self) -> None:
        self.unpin(list(self._tables))

    def _blocks(self, tables: Tables) -> list[Any]:
        blocks = self._pool.blocks
        return [blocks[block_id] for ids in tables for block_id in ids if block_id >= 0]
