"""docs/strategies.md: its example runs as printed, and it names what there is."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from edgefl import experiment
from edgefl.core import Core
from edgefl.strategies import names, resolve
from edgefl.testing import fleet, run_in_memory

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")


def block(mark: str) -> str:
    found = re.search(re.escape(mark) + r"\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None, f"docs/strategies.md has no {mark}"
    return found[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "by_loss.py").write_text(block("<!-- file: by_loss.py -->"), encoding="utf-8")
    return tmp_path


def test_the_example_passes_the_kit_as_printed(folder: Path) -> None:
    (folder / "try_it.py").write_text(block("<!-- test -->"), encoding="utf-8")
    command = [sys.executable, "-W", "error", "try_it.py"]
    done = subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, check=True, capture_output=True, timeout=60
    )
    assert done.stdout


def test_the_tables_of_the_text_are_strategies(folder: Path) -> None:
    tables = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    made = [resolve(tomllib.loads(table)["strategy"], [folder]) for table in tables]
    assert [type(strategy).__name__ for strategy in made] == ["FedBuff", "ByLoss"]
    core = Core(made[1], fleet(4), 1, experiment.Stop(versions=5))
    assert len(run_in_memory(core, [1.0, 2.0, 3.0, 4.0]).models) == 6


@pytest.mark.parametrize("name", names())
def test_each_built_in_is_in_the_table(name: str) -> None:
    assert f"`{name}`" in TEXT
