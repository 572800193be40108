"""``kvxfer plan`` as a person runs it."""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from kvxfer.cli.app import app
from kvxfer.plan.geometry import Geometry

ROOT = Path(__file__).parents[2]
MODEL = "layers=32,kv_heads=8,head_dim=128"


@pytest.fixture(autouse=True)
def keep_what_is_global() -> Iterator[None]:
    """A command takes them for itself, and a log's level."""
    log = logging.getLogger("kvxfer.cache")
    level = log.level
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    log.setLevel(level)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_tables() -> None:
    done = run("--source", f"{MODEL},tp=4", "--sink", "tp=2,block=64,layout=NHD")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("2048 tokens, 256 MiB; cuda_ipc takes 0.")
    assert lines[1] == "source  TP 4, blocks of 16 HND, bfloat16: 32 layers, 8 KV heads of 128"
    rows = [line.split() for line in lines]
    for tp in range(4):
        heads = f"{2 * tp}-{2 * tp + 1}"
        row = [f"pp0tp{tp}", f"pp0tp{tp // 2}", "0-31", heads, "0-2047", "32", "64", "MiB"]
        assert row in rows
    known = ("cuda_ipc", "shm", "zmq", "tcp", "ucx", "nixl")
    wires = [" ".join(row[:2]) for row in rows if row and row[0] in known]
    assert " ".join(sorted(wires)) == "cuda_ipc launches: nixl chunks: tcp x8 ucx chunks: zmq x8"
    assert "Wires as measured on NVIDIA H100 80GB HBM3 x 2, 2026-11-25" in done.stdout


def test_rows_that_are_too_many_are_counted() -> None:
    done = run(
        "--source", f"{MODEL},tp=8,pp=4", "--sink", "tp=16,pp=8,block=256", "--tokens", "1024"
    )
    assert done.exit_code == 0, done.output
    assert "and 64 more; --json has all" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json_and_svg(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    sides = ("--source", f"{MODEL},tp=2,device=cpu", "--sink", "tp=1")
    done = run(*sides, "--json", "--svg", str(picture), "--gbps", "0.125", "--tokens", "100")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["result"] == "planned"
    assert facts["nbytes"] == 100 * 32 * 8 * 128 * 2 * 2
    assert [move["heads"] for move in facts["moves"]] == [[0, 4], [4, 8]]
    assert {wire["wire"] for wire in facts["wires"]} == {"zmq", "ucx", "nixl"}
    assert {wire["limit"] for wire in facts["wires"]} == {"link"}
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_refused_pair() -> None:
    sides = ("--source", MODEL, "--sink", "kv_cache_dtype=fp8")
    done = run(*sides)
    assert done.exit_code == 1
    said = " ".join(done.stdout.split())
    assert said.startswith("refused: engines source and sink cannot exchange KV: dtype: source has")
    assert "use the same KV dtype on both sides" in said
    facts = json.loads(run(*sides, "--json").stdout)
    assert facts["result"] == "refused"
    fields = [each["field"] for each in facts["differences"]]
    assert fields[:2] == ["dtype", "quantisation"]
    assert fields[2].startswith("inner_nbytes of model.layers.0.self_attn/k")


def test_a_model_that_does_not_move_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "m", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"layer_types": ["linear_attention"]})
    )
    done = run("--source", str(tmp_path), "--sink", "tp=1")
    assert done.exit_code == 1
    assert "it keeps a state, whose shape only a running engine says" in " ".join(
        done.stdout.split()
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--source", f"{MODEL},tp=3", "--sink", "tp=1"), "--source: "),
        (
            ("--source", MODEL, "--sink", "tp=0"),
            "--sink: tp: expected a whole number >= 1, got '0'",
        ),
        (
            ("--source", MODEL, "--sink", "tp=2", "--svg", "/nowhere/x.svg"),
            "--svg: expected a file",
        ),
        (("--source", MODEL, "--sink", "tp=2", "--tokens", "0"), "--tokens"),
        (("--source", MODEL, "--sink", "tp=2", "--gbps", "nan"), "--gbps"),
        (("--source", MODEL), "--sink"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert says in done.output
    assert "Traceback" not in done.output


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (
        (ROOT / "docs/operations.md").read_text().split("## What a pair of engines would do")[1]
    )
    command, output = re.findall(r"```\n(.*?)```", section, re.DOTALL)[:2]
    monkeypatch.chdir(tmp_path)
    done = run(*command.split()[2:])
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in done.stdout.splitlines()] == output.splitlines()
    assert (tmp_path / "plan.svg").is_file()


def test_the_page_has_every_key() -> None:
    section = (ROOT / "docs/operations.md").read_text().split("| key | default | means |")[1]
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", section.split("\n\n")[0], re.MULTILINE)
    shown: dict[str, str] = {}
    for names, defaults in rows:
        keys, values = re.findall(r"`(\w+)`", names), defaults.replace("`", "").split(", ")
        shown |= dict(zip(keys, values * (len(keys) if len(values) == 1 else 1), strict=True))
    assert set(shown) == set(Geometry.__struct_fields__)
    geometry = Geometry(layers=1, head_dim=1)
    for name, value in shown.items():
        if value != "of CONFIG":
            assert str(getattr(geometry, name)) in (value, value.capitalize()), name
