"""Engines of vLLM as the fleet of a storm (``tests/chaos``): started, killed, and asked as those of
the reference engine are. What they must answer is what one more engine of vLLM answers.
"""

from __future__ import annotations

import itertools
import json
import select
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvxfer.engine.group import EngineGroup
from kvxfer.engine.rpc import Abort, Done, Generate, RpcClient, ToClient, ToEngine, Token
from kvxfer.errors import PeerLost
from tests.chaos.child import Spec
from tests.chaos.fleet import ASIDE_S, IMPATIENT, MOST_GROWTH_NBYTES, Fleet, Member
from tests.chaos.names import Names
from tests.chaos.play import Play, Summary
from tests.chaos.storm import Kind, Plan, Shape, Twist
from tests.vllm import storm_worker
from tests.vllm.engines import (
    OFFER,
    START_TIMEOUT_S,
    Connector,
    Engine,
    EngineConfig,
    EngineDied,
)
from tests.vllm.processes import Process

MOST_NEW = 4
"""Tokens that a request of a storm asks for at most."""
KINDS = (
    *(Kind.KILL_SCHEDULER, Kind.STOP, Kind.STOP_IO, Kind.STOP_COPY, Kind.STOP_MAIN, Kind.STOP_ZMQ),
    *(Kind.MANGLE, Kind.CLOCK, Kind.WALL_CLOCK, Kind.RESET, Kind.MANGLE_CHUNKS),
)
"""What befalls an engine of one rank; its id on the port of another one is not vLLM's to choose."""
SHAPES = (
    Shape("p0", True, 1, 32, "", num_tokens=2048),
    Shape("d0", False, 1, 64, "", num_tokens=1280),
)
"""With room for ten and six prompts: of what is in flight most waits for blocks, on both sides."""
IN_FLIGHT = 24
TOKEN_NBYTES = 4 * 2 * 4 * 32 * 4
"""Layers, K and V, heads, head size, float32."""
GROWTH_NBYTES = 500 << 10
"""Of each request. An engine of vLLM 0.32 without a connector grew by 245 MB with 600 of these, and
by 441 with 1,800; with kvxfer by 135 and by 297.
"""
FACTS_S = 30.0
STATUS = {"length": "FINISHED_LENGTH_CAPPED", "abort": "FINISHED_ABORTED"}


SHARED = {"name": "SharedConnector", "module": "tests.vllm.shared_connector"}
"""vLLM's caches on a CPU cannot be mapped; this connector's can."""
STREAM = {"chunk_nbytes": 65536, "staging_slots": 3}


def weather(
    plan: Plan,
    folder: Path,
    wire: str,
    *,
    settings: Mapping[str, Any] | None = None,
    faults: str = "",
    in_flight: int = IN_FLIGHT,
) -> Summary:
    """One storm; as :func:`tests.chaos.running.weather` has it."""
    folder.mkdir(parents=True)
    own = {"transport": wire, **(STREAM if wire != "shm" else {}), **(settings or {})}
    connector = SHARED if wire == "shm" else {}
    with VllmFleet(folder, plan, connector=connector, settings=own, faults=faults) as fleet:
        return Play(plan, fleet, folder, wire, in_flight=in_flight).run()


class StormEngine(Engine):
    """``spec``: of its processes."""

    def __init__(self, config: EngineConfig, port: int, spec: Spec) -> None:
        self.config, self.port, self._spec = config, port, spec
        self._request_ids = itertools.count()
        self._start()

    def _launch(self, theirs: socket.socket) -> Process:
        return Process.fork(
            storm_worker.serve,
            (theirs, self.config.engine_args(self.port), self._spec),
            self.config.environment(self.port) | {"UCX_DEBUG_SIGNO": "SIGUSR2"},
        )

    @property
    def socket(self) -> socket.socket:
        return self._sock


