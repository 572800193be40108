"""Coverage-guided fuzzing of the decoders of ``tests/hostile`` with atheris (``pip install
kvxfer[fuzz]``, Python 3.11 to 3.13).

Inputs are mutations that know how good ones are built, of these and of all that have reached new
code. An error that is not documented, 5 s or 4 GiB end a decoder's run, and the input stays in the
folder of ``--out``.

    python scripts/fuzz.py --runs 100000 --decoders "control*" --out /tmp/fuzz
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

_LAST = re.compile(r"#(\d+)\s+DONE\s+cov: (\d+)")


def main() -> int:
    """Exit status: 0 every decoder ended as documented, 1 one did not."""
    parser = argparse.ArgumentParser(description="coverage-guided fuzzing of every decoder")
    parser.add_argument("--runs", type=int, default=100_000, help="inputs for each decoder")
    parser.add_argument("--decoders", default="*", help="a pattern of names")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "kvxfer-fuzz")
    parser.add_argument("--one", help="this decoder, in this process")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        _fuzz(options.one, options.runs, options.out)
    from tests.hostile.decoders import DECODERS

    names = [each.name for each in DECODERS if fnmatch.fnmatch(each.name, options.decoders)]
    failed = 0
    for name in names:
        begin_s = time.monotonic()
        command = [sys.executable, __file__, "--one", name, "--runs", str(options.runs)]
        ended = subprocess.run(
            [*command, "--out", str(options.out)], capture_output=True, text=True, check=False
        )
        last = _LAST.search(ended.stderr)
        is_good = ended.returncode == 0 and last is not None
        failed += not is_good
        facts = f"{last[1]} inputs, {last[2]} branches" if last else ended.stderr[-3000:]
        word = "good" if is_good else "FAILED"
        print(f"{name:32} {word} {facts}, {time.monotonic() - begin_s:.0f} s", flush=True)
    return 1 if failed else 0


def _fuzz(name: str, num_runs: int, out: Path) -> None:
    """Ends the process."""
    import atheris

    with atheris.instrument_imports(include=["kvxfer"]):
        from tests.hostile.decoders import DECODERS, outcome
        from tests.hostile.mutation import MOST_NBYTES, mutated
    (decoder,) = (each for each in DECODERS if each.name == name)

    def mutate(frame: bytes, most_nbytes: int, seed: int) -> bytes:
        seeds = (*decoder.seeds, frame) if frame else decoder.seeds
        return mutated(random.Random(seed), decoder.form, seeds)[:most_nbytes]

    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *(f"-runs={num_runs}", "-seed=1", f"-max_len={MOST_NBYTES}", "-timeout=5"),
            *("-rss_limit_mb=4096", f"-artifact_prefix={out}/{name.replace(' ', '_')}-"),
        ]
        atheris.Setup(
            [sys.argv[0], *arguments],
            lambda frame: outcome(decoder, frame, Path(folder)),
            custom_mutator=mutate,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
