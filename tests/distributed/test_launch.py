"""Starts the tests of this folder under torchrun: four ranks on this host, without GPUs.

By hand, with any even number of ranks; on GPUs with nccl if each rank has its own, else sharing
them; ``--long`` for the whole grid::

    torchrun --standalone --nproc-per-node 4 -m pytest -q -p no:cacheprovider tests/distributed
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.world import NUM_RANKS, UNDER_TORCHRUN

if UNDER_TORCHRUN:
    pytest.skip("starts torchrun, and is under it already", allow_module_level=True)

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TIMEOUT_S = 240.0
"""About 30 s on one core that does nothing else; a hang ends earlier, by COLLECTIVE_TIMEOUT_S."""
GRACE_S = 40.0
SHOWN_CHARACTERS = 6000


def test_four_ranks_on_this_host(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *(f"--nproc-per-node={NUM_RANKS}", "--redirects=3", f"--log-dir={tmp_path}"),
        *(
            "-m",
            "pytest",
            "-q",
            "--maxfail=5",
            "-p",
            "no:cacheprovider",
            str(FOLDER.relative_to(ROOT)),
        ),
    ]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks, by force after 30 s
            said = f"no end within {TIMEOUT_S:g} s; {_last_words(process)}"
    logs = dict(_logs(tmp_path))
    if process.returncode:
        shown = "\n\n".join(f"rank {rank}:\n{log}" for rank, log in logs.items())
        pytest.fail(f"{shown}\n\ntorchrun: {said[-SHOWN_CHARACTERS:]}", pytrace=False)
    assert list(logs) == list(range(NUM_RANKS))
    for log in logs.values():
        assert " passed" in log.splitlines()[-1]


def _last_words(process: subprocess.Popen[str]) -> str:
    try:
        said, _ = process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    return said


def _logs(folder: Path) -> Iterator[tuple[int, str]]:
    """(rank, the end of what it has written), by rank."""
    for rank in range(NUM_RANKS):
        texts = [
            path.read_text(errors="replace").strip()
            for name in ("stderr.log", "stdout.log")
            for path in sorted(folder.glob(f"*/attempt_0/{rank}/{name}"))
        ]
        if texts:
            yield rank, "\n".join(texts)[-SHOWN_CHARACTERS:]
