"""Tests of the workflow in docs/gate.md: its steps run unchanged in a new repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "gate.md"
STEPS = """
def prepare():
    return [f"word{{number % 97}}" for number in range(2000)]

def count(words):
    for _ in range({times}):
        counts = {{}}
        for word in words:
            counts[word] = counts.get(word, 0) + 1
    return counts
"""
TEST = """
import pytest
import steps

@pytest.mark.edge_device("pixel-3a", "moto-g4")
def test_counting(edge_device):
    edge_device.run(steps.count, setup=steps.prepare)
"""
QUICK = """
from edgefl.regression import against

against.PAIR_S = 0.05  # the planted change is fivefold
against.SCHEDULE, against.MIN_LAYOUTS = ((3, 1), (4, 1), *against.SCHEDULE), 3
"""


def scripts() -> dict[str, str]:
    """Return the scripts of the workflow's steps by name, with ``main`` in place of ``github.base_ref``."""
    (workflow,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = re.findall(r"- name: (.*?)\n(?:.*\n)*?\s+run: \|\n((?: {10}.*\n)+)", workflow)
    made = {name: textwrap.dedent(script) for name, script in found}
    return {name: script.replace("${{ github.base_ref }}", "main") for name, script in made.items()}


def git(top: Path, *arguments: str) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "protocol.file.allow=always")
    subprocess.run(["git", "-C", str(top), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone, like that of actions/checkout, of a repository with one commit on main."""
    origin = tmp_path / "origin"
    origin.mkdir()
    git(origin, "init", "-q", "-b", "main")
    (origin / "steps.py").write_text(STEPS.format(times=3))
    (origin / "test_steps.py").write_text(TEST)
    (origin / "conftest.py").write_text(QUICK)
    git(origin, "add", "--all")
    git(origin, "commit", "-q", "-m", "first")
    git(tmp_path, "clone", "-q", f"file://{origin}", "clone")
    git(tmp_path / "clone", "checkout", "-q", "-b", "change")
    return tmp_path / "clone"


def run(script: str, clone: Path) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does, with a tolerance above the noise of any machine."""
    options = "-p edgefl.pytest_plugin -p no:cacheprovider --edgefl-tolerance=90 --edgefl-limit=100"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(clone),
        "GITHUB_STEP_SUMMARY": str(clone.parent / "summary.md"),
        "PYTEST_ADDOPTS": options,
    }
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)


def commit(clone: Path, times: int) -> None:
    (clone / "steps.py").write_text(f"# A comment.\n{STEPS.format(times=times)}")
    git(clone, "commit", "-q", "-a", "-m", "a change")


@pytest.mark.timeout(400)
def test_unchanged_code_passes(clone: Path) -> None:
    commit(clone, 3)
    done = run(scripts()["Compare with the base"], clone)
    assert done.returncode == 0, done.stdout
    assert "::error" not in done.stdout
    assert "### edgefl: 2 OK" in (clone.parent / "summary.md").read_text()


@pytest.mark.timeout(400)
def test_a_slower_function_fails_in_every_output(clone: Path) -> None:
    commit(clone, 15)
    steps = scripts()
    assert list(steps) == ["Install", "Compare with the base", "Comment on the pull request"]
    done = run(steps["Compare with the base"], clone)
    assert done.returncode == 1, done.stdout
    annotation = (
        r"^::error file=test_steps\.py,line=\d+,title=edgefl%3A REGRESSION::count on pixel-3a: .*time \+\d+"
    )
    assert re.search(annotation, done.stdout, re.MULTILINE)
    assert "### edgefl: 2 REGRESSION" in (clone.parent / "summary.md").read_text()
    rows = json.loads((clone / "edgefl.json").read_text())["rows"]
    assert [(row["device"], row["outcome"]) for row in rows] == [
        ("pixel-3a", "REGRESSION"),
        ("moto-g4", "REGRESSION"),
    ]
    assert rows[0]["why"] == rows[1]["why"]  # the function is measured once for both devices
    page = (clone / "edgefl.html").read_text()
    assert "REGRESSION" in page
    names = [one.get("name", "") for one in ET.parse(clone / "edgefl.xml").iter("property")]
    assert any(name.startswith("edgefl.pixel-3a") for name in names)
    comment, *_ = steps["Comment on the pull request"].splitlines()
    assert run(comment, clone).returncode == 0
    assert "**REGRESSION**" in (clone / "comment.md").read_text()
    worktrees = subprocess.run(
        ["git", "worktree", "list"], cwd=clone, capture_output=True, text=True, check=True
    )
    assert worktrees.stdout.count("\n") == 1
