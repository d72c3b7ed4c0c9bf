"""Tests of the files and commands in docs/tutorials.md, with fewer seeds and seconds."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import Command

TEXT = (Path(__file__).parents[2] / "docs" / "tutorials.md").read_text(encoding="utf-8")
FILES, CHANGED = (
    dict(re.findall(rf"<!-- {mark}: ([\w.]+) -->\n```\w+\n(.*?)```", TEXT, flags=re.DOTALL))
    for mark in ("file", "change")
)
SCRIPTS = ("figure.py", "stages.py", "average.py")
(SWEEP,) = re.findall(r"<!-- command -->\n```\n(.*?)\n```", TEXT, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.timeout(240)
def test_two_strategies_are_compared_and_the_server_is_profiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = SWEEP.replace("1..3", "1") + " --set stop.emulated_s=1"
    assert short.count("--seeds 1 ") == 1
    edgefl, *arguments = shlex.split(short)
    code, out, err = Command(*arguments, cwd=folder).finish()
    assert (edgefl, code) == ("edgefl", 0), err
    for heading in ("Time to 70.0% accuracy", "time ÷", "mean applied weight of nexus-6; 1 is fair"):
        assert heading in out
    monkeypatch.chdir(folder)
    for script in SCRIPTS:
        runpy.run_path(script)
    printed = capsys.readouterr().out
    assert (folder / "figure.png").stat().st_size > 5000
    assert re.search(r"^sum +\d+\.\d% of the run, +\d+ µs per trip$", printed, re.MULTILINE)
    averages = [line.split(":")[0] for line in printed.splitlines()[-3:]]
    assert averages == ["in_numpy", "in_edgefl", "largest difference"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_slower_function_fails(folder: Path) -> None:
    pytest_here = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "edgefl.pytest_plugin")
    saved = run(folder, *pytest_here, "--edgefl-save")
    assert saved.returncode == 0, saved.stdout
    (folder / "words.py").write_text(CHANGED["words.py"], encoding="utf-8")
    slower = run(folder, *pytest_here, "--edgefl-compare")
    assert slower.returncode == 1, slower.stdout
    growth = re.search(
        r"bytecode instructions [\d,]+ → [\d,]+ \(\+\d+\.\d%; most in words\.encode", slower.stdout
    )
    assert growth is not None, slower.stdout
