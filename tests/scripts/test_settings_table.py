"""The page has every setting as the code has it, cell by cell."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvxfer.config import Config, load_config
from kvxfer.integrations.vllm.settings import PluginSettings
from scripts import settings_table
from scripts.settings_table import PAGE, parts, rows, table


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]


def test_the_page_says_what_the_code_says() -> None:
    _, found, _ = parts(PAGE.read_text())
    assert cells(found) == cells(table()), "run scripts/settings_table.py"


def test_every_setting_is_there_once_with_its_default() -> None:
    names = [row.name.strip("`*") for row in rows()]
    assert names == [*Config.__struct_fields__, *PluginSettings.__struct_fields__]
    for row in rows():
        name = row.name.strip("`*")
        record = Config if name in Config.__struct_fields__ else PluginSettings
        default = getattr(record(), name)
        assert (row.default == "not set") == (default is None)
        if record is Config and default is not None:
            # what the page says, as a variable says it, is the default
            text = row.default.strip("`")
            loaded = load_config({}, {}, {f"KVXFER_{name.upper()}": text})
            assert getattr(loaded.config, name) == default


def test_a_field_that_says_too_little_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(msgspec.Struct):
        wire: int = 0

    for said in ('"""The wire."""', '"""The wire. It is."""', "", '"""Change it."""'):
        file = tmp_path / "short.py"
        file.write_text(f"class Short:\n    wire: int = 0\n    {said}\n")
        monkeypatch.setattr(settings_table, "RECORDS", ((str(file), Short, ""),))
        with pytest.raises(ValueError, match=r"^Short\.wire: expected a docstring that ends"):
            list(rows())


def test_a_page_without_the_marks() -> None:
    with pytest.raises(ValueError, match="expected <!-- settings"):
        parts("# Operations\n")
