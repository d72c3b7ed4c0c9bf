"""Verdicts on given measurements: budgets, baselines and their files; the table of verdicts."""

from __future__ import annotations

import functools
import json
import math
import stat
from pathlib import Path
from unittest.mock import ANY

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from regression_samples import TRIAL, draws, entry, measured, noisy, repetition, result_of

from edgefl.errors import ConfigError, NotMet
from edgefl.regression import baseline, verdict
from edgefl.regression.baseline import BaselineEntry
from edgefl.regression.device import DeviceResult
from edgefl.regression.measurement import Measurement, median_interval
from edgefl.regression.table import ResultRow, lines, properties
from edgefl.regression.verdict import Compared, Family, NeedMore, Verdict

RUNS = 100
replace = msgspec.structs.replace


def over(result: DeviceResult, **budgets: float) -> str:
    try:
        result.assert_budget(**budgets)
    except NotMet as error:
        assert isinstance(error, AssertionError)
        return str(error)
    return ""


def test_a_budget_limits_the_upper_bound_of_the_median() -> None:
    result = result_of(measured(noisy(spread=0.06)))
    assert over(result, seconds=1.2 * result.seconds) == ""
    assert result.outcome == "PASS"
    line = over(result, seconds=1.001 * result.seconds)
    assert line.startswith("step on pixel-3a: seconds 0.002")
    assert "(95% sure: at most" in line
    assert line.endswith("s are allowed (a real pixel-3a: within a factor of 1.3, 90%)")
    assert result.outcome == "FAIL"


def test_each_budget_limits_its_own_figure() -> None:
    one = measured([repetition(peak_mib=30.0, sent_bytes=3 << 20, radio_s=1.0)] * 9, device="pixel-4")
    wide = {"seconds": 10.0, "peak_mib": 30.0, "sent_mib": 3.0, "joules": 100.0}
    assert over(result_of(one), **wide) == ""
    for name in wide:
        line = over(result_of(one), **wide | {name: 1e-6})
        assert line.startswith(f"step on pixel-4: {name}")
        assert ";" not in line
    assert over(result_of(one), peak_mib=1.0, sent_mib=1.0).count("; sent_mib") == 1
    assert result_of(measured(device="pi-4")).joules is None


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"second": 1.0}, "budget 'second' not found; did you mean 'seconds'? available: "),
        ({"seconds": -1.0}, "budget seconds must be a finite number of at least 0 (got -1.0)"),
        ({"seconds": float("nan")}, "budget seconds must be a finite number of at least 0 (got nan)"),
        ({"joules": 1.0}, "budget joules: device 'pi-4' has no [battery], so its power is unknown"),
    ],
)
def test_an_invalid_budget_is_one_line(budget: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        result_of(measured(device="pi-4")).assert_budget(**budget)
    assert str(caught.value).startswith(message)


def at_pace(*paces: float) -> DeviceResult:
    return result_of(measured([repetition(achieved_s=0.01 * pace) for pace in paces]))


def test_a_pace_outside_the_tolerance_fails() -> None:
    at_pace(*[1.0] * 9).assert_pace(0.01)
    with pytest.raises(NotMet, match=r"achieved over declared time is 1\.100"):
        at_pace(*[1.1] * 9).assert_pace()
    with pytest.raises(ConfigError, match="the pace cannot be judged, because pacing is off: time_scale"):
        result_of(measured(time_scale=0.0)).assert_pace()


def grown(before: BaselineEntry, now: BaselineEntry, devices: int = 1) -> list[str]:
    compared = verdict.compare(before.samples, now.samples)
    grew = verdict.changed(compared, devices * len(verdict.TESTED))
    return [str(one) for one, more in zip(compared, grew, strict=True) if more]


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.045])
def test_ten_percent_more_time_is_found_and_unchanged_code_passes(spread: float) -> None:
    one, found, alarms = entry(), 0, 0
    for run in range(RUNS):
        before, now = (draws(2 * run + turn, spread) for turn in range(2))
        for factor in (1.0, 1.1):
            later = replace(one, cpu_s=tuple(factor * x for x in now))
            grew = len(grown(replace(one, cpu_s=tuple(before)), later))
            found += grew if factor > 1 else 0
            alarms += grew if factor == 1 else 0
    assert found >= 0.95 * RUNS
    assert alarms <= 0.01 * RUNS


