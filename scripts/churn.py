"""Times what engines that come, go and give up cost: from an abort to blocks that can be used
again, and from an engine that is back to its first request.

    python scripts/churn.py --out scripts/results

Aborts: two engines without a model, each in its process, over each wire. Loads run all the while,
four at a time. One more is begun and aborted after a random part of the time that a load takes, so
that every state is met. "sink": until the decode engine may use the blocks, "source": until the
prefill engine may. Restarts: four reference engines behind the proxy, restarted one after the other
under six clients; "served": from the first good /health to the end of the first request that it
takes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import sys
import tempfile
import time
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from kvxfer.bench.core import Columns, Report, Table, Tail, facts_of, table, tail_columns, tail_of
from kvxfer.engine.rank import SWITCH_INTERVAL_S
from tests.builders import EngineShape
from tests.commands import small_model
from tests.connector.rig import POISON, Engine
from tests.end_to_end.fronts import site
from tests.end_to_end.test_rolling_restart import Load

AIM_MS = 5.0
NUM_BESIDE = 4
BLOCKS = 64
SHAPE = EngineShape(
    num_kv_heads=8,
    num_layers=8,
    inner_nbytes=128,
    num_blocks=BLOCKS * (NUM_BESIDE + 1) + 1,
)
TOKENS = 16 * BLOCKS
NBYTES = TOKENS * 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.inner_nbytes
POLL_S = 0.0001


class Times(msgspec.Struct, frozen=True):
    """Milliseconds."""

    what: str
    number: int
    ms: Tail


COLUMNS: Columns[Times] = {
    "what": lambda times: times.what,
    "number": lambda times: str(times.number),
    **tail_columns("ms", lambda times: times.ms, digits=2),
}


def _times(what: str, seconds: list[float]) -> Times:
    return Times(what, len(seconds), tail_of(1e3 * each_s for each_s in seconds))


# ------------------------------------------------------------------ from an abort to its blocks


def _give(asked: Connection, back: Connection, wire: str) -> None:
    """The source's process: it offers what it is asked for, and says when it has blocks back."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with Engine(SHAPE, "prefill", fill=None, transport=wire) as engine:
        sent = engine.results[0].sent
        while True:
            engine.collect()
            for name in sent:
                back.send((name, time.perf_counter()))
            sent.clear()
            if not asked.poll(POLL_S):
                continue
            if (order := asked.recv()) is None:
                return
            name, ids = order
            ref = engine.offer(name, TOKENS, ids)
            engine.compute(name)
            asked.send(ref)


class Pair:
    """A source and a sink with loads in flight."""

    def __init__(self, wire: str) -> None:
        context = get_context("forkserver")
        (self._ask, asked), (self._back, back) = context.Pipe(), context.Pipe(duplex=False)
        self._source = context.Process(target=_give, args=(asked, back, wire), daemon=True)
        self._source.start()
        self.sink = Engine(SHAPE, "decode", fill=POISON, transport=wire)
        self._names = (f"r{number}" for number in count())
        self._beside: list[tuple[str, int]] = []

    def begin(self, place: int) -> str:
        """Offer and load one request, into the blocks of that place."""
        name = next(self._names)
        ids = range(1 + place * BLOCKS, 1 + (place + 1) * BLOCKS)
        self._ask.send((name, ids))
        self.sink.load(name, self._ask.recv(), ids, (0, TOKENS))
        return name

    def look(self) -> tuple[dict[str, float], dict[str, float]]:
        """Requests whose blocks the sink has back, and the source, and since when. Keeps the others
        in flight.
        """
        self.sink.collect()
        received = self.sink.results[0].received
        taken, given = dict.fromkeys(received, time.perf_counter()), dict[str, float]()
        received.clear()
        while self._back.poll():
            name, at_s = self._back.recv()
            given[name] = at_s
        for name, place in [each for each in self._beside if each[0] in taken]:
            self._beside.remove((name, place))
            self._beside.append((self.begin(place), place))
        return taken, given

    def load(self) -> None:
        self._beside = [(self.begin(place), place) for place in range(NUM_BESIDE)]

    def abort_one(self, after_s: float) -> tuple[float, float] | None:
        """Seconds until the sink and the source have its blocks back; None: it was over before."""
        name = self.begin(NUM_BESIDE)
        began_s = time.perf_counter()
        at: dict[str, float] = {}
        told_s: float | None = None
        while len(at) < 2:
            for where, names in zip(("sink", "source"), self.look(), strict=True):
                if name in names:
                    at[where] = names[name]
            if told_s is None and not at and time.perf_counter() - began_s >= after_s:
                told_s = time.perf_counter()
                self.sink.abort(name)
            time.sleep(POLL_S)
        if told_s is None or at["source"] < told_s:
            return None
        return at["sink"] - told_s, at["source"] - told_s

    def close(self) -> None:
        self.sink.close()
        self._ask.send(None)
        self._source.join()


