"""Engines of this version and of the previous one understand each other.

``previous_version`` beside this file names the previous one, a commit or a tag, in one place; its
messages are recorded in ``protocol_1.golden`` (see ``record.py``). Tests that run its code take it
out of the history of this repository.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.connector.params import early_params, mint_request
from kvxfer.transfer import wire
from kvxfer.transports import stream_wire
from tests.mixed_versions.record import WIRES, Said, converse, read_lines

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PREVIOUS = (HERE / "previous_version").read_text().strip()
RECORDED = read_lines((HERE / "protocol_1.golden").read_text())
# Of every engine; this version's would have streams, which the previous one does not know
SETTINGS = {"KVXFER_LOG_LEVEL": "WARNING", "KVXFER_ZMQ_STREAMS": "4"}
MODULES = {"control": "kvxfer.transfer.wire", "data": "kvxfer.transports.stream_wire"}


def raw(frame: bytes) -> Any:
    return msgspec.msgpack.decode(frame)


def expect_within(old: Any, new: Any, path: str) -> None:
    """All that the old message says stands in the new one, which may say more."""
    if isinstance(old, dict):
        assert isinstance(new, dict), path
        for key, value in old.items():
            assert key in new, f"{path}.{key}: expected {value!r}, got nothing"
            expect_within(value, new[key], f"{path}.{key}")
    elif isinstance(old, list):
        assert isinstance(new, list), path
        assert len(new) >= len(old), path
        for number, value in enumerate(old):
            expect_within(value, new[number], f"{path}[{number}]")
    else:
        assert new == old, f"{path}: expected {old!r}, got {new!r}"


def without_what_runs_differ_in(manifest: dict[str, Any]) -> dict[str, Any]:
    """Ports, and of each memory host, process, descriptor and nonce."""
    for rank in manifest["manifest"]["ranks"]:
        del rank["control_endpoint"], rank["data_endpoints"]
        for handle in (rank.get("board"), *(memory["handle"] for memory in rank["memories"])):
            for name in ("boot_id", "pid", "fd", "nonce"):
                (handle or {}).pop(name, None)
    return manifest


def said_again_here(said: Said) -> bytes:
    if said.socket == "control":
        decode = wire.decode_to_source if said.by == ">" else wire.decode_to_sink
        return wire.encode(decode(said.frames[0]))
    decode_data: Any = (
        stream_wire.decode_to_source if said.by == ">" else stream_wire.decode_to_sink
    )
    return stream_wire.encode(decode_data(memoryview(said.frames[0])))


MESSAGES = {
    f"{transport} {said.by} {said.name} {number}": said
    for transport in WIRES
    for number, said in enumerate(RECORDED[transport])
    if said.name != "garbage"
}


def test_the_recorded_conversation_has_every_message() -> None:
    """All that this protocol has but what is said to who is too early, too dumb or on trial, and
    what the previous version does not know: streams, to drain, and protocol 2.
    """
    names = {raw(said.frames[0])["type"] for said in MESSAGES.values()}
    kinds = (*wire.ToSource.__args__, *wire.ToSink.__args__)
    kinds += (*stream_wire.ToSource.__args__, *stream_wire.ToSink.__args__)
    tags = {kind.__struct_config__.tag for kind in kinds}
    known = {"not_ready", "refused", "trial"}
    assert tags - names == known | {"streams", "join", "drain", "draining", "find", "found"}


@pytest.mark.parametrize("said", MESSAGES.values(), ids=MESSAGES)
def test_what_the_previous_version_says_is_understood(said: Said) -> None:
    expect_within(raw(said.frames[0]), raw(said_again_here(said)), said.name)


@pytest.mark.parametrize("transport", WIRES)
def test_what_the_previous_version_asks_is_answered_as_it_answers(transport: str) -> None:
    recorded = RECORDED[transport]
    asked = {said.name: said.frames for said in recorded if said.by == ">"}
    answered = converse(transport, asked)
    assert [(said.by, said.socket, said.name) for said in answered] == [
        (said.by, said.socket, said.name) for said in recorded
    ]
    for old, new in zip(recorded, answered, strict=True):
        if old.name == "answer to garbage":  # words for people
            assert raw(new.frames[0])["type"] == "malformed"
            continue
        if old.by == ">":
            assert new.frames == old.frames
            continue
        was, now = raw(old.frames[0]), raw(new.frames[0])
        if was["type"] == "manifest":
            was, now = map(without_what_runs_differ_in, (was, now))
        expect_within(was, now, old.name)
        assert new.frames[1:] == old.frames[1:], old.name  # the KV


# ------------------------------------------------------------------ with the previous one's code


class VersionProcess:
    """A process with the kvxfer of a tree."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "one_version.py")],
            env=os.environ | SETTINGS | {"PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.tree = tree
        self.tell("where")

    def ask(self, method: str, **given: Any) -> Any:
        self.tell(method, **given)
        return self.hear(method)

    def tell(self, method: str, **given: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, given]) + "\n")

    def hear(self, method: str) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{method}: the process ended; its output says why"
        return json.loads(line)

    def close(self) -> None:
        """At the end of its input it closes its engines and ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()


@contextmanager
def process_of(tree: Path) -> Iterator[VersionProcess]:
    process = VersionProcess(tree)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def previous_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The previous version's code, out of the history."""
    command = ["git", "-C", str(ROOT), "archive", PREVIOUS, "kvxfer", "kernels"]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"no git history with {PREVIOUS} here: {exc}")
    tree = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="fully_trusted")  # our own; kvxfer/kernels is a link
    return tree