def test_more_cpu_time_is_named_and_more_blocked_time_is_found() -> None:
    (line,) = grown(entry(noisy(seed=1)), entry(noisy(1.1, seed=2)), devices=3)
    assert line.startswith("CPU time +")
    assert "on pixel-3a" in line
    assert "(growth by more than 5.0% fails)" in line
    assert len(grown(entry(noisy(seed=1)), entry(noisy(seed=2, blocked_s=0.001)))) == 1


def test_growth_below_the_tolerance_and_faster_code_pass() -> None:
    before, now = entry(noisy(spread=0.001, seed=1)), entry(noisy(1.04, spread=0.001, seed=2))
    assert verdict.compare(before.samples, now.samples)[0].p < 1e-4
    assert grown(before, now) == []
    assert grown(before, entry(noisy(0.5, seed=2))) == []


@pytest.mark.parametrize(
    ("before_mib", "now_mib", "step_mib", "grew"),
    [
        (10, 13.9, 0.01, ""),
        (10, 30, 0.01, "peak memory +"),
        (1000, 1020, 0.01, ""),  # 5%
        (0, 20, 0.01, "peak memory grew on pixel-3a: 0.07 → 20.07 MiB"),
        (0, 0, 0, ""),
        (0, 3.9, 0, ""),
        (30, 0, 0, ""),
        (0, 30, 0, "peak memory grew on pixel-3a: 0 → 30 MiB"),
    ],
)
def test_memory_may_grow_by_4_mib_or_the_tolerance(
    before_mib: float, now_mib: float, step_mib: float, grew: str
) -> None:
    before, now = (
        entry([replace(one, peak_mib=mib + step_mib * k) for k, one in enumerate(noisy())])
        for mib in (before_mib, now_mib)
    )
    lines = grown(before, now)
    assert len(lines) == bool(grew)
    assert all(line.startswith(grew) and line.endswith("(growth by more than 4 MiB fails)") for line in lines)


def test_sending_more_is_found() -> None:
    def sending(count: int) -> BaselineEntry:
        return entry(noisy(sent_bytes=count))

    assert grown(sending(1000), sending(1040)) == []
    assert len(grown(sending(1000), sending(1100))) == 1
    assert len(grown(sending(0), sending(1000))) == 1
    sent = verdict.compare(sending(0).samples, sending(1000).samples)[2]
    assert (sent.shift, sent.p < 0.001) == (math.inf, True)
    none = verdict.compare(sending(0).samples, sending(0).samples)[2]
    assert (none.shift, none.p) == (0.0, 1.0)


def test_counted_flop_are_compared_exactly() -> None:
    before = entry().samples
    more = before._replace(flop=1.06 * before.flop)
    assert verdict.more_flop(before, before) is None
    assert verdict.more_flop(before, more) == "counted FLOP +6.0% on pixel-3a: 4e+06 → 4.24e+06"
    assert verdict.more_flop(before, more, tolerance=0.1) is None
    assert "FLOP grew on" in (verdict.more_flop(before._replace(flop=0.0), before) or "")


def test_more_devices_need_more_evidence() -> None:
    before = entry(noisy(spread=0.06, seed=4, count=9))
    now = entry(noisy(1.08, spread=0.06, seed=54, count=9))
    assert 0.05 / 24 < verdict.compare(before.samples, now.samples)[0].p < 0.05 / 3, "between both thresholds"
    assert len(grown(before, now, devices=1)) == 1
    assert grown(before, now, devices=8) == []


def judged(*measurements: Measurement) -> tuple[Verdict, int]:
    """The verdict against ``entry(noisy(seed=1))``, and the number of measurements that it needed."""
    before = entry(noisy(seed=1)).samples
    for count in range(1, len(measurements) + 1):
        found = verdict.judge(measurements[:count], {}, before)
        if isinstance(found, Verdict):
            return found, count
        assert found.measurements == 1
    raise AssertionError("it wants more measurements")