class VllmGroup(EngineGroup):
    """The process of one engine, in the place of those of a reference engine."""

    def __init__(self, engine: StormEngine) -> None:
        self.engine = engine

    @property
    def pids(self) -> tuple[int, ...]:
        return (self.engine.process.pid,)

    def dead(self) -> list[str]:
        return [] if self.engine.process.is_alive else [f"engine {self.pids[0]}"]

    def kill(self) -> None:
        self.engine.kill()

    def close(self) -> None:
        self.engine.close()


class VllmClient(RpcClient):
    """The socket of a worker, in the place of the request channel. Never waits but in ``ask``."""

    def __init__(self, engine: StormEngine) -> None:
        self._engine, self._sock = engine, engine.socket
        self._pending = b""
        self._numbers = itertools.count(1_000_000)  # beside those of the engine's own calls
        self._aborts: dict[int, str] = {}
        self._answers: dict[int, Any] = {}
        self._heard: list[ToClient] = []

    @property
    def sockets(self) -> tuple[Any, ...]:
        return (self._sock,)

    def send(self, message: ToEngine) -> None:
        match message:
            case Generate(request_id, prompt, num_new, params):
                if params and "kvxfer" not in params:
                    params = OFFER
                request = {"request_id": request_id, "prompt": prompt, "max_tokens": num_new}
                self._call("submit", requests=[request | {"params": params}])
            case Abort(request_id):
                self._aborts[self._call("abort", request_id=request_id)] = request_id

    def poll(self, timeout_s: float) -> list[ToClient]:
        self._read(timeout_s)
        heard, self._heard = self._heard, []
        return heard

    def ask(self, timeout_s: float) -> Any:
        number, ends_s = self._call("info"), time.monotonic() + timeout_s
        while number not in self._answers:
            if time.monotonic() > ends_s:
                raise PeerLost(f"engine: expected an answer within {timeout_s:g} s, got none")
            self._read(0.05)
        return SimpleNamespace(**self._answers.pop(number))

    def close(self) -> None:
        """The engine closes its socket."""

    def _call(self, name: str, **arguments: Any) -> int:
        number = next(self._numbers)
        line = json.dumps({"call": number, "do": name, **arguments}).encode() + b"\n"
        try:
            self._sock.sendall(line)  # a few KB each: more than all in flight fits the socket
        except OSError as e:
            self._has_gone(e)
        return number

    def _has_gone(self, cause: object) -> None:
        if self._engine.process.is_alive:
            raise PeerLost(f"engine: its socket has ended: {cause}")

    def _read(self, timeout_s: float) -> None:
        if not select.select([self._sock], [], [], timeout_s)[0]:
            return
        try:
            chunk = self._sock.recv(1 << 20)
        except OSError:
            chunk = b""
        if not chunk:
            raise PeerLost("engine: its socket has ended")
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if "finished" in message:
            self._finished(**message["finished"])
            return
        number = message.get("call")
        if number in self._aborts:
            request_id = self._aborts.pop(number)
            if message["value"]:  # else it had ended
                self._heard.append(_done(request_id, "abort", None, None))
        elif number is not None:
            assert "error" not in message, message
            self._answers[number] = message["value"]

    def _finished(
        self,
        request_id: str,
        token_ids: list[int],
        reason: str,
        params: dict[str, Any] | None,
        load: str | None,
        **_: object,
    ) -> None:
        self._heard += [Token(request_id, each, 0.0) for each in token_ids]
        offered = params if params and "kvxfer" in params else None
        self._heard.append(_done(request_id, reason, offered, load))


def _done(request_id: str, reason: str, params: dict[str, Any] | None, load: str | None) -> Done:
    return Done(
        request_id=request_id,
        status=STATUS.get(reason, reason),
        kv_transfer_params=params,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        num_external_tokens=1 if load == "" else 0,
        failure=load or None,
        loads=(),
        digests=(),
    )


