"""Each hostile case, once, beside loads of an honest pair that all go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvxfer.transfer.session import OfferState
from tests.connector.rig import given_offer, service_of, until
from tests.hostile.cases import CASES, Case, Fate, address_of, attack
from tests.hostile.rig import Honest, Usage, honest_pair

MOST_GROWTH_NBYTES = 1 << 30
"""Of this process, in which the attacker is, too: a flood is 150 MB before it is looked at, and
twice as much where that look is late. Without a bound it has no end.
"""
MOST_TRIES = 10
COUNTED_S = 5.0
HASTE_S = 0.5


@pytest.fixture(scope="module")
def plain() -> Iterator[Honest]:
    with honest_pair() as honest:
        yield honest


@pytest.fixture(scope="module")
def encrypted() -> Iterator[Honest]:
    with honest_pair(has_keys=True) as honest:
        yield honest


def _run(case: Case, honest: Honest, number: int) -> None:
    """A case beside honest loads, and nothing of it is left."""
    before = Usage.now()
    counts = {name: honest.source.count(name) for name in case.counts}
    for _ in range(MOST_TRIES):
        fate = _attacked(case, honest, number)
        # Of many connections an address may be refused where this process is late to look at them
        may_be = {case.fate} | ({Fate.REFUSED} if case.number > 1 else set())
        assert fate in may_be | ({Fate.ENDED} if case.may_end else set())
        # Who goes without reading the answers resets the connection: the kernel may throw away
        # what was not read yet, and then there is nothing to count.
        with suppress(AssertionError):
            until(lambda: not _uncounted(honest, counts), COUNTED_S)
            break
    assert not _uncounted(honest, counts)
    offer = given_offer(honest.source, honest.held.offer.nonce)
    assert offer is not None
    assert offer.state is OfferState.OPEN
    assert not service_of(honest.source).is_draining
    until(lambda: Usage.now().descriptors <= before.descriptors)
    after = Usage.now()
    assert after.threads <= before.threads
    assert after.resident_nbytes - before.resident_nbytes < MOST_GROWTH_NBYTES
    honest.load()


def _uncounted(honest: Honest, counts: dict[str, int]) -> list[str]:
    return [name for name, value in counts.items() if honest.source.count(name) <= value]


def _attacked(case: Case, honest: Honest, number: int) -> Fate:
    """What came of one round; at least two loads later."""
    fates: list[Fate] = []
    thread = threading.Thread(
        target=lambda: fates.append(attack(case, honest.target, address_of(case, number)))
    )
    thread.start()
    num_loads = 0
    while thread.is_alive() or num_loads < 2:
        honest.load()
        num_loads += 1
    thread.join()
    return fates[0]


def _cases(*, slow: bool) -> list[object]:
    return [
        pytest.param(number, id=case.name)
        for number, case in enumerate(CASES)
        if case.slow == slow and not case.waits
    ]


@pytest.mark.parametrize("number", _cases(slow=False))
def test_a_hostile_peer_costs_what_the_table_says(
    number: int, request: pytest.FixtureRequest
) -> None:
    case = CASES[number]
    _run(case, request.getfixturevalue("encrypted" if case.keys else "plain"), number)


@pytest.mark.slow
@pytest.mark.parametrize("number", _cases(slow=True))
def test_a_large_attack_costs_what_the_table_says(number: int, plain: Honest) -> None:
    _run(CASES[number], plain, number)


@pytest.mark.parametrize("has_keys", [False, True])
def test_half_a_handshake_costs_its_connection(has_keys: bool) -> None:
    """All at once: each waits for the time-out of the handshake."""
    cases = [(n, each) for n, each in enumerate(CASES) if each.waits and each.keys == has_keys]
    with honest_pair(has_keys=has_keys, connect_timeout_s=HASTE_S) as honest:
        fates: list[Fate] = []
        threads = [
            threading.Thread(
                target=lambda n=n, each=each: fates.append(
                    attack(each, honest.target, address_of(each, n))
                )
            )
            for n, each in cases
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            honest.load()
        assert fates == [Fate.ENDED] * len(cases)


def test_an_offer_that_was_attacked_is_loaded(plain: Honest) -> None:
    """Last: what all forged messages were about."""
    plain.finish(plain.held)


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
