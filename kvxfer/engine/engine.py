"""An engine as a script uses it: start it, send it prompts, close it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.engine.config import EngineConfig
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.rpc import (
    Abort,
    Done,
    Generate,
    Info,
    RequestRefused,
    RpcClient,
    Token,
    wait_for,
)
from kvxfer.errors import KvxferError, PeerLost

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Result:
    """How a request ended, and its tokens."""

    done: Done
    token_ids: tuple[int, ...]

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        return self.done.kv_transfer_params

    @property
    def kv_nbytes(self) -> int:
        """KV bytes that moved for it, all ranks."""
        return sum(load.nbytes for load in self.done.loads)


class Engine:
    """The processes of one engine and a client of them; used by one thread. A context manager.

    Ranks start at once and the first request waits for them, so several engines start side by side.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        set_up: Callable[[], object] | None = None,
    ) -> None:
        """``host``, ``port``: the request channel; ``set_up``: what each process does first."""
        self.config = config
        self.group = EngineGroup(config, host=host, port=port, set_up=set_up)
        self._client: RpcClient | None = None
        self._ids = itertools.count()
        self._tokens: dict[str, list[int]] = {}
        self._results: dict[str, Result | RequestRefused] = {}

    @property
    def client(self) -> RpcClient:
        """Connected at the first use. Raises what kept a rank from starting."""
        if self._client is None:
            self.group.ready()
            self.group.check()
            self._client = RpcClient(
                self.group.endpoint, connect_timeout_s=_CONNECT_TIMEOUT_S, kv=self.config.kv
            )
        return self._client

    def reconfigure(self, config: EngineConfig) -> None:
        """Requests in flight are gone. ValueError for other ranks or devices."""
        self._disconnect()
        self.group.reconfigure(config)
        self.config = config

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        max_new_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
        request_id: str | None = None,
        trace_headers: dict[str, str] | None = None,
    ) -> str:
        """Returns its id. ``trace_headers``: its ``traceparent`` and ``tracestate``. ValueError for
        the id of a request whose result is still to be had.
        """
        request_id = request_id or f"r{next(self._ids)}"
        if request_id in self._tokens or request_id in self._results:
            raise ValueError(f"request {request_id}: expected a new id, got one in use")
        self.client.send(
            Generate(
                request_id,
                tuple(prompt_token_ids),
                max_new_tokens,
                kv_transfer_params,
                trace_headers,
            )
        )
        self._tokens[request_id] = []
        return request_id

    def abort(self, request_id: str) -> None:
        self.client.send(Abort(request_id))

    def result(self, request_id: str, timeout_s: float = 60.0) -> Result:
        """Raises KvxferError if refused, PeerLost without an end in time or when a rank dies."""
        self._wait(request_id, timeout_s, "end", lambda: request_id in self._results)
        result = self._results.pop(request_id)
        if isinstance(result, RequestRefused):
            raise KvxferError(f"engine {self.config.engine_id} refused: {result.error}")
        return result

    def first_token(self, request_id: str, timeout_s: float = 60.0) -> None:
        """Wait for it, or for the request's end. Raises as :meth:`result` does."""
        self._wait(
            *(request_id, timeout_s, "token"),
            lambda: request_id in self._results or bool(self._tokens[request_id]),
        )

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        max_new_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> Result:
        request_id = self.submit(prompt_token_ids, max_new_tokens, kv_transfer_params)
        return self.result(request_id, timeout_s)

    def info(self) -> Info:
        """The engine as it stands; for use while no request is in flight."""
        return self.client.ask(_CONNECT_TIMEOUT_S)

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new, and finish the rest; results can be had until :meth:`close`. Whether
        nothing is left within ``timeout_s``. Raises PeerLost when a rank has ended.
        """
        return self.group.drain(timeout_s)

    def close(self) -> None:
        """Disconnect the client and end every rank. Idempotent."""
        self._disconnect()
        self.group.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._tokens.clear()
        self._results.clear()

    def _wait(
        self, request_id: str, timeout_s: float, what: str, has_come: Callable[[], bool]
    ) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not has_come():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise PeerLost(f"request {request_id}: no {what} within {timeout_s:g} s")
            self._hear(left_s)

    def _hear(self, timeout_s: float) -> None:
        client = self.client
        # The other ranks may wait for a dead one for seconds, and their connections stand.
        wait_for([*client.sockets, *self.group.sentinels], timeout_s)
        self.group.check()
        for message in client.poll(0):
            match message:
                case Token(request_id=request_id, token_id=token_id):
                    self._tokens[request_id].append(token_id)
                case Done(request_id=request_id):
                    tokens = tuple(self._tokens.pop(request_id))
                    self._results[request_id] = Result(message, tokens)
                case RequestRefused(request_id=request_id):
                    self._tokens.pop(request_id, None)
                    self._results[request_id] = message
