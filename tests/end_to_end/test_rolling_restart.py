"""Engines that are restarted one after the other, under load: no request fails, and each comes with
the tokens and by the KV that it would have had.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvxfer.transfer.wire import Reason
from tests.commands import small_model
from tests.end_to_end.fronts import Site, site

# asyncio forgets connections that its server accepts at the moment that it closes; who asked over
# one asks again
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NUM_CLIENTS = 6
NUM_PROMPTS = 24
NEW_TOKENS = 8
VOCAB = 256
TIMEOUT_S = 300.0


class Load:
    """Clients that ask without a pause. The same prompt gets the same tokens for ever."""

    def __init__(self, site: Site) -> None:
        rng = random.Random(5)
        self._site = site
        self._prompts = [
            [rng.randrange(VOCAB) for _ in range(rng.randrange(20, 200))]
            for _ in range(NUM_PROMPTS)
        ]
        self._said: dict[int, list[int]] = {}
        self._is_over = False
        self.num_asked = 0

    async def run(self) -> None:
        """Until :meth:`end`; raises what the first client raises."""
        async with asyncio.TaskGroup() as group:
            for seed in range(NUM_CLIENTS):
                group.create_task(self._ask(random.Random(seed)))

    def end(self) -> None:
        self._is_over = True

    async def _ask(self, rng: random.Random) -> None:
        while not self._is_over:
            number = rng.randrange(NUM_PROMPTS)
            self.num_asked += 1
            tokens = await self._site.ask(self._prompts[number], NEW_TOKENS)
            assert len(tokens) == NEW_TOKENS
            assert tokens == self._said.setdefault(number, tokens)


async def restart_each(site: Site) -> None:
    """One engine after the other; the next one when this one has served a request again."""
    for front in site.fronts:
        assert await front.drain()
        await front.stop()
        num_served = len(front.served)
        await front.start()
        while len(front.served) == num_served:
            await asyncio.sleep(0.01)


async def restart_under_load(site: Site, rounds: int) -> None:
    load = Load(site)
    running = asyncio.create_task(load.run())

    async def restart() -> None:
        for _ in range(rounds):
            await restart_each(site)
        load.end()

    restarting = asyncio.create_task(restart())
    try:
        await asyncio.wait({running, restarting}, return_when=asyncio.FIRST_EXCEPTION)
        for task in (running, restarting):
            if task.done():
                task.result()
        await running
    finally:
        restarting.cancel()
    decoded = [done for front in site.decode for done in front.served]
    # An answer may be cut off when its engine ends, of one request of each client: it is asked for
    # again, first with an offer that has been read by then.
    good = [done for done in decoded if done.failure is None]
    assert len(good) >= load.num_asked
    assert {done.failure for done in decoded} <= {None, Reason.ENDED}
    assert len(decoded) - len(good) <= NUM_CLIENTS * len(site.decode) * rounds
    assert all(done.loads and all(each.reason is None for each in done.loads) for done in good)


@pytest.mark.parametrize(("wire", "sizes"), [("shm", (1, 1, 1, 1)), ("zmq", (2, 1, 1, 1))])
def test_no_request_fails_while_four_engines_are_restarted(
    wire: str, sizes: tuple[int, int, int, int], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with site(small_model(tmp_path), wire, sizes) as four:
            await restart_under_load(four, 1)

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_no_request_fails_while_they_are_restarted_again_and_again(
    wire: str, tmp_path: Path
) -> None:
    """Of sizes that differ on each side."""

    async def scenario() -> None:
        async with site(small_model(tmp_path), wire, (2, 1, 1, 2)) as four:
            await restart_under_load(four, 5)

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
