"""Real vLLM engines on GPUs, prefill on one and decode on another: vLLM's own NixlConnector beside
KvxferConnector.

Three pairs of engines after one another: NixlConnector; KvxferConnector with the same blocks;
KvxferConnector between unlike blocks and layouts. Requests of several lengths, alone and together,
on pools whose free blocks are in order and on shuffled ones; KV compared by checksums, tokens with
those of one engine. Writes a report in Markdown, all samples as JSON, and the engines' logs. Exit
status 0 only if nothing went wrong; goals that are missed are told, and are no failure.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from kvxfer.bench.core import Report, facts_of
from scripts.benchmarks.vllm_cases import Cases, Deadline
from scripts.benchmarks.vllm_pairs import LLAMA_8B, Geometry, Setup, described, running, tiny
from scripts.benchmarks.vllm_report import tables

PAIRS = ("nixl", "kvxfer", "unlike")
_SHARED_KV_NBYTES = 18 << 30
"""Of each of two engines on one GPU of 80 GB, beside 16 GB of weights each: 147,000 tokens."""
_EQUAL_LENGTHS = (128, 1024, 8192)
Devices = tuple[int | None, int | None]
"""Of prefill and decode; None: a CPU."""


def parse_arguments() -> argparse.Namespace:
    shown = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--out", type=Path, default=Path("scripts/results"), help="folder")
    parser.add_argument("--pairs", default=",".join(PAIRS), help="some of nixl,kvxfer,unlike")
    parser.add_argument("--limit-s", type=float, default=480.0, help="of the whole run")
    parser.add_argument("--repeats", type=int, help="of every length, instead of 5, 5, 5 and 3")
    parser.add_argument("--lengths", help="tokens, instead of 128,1024,8192,32768")
    parser.add_argument(
        "--extra", type=json.loads, default={}, metavar="JSON", help="further settings of kvxfer"
    )
    parser.add_argument(
        "--tiny", metavar="MODEL", help="try the program out on a CPU with this small model"
    )
    return parser.parse_args()


def geometry_of(arguments: argparse.Namespace, folder: Path) -> Geometry:
    """The model and the load; the model's config.json is written."""
    geometry = LLAMA_8B if arguments.tiny is None else tiny(arguments.tiny)
    if geometry.config:
        path = folder / "model"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(geometry.config, indent=1), "utf-8")
        geometry = replace(geometry, path=str(path))
    if arguments.lengths:
        lengths = tuple(int(text) for text in arguments.lengths.split(","))
        geometry = replace(geometry, lengths=lengths, repeats=(3,) * len(lengths))
    if arguments.repeats:
        geometry = replace(geometry, repeats=(arguments.repeats,) * len(geometry.lengths))
    return geometry


def devices_of(arguments: argparse.Namespace) -> Devices:
    """Of prefill and decode: two GPUs, or one for both."""
    if arguments.tiny is not None:
        return None, None
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise SystemExit("vllm_gpu: expected a CUDA device, found none; --tiny tries it on a CPU")
    return 0, min(1, count - 1)


def setups_of(
    name: str, geometry: Geometry, devices: Devices, extra: dict[str, Any]
) -> tuple[Setup, Setup]:
    """Both engines of a pair. ``extra``: settings of kvxfer."""
    connector = "nixl" if name == "nixl" else "kvxfer"
    prefill = Setup(
        connector,
        geometry.block_tokens[0],
        geometry.layouts[0],
        devices[0],
        extra if connector == "kvxfer" else {},
    )
    decode = replace(prefill, device=devices[1])
    if name == "unlike":
        blocks, layout = geometry.block_tokens[1], geometry.layouts[1]
        decode = replace(decode, block_tokens=blocks, layout=layout)
    return prefill, decode


def run_pair(
    name: str, geometry: Geometry, setups: tuple[Setup, Setup], report: Report, end: Deadline
) -> None:
    """All cases of one pair; what goes wrong is written down."""
    say(f"{name}: starting")
    samples, equalities, problems = (
        report.records[kind] for kind in ("samples", "equalities", "problems")
    )
    try:
        end.check(f"the pair {name}")
        with running(geometry, setups, report.out, name) as pair:
            known = report.records["engines"][name] = described(pair)
            say(f"{name}: ready in {pair.start_s:.0f} s: {known['layouts'][1]}")
            cases = Cases(pair, setups[0].connector, end)
            cases.warm_up()
            for sample in cases.measured() if name != "unlike" else ():
                samples.append(sample)
                report.write()
            lengths = [n for n in _EQUAL_LENGTHS if n < geometry.max_model_len - 100]
            for equality in cases.equalities(lengths):
                equalities.append(equality)
                problem = equality.problem(pair.is_like)
                if problem is not None:
                    problems.append(f"{name}, {equality.tokens} tokens: {problem}")
                report.write()
        say(f"{name}: done")
    except Exception as error:  # noqa: BLE001 (the other pairs go on)
        problems.append(f"{name}: {type(error).__name__}: {error}")
        say(problems[-1])
        for log in sorted(report.out.glob(f"{name}_*.log")):
            end_of_log = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            say(f"the end of {log.name}:\n{end_of_log}")
    report.write()


def say(text: str) -> None:
    """Progress, with the time since the start."""
    print(f"[{time.monotonic() - _BEGUN_S:6.1f} s] {text}", flush=True)


_BEGUN_S = time.monotonic()


def run_facts(devices: Devices, geometry: Geometry) -> dict[str, str]:
    facts = facts_of(
        " ".join(("scripts/vllm_gpu", *sys.argv[1:])), ("vllm", "triton", "nixl", "transformers")
    )
    weights = "seeded weights" if geometry.config else "its own weights"
    facts["model"] = f"{geometry.name}, {geometry.dtype}, {weights}"
    facts["prompts"] = "of one token more than is transferred"
    if devices[0] is not None:
        facts["engines"] = "one GPU for both" if devices[0] == devices[1] else "one GPU each"
    return facts


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM ends the program as an exception does, so that the engines end with it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    """Run the pairs that were asked for and print the report."""
    arguments = parse_arguments()
    pairs = arguments.pairs.split(",")
    if unknown := sorted(set(pairs) - set(PAIRS)):
        raise SystemExit(f"--pairs: expected some of {', '.join(PAIRS)}, got {unknown}")
    folder = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    devices = devices_of(arguments)
    geometry = geometry_of(arguments, folder)
    if devices[0] is not None and devices[0] == devices[1]:
        geometry = replace(geometry, kv_nbytes=_SHARED_KV_NBYTES)
    end = Deadline.after(arguments.limit_s)
    title = "KvxferConnector and NixlConnector between vLLM engines"
    report = Report(folder, "vllm_gpu", title, run_facts(devices, geometry), tables)
    report.records = {"engines": {}, "samples": [], "equalities": [], "problems": []}
    with ending_on_signals():
        for name in pairs:
            setups = setups_of(name, geometry, devices, arguments.extra)
            run_pair(name, geometry, setups, report, end)
    print(report.text())
    raise SystemExit(1 if report.records["problems"] else 0)


if __name__ == "__main__":
    main()
