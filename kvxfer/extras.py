"""What pip is to install where an optional package is missing."""

from __future__ import annotations

import re
import shlex
from importlib import metadata


def install(extra: str) -> str:
    """The command for the packages of an extra. kvxfer itself is on no index, so they are named."""
    try:
        required = metadata.requires("kvxfer") or []
    except metadata.PackageNotFoundError:  # only on PYTHONPATH
        return f"pip install '.[{extra}]' in the folder of kvxfer"
    found = [re.fullmatch(rf"(.+?) *; *extra == ['\"]{extra}['\"]", each) for each in required]
    return shlex.join(["pip", "install", *(each[1] for each in found if each)])
