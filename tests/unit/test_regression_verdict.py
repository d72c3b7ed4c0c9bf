"""Budgets, baselines and what they say."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from regression_samples import TRIAL, measured, noisy, repetition

from edgefl.errors import ConfigError, Invalid, NotMet
from edgefl.regression import baseline, verdict
from edgefl.regression.device import (
    DeviceResult,
    DeviceTest,
    EdgeDevice,
    MarkOptions,
    Session,
    SessionOptions,
)
from edgefl.regression.measurement import Measurement, MeasurementPlan
from edgefl.regression.process import ShotSizes


def entry(repetitions: list[baseline.Measurement] | None = None, **options: object) -> baseline.BaselineEntry:
    return baseline.entry("test_step[pixel-3a]", "step", measured(repetitions or noisy(), **options))  # type: ignore[arg-type]


def test_a_budget_holds_the_upper_bound_and_not_only_the_median() -> None:
    one = measured(noisy(spread=0.1))
    middle = DeviceResult("step", one).seconds
    assert list(verdict.over_budget(one, {"seconds": 1.2 * middle})) == []
    (line,) = verdict.over_budget(one, {"seconds": 1.001 * middle})
    assert line.startswith("seconds 0.002")
    assert "(95% sure: at most" in line
    assert line.endswith("s are allowed")


def test_each_budget_is_of_its_own_figure() -> None:
    one = measured([repetition(peak_mib=30.0, sent_bytes=3 << 20, radio_s=1.0)] * 9, device="pixel-4")
    wide = {"seconds": 10.0, "peak_mib": 30.0, "sent_mib": 3.0, "joules": 100.0}
    assert list(verdict.over_budget(one, wide)) == []
    for name in wide:
        (line,) = verdict.over_budget(one, wide | {name: 1e-6})
        assert line.startswith(name)


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ({"second": 1.0}, "budget 'second' not found; did you mean 'seconds'? have: "),
        ({"seconds": -1.0}, "budget seconds must be a finite number of at least 0 (got -1.0)"),
        ({"seconds": float("nan")}, "budget seconds must be a finite number of at least 0 (got nan)"),
        ({"joules": 1.0}, "budget joules: device 'pi-4' has no [battery], so what it draws is not known"),
    ],
)
def test_a_budget_that_cannot_be_held_is_one_line(budget: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(verdict.over_budget(measured(device="pi-4"), budget))
    assert str(caught.value).startswith(says)


def test_a_result_fails_with_all_that_does_not_hold() -> None:
    result = DeviceResult("step", measured())
    result.assert_budget(seconds=1.0, peak_mib=10.0)
    assert result.outcome == "PASS"
    with pytest.raises(NotMet, match=r"step on pixel-3a: seconds .*; peak_mib 10 MiB") as caught:
        result.assert_budget(seconds=1e-6, peak_mib=1.0)
    assert isinstance(caught.value, AssertionError)
    assert result.outcome == "FAIL"
    assert DeviceResult("step", measured(device="pi-4")).joules is None


def test_the_pace_is_shown_or_fails() -> None:
    DeviceResult("step", measured()).assert_pace(0.01)
    with pytest.raises(NotMet, match=r"achieved over declared time is 1\.100"):
        DeviceResult("step", measured([repetition(achieved_s=0.011)] * 9)).assert_pace()
    with pytest.raises(ConfigError, match="the pace was not kept: time_scale is 0"):
        DeviceResult("step", measured(time_scale=0.0)).assert_pace()


def grown(before: baseline.BaselineEntry, now: baseline.BaselineEntry, devices: int = 1) -> list[str]:
    return [
        str(one) for one in Session(SessionOptions()).changed("group", devices, verdict.compare(before, now))
    ]


def test_nothing_changed_is_no_change() -> None:
    assert grown(entry(noisy(seed=1)), entry(noisy(seed=2))) == []


def test_a_tenth_more_cpu_time_is_found_and_named() -> None:
    (line,) = grown(entry(noisy(seed=1)), entry(noisy(1.1, seed=2)), devices=3)
    assert line.startswith("CPU time +")
    assert "on pixel-3a" in line
    assert "(more than 5.0% fails)" in line


def test_a_sleep_is_found_too() -> None:
    slept = [msgspec.structs.replace(one, blocked_s=0.001) for one in noisy(seed=2)]
    assert len(grown(entry(noisy(seed=1)), entry(slept))) == 1


def test_growth_below_the_tolerance_is_none_however_sure() -> None:
    before, now = entry(noisy(spread=0.001, seed=1)), entry(noisy(1.04, spread=0.001, seed=2))
    assert verdict.compare(before, now)[0].change.p < 1e-4
    assert grown(before, now) == []


def test_getting_faster_is_no_failure() -> None:
    assert grown(entry(noisy(seed=1)), entry(noisy(0.5, seed=2))) == []


def test_memory_may_grow_by_4_mib_and_no_more() -> None:
    def using(mib: float) -> baseline.BaselineEntry:
        return entry([msgspec.structs.replace(one, peak_mib=mib + 0.01 * i) for i, one in enumerate(noisy())])

    assert grown(using(10), using(13.9)) == []
    (line,) = grown(using(10), using(30))
    assert line.startswith("peak memory +")
    assert grown(using(1000), using(1020)) == []  # 5% of it
    assert len(grown(using(0), using(20))) == 1


def test_sending_more_is_found() -> None:
    def sending(count: int) -> baseline.BaselineEntry:
        return entry([msgspec.structs.replace(one, sent_bytes=count) for one in noisy()])

    assert grown(sending(1000), sending(1040)) == []
    assert len(grown(sending(1000), sending(1100))) == 1
    assert len(grown(sending(0), sending(1000))) == 1


def test_counted_flop_need_no_statistics() -> None:
    before = entry()
    more = msgspec.structs.replace(before, flop=1.06 * before.flop)
    assert verdict.more_flop(before, before) is None
    assert verdict.more_flop(before, more) == "counted FLOP +6.0% on pixel-3a: 4e+06 → 4.24e+06"
    assert verdict.more_flop(before, more, tolerance=0.1) is None
    none = msgspec.structs.replace(before, flop=0.0)
    assert "from none" in (verdict.more_flop(none, before) or "")


def test_holm_makes_more_devices_ask_for_more_evidence() -> None:
    before = entry(noisy(spread=0.06, seed=4, count=9))
    now = entry(noisy(1.08, spread=0.06, seed=54, count=9))
    p = verdict.compare(before, now)[0].change.p
    assert 0.05 / 24 < p < 0.05 / 3, "the example sits between both thresholds"
    assert len(grown(before, now, devices=1)) == 1
    assert grown(before, now, devices=8) == []


def test_only_the_devices_own_lines_are_its_own() -> None:
    session = Session(SessionOptions())
    slow = verdict.compare(entry(noisy(seed=1)), entry(noisy(1.2, seed=2)))
    assert len(session.changed("group", 2, slow)) == 1
    other = verdict.compare(entry(noisy(seed=3)), entry(noisy(seed=4)))
    assert session.changed("group", 2, other) == []


@pytest.mark.parametrize(("again", "found"), [(1.2, ["cpu_s"]), (1.03, ["cpu_s"]), (1.0, [])])
def test_what_seems_to_have_grown_is_measured_again_and_both_count(
    again: float, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = entry(noisy(seed=1))
    asked: list[MeasurementPlan] = []

    def measure(_: object, plan: MeasurementPlan) -> Measurement:
        asked.append(plan)
        return measured(noisy(again, seed=3))

    monkeypatch.setattr("edgefl.regression.device.measure", measure)
    monkeypatch.setattr(Session, "process", lambda *_: None)
    device = EdgeDevice(
        MarkOptions("pixel-3a"),
        DeviceTest("test_a", Path("test_a.py"), "test_a", 1),
        Session(SessionOptions()),
    )
    assert device.grown(DeviceResult("step", measured(noisy(seed=2))), before) == []
    assert asked == []
    slow = DeviceResult("step", measured(noisy(1.08, seed=2)))
    assert [one.metric for one in device.grown(slow, before)] == found
    assert asked == [slow.measured.plan]


def test_a_second_measurement_that_cannot_be_believed_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.regression.device.measure", lambda *_: measured(steal=0.5))
    monkeypatch.setattr(Session, "process", lambda *_: None)
    device = EdgeDevice(
        MarkOptions("pixel-3a"),
        DeviceTest("test_a", Path("test_a.py"), "test_a", 1),
        Session(SessionOptions()),
    )
    slow = DeviceResult("step", measured(noisy(1.2, seed=2)))
    with pytest.raises(Invalid, match="the hypervisor stole"):
        device.grown(slow, entry(noisy(seed=1)))
    assert slow.outcome == "INVALID"


def loaded(slower: float, load: float = 1.0, waited: float = 0.0, seed: int = 2) -> Measurement:
    return measured(
        [
            msgspec.structs.replace(
                one,
                cpu_s=[s * load for s in one.cpu_s],
                reference_cpu_s=[s * load for s in one.reference_cpu_s],
                waited=waited,
            )
            for one in noisy(slower, seed=seed)
        ]
    )


class Again:
    """A device whose further measurements are these, one after the other."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *measurements: Measurement, **options: object
    ) -> None:
        self.left = list(measurements)
        monkeypatch.setattr("edgefl.regression.device.measure", lambda *_: self.left.pop(0))
        monkeypatch.setattr(Session, "process", lambda *_: None)
        self.where = DeviceTest("test_a", Path("test_a.py"), "test_a", 1)
        self.device = EdgeDevice(MarkOptions("pixel-3a"), self.where, Session(SessionOptions(**options)))  # type: ignore[arg-type]

    def says(self, result: DeviceResult, before: baseline.BaselineEntry) -> str:
        try:
            return "FAIL" if self.device.grown(result, before) else "PASS"
        except Invalid as error:
            assert "host" in str(error)
            assert result.outcome == "INVALID"
            return "INVALID"


