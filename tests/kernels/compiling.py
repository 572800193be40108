"""Kernels compiled for a GPU, which need not be there."""

from __future__ import annotations

import os
import subprocess
import sys


def printed_without_interpreter(program: str, *arguments: str) -> str:
    """What the program prints, in a process of its own whose Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
