"""Room for descriptors, as the kernel itself counts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, resource, sys
from pathlib import Path
from kvxfer.transports import parallel

def size():
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("FDSize")).split()[1])

usual, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
before, used = size(), len(os.listdir("/proc/self/fd"))
limit = parallel.MOST_DESCRIPTORS = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
parallel.make_room()
resource.setrlimit(resource.RLIMIT_NOFILE, (usual, hard))
print(before, size(), len(os.listdir("/proc/self/fd")) - used)
"""


def sizes(limit: int) -> tuple[int, int, int]:
    """Of the table of a new process before and after, and how many more descriptors it has."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(limit)], capture_output=True, text=True, check=True
    )
    before, after, num_more = map(int, done.stdout.split())
    return before, after, num_more


def test_there_is_room_for_many_descriptors() -> None:
    before, after, num_more = sizes(8192)
    assert before < 4096 <= after
    assert num_more == 0


def test_no_more_than_the_process_may_have() -> None:
    _, after, num_more = sizes(500)
    assert 500 <= after < 4096
    assert num_more == 0


def test_a_process_without_any_left_goes_on() -> None:
    assert sizes(3)[2] == 0


@pytest.mark.parametrize(("soft", "hard", "expected"), [(256, 1000, 1000), (300, 300, 300)])
def test_the_soft_limit_is_raised_to_the_hard_one(soft: int, hard: int, expected: int) -> None:
    program = (
        "import resource; from kvxfer.transports.parallel import make_room;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); make_room();"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(expected), str(hard)]