@pytest.mark.parametrize(
    ("first", "second", "load", "waited", "outcome", "needed"),
    [
        # factors of the two measurements; their load; their wait; expected verdict; measurements needed
        (1.0, 1.0, 1.0, 0.0, "PASS", 1),
        (1.08, 1.08, 1.0, 0.0, "FAIL", 2),
        (1.08, 1.03, 1.0, 0.0, "FAIL", 2),  # both count together
        (1.08, 1.0, 1.0, 0.0, "PASS", 2),
        (1.04, 1.04, 1.0, 0.0, "PASS", 2),  # above half of the tolerance
        (1.06, 1.06, 1.1, 0.0, "INVALID", 2),
        (1.12, 1.12, 1.1, 0.0, "FAIL", 2),
        (1.0, 1.0, 1.1, 0.0, "PASS", 1),
        (1.2, 1.2, 1.3, 0.0, "INVALID", 2),  # loads too far apart, twice
        (1.0, 1.0, 1.0, 0.5, "INVALID", 2),
        (0.9, 0.9, 1.0, 0.5, "PASS", 1),
        (1.2, 1.2, 1.0, 0.5, "FAIL", 2),
    ],
)
def test_growth_fails_unless_another_load_may_explain_it(
    first: float, second: float, load: float, waited: float, outcome: str, needed: int
) -> None:
    one, other = (
        measured(noisy(factor, load=load, waited=waited, seed=seed))
        for factor, seed in ((first, 2), (second, 3))
    )
    found, count = judged(one, other)
    assert (found.outcome, count) == (outcome, needed)
    assert outcome != "INVALID" or "host" in found.why
    assert found.grew == (("cpu_s",) if outcome == "FAIL" else ())
    assert bool(found.why) == (outcome != "PASS")


@pytest.mark.parametrize("second", [1 / 1.15, 1.0, 1.8])
def test_opposite_loads_of_two_measurements_do_not_cancel(second: float) -> None:
    one, other = measured(noisy(1.08, load=1.15, seed=2)), measured(noisy(1.08, load=second, seed=3))
    assert judged(one, other)[0].outcome == "INVALID"


def test_a_measurement_under_load_is_made_again_once() -> None:
    loads = [measured(noisy(load=load, seed=seed)) for seed, load in ((2, 1.5), (3, 1.0))]
    assert judged(*loads) == (Verdict(compared=ANY), 2)


def test_a_disturbed_second_measurement_is_invalid() -> None:
    found, _ = judged(measured(noisy(1.2, seed=2)), measured(steal=0.5))
    assert found == Verdict("INVALID", "time stolen by the hypervisor 50.0%, at most 2% is allowed")


def test_more_flop_fail_under_any_load() -> None:
    one = measured(noisy(waited=0.5, seed=2), trial=replace(TRIAL, flop=2 * TRIAL.flop))
    asks = verdict.judge([one], {}, entry(noisy(seed=1)).samples)
    assert asks.otherwise.why == "counted FLOP +100.0% on pixel-3a: 4e+06 → 8e+06"
    for other in (measured(noisy(waited=0.5, seed=3)), measured(steal=0.5)):
        found, _ = judged(one, other)
        assert (found.outcome, found.why) == ("FAIL", asks.otherwise.why)
    grew, _ = judged(one, measured(noisy(1.4, seed=3)))
    assert grew.why.startswith(f"{asks.otherwise.why}; CPU time +")


@pytest.mark.parametrize(
    ("budgets", "baseline", "steal", "outcome", "why"),
    [
        ({}, None, 0.0, "PASS", ""),
        ({"seconds": 1.0}, None, 0.5, "PASS", ""),
        ({}, None, 0.5, "INVALID", "time stolen by the hypervisor 50.0%, at most 2% is allowed"),
        ({"seconds": 0.003}, None, 0.5, "INVALID", "not below half of the budget for seconds"),
        ({"peak_mib": 11, "seconds": 0.003}, None, 0.5, "INVALID", "half of the budget for seconds: 0.0028"),
        ({"peak_mib": 9, "seconds": 0.003}, None, 0.5, "FAIL", "peak_mib 10 MiB (95% sure"),
        ({"peak_mib": 9}, None, 0.5, "FAIL", "peak_mib 10 MiB (95% sure"),
        ({"seconds": 1e-3}, "none", 0.0, "FAIL", "seconds 0.002857 s (95% sure"),
        ({"seconds": 1.0}, "no baseline here", 0.0, "INVALID", "no baseline here"),
    ],
)
def test_budgets_are_judged_before_the_baseline(
    budgets: dict[str, float], baseline: str | None, steal: float, outcome: str, why: str
) -> None:
    found = verdict.judge([measured(steal=steal)], budgets, baseline)
    assert found.outcome == outcome
    assert why in found.why
    assert bool(found.note) == (outcome == "PASS" and steal > 0)


