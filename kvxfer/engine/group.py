"""The processes of one engine, seen from the process that starts them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from kvxfer import errors
from kvxfer.engine.config import EngineConfig
from kvxfer.engine.links import DRAIN, STOP, Drained, Failed, Life, RankSpec, Ready, keeps_store

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0

_report = msgspec.msgpack.Decoder(Ready | Failed | Drained)


def forkserver() -> ForkServerContext:
    """Processes that start with torch loaded: 8 ranks in 3 to 4 s instead of 11 (measured)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvxfer.engine.rank"])
    # Ctrl-C reaches the whole foreground group, and so does the SIGTERM of systemd and timeout(1);
    # only this process decides what they mean. What is blocked here is blocked in the fork server
    # from its first instruction on, and in the processes that it forks. The resource tracker comes
    # first: its start unblocks both.
    multiprocessing.resource_tracker.ensure_running()
    with _blocked(signal.SIGINT, signal.SIGTERM):
        multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """What comes meanwhile takes effect at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EngineGroup:
    """One engine: a process per rank. Works as a context manager; leaves nothing behind.

    The processes start at once; ``ready()``, ``endpoint`` and ``kv_endpoint`` wait until they
    serve, so several groups can start side by side. A rank ends when its pipe to this process
    closes, so also when this process is killed.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        set_up: Callable[[], object] | None = None,
    ) -> None:
        """``host``, ``port``: the request channel; ``set_up``: what each does first, pickled."""
        self.config = config
        self._set_up = set_up
        self._folder = Path(tempfile.mkdtemp(prefix="kvxfer-"))
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._ready: Ready | None = None
        try:
            self._start(host, port)
        except BaseException:
            self.close()
            raise

    def _start(self, host: str, port: int) -> None:
        try:
            self._start_ranks(host, port)
        except (EOFError, ConnectionError) as e:  # the fork server has ended
            raise errors.KvxferError(
                f"engine {self.config.engine_id}: its processes did not start; the lines above say "
                "why"
            ) from e
        self._begin_life()

    def _start_ranks(self, host: str, port: int) -> None:
        context = forkserver()
        # Rank 0 last: by then the others' process ids are known.
        for rank in reversed(range(self.config.tp_size)):
            spec = RankSpec(
                tp_rank=rank,
                tp_size=self.config.tp_size,
                store=str(self._folder / "store"),
                device=self.config.rank_devices[rank],
                collectives=self.config.collectives,
                listen_host=host,
                listen_port=port,
                peer_pids=self.pids,
            )
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run_rank,
                args=(spec, theirs, self._set_up),
                name=f"{self.config.engine_id}-{rank}",
                daemon=True,
            )
            # A process that was told half of what it is to do complains, and nobody knows of it.
            with _blocked(signal.SIGINT, signal.SIGTERM):
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def _begin_life(self) -> None:
        self._deadline_s = time.monotonic() + START_TIMEOUT_S
        life = msgspec.msgpack.encode(
            Life(
                config=self.config,
                incarnation=secrets.token_bytes(16),
                token=secrets.token_hex(8),
            )
        )
        for pipe in self._pipes:
            with suppress(OSError):  # ``ready`` notices a rank that has ended
                pipe.send_bytes(life)

    def reconfigure(self, config: EngineConfig) -> None:
        """A new life in the same processes: new incarnation, new pool, new endpoints.

        Offers are broken, loads and requests are gone, and clients must connect anew. Returns at
        once; ``ready()`` waits and raises as after the start. Raises ValueError for another
        ``tp_size`` or other devices: that takes other processes.
        """
        if config.tp_size != self.config.tp_size:
            raise ValueError(
                f"tp_size: expected {self.config.tp_size}, which is how many processes engine "
                f"{self.config.engine_id} has, got {config.tp_size}; start another group"
            )
        if config.rank_devices != self.config.rank_devices:
            raise ValueError(
                f"device: expected {', '.join(self.config.rank_devices)}, which the processes of "
                f"engine {self.config.engine_id} have claimed, got "
                f"{', '.join(config.rank_devices)}; start another group"
            )
        self.ready()  # its report must not be taken for the new life's
        self.config = config
        self._ready = None
        self._begin_life()

    def ready(self) -> Ready:
        """Wait until all ranks serve, and where.

        Raises the error that kept a rank from starting, under its own class (ConfigError,
        ModelError, ...); the group is closed then.
        """
        if self._ready is None:
            try:
                self._ready = self._first_report()
            except BaseException:
                self.close()
                raise
            if not keeps_store(self.config.collectives):
                # The ranks have met: nothing on disk is needed any more.
                shutil.rmtree(self._folder, ignore_errors=True)
        return self._ready

    @property
    def endpoint(self) -> str:
        return self.ready().endpoint

    @property
    def kv_endpoint(self) -> str:
        return self.ready().kv_endpoint

    @property
    def metrics_endpoint(self) -> str:
        return self.ready().metrics_endpoint

    @property
    def has_news(self) -> bool:
        """Whether a rank has reported, or ended: :meth:`ready` does not wait."""
        return bool(wait([*self._pipes, *self.sentinels], 0))

    def _first_report(self) -> Ready:
        sentinels = {process.sentinel for process in self._processes}
        while self._pipes:
            left_s = max(0.0, self._deadline_s - time.monotonic())
            heard = wait([*self._pipes, *sentinels], timeout=left_s)
            reports = [self._read_report(pipe) for pipe in self._pipes if pipe in heard]
            for report in reports:
                if isinstance(report, Failed):
                    kind = getattr(errors, report.kind, errors.KvxferError)
                    raise kind(f"engine {self.config.engine_id}: {report.error}")
            for report in reports:
                if isinstance(report, Ready):
                    return report
            if any(report is not None for report in reports):
                continue  # the life before has drained, after its time was up
            if heard:
                raise errors.KvxferError(self._died("while starting"))
            if not left_s:
                raise errors.KvxferError(
                    f"engine {self.config.engine_id}: expected all ranks to serve within "
                    f"{START_TIMEOUT_S:g} s, got no report"
                )
        raise errors.KvxferError(f"engine {self.config.engine_id}: closed before it served")

    def _read_report(self, pipe: Connection) -> Ready | Failed | Drained | None:
        """None from a rank that ended without a word."""
        try:
            report: Ready | Failed | Drained = _report.decode(pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        return report

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, rank 0 last."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    @property
    def sentinels(self) -> tuple[int, ...]:
        """Descriptors to wait on: each becomes readable when its rank ends."""
        return tuple(process.sentinel for process in self._processes)

    def dead(self) -> list[str]:
        return [
            f"{process.name} ({_ending(process.exitcode)})"
            for process in self._processes
            if process.exitcode is not None
        ]

    def check(self) -> None:
        """Raise PeerLost when a rank has ended by itself."""
        if self.dead():
            raise errors.PeerLost(self._died("while serving"))

    def _died(self, when: str) -> str:
        # The first death takes the others along; a moment later all of them are known.
        wait(list(self.sentinels), timeout=0.1)
        return f"engine {self.config.engine_id}: died {when}: rank {', '.join(self.dead())}"

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new; wait until every request has ended and every offer is over. Whether
        that was so within ``timeout_s``; then :meth:`close` cuts nothing short.

        Raises PeerLost when a rank has ended.
        """
        self.ready()
        deadline_s = time.monotonic() + timeout_s
        rank_0 = self._pipes[-1]
        with suppress(OSError):  # ``check`` notices a rank that has ended
            rank_0.send_bytes(DRAIN)
        heard = wait([rank_0, *self.sentinels], max(0.0, deadline_s - time.monotonic()))
        self.check()
        return rank_0 in heard and isinstance(self._read_report(rank_0), Drained)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def close(self) -> None:
        """Ask every rank to end, wait for it, kill what is left. Idempotent."""
        if self._ready is None or self.dead():
            self.kill()  # the others may wait for the missing one; nothing they hold outlives them
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(STOP)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EngineGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_rank(spec: RankSpec, parent: Connection, set_up: Callable[[], object] | None) -> None:
    from kvxfer.engine.rank import rank_main  # loaded with torch in the fork server, not here

    if set_up is not None:
        set_up()
    rank_main(spec, parent)


def _ending(exit_code: int) -> str:
    """How a process ended, as ``Process.exitcode`` has it: below zero for a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
