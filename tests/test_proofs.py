"""The proofs that docs/vllm.md names are tests that there are, and one test each: a name that
several files have stands beside its file or folder. And the index of records has each of them once.
"""

from __future__ import annotations

import re
from collections import Counter

from tests.defined import ROOT, files_by_test

PAGE = ROOT / "docs" / "vllm.md"
INDEX = ROOT / "scripts" / "results" / "README.md"


def test_each_proof_is_one_test() -> None:
    known, wrong = files_by_test(), []
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
        for name, behind in re.findall(r"`(test_\w+)`(?: (?:of|\()\s?`([\w./]+)`)?", line):
            fitting = [path for path in known.get(name, ()) if str(path).find(behind or "") >= 0]
            if len(fitting) != 1:
                named = ", ".join(map(str, sorted(fitting))) or "nothing"
                wrong.append(
                    f"{PAGE.name}:{number}: {name} {behind}: expected one test, got {named}"
                )
    assert not wrong, "\n".join(wrong)


def test_each_record_is_in_the_index_once() -> None:
    linked = Counter(re.findall(r"\]\(([^)]+)\)", INDEX.read_text()))
    assert linked == Counter(path.name for path in INDEX.parent.glob("*.md") if path != INDEX)
