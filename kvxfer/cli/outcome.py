"""What a run found: per request and in all. Pure: decides, prints nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvxfer.connector.records import LoadReport
from kvxfer.engine.digest import compare
from kvxfer.engine.rpc import Done, Token

_GOOD_STATUSES = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}


class Transfer(msgspec.Struct, frozen=True):
    """All ranks' loads of one request. Moments are seconds of this host's clock: the order, the
    first source that let it read, the last byte in its place, the last verdict.
    """

    nbytes: int
    wires: tuple[str, ...]
    handed_s: float
    granted_s: float
    placed_s: float
    finished_s: float

    @property
    def wait_s(self) -> float:
        """For the first contact, and for the engines of both sides to answer."""
        return max(0.0, self.granted_s - self.handed_s)

    @property
    def read_s(self) -> float:
        """The bytes were on their way; other requests' bytes were, too."""
        return max(0.0, self.placed_s - self.granted_s)

    @property
    def gbps(self) -> float | None:
        """GB/s, 1e9 bytes, while it was read; None where nothing was timed."""
        return self.nbytes / self.read_s / 1e9 if self.read_s > 0 else None


class KvCheck(msgspec.Struct, frozen=True):
    """The moved tokens ``[token_lo, token_hi)``, as far as both sides still hold them."""

    token_lo: int
    token_hi: int
    differences: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return not self.differences


class TokenDifference(msgspec.Struct, frozen=True):
    """The first token that is not the single engine's. The gaps: how far the chosen token's logit
    was ahead of the second best, on either run; None where that run had no such token.
    """

    position: int
    got: int | None
    expected: int | None
    logit_gap: float | None
    expected_logit_gap: float | None

    def __str__(self) -> str:
        gaps = (_gap(self.logit_gap), _gap(self.expected_logit_gap))
        return (
            f"token {self.position}: expected {self.expected}, got {self.got} "
            f"(logit gaps {gaps[1]} and {gaps[0]})"
        )


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``tokens_equal`` and ``kv`` are None where nothing was compared; ``failure``:
    why KV was not used, ``detail``: the same at length. ``ttft_s``: from sending it to decode's
    first token. ``text``: of the tokens, where there is a tokenizer.
    """

    name: str
    status: str
    num_prompt_tokens: int
    num_prefill_cached_tokens: int
    num_decode_cached_tokens: int
    num_external_tokens: int
    token_ids: tuple[int, ...]
    transfer: Transfer | None
    ttft_s: float | None
    failure: str | None
    detail: str
    tokens_equal: bool | None
    token_difference: TokenDifference | None
    kv: KvCheck | None
    text: str | None = None

    @property
    def is_recomputed(self) -> bool:
        """It ended well without the KV that it asked for."""
        return self.failure is not None and self.status in _GOOD_STATUSES

    def is_good(self, *, tokens_decide: bool, may_recompute: bool = False) -> bool:
        """It used its KV unless it ``may_recompute``, and what was compared is equal."""
        return (
            self.status in _GOOD_STATUSES
            and (may_recompute or not self.is_recomputed)
            and (self.kv is None or self.kv.is_equal)
            and not (tokens_decide and self.tokens_equal is False)
        )


@dataclass(slots=True)
class Answers:
    """Of one request, so far. ``single``: the single engine's tokens, None without one. Moments
    are of this host's clock, 0 for none: sent to prefill, decode's first token heard.
    """

    prefill: Done | None = None
    prefill_tokens: list[Token] = field(default_factory=list)
    decode: Done | None = None
    tokens: list[Token] = field(default_factory=list)
    single: list[Token] | None = None
    sent_s: float = 0.0
    first_token_s: float = 0.0
    failure: str | None = None

    @property
    def ttft_s(self) -> float | None:
        both = self.sent_s and self.first_token_s
        return self.first_token_s - self.sent_s if both else None


def judge(name: str, num_prompt_tokens: int, answers: Answers) -> Result:
    prefill, decode = answers.prefill, answers.decode
    difference = None
    if answers.single is not None:
        difference = _first_difference(answers.tokens, answers.single)
        # With states prefill leaves the last prompt token out, and what it answers means nothing.
        is_whole = prefill is None or prefill.num_prompt_tokens == num_prompt_tokens
        if difference is None and answers.prefill_tokens and is_whole:
            difference = _first_difference(answers.prefill_tokens, answers.single[:1])
    loads = decode.loads if decode else ()
    return Result(
        name=name,
        status=decode.status if decode else "FINISHED_ERROR",
        num_prompt_tokens=num_prompt_tokens,
        num_prefill_cached_tokens=prefill.num_cached_tokens if prefill else 0,
        num_decode_cached_tokens=decode.num_cached_tokens if decode else 0,
        num_external_tokens=decode.num_external_tokens if decode else 0,
        token_ids=tuple(token.token_id for token in answers.tokens),
        transfer=transfer(loads),
        ttft_s=answers.ttft_s,
        failure=answers.failure or (decode.failure if decode else None),
        detail=_detail(decode) or _detail(prefill),
        tokens_equal=None if answers.single is None else difference is None,
        token_difference=difference,
        kv=_kv_check(prefill, decode),
    )


def why_unused(decode: Done) -> str:
    """Why a request had to do without the KV that it asked for, in words; "" if it had not."""
    return ": ".join(filter(None, (decode.failure, _detail(decode)))) if decode.failure else ""


def _detail(end: Done | None) -> str:
    if end is None:
        return ""
    return next((load.detail for load in end.loads if load.detail), end.detail)


def transfer(loads: Sequence[LoadReport]) -> Transfer | None:
    """All ranks together; None when nothing was moved."""
    started = [load for load in loads if load.started_s > 0]
    if not any(load.nbytes for load in started):
        return None
    # A stream's first bytes may come before the answer that lets it read: then from the Pull on.
    return Transfer(
        nbytes=sum(load.nbytes for load in started),
        wires=tuple(sorted({wire for load in started for wire in load.transports})),
        handed_s=min(load.handed_s or load.started_s for load in started),
        granted_s=min(load.granted_s or load.started_s for load in started),
        placed_s=max(load.placed_s or load.finished_s for load in started),
        finished_s=max(load.finished_s for load in started),
    )


def busy_s(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of these spans of time lasted."""
    total_s, until_s = 0.0, float("-inf")
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def _first_difference(got: Sequence[Token], expected: Sequence[Token]) -> TokenDifference | None:
    for position in range(max(len(got), len(expected))):
        ours = got[position] if position < len(got) else None
        theirs = expected[position] if position < len(expected) else None
        if ours is None or theirs is None or ours.token_id != theirs.token_id:
            return TokenDifference(
                position=position,
                got=ours.token_id if ours else None,
                expected=theirs.token_id if theirs else None,
                logit_gap=ours.logit_gap if ours else None,
                expected_logit_gap=theirs.logit_gap if theirs else None,
            )
    return None