def test_a_disturbed_measurement_passes_only_strictly_below_half_of_its_budget() -> None:
    disturbed = measured(steal=0.5)
    bound = median_interval(disturbed.seconds)[2]
    assert verdict.within(disturbed, {"seconds": 2 * bound}).outcome == "INVALID"
    assert verdict.within(disturbed, {"seconds": 2.001 * bound}).outcome == "PASS"
    assert verdict.within(disturbed, {"joules": 0.0}).outcome == "INVALID"
    assert verdict.within(disturbed, {"peak_mib": 10.1, "sent_mib": 0.0}) == Verdict()
    mixed = verdict.within(disturbed, {"seconds": 1.0, "peak_mib": 10.1})
    assert mixed.outcome == "PASS"
    assert mixed.note.startswith("passed on head-room: below half of each budget of time, though time stolen")


def test_each_device_has_its_own_verdict_after_a_correction_for_all() -> None:
    before = entry(noisy(seed=1)).samples
    slow = verdict.judge([measured(noisy(1.2, seed=2))], {}, before, family=Family(2))
    assert isinstance(slow, NeedMore)
    other = verdict.judge([measured(noisy(seed=4))], {}, before, family=Family(2, slow.compared))
    assert other.outcome == "PASS"
    assert isinstance(other.compared[0], Compared)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 10))
def test_holm_adjusts_upwards_in_order_and_its_least_is_bonferronis(p_values: list[float], more: int) -> None:
    tests = len(p_values) + more
    adjusted = verdict.holm(p_values, tests)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    assert min(adjusted) == min(1.0, tests * min(p_values))
    assert sorted(range(len(p_values)), key=lambda i: (p_values[i], i)) == sorted(
        range(len(p_values)), key=lambda i: (adjusted[i], p_values[i], i)
    )


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_more_known_p_values_never_raise_holms_adjustment(p_values: list[float]) -> None:
    early = verdict.holm(p_values[:-1], len(p_values))
    late = verdict.holm(p_values, len(p_values))
    assert all(b <= a for a, b in zip(early, late, strict=False))


PASSED = ResultRow(
    test="tests/test_step.py::test_step[pixel-3a]", label="tests/test_step.py::test_step", function="step",
    device="pixel-3a", outcome="PASS", why="", seconds=2.0123, host_cpu_s=0.000312, peak_mib=118.25,
    sent_mib=0.0, joules=None, repetitions=15,
)  # fmt: skip


def test_the_table_has_a_line_for_each_device_below_its_test() -> None:
    test = "tests/test_step.py::test_step[moto-g4]"
    failed = ResultRow(
        test=test, label=PASSED.label, function="", device="moto-g4", outcome="FAIL", why="out of memory"
    )
    assert list(lines([PASSED, replace(PASSED, device="moto-g4", test=test), failed])) == [
        "                      device  host CPU memory     sent runs",
        "                        time      time    MiB      MiB",
        "tests/test_step.py::test_step: step",
        "  pixel-3a            2.01 s    312 µs  118.2        0   15  OK",
        "  moto-g4             2.01 s    312 µs  118.2        0   15  OK",
        "tests/test_step.py::test_step",
        "  moto-g4                  –         –      –        –    –  FAIL",
        "    out of memory",
    ], "no row has an energy"
    (*_, predicted) = lines([replace(PASSED, repetitions=0)])
    assert predicted.split()[1:3] == ["~2.01", "s"], "a time from counts is no measurement"
    narrow = [*lines([replace(PASSED, joules=2.5)], 60)]
    assert narrow[0].split() == ["device", "memory", "sent", "runs"]
    assert narrow[3].split() == ["pixel-3a", "2.01", "s", "118.2", "0", "15", "OK"]


@pytest.mark.parametrize("seconds", [0.0, 1.22e-9, 3.11e-6, 0.0009996, 0.9996, 999.6, 123456.7])
def test_columns_do_not_run_together(seconds: float) -> None:
    row = replace(
        PASSED, seconds=seconds, host_cpu_s=seconds, peak_mib=123456.7, sent_mib=1.2345e-7, joules=1.2345e-5
    )
    figures = list(lines([row]))[3].split()
    number, unit = figures[1:3]
    shown_s = float(number.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]
    assert shown_s == pytest.approx(seconds, rel=0.01)
    assert figures == ["pixel-3a", number, unit, number, unit, "123457", "1.23e-07", "1.23e-05", "15", "OK"]


