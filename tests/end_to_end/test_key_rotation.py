"""Engines that are processes change their CURVE key one after the other, and every load between
them goes on.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from kvxfer.engine.config import Role
from kvxfer.transports.key_folder import STEPS, USE, make_keys, read_keys, rotate_keys
from tests.connector.rig import PATIENT
from tests.end_to_end.harness import LiveEngine, Pair, engine_config, prompt

_seeds = itertools.count()


def key_and_loads(prefill: LiveEngine, decode: LiveEngine) -> str:
    """One load of this pair, of a prompt of its own; the key that the prefill engine has."""
    pair, tokens = Pair(prefill, decode), prompt(48, next(_seeds))
    params = pair.prefilled(tokens).kv_transfer_params
    assert params is not None
    done = pair.decoded(tokens, params).done
    names = prefill.config.engine_id, decode.config.engine_id
    assert (done.failure, done.num_external_tokens) == (None, 47), (names, done.detail)
    return str(params["kvxfer"]["curve_public_key"])


@pytest.mark.slow
def test_four_engines_change_their_key_while_they_serve(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    first = read_keys(folder).current.public
    kv = {"transport": "zmq", "curve_keys_dir": str(folder), **PATIENT}
    seen: set[tuple[bool, bool]] = set()
    with ExitStack() as stack:
        engines: list[LiveEngine] = []
        for role, number in itertools.product((Role.PREFILL, Role.DECODE), range(2)):
            config = engine_config(role, None, kv=kv)
            config = msgspec.structs.replace(config, engine_id=f"{role}{number}")
            engines.append(LiveEngine(config))
            stack.callback(engines[-1].close)
        restarted: set[str] = set()

        def all_load() -> None:
            for prefill, decode in itertools.product(engines[:2], engines[2:]):
                key = key_and_loads(prefill, decode)
                seen.add((key == first, decode.config.engine_id not in restarted))

        all_load()
        # Prefill and decode in turn: each side meets the other with both keys
        turns = [engines[index] for index in (0, 2, 1, 3)]
        for step in STEPS:
            rotate_keys(folder, step)
            for engine in turns if step == USE else ():
                engine.restart()
                restarted.add(engine.config.engine_id)
                all_load()
            all_load()
        for engine in engines:
            assert engine.info().counts.get("connections.refused", 0) == 0
    assert seen == set(itertools.product((True, False), repeat=2))
