"""The pytest plugin: a test on each device, its budgets and its baselines.

The measurements here are made up. `tests/process/test_pytest_plugin.py` makes real ones.
"""

from __future__ import annotations

import json
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import scipy.stats  # noqa: F401
from regression_samples import TRIAL, counted, repetition

# pytester unloads the modules that its sessions import. Compiled modules cannot be loaded twice and others
# load slowly, so all of them are imported here.
from edgefl.regression import device, gate, gate_page, measurement, progress, publish, table  # noqa: F401
from edgefl.regression.counts import CountedRun
from edgefl.regression.measure import Tell
from edgefl.regression.measurement import Measurement, MeasurementPlan
from edgefl.regression.session import Session

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "edgefl.pytest_plugin")
"""Load the plugin by its name, because an old installation of edgefl does not register it with pytest."""

Run = Callable[..., pytest.RunResult]

HEADER = """
import pytest
import steps

pixel = pytest.mark.edge_device("pixel-4")
"""
TEST = """
@pytest.mark.edge_device("pixel-4")
def test_step(edge_device):
    edge_device.run(steps.step, mib=10)
"""


def check(found: pytest.RunResult, *lines: str, **outcomes: int) -> None:
    """Assert that the numbers of outcomes are these, and that the output has these lines in this order."""
    found.assert_outcomes(**outcomes)
    found.stdout.fnmatch_lines(lines)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest on a test's text. The arguments of ``steps.step`` set the figures of its measurement."""

    def measure(_: object, plan: MeasurementPlan, limit: object, tell: Tell) -> Measurement:
        one = repetition(peak_mib=float(plan.request.kwargs.get("mib", 0)))
        steal = 0.5 if plan.request.kwargs.get("stolen") else 0.0
        tell("repetition 1 of 9")
        return Measurement(plan, TRIAL, [one] * plan.repetitions, steal)

    def count(_: object, plan: MeasurementPlan, tell: Tell) -> CountedRun:
        given = plan.request.kwargs
        if given.get("long"):
            return counted(None, sent_bytes=7)
        run = counted(given.get("work", 100), sent_bytes=int(given.get("sent", 0)))
        return msgspec.structs.replace(run, second=counted(101).second) if given.get("varies") else run

    monkeypatch.setattr("edgefl.regression.device.measure", measure)
    monkeypatch.setattr("edgefl.regression.device.count", count)
    monkeypatch.setattr(Session, "process", lambda *_: None)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(steps="def step(*given, **named): pass")
    pytester.syspathinsert()

    def run(test: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_device=HEADER + textwrap.dedent(test))
        # This process has imported edgefl; pytest warns about that unless `python -m pytest` started it.
        warnings = ("-Werror", "-Wignore::pytest.PytestAssertRewriteWarning")
        options = (*PLUGIN, "--edgefl-repetitions=9", "--strict-markers", *warnings)
        return pytester.runpytest_inprocess(*options, *arguments)

    return run


@pytest.fixture
def baseline(pytester: pytest.Pytester) -> Path:
    return pytester.path / "edgefl-baselines" / "test_device.json"


