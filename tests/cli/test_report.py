"""What a person and a program get to see. Expectations by hand."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvxfer.cli.outcome import (
    Answers,
    KvCheck,
    Result,
    TokenDifference,
    Transfer,
    judge,
    summarise,
)
from kvxfer.cli.report import facts, show, versions, write_json
from kvxfer.config import Config
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.errors import ConfigError


def result(name: str, **changes: object) -> Result:
    plain = msgspec.structs.replace(
        judge(name, 300, Answers()), status="FINISHED_LENGTH_CAPPED", token_ids=(1, 2)
    )
    return msgspec.structs.replace(plain, **changes)


GOOD = result(
    "good",
    num_prefill_cached_tokens=16,
    num_decode_cached_tokens=32,
    transfer=Transfer(3 << 20, ("shm",), 1.0, 1.5, 1.5125, 1.6),
    tokens_equal=True,
    kv=KvCheck(32, 299, ()),
)
LOCAL = result("all cached", tokens_equal=True)
BAD = result(
    "[bad]",
    transfer=Transfer(1000, ("zmq",), 1.75, 1.75, 1.751, 1.751),
    tokens_equal=False,
    token_difference=TokenDifference(4, 7, 8, 0.25, 0.125),
    kv=KvCheck(0, 299, tuple(f"difference {i}" for i in range(7))),
    failure="peer_lost",
    detail="no word [for] 3 s",
)


def shown(*results: Result, tokens_decide: bool = True) -> list[str]:
    console = Console(file=io.StringIO(), width=110, highlight=False)
    summary = summarise(results, tokens_decide=tokens_decide, wall_s=2.5)
    show(console, results, summary)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_table_and_summary() -> None:
    assert shown(GOOD, LOCAL) == [
        "            prompt  cached     KV  waited  read         tokens     KV",
        "request     tokens     P/D  bytes      ms    ms   GB/s   equal  equal",
        "good           300   16/32  3 MiB   500.0  12.5  0.252     yes    yes",
        "all cached     300     0/0      -       -     -      -     yes      -",
        "",
        "2 requests, 600 prompt tokens (16 cached at prefill, 32 at decode), 4 new tokens, 2.5 s",
        "wire shm: 3 MiB in 1 transfers, 0.252 GB/s in 12.5 ms of reading",
        "waited before reading: median 500.0 ms, most 500.0 ms",
        "tokens equal to the single engine's: 2 of 2; KV equal to the source's: 1 of 1",
    ]


def test_what_is_wrong_is_shown() -> None:
    lines = shown(GOOD, BAD)
    assert lines[3].split() == (
        ["[bad]", "300", "0/0", "1000", "B", "0.0", "1.0", "0.001", "NO", "NO"]
    )
    assert lines[6:] == [
        "wire shm+zmq: 3 MiB in 2 transfers, 0.233 GB/s in 13.5 ms of reading",
        "waited before reading: median 250.0 ms, most 500.0 ms",
        "KV not used: peer_lost x 1",
        "  no word [for] 3 s",
        "[bad]: token 4: expected 8, got 7 (logit gaps 0.12 and 0.25)",
        *(f"[bad]: difference {i}" for i in range(5)),
        "[bad]: and 2 more differences",
        "1 of 2 requests ran without the KV that they asked for; --allow-recompute says that this "
        "is fine; tokens equal to the single engine's: 1 of 2; KV equal to the source's: 1 of 2",
    ]


@pytest.mark.parametrize(("may_recompute", "color"), [(False, "31"), (True, "33")])
def test_kv_that_was_not_used_stands_out(may_recompute: bool, color: str) -> None:
    """Red, or yellow (ANSI 31, 33) where it is allowed; never the green of a good run alone."""
    console = Console(
        file=io.StringIO(),
        width=110,
        highlight=False,
        force_terminal=True,
        color_system="standard",
    )
    results = [result("a", failure="not_allowed", detail="no"), result("b")]
    summary = summarise(results, tokens_decide=True, wall_s=1.0, may_recompute=may_recompute)
    assert summary.is_good is may_recompute
    show(console, results, summary)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    for sentence in ("wire none: nothing was moved", "KV not used: not_allowed x 1"):
        (line,) = [each for each in lines if sentence in each]
        assert re.search(rf"\x1b\[(1;)?{color}m{sentence}", line), line


LARGEST = result(
    "a request with a long name",
    num_prompt_tokens=131072,
    num_prefill_cached_tokens=99999,
    num_decode_cached_tokens=99999,
    transfer=Transfer(1023 << 30, ("shm",), 1.0, 100.9, 101.9, 102.0),
    tokens_equal=False,
    kv=KvCheck(0, 1, ("x",)),
    text="many words, one after the other; " * 9,
)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_everything_is_whole_at_80_columns(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False, force_terminal=is_terminal)
    show(console, [LARGEST], summarise([LARGEST], tokens_decide=True, wall_s=99.5))
    assert isinstance(console.file, io.StringIO)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    table, _, rest = plain.partition("\n\n")
    assert max(map(len, table.splitlines())) <= 80
    for cell in ("131072", "99999/99999", "1023 GiB", "99900", "1000.0", "1098", "NO", "prompt"):
        assert cell in table
    assert "".join(line.split("  ")[0] for line in table.splitlines()[2:]).replace(" ", "") == (
        "arequestwithalongname"
    )
    if is_terminal:
        assert max(map(len, rest.splitlines())) <= 80
    assert "a request with a long name: 'many words, one" in rest


def test_some_texts_are_shown_and_all_written() -> None:
    lines = shown(*(result(f"r{i}", text=f"text {i}\n") for i in range(12)))
    assert [line for line in lines if "text " in line] == [
        f"r{i}: 'text {i}\\n'" for i in range(10)
    ]
    assert "and 2 more texts: --json FILE has them all" in lines


def test_what_was_over_when_the_run_was_ended() -> None:
    console = Console(file=io.StringIO(), width=110, highlight=False)
    for results, sentence in (([GOOD], "ended when 1 of 9 "), ([], "ended when 0 of 9 ")):
        summary = summarise(results, tokens_decide=True, wall_s=2.5, num_planned=9)
        show(console, results, summary)
        assert isinstance(console.file, io.StringIO)
        assert sentence in console.file.getvalue().splitlines()[-1]


def test_below_float32_the_kv_decides() -> None:
    lines = shown(msgspec.structs.replace(GOOD, tokens_equal=False), tokens_decide=False)
    assert lines[-1] == (
        "tokens equal to the single engine's: 0 of 1 (below float32 the KV decides); "
        "KV equal to the source's: 1 of 1"
    )


def test_nothing_moved_nothing_compared() -> None:
    lines = shown(result("a"), result("b", status="FINISHED_ERROR"))
    assert lines[-2] == "wire none: nothing was moved"
    assert lines[-1] == "1 requests failed"
    assert shown(result("a"))[-1] == "nothing was compared"


def test_facts_are_json_and_keep_secrets(tmp_path: Path) -> None:
    secret = "S" * 40
    kv = Config(curve_public_key="P" * 40, curve_secret_key=secret)
    config = EngineConfig(role=Role.PREFILL, engine_id="prefill", kv=kv)
    summary = summarise([GOOD], tokens_decide=True, wall_s=1.0)
    path = tmp_path / "facts.json"
    write_json(path, facts([GOOD], summary, engines={"prefill": config}, infos={}))
    assert secret not in path.read_text()
    found = msgspec.json.decode(path.read_bytes())
    assert found["engines"]["prefill"]["kv"]["curve_secret_key"] == "(set)"
    assert found["engines"]["prefill"]["block_size"] == 16
    assert found["requests"][0]["transfer"] == {
        "nbytes": 3 << 20,
        "wires": ["shm"],
        "handed_s": 1.0,
        "granted_s": 1.5,
        "placed_s": 1.5125,
        "finished_s": 1.6,
        "wait_s": 0.5,
        "read_s": pytest.approx(0.0125),
        "gbps": pytest.approx((3 << 20) / 0.0125 / 1e9),
    }
    assert found["requests"][0]["kv"] == {"token_lo": 32, "token_hi": 299, "differences": []}
    assert found["summary"]["is_good"] is True
    assert found["versions"].keys() == versions().keys() >= {"kvxfer", "python", "torch", "pyzmq"}


def test_json_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json: .* cannot be written \(Is a directory\)"):
        write_json(tmp_path, {})
