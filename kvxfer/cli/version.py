"""The version of the package that this room is part of."""

from __future__ import annotations

import sys


def own_version() -> str:
    """As the package says itself. It stands above this room, and was loaded before it."""
    return str(vars(sys.modules["kvxfer"])["__version__"])
