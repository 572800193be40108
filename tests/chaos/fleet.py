"""The engines of a storm as processes: started, stopped, killed, and what they hold."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.config import load_config
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.rpc import RpcClient
from kvxfer.errors import KvxferError, PeerLost
from tests.chaos.child import Facts, Order, Spec, set_up, stop_thread, tell, trace_thread
from tests.chaos.content import VOCAB_SIZE, answer_of
from tests.chaos.names import CLAIM, Names
from tests.chaos.standing import descriptors_of, look_at, more_of, num_in_no_state
from tests.chaos.storm import LONGEST_PROMPT, STEP_TOKENS, Kind, Shape
from tests.end_to_end.harness import tiny_model
from tests.helpers import free_port
from tests.two_hosts import DEVICE, Network

Networks = tuple[Network, Network]
NOBODY = "02:00:00:00:00:99"

NUM_KV_HEADS = 4
IMPATIENT: dict[str, Any] = {
    "lease_s": 1.5,
    "keep_s": 0.4,
    "max_hold_s": 6.0,
    "pull_timeout_s": 1.5,
    "peer_silent_s": 1.0,
    "connect_timeout_s": 1.5,
    "early_wait_s": 2.5,
}
"""Every stop of 3 s and more is longer than each of them but the longest hold. The longest stop is
longer than that, and than what the request channel waits for: clients are lost then.
"""
STREAM: dict[str, Any] = {"chunk_nbytes": 8192, "staging_slots": 3}
"""Staging is full as soon as two requests move, and a transfer has many chunks."""
MOST_GROWTH_NBYTES = 64 << 20
"""Of resident memory, for each stream, which has a thread of ZeroMQ. A flood of messages is 150 MB,
of which an allocator keeps parts: 4 threads kept 99 MB of 26 floods, and 135 of 80.
"""
CONNECT_S = 20.0
ASIDE_S = 2.0
"""In which an engine that hangs may say how it stands; the storm waits for it."""
DEATH_S = 15.0
"""In which the other ranks of an engine end when one was killed, or their parent ends them."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has. ``mappings``: of memory that processes share; ``kinds``: of its
    descriptors, how many of each; ``lost``: sockets in no state. UCX loses one, where NIXL makes
    its connections, for each peer that cannot be connected to at once (``docs/wires.md``).
    """

    threads: int
    descriptors: int
    mappings: int
    resident_nbytes: int
    kinds: Counter[str]
    lost: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Of a process that runs."""
        folder = Path(f"/proc/{pid}")
        status = dict(
            line.split(":", 1)
            for line in (folder / "status").read_text().splitlines()
            if ":" in line
        )
        kinds: Counter[str] = Counter()
        for path in (folder / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                kinds[os.readlink(path).partition(":[")[0]] += 1
        return cls(
            threads=len(os.listdir(folder / "task")),
            descriptors=kinds.total(),
            kinds=kinds,
            lost=num_in_no_state(pid),
            mappings=(folder / "maps").read_text().count("/memfd:"),
            resident_nbytes=int(status["VmRSS"].split()[0]) * 1024,
        )


@dataclass(frozen=True, slots=True)
class Pools:
    """Shared pools of a process, by inode: ``own`` ones, and those of others that it maps or holds
    open.
    """

    own: frozenset[int]
    mapped: frozenset[int]

    @classmethod
    def of(cls, pid: int) -> Pools:
        """Of a process that runs. Its own descriptors can be written to, others' only read."""
        own, mapped = set[int](), set[int]()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(path).startswith(_POOL):
                    is_own = bool(path.lstat().st_mode & 0o200)
                    (own if is_own else mapped).add(path.stat().st_ino)
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if _POOL in line:
                mapped.add(int(line.split()[4]))
        return cls(frozenset(own), frozenset(mapped - own))


_POOL = "/memfd:kvxfer-pool"


@dataclass(slots=True)
class Member:
    """One engine, in one life after the other.

    ``is_usurper``: this life has another engine id on the same port. ``back_at_s``: when it is
    started anew; None: it runs, or is about to. ``last_served``: the last life that has served.
    ``process_until_s``, ``thread_until_s``: one stands still, and whoever connects would wait.
    ``begun_s``: when this life began.
    """

    shape: Shape
    config: EngineConfig
    group: EngineGroup
    client: RpcClient | None = None
    lives: int = 1
    last_served: int = 0
    is_usurper: bool = False
    back_at_s: float | None = None
    process_until_s: float = 0.0
    thread_until_s: float = 0.0
    begun_s: float = 0.0
    facts: dict[int, Facts] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def pids(self) -> tuple[int, ...]:
        """By rank."""
        return tuple(reversed(self.group.pids))

    def begin_anew(self) -> None:
        self.lives += 1
        self.back_at_s = None
        self.process_until_s = self.thread_until_s = 0.0

    @property
    def stands_until_s(self) -> float:
        return max(self.process_until_s, self.thread_until_s)

    def stands_for(self, duration_s: float, *, is_thread: bool) -> float:
        """A process or a thread was told to stand still; returns for how long something does.

        A thread has its signal when its process goes on, whichever was told first, and sleeps then.
        """
        now_s = time.monotonic()
        if is_thread:
            begins_s = max(now_s, self.process_until_s)
            self.thread_until_s = max(self.thread_until_s, begins_s + duration_s)
        else:
            self.process_until_s = max(self.process_until_s, now_s + duration_s)
            if self.thread_until_s > now_s:
                self.thread_until_s += duration_s
        return self.stands_until_s - now_s


class Fleet:
    """All engines. A context manager that leaves nothing behind.

    Args:
        folder: for the model, and for what processes write.
        wire: the transport of all; ``settings``: of all, before those of the storm.
        planted: the name of a fault in all processes, see :mod:`tests.chaos.planted`.
        faults: of all wires, one that takes a seed.
        networks: of the prefill engines, and of the decode engines; None: all are on this host.
    """

    def __init__(
        self,
        folder: Path,
        shapes: tuple[Shape, ...],
        *,
        wire: str,
        seed: int,
        settings: Mapping[str, Any] | None = None,
        device: str = "cpu",
        planted: str = "",
        faults: str = "",
        networks: Networks | None = None,
    ) -> None:
        self.names = Names()
        self._networks = networks
        self._folder, self._seed = folder, seed
        self._planted, self.faults = planted, faults
        self._model = tiny_model(folder, num_kv_heads=NUM_KV_HEADS)
        base = {**IMPATIENT, **(STREAM if wire != "shm" else {}), **(settings or {})}
        self._settings = {"transport": wire, **base}
        num_streams = max(1, self._settings.get("zmq_streams", 1))
        self.most_growth_nbytes = MOST_GROWTH_NBYTES * num_streams
        self._device = device
        self.members: dict[str, Member] = {}
        self.had_pids: set[int] = set()
        self._claims: list[socket.socket] = []
        self._is_unplugged, self._plugged_s = False, 0.0
        try:
            for shape in shapes:
                config = self._config(shape)
                self.members[shape.name] = Member(shape, config, self._started(config, shape))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def _config(self, shape: Shape) -> EngineConfig:
        settings = {**self._settings, "port": self._claimed_port() if shape.is_prefill else 0}
        if not shape.presumes:
            settings["early_ahead"] = 0.0
        if self._networks is not None:
            own, other = self._networks if shape.is_prefill else self._networks[::-1]
            settings |= {"host": own.address, "allowed_peers": [other.address]}
            settings["trust_network"] = True
        devices: tuple[int, ...] = ()
        if self._device == "cuda":
            import torch

            number = list(self.members).__len__()
            count = torch.cuda.device_count()
            devices = tuple((number + rank) % count for rank in range(shape.tp_size))
        return EngineConfig(
            role=Role.PREFILL if shape.is_prefill else Role.DECODE,
            engine_id=shape.name,
            model=self._model,
            tp_size=shape.tp_size,
            block_size=shape.block_size,
            layout=shape.layout,
            num_blocks=shape.num_tokens // shape.block_size,
            max_model_len=LONGEST_PROMPT + 64,
            max_num_seqs=64,
            max_num_batched_tokens=STEP_TOKENS,
            device=self._device,
            devices=devices,
            kv=load_config(self._settings | settings, environ={}).config,
        )

    @property
    def prefill_network(self) -> int:
        """The process whose network the prefill engines have; 0: that of this host."""
        return self._networks[0].pid if self._networks else 0

    def _claimed_port(self) -> int:
        """A free one that no other storm takes as long as this fleet is there: while an engine is
        dead, its port is free.
        """
        while True:
            port = free_port()
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0{CLAIM.removeprefix('@')}{port}")
            except OSError:
                claim.close()
                continue
            self._claims.append(claim)
            return port

    def _started(self, config: EngineConfig, shape: Shape) -> EngineGroup:
        spec = Spec(
            folder=str(self._folder),
            engine_id=config.engine_id,
            seed=self._seed + len(self.had_pids),
            slow_s=shape.slow_s if self._device == "cpu" else 0.0,
            planted=self._planted,
            faults=self.faults,
            network=self._networks[not shape.is_prefill].pid if self._networks else 0,
        )
        group = EngineGroup(config, set_up=partial(set_up, spec))
        self.names.made(str(vars(group)["_folder"]))
        self.had_pids.update(group.pids)
        return group

    # ------------------------------------------------------------------ lives

    def connect(self, member: Member) -> RpcClient:
        """Wait until it serves. Raises KvxferError."""
        endpoint = member.group.endpoint
        member.client = RpcClient(endpoint, connect_timeout_s=CONNECT_S)
        self._read_facts(member)
        return member.client

    def _read_facts(self, member: Member) -> None:
        member.facts, member.last_served = {}, member.lives
        for pid in member.pids:
            path = self._folder / f"{pid}.facts"
            facts = msgspec.json.decode(path.read_bytes(), type=Facts)
            member.facts[facts.rank] = facts
            self.names.look_at(pid)

    def answer(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """What is right."""
        return answer_of(prompt, num_tokens)

    def serves(self, member: Member) -> bool:
        """Has its new life reported? Never waits."""
        return member.group.has_news

    def forget_client(self, member: Member) -> None:
        """Its connection has ended, or is to."""
        if member.client is not None:
            member.client.close()
            member.client = None

    def kill(self, member: Member, rank: int) -> bool:
        """kill -9 of one process; False if it has gone."""
        return _signal(member.pids[rank], signal.SIGKILL)

    def bury(self, member: Member) -> None:
        """End what is left of a life, as a supervisor does."""
        self.forget_client(member)
        self.go_on(member)
        member.group.kill()
        member.group.close()

    def restart(self, member: Member) -> None:
        """A new life on the same port."""
        name = f"{member.name}-other" if member.is_usurper else member.name
        member.config = msgspec.structs.replace(member.config, engine_id=name)
        member.group = self._started(member.config, member.shape)
        member.begin_anew()
        member.begun_s = time.monotonic()

    # ------------------------------------------------------------------ what befalls them

    def stop(self, member: Member, ranks: tuple[int, ...]) -> bool:
        """SIGSTOP; False if none of them runs."""
        pids = {member.pids[rank] for rank in ranks}
        stopped = {pid for pid in pids if _signal(pid, signal.SIGSTOP)}
        member.stopped |= stopped
        return bool(stopped)

    def go_on(self, member: Member) -> None:
        """SIGCONT for all that stand."""
        for pid in member.stopped:
            _signal(pid, signal.SIGCONT)
        member.stopped.clear()

    def stop_thread(self, member: Member, rank: int, kind: str, duration_s: float) -> str:
        """One thread of a rank, found by what it does, or all of ZeroMQ's, of which some idle;
        returns which, "" for none.
        """
        facts = member.facts.get(rank)
        if facts is None:
            return ""
        if kind == "zmq":
            held = [tid for tid in threads_of_zmq(facts.pid) if trace_thread(tid, duration_s)]
            return f"{kind} threads {held}" if held else ""
        for tid in [tid for tid, name in facts.threads.items() if _is_kind(name, kind)]:
            if stop_thread(facts, tid, duration_s):
                return f"{kind} thread {tid}"
        return ""

    def cut(self, kind: Kind) -> None:
        """The network, until it heals. A host that is cut off from the other one sends to an
        address that nobody has: what it sends is lost, and it is told nothing.
        """
        assert self._networks is not None
        first, second = self._networks
        if kind is Kind.UNPLUG:
            self._is_unplugged = True
            first.ip(f"link set {DEVICE} down")
        for own, other, cutting in (
            (first, second, (Kind.CUT_WHOLE, Kind.CUT_PREFILL)),
            (second, first, (Kind.CUT_WHOLE, Kind.CUT_DECODE)),
        ):
            if kind in cutting:
                own.ip(f"neigh replace {other.address} lladdr {NOBODY} nud permanent dev {DEVICE}")

    def heal(self) -> None:
        """The network is whole."""
        assert self._networks is not None
        for own in self._networks:
            own.ip(f"link set {DEVICE} up")
            own.ip(f"neigh flush dev {DEVICE} nud permanent")
        if self._is_unplugged:
            self._is_unplugged, self._plugged_s = False, time.monotonic()

    def had_network(self, member: Member) -> bool:
        """All the while since this life began: without a cable UCX has no device to start with."""
        return not self._is_unplugged and self._plugged_s < member.begun_s

    def tell(self, member: Member, rank: int, order: Order) -> bool:
        """Through the door of a rank."""
        facts = member.facts.get(rank)
        return facts is not None and tell(facts, order)

    def look_at(self, member: Member) -> list[str]:
        """Where the threads of its processes stand, into files of the folder; their names. Beside
        them is what each connector has to do, if the process can say it. Asked last: it is woken.
        """
        names = {facts.pid: facts.threads for facts in member.facts.values()}
        files = look_at({pid: names.get(pid, {}) for pid in member.pids}, self._folder)
        for rank, facts in member.facts.items():
            with more_of(self._folder / f"{facts.pid}.state"):
                self.tell(member, rank, Order(state=True))
        return files

    def says(self, member: Member) -> str:
        """What it says of itself to another client, or why there is no answer."""
        try:
            with RpcClient(member.group.endpoint, connect_timeout_s=ASIDE_S) as client:
                return msgspec.json.encode(client.info).decode()
        except KvxferError as e:
            return str(e)

    def usages(self) -> dict[tuple[str, int], Usage]:
        """By engine and rank."""
        return {
            (member.name, rank): Usage.of(pid)
            for member in self
            for rank, pid in enumerate(member.pids)
        }

    def write_descriptors(self, when: str) -> None:
        """Of each process, into a file of the folder: what a leak is can only be seen in time."""
        for member in self:
            for rank, pid in enumerate(member.pids):
                path = self._folder / f"{member.name}-{rank}-{when}.descriptors"
                path.write_text("\n".join([*descriptors_of(pid), ""]), encoding="utf-8")

    def pools_of_the_gone(self) -> dict[tuple[str, int], int]:
        """How many pools a rank still maps whose owners have ended, by engine and rank; those that
        map none are left out.
        """
        pools = {
            (member.name, rank): Pools.of(pid)
            for member in self
            for rank, pid in enumerate(member.pids)
        }
        alive = frozenset[int]().union(*(each.own for each in pools.values()))
        gone = {rank: len(each.mapped - alive) for rank, each in pools.items()}
        return {rank: number for rank, number in gone.items() if number}

    def close(self) -> None:
        """End all of them."""
        for member in self.members.values():
            with suppress(KvxferError, PeerLost):
                self.forget_client(member)
            self.go_on(member)
        for member in self.members.values():
            member.group.close()
        for claim in self._claims:
            claim.close()


def _signal(pid: int, number: signal.Signals) -> bool:
    """False if it has ended, reaped or not."""
    is_there = _runs(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    return is_there


def _is_kind(name: str, kind: str) -> bool:
    return {
        "main": name == "MainThread",
        "io": name.startswith("kvxfer-io"),
        "copy": "copy" in name,
    }.get(kind, False)


def threads_of_zmq(pid: int) -> list[int]:
    found: list[int] = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with suppress(OSError):
            if (task / "comm").read_text().startswith("ZMQbg/IO"):
                found.append(int(task.name))
    return found


def left_behind(pids: set[int], names: Names) -> list[str]:
    """Of engines that have ended: processes, shared memory, folders, sockets."""
    running = [f"process {pid} runs" for pid in pids if _runs(pid)]
    return running + [f"{name} is there" for name in names.left(pids)]


def _runs(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}") / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pids: set[int], timeout_s: float = DEATH_S) -> None:
    """Until none of them runs, or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)


assert VOCAB_SIZE == 512  # tiny_model's
