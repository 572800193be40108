"""What the README and the page on the cache utilities show is what happens."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("page", "number"), [("README.md", 0), ("docs/cache.md", 0), ("docs/cache.md", 1)]
)
def test_the_example_prints_what_the_page_says(page: str, number: int, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    code, output = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)[2 * number :][:2]
    if page == "README.md":
        # Its own port: another engine may be listening on the default one.
        layout = 'layout="HND"'
        assert layout in code
        code = "from kvxfer import Config\n" + code.replace(layout, f"{layout}, kv=Config(port=0)")
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "KVXFER_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, output), done.stderr


def test_the_names_of_the_page_exist() -> None:
    text = (ROOT / "docs/cache.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| `(kvxfer[\w.]+)` \|$", text, re.MULTILINE)
    assert len(rows) == 14
    for names, home in rows:
        module = importlib.import_module(home)
        # Not getattr: the first use of NONE_HASH makes it.
        public = getattr(module, "__all__", dir(module))
        assert set(re.findall(r"`(\w+)`", names)) <= set(public)


def test_the_readme_is_a_quick_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
