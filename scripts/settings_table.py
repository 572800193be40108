"""The table of all settings in docs/operations.md, from what the fields say of themselves: default,
meaning, and when to change it. Writes it; a test compares it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvxfer.config import Config
from kvxfer.integrations.vllm.settings import PluginSettings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/operations.md"
BEGIN, END = "<!-- settings: scripts/settings_table.py -->\n", "<!-- end of settings -->\n"
# (file, record, mark of its settings)
RECORDS: tuple[tuple[str, type[msgspec.Struct], str], ...] = (
    ("kvxfer/config.py", Config, ""),
    ("kvxfer/integrations/vllm/settings.py", PluginSettings, "*"),
)


@dataclass(frozen=True)
class Row:
    """One setting, in Markdown."""

    name: str
    default: str
    meaning: str
    change: str


def rows() -> Iterator[Row]:
    """Every setting in order. Raises ValueError for a field that does not say both."""
    for file, record, mark in RECORDS:
        said = _said(ROOT / file, record.__name__)
        for field in msgspec.structs.fields(record):
            meaning, mark_of_change, change = said.get(field.name, "").rpartition(" Change it")
            if not mark_of_change:
                raise ValueError(
                    f"{record.__name__}.{field.name}: expected a docstring that ends with 'Change "
                    f"it ...', got {said.get(field.name)!r}"
                )
            change = change.lstrip(" ,")
            default = "not set" if field.default is None else f"`{_text(field.default)}`"
            yield Row(f"`{field.name}`{mark}", default, _markdown(meaning), _markdown(change))


def _said(file: Path, record: str) -> dict[str, str]:
    """The docstring of each field: the text that follows it."""
    (body,) = [
        node.body
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == record
    ]
    said = {}
    for field, text in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match text:
                case ast.Expr(ast.Constant(str(found))):
                    said[field.target.id] = " ".join(found.split())
    return said


def _text(value: object) -> str:
    """As an environment variable has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _markdown(text: str) -> str:
    text = re.sub(r" See :\w+:`[^`]*`\.", "", text)
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`").rstrip(".")


def table() -> str:
    """The lines between the marks."""
    lines = ["| setting | default | what it is | when to change it |", "|---|---|---|---|"]
    lines += [f"| {r.name} | {r.default} | {r.meaning} | {r.change} |" for r in rows()]
    return "\n".join(lines) + "\n"


def parts(page: str) -> tuple[str, str, str]:
    """What is before the table, the table, and what is behind it. Raises ValueError without it."""
    before, begin, rest = page.partition(BEGIN)
    inside, end, behind = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: expected {BEGIN.strip()} and {END.strip()}, got none")
    return before + begin, inside, end + behind


def main() -> int:
    before, _, behind = parts(PAGE.read_text())
    PAGE.write_text(before + table() + behind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
