"""Whatever comes from outside ends in a value or in one of the documented errors, soon."""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.settings import split_settings
from tests.hostile.decoders import DECODERS, NO_INPUT, Decoder, outcome, parsing_calls
from tests.hostile.mutation import MOST_NBYTES, mutated

QUICK_INPUTS = 200
SLOW_INPUTS = 100_000
MOST_S = 2.0
"""Of this thread's processor time, for one input of 64 KiB at most: 100 times what any takes."""
MOST_GROWTH_NBYTES = 256 << 20

by_name = pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)


def _feed(decoder: Decoder, frame: bytes, folder: Path) -> str:
    begin_s = time.thread_time()
    try:
        return outcome(decoder, frame, folder)
    finally:
        assert time.thread_time() - begin_s < MOST_S


def _feed_mutated(decoder: Decoder, num_inputs: int, folder: Path) -> None:
    for number in range(num_inputs):
        frame = mutated(random.Random(number), decoder.form, decoder.seeds)
        try:
            _feed(decoder, frame, folder)
        except Exception as exc:
            exc.add_note(f"input {number}: {frame[:500]!r}")
            raise


def _most_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_every_call_that_parses_is_known() -> None:
    """A new one needs a decoder here, or a reason why it needs none."""
    found = set(parsing_calls())
    decoded = {site for decoder in DECODERS for site in decoder.sites}
    assert not decoded & NO_INPUT.keys()
    assert found == decoded | NO_INPUT.keys()


@by_name
def test_good_inputs_are_taken(decoder: Decoder, tmp_path: Path) -> None:
    """One of them at least: mutations of nonsense would test nothing."""
    assert "taken" in {outcome(decoder, seed, tmp_path) for seed in decoder.seeds}


@by_name
def test_no_input_ends_in_another_error(decoder: Decoder, tmp_path: Path) -> None:
    _feed_mutated(decoder, QUICK_INPUTS, tmp_path)


@pytest.mark.slow
@by_name
def test_many_inputs_end_in_no_other_error(decoder: Decoder, tmp_path: Path) -> None:
    before_nbytes = _most_nbytes()
    _feed_mutated(decoder, SLOW_INPUTS, tmp_path)
    assert _most_nbytes() - before_nbytes < MOST_GROWTH_NBYTES


def test_mutations_keep_to_their_size_and_change_most_inputs() -> None:
    for decoder in DECODERS:
        made = [mutated(random.Random(n), decoder.form, decoder.seeds) for n in range(100)]
        assert max(map(len, made)) <= MOST_NBYTES
        assert sum(each not in decoder.seeds for each in made) > 50


def test_settings_with_a_text_that_is_none_are_refused() -> None:
    """JSON can write half of a surrogate pair, which no message can carry."""
    with pytest.raises(ConfigError, match="kv_connector_extra_config: .*surrogates not allowed"):
        split_settings({"switch_interval_s": "\ud800"})
