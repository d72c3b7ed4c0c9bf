"""The pytest plugin as its users meet it: outcomes, baselines, the table, and every way to ask wrongly.

No function runs here: the measurements are made up. `tests/process/test_pytest_plugin.py` makes real ones.
"""

from __future__ import annotations

import contextlib
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import scipy.stats  # noqa: F401
from regression_samples import TRIAL, counted, repetition

# pytester forgets what a session inside this process imported; compiled modules do not load twice.
from edgefl.regression import device, gate, measurement, progress, table  # noqa: F401
from edgefl.regression.badge import colour
from edgefl.regression.counts import CountedRun
from edgefl.regression.markdown import markdown, workflow_commands
from edgefl.regression.measure import Tell
from edgefl.regression.measurement import Measurement, MeasurementPlan
from edgefl.regression.session import Session

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "edgefl.pytest_plugin")
"""Named, so that it is there also where edgefl was installed before it had one."""

RESULTS = [("step", "OK"), ("known", "XFAIL"), ("known_later", "XFAIL")]

Run = Callable[..., pytest.RunResult]

TEST = """
import pytest
import steps

@pytest.mark.edge_device("pixel-4")
def test_step(edge_device):
    edge_device.run(steps.step, mib=10)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in a folder with ``steps.py``, whose function takes as much memory as it is asked to."""

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
    pytester.makepyfile(steps="def step(*given, **named): pass")
    pytester.syspathinsert()

    def run(test: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_device=test)
        # This process has imported edgefl; pytest warns about that unless `python -m pytest` started it.
        warnings = ("-Werror", "-Wignore::pytest.PytestAssertRewriteWarning")
        options = (*PLUGIN, "--edgefl-repetitions=9", "--strict-markers", *warnings)
        return pytester.runpytest_inprocess(*options, *arguments)

    return run


@pytest.fixture
def baseline(pytester: pytest.Pytester) -> Path:
    return pytester.path / "edgefl-baselines" / "test_device.json"