def test_a_failed_row_has_its_reason_and_no_line_is_too_wide() -> None:
    failed = replace(
        PASSED,
        label="a/very/" + "long/" * 20 + "test_step.py::test_step",
        device="a-device-with-a-name-that-does-not-fit",
        outcome="INVALID",
        why="too noisy:\n" + "because " * 40,
        seconds=123456.0,
        sent_mib=123456.7,
    )
    for columns in (60, 80, 120):
        found = list(lines([failed], columns))
        assert max(map(len, found)) <= columns
        assert found[3].endswith("NOT JUDGED")
    assert found[4].startswith("    COULD NOT BE JUDGED: too noisy: because")


def test_properties_are_named_by_device_and_function() -> None:
    found = dict(properties(replace(PASSED, outcome="FAIL", why="too slow", figures={"calls": 9})))
    figures = {name: getattr(PASSED, name) for name in ("seconds", "host_cpu_s", "peak_mib", "sent_mib")}
    expected = {"outcome": "FAIL", **figures, "repetitions": 15, "calls": 9, "why": "too slow"}
    assert found == {f"edgefl.pixel-3a.step.{name}": value for name, value in expected.items()}


def test_a_row_can_be_sent_to_another_process_as_json() -> None:
    row = replace(PASSED, entry=entry(), seconds=None)
    plain = json.loads(json.dumps(msgspec.to_builtins(row)))
    assert msgspec.convert(plain, ResultRow) == row


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "edgefl-baselines" / "test_a.json"


def test_an_entry_has_all_conditions_of_its_figures(path: Path) -> None:
    one = entry()
    assert (one.device, one.network, one.mechanism) == ("pixel-3a", "lte", "work-paced")
    assert one.reference.against.reference == "train-small"
    assert "torch" in one.host.software
    assert "Python" in one.host.software
    rows = (one.cpu_s, one.host_cpu_s, one.peak_mib, one.sent_mib, one.reference.host_cpu_s)
    assert {len(row) for row in rows} == {15}
    assert entry(time_scale=0.0).mechanism == "not paced"
    assert baseline.load(path) == {}
    baseline.save(path, [one])
    assert baseline.load(path) == {one.key: one}


def test_saving_replaces_entries_with_the_same_key_and_keeps_the_others(path: Path) -> None:
    elsewhere = replace(entry(), host=replace(entry().host, fingerprint="other"))
    baseline.save(path, [entry(), entry(test="test_b[pi-4]"), elsewhere])
    newer = entry(noisy(1.5))
    baseline.save(path, [newer])
    found = baseline.load(path)
    assert len(found) == 3
    assert found[newer.key] == newer
    assert found[elsewhere.key] == elsewhere


def test_the_order_of_saving_does_not_change_the_file(path: Path, tmp_path: Path) -> None:
    entries = [entry(test="test_b[pi-4]"), entry(), entry(function="other")]
    baseline.save(path, entries)
    other = tmp_path / "other.json"
    for one in reversed(entries):
        baseline.save(other, [one])
    assert path.read_bytes() == other.read_bytes()


def test_a_changed_metric_is_one_changed_line_of_a_readable_file(path: Path) -> None:
    baseline.save(path, [entry()])
    before = path.read_text().splitlines()
    baseline.save(path, [replace(entry(), peak_mib=(1.0,) * 15)])
    after = path.read_text().splitlines()
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    assert max(map(len, after)) < 250
    json.loads(path.read_text())
    (mine := path.parent.parent / "mine").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(mine.stat().st_mode)
    assert [file.name for file in path.parent.iterdir()] == ["test_a.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a baseline file: Input data was truncated"),
        ("[]", "must be a table, got []"),
        ("{}", "edgefl_baselines: missing; must be 1"),
        ('{"edgefl_baselines": 1, "entries": [{}]}', "entries[0].test: missing"),
        ('{"edgefl_baselines": 1, "entries": [], "x": 1}', "unknown key 'x'"),
        ('{"edgefl_baselines": 3, "entries": []}', "edgefl_baselines: must be 1 or 2, got 3"),
        ('{"edgefl_baselines": "\udcff"}', "not a baseline file: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_the_error_for_a_broken_file_is_one_line_and_the_file_stays(
    path: Path, content: str, message: str
) -> None:
    path.parent.mkdir()
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        baseline.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    before = path.read_bytes()
    with pytest.raises(ConfigError):
        baseline.save(path, [entry()])
    assert path.read_bytes() == before


