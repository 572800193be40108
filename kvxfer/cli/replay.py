"""Send every prompt through prefill and then decode, several at once, and hear what becomes of it.

A request is queued, at prefill, at decode, or over; beside that, the single-engine run takes the
prompts one by one. With ``Dispatch.TOGETHER`` it is at both at once, from the first answer of the
prefill engine on; without an offer decode is asked again, for the prompt alone.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from kvxfer.cli.outcome import Answers, Result, judge, why_unused
from kvxfer.cli.prompts import Prompt
from kvxfer.cli.sides import Work
from kvxfer.connector.params import early_params, mint_request
from kvxfer.engine import rpc
from kvxfer.engine.config import OnLoadFailure
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.request import Status
from kvxfer.errors import KvxferError, PeerLost, ProtocolError
from kvxfer.proxy.settings import Dispatch

log = logging.getLogger("kvxfer.cli")

STALLED_S = 300.0
"""When no engine says anything for this long while requests are in flight, the run ends."""
_RECONNECT_TRY_S = 1.0
"""One attempt to reach an engine that has gone: answers come between its steps, and the largest
step of the reference engine takes less than this."""
_PREFILL_LOST = "prefill_lost"
"""The prefill engine went away before it had answered."""
_NO_OFFER = "no_offer"
"""The prefill engine answered without kv_transfer_params."""

Progress = Callable[[int, int], None]
"""Called with requests that are over, also at the single engine, and all."""


@dataclass(slots=True)
class RunEngine:
    """One engine of the run. ``group``: its processes, where they are ours. ``come_back_s``: how
    long its return is waited for when it has gone; None: its loss ends the run.
    """

    client: rpc.RpcClient
    group: EngineGroup | None = None
    come_back_s: float | None = None
    lost_at_s: float | None = field(default=None, init=False)


@dataclass(slots=True)
class _Job:
    prompt: Prompt
    answers: Answers = field(default_factory=Answers)
    is_at_prefill: bool = False
    is_at_decode: bool = False
    is_asked_again: bool = False
    """Decode is told to end it; when it has, it is asked for it without KV."""
    is_over: bool = False
    is_compared: bool = False
    """The single engine has said all of it."""


class Replay:
    """One run over all prompts. ``single``: the engine that the others are compared with, or None.
    ``on_load_failure``: also what happens to requests whose prefill engine has gone.
    """

    def __init__(
        self,
        work: Work,
        *,
        prefill: RunEngine,
        decode: RunEngine,
        single: RunEngine | None,
        on_load_failure: OnLoadFailure,
        progress: Progress,
        dispatch: Dispatch = Dispatch.IN_TURN,
    ) -> None:
        self._prefill, self._decode, self._single = prefill, decode, single
        self._in_flight = work.in_flight
        self._on_load_failure = on_load_failure
        self._progress = progress
        self._dispatch = dispatch
        # The prefill engine's last answer; it names the engine to who comes before the next.
        self._learned: dict[str, Any] | None = None
        # Ids are unique per engine, and an engine may have served other runs.
        run = secrets.token_hex(4)
        self._jobs = {f"{run}-{i}": _Job(prompt) for i, prompt in enumerate(work.prompts)}
        self._queue = deque(self._jobs)
        self._single_queue = deque(self._jobs if single else ())
        self._single_open = len(self._single_queue)
        self._num_done = 0
        self._open: set[str] = set()
        self._started_s = self._heard_s = time.monotonic()

    def run(self) -> list[Result]:
        """All results in order. Raises PeerLost and KvxferError where the run cannot go on."""
        self._next_single()
        self._start_due()
        while self._num_done < len(self._jobs):
            self._hear()
            self._start_due()
        return self.results()

    def results(self) -> list[Result]:
        """Of the prompts that are over by now, in order."""
        return [
            judge(
                job.prompt.name,
                len(job.prompt.token_ids),
                job.answers if job.is_compared else replace(job.answers, single=None),
            )
            for job in self._jobs.values()
            if job.is_over
        ]

    def _start_due(self) -> None:
        now_s = time.monotonic() - self._started_s
        while self._queue and len(self._open) < self._in_flight:
            request_id = self._queue[0]
            if self._jobs[request_id].prompt.arrival_s > now_s or self._awaits_prefill():
                return
            self._queue.popleft()
            self._open.add(request_id)
            self._ask_prefill(request_id)

    def _awaits_prefill(self) -> bool:
        """The engine has gone, is needed, and has not been gone for too long."""
        engine = self._prefill
        if engine.lost_at_s is None or engine.come_back_s is None or not self._queue:
            return False
        return time.monotonic() - engine.lost_at_s <= engine.come_back_s

    def _ask_prefill(self, request_id: str) -> None:
        job = self._jobs[request_id]
        job.answers.sent_s = time.monotonic()
        if self._prefill.lost_at_s is not None:
            self._without_prefill(request_id, _PREFILL_LOST)
            return
        job.is_at_prefill = True
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        name, is_together = mint_request(), self._dispatch is Dispatch.TOGETHER
        early = early_params(self._learned, name) if is_together else None
        if early is not None:
            params["kvxfer"] = {"request": name}
        self._prefill.client.send(rpc.Generate(request_id, job.prompt.token_ids, 1, params))
        if early is not None:
            self._ask_decode(request_id, early)

    def _ask_decode(self, request_id: str, params: dict[str, Any] | None) -> None:
        job = self._jobs[request_id]
        prompt, job.is_at_decode = job.prompt, True
        self._decode.client.send(
            rpc.Generate(request_id, prompt.token_ids, prompt.max_new_tokens, params)
        )

    def _without_prefill(self, request_id: str, reason: str) -> None:
        job = self._jobs[request_id]
        job.is_at_prefill = False
        if job.answers.decode is not None:
            self._over(request_id)
            return
        job.answers.failure = reason
        may_ask = self._on_load_failure is OnLoadFailure.RECOMPUTE
        if job.is_at_decode:  # it waits there for an offer that will never be
            job.is_asked_again = may_ask
            self._decode.client.send(rpc.Abort(request_id))
        elif may_ask:
            self._ask_decode(request_id, None)
        else:
            self._over(request_id)

    def _next_single(self) -> None:
        if self._single is not None and self._single_queue:
            request_id = self._single_queue.popleft()
            job = self._jobs[request_id]
            job.answers.single = []
            self._single.client.send(
                rpc.Generate(request_id, job.prompt.token_ids, job.prompt.max_new_tokens)
            )

    def _over(self, request_id: str) -> None:
        self._open.discard(request_id)
        if not self._jobs[request_id].is_over:
            self._jobs[request_id].is_over = True
            self._tell(request_id)

    def _tell(self, request_id: str) -> None:
        """Part of this request is over; it counts when all of it is."""
        job = self._jobs[request_id]
        if job.is_over and (job.is_compared or self._single is None):
            self._num_done += 1
            self._progress(self._num_done, len(self._jobs))

    def _hear(self) -> None:
        if self._awaits_prefill():
            self._try_to_reconnect(self._prefill)
        engines = [
            engine for engine in (self._prefill, self._decode, self._single) if engine is not None
        ]
        reachable = [engine for engine in engines if engine.lost_at_s is None]
        self._wait(reachable)
        for engine in reachable:
            if engine.group is not None:
                engine.group.check()
            try:
                messages = engine.client.poll(0)
            except PeerLost:
                self._lost(engine)
                continue
            for message in messages:
                self._heard_s = time.monotonic()
                self._handle(engine, message)
        num_open = len(self._open) + self._single_open
        if num_open and time.monotonic() - self._heard_s > STALLED_S:
            raise PeerLost(
                f"{num_open} requests: expected a word from an engine within {STALLED_S:g} s, "
                "got none"
            )

    def _wait(self, engines: list[RunEngine]) -> None:
        sources: list[zmq.Socket[bytes] | int] = []
        for engine in engines:
            sources += [*engine.client.sockets, *(engine.group.sentinels if engine.group else ())]
        wait_s = STALLED_S
        if self._queue and len(self._open) < self._in_flight:
            arrival_s = self._jobs[self._queue[0]].prompt.arrival_s + self._started_s
            wait_s = min(wait_s, max(0.0, arrival_s - time.monotonic()))
        if self._awaits_prefill():
            wait_s = 0.0  # the attempt to reconnect has waited already
        rpc.wait_for(sources, wait_s)

    def _handle(self, engine: RunEngine, message: rpc.ToClient) -> None:
        if isinstance(message, rpc.RequestRefused):
            if not message.request_id:
                raise ProtocolError(f"engine at {engine.client.endpoint}: {message.error}")
            raise KvxferError(f"engine {engine.client.info.engine_id} refused: {message.error}")
        if not isinstance(message, (rpc.Token, rpc.Done)) or message.request_id not in self._jobs:
            return
        if engine is self._single:
            self._single_said(message)
        elif engine is self._prefill:
            self._prefill_said(message)
        else:
            self._decode_said(message)

    def _prefill_said(self, message: rpc.Token | rpc.Done) -> None:
        job = self._jobs[message.request_id]
        if not job.is_at_prefill:
            return
        if isinstance(message, rpc.Token):
            job.answers.prefill_tokens.append(message)
            return
        job.answers.prefill = message
        params = message.kv_transfer_params
        if params is None:
            self._without_prefill(message.request_id, message.failure or _NO_OFFER)
            return
        job.is_at_prefill, self._learned = False, params
        if job.answers.decode is not None:
            self._decoded(message.request_id)
        elif not job.is_at_decode:
            self._ask_decode(message.request_id, params)

    def _decode_said(self, message: rpc.Token | rpc.Done) -> None:
        job = self._jobs[message.request_id]
        answers = job.answers
        if isinstance(message, rpc.Token):
            if not answers.tokens:
                answers.first_token_s = time.monotonic()
            answers.tokens.append(message)
            return
        job.is_at_decode = False
        if job.is_asked_again and message.status == Status.FINISHED_ABORTED.name:
            answers.tokens.clear()
            self._ask_decode(message.request_id, None)
            return
        answers.decode = message
        if not job.is_at_prefill:
            self._decoded(message.request_id)

    def _decoded(self, request_id: str) -> None:
        """Both have said all of it."""
        done = self._jobs[request_id].answers.decode
        assert done is not None
        self._tell_prefill(done)
        self._over(request_id)

    def _tell_prefill(self, done: rpc.Done) -> None:
        """What was offered in vain comes back at once, and a log elsewhere says why."""
        why = why_unused(done)
        if not why or self._prefill.lost_at_s is not None:
            return
        who = f"engine {self._decode.client.info.engine_id} on {socket.gethostname()}"
        is_here = self._prefill.group is not None  # and decode has written it to the same log
        self._prefill.client.send(rpc.Abort(done.request_id, "" if is_here else f"{who}: {why}"))

    def _single_said(self, message: rpc.Token | rpc.Done) -> None:
        answers = self._jobs[message.request_id].answers
        if isinstance(message, rpc.Token):
            if answers.single is not None:
                answers.single.append(message)
        else:
            self._single_open -= 1
            self._jobs[message.request_id].is_compared = True
            self._tell(message.request_id)
            self._next_single()

    def _lost(self, engine: RunEngine) -> None:
        if engine.group is not None:
            engine.group.check()
        if engine.come_back_s is None:
            raise PeerLost(
                f"engine at {engine.client.endpoint}: the connection ended; is it running?"
            )
        engine.lost_at_s, self._learned = time.monotonic(), None
        engine.client.close()
        log.warning(
            "engine %s at %s has gone; waiting up to %g s for it to come back",
            *(engine.client.info.engine_id, engine.client.endpoint, engine.come_back_s),
        )
        for request_id in sorted(self._open):
            if self._jobs[request_id].is_at_prefill:
                self._without_prefill(request_id, _PREFILL_LOST)

    def _try_to_reconnect(self, engine: RunEngine) -> None:
        try:
            before = engine.client
            client = rpc.RpcClient(
                before.endpoint,
                connect_timeout_s=_RECONNECT_TRY_S,
                kv=before.kv,
                engine_id=before.info.engine_id,
            )
        except PeerLost:
            return
        engine.client, engine.lost_at_s = client, None
        log.warning("engine %s is back", client.info.engine_id)
