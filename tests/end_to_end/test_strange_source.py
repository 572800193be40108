"""KV of a source that nobody answers for: it answers no request, neither the one that names it nor
one that comes later and would find it in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.engine.config import EngineConfig, Role
from tests.end_to_end.harness import DECODE, PREFILL, Pair, engine_config, pair, prompt
from tests.helpers import needs_root, process_of_another_user

RELAY = """
async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def relay(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

async def main():
    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
"""Another user's front door, behind which the engine of the test answers."""


def decode_config(**settings: Any) -> EngineConfig:
    return engine_config(Role.DECODE, None, kv={"transport": "zmq", **settings}, **DECODE)


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    prefill = engine_config(Role.PREFILL, None, kv={"transport": "zmq"}, **PREFILL)
    # All KV that decode takes from elsewhere is wrong: zeros
    with pair(prefill, decode_config(), decode_faults="read:blank") as engines:
        yield engines


@needs_root
@pytest.mark.parametrize(
    ("allowed_peers", "failure"), [(None, "not_allowed"), (("127.0.0.0/8",), None)]
)
def test_kv_of_another_users_engine_is_found_by_nobody(
    engines: Pair, allowed_peers: tuple[str, ...] | None, failure: str | None
) -> None:
    """Unless the operator has named its host; then it is trusted, and here wrong."""
    tokens = prompt(200, seed=1)
    engines.decode.reconfigure(decode_config())
    right = engines.decoded(tokens, None)
    engines.decode.reconfigure(decode_config(allowed_peers=allowed_peers))
    params = engines.prefilled(tokens).kv_transfer_params
    assert params is not None
    front_door = params["kvxfer"]["endpoint"].rpartition(":")[2]
    with process_of_another_user(RELAY, front_door) as relay:
        assert relay.stdout is not None
        endpoint = f"tcp://127.0.0.1:{int(relay.stdout.readline())}"
        rogue = params | {"kvxfer": params["kvxfer"] | {"endpoint": endpoint}}
        answer = engines.decoded(tokens, rogue)
        later = engines.decoded(tokens, None)
    assert answer.done.failure == failure
    assert later.done.num_cached_tokens > 0
    for result in (answer, later):
        assert (result.token_ids == right.token_ids) is (failure is not None)


def test_params_that_nobody_has_signed_are_not_followed(engines: Pair) -> None:
    """The prefill engine has no key, and so is anybody for one that has."""
    tokens = prompt(200, seed=2)
    engines.decode.reconfigure(decode_config(params_key="sixteen letters."))
    params = engines.prefilled(tokens).kv_transfer_params
    answer = engines.decoded(tokens, params)
    assert answer.done.failure == "bad_signature"
    assert (answer.done.num_external_tokens, answer.kv_nbytes) == (0, 0)
    alone = engines.decoded(tokens, None)
    assert alone.token_ids == answer.token_ids
