"""What a step tells the ranks of its requests: all of new ones, of the others what has changed."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.engine.live import Live, Share
from kvxfer.engine.request_blocks import RequestBlocks
from kvxfer.engine.steps import CachedRequestData, NewRequestData


def step_data(
    shares: Sequence[Share], blocks: RequestBlocks
) -> tuple[tuple[NewRequestData, ...], CachedRequestData]:
    """The requests of a step; those that are new, and the tokens told, are marked as known."""
    new: list[NewRequestData] = []
    known: list[Share] = []
    for share in shares:
        if share.live.is_known_to_workers:
            known.append(share)
        else:
            new.append(_introduce(share.live, blocks))
    return tuple(new), CachedRequestData(
        req_ids=tuple(share.live.request.request_id for share in known),
        new_block_ids=tuple(
            share.new_block_ids if any(share.new_block_ids) else None for share in known
        ),
        num_computed_tokens=tuple(share.live.request.num_computed_tokens for share in known),
        new_token_ids=tuple(share.live.take_untold() for share in known),
    )


def _introduce(live: Live, blocks: RequestBlocks) -> NewRequestData:
    live.is_known_to_workers = True
    live.num_tokens_told = live.request.num_prompt_tokens
    return NewRequestData(
        req_id=live.request.request_id,
        prompt_token_ids=live.request.prompt_token_ids,
        block_ids=blocks.table(live.request),
        num_computed_tokens=live.request.num_computed_tokens,
    )
