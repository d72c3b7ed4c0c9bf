"""Tests of a mark's options, and of a test's device: its measurements, baselines and verdicts."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from regression_samples import TRIAL, counted, entry, measured, noisy

from edgefl.devices.profiles import bundled_folder
from edgefl.errors import ConfigError, Invalid, NotMet
from edgefl.regression import baseline
from edgefl.regression import device as marked
from edgefl.regression.counts import entry_of
from edgefl.regression.device import DeviceTest, EdgeDevice, MarkOptions, mark_options
from edgefl.regression.measure import judged
from edgefl.regression.measurement import Measurement, MeasurementPlan
from edgefl.regression.process import FunctionLocation, ShotSizes, Surroundings
from edgefl.regression.session import Session, SessionOptions
from edgefl.regression.table import rows
from edgefl.regression.verdict import NeedMore, Verdict

TEST = DeviceTest("test_a", Path("test_a.py"), "test_a", 1)
replace = msgspec.structs.replace


def test_each_profile_has_the_marks_options() -> None:
    found = mark_options(
        ["pixel-3a", "pi-4"], {"repetitions": 20, "network": "3g", "seconds": 2, "peak_mib": 100.0}
    )
    assert [one.profile for one in found] == ["pixel-3a", "pi-4"]
    assert {(one.repetitions, one.network) for one in found} == {(20, "3g")}
    assert found[0].budgets == {"seconds": 2.0, "peak_mib": 100.0}


def test_a_profile_is_found_after_the_working_folder_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name in (("devices", "pixel-3a"), ("networks", "3g")):
        text = (bundled_folder() / kind / f"{name}.toml").read_text()
        (tmp_path / f"{name}.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    (found,) = mark_options(["./pixel-3a.toml"], {"network": "3g.toml"})
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    made = edge_device(found)
    assert (made.name, made.network.id if made.network else "") == ("pixel-3a", "3g")


@pytest.mark.parametrize(
    ("profiles", "keys", "message"),
    [
        ([], {}, "edge_device: no profile is named; name one or more"),
        (["pixel3a"], {}, "device profile 'pixel3a' not found; did you mean 'pixel-3a'? available: "),
        ([3], {}, "edge_device: a profile must be named by a string (got 3)"),
        (["pi-4", "pi-4"], {}, "edge_device: a profile is named twice: pi-4, pi-4"),
        (["pi-4"], {"second": 1}, "unknown key 'edge_device.second'; did you mean 'edge_device.seconds'? "),
        (["pi-4"], {"seconds": "2"}, "edge_device.seconds: must be a finite number of at least 0, got '2'"),
        (["pi-4"], {"joules": -1}, "edge_device.joules: must be a finite number of at least 0, got -1"),
        (["pi-4"], {"time_scale": True}, "edge_device.time_scale: must be a finite number"),
        (
            ["pi-4"],
            {"repetitions": 8},
            "edge_device.repetitions: must be a whole number of at least 9, got 8",
        ),
        (
            ["pi-4"],
            {"repetitions": 9.5},
            "edge_device.repetitions: must be a whole number of at least 9, got 9.5",
        ),
        (["pi-4"], {"network": "5gg"}, "network profile '5gg' not found;"),
    ],
)
def test_an_invalid_mark_is_one_line(profiles: list[Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mark_options(profiles, keys)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def edge_device(mark: MarkOptions | None = None, test: DeviceTest = TEST, **options: object) -> EdgeDevice:
    return EdgeDevice(mark or MarkOptions("pixel-3a"), test, Session(SessionOptions(**options)))  # type: ignore[arg-type]


def test_a_device_without_a_processor_is_refused() -> None:
    with pytest.raises(ConfigError, match="has a delay model instead of a processor"):
        edge_device(MarkOptions("paper-half-normal"))


def test_a_device_without_an_interval_of_its_times_has_no_slow_end() -> None:
    edge_device(MarkOptions("tier-p50"))
    with pytest.raises(ConfigError, match="'tier-p50' lists no cores, so the slow end of its times is not k"):
        edge_device(MarkOptions("tier-p50", end="slow"))


def test_a_device_has_its_own_network_unless_another_is_given() -> None:
    for named, network in ((None, "lte"), ("3g", "3g")):
        device = edge_device(MarkOptions("pixel-3a", network=named))
        assert device.name == "pixel-3a"
        assert device.network.id == network


def test_only_json_values_are_arguments() -> None:
    for value in (1, 1.5, "a", True, None, [1, [2]], {"a": {"b": 1}}):
        assert marked._plain("batch", value) is value
    why = r"batch must be a JSON value, .* create anything else in setup="
    for other in ((1, 2), {1: 2}, float("nan"), b"x", object(), {"a": {1, 2}}, 2**64, "\udcff"):
        with pytest.raises(ConfigError, match=why):
            marked._plain("batch", other)


def test_a_process_imports_only_one_module_of_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may create and import a module, and run its function. Another may reuse the module's name."""

    def started(_: Surroundings) -> SimpleNamespace:
        return SimpleNamespace(popen=SimpleNamespace(poll=lambda: None), close=lambda: None)

    monkeypatch.setattr("edgefl.regression.session.MeasuringProcess", started)
    file, here = Path("test_a.py"), Surroundings({}, "/", ["/a"])
    one, other, helper = (
        FunctionLocation(name, f"{folder}/{name}.py", "step")
        for folder, name in (("/a", "made"), ("/b", "made"), ("/a", "helper"))
    )
    session = Session(SessionOptions())
    first = session.process(file, here, one)
    assert session.process(file, here, helper) is first
    assert session.process(file, here, one) is first
    second = session.process(file, here, other)
    assert second is not first
    assert session.process(file, here, other) is second
    assert session.process(file, here._replace(path=["/b"]), other) is not second


