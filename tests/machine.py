"""What this machine is: files of its kernel, as another one has them."""

from __future__ import annotations

import glob
import io
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

RDMA = "/sys/class/infiniband"
CPU_QUOTA = "/sys/fs/cgroup/cpu.max"


def put(patch: pytest.MonkeyPatch, name: str, there: Path) -> None:
    """Who looks at ``name``, or at what is in it, finds what is ``there``, or nothing."""
    for module, call in ((os, "stat"), (os, "scandir"), (os, "listdir"), (io, "open")):
        patch.setattr(module, call, partial(_elsewhere, getattr(module, call), name, there))
    for kind in vars(glob).values():  # Python 3.13 has taken os.scandir for its own there
        if isinstance(kind, type) and "scandir" in vars(kind):
            patch.setattr(kind, "scandir", staticmethod(os.scandir))


def _elsewhere(call: Any, name: str, there: Path, path: Any = ".", *args: Any, **named: Any) -> Any:
    asked = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if asked == name or asked.startswith(f"{name}/"):
        path = f"{there}{asked[len(name) :]}"
    return call(path, *args, **named)