def test_a_test_runs_on_each_device_and_must_keep_its_budgets(run: Run, pytester: pytest.Pytester) -> None:
    found = run(
        """
        @pytest.mark.edge_device("pixel-4", "moto-g4")
        def test_step(edge_device):
            result = edge_device.run(steps.step, mib=10)
            assert result.device == edge_device.name
            assert (result.repetitions, result.peak_mib) == (9, 10.0)
            result.assert_budget(seconds=1000, peak_mib=100, sent_mib=0, joules=10000)

        @pytest.fixture
        def phone(edge_device):
            return edge_device

        @pytest.mark.edge_device("pixel-3a")
        @pytest.mark.parametrize("rounds", [1, 2])
        def test_a_fixture_of_ones_own(phone, rounds):
            assert phone.run(steps.step, rounds=rounds).outcome == "PASS"

        @pytest.mark.edge_device("pixel-3a")
        def test_over(edge_device):
            edge_device.run(steps.step, mib=30).assert_budget(seconds=1000, peak_mib=20)

        @pytest.mark.edge_device("pixel-3a", peak_mib=20)
        def test_over_by_the_mark(edge_device):
            edge_device.run(steps.step, mib=30)

        @pytest.mark.edge_device("pixel-3a", seconds=1e-9)
        def test_itself():
            pass
        """,
        "-v",
        "--junitxml=out.xml",
    )
    check(
        found,
        "*test_step?pixel-4? PASSED*",
        "*test_step?moto-g4? PASSED*",
        "E * step on pixel-3a: peak_mib * MiB (95% sure: at most * MiB), 20 MiB are allowed",
        "step on pixel-3a: peak_mib *",
        "test_itself on pixel-3a: seconds * s are allowed (a real pixel-3a: within a factor of *, 90%)",
        "=*= edgefl =*=",
        "*device  host CPU memory     sent   energy runs",
        "*time      time    MiB      MiB        J",
        "test_device.py::test_step: step",
        "  pixel-4 * 9  OK",
        "  moto-g4 * 9  OK",
        "test_device.py::test_over: step",
        "  pixel-3a * FAIL",
        "test_device.py::test_itself",
        passed=4,
        failed=3,
    )
    assert "edgefl/regression" not in found.stdout.str()  # no frames of edgefl
    shown = found.stdout.str().partition("= edgefl =")[2].splitlines()[1:7]
    assert max(map(len, shown)) <= 80
    properties = {
        item.get("name"): item.get("value") for item in ET.parse(pytester.path / "out.xml").iter("property")
    }
    assert properties["edgefl.pixel-4.step.outcome"] == "PASS"
    assert float(properties["edgefl.moto-g4.step.seconds"] or 0) > 0


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_disturbed_measurement_fails_or_is_skipped(run: Run, outcome: str, baseline: Path) -> None:
    stolen = TEST.replace("mib=10)", "stolen=True)\n    raise AssertionError('not reached')")
    options = ("--edgefl-invalid=skip", "-rs") if outcome == "skipped" else ()
    found = run(stolen, "--edgefl-save", "--edgefl-timed", *options)
    check(found, "*COULD NOT BE JUDGED: step on pixel-4: time stolen by the hypervisor *", **{outcome: 1})
    found.stdout.fnmatch_lines(["  pixel-4 * NOT JUDGED"])
    assert not baseline.exists()


@pytest.mark.parametrize("name", ["function", "setup", "self"])
def test_the_parameters_of_a_test_may_have_any_name(run: Run, name: str) -> None:
    test = f"""
    @pixel
    @pytest.mark.parametrize("{name}", [7])
    def test_step({name}):
        pass
    """
    check(run(test), f"test_device.py::test_step {name}=7", "  pixel-4 * OK", passed=1)


@pytest.mark.parametrize("outcome", ["errors", "skipped"])
def test_a_function_that_a_fixture_runs_may_be_unjudged(
    run: Run, outcome: str, pytester: pytest.Pytester
) -> None:
    test = """
    @pytest.fixture
    def result(edge_device):
        return edge_device.run(steps.step)

    @pixel
    def test_step(result):
        pass
    """
    option = "--edgefl-invalid=skip" if outcome == "skipped" else "--edgefl-invalid=fail"
    found = run(test, "-rsE", "--edgefl-compare", option, "--junitxml=out.xml")
    check(found, "*COULD NOT BE JUDGED: step on pixel-4: no baseline in *", **{outcome: 1})
    found.stdout.fnmatch_lines(["test_device.py::test_step", "  pixel-4 * NOT JUDGED"])
    assert "Traceback" not in found.stdout.str()
    assert "edge_device.run" not in found.stdout.str()
    (judged,) = ET.parse(pytester.path / "out.xml").findall(".//property[@name='edgefl.pixel-4.outcome']")
    assert judged.get("value") == "INVALID"


def test_the_message_of_a_failed_assertion_about_a_disturbed_measurement_is_shown(run: Run) -> None:
    found = run(TEST.replace("mib=10)", "stolen=True).seconds\n    raise AssertionError('a wrong result')"))
    stolen = "COULD NOT BE JUDGED: step on pixel-4: time stolen by the hypervisor *"
    check(found, f"{stolen}; the test's own assertion failed: a wrong result*", failed=1)


