"""Tests of the time to a target: choice of target, smoothed passages, ratios over seeds, groups of runs."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shell import Shell

from edgefl import toml
from edgefl.cli import main
from edgefl.errors import ConfigError
from edgefl.results import grouping
from edgefl.results.compare import compare
from edgefl.results.figure import _by_label, look, plot
from edgefl.results.grouping import goal_of, grouped, load
from edgefl.results.groups import slow_group
from edgefl.results.record import Record
from edgefl.results.statistics import summary_curve
from edgefl.results.store import Store
from edgefl.results.sweep import Sweep, compare_folders
from edgefl.results.targets import RaceTarget, race_in_words
from tests.reports import Page, client, evaluation, printed, read_json

Learns = Callable[[float], float]


def run_of(
    folder: Path,
    strategy: str,
    seed: int,
    accuracy: Learns,
    stop: str = "versions = 9",
    end: int = 40,
    **meta: Any,
) -> Path:
    """Write a run with an evaluation each second, 10 trips apart; its accuracy is a function of the time."""
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(f"[evaluation]\nevery_s = 1.0\n[stop]\n{stop}\n")
    with Store(folder) as store:
        store.clients([client(0, "fast", 0.1, 0, 1), client(1, "slow", 1.0, 1)])
        for k in range(end + 1):
            store.evaluation(
                evaluation(k, float(k), accuracy=accuracy(k), trips=10 * k, loss=1 - accuracy(k))
            )
        known = {"status": "done", "strategy": strategy, "clock": "virtual", "data": "digits", "seed": seed}
        store.set_meta(**{**known, "emulated_s": float(end), **meta})
    return folder


def linear(pace: float, top: float = 0.9) -> Learns:
    """Return an accuracy that grows linearly with time: 50% after ``pace`` seconds, and at most ``top``."""
    return lambda s: min(top, 0.5 * s / pace)


def race(folder: Path, paces: Mapping[str, Sequence[float]], **options: Any) -> list[Path]:
    """Write a run for each strategy and each of its paces. A strategy's seeds are 1, 2, …"""
    return [
        run_of(folder / f"{name}-{seed}", name, seed, linear(pace), **options)
        for name, of_seeds in paces.items()
        for seed, pace in enumerate(of_seeds, 1)
    ]


def two(tmp_path: Path, factors: Sequence[float] = (0.95, 1.0, 1.05), **options: Any) -> list[Path]:
    """Write runs of fedbuff, and of fedavg at half the speed. Each factor scales the pace of one seed."""
    paces = {name: [pace * one for one in factors] for name, pace in (("fedbuff", 10.0), ("fedavg", 20.0))}
    return race(tmp_path, paces, **options)


def text_of(
    folders: Sequence[Path], target: float | None = None, out: Path | None = None, width: int = 400
) -> str:
    """Return the comparison as printed on a terminal, with all white space replaced by single spaces."""
    return " ".join(printed(compare(folders, out, target), width=width).split())


def page_of(out: Path) -> str:
    return " ".join(Page(out / "report.html").text.split())


