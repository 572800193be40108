"""A process that has one version of kvxfer: whichever PYTHONPATH names. Takes and gives JSON lines.

It uses only what stays from version to version: the engine as a script starts it, the messages'
``encode`` and ``decode_to_source`` and ``decode_to_sink``.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import kvxfer
from kvxfer.config import load_config
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.engine import Engine


class Version:
    """What it can be asked for: each method takes and returns what JSON has."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._engines: dict[str, Engine] = {}

    def where(self) -> str:
        return str(kvxfer.__file__)

    def start(self, name: str, role: str, transport: str, **shape: Any) -> None:
        """An engine; it starts while others are asked for."""
        kv = load_config({"port": 0, "transport": transport}).config
        config = EngineConfig(role=Role(role), engine_id=name, kv=kv, num_blocks=64, **shape)
        self._engines[name] = self._stack.enter_context(Engine(config))

    def generate(
        self, name: str, prompt: list[int], num_tokens: int, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        answer = self._engines[name].generate(prompt, num_tokens, params)
        return {
            "token_ids": answer.token_ids,
            "params": answer.kv_transfer_params,
            "nbytes": answer.kv_nbytes,
            "failure": answer.done.failure,
            "transports": [load.transports for load in answer.done.loads],
        }

    def said_again(self, module: str, side: str, frame: str) -> str:
        """The frame as this version understands it, encoded anew."""
        messages = import_module(module)
        decode = getattr(messages, f"decode_to_{side}")
        again: bytes = messages.encode(decode(memoryview(bytes.fromhex(frame))))
        return again.hex()


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed
    with ExitStack() as stack:
        version = Version(stack)
        for line in sys.stdin:
            method, given = json.loads(line)
            answer = getattr(version, method)(**given)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