def test_a_failed_assertion_without_a_message_is_shown_by_its_type() -> None:
    doubtful: Any = SimpleNamespace(doubt="stolen time", judge=lambda: None)
    with device.EdgeDevice.judged(doubtful) as found:
        raise AssertionError
    assert found.invalid == "stolen time; the test's own assertion failed: AssertionError"


def test_a_disturbed_measurement_passes_only_below_half_of_its_budgets(run: Run) -> None:
    found = run(
        """
        @pytest.mark.edge_device("pixel-4", seconds=100, peak_mib=21)
        def test_wide(edge_device):
            edge_device.run(steps.step, mib=10, stolen=True)

        @pixel
        def test_wide_by_itself(edge_device):
            edge_device.run(steps.step, mib=10, stolen=True).assert_budget(seconds=100)

        @pytest.mark.edge_device("pixel-4", seconds=0.004, peak_mib=19)
        def test_narrow(edge_device):
            edge_device.run(steps.step, mib=10, stolen=True)

        @pixel
        def test_over(edge_device):
            edge_device.run(steps.step, mib=10, stolen=True).assert_budget(seconds=0.001)

        @pixel
        def test_its_own_assertion(edge_device):
            assert edge_device.run(steps.step, stolen=True).seconds < 0

        @pixel
        def test_pace(edge_device):
            edge_device.run(steps.step, stolen=True).assert_pace()
        """
    )
    check(
        found,
        "COULD NOT BE JUDGED: step on *; not below half of the budget for seconds: 0.002857 of 0.004 s",
        "COULD NOT BE JUDGED: *; not below half of the budget for seconds: 0.002857 of 0.001 s",
        *["COULD NOT BE JUDGED: step on *: time stolen by the hypervisor 50.0%, at most 2% is *"] * 2,
        "=*= edgefl =*=",
        "  pixel-4 * OK",
        "    passed on head-room: below half of each budget of time, though time stolen",
        "  pixel-4 * NOT JUDGED",
        passed=2,
        failed=4,
    )


def test_without_budgets_nothing_is_timed_unless_the_test_reads_it(run: Run) -> None:
    found = run(
        """
        @pixel
        def test_counted(edge_device):
            assert edge_device.run(steps.step, stolen=True).timed is None

        @pixel
        def test_itself():
            pass

        @pixel
        def test_reads_memory(edge_device):
            result = edge_device.run(steps.step, mib=10, stolen=True)
            assert (result.peak_mib, result.repetitions) == (10.0, 9)

        @pixel
        def test_reads_the_time(edge_device):
            assert edge_device.run(steps.step, mib=10, stolen=True).seconds > 0
        """
    )
    check(
        found,
        "COULD NOT BE JUDGED: step on pixel-4: time stolen by the hypervisor *",
        "  pixel-4 * ~11 ms * OK",
        "  pixel-4 * ~11 ms * OK",
        "  pixel-4 * 9  OK",
        "  pixel-4 * 9  NOT JUDGED",
        passed=3,
        failed=1,
    )


def test_budgets_of_memory_and_sent_bytes_are_judged_without_the_time(run: Run) -> None:
    found = run(
        """
        @pytest.mark.edge_device("pixel-4", peak_mib=10.5, sent_mib=0.1)
        def test_below(edge_device):
            edge_device.run(steps.step, mib=10, stolen=True)

        @pytest.mark.edge_device("pixel-4", peak_mib=9.5)
        def test_over(edge_device):
            edge_device.run(steps.step, mib=10, stolen=True)

        @pytest.mark.edge_device("pixel-4", peak_mib=10.5)
        def test_reads_the_time(edge_device):
            assert edge_device.run(steps.step, mib=10, stolen=True).seconds > 0
        """
    )
    check(
        found,
        "step on pixel-4: peak_mib 10 MiB (95% sure: at most 10 MiB), 9.5 MiB are allowed",
        "COULD NOT BE JUDGED: step on pixel-4: time stolen by the hypervisor *",
        "  pixel-4 * OK",
        "  pixel-4 * FAIL",
        "  pixel-4 * NOT JUDGED",
        passed=1,
        failed=2,
    )