@pytest.mark.parametrize(
    ("load", "waited", "slower", "says", "asked"),
    [
        (1.0, 0.0, 1.0, "PASS", 0),
        (1.0, 0.0, 1.04, "PASS", 1),  # on the way to it
        (1.0, 0.0, 1.08, "FAIL", 1),
        (1.1, 0.0, 1.06, "INVALID", 1),
        (1.1, 0.0, 1.12, "FAIL", 1),
        (1.1, 0.0, 1.0, "PASS", 0),
        (1.3, 0.0, 1.2, "INVALID", 1),
        (1.0, 0.5, 1.0, "INVALID", 1),
        (1.0, 0.5, 0.9, "PASS", 0),
        (1.0, 0.5, 1.2, "FAIL", 1),
    ],
)
def test_what_another_load_explains_is_no_verdict(
    load: float, waited: float, slower: float, says: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Again(monkeypatch, loaded(slower, load, waited, seed=3))
    result = DeviceResult("step", loaded(slower, load, waited))
    assert again.says(result, entry(noisy(seed=1))) == says
    assert len(again.left) == 1 - asked


def test_a_load_that_passes_is_waited_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    again = Again(monkeypatch, loaded(1.0, seed=3))
    result = DeviceResult("step", loaded(1.0, load=1.5))
    assert again.says(result, entry(noisy(seed=1))) == "PASS"
    assert result.measured.reference_cpu_s[0] == pytest.approx(0.0003)  # what the budgets were held against


@pytest.mark.parametrize(("second", "says"), [(1 / 1.15, "INVALID"), (1.0, "INVALID"), (1.8, "INVALID")])
def test_neither_measurements_load_makes_up_for_the_others(
    second: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Again(monkeypatch, loaded(1.08, load=second, seed=3))
    assert again.says(DeviceResult("step", loaded(1.08, load=1.15)), entry(noisy(seed=1))) == says


def test_counted_flop_fail_whatever_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    again = Again(monkeypatch, loaded(1.0, waited=0.5, seed=3), compare=True)
    trial = msgspec.structs.replace(TRIAL, flop=2 * TRIAL.flop)
    result = DeviceResult("step", measured(loaded(1.0, waited=0.5).repetitions, trial=trial))
    before = entry(noisy(seed=1))
    monkeypatch.setattr(EdgeDevice, "_baseline", lambda *_: before)
    again.device.results.append(result)
    with pytest.raises(NotMet, match=r"counted FLOP \+100"):
        again.device.judge()
    assert result.outcome == "FAIL"


def test_no_baseline_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    again = Again(monkeypatch, compare=True)
    result = DeviceResult("step", measured(noisy()))
    again.device.results.append(result)
    with pytest.raises(Invalid, match="no baseline in"):
        again.device.judge()
    assert result.outcome == "INVALID"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"profile_sha256": "0" * 16}, "the profile of pixel-3a or its network has changed since"),
        ({"reference": {"version": 0}}, "stale calibration: .* of version 0, now it is 1"),
        ({"cpu_s": (1.0,) * 8}, "the baseline has 8 repetitions, 9 are needed"),
    ],
)
@pytest.mark.parametrize("budgets", [{}, {"seconds": 10.0}])
def test_a_baseline_that_cannot_compare_is_found_before_anything_is_measured(
    change: dict[str, Any], says: str, budgets: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = baseline.entry("test_a", "dumps", measured(noisy()))
    if "reference" in change:
        change = {"reference": msgspec.structs.replace(before.reference, **change["reference"])}
    stored = msgspec.structs.replace(before, **change)
    monkeypatch.setattr(baseline, "load", lambda _: {stored.key: stored})
    again = Again(monkeypatch, measured(noisy()), compare=True)
    device = EdgeDevice(
        MarkOptions("pixel-3a", budgets=budgets), again.where, Session(SessionOptions(compare=True))
    )
    if budgets:  # which hold everywhere
        device.run(json.dumps, 1)
    find = device.judge if budgets else partial(device.run, json.dumps, 1)
    with pytest.raises(Invalid, match=rf"^dumps on pixel-3a: {says}.*; save it again with --edgefl-save$"):
        find()
    assert len(again.left) == (0 if budgets else 1)


def test_a_function_that_is_run_twice_has_a_baseline_for_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "test_a.py"
    where = DeviceTest("test_a", file, "test_a", 1)
    against = [ShotSizes(reference="train-small", units=units, calls=1) for units in (5, 9)]
    trial = [msgspec.structs.replace(TRIAL, shots=one) for one in against]
    entries = [
        baseline.entry("test_a", name, measured(noisy(), trial=one))
        for name, one in zip(("dumps", "dumps 2"), trial, strict=True)
    ]
    baseline.save(baseline.path_of(file), entries)
    asked: list[ShotSizes | None] = []

    def measure(_: object, plan: MeasurementPlan) -> Measurement:
        asked.append(plan.request.shots)
        return measured(noisy())

    monkeypatch.setattr("edgefl.regression.device.measure", measure)
    monkeypatch.setattr(Session, "process", lambda *_: None)
    device = EdgeDevice(MarkOptions("pixel-3a"), where, Session(SessionOptions(compare=True)))
    for value in (1, 2):
        device.run(json.dumps, value)
    assert asked == against
