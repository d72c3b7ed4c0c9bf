"""`bench truth`: predicted and measured times of steps, their groups and limits, tables and pictures."""

from __future__ import annotations

import csv
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from edgefl.cli import main
from edgefl.devices import load_device, measurements
from edgefl.devices.fit import HeldOutPrediction, Row
from edgefl.devices.profiles import bundled_folder
from edgefl.errors import ConfigError
from edgefl.lab import truth
from edgefl.learning.operations import StepWork

MORE = [
    ("pi-3b-plus", "DL4J", "LEAF FEMNIST CNN", 10, 1.6),
    ("pi-3b-plus", "DL4J", "MNN train Lenet 28x28", 4, 0.5),
    ("pixel-4", "MNN", "MNN train Lenet 28x28", 4, 0.0131),
]
"""Invented steps, as (profile, runtime, workload, batch size, seconds): two of a device that nobody measured,
and one of another phone with the measured SoC of the Pixel 4."""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file with the steps to which the Pixel 4's profile was fitted, and `MORE`."""
    with (bundled_folder() / "measured" / "networks.csv").open(newline="") as known:
        lines = [line for line in csv.DictReader(known) if line["profile"] == "pixel-4"]
    names = ("profile", "runtime", "workload", "batch", "measured_s")
    lines += [{**lines[0], **dict(zip(names, map(str, line), strict=True))} for line in MORE]
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return file


def test_fitted_steps_are_grouped_apart_and_also_predicted_unseen(rows: Path) -> None:
    phone = truth.compared(measurements.read(rows, ("pixel-4", "mnn")))
    board = truth.compared(measurements.read(rows, ("pi-3b-plus", "dl4j")))
    fitted, other = phone[:-1], [*phone[-1:], *board]
    assert len(fitted) == 25
    assert all(step.fitted and step.unseen is not None for step in fitted)
    assert not any(step.fitted or step.unseen for step in other)
    model = load_device("pixel-4").time_model("mnn")
    for step in fitted:
        told, work = step.by_profile, step.by_profile.row.work
        assert (told.predicted_s, told.error_factor) == (model.seconds(work), model.error_factor_of(work))
        assert step.unseen.predicted_s != told.predicted_s
    wider = [step.unseen.error_factor > step.by_profile.error_factor for step in fitted if step.unseen]
    assert sum(wider) > 20  # without a network's steps the fit is less certain
    found = truth.groups([*fitted, *other])
    assert [(g["profile"], g["kind"], g["fitted"]) for g in found] == [
        ("pixel-4", "all", True),
        ("pixel-4", "dense convolutions", True),
        ("pixel-4", "depthwise convolutions", True),
        ("pi-3b-plus", "all", False),
        ("pi-3b-plus", "dense convolutions", False),
        ("pixel-4", "all", False),
        ("pixel-4", "dense convolutions", False),
    ]
    assert found[0]["unseen"]["rows"] == 25
    assert found[3]["unseen"] is None


def compared(
    profile: str, runtime: str, kind: str, *factors: float, fitted: bool = False
) -> list[truth.ComparedStep]:
    """Return steps that took 1 s each. Their predictions are ``factors`` seconds, within a factor of 1.5."""
    row = Row(network="n", work=StepWork(conv_flop=1.0), seconds=1.0)
    found = [HeldOutPrediction(row=row, predicted_s=factor, error_factor=1.5) for factor in factors]
    return [
        truth.ComparedStep(
            profile=profile, runtime=runtime, kind=kind, by_profile=one, fitted=fitted, unseen=None, source=""
        )
        for one in found
    ]


def test_the_share_of_steps_within_their_intervals_is_counted() -> None:
    (told, _) = truth.groups(compared("pi-4", "torch", "dense convolutions", 0.5, 0.7, 1.0, 1.49, 1.51))
    assert told["profile_says"]["held"] == pytest.approx(3 / 5)
    assert told["profile_says"]["worst_factor"] == pytest.approx(2.0)
    assert told["profile_says"]["median"] == pytest.approx(0.49)


def test_each_figure_has_its_limit() -> None:
    steps = [
        *compared("pi-4", "torch", "dense convolutions", *[1.0] * 18, *[1.8] * 2),
        *compared("nexus-6", "dl4j", "layers: lstm", 0.85),
        *compared("pixel-4", "mnn", "dense convolutions", 9.9, fitted=True),
        *compared("this host", "torch on 1 thread", "dense convolutions", *[1.0] * 19),
    ]
    told = {(bar["of"], bar["figure"]): (bar["steps"], bar["met"]) for bar in truth.judged(steps)}
    assert told["pi-4, unseen networks", "median"] == (20, True)
    assert told["pi-4, unseen networks", "p90"] == (20, True)
    assert told["pi-4, unseen networks", "worst_factor"] == (20, False)
    assert told["nexus-6, unseen lstm layers", "median"] == (1, False)
    assert told["another phone of pixel-4's SoC", "worst_factor"] == (0, None)
    assert told["this host, one thread", "median"] == (19, None)  # one network fewer than needed
    assert told["pi-4, torch", "held"] == (20, True)
    assert ("nexus-6, dl4j", "held") not in told