def test_a_folder_is_refused_as_a_baseline(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        baseline.load(tmp_path)


NUMBERS = [
    ("reference.against.units", 1, 10_000),
    ("reference.against.calls", 1, 10_000),
    ("reference.version", 0, 1_000_000),
    ("reference.flop", 0, 1e24),
    ("reference.host_cpu_s", None, 1e12),
    ("host.cores", 1, 1_000_000),
    ("seed", 0, 2**63 - 1),
    ("steal", 0, 1.0),
    ("waited", 0, 1.0),
    ("flop", 0, 1e24),
    ("host_cpu_s", 0, 1e12),
    ("cpu_s", 0, 1e12),
    ("peak_mib", 0, 1e12),
    ("sent_mib", 0, 1e12),
]
"""Every number of an entry, with its minimum (None: must be above 0) and its maximum."""


@functools.cache
def as_saved() -> str:
    return json.dumps({"edgefl_baselines": 1, "entries": [msgspec.to_builtins(entry())]})


def tampered(path: Path, key: str, value: str) -> str:
    """Replace a number (in a list, the third) in a saved file; return the error, or "taken" if it is read."""
    plain = json.loads(as_saved())
    *outer, last = key.split(".")
    table = functools.reduce(lambda inner, name: inner[name], outer, plain["entries"][0])
    holder, at = (table[last], 2) if isinstance(table[last], list) else (table, last)
    holder[at] = "HERE"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(plain).replace('"HERE"', value))
    try:
        baseline.load(path)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < len(str(path)) + 150
        return str(error)
    return "taken"


def test_every_number_of_an_entry_has_bounds() -> None:
    def numbers(table: dict[str, object], prefix: str = "") -> set[str]:
        found: set[str] = set()
        for name, value in table.items():
            if isinstance(value, dict):
                found |= numbers(value, f"{prefix}{name}.")
            elif not isinstance(value, str):
                found.add(prefix + name)
        return found

    assert numbers(msgspec.to_builtins(entry())) == {key for key, _, _ in NUMBERS}


@pytest.mark.parametrize(("key", "least", "most"), NUMBERS, ids=[key for key, _, _ in NUMBERS])
def test_impossible_numbers_are_refused(key: str, least: float | None, most: float, path: Path) -> None:
    whole, place = isinstance(most, int), f"entries[0].{key}"
    assert "JSON is malformed" in tampered(path, key, "NaN")
    assert "out of range" in tampered(path, key, "1e400")
    for value in ("true", "'7'", "[]", "-1", str(10**30), *(["2.5"] if whole else [])):
        error = tampered(path, key, value.replace("'", '"'))
        assert f"{place}: must be " in error.replace("[2]: ", ": ")
        assert error.endswith(f", got {value}")
    assert tampered(path, key, str(most)) == "taken"
    assert place in tampered(path, key, str(most + 1 if whole else most * 1.001))
    assert (tampered(path, key, "0") == "taken") == (least == 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_mib": (1.0,) * 3}, r"\[0\]\.peak_mib: got 3 figures; allowed: 15, as many as cpu_s"),
        ({"cpu_s": ()}, r"\[0\]\.cpu_s: must be an array that is not empty, got \[\]"),
    ],
)
def test_rows_of_different_lengths_and_empty_rows_are_refused(
    path: Path, change: dict[str, object], message: str
) -> None:
    baseline.save(path, [replace(entry(), **change)])
    with pytest.raises(ConfigError, match=message):
        baseline.load(path)


@pytest.mark.parametrize(
    ("load", "fits", "drift"),
    [
        *((load, True, 0.0) for load in (1.0, 1.05, 1 / 1.05)),
        *((load, True, 0.0546) for load in (1.15, 1 / 1.15)),
        *((1.19, True, 0.0751), (1.21, False, 0.0851), (0.83, False, 0.0825)),
    ],
)
def test_measurements_under_very_different_loads_are_not_compared(
    load: float, fits: bool, drift: float
) -> None:
    before, now = (entry([repetition(0.001 * factor, 0.001 * factor)] * 9) for factor in (1.0, load))
    assert before.cpu_s == now.cpu_s
    why = verdict.loads_apart(before.samples, now.samples)
    assert (why is None) == fits
    assert fits or f"takes {load:.2f} times the CPU time" in (why or "")
    assert verdict.drift(before.samples, now.samples) == pytest.approx(drift, abs=1e-4)


def test_waiting_for_a_core_is_a_load() -> None:
    before, now = (entry([repetition(waited=share)] * 9) for share in (0.1, 0.6))
    assert verdict.drift(before.samples, now.samples) == pytest.approx(0.08)
    assert verdict.drift(now.samples, before.samples) == pytest.approx(0.08)
