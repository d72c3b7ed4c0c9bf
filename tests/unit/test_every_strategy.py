"""Tests that the table in the documentation lists every strategy and its settings in the comparison."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import every_strategy as comparison
from edgefl import config
from edgefl.strategies import names, resolve

ROOT = Path(__file__).parents[2]


def test_only_strategies_have_settings() -> None:
    assert comparison.SETTINGS.keys() <= set(names())


@pytest.mark.parametrize("name", names())
def test_each_strategy_has_a_row_with_its_settings_in_the_documentation(name: str) -> None:
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    table = text.split("## All of them on one experiment")[1].split("\n## ")[0]
    (row,) = re.findall(rf"^\| `{name}` \|(.*)$", table, flags=re.MULTILINE)
    fields = comparison.SETTINGS.get(name, {})
    for field, value in fields.items():
        assert f"`{field} = {value}`" in row
    clients = sum(config.load(comparison.EXPERIMENT).fleet.devices.values())
    resolve({"name": name, **fields}).check(clients)