TIMED = ("--edgefl-compare", "--edgefl-timed")


def test_counts_are_saved_and_growth_fails_with_the_figures_that_grew(run: Run, baseline: Path) -> None:
    check(run(TEST, "--edgefl-save"), f"saved 1 in {baseline}", passed=1)
    saved = json.loads(baseline.read_text())
    assert saved["entries"] == []
    (entry,) = saved["counted"]
    (python,) = entry["python"].values()
    assert (entry["test"], entry["function"], python["instructions"]) == (
        "test_step[pixel-4]", "step", {"steps.step": 100},
    )  # fmt: skip
    run(TEST, "--edgefl-compare").assert_outcomes(passed=1)
    found = run(TEST.replace("mib=10", "mib=10, sent=5 << 20, work=101"), "--edgefl-compare")
    check(
        found,
        "REGRESSION: step on pixel-4: sent 0 → 5 MiB; Python bytecode instructions 100 → 101 (*; "
        "growth by more than 0% fails)",
        "  pixel-4 * REGRESSION",
        "    sent 0 → 5 MiB; *",
        failed=1,
    )
    assert "MiB (+" not in found.stdout.str()  # growth from zero has no percentage
    wide = TEST.replace("mib=10", "mib=10, work=101").replace('"pixel-4"', '"pixel-4", tolerance=1')
    run(wide, "--edgefl-compare").assert_outcomes(passed=1)


def test_a_baseline_is_found_with_and_without_groups_of_xdist(run: Run, pytester: pytest.Pytester) -> None:
    """With --dist=loadgroup, pytest-xdist adds the group of a test to its node id."""
    pytester.makeconftest(
        """
        def pytest_collection_modifyitems(items):
            for item in items:
                name = "_nodeid" if hasattr(item, "_nodeid") else "_id"  # until pytest 9.1 and from 9.2 on
                setattr(item, name, item.nodeid + "@group")
        """
    )
    check(run(TEST, "--edgefl-save"), passed=1)
    pytester.makeconftest("")
    check(run(TEST, "--edgefl-compare"), passed=1)


