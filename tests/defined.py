"""Which tests there are: pages and tables name them as proofs."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]


def files_by_test() -> dict[str, set[Path]]:
    """The files of each test, from the root of the project."""
    found: dict[str, set[Path]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE):
            found[name].add(path.relative_to(ROOT))
    return found
