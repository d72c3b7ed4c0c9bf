"""Tests of the files and the command in docs/sweeps.md, and of a sweep over objects that a script defines."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import edgefl
from edgefl.errors import ConfigError
from edgefl.lab.verify import verify
from edgefl.results.sweep import Sweep

TEXT = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: ([\w.]+) -->\n```\w+\n(.*?)```", TEXT, flags=re.DOTALL))
COMMAND = re.findall(r"<!-- command -->\n```\n(.*?)\n```", TEXT, flags=re.DOTALL)

SCRIPT = """
import sys
from dataclasses import dataclass

import numpy as np
import torch

import edgefl
from edgefl.strategies.fedbuff import FedBuff


@dataclass(frozen=True, kw_only=True)
class Mine(FedBuff):
    exponent: float = 0.1


def make(input_shape, classes):
    return torch.nn.Linear(*input_shape, classes)


def split(labels, profiles, rng):
    return np.array_split(rng.permutation(len(labels)), len(profiles))


if __name__ == "__main__":
    x = np.random.default_rng(1).normal(size=(80, 4)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(int)
    experiment = edgefl.Experiment(
        fleet={"devices": {"pixel-4": 4}, "network": "fios"},
        training=edgefl.Training(steps=2),
        clock=edgefl.Clock(workers=1),
        evaluation=edgefl.Evaluation(every_versions=1),
        stop=edgefl.Stop(versions=30, patience_evaluations=2, min_improvement=0.9),
    )
    own = {"model": make, "partition": split, "data": (x[:60], y[:60], x[60:], y[60:])}
    kinds = [Mine(buffer_size=2), FedBuff(buffer_size=2)]
    found = edgefl.sweep(experiment, "out", seeds=[1], grid={"strategy": kinds}, **own)
    print(*found.means()["label"], *found.table()["versions"].astype(int), sep=";")
"""


@pytest.mark.usefixtures("fork_server")
def test_objects_of_a_script_are_run_recorded_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as ``python my_script.py`` does
    runpy.run_path("my_script.py", run_name="__main__")
    said = "Mine (buffer_size=2);fedbuff (buffer_size=2);2;2\n"
    assert capfd.readouterr() == (said, "")
    found = Sweep(tmp_path / "out")
    mine = found.runs[0].result
    with mine.record as record:
        assert record.meta.strategy == "my_script:Mine"
        assert (record.meta.model, record.meta.partition) == ("my_script:make", "my_script:split")
        assert record.meta.stop_reason == "patience"
    assert mine.evaluations()["version"].tolist() == [0, 1, 2]
    assert len(list((tmp_path / "out").glob("data-*.safetensors"))) == 1
    assert verify(mine.dir, code=tmp_path).model_sha256 == mine.summary()["model_sha256"]
    with pytest.raises(ConfigError, match="would run code of this run's author"):
        verify(mine.dir)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_page_work(tmp_path: Path) -> None:
    assert sorted(FILES) == ["compare.toml", "figure.py", "mine.py", "notebook.py"]
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (command,) = COMMAND
    lines = [
        [sys.executable, "-m", *shlex.split(command)],
        [sys.executable, "figure.py"],
        [sys.executable, "notebook.py"],
    ]
    said = [subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True) for line in lines]
    assert "Halving" in said[0].stdout
    assert (tmp_path / "figure.pdf").stat().st_size > 5000
    assert [line.split()[0] for line in said[2].stdout.splitlines()] == ["moto-g4", "pi-4", "pixel-3a"]
    assert edgefl.Sweep(tmp_path / "runs" / "compare-sweep").table().rows == 6