@pytest.fixture(scope="module")
def versions(previous_tree: Path) -> Iterator[dict[str, VersionProcess]]:
    """A process of each version, with an engine for each wire; this one has one without any."""
    with process_of(previous_tree) as previous, process_of(ROOT) as this:
        for process, block_size, layout in ((previous, 16, "HND"), (this, 32, "NHD")):
            assert Path(process.hear("where")).is_relative_to(process.tree)
            for transport in WIRES:
                given = {"role": "both", "transport": transport, "max_num_batched_tokens": 64}
                process.ask("start", name=transport, block_size=block_size, layout=layout, **given)
        this.ask("start", name="alone", role="alone", transport="auto")
        yield {"previous": previous, "this": this}


def test_what_this_version_says_is_understood_by_the_previous_one(
    versions: dict[str, VersionProcess],
) -> None:
    for transport in WIRES:
        for said in converse(transport, {}):
            if said.name == "garbage":
                continue
            again = versions["previous"].ask(
                "said_again",
                module=MODULES[said.socket],
                side="source" if said.by == ">" else "sink",
                frame=said.frames[0].hex(),
            )
            # It drops what it does not know, and has understood all the rest
            expect_within(raw(bytes.fromhex(again)), raw(said.frames[0]), said.name)


@pytest.mark.parametrize("transport", WIRES)
@pytest.mark.parametrize("source", ["previous", "this"])
@pytest.mark.parametrize("sink", ["previous", "this"])
def test_kv_moves_between_the_versions(
    versions: dict[str, VersionProcess], source: str, sink: str, transport: str
) -> None:
    def generate(version: str, name: str, prompt: list[int], num: int, params: Any) -> Any:
        given = {"name": name, "prompt": prompt, "num_tokens": num, "params": params}
        return versions[version].ask("generate", **given)

    # Of its own, so that no prefix cache has it: the seed of text is the same in every process.
    # Four steps of 64 tokens: this version's offers grow, and the previous one waits for the end.
    prompt = random.Random(f"{source} {sink} {transport}").choices(range(500), k=200)
    other = prompt[::-1]
    for asked, failure in ((prompt, None), (other, "tokens")):
        params = generate(source, transport, prompt, 1, {"do_remote_decode": True})["params"]
        assert (early_params(params, mint_request()) is not None) == (source == "this")
        answer = generate(sink, transport, asked, 6, params)
        assert answer["failure"] == failure
        assert (answer["nbytes"] > 0) == (failure is None)
        assert answer["transports"] == ([[transport]] if failure is None else answer["transports"])
        assert answer["token_ids"] == generate("this", "alone", asked, 6, None)["token_ids"]
