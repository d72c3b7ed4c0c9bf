"""Predicted beside measured: which steps prove what, and what is said, written and drawn."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from edgefl.cli import main
from edgefl.devices import load_device, measurements
from edgefl.devices.fit import Row
from edgefl.errors import ConfigError
from edgefl.lab import truth
from edgefl.learning.operations import StepWork

NETWORKS = [("LEAF FEMNIST CNN", 10, 1.6), ("MNN train Lenet 28x28", 4, 0.5)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Steps as if a Nexus 6 and a Pi had been measured with DL4J."""
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as out:
        lines = csv.writer(out)
        lines.writerow(
            ["device", "profile", "runtime", "network", "workload", "batch", "measured_s", "source"]
        )
        for profile in ("nexus-6", "pi-3b-plus"):
            for workload, batch, seconds in NETWORKS:
                lines.writerow([profile, profile, "DL4J", "", workload, batch, seconds, "made up"])
    return file


def test_steps_that_a_profile_was_fitted_on_are_apart_and_also_judged_unseen(rows: Path) -> None:
    fitted, other = (
        truth.compared([m for m in measurements.read(rows) if m.profile == name])
        for name in ("nexus-6", "pi-3b-plus")
    )
    assert all(step.fitted and step.unseen is not None for step in fitted)
    assert not any(step.fitted or step.unseen for step in other)
    model = load_device("nexus-6").time_model("dl4j")
    assert model is not None
    assert [step.predicted_s for step in fitted] == [model.seconds(step.row.work) for step in fitted]
    assert all(step.unseen_s != step.predicted_s for step in fitted)
    found = truth.groups([*fitted, *other])
    assert [(g["profile"], g["kind"], g["fitted"]) for g in found] == [
        ("nexus-6", "all", True),
        ("nexus-6", "dense convolutions", True),
        ("pi-3b-plus", "all", False),
        ("pi-3b-plus", "dense convolutions", False),
    ]
    assert found[0]["unseen"]["rows"] == 2
    assert found[2]["unseen"] is None


def test_the_share_that_intervals_hold_is_counted() -> None:
    row = Row(network="n", work=StepWork(conv_flop=1.0), seconds=1.0)
    steps = [
        truth.ComparedStep(
            profile="pi-4", runtime="torch", kind="dense convolutions", row=row, predicted_s=seconds,
            fitted=False, unseen_s=None, error_factor=1.5, source="",
        )
        for seconds in (0.5, 0.7, 1.0, 1.49, 1.51)
    ]  # fmt: skip
    (told, _) = truth.groups(steps)
    assert told["profile_says"]["held"] == pytest.approx(3 / 5)
    assert told["profile_says"]["worst_factor"] == pytest.approx(2.0)
    assert told["profile_says"]["median"] == pytest.approx(0.49)


@pytest.mark.parametrize("quick", [False, True])
def test_bench_truth_prints_a_table_and_writes_figures_and_pictures(
    quick: bool,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "truth.json"
    assert main(["bench", "truth", "--rows", str(rows), "--json", str(out), *["--quick"] * quick]) == 0
    said = capsys.readouterr().out
    assert "Steps that profiles were fitted on" in said
    assert "Steps that no profile was fitted on" in said
    assert max(map(len, said.splitlines())) <= 80
    told = json.loads(out.read_text())
    assert len(told["steps"]) == 4
    assert {step["measured_s"] for step in told["steps"]} == {1.6, 0.5}
    assert all((step["unseen_s"] is None) is (quick or not step["fitted"]) for step in told["steps"])
    assert out.with_suffix(".svg").read_text().lstrip().startswith("<?xml")
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_without_any_steps_one_line_says_how_to_name_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truth, "bundled_folder", lambda: tmp_path)
    with pytest.raises(ConfigError, match="--rows FILE"):
        truth.run()