def _kv_check(prefill: Done | None, decode: Done | None) -> KvCheck | None:
    """Only the tokens that moved for this request: KV that the decode side had computed itself
    differs from the source's in the last bits, and is no copy of it.
    """
    if prefill is None or decode is None or not prefill.digests or not decode.digests:
        return None
    lo = decode.num_cached_tokens
    both = min(digest.num_tokens for digest in (*prefill.digests, *decode.digests))
    hi = min(lo + decode.num_external_tokens, both)
    if hi <= lo:
        return None
    return KvCheck(lo, hi, tuple(map(str, compare(prefill.digests, decode.digests, span=(lo, hi)))))


def _gap(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:.2g}"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All requests together. ``num_checked_...``: compared, ``num_equal_...``: of those.
    ``reasons``: why KV was not used, by name; ``num_recomputed``: requests that ended well without
    it, which is fine if they ``may_recompute``. ``read_s``: while at least one was read;
    ``gbps``: all bytes in that time. ``num_planned``: more than ``num_requests`` where the run was
    ended before.
    """

    num_requests: int
    num_planned: int
    num_failed: int
    num_prompt_tokens: int
    num_new_tokens: int
    num_prefill_cached_tokens: int
    num_decode_cached_tokens: int
    num_transfers: int
    nbytes: int
    read_s: float
    gbps: float | None
    median_wait_s: float | None
    most_wait_s: float | None
    median_ttft_s: float | None
    most_ttft_s: float | None
    wires: tuple[str, ...]
    num_checked_tokens: int
    num_equal_tokens: int
    num_checked_kv: int
    num_equal_kv: int
    reasons: dict[str, int]
    num_recomputed: int
    may_recompute: bool
    tokens_decide: bool
    is_good: bool
    wall_s: float


def summarise(
    results: Sequence[Result],
    *,
    tokens_decide: bool,
    wall_s: float,
    may_recompute: bool = False,
    num_planned: int | None = None,
) -> Summary:
    """``tokens_decide``: tokens that differ make the run bad (float32); else the KV decides.
    ``may_recompute``: KV that was asked for and not used does not make it bad. ``num_planned``:
    requests of the run, if it was ended before they were all over.
    """
    planned = len(results) if num_planned is None else num_planned
    transfers = [result.transfer for result in results if result.transfer is not None]
    nbytes = sum(each.nbytes for each in transfers)
    read_s = busy_s((each.granted_s, each.placed_s) for each in transfers)
    waits_s = [each.wait_s for each in transfers]
    ttfts_s = [result.ttft_s for result in results if result.ttft_s is not None]
    checked_kv = [result.kv for result in results if result.kv is not None]
    return Summary(
        num_requests=len(results),
        num_planned=planned,
        num_failed=sum(result.status not in _GOOD_STATUSES for result in results),
        num_prompt_tokens=sum(result.num_prompt_tokens for result in results),
        num_new_tokens=sum(len(result.token_ids) for result in results),
        num_prefill_cached_tokens=sum(result.num_prefill_cached_tokens for result in results),
        num_decode_cached_tokens=sum(result.num_decode_cached_tokens for result in results),
        num_transfers=len(transfers),
        nbytes=nbytes,
        read_s=read_s,
        gbps=nbytes / read_s / 1e9 if read_s > 0 else None,
        median_wait_s=statistics.median(waits_s) if waits_s else None,
        most_wait_s=max(waits_s, default=None),
        median_ttft_s=statistics.median(ttfts_s) if ttfts_s else None,
        most_ttft_s=max(ttfts_s, default=None),
        wires=tuple(sorted({wire for each in transfers for wire in each.wires})),
        num_checked_tokens=sum(result.tokens_equal is not None for result in results),
        num_equal_tokens=sum(result.tokens_equal is True for result in results),
        num_checked_kv=len(checked_kv),
        num_equal_kv=sum(check.is_equal for check in checked_kv),
        reasons=dict(Counter(result.failure for result in results if result.failure)),
        num_recomputed=sum(result.is_recomputed for result in results),
        may_recompute=may_recompute,
        tokens_decide=tokens_decide,
        is_good=len(results) == planned
        and all(
            result.is_good(tokens_decide=tokens_decide, may_recompute=may_recompute)
            for result in results
        ),
        wall_s=wall_s,
    )
