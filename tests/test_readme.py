"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    code, output = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)[:2]
    # Its own port: another engine may be listening on the default one.
    layout = 'layout="HND"'
    assert layout in code
    script = tmp_path / "example.py"
    script.write_text(code.replace(layout, f"{layout}, kv=Config(port=0)"))
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
