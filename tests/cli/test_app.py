"""The commands as a person runs them: processes, exit codes, one line for an error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvxfer.engine.model_config import load_model_config
from tests.cli.forked import Parent, parent
from tests.commands import (
    DIFFERENT,
    INTERRUPTED,
    MODEL,
    OK,
    ROOT,
    WRONG,
    environment,
    small_model,
)
from tests.engine.test_weights import full_tensors
from tests.helpers import free_port, group_members

TIMEOUT_S = 90
FILE = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return small_model(tmp_path)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parent]:
    """Those that end before they start an engine: what they cost is their imports."""
    with parent(tmp_path_factory.mktemp("commands")) as made:
        yield made


def kvxfer(temporary: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvxfer", *arguments],
        env={**environment(temporary), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@contextmanager
def started(temporary: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, as a terminal starts it."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvxfer", *arguments],
        env=environment(temporary),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def assert_nothing_left(group: int, temporary: Path) -> None:
    deadline_s = time.monotonic() + 120  # the fork server unloads torch: seconds on a busy machine
    while group_members(group) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert group_members(group) == {}
    assert list(temporary.glob("kvxfer-*")) == []


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from kvxfer.cli.app import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'zmq', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for arguments in (["--help"], ["pair", "--help"], ["--version"]):
        ran = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert "kvxfer" in ran.stdout.lower()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prefill-tp", "3"], "--prefill-tp: expected a divisor or a multiple of 8 KV heads"),
        (["--decode-tp", "3"], "--decode-tp: expected a divisor or a multiple of 8 KV heads, got"),
        (["--model", "/nowhere"], "/nowhere: cannot be read (No such file or directory)"),
        (["--prompts", "/nowhere"], "--prompts: /nowhere cannot be read"),
        (["--trace", "/nowhere"], "--trace: /nowhere cannot be read"),
        (["--decode-block-size", "12"], "--decode-block-size: expected a multiple of 8, got 12"),
        (
            ["--prefill-block-size", "100000000"],
            "--prefill-block-size, --max-new-tokens, --in-flight: expected engines that fit into ",
        ),
        (["--max-new-tokens", "1000000000"], "--max-new-tokens, --in-flight: expected engines th"),
        (["--limit", "0"], "--limit: expected at least 1, got 0"),
        (["--log-level", "LOUD"], "--log-level: expected one of DEBUG"),
        (["--json", "/nowhere/x"], "--json: /nowhere is no folder"),
        (["--json", "/"], "--json: expected a file, got the folder /; name one in it"),
        (["--device", "gpu"], "--device: expected cpu, cuda or cuda:N, got 'gpu'"),
        (["--decode-devices", "a"], "--decode-devices: expected numbers of CUDA devices, as in"),
        (["--decode-devices", "0"], "--decode-devices: expected none with device cpu, got 0"),
        (
            ["--device", "cuda", "--prefill-devices", "0", "--decode-devices", "1"],
            "--prefill-devices: expected one for each of 2 ranks, got 0",
        ),
    ],
)
def test_errors_are_one_line(
    commands: Parent, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    ran = commands.run(tmp_path, "pair", *arguments)
    assert ran.returncode == WRONG
    assert ran.stderr.startswith("kvxfer: error: ")
    assert sentence in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(
            *(["--transport", "cuda_ipc"], "--transport cuda_ipc: expected cuda memory"),
            marks=pytest.mark.slow,
        ),
        (["--kv-port", "5710-5700"], "--kv-port: expected 0 (any free port) to 65535, a range"),
        (["--kv-data-port", "5710"], "--kv-data-port: expected a port for each of 2 ranks, got 57"),
    ],
)
def test_errors_of_an_engine_name_the_option(
    commands: Parent, tmp_path: Path, model: str, arguments: list[str], sentence: str
) -> None:
    """The first one is found by a process of the engine."""
    listen = ("--listen", "127.0.0.1:0", "--model", model)
    ran = commands.run(tmp_path, "prefill", *listen, *arguments)
    assert ran.returncode == WRONG
    assert sentence in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_pair(tmp_path: Path, model: str) -> None:
    facts = tmp_path / "facts.json"
    ran = kvxfer(tmp_path, "pair", "--model", model, "--json", str(facts))
    assert ran.returncode == OK, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == (
        "model config.json, 10 prompts; prefill TP 2 block 16 HND; decode TP 1 block 32 NHD; "
        "single TP 1 block 16 HND"
    )
    assert lines[-1].startswith("tokens equal to the single engine's: 10 of 10; KV equal")
    found = msgspec.json.decode(facts.read_bytes())
    requests = {request["name"]: request for request in found["requests"]}
    assert len(requests) == 10
    assert all(request["tokens_equal"] for request in requests.values())
    # all but the last of 777 tokens, each 2 planes x 2 layers x 4 heads x 8 x 4 bytes
    assert requests["long"]["transfer"]["nbytes"] == 776 * 512
    assert requests["long"]["kv"] == {"token_lo": 0, "token_hi": 776, "differences": []}
    assert len(requests["long"]["token_ids"]) == 32
    assert found["summary"]["is_good"] is True
    assert found["summary"]["wires"] == ["shm"]
    for name, blocks in (("prefill", "num_blocks"), ("decode", "num_blocks")):
        info = found["engines_at_end"][name]
        assert info["num_free_blocks"] == info[blocks] - 1
    assert list(tmp_path.glob("kvxfer-*")) == []


def test_pair_by_another_wire_and_without_checks(tmp_path: Path, model: str) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("the first prompt\nand a second one, which is somewhat longer\n")
    ran = kvxfer(
        *(tmp_path, "pair", "--model", model, "--prompts", str(text), "--no-verify"),
        *("--transport", "zmq", "--prefill-tp", "1", "--decode-tp", "2", "--kv-heads", "8"),
    )
    assert ran.returncode == OK, ran.stderr
    assert "wire zmq: " in ran.stdout
    assert ran.stdout.splitlines()[-1] == "nothing was compared"


@pytest.mark.slow
def test_text_is_shown_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    folder, facts = tmp_path / "model", tmp_path / "facts.json"
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode(MODEL))
    save_file(full_tensors(load_model_config(str(folder / "config.json"))), folder / FILE)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(folder / "tokenizer.json"))
    text = tmp_path / "prompts.txt"
    text.write_text("w1 w2 w3\n")
    ran = kvxfer(
        *(tmp_path, "pair", "--model", str(folder), "--prompts", str(text), "--json", str(facts)),
        *("--no-verify", "--prefill-tp", "1", "--max-new-tokens", "3"),
    )
    assert ran.returncode == OK, ran.stderr
    (request,) = msgspec.json.decode(facts.read_bytes())["requests"]
    assert request["num_prompt_tokens"] == 3
    assert request["text"] == " ".join(f"w{token}" for token in request["token_ids"])
    assert f"line 1: '{request['text']}'" in ran.stdout.splitlines()


@pytest.mark.slow
def test_kv_that_never_came_is_found(tmp_path: Path, model: str) -> None:
    blank = kvxfer(tmp_path, "pair", "--model", model, "--decode-faults", "read:blank")
    assert blank.returncode == DIFFERENT
    assert "source and sink differ" in blank.stdout
    # Eight or nine: a prompt that another one has left in the cache by then moves nothing.
    assert re.search(r"KV equal to the source's: 0 of [89]$", blank.stdout, re.MULTILINE)


@pytest.mark.slow
def test_loads_that_break_are_computed_or_fail_by_policy(tmp_path: Path, model: str) -> None:
    broken = ("pair", "--model", model, "--limit", "3", "--decode-faults", "read:fail")
    ran = kvxfer(tmp_path, *broken, "--allow-recompute")
    assert ran.returncode == OK, ran.stderr
    assert "KV not used: read_failed x 3" in ran.stdout
    assert "3 of 3 requests ran without the KV that they asked for" in ran.stdout
    assert "tokens equal to the single engine's: 3 of 3" in ran.stdout
    ran = kvxfer(tmp_path, *broken, "--on-load-failure", "fail")
    assert ran.returncode == DIFFERENT
    assert "3 requests failed" in ran.stdout


def test_a_peer_that_is_not_allowed_is_one_error_and_no_good_end(
    tmp_path: Path, model: str
) -> None:
    arguments = ("pair", "--model", model, "--limit", "3", "--no-verify")
    ran = kvxfer(tmp_path, *arguments, KVXFER_ALLOWED_PEERS="10.0.0.0/8")
    assert ran.returncode == DIFFERENT
    assert "wire none: nothing was moved" in ran.stdout
    assert "KV not used: not_allowed x 3" in ran.stdout
    assert "allowed_peers of this engine does not admit 127.0.0.1" in ran.stdout
    error, more = ran.stderr.splitlines()
    assert error.startswith("ERROR decode rank 0: request ")
    assert "KV not used: not_allowed: allowed_peers of this engine does not admit" in error
    assert more.startswith("WARNING decode rank 0: KV not used: not_allowed: 2 more like this (")


@pytest.mark.slow
def test_out_of_blocks_ends_the_run(tmp_path: Path, model: str) -> None:
    with started(
        *(tmp_path, "pair", "--model", model, "--decode-blocks", "4", "--no-verify")
    ) as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == WRONG
    assert "engine decode refused: request " in err
    assert "need 11 blocks of 32, the cache has 3" in err
    assert_nothing_left(process.pid, tmp_path)


def test_processes_that_cannot_start_are_an_error_in_one_line(tmp_path: Path, model: str) -> None:
    """A file of the working folder is taken for a module of Python: by the fork server alone, which
    Python starts with that folder first in its path.
    """
    scripts, here = tmp_path / "bin", tmp_path / "here"
    for folder in (scripts, here):
        folder.mkdir()
    script = scripts / "run.py"
    script.write_text("from kvxfer.cli.app import main\nif __name__ == '__main__':\n    main()\n")
    (here / "grp.py").write_text("raise RuntimeError('not the one of Python')\n")
    ran = subprocess.run(
        [sys.executable, str(script), "pair", "--model", model, "--limit", "1"],
        env=environment(tmp_path),
        cwd=here,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == WRONG
    assert ran.stderr.splitlines()[-1] == (
        "kvxfer: error: engine prefill: its processes did not start; the lines above say why"
    )
    assert "not the one of Python" in ran.stderr
    assert list(tmp_path.glob("kvxfer-*")) == []


@pytest.mark.parametrize("when", ["fork server starts", "ranks start"])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, when: str) -> None:
    trace = ROOT / "tests" / "data" / "conversation_trace_excerpt.jsonl"
    # a second of the trace lasts a second: it would run for an hour
    with started(
        *(tmp_path, "pair", "--trace", str(trace), "--time-scale", "1", "--log-level", "INFO"),
    ) as process:
        assert process.stdout is not None
        if when == "fork server starts":
            while len(group_members(process.pid)) < 2:
                time.sleep(0.005)
        else:
            assert process.stdout.readline().startswith("model ")
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == INTERRUPTED, err
    assert err.splitlines()[-1:] == ["kvxfer: ended by SIGINT"]
    assert "Traceback" not in err
    assert_nothing_left(process.pid, tmp_path)


def test_prefill_and_decode_in_two_terminals(tmp_path: Path, model: str) -> None:
    port = free_port()
    server = (
        *("prefill", "--listen", f"127.0.0.1:{port}", "--kv-port", "21000-30999"),
        *("--kv-data-port", "21000-30999", "--model", model),
    )
    with started(tmp_path, *server, "--digests") as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert f"tcp://127.0.0.1:{port} serves config.json" in ready
        assert re.search(r"KV at tcp://127.0.0.1:(2[1-9]|30)\d{3};", ready)
        ran = kvxfer(
            *(tmp_path, "decode", "--prefill", f"127.0.0.1:{port}", "--model", model),
            *("--verify", "--limit", "4"),
        )
        assert ran.returncode == OK, ran.stderr
        assert ran.stdout.splitlines()[-1] == (
            "tokens equal to the single engine's: 4 of 4; KV equal to the source's: 4 of 4"
        )
        taken = kvxfer(tmp_path, *server)
        assert taken.returncode == WRONG
        assert f"listen: cannot bind 127.0.0.1:{port}" in taken.stderr
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == OK  # it has drained
    assert_nothing_left(process.pid, tmp_path)


@pytest.mark.slow
def test_an_incompatible_peer_is_named_field_by_field(tmp_path: Path, model: str) -> None:
    port = free_port()
    with started(
        *(tmp_path, "prefill", "--listen", f"127.0.0.1:{port}", "--kv-port", "0"),
        *("--model", model, "--kv-heads", "2", "--dtype", "bfloat16"),
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ran = kvxfer(
            *(tmp_path, "decode", "--prefill", f"127.0.0.1:{port}", "--model", model),
            *("--limit", "2", "--on-load-failure", "fail", "--tp", "2"),
        )
    assert ran.returncode == DIFFERENT
    assert "KV not used: incompatible x 2" in ran.stdout
    assert "num_kv_heads: source has 2, sink has 4" in ran.stdout
    assert "dtype: source has bfloat16, sink has float32" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "2 requests failed"
    # One line for the pair, whatever the number of its ranks, and one for how many more there were.
    error, more = ran.stderr.splitlines()
    assert error.startswith("ERROR decode rank 0: request ")
    assert "KV not used: incompatible: engines prefill and decode cannot exchange KV: " in error
    assert "num_kv_heads: source has 2, sink has 4" in error
    assert "(engine prefill at tcp://127.0.0.1:" in error
    assert more.startswith("WARNING decode rank 0: KV not used: incompatible: 1 more like this (")


@pytest.mark.slow
def test_a_peer_that_is_not_there(tmp_path: Path, model: str) -> None:
    ran = kvxfer(
        *(tmp_path, "decode", "--prefill", f"127.0.0.1:{free_port()}", "--model", model),
        *("--wait", "0.5"),
    )
    assert ran.returncode == WRONG
    assert "no answer within 0.5 s; is it running, and can its port" in ran.stderr
