"""The processes of one engine, seen from the process that starts them."""

from __future__ import annotations

import multiprocessing
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from kvxfer import errors
from kvxfer.engine.config import EngineConfig
from kvxfer.engine.rank import Failed, RankSpec, Ready, rank_main

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0

_report = msgspec.msgpack.Decoder(Ready | Failed)


def forkserver() -> ForkServerContext:
    """Processes that start with torch loaded: 8 ranks in 3 to 4 s instead of 11 (measured)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvxfer.engine.rank"])
    return context


class EngineGroup:
    """One engine: a process per rank. Works as a context manager; leaves nothing behind.

    A rank ends when its pipe to this process closes, so also when this process is killed.
    """

    def __init__(self, config: EngineConfig, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Start all ranks and wait until they serve.

        Raises the error that kept a rank from starting, under its own class (ConfigError,
        ModelError, ...).
        """
        self.config = config
        self._folder = Path(tempfile.mkdtemp(prefix="kvxfer-"))
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        try:
            ready = self._start(host, port)
        except BaseException:
            self.close()
            raise
        self.endpoint = ready.endpoint
        self.kv_endpoint = ready.kv_endpoint

    def _start(self, host: str, port: int) -> Ready:
        context = forkserver()
        incarnation, token = secrets.token_bytes(16), secrets.token_hex(8)
        # Rank 0 last: by then the others' process ids are known.
        for rank in reversed(range(self.config.tp_size)):
            spec = RankSpec(
                config=self.config,
                tp_rank=rank,
                incarnation=incarnation,
                token=token,
                store=str(self._folder / "store"),
                listen_host=host,
                listen_port=port,
                peer_pids=self.pids,
            )
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main,
                args=(spec, theirs),
                name=f"{self.config.engine_id}-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self._first_report()

    def _first_report(self) -> Ready:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            left_s = deadline_s - time.monotonic()
            heard = wait([*self._pipes, *(p.sentinel for p in self._processes)], timeout=left_s)
            for pipe in self._pipes:
                if pipe in heard:
                    return self._read_report(pipe)
            if heard or left_s <= 0:
                codes = [process.exitcode for process in self._processes]
                raise errors.KvxferError(
                    f"engine {self.config.engine_id}: ranks did not start within "
                    f"{START_TIMEOUT_S:g} s (exit codes {codes})"
                )

    def _read_report(self, pipe: Connection) -> Ready:
        try:
            report = _report.decode(pipe.recv_bytes())
        except EOFError as e:
            raise errors.KvxferError(f"engine {self.config.engine_id}: a rank died at start") from e
        if isinstance(report, Ready):
            return report
        kind = getattr(errors, report.kind, errors.KvxferError)
        raise kind(f"engine {self.config.engine_id}: {report.error}")

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, rank 0 last."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def dead(self) -> list[str]:
        """Ranks that have ended by themselves, with their exit codes."""
        return [
            f"{process.name} (exit code {process.exitcode})"
            for process in self._processes
            if process.exitcode is not None
        ]

    def kill(self) -> None:
        """SIGKILL every rank, as a fault would."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def close(self) -> None:
        """Ask every rank to end, wait for it, kill what is left. Idempotent."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(b"stop")
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