class Measurements:
    """Returns one of these measurements per call, in order, and records the plan of each call."""

    def __init__(self, *left: Measurement) -> None:
        self.left = list(left)
        self.plans: list[MeasurementPlan] = []

    def __call__(self, _: object, plan: MeasurementPlan, *how: object) -> Measurement:
        self.plans.append(plan)
        return self.left.pop(0)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Measurements:
    """Make all counts equal their baselines. The test adds the measurements and the baselines of times."""
    measurements = Measurements()
    counts = [entry_of("test_a", name, counted(), baseline.versions()) for name in ("dumps", "dumps 2")]
    monkeypatch.setattr(baseline, "load_counted", lambda _: {one.key: one for one in counts})
    monkeypatch.setattr("edgefl.regression.device.measure", measurements)
    monkeypatch.setattr("edgefl.regression.device.count", lambda *_: counted())
    monkeypatch.setattr(Session, "process", lambda *_: None)
    return measurements


def test_apparent_growth_is_measured_again_with_the_same_plan(
    again: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = entry(noisy(seed=1), "test_a", "dumps")
    monkeypatch.setattr(baseline, "load", lambda _: {before.key: before})
    again.left = [measured(noisy(1.08, seed=2)), measured(noisy(1.08, seed=3))]
    device = edge_device(compare=True, timed=True)
    result = device.run(json.dumps, 1)
    with pytest.raises(NotMet, match=r"^REGRESSION: dumps on pixel-3a: CPU time \+"):
        device.judge()
    assert again.plans[1] == result.measured.plan
    assert (result.outcome, len(device.session.compared["test_a dumps"]["test_a"])) == ("FAIL", 3)


def test_a_test_that_is_run_again_has_the_same_verdict(
    again: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The correction for multiple testing leaves out the comparisons of the test's earlier attempt."""
    before = entry(noisy(seed=1), "test_a", "dumps")
    monkeypatch.setattr(baseline, "load", lambda _: {before.key: before})
    first = edge_device(compare=True, timed=True)
    for device in (first, EdgeDevice(MarkOptions("pixel-3a"), TEST, first.session)):
        # p = 0.009: significant among the 3 comparisons of one attempt, but not among 6
        again.left = [measured(noisy(1.06, 0.04, seed=158))] * 2
        device.run(json.dumps, 1)
        with pytest.raises(NotMet, match=r"^REGRESSION: dumps on pixel-3a: CPU time \+"):
            device.judge()


def test_budgets_of_mark_and_test_hold_at_the_slow_end_of_real_devices(again: Measurements) -> None:
    seconds = measured(noisy()).seconds[0]
    for end, why in (("middle", ""), ("slow", "slow end of the model's 90% interval: at most")):
        again.left = [measured(noisy())] * 2
        device = edge_device(MarkOptions("pixel-3a", end=end, seconds=1.15 * seconds))  # type: ignore[arg-type]
        result = device.run(json.dumps, 1)
        for judge in (device.judge, partial(result.assert_budget, seconds=1.15 * seconds)):
            with contextlib.nullcontext() if not why else pytest.raises(NotMet, match=why):
                judge()


def test_the_provisional_verdict_stands_if_no_more_can_be_measured() -> None:
    def none_left() -> Measurement:
        raise Invalid("the limit")

    first, fails = measured(), Verdict("FAIL", "counted FLOP")
    assert judged(lambda _: NeedMore(otherwise=fails), first, none_left) is fails
    with pytest.raises(Invalid, match="the limit"):
        judged(lambda _: NeedMore(), first, none_left)
    assert judged(lambda made: fails if len(made) == 3 else NeedMore(2), first, measured) is fails


def test_only_tests_that_pass_are_saved(again: Measurements) -> None:
    device = edge_device()
    device.run(json.dumps, 1)
    device.run(json.dumps, 2)
    for failed, invalid, saved in (("", "", 2), ("an error", "", 0), ("", "too few repetitions", 0)):
        made = rows(device, "test_a", failed, invalid, "test_a.json")
        assert sum(row.counted is not None for row in made) == saved


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"profile_sha256": "0" * 16}, "the profile of pixel-3a or its network has changed since"),
        ({"reference": {"version": 0}}, "stale calibration: .* version 0 of .* the current version is 2"),
        ({"cpu_s": (1.0,) * 8}, "the baseline has 8 repetitions, but 9 are needed"),
    ],
)
@pytest.mark.parametrize("budgets", [{}, {"seconds": 10.0}])
def test_an_unfit_baseline_is_found_before_measuring_but_after_budgets(
    change: dict[str, Any], why: str, budgets: dict[str, float], again: Measurements, monkeypatch: Any
) -> None:
    before = entry(test="test_a", function="dumps")
    if "reference" in change:
        change = {"reference": replace(before.reference, **change["reference"])}
    stored = replace(before, **change)
    monkeypatch.setattr(baseline, "load", lambda _: {stored.key: stored})
    again.left = [measured(noisy())]
    device = edge_device(MarkOptions("pixel-3a", **budgets), compare=True, timed=True)
    if budgets:  # which need no baseline
        device.run(json.dumps, 1)
    find = device.judge if budgets else partial(device.run, json.dumps, 1)
    message = f"^dumps on pixel-3a: {why}.*; save it again with --edgefl-save --edgefl-timed$"
    with pytest.raises(Invalid, match=message):
        find()
    assert len(again.plans) == (1 if budgets else 0)


def test_each_run_of_a_function_has_its_own_baseline(again: Measurements, tmp_path: Path) -> None:
    test = TEST._replace(file=tmp_path / "test_a.py")
    shots = [ShotSizes(reference="train-small", units=units, calls=1) for units in (5, 9)]
    entries = [
        entry(test="test_a", function=name, trial=replace(TRIAL, shots=one))
        for name, one in zip(("dumps", "dumps 2"), shots, strict=True)
    ]
    baseline.save(baseline.path_of(test.file), entries)
    again.left = [measured(noisy())] * 2
    device = edge_device(test=test, compare=True, timed=True)
    for value in (1, 2):
        device.run(json.dumps, value)
    assert [plan.request.shots for plan in again.plans] == shots