def aborts(wire: str, number: int) -> list[Times]:
    pair, rng = Pair(wire), random.Random(3)
    try:
        pair.load()
        usual_s = _usual_s(pair)
        found: list[tuple[float, float]] = []
        while len(found) < number:
            took_s = pair.abort_one(rng.uniform(0, usual_s))
            if took_s is not None:
                found.append(took_s)
    finally:
        pair.close()
    return [
        _times(f"abort over {wire}, {where}", [each[side] for each in found])
        for side, where in enumerate(("sink", "source"))
    ]


def _usual_s(pair: Pair) -> float:
    """Of one load beside the others, the fifth."""
    for _ in range(5):
        name, began_s = pair.begin(NUM_BESIDE), time.perf_counter()
        while name not in pair.look()[0]:
            time.sleep(POLL_S)
        took_s = time.perf_counter() - began_s
    return took_s


# ------------------------------------------------------------------ from back to served


async def restarts(wire: str, rounds: int) -> list[Times]:
    served_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with site(small_model(Path(folder)), wire, (1, 1, 1, 1)) as four:
            load = Load(four)
            running = asyncio.create_task(load.run())
            for front in four.fronts * rounds:
                assert await front.drain()
                await front.stop()
                num_served = len(front.served)
                await front.start()
                began_s = time.perf_counter()
                while len(front.served) == num_served:
                    await asyncio.sleep(0.001)
                    if running.done():
                        running.result()
                served_s.append(time.perf_counter() - began_s)
            load.end()
            await running
            print(f"{wire}: {load.num_asked} requests, none failed", flush=True)
    return [_times(f"served after a restart, {wire}", served_s)]


def main() -> int:
    """Exit status: 0 the median of each abort is within the aim, 1 one is not."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--wires", nargs="+", default=["shm", "zmq"])
    parser.add_argument("--aborts", type=int, default=500, help="for each wire")
    parser.add_argument("--rounds", type=int, default=3, help="restarts of each of four engines")
    parser.add_argument("--out", type=Path, help="folder of the dated results")
    options = parser.parse_args()
    rows: list[Times] = []
    for wire in options.wires:
        rows += aborts(wire, options.aborts)
    for wire in options.wires:
        rows += asyncio.run(restarts(wire, options.rounds))
    command = shlex.join(("python", "scripts/churn.py", *sys.argv[1:]))
    report = Report(options.out or Path(), "churn", "Churn", facts_of(command), _tables)
    report.records["times"] = rows
    if options.out is not None:
        report.write()
    print(report.text())
    return int(any(row.what.startswith("abort") and row.ms[0] > AIM_MS for row in rows))


def _tables(report: Report) -> list[Table]:
    text = (__doc__ or "").rpartition("\n\n")[2].strip()
    text = f"{' '.join(text.split())} A load: {TOKENS} tokens, {NBYTES >> 20} MiB."
    return [table("times", text, COLUMNS, report.records["times"])]


if __name__ == "__main__":
    sys.exit(main())
