"""Tests that `benchmarks/every_strategy.py` covers all strategies with the settings in the documentation."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from edgefl import config
from edgefl.strategies import names, resolve

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("every_strategy", ROOT / "benchmarks" / "every_strategy.py")
comparison = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(comparison)


def test_every_strategy_is_compared() -> None:
    assert sorted(comparison.SETTINGS) == names()


@pytest.mark.parametrize("name", names())
def test_each_strategy_has_a_row_with_its_settings_in_the_documentation(name: str) -> None:
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    table = text.split("## All of them on one experiment")[1].split("\n## ")[0]
    (row,) = re.findall(rf"^\| `{name}` \|(.*)$", table, flags=re.MULTILINE)
    for field, value in comparison.SETTINGS[name].items():
        assert f"`{field} = {value}`" in row
    clients = sum(config.load(comparison.EXPERIMENT).fleet.devices.values())
    resolve({"name": name, **comparison.SETTINGS[name]}).check(clients)
