"""Coverage-guided fuzzing of the decoders of ``tests/hostile`` with atheris (``pip install
kvxfer[fuzz]``, Python 3.11 to 3.13).

Inputs are mutations that know how good ones are built, of these and of all that have reached new
code. An error that is not documented, 5 s or 4 GiB end a decoder's run, and the input stays in the
folder of ``--inputs``.

    python scripts/fuzz.py --runs 100000 --decoders "control*" --out scripts/results
"""

from __future__ import annotations

import argparse
import fnmatch
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:  # a fuzzing process imports the package through atheris alone
    from kvxfer.bench.core import Columns, Report, Table

_LAST = re.compile(r"#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+)")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one decoder's run has come to; ``defect``: what it ended in, the last lines."""

    decoder: str
    num_inputs: int
    num_edges: int
    num_features: int
    seconds: float
    defect: str = ""


COLUMNS: Columns[Row] = {
    "decoder": lambda row: row.decoder,
    "inputs": lambda row: f"{row.num_inputs:,}",
    "edges": lambda row: f"{row.num_edges:,}",
    "features": lambda row: f"{row.num_features:,}",
    "s": lambda row: f"{row.seconds:.0f}",
    "defects": lambda row: "1" if row.defect else "none",
}


def main() -> int:
    """Exit status: 0 every decoder ended as documented, 1 one did not."""
    options = _options()
    options.inputs.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        _fuzz(options.one, options.runs, options.inputs)
    from kvxfer.bench.core import Report, facts_of
    from tests.hostile.decoders import DECODERS

    report = None
    if options.out is not None:
        command = f'python scripts/fuzz.py --runs {options.runs} --decoders "{options.decoders}"'
        packages = ("atheris", "msgspec", "pyzmq")
        title = "Coverage-guided fuzzing of the decoders"
        report = Report(options.out, "fuzz", title, facts_of(command, packages), _tables)
    rows: list[Row] = []
    for decoder in DECODERS:
        if not fnmatch.fnmatch(decoder.name, options.decoders):
            continue
        row = _run(decoder.name, options.runs, options.inputs)
        rows.append(row)
        facts = f"{row.num_inputs} inputs, {row.num_edges} edges, {row.num_features} features"
        word = "FAILED" if row.defect else "good"
        print(f"{row.decoder:32} {word} {facts}, {row.seconds:.0f} s", flush=True)
        if row.defect:
            print(row.defect, flush=True)
        if report is not None:
            report.records["rows"] = rows
            report.write()
    return 1 if any(row.defect for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="coverage-guided fuzzing of every decoder")
    parser.add_argument("--runs", type=int, default=100_000, help="inputs for each decoder")
    parser.add_argument("--decoders", default="*", help="a pattern of names")
    parser.add_argument("--out", type=Path, help="folder of the dated results")
    parser.add_argument(
        "--inputs",
        type=Path,
        default=Path(tempfile.gettempdir()) / "kvxfer-fuzz",
        help="folder of inputs that ended a run",
    )
    parser.add_argument("--one", help="this decoder, in this process")
    return parser.parse_args()


def _run(name: str, num_runs: int, inputs: Path) -> Row:
    """In a process of its own, which a defect ends."""
    begin_s = time.monotonic()
    command = [sys.executable, __file__, "--one", name, "--runs", str(num_runs)]
    ended = subprocess.run(
        [*command, "--inputs", str(inputs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    last = _LAST.search(ended.stdout)
    num_inputs, num_edges, num_features = map(int, last.groups()) if last else (0, 0, 0)
    return Row(
        decoder=name,
        num_inputs=num_inputs,
        num_edges=num_edges,
        num_features=num_features,
        seconds=time.monotonic() - begin_s,
        defect="" if last and ended.returncode == 0 else _end_of(ended),
    )


def _end_of(ended: subprocess.CompletedProcess[str]) -> str:
    return f"exit status {ended.returncode}: {ended.stdout[-3000:]}"


def _tables(report: Report) -> list[Table]:
    from kvxfer.bench.core import table

    rows: list[Row] = report.records["rows"]
    text = (
        "Edges and features as libFuzzer counts them, in the Python of `kvxfer`: branches that "
        "were taken, and these with how often and what was compared. What msgspec does in C it "
        "does not see: a decoder that is that alone has few. "
        f"In all {sum(row.num_inputs for row in rows):,} inputs in "
        f"{sum(row.seconds for row in rows) / 60:.0f} min."
    )
    return [table("decoders", text, COLUMNS, rows)]


def _fuzz(name: str, num_runs: int, inputs: Path) -> None:
    """Ends the process."""
    import atheris

    with atheris.instrument_imports(include=["kvxfer"]):
        from tests.hostile.decoders import DECODERS, outcome
        from tests.hostile.mutation import MOST_NBYTES, mutated
    (decoder,) = (each for each in DECODERS if each.name == name)

    def mutate(frame: bytes, most_nbytes: int, seed: int) -> bytes:
        seeds = (*decoder.seeds, frame) if frame else decoder.seeds
        return mutated(random.Random(seed), decoder.form, seeds)[:most_nbytes]

    def read(frame: bytes) -> None:
        try:
            outcome(decoder, frame, Path(folder))
        except BaseException:  # atheris may be ended by its own alarm before it has kept it
            (inputs / f"{name.replace(' ', '_')}-last").write_bytes(frame)
            raise

    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *(f"-runs={num_runs}", "-seed=1", f"-max_len={MOST_NBYTES}", "-timeout=5"),
            *("-rss_limit_mb=4096", f"-artifact_prefix={inputs}/{name.replace(' ', '_')}-"),
        ]
        atheris.Setup(
            [sys.argv[0], *arguments],
            read,
            custom_mutator=mutate,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