class VllmFleet(Fleet):
    """A prefill and a decode engine, and the one that says what is right.

    Args:
        connector: of both, in the words of :class:`tests.vllm.engines.Connector`.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        *,
        connector: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        faults: str = "",
    ) -> None:
        self.names = Names()
        self._networks = None
        self._folder, self._seed, self._plan = folder, plan.seed, plan
        self._connector = dict(connector or {})
        self._settings = {**IMPATIENT, "log_level": "CRITICAL", **(settings or {})}
        self.most_growth_nbytes = MOST_GROWTH_NBYTES + len(plan.asks) * GROWTH_NBYTES
        self.faults = faults
        self.members: dict[str, Member] = {}
        self.had_pids: set[int] = set()
        self._claims: list[socket.socket] = []
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._reference = Engine(EngineConfig())
        try:
            for shape in plan.fleet:
                self.members[shape.name] = self._member(shape)
            self._prepare(plan)
        except BaseException:
            self.close()
            raise

    def _member(self, shape: Shape) -> Member:
        engine = self._launched(shape, self._claimed_port())
        return Member(shape, engine.config, VllmGroup(engine))  # type: ignore[arg-type]

    def _launched(self, shape: Shape, port: int) -> StormEngine:
        role = "kv_producer" if shape.is_prefill else "kv_consumer"
        config = EngineConfig(
            Connector(role=role, policy="recompute", extra=self._settings, **self._connector),
            block_tokens=shape.block_size,
            kv_nbytes=shape.num_tokens * TOKEN_NBYTES,
        )
        spec = Spec(
            folder=str(self._folder),
            engine_id=shape.name,
            seed=self._seed + len(self.had_pids),
            faults=self.faults,
        )
        engine = StormEngine(config, port, spec)
        self.had_pids.add(engine.process.pid)
        return engine

    # ------------------------------------------------------------------ what is right

    def _prepare(self, plan: Plan) -> None:
        """All answers of the plan at once: side by side they take a third of the time."""
        prompts = {ask.prompt() for ask in plan.asks}
        turned = [ask.prompt()[::-1] for ask in plan.asks if ask.twist is Twist.OTHER_PROMPT]
        self._learn(sorted(prompts.union(turned)))

    def _learn(self, prompts: Iterable[tuple[int, ...]]) -> None:
        todo = list(prompts)
        for answer, prompt in zip(self._reference.generate_all(todo, MOST_NEW), todo, strict=True):
            self._answers[prompt] = tuple(answer.token_ids)

    def answer(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """What one engine says to it."""
        if prompt not in self._answers:
            self._learn([prompt])
        return self._answers[prompt][:num_tokens]

    # ------------------------------------------------------------------ lives

    def connect(self, member: Member) -> RpcClient:
        """Wait until it serves. Raises PeerLost."""
        engine = _engine(member)
        try:
            engine.wait_ready(START_TIMEOUT_S)
            self._wait_for_facts(engine)
        except (EngineDied, TimeoutError) as e:
            raise PeerLost(f"{member.name}: {e}") from e
        member.client = VllmClient(engine)
        self._read_facts(member)
        return member.client

    def _wait_for_facts(self, engine: StormEngine) -> None:
        path, ends_s = self._folder / f"{engine.process.pid}.facts", time.monotonic() + FACTS_S
        while not path.exists():
            if time.monotonic() > ends_s or not engine.process.is_alive:
                raise TimeoutError(f"expected facts, got none:\n{engine.process.log_end()}")
            time.sleep(0.01)

    def says(self, member: Member) -> str:
        try:
            return str(member.client.ask(ASIDE_S)) if member.client else "it has no client"
        except PeerLost as e:
            return str(e)

    def serves(self, member: Member) -> bool:
        return bool(select.select([_engine(member).socket], [], [], 0)[0])

    def restart(self, member: Member) -> None:
        engine = self._launched(member.shape, _engine(member).port)
        member.group = VllmGroup(engine)
        member.begin_anew()

    def close(self) -> None:
        super().close()
        self._reference.close()


def _engine(member: Member) -> StormEngine:
    assert isinstance(member.group, VllmGroup)
    return member.group.engine