def test_an_inherited_test_is_a_method_of_its_own_class(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class may have other attributes than the class that defines the test."""
    given, found = device.count, list[str]()

    def count(process: Any, plan: MeasurementPlan, tell: Tell) -> CountedRun:
        found.append(plan.request.function.qualname)
        return given(process, plan, tell)

    monkeypatch.setattr("edgefl.regression.device.count", count)
    tests = """
    class Base:
        layers = 1

        def test_step(self):
            pass

    @pixel
    class TestSmall(Base):
        pass

    @pixel
    class TestBig(Base):
        layers = 2
    """
    check(run(tests), passed=2)
    assert found == ["TestSmall.test_step", "TestBig.test_step"]


def test_a_test_may_be_an_async_def_beside_pytest_asyncio(run: Run, pytester: pytest.Pytester) -> None:
    """When a test is called, pytest-asyncio replaces its function with one that awaits it."""
    pytester.makeconftest(
        """
        import functools
        import pytest

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_call(item):
            item.obj = functools.wraps(item.obj)(lambda: None)
            return (yield)
        """
    )
    check(run("@pixel\nasync def test_step():\n    pass\n"), passed=1)


def test_each_function_of_a_test_is_judged(run: Run, pytester: pytest.Pytester) -> None:
    """The verdict on the first one does not hide those on the others."""
    test = """
        @pixel
        def test_steps(edge_device):
            edge_device.run(steps.step, work={0}, varies={1})
            edge_device.run(steps.step, work={2})
        """
    run(test.format(100, False, 100), "--edgefl-save").assert_outcomes(passed=1)
    found = run(test.format(130, False, 130), "--edgefl-compare")
    check(found, "*: step", "  pixel-4 * REGRESSION", "*: step 2", "  pixel-4 * REGRESSION", failed=1)
    found = run(test.format(100, True, 130), "--edgefl-compare", "--edgefl-invalid=skip")
    check(found, "  pixel-4 * NOT JUDGED", "  pixel-4 * REGRESSION", failed=1)


def test_uncounted_figures_are_not_saved_and_not_judged(run: Run) -> None:
    long, instructions = TEST.replace("mib=10", "long=True"), "Python bytecode instructions"
    why = f"not saved for step of test_step?pixel-4?, because {instructions} were not counted: there are *"
    check(run(long, "--edgefl-save"), why, passed=1)
    why = f"COULD NOT BE JUDGED: step on pixel-4: {instructions}: not counted: there are too many *"
    check(run(long, "--edgefl-compare"), why, failed=1)
    varies = TEST.replace("mib=10", "varies=True")
    why = f"not saved for step of *, because two counts * differ: {instructions}"
    check(run(varies, "--edgefl-save"), why, passed=1)
    why = "    not compared, because two counts differed when *"
    check(run(varies, "--edgefl-compare"), "  pixel-4 * OK", why, passed=1)


def test_a_function_that_does_nothing_never_passes(run: Run) -> None:
    found = run(TEST.replace("mib=10", "mib=10, work=2"))
    check(found, "E * step on pixel-4: nothing was measured: *", "  pixel-4 * FAIL", failed=1)


def test_times_are_saved_and_growth_fails_only_with_edgefl_timed(run: Run, baseline: Path) -> None:
    run(TEST, "--edgefl-save", "--edgefl-timed").assert_outcomes(passed=1)
    (saved,) = json.loads(baseline.read_text())["entries"]
    assert (saved["test"], len(saved["cpu_s"])) == ("test_step[pixel-4]", 18)
    run(TEST, *TIMED).assert_outcomes(passed=1)
    more = TEST.replace("mib=10", "mib=30")
    grew = "peak memory +200.0% on pixel-4: 10 → 30 MiB"
    why = f"REGRESSION: step on pixel-4: {grew}, p = * (growth by more than 4 MiB fails)"
    check(run(more, *TIMED), why, failed=1)
    run(more, *TIMED, "--edgefl-tolerance=300").assert_outcomes(passed=1)
    found = run(more.replace('"pixel-4"', '"pixel-4", peak_mib=100'), "--edgefl-compare")
    check(found, f"    advice: {grew}*", passed=1)


def test_an_unfit_baseline_is_not_compared(run: Run, baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = f"COULD NOT BE JUDGED: step on pixel-4: no baseline in {baseline}; save one with --edgefl-*"
    check(run(TEST, "--edgefl-compare"), none, "  pixel-4 * – * NOT JUDGED", failed=1)

    run(TEST, "--edgefl-save", "--edgefl-timed").assert_outcomes(passed=1)
    found = run(TEST.replace('"pixel-4"', '"pixel-4", network="3g"'), *TIMED)
    check(found, "COULD NOT BE JUDGED: * the profile of pixel-4 or its network has changed *", failed=1)

    monkeypatch.setattr("edgefl.regression.baseline.fingerprint", lambda: "another")
    found = run(TEST.replace('"pixel-4"', '"pixel-4", peak_mib=1'), *TIMED)
    check(found, "*peak_mib * 1 MiB are allowed", failed=1)  # budgets apply on any host
    run(TEST, "--edgefl-compare").assert_outcomes(passed=1)  # and so do counts
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    why = "COULD NOT BE JUDGED: * another host (OPENBLAS_CORETYPE: not set there, Prescott here); *"
    check(run(TEST, *TIMED), why, failed=1)

    known = json.loads(baseline.read_text())
    later = {"counted": [{**known["counted"][0], "varying": ["of a later version"]}]}
    baseline.write_text(json.dumps(known | later))
    check(run(TEST, "--edgefl-compare"), "*two counts differed * of a later", passed=1)
    for kind in ("counted", "entries"):
        baseline.write_text(json.dumps(known | {kind: known[kind] * 2}))  # merged by hand
        both = f"{kind}[[]1] and {kind}[[]0] are both for step in test_step[[]pixel-4]; keep one of them"
        check(run(TEST, *TIMED), f"{baseline}: {both}", failed=1)

    baseline.write_text("{")
    for option in ("--edgefl-compare", "--edgefl-save"):
        why = f"{baseline}: not a baseline file: Input data was truncated"
        check(run(TEST, option), why, failed=1)
    assert baseline.read_text() == "{"