def test_a_share_outside_its_limits_is_not_met_only_if_that_is_not_chance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if intervals contain 90% of all steps, they contain less than 85% or more than 97% of 33 steps in
    more than a quarter of the cases."""
    monkeypatch.setenv("COLUMNS", "100")
    verdicts = []
    for inside, steps in ((30, 33), (33, 33), (28, 33), (20, 33), (400, 400), (320, 400)):
        factors = [1.0] * inside + [9.0] * (steps - inside)
        bars = truth.judged(compared("pi-3b-plus", "torch", "dense convolutions", *factors))
        (bar,) = (each for each in bars if each["figure"] == "held")
        assert bar["found"] == inside / steps
        truth.show({"groups": [], "limits": [bar]})
        verdicts.append((bar["met"], capsys.readouterr().out.split("%")[-1].strip()))
    met, undecided, not_met = (True, "met"), (None, "undecided"), (False, "NOT MET")
    assert verdicts == [met, undecided, undecided, not_met, not_met, not_met]


def test_fitted_steps_are_not_judged_as_unseen() -> None:
    steps = compared("nexus-6", "dl4j", "layers: lstm", *[1.0] * truth.ENOUGH, fitted=True)
    (bar,) = (bar for bar in truth.judged(steps) if bar["of"] == "nexus-6, unseen lstm layers")
    assert (bar["steps"], bar["met"]) == (0, None)
    assert not any(bar["figure"] == "held" for bar in truth.judged(steps))
    unseen = [msgspec.structs.replace(step, unseen=step.by_profile) for step in steps]
    assert truth.judged(unseen)[-1]["steps"] == truth.ENOUGH


@pytest.mark.parametrize("quick", [pytest.param(False, marks=pytest.mark.slow), True])
def test_bench_truth_prints_a_table_and_writes_figures_and_pictures(
    quick: bool,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    if quick:  # without the large networks, whose work takes seconds to count
        lines = rows.read_text().splitlines()
        rows.write_text("\n".join(line for line in lines if "224x224" not in line))
    out = tmp_path / "truth.json"
    assert main(["bench", "truth", "--rows", str(rows), "--json", str(out), *["--quick"] * quick]) == 0
    said = capsys.readouterr().out
    assert "Steps that profiles were fitted on" in said
    assert "Steps that no profile was fitted on" in said
    assert max(map(len, said.splitlines())) <= 80
    told = json.loads(out.read_text())
    assert "another phone of pixel-4's SoC" in said
    assert len(told["steps"]) == (8 if quick else 28)
    assert {1.6, 0.5, 0.0131} < {step["measured_s"] for step in told["steps"]}
    assert all((step["unseen_s"] is None) is (quick or not step["fitted"]) for step in told["steps"])
    picture = out.with_suffix(".svg").read_text()
    assert picture.lstrip().startswith("<?xml")
    assert ("pixel-4, mnn, fitted" in picture) is quick
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_steps_of_the_data_are_within_the_limits() -> None:
    if find_spec("timm") is None:
        pytest.skip("needs edgefl[timm]")
    limits = truth.run(files=sorted((bundled_folder() / "measured").glob("*.csv")))["limits"]
    assert [bar for bar in limits if bar["met"] is False] == []
    assert sum(bar["met"] is True for bar in limits) >= 17


def test_an_error_names_missing_timm_or_the_option_for_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truth, "bundled_folder", lambda: tmp_path)
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    truth.timm_module.cache_clear()
    with pytest.raises(ConfigError, match="timm is not installed"):
        truth.run()
    monkeypatch.setattr(truth, "timm_module", lambda: None)
    with pytest.raises(ConfigError, match="--rows FILE"):
        truth.run()
    rows = tmp_path / "rows.csv"  # like the JSON of edgefl measure
    columns = "device,profile,runtime,layer,inputs,outputs,batch,steps,measured_s,source"
    rows.write_text(f"{columns}\nMine,,torch,softmax output,8,8,4,1,0.5,mine\n")
    with pytest.raises(ConfigError, match=r"rows\.csv: each step must name a device profile"):
        truth.run(files=[rows])
