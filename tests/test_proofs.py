"""The proofs that docs/vllm.md names are tests that there are, and one test each: a name that
several files have stands beside its file or folder.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "vllm.md"


def files_by_test() -> dict[str, set[Path]]:
    found: dict[str, set[Path]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name].add(path.relative_to(ROOT))
    return found


def test_each_proof_is_one_test() -> None:
    known, wrong = files_by_test(), []
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
        for name, behind in re.findall(r"`(test_\w+)`(?: (?:of|\()\s?`([\w./]+)`)?", line):
            fitting = [path for path in known[name] if str(path).find(behind or "") >= 0]
            if len(fitting) != 1:
                named = ", ".join(map(str, sorted(fitting))) or "nothing"
                wrong.append(
                    f"{PAGE.name}:{number}: {name} {behind}: expected one test, got {named}"
                )
    assert not wrong, "\n".join(wrong)