def test_a_test_is_run_on_each_device_and_held_to_its_budgets(run: Run, pytester: pytest.Pytester) -> None:
    found = run(
        """
        import pytest
        import steps

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
    found.assert_outcomes(passed=4, failed=3)
    found.stdout.fnmatch_lines(
        [
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
        ]
    )
    assert "edgefl/regression" not in found.stdout.str()  # the traceback is the test's own
    shown = found.stdout.str().partition("= edgefl =")[2].splitlines()[1:7]
    assert max(map(len, shown)) <= 80
    properties = {
        item.get("name"): item.get("value") for item in ET.parse(pytester.path / "out.xml").iter("property")
    }
    assert properties["edgefl.pixel-4.step.outcome"] == "PASS"
    assert float(properties["edgefl.moto-g4.step.seconds"] or 0) > 0


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_what_cannot_be_believed_fails_or_is_skipped(run: Run, outcome: str, baseline: Path) -> None:
    stolen = TEST.replace("mib=10)", "stolen=True)\n    raise AssertionError('not reached')")
    options = ("--edgefl-invalid=skip", "-rs") if outcome == "skipped" else ()
    found = run(stolen, "--edgefl-save", "--edgefl-timed", *options)
    found.assert_outcomes(**{outcome: 1})
    found.stdout.fnmatch_lines(["*COULD NOT BE JUDGED: step on pixel-4: time stolen by the hypervisor *"])
    found.stdout.fnmatch_lines(["  pixel-4 * NOT JUDGED"])
    assert not baseline.exists()


def test_on_a_busy_host_a_budget_with_wide_head_room_passes_with_a_note_and_nothing_else_does(
    run: Run,
) -> None:
    found = run(
        """
        import pytest
        import steps

        pixel = pytest.mark.edge_device("pixel-4")

        @pytest.mark.edge_device("pixel-4", seconds=100, peak_mib=21)
        def test_wide(edge_device):
            edge_device.run(steps.step, mib=10, stolen=True)

        @pixel
        def test_wide_by_itself(edge_device):
            edge_device.run(steps.step, mib=10, stolen=True).assert_budget(seconds=100)

        @pytest.mark.edge_device("pixel-4", seconds=100, peak_mib=19)
        def test_narrow(edge_device):
            edge_device.run(steps.step, mib=10, stolen=True)

        @pixel
        def test_over(edge_device):
            edge_device.run(steps.step, mib=10, stolen=True).assert_budget(peak_mib=5)

        @pixel
        def test_no_budget(edge_device):
            edge_device.run(steps.step, stolen=True)

        @pixel
        def test_its_own_assertion(edge_device):
            assert edge_device.run(steps.step, stolen=True).seconds < 0

        @pixel
        def test_pace(edge_device):
            edge_device.run(steps.step, stolen=True).assert_pace()
        """
    )
    found.assert_outcomes(passed=2, failed=5)
    found.stdout.fnmatch_lines(
        [
            "COULD NOT BE JUDGED: step on *; not below half of the budget for peak_mib: 10 of 19 MiB",
            "COULD NOT BE JUDGED: *; not below half of the budget for peak_mib: 10 of 5 MiB",
            *["COULD NOT BE JUDGED: step on *: time stolen by the hypervisor 50.0%, at most 2% is *"] * 3,
            "=*= edgefl =*=",
            "  pixel-4 * OK",
            "    passed on head-room: below half of each budget, though time stolen by the",
            "  pixel-4 * NOT JUDGED",
        ]
    )


class _Reporter:
    verbosity = 0

    def __init__(self, isatty: bool) -> None:
        self.isatty = isatty
        self.lines: list[str] = []

    def ensure_newline(self) -> None:
        self.lines.append("")

    def write_line(self, text: str) -> None:
        self.lines.append(text)

    def rewrite(self, text: str, erase: bool) -> None:
        self.lines.append(f"\r{text}")


@pytest.mark.parametrize(
    ("isatty", "every_s", "shown"),
    [
        (True, 0.5, ["", "\rrepetition 1", "\rrepetition 2", "\r"]),
        (False, 10.0, ["", "edgefl: repetition 1", "edgefl: repetition 2"]),
    ],
)
def test_a_long_test_shows_its_progress(
    isatty: bool, every_s: float, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter, now_s = _Reporter(isatty), [100.0]
    capture = SimpleNamespace(global_and_fixture_disabled=contextlib.nullcontext)
    plugins = {"terminalreporter": reporter, "capturemanager": capture}
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(getplugin=plugins.get))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    tell = progress.Progress(config)
    tell("repetition 0")
    tell("")
    assert reporter.lines == []  # a short test shows nothing
    for after_s, text in (
        (0, "repetition 0"),
        (every_s, "repetition 1"),
        (0.1, "soon"),
        (every_s, "repetition 2"),
    ):
        now_s[0] += after_s
        tell(text)
    tell("")
    assert reporter.lines == shown


TIMED = ("--edgefl-compare", "--edgefl-timed")


def test_counts_are_saved_and_what_grew_fails_with_its_figure_first(run: Run, baseline: Path) -> None:
    found = run(TEST, "--edgefl-save")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines([f"saved 1 in {baseline}"])
    saved = json.loads(baseline.read_text())
    assert saved["entries"] == []
    (entry,) = saved["counted"]
    (python,) = entry["python"].values()
    assert (entry["test"], entry["function"], python["instructions"]) == (
        "test_step[pixel-4]", "step", {"steps.step": 100},
    )  # fmt: skip
    run(TEST, "--edgefl-compare").assert_outcomes(passed=1)
    found = run(TEST.replace("mib=10", "mib=10, sent=5 << 20, work=101"), "--edgefl-compare")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(
        [
            "REGRESSION: step on pixel-4: sent 0 → 5 MiB; Python bytecode instructions 100 → 101 (*; "
            "growth by more than 0% fails)",
            "  pixel-4 * REGRESSION",
            "    sent 0 → 5 MiB; *",
        ]
    )
    assert "MiB (+" not in found.stdout.str()  # no percentage of nothing
    wide = TEST.replace("mib=10", "mib=10, work=101").replace('"pixel-4"', '"pixel-4", tolerance=1')
    run(wide, "--edgefl-compare").assert_outcomes(passed=1)


def test_each_function_of_a_test_is_judged(run: Run, pytester: pytest.Pytester) -> None:
    """Whatever the verdict on the first one is, what the others say counts."""
    test = """
        import pytest
        import steps

        @pytest.mark.edge_device("pixel-4")
        def test_steps(edge_device):
            edge_device.run(steps.step, work={0}, varies={1})
            edge_device.run(steps.step, work={2})
        """
    run(test.format(100, False, 100), "--edgefl-save").assert_outcomes(passed=1)
    found = run(test.format(130, False, 130), "--edgefl-compare")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*: step", "  pixel-4 * REGRESSION", "*: step 2", "  pixel-4 * REGRESSION"])
    found = run(test.format(100, True, 130), "--edgefl-compare", "--edgefl-invalid=skip")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["  pixel-4 * NOT JUDGED", "  pixel-4 * REGRESSION"])


def test_a_session_whose_results_could_not_be_written_fails(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(TEST).ret == 0
    found = run(TEST, f"--edgefl-json={pytester.path}/steps.py/r.json")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["NOT written: *steps.py*"])
    assert found.ret == pytest.ExitCode.TESTS_FAILED

    def save(path: Path, *entries: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(table, "save", save)
    found = run(TEST, "--edgefl-save")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["NOT saved: *Permission denied*"])
    assert found.ret == pytest.ExitCode.TESTS_FAILED


def test_what_was_not_counted_is_not_saved_and_never_called_ok(run: Run) -> None:
    long, instructions = TEST.replace("mib=10", "long=True"), "Python bytecode instructions"
    found = run(long, "--edgefl-save")
    found.stdout.fnmatch_lines(
        [f"not saved for step of test_step?pixel-4?, because there are too many *: {instructions}; make *"]
    )
    found = run(long, "--edgefl-compare")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(
        [f"COULD NOT BE JUDGED: step on pixel-4: {instructions}: too many to be counted; make the *"]
    )
    varies = TEST.replace("mib=10", "varies=True")
    found = run(varies, "--edgefl-save")
    found.stdout.fnmatch_lines([f"not saved for step of *, because two counts * differ: {instructions}"])
    found = run(varies, "--edgefl-compare")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["  pixel-4 * OK", "    not compared, because two counts differed when *"])


def test_a_function_that_does_nothing_never_passes(run: Run) -> None:
    found = run(TEST.replace("mib=10", "mib=10, work=2"))
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["E * step on pixel-4: nothing was measured: *", "  pixel-4 * FAIL"])


def test_a_failed_test_has_one_row_and_parameters_are_in_the_table(run: Run) -> None:
    found = run(
        """
        import pytest
        import steps

        @pytest.mark.edge_device("pixel-4")
        @pytest.mark.parametrize("rounds", [1, 2])
        def test_step(edge_device, rounds):
            edge_device.run(steps.step)
            assert rounds == 1
        """,
        "--edgefl-save",
    )
    found.assert_outcomes(passed=1, failed=1)
    shown = found.stdout.str().partition("= edgefl =")[2]
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("  pixel-4")] == ["OK", "FAIL"]
    found.stdout.fnmatch_lines(
        ["test_device.py::test_step rounds=1: step", "test_device.py::test_step rounds=2: *"]
    )


def test_parameters_are_told_apart_wherever_results_are_shown(run: Run, pytester: pytest.Pytester) -> None:
    file = pytester.path / "r.json"
    found = run(
        """
        import pytest
        import steps

        @pytest.mark.edge_device("pixel-4")
        @pytest.mark.parametrize("n", [1, 2])
        def test_step(edge_device, n):
            edge_device.run(steps.step)
        """,
        f"--edgefl-json={file}",
        f"--edgefl-report={pytester.path / 'r.html'}",
    )
    found.assert_outcomes(passed=2)
    results = gate.load_results(file)
    names = [f"test_device.py::test_step n={n}: step" for n in (1, 2)]
    assert [row.name for row in results.rows] == names
    assert all(f"`{name}`" in markdown(results) for name in names)
    page = (pytester.path / "r.html").read_text()
    assert all(f"test_step n={n}: step" in page.replace("<wbr>", "") for n in (1, 2))


def test_a_skipped_test_has_no_result_and_one_that_should_fail_is_not_red(
    run: Run, pytester: pytest.Pytester, baseline: Path
) -> None:
    file = pytester.path / "r.json"
    found = run(
        """
        import unittest
        import pytest
        import steps

        pytestmark = pytest.mark.edge_device("pixel-4")

        def test_step(edge_device):
            edge_device.run(steps.step)

        def test_skips_later(edge_device):
            edge_device.run(steps.step)
            pytest.skip("not here")

        def test_skips_as_unittest_does(edge_device):
            edge_device.run(steps.step)
            raise unittest.SkipTest("not here")

        @pytest.mark.xfail(reason="known")
        def test_known(edge_device):
            edge_device.run(steps.step, work=1)

        def test_known_later(edge_device):
            edge_device.run(steps.step)
            pytest.xfail("known")
        """,
        "--edgefl-save",
        f"--edgefl-json={file}",
    )
    found.assert_outcomes(passed=1, skipped=2, xfailed=2)
    found.stdout.fnmatch_lines(["  pixel-4 * XFAIL", "    nothing was measured: *"])
    results = gate.load_results(file)
    shown = [(row.test.partition("::")[2], row.outcome) for row in results.rows]
    assert shown == [(f"test_{name}[pixel-4]", word) for name, word in RESULTS]
    assert not results.red
    assert (results.headline, colour(results)) == ("2 XFAIL, 1 OK", "brightgreen")
    assert list(workflow_commands(results)) == []
    saved = json.loads(baseline.read_text())["counted"]
    assert [entry["test"] for entry in saved] == ["test_step[pixel-4]"]


def test_errors_around_tests_are_red_wherever_results_are_shown(
    run: Run, pytester: pytest.Pytester, baseline: Path
) -> None:
    file = pytester.path / "r.json"
    pytester.makepyfile(test_broken="import no_such_module")
    found = run(
        """
        import pytest
        import steps

        pytestmark = pytest.mark.edge_device("pixel-4")

        def test_step(edge_device):
            edge_device.run(steps.step)

        @pytest.fixture
        def broken():
            raise ValueError("no disk")

        def test_setup(edge_device, broken):
            edge_device.run(steps.step)

        @pytest.mark.parametrize("n", [1])
        def test_unknown_fixture(edge_device, n, brokn):
            edge_device.run(steps.step)

        @pytest.fixture
        def leaves():
            yield
            raise ValueError("disk full")

        def test_teardown(edge_device, leaves):
            edge_device.run(steps.step)

        @pytest.mark.xfail(strict=True, reason="known")
        def test_mended(edge_device):
            edge_device.run(steps.step)
        """,
        "--continue-on-collection-errors",
        "--edgefl-save",
        f"--edgefl-json={file}",
    )
    found.assert_outcomes(passed=2, failed=1, errors=4)
    found.stdout.fnmatch_lines(
        ["test_device.py::test_setup", "  pixel-4 * FAIL", "    error in setup: ValueError: no disk"]
    )
    results = gate.load_results(file)
    assert [(row.name, row.device, row.why) for row in results.rows if row.red] == [
        ("test_device.py::test_setup", "pixel-4", "error in setup: ValueError: no disk"),
        (
            "test_device.py::test_unknown_fixture n=1",
            "pixel-4",
            "error in setup: fixture 'brokn' not found",
        ),
        ("test_device.py::test_teardown", "pixel-4", "error in teardown: ValueError: disk full"),
        ("test_device.py::test_mended", "pixel-4", "[XPASS(strict)] known"),
        (
            "test_broken.py",
            "–",
            "could not be collected: ModuleNotFoundError: No module named 'no_such_module'",
        ),
    ]
    assert (colour(results), results.headline) == ("red", "5 FAIL, 3 OK")
    saved = json.loads(baseline.read_text())["counted"]
    assert "test_mended[pixel-4]" not in [entry["test"] for entry in saved]


@pytest.mark.parametrize(
    ("conftest", "code", "ended"),
    [
        ("", pytest.ExitCode.INTERRUPTED, "was interrupted"),
        (
            "def pytest_runtest_logfinish():\n    raise OSError('disk full')\n",
            pytest.ExitCode.INTERNAL_ERROR,
            "had an internal error",
        ),
    ],
)
def test_a_session_that_was_broken_off_is_red(
    run: Run, pytester: pytest.Pytester, conftest: str, code: pytest.ExitCode, ended: str
) -> None:
    file = pytester.path / "r.json"
    pytester.makeconftest(conftest)
    test = TEST + "\ndef test_stops():\n    pytest.exit('enough')\n"
    assert run(test, f"--edgefl-json={file}").ret == code
    results = gate.load_results(file)
    assert [(row.test, row.outcome, row.why) for row in results.rows] == [
        ("test_device.py::test_step[pixel-4]", "OK", results.rows[0].why),
        ("pytest", "FAIL", f"pytest {ended}, so results of other tests may be missing"),
    ]
    assert results.red


def test_listing_the_tests_writes_nothing(run: Run, pytester: pytest.Pytester) -> None:
    file = pytester.path / "r.json"
    assert run(TEST, "--collect-only", f"--edgefl-json={file}").ret == 0
    assert not file.exists()


def test_only_the_last_attempt_of_a_test_counts(run: Run, pytester: pytest.Pytester) -> None:
    """pytest-rerunfailures, which this imitates, runs a failed test once more."""
    file, junit = pytester.path / "r.json", pytester.path / "junit.xml"
    pytester.makeconftest(
        """
        from _pytest.runner import runtestprotocol

        def pytest_runtest_protocol(item, nextitem):
            *before, failed, _ = runtestprotocol(item, nextitem=nextitem, log=False)
            failed.outcome = "rerun"
            item._initrequest()
            for report in (*before, failed, *runtestprotocol(item, nextitem=nextitem, log=False)):
                item.ihook.pytest_runtest_logreport(report=report)
            return True
        """
    )
    found = run(
        """
        import pytest
        import steps

        ATTEMPTS = []

        @pytest.mark.edge_device("pixel-4")
        def test_flaky(edge_device):
            edge_device.run(steps.step)
            ATTEMPTS.append(0)
            assert len(ATTEMPTS) == 2
        """,
        f"--edgefl-json={file}",
        f"--junitxml={junit}",
    )
    assert found.ret == 0
    assert [row.outcome for row in gate.load_results(file).rows] == ["OK"]
    outcomes = [
        one.get("value") for one in ET.parse(junit).iter("property") if ".outcome" in one.get("name", "")
    ]
    assert outcomes == ["PASS"]


def test_errors_of_other_tests_show_no_table(run: Run) -> None:
    found = run(
        """
        import pytest

        @pytest.fixture
        def broken():
            raise ValueError("no disk")

        def test_other(broken):
            pass
        """
    )
    found.assert_outcomes(errors=1)
    assert "edgefl =" not in found.stdout.str()


def test_times_are_saved_and_what_grew_fails_where_that_was_asked_for(run: Run, baseline: Path) -> None:
    run(TEST, "--edgefl-save", "--edgefl-timed").assert_outcomes(passed=1)
    (saved,) = json.loads(baseline.read_text())["entries"]
    assert (saved["test"], len(saved["cpu_s"])) == ("test_step[pixel-4]", 18)
    run(TEST, *TIMED).assert_outcomes(passed=1)
    more = TEST.replace("mib=10", "mib=30")
    found = run(more, *TIMED)
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(
        [
            "REGRESSION: step on pixel-4: peak memory +200.0% on pixel-4: 10 → 30 MiB, p = * "
            "(growth by more than 4 MiB fails)"
        ]
    )
    run(more, *TIMED, "--edgefl-tolerance=300").assert_outcomes(passed=1)
    found = run(more.replace('"pixel-4"', '"pixel-4", peak_mib=100'), "--edgefl-compare")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["    advice: peak memory +200.0% on pixel-4: 10 → 30 MiB*"])


def test_an_unfit_baseline_is_no_verdict(run: Run, baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = f"COULD NOT BE JUDGED: step on pixel-4: no baseline in {baseline}; save one with --edgefl-*"
    found = run(TEST, "--edgefl-compare")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines([none, "  pixel-4 * – * NOT JUDGED"])

    run(TEST, "--edgefl-save", "--edgefl-timed").assert_outcomes(passed=1)
    found = run(TEST.replace('"pixel-4"', '"pixel-4", network="3g"'), *TIMED)
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["COULD NOT BE JUDGED: * the profile of pixel-4 or its network has changed *"])

    monkeypatch.setattr("edgefl.regression.baseline.fingerprint", lambda: "another")
    found = run(TEST.replace('"pixel-4"', '"pixel-4", peak_mib=1'), *TIMED)
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*peak_mib * 1 MiB are allowed"])  # a budget holds on any host
    run(TEST, "--edgefl-compare").assert_outcomes(passed=1)  # and so do counts
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    found = run(TEST, *TIMED)
    found.stdout.fnmatch_lines(
        ["COULD NOT BE JUDGED: * another host (OPENBLAS_CORETYPE: not set there, Prescott here); *"]
    )

    known = json.loads(baseline.read_text())
    baseline.write_text(
        json.dumps(known | {"counted": [{**known["counted"][0], "varying": ["of a later version"]}]})
    )
    run(TEST, "--edgefl-compare").stdout.fnmatch_lines(["*two counts differed * of a later"])
    for kind in ("counted", "entries"):
        baseline.write_text(json.dumps(known | {kind: known[kind] * 2}))  # merged by hand
        found = run(TEST, "--edgefl-compare", "--edgefl-timed")
        found.assert_outcomes(failed=1)
        both = f"{kind}[[]1] and {kind}[[]0] are both of step in test_step[[]pixel-4]; keep one of them"
        found.stdout.fnmatch_lines([f"{baseline}: {both}"])

    baseline.write_text("{")
    for option in ("--edgefl-compare", "--edgefl-save"):
        found = run(TEST, option)
        found.assert_outcomes(failed=1)
        found.stdout.fnmatch_lines([f"{baseline}: not a file of baselines: Input data was truncated"])
    assert baseline.read_text() == "{"


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("tolerance", "much", "a number of at least 0"),
        ("tolerance", "-1", "a number of at least 0"),
        ("time-scale", "nan", "a number of at least 0"),
        ("repetitions", "8", "a whole number of at least 9"),
        ("repetitions", "9.5", "a whole number of at least 9"),
        ("limit", "0", "a number of at least 1"),
    ],
)
def test_a_wrong_option_is_a_usage_error(run: Run, option: str, value: str, says: str) -> None:
    found = run("def test_a(): pass", f"--edgefl-{option}={value}")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines([f"ERROR: --edgefl-{option}: must be {says} (got '{value}')"])


def test_a_typing_mistake_is_one_line_before_anything_runs(run: Run) -> None:
    found = run("import pytest\n@pytest.mark.edge_device('pixel3a')\ndef test_a(): raise AssertionError\n")
    found.assert_outcomes(errors=1)
    says = "device profile 'pixel3a' not found; did you mean 'pixel-3a'? available: *"
    found.stdout.fnmatch_lines([f"test_device.py::test_a: {says}"])
    assert "Traceback" not in found.stdout.str()


TWO = """
import pytest
import steps

@pytest.mark.edge_device("pixel-4", seconds=1000)
@pytest.mark.edge_device("moto-g4")
def test_two(edge_device):
    edge_device.run(steps.step)
"""
TWO_OF_A_CLASS = """
import pytest

class TestTwo:
    pytestmark = [pytest.mark.edge_device("moto-g4"), pytest.mark.edge_device("pixel-4")]

    def test_two(self):
        pass
"""


@pytest.mark.parametrize("test", [TWO, TWO_OF_A_CLASS])
def test_one_of_two_marks_is_never_ignored(run: Run, test: str) -> None:
    found = run(test)
    found.assert_outcomes(errors=1)
    found.stdout.fnmatch_lines(
        [
            "test_device.py::*test_two has 2 edge_device marks, but only one is allowed; name all devices in "
            'one mark, edge_device("moto-g4", "pixel-4"), or write a test for each mark'
        ]
    )


def test_a_closer_mark_counts_instead_of_those_around_it(run: Run) -> None:
    found = run(
        """
        import pytest
        import steps

        pytestmark = pytest.mark.edge_device("pi-4")

        @pytest.mark.edge_device("pixel-3a")
        class TestSteps:
            def test_of_the_class(self, edge_device):
                assert edge_device.run(steps.step).device == "pixel-3a"

            @pytest.mark.edge_device("moto-g4")
            def test_its_own(self, edge_device):
                assert edge_device.run(steps.step).device == "moto-g4"

        def test_of_the_module(edge_device):
            assert edge_device.run(steps.step).device == "pi-4"
        """
    )
    found.assert_outcomes(passed=3)


def test_a_test_that_its_mark_cannot_reach_is_an_error(run: Run) -> None:
    found = run(
        """
        import unittest
        import pytest

        @pytest.mark.edge_device("moto-g4")
        class TestCase(unittest.TestCase):
            def test_a_method(self):
                pass

        class TestOther(unittest.TestCase):
            @pytest.mark.edge_device("moto-g4")
            def test_a_marked_method(self):
                pass

            @pytest.mark.edge_device("moto-g4")
            @pytest.mark.skip("not today")
            def test_skipped(self):
                pass

            def test_unmarked(self):
                pass

        @pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.edge_device("moto-g4")), 2])
        def test_late(n):
            pass
        """
    )
    found.assert_outcomes(errors=3, passed=2, skipped=1)
    case = "edge_device: a method of a unittest.TestCase cannot run on devices; use a function or a *"
    late = "edge_device: the mark was added too late; write @pytest.mark.edge_device(…) above the function"
    found.stdout.fnmatch_lines([case, case, late])


def test_what_cannot_be_handed_over_or_runs_nothing_never_passes(run: Run) -> None:
    found = run(
        """
        import pytest
        import steps

        pixel = pytest.mark.edge_device("pixel-3a")

        def test_no_mark(edge_device):
            pass

        @pixel
        def test_lambda(edge_device):
            edge_device.run(lambda: 1)

        @pixel
        def test_argument(edge_device):
            edge_device.run(steps.step, object())

        class Net:
            def __init__(self, layers):
                pass

            def step(self):
                pass

        @pixel
        def test_method(edge_device):
            edge_device.run(Net.step)

        @pixel
        async def test_with_the_fixture(edge_device):
            edge_device.run(steps.step)

        @pytest.mark.edge_device("pixel-3a", seconds=1e-9)
        def test_forgets(edge_device):
            steps.step()

        @pixel
        def test_skips(edge_device):
            pytest.skip("not today")
        """
    )
    found.assert_outcomes(failed=5, errors=1, skipped=1)
    found.stdout.fnmatch_lines(
        [
            'edge_device: the test names no device; mark it: @pytest.mark.edge_device("pixel-3a")',
            "the function must be defined at module level, *(got a lambda)",
            "argument 0 must be a JSON value, *(got a object); create anything else in setup=",
            "the function must be *(got *Net.step, a method, and no object can be made for it without *)",
            "test_with_the_fixture?pixel-3a? is an async def, which pytest does not run by itself: *",
            "edge_device: nothing was run; call edge_device.run(function, …), or leave the fixture out: *",
        ]
    )


def test_a_module_may_hold_what_has_any_attribute(run: Run) -> None:
    run("from unittest.mock import call\n" + TEST).assert_outcomes(passed=1)
