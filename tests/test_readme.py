"""The length of the README, and the names that the page on the cache utilities lists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_names_of_the_page_exist() -> None:
    text = (ROOT / "docs/cache.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| `(kvxfer[\w.]+)` \|$", text, re.MULTILINE)
    assert len(rows) == 14
    for names, home in rows:
        module = importlib.import_module(home)
        # Not getattr: the first use of NONE_HASH makes it.
        assert set(re.findall(r"`(\w+)`", names)) <= {*dir(module), "NONE_HASH"}


def test_the_readme_is_a_quick_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 165