def rows_of(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_json(out / "summary.json")["comparison"]["rows"]
    return rows


def groups(folders: Sequence[Path], target: RaceTarget | None = None) -> list[grouping.RunGroup]:
    return grouping.rows_of(grouped(load(folders)), target)


def labels(folders: Sequence[Path]) -> list[str]:
    return [*grouped(load(folders))]


def test_runs_are_seeds_of_one_row_only_if_all_settings_except_the_seed_are_equal(tmp_path: Path) -> None:
    """Settings that change no result may differ: the run's name, checkpoints, workers, transport."""

    def run(number: int, more: str) -> Path:
        folder = run_of(tmp_path / str(number), "fedbuff", number, linear(25.0))
        (folder / "experiment.toml").write_text(f"seed = {number}\n{more}")
        return folder

    plain = "[training]\nlr = 0.05\nbatch_size = 32\n"
    one = run(1, plain)
    same = run(2, f"name = 'b'\n{plain}[checkpoint]\nevery_s = 9.0\n[clock]\nworkers = 2\n"
                  "[server]\ntransport = 'wire'\n")  # fmt: skip
    other = run(3, "[training]\nlr = 0.5\nbatch_size = 4\n")
    secure = run(4, f"{plain}[server.secure]\nkind = 'masks'\n")
    churn = run(5, f"{plain}[fleet.churn]\ndie_per_trip = 0.1\n")
    assert labels([one, same]) == ["fedbuff ×2"]
    assert labels([one, same, other]) == [
        "fedbuff (lr=0.05, batch_size=32) ×2",
        "fedbuff (lr=0.5, batch_size=4)",
    ]
    assert labels([one, same, secure]) == ["fedbuff ×2", "fedbuff (kind=masks)"]
    assert labels([one, secure, churn]) == ["fedbuff", "fedbuff (kind=masks)", "fedbuff (die_per_trip=0.1)"]
    assert list(_by_label([one, same, other])) == labels([one, same, other])
    long = run(6, f"{plain}[model]\nname = '{'m' * 60}'\n")
    assert labels([one, same, long]) == ["fedbuff 1 ×2", "fedbuff 6"]


def test_a_strategys_field_at_its_default_equals_a_field_that_is_not_given(tmp_path: Path) -> None:
    folders = []
    for seed, table in enumerate(("name = 'fedbuff'\nbuffer_size = 10", "name = 'fedbuff'")):
        fields = {"buffer_size": 10, "concurrency": None}
        folders.append(run_of(tmp_path / str(seed), "fedbuff", seed, linear(25.0), strategy_fields=fields))
        (folders[-1] / "experiment.toml").write_text(f"[strategy]\n{table}\n")
    assert labels(folders) == ["fedbuff ×2"]


def test_recorded_settings_count_whatever_the_experiment_file_contains(tmp_path: Path) -> None:
    folders = [
        run_of(tmp_path / str(seed), "fedbuff", seed, linear(25.0), toml=f"[training]\nlr = {rate}\n")
        for seed, rate in enumerate((0.1, 0.1, 0.5))
    ]
    for folder in folders:
        (folder / "experiment.toml").unlink()
    assert labels(folders) == ["fedbuff (lr=0.1) ×2", "fedbuff (lr=0.5)"]
    (folders[2] / "experiment.toml").write_text("[training]\nlr = 0.1\n")
    assert labels(folders) == ["fedbuff (lr=0.1) ×2", "fedbuff (lr=0.5)"]


def test_a_run_with_the_label_of_a_sweeps_row_has_a_row_of_its_own(tmp_path: Path) -> None:
    """A sweep's folder may be named like a setting, so that its row has the same label as a run's row."""
    swept = [run_of(tmp_path / f"swept-{seed}", "fedbuff", seed, linear(9.0)) for seed in (1, 2)]
    runs = [
        run_of(tmp_path / str(rate), "fedbuff", 1, linear(20.0), toml=f"[training]\nlr = {rate}\n")
        for rate in (0.1, 0.2)
    ]
    compare(runs, tmp_path / "out", labelled={"fedbuff (lr=0.1)": swept})
    assert [(row["label"], len(row["seeds"])) for row in rows_of(tmp_path / "out")] == [
        ("fedbuff (lr=0.1)", 2),
        (f"fedbuff (lr=0.1) ({runs[0]})", 1),
        ("fedbuff (lr=0.2)", 1),
    ]


def test_labels_contain_the_name_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = f"[model]\nname = '{'m' * 60}'\n"
    runs = [
        run_of(tmp_path / name, "fedbuff", 1, linear(25.0), toml=text)
        for name, text in (("a", long), ("b", ""))
    ]
    monkeypatch.chdir(runs[0])
    assert labels([Path(), runs[1]]) == ["fedbuff a", "fedbuff b"]
    swept = tmp_path / "swept"
    compare(race(swept / "runs", {"fedavg": (20.0,)}), swept)
    one = {"label": "fedavg", "changes": {}, "seed": 1, "folder": "runs/fedavg-1"}
    found = {**read_json(swept / "summary.json"), "sweep": {"grid": {}, "runs": [one]}}
    (swept / "summary.json").write_text(json.dumps(found))
    monkeypatch.chdir(swept)
    assert "fedavg (swept)" in printed(compare_folders([Path(), runs[0]]), width=400)


@pytest.mark.parametrize("partition", ["dirichlet", "flwr:DirichletPartitioner"])
def test_the_slow_phones_do_not_depend_on_the_seed(tmp_path: Path, partition: str) -> None:
    """The seed decides which profiles hold a class that no other profile holds."""
    held = {1: ((0, 1), (1,), (2,)), 2: ((0,), (0, 2), (0, 1))}
    folders = []
    for seed, labels in held.items():
        folders.append(run_of(tmp_path / str(seed), "fedbuff", seed, linear(20.0), partition=partition))
        with Store(folders[-1]) as store:
            speeds = zip(("fast", "slow", "slowest"), (0.1, 1.0, 9.0), labels, strict=True)
            store.clients([client(k, name, step_s, *own) for k, (name, step_s, own) in enumerate(speeds)])
    runs = load(folders)
    assert {slow_group(run.record).profiles for run in runs} == {("slowest",)}
    assert {run.slow.profiles for run in runs} == {("slowest",)}
    assert runs[0].slow.labels == ()  # class 2 is on another phone in the other seed


def test_the_slow_phones_do_not_depend_on_the_order_of_runs_with_different_fleets(tmp_path: Path) -> None:
    one, other = (run_of(tmp_path / name, name, 1, linear(20.0)) for name in ("fedbuff", "fedavg"))
    with Store(other) as store:
        store.clients([client(0, "fast", 0.1, 0, 1), client(1, "slowest", 9.0, 2)])
    for folders in ([one, other], [other, one]):
        assert {run.slow.profiles for run in load(folders)} == {("slowest",)}
        assert "the classes held only by slowest" in text_of(folders, 0.5, tmp_path / "out")
        applied = page_of(tmp_path / "out").partition("Applied weight by profile")[2]
        assert re.search("slowest .*slow .*fast ", applied)


def test_a_comparison_reads_each_experiment_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, plain = Counter[Path](), toml.read

    def counted(path: Path) -> dict[str, Any]:
        read[path] += 1
        return plain(path)

    folders = two(tmp_path)
    monkeypatch.setattr(toml, "read", counted)
    compare(folders, tmp_path / "out")
    assert read == dict.fromkeys([folder / "experiment.toml" for folder in folders], 1)


@pytest.mark.parametrize("status", ["interrupted", "running"])
def test_a_run_that_has_not_ended_is_not_ranked_and_the_comparison_tells_how_to_resume_it(
    status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = race(tmp_path, {"fedbuff": [25.0], "fedavg": [25.0]}, stop="accuracy = 0.5")
    other = run_of(tmp_path / status, "fedasync", 1, linear(5.0), status=status)
    assert goal_of(load([other])) is None
    assert main(["compare", *map(str, [other, *done]), "--out", str(tmp_path / "out")]) == 0
    text = "".join(capsys.readouterr().out.split())  # a long path is split between lines
    told = f"{other} has not ended, so its row is not ranked; edgefl resume {other} continues it."
    assert told.replace(" ", "") in text
    assert "fedasynchasthehighest" not in text
    assert "fedasyncreached" not in text
    found = read_json(tmp_path / "out" / "summary.json")
    assert [run["status"] for run in found["runs"]] == [status, "done", "done"]
    assert not any(row["no_progress"] for row in found["comparison"]["rows"])
    assert [row.verdict == "unfinished" for row in groups([other, *done])] == [True, False, False]
    assert f"Unfinished: {other} has not ended" in page_of(tmp_path / "out")


def test_users_modules_that_differ_between_runs_are_named(tmp_path: Path) -> None:
    codes = {"mine": "a1", "helper": "b1"}, {"mine": "a1", "helper": "b2"}, {"other": "c1"}
    runs = [
        run_of(tmp_path / str(seed), "fedbuff", seed, linear(25.0), code=code)
        for seed, code in enumerate(codes)
    ]
    said = "Some of your own modules differ between runs that use them: helper."
    assert said in text_of(runs, out=tmp_path / "out")
    assert said in page_of(tmp_path / "out")
    assert "your own modules" not in text_of([runs[0], runs[2]])


def test_users_modules_that_changed_before_a_resume_are_named_with_the_part_that_ran_before(
    tmp_path: Path,
) -> None:
    earlier = [{"version": 3, "trips": 30, "code": {"mine": "a1", "helper": "b1"}}]
    run = partial(run_of, strategy="fedbuff", accuracy=linear(25.0))
    changed = run(tmp_path / "1", seed=1, code={"mine": "a2"}, earlier_code=earlier)
    same = run(tmp_path / "2", seed=2, code={"mine": "a2"})
    other = run(tmp_path / "3", seed=3, code={"other": "c1"})
    said = f"{changed} went on with changed code after version 3 and 30 trips: mine."
    for page in (text_of([changed, same], out=tmp_path / "out"), page_of(tmp_path / "out")):
        assert "Some of your own modules differ between runs that use them: mine." in page
        assert said in page
    text = text_of([changed, other])
    assert said in text
    assert "differ between runs" not in text  # only one run uses the module


def test_the_times_to_a_given_target_are_compared_seed_by_seed_in_all_outputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = two(tmp_path)
    assert main(["compare", *map(str, folders), "--target", "0.5", "--out", str(tmp_path / "out")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Time to 50.0% accuracy" in text
    assert "the mean of 5 evaluations in a row is above the target (given)" in text
    assert "2.00× (2.00 to 2.00)" in text
    found = read_json(tmp_path / "out" / "summary.json")["comparison"]
    known = {"measure": "accuracy", "at_most": False, "window": 5}
    assert found["target"] == {"value": 0.5, "why": "given", **known}
    fast, slow = (row["to_target"] for row in found["rows"])
    assert (fast["reached"], fast["runs"]) == (3, 3)
    assert fast["emulated_s_to_target"] == pytest.approx([9.5, 10.0, 10.5])
    assert slow["trips_to_target"] == pytest.approx([190, 200, 210])
    assert slow["over_first"]["emulated_s_to_target"]["mean"] == pytest.approx(2.0)
    assert found["rows"][0]["figures"]["emulated_s_to_target"]["half_95"] == pytest.approx(1.24, abs=0.01)
    page = page_of(tmp_path / "out")
    assert "fedbuff ×3 reached 50.0% accuracy first: in 10.0 ±1.2 emulated seconds" in page
    assert "fedavg ×3 took 2.00× (2.00 to 2.00, 95% interval) as long" in page
    text = text_of([*folders[3:], *folders[:3]], 0.5)  # with the slow strategy in the first row
    assert "0.50× (0.50 to 0.50)" in text
    assert "emulated seconds, 0.50× (0.50 to 0.50, 95% interval) the time of fedavg ×3." in text


@pytest.mark.parametrize(
    ("stop", "says", "window"),
    [
        ("accuracy = 0.3", "30.0% accuracy", 1),
        ("accuracy = 0.3\naccuracy_over = 9", "30.0% accuracy", 5),
        ("metric = { name = 'loss', at_most = 0.6 }", "loss ≤ 0.6", 1),
        ("metric = { name = 'loss', at_least = 0.3 }", "loss ≥ 0.3", 1),
        ("versions = 3", "90.0% accuracy", 5),
    ],
)
def test_the_default_target_is_that_of_stop_or_derived_from_the_runs(
    tmp_path: Path, stop: str, says: str, window: int
) -> None:
    folders = two(tmp_path, (1.0,), stop=stop)
    target = goal_of(load(folders))
    assert (str(target), target.window) == (says, window)
    assert ("no target was given" in target.why) == (stop == "versions = 3")
    assert [row.to_target.reached for row in groups(folders, target) if row.to_target] == [1, 1]


def test_the_goal_of_stop_is_the_target_only_if_all_runs_share_it_and_an_equal_target_has_its_window(
    tmp_path: Path,
) -> None:
    runs = load(two(tmp_path, (1.0,), stop="accuracy = 0.3\naccuracy_over = 2"))
    assert [goal_of(runs, given).window for given in (None, 0.3, 0.4)] == [2, 2, 5]
    other = load([run_of(tmp_path / "other", "fedasync", 1, linear(20.0), "accuracy = 0.4")])
    target = goal_of([*runs, *other])
    assert (str(target), target.window) == ("90.0% accuracy", 5)


def test_a_loss_reaches_its_target_from_above(tmp_path: Path) -> None:
    with Record(run_of(tmp_path / "run", "fedbuff", 1, lambda s: s / 40)) as record:
        falls = RaceTarget(0.5, "", "loss", at_most=True, window=1)
        assert falls.reached(record, "at_s") == pytest.approx(20.0)
        assert math.isnan(RaceTarget(-0.1, "", "loss", at_most=True).reached(record, "at_s"))


@pytest.mark.parametrize("value", ["0", "1.1", "nan", "-0.5"])
def test_a_target_that_is_not_a_share_is_refused(tmp_path: Path, value: str, edgefl: Shell) -> None:
    run = run_of(tmp_path / "run", "fedbuff", 1, lambda s: 0.5)
    error = edgefl.refuses(2, "compare", str(run), f"--target={value}")
    assert "expected an accuracy above 0 and at most 1" in error
    with pytest.raises(ConfigError, match="above 0"):
        compare([run], target=float(value))


def test_a_target_that_is_a_numpy_number_can_be_written_as_json(tmp_path: Path) -> None:
    given: Any = np.float32(0.5)
    target: Any = goal_of(load([run_of(tmp_path / "run", "fedbuff", 1, linear(20.0))]), given)
    assert json.loads(json.dumps(target._asdict()))["value"] == 0.5


def test_a_target_of_runs_without_accuracy_is_refused(tmp_path: Path, edgefl: Shell) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        run_of(folder, "fedbuff", seed, lambda s: math.nan)
        with Store(folder) as store:
            store.evaluation(evaluation(41, 41.0, accuracy=math.nan, loss=0.5, metrics={"mae": 0.3}))
    line = edgefl.refuses(2, "compare", *map(str, folders), "--target", "0.9")
    assert line == (
        "target: accuracy is not evaluated here, only loss, mae; leave the target out and set "
        'stop.metric = { name = "loss", at_most = … }'
    )
    assert goal_of(load(folders)) is None
    scored = run_of(tmp_path / "c", "fedbuff", 3, lambda s: 0.5)
    assert goal_of(load([*folders, scored]), 0.9) == RaceTarget(0.9, "given")


def test_equal_times_and_equal_accuracies_are_reported_as_ties(tmp_path: Path) -> None:
    folders = race(tmp_path, {"fedavg": [20.0] * 2, "fedbuff": [10.0] * 2, "fedasync": [10.0] * 2})
    text = text_of(folders, 0.5)
    assert (
        "fedbuff ×2 and fedasync ×2 reached 50.0% accuracy at the same time: in 10.0 ±0.0 emulated seconds. "
        "At the end fedavg ×2 and fedbuff ×2 and fedasync ×2 have the highest accuracy: 90.0%."
    ) in text
    assert "first:" not in text


def test_runs_that_stop_at_an_accuracy_are_ranked_by_time_and_not_by_accuracy(tmp_path: Path) -> None:
    stop = "accuracy = 0.5\naccuracy_over = 5"
    folders = [
        run_of(tmp_path / f"{name}-{seed}", name, seed, linear(pace, 0.52), stop,
               int(pace * 1.04 + 5), stop_reason="accuracy")
        for name, pace in (("fedbuff", 20.0), ("fedavg", 10.0))
        for seed in (1, 2)
    ]  # fmt: skip
    compare(folders, tmp_path / "out")
    target = read_json(tmp_path / "out" / "summary.json")["comparison"]["target"]
    assert target["why"] == "stop.accuracy of the runs"
    page = page_of(tmp_path / "out")
    assert "fedavg ×2 reached 50.0% accuracy first" in page
    assert "has the highest accuracy" not in page
    unfinished = run_of(tmp_path / "unfinished", "fedasync", 1, linear(30.0), stop, status="running")
    assert "the highest accuracy:" not in text_of([*folders, unfinished])


def test_runs_that_did_not_reach_the_target_are_counted_and_bound_the_ratio(tmp_path: Path) -> None:
    folders = two(tmp_path, (0.9, 1.0, 1.3), end=36)
    slow = groups(folders, goal_of(load(folders), 0.8))[1].to_target
    assert slow.passed == "2 of 3"
    assert slow.costs["at_s"][:2] == pytest.approx((28.8, 32.0))
    assert math.isnan(slow.costs["at_s"][2])
    assert slow.ratio_text("at_s").startswith("> 1.8")
    text = text_of(folders, 0.8, width=60)
    assert "2 of 3" in text
    assert "fedavg ×3 took at least 1.8" in text
    assert "emulated seconds, at most 0.5" in text_of([*folders[3:], *folders[:3]], 0.8)


def test_a_ratio_to_one_seed_that_did_not_reach_the_target_is_an_upper_bound(tmp_path: Path) -> None:
    fast, slow = two(tmp_path, (1.3,), end=36)
    assert "emulated seconds, at most 0." in text_of([slow, fast], 0.8, tmp_path / "out")
    ratio = rows_of(tmp_path / "out")[1]["to_target"]["over_first"]["emulated_s_to_target"]
    assert (ratio["at_least"], ratio["at_most"]) == (False, True)
    assert re.search(r"< 0\.\d\d× \(one seed\)", page_of(tmp_path / "out"))


def test_a_run_that_ended_when_the_other_reached_the_target_did_not_take_equally_long(tmp_path: Path) -> None:
    fast = run_of(tmp_path / "fast", "fedbuff", 1, linear(10.0))
    slow = run_of(tmp_path / "slow", "fedavg", 1, linear(20.0), end=18)
    says = "fedavg took at least 1.00× as long. That is one seed: another may reverse the order."
    assert says in text_of([fast, slow], 0.8)


def test_one_seed_has_no_interval_and_the_report_says_so(tmp_path: Path) -> None:
    compare(two(tmp_path, (1.0,)), tmp_path / "out", 0.5)
    says = "fedavg took 2.00× as long. That is one seed: another may reverse the order."
    assert says in page_of(tmp_path / "out")


def test_a_lead_without_a_common_seed_or_on_one_seed_is_marked_as_uncertain(tmp_path: Path) -> None:
    one, same, other = (
        run_of(tmp_path / f"{name} {seed}", name, seed, linear(10.0, top))
        for name, seed, top in (("fedbuff", 1, 0.9), ("fedavg", 1, 0.8), ("fedavg", 2, 0.8))
    )
    for right, folder in zip((6, 4, 4), (one, same, other), strict=True):
        with Store(folder) as store:
            store.clients([client(0, "fast", 0.1, 0), client(1, "slow", 1.0, 1)])
            counts = {"correct": (9, right), "total": (10, 10)}
            store.evaluation(evaluation(41, 41.0, accuracy=right / 8, trips=410, loss=0.5, **counts))
    for folders, why in (
        ([one, other], "(they have no seed in common: other seeds may reverse the order)"),
        ([one, same], "(one seed: another may reverse the order)"),
    ):
        text = text_of(folders, 0.5)
        assert text.count(why) == 2
        assert f"fedbuff has the highest accuracy: 60.0% {why}" in text


def test_a_curve_ends_with_its_last_seed_and_the_band_of_a_share_is_within_0_and_1() -> None:
    seeds = [np.array([[0.0, 4.0, end], [0.0, 0.9, 1.0]]) for end in (5.0, 6.0, 9.0)]
    seeds[0][1] = (0.0, 0.1, 0.3)
    x, mean, low, high = summary_curve(seeds, share=True)
    assert x[-1] == 9.0
    assert mean[-1] == pytest.approx((0.3 + 1.0 + 1.0) / 3)
    assert high.max() == 1.0
    assert low.min() == 0.0
    assert summary_curve(seeds)[3].max() > 1.0


@pytest.mark.parametrize("every", ["every_s = 1.0", "every_trips = 10"])
def test_runs_with_too_few_evaluations_for_the_smoothed_curve_are_advised_to_evaluate_more_often(
    tmp_path: Path, every: str
) -> None:
    folders = [
        run_of(tmp_path / name, name, 1, lambda s: min(0.9, 0.1 + 0.4 * s), end=4)
        for name in ("fedbuff", "fedavg")
    ]
    for folder in folders:
        (folder / "experiment.toml").write_text(f"[evaluation]\n{every}\n")
    rows = {name: [run.record] for name, run in zip(("fedbuff", "fedavg"), load(folders), strict=True)}
    assert race_in_words(rows, RaceTarget(0.85, "given")) == (
        "No run reached 85.0% accuracy in the mean of 5 evaluations in a row, only in single ones; a run has "
        f"at most 5 evaluations here, and a smaller evaluation.{every.partition(' ')[0]} gives more."
    )
    assert "a lower target, a longer run" in race_in_words(rows, RaceTarget(0.95, "given"))


def test_a_row_at_the_target_in_its_first_evaluations_may_have_reached_it_earlier(tmp_path: Path) -> None:
    """The first mean of five evaluations is dated at their middle, even if it is already above the target."""
    folders = race(tmp_path, {"fedbuff": [1.0], "fedavg": [1.1], "fedasync": [9.0]})
    (folders[0] / "experiment.toml").write_text("[evaluation]\nevery_versions = 1\n")
    with Store(folders[0]) as store:
        for k in range(41):  # half as many evaluations in the same time
            store.evaluation(evaluation(k, 2.0 * k, accuracy=linear(1.0)(2.0 * k), trips=20 * k))
    text = text_of(folders, 0.5)
    assert "fedavg reached 50.0% accuracy first: in 2.0 emulated seconds" in text
    assert (
        "The mean of the first 5 evaluations of fedbuff is already at the target, so fedbuff may have "
        "reached it earlier than shown; a smaller evaluation.every_versions would tell." in text
    )
    assert "already at the target" not in text_of(folders[1:], 0.5)  # fedavg is first in any case


def test_rows_of_different_seeds_are_ordered_by_the_seeds_that_both_have(tmp_path: Path) -> None:
    spec = {
        "fedbuff": {1: linear(2.0, 0.95), 2: linear(20.0, 0.7), 3: linear(20.0, 0.7)},
        "fedavg": {2: linear(16.0, 0.75), 3: linear(16.0, 0.75)},
    }
    folders = {
        name: [run_of(tmp_path / f"{name}-{seed}", name, seed, learns) for seed, learns in each.items()]
        for name, each in spec.items()
    }
    for order, ratio in (
        (("fedbuff", "fedavg"), "; fedavg ×2 took 0.80× (0.80 to 0.80, 95% interval) as long."),
        (("fedavg", "fedbuff"), ", 1.25× (1.25 to 1.25, 95% interval) the time of fedavg ×2."),
    ):
        text = text_of([folder for name in order for folder in folders[name]], 0.5)
        assert f"{ratio} So on the seeds that both have, fedavg ×2 is first." in text
        highest = "fedbuff ×3 has the highest accuracy: 78.3%; on the seeds that both have, "
        assert f"{highest}fedavg ×2 is 5.0 ±0.0 points above fedbuff ×3." in text


@pytest.mark.parametrize(
    ("pace", "ratio", "order"),
    [(16.0, "0.80×", "fedavg is first"), (19.99, "1.00×", "they took equally long")],
)
def test_rows_with_one_seed_in_common_are_ordered_by_that_seed(
    pace: float, ratio: str, order: str, tmp_path: Path
) -> None:
    folders = race(tmp_path, {"fedbuff": (2.0, 20.0)})
    text = text_of([*folders, run_of(tmp_path / "other", "fedavg", 2, linear(pace))], 0.5)
    assert f"fedavg took {ratio} as long. On the seed that both have, {order}. That is one seed" in text


def test_small_times_and_ratios_keep_their_digits(tmp_path: Path) -> None:
    folders = race(tmp_path, {"fedavg": (1000.0, 1100.0, 1050.0), "fedbuff": (5.0, 5.02, 5.01)}, end=1150)
    text = text_of(folders, 0.5)
    assert "0.0048× (0.0043 to 0.0053)" in text
    assert "5.010 ±0.025" in text
    assert "e-1" not in text  # equal values have an interval of 0, without a rounding error


def test_the_table_of_a_sweep_contains_the_target(tmp_path: Path) -> None:
    folders = two(tmp_path, (1.0, 1.1))
    compare(folders, tmp_path, 0.5)
    found = read_json(tmp_path / "summary.json")
    names = [(row["label"], seed) for row in found["comparison"]["rows"] for seed in row["seeds"]]
    runs = [
        {"label": label, "changes": {}, "seed": seed, "folder": folder.name}
        for (label, seed), folder in zip(names, folders, strict=True)
    ]
    for folder, one in zip(folders, found["runs"], strict=True):
        (folder / "summary.json").write_text(json.dumps(one))
    (tmp_path / "summary.json").write_text(json.dumps({**found, "sweep": {"grid": {}, "runs": runs}}))
    rows = list(csv.DictReader(StringIO(Sweep(tmp_path).table().csv())))
    assert [float(row["emulated_s_to_target"]) for row in rows] == pytest.approx([10, 11, 20, 22])
    assert {row["target"] for row in rows} == {"0.5"}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"band": "sd"}, "band: band 'sd' not found"),
        ({"over": "hours"}, "over: axis 'hours' not found"),
        ({"width_in": 0.0}, "width_in: must be a number of inches above 0 and at most 200, got 0.0"),
        ({"height_in": math.nan}, "height_in: must be a number of inches above 0 and at most 200, got nan"),
    ],
)
def test_a_figure_with_invalid_options_is_refused(tmp_path: Path, how: dict[str, Any], says: str) -> None:
    run = run_of(tmp_path / "run", "fedbuff", 1, lambda s: 0.5)
    with pytest.raises(ConfigError, match=says):
        plot([run], tmp_path / "curves.pdf", **how)


def test_a_figure_may_have_no_band(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "fedbuff", 1, lambda s: 0.5)
    assert plot([run], tmp_path / "curves.svg", band="none").stat().st_size


def test_the_first_49_curves_of_a_figure_differ_in_colour_or_line_style() -> None:
    looks = [look(place) for place in range(49)]
    assert len({*looks}) == 49
    assert len({colour for colour, _ in looks[:7]}) == len({dash for _, dash in looks[:7]}) == 7
