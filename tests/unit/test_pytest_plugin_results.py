"""The plugin's output: progress, table, JUnit, JSON and page; errors in setup and teardown are failures."""

from __future__ import annotations

import contextlib
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import test_pytest_plugin as plugin
from test_pytest_plugin import TEST, Run, check

from edgefl.errors import ConfigError
from edgefl.regression import gate, progress, table
from edgefl.regression.against import AgainstBase, Comparison
from edgefl.regression.badge import colour
from edgefl.regression.checkout import Base
from edgefl.regression.markdown import markdown, workflow_commands
from edgefl.regression.session import Session
from edgefl.regression.sides import CallRequest
from edgefl.regression.verdict import Verdict

pytest_plugins = ["pytester"]

run, baseline = plugin.run, plugin.baseline

JSON = "--edgefl-json=r.json"


def loaded() -> gate.GateResults:
    """The results of the last session, which ran in this folder."""
    return gate.load_results(Path("r.json"))


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
    lines, now_s = list[str](), [100.0]
    reporter = SimpleNamespace(
        isatty=isatty,
        verbosity=0,
        ensure_newline=lambda: lines.append(""),
        write_line=lines.append,
        rewrite=lambda text, erase: lines.append(f"\r{text}"),
    )
    capture = SimpleNamespace(global_and_fixture_disabled=contextlib.nullcontext)
    # The case without a terminal has no capture manager either (-p no:capture).
    plugins = {"terminalreporter": reporter, "capturemanager": capture if isatty else None}
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(getplugin=plugins.get))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    tell = progress.Progress(config)
    tell("repetition 0")
    tell("")
    assert lines == []  # a short test shows nothing
    for after_s, text in (
        (0, "repetition 0"),
        (every_s, "repetition 1"),
        (0.1, "soon"),
        (every_s, "repetition 2"),
    ):
        now_s[0] += after_s
        tell(text)
    tell("")
    assert lines == shown


def test_a_session_whose_results_could_not_be_written_fails(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(TEST).ret == 0
    found = run(TEST, f"--edgefl-json={pytester.path}/steps.py/r.json")
    check(found, "NOT written: *steps.py*", passed=1)
    assert found.ret == pytest.ExitCode.TESTS_FAILED

    def save(path: Path, *entries: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(table, "save", save)
    found = run(TEST, "--edgefl-save")
    check(found, "NOT saved: *Permission denied*", passed=1)
    assert found.ret == pytest.ExitCode.TESTS_FAILED


def test_results_are_written_where_pytest_began(run: Run, pytester: pytest.Pytester) -> None:
    found = run(
        """
        import os

        @pixel
        def test_step(edge_device):
            edge_device.run(steps.step)
            os.mkdir("elsewhere")
            os.chdir("elsewhere")
        """,
        "--edgefl-json=r.json",
    )
    check(found, f"wrote {pytester.path / 'r.json'}", passed=1)
    assert gate.load_results(pytester.path / "r.json").rows


def test_each_parameter_has_one_row_with_its_value_in_all_outputs(
    run: Run, pytester: pytest.Pytester
) -> None:
    found = run(
        """
        @pixel
        @pytest.mark.parametrize("n", [1, 2])
        def test_step(edge_device, n):
            edge_device.run(steps.step)
            assert n == 1
        """,
        JSON,
        f"--edgefl-report={pytester.path / 'r.html'}",
    )
    names = [f"test_device.py::test_step n={n}: step" for n in (1, 2)]
    check(found, *names, passed=1, failed=1)
    shown = found.stdout.str().partition("= edgefl =")[2]
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("  pixel-4")] == ["OK", "FAIL"]
    results = loaded()
    assert [row.name for row in results.rows] == names
    assert all(f"`{name}`" in markdown(results) for name in names)
    page = (pytester.path / "r.html").read_text()
    assert all(f"test_step n={n}: step" in page.replace("<wbr>", "") for n in (1, 2))


def test_only_the_same_call_of_a_test_has_the_same_verdict(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison with the base does not depend on the device, so it is made once per distinct call."""
    calls: list[Any] = []

    def compare(_: object, label: str, call: CallRequest, *how: object) -> Comparison:
        calls.append(call.kwargs["mib"])
        return Comparison("main", missing=label)

    monkeypatch.setattr(AgainstBase, "compare", compare)
    base = Base("main", "0" * 40, pytester.path)
    monkeypatch.setattr("edgefl.regression.checkout.find_base", lambda *_: base)
    found = run(
        """
        class Case:
            def __init__(self, mib):
                self.mib = mib

            def __repr__(self):
                return "Case()"

        @pytest.mark.edge_device("pixel-4", "pi-4")
        @pytest.mark.parametrize("case", [Case(1), Case(2)])
        def test_case(edge_device, case):
            edge_device.run(steps.step, mib=case.mib)

        @pytest.mark.edge_device("pixel-4", "pi-4")
        def test_device(edge_device):
            edge_device.run(steps.step, mib=3 if edge_device.name == "pi-4" else 4)
        """,
        "--edgefl-against=main",
    )
    found.assert_outcomes(passed=6)
    assert sorted(calls) == [1, 2, 3, 4]


def test_a_test_with_a_failed_subtest_is_red_and_saves_nothing(run: Run, baseline: Path) -> None:
    pytest.importorskip("_pytest.subtests", reason="pytest before 9 has no subtests")
    test = """
    @pixel
    def test_step(edge_device, subtests):
        result = edge_device.run(steps.step, mib=10)
        with subtests.test():
            {fails}
    """
    for fails in ("assert result is None", "result.assert_budget(peak_mib=1)"):
        assert run(test.format(fails=fails), "--edgefl-save", JSON).ret == 1
        assert {row.outcome for row in loaded().rows} == {"FAIL"}
        assert not baseline.exists()


def test_a_regression_fails_although_the_test_expects_a_failure(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test expects an AssertionError because of its budget, not because of a regression."""
    grew = Verdict("FAIL", "time +9%", grew=("cpu_s",))
    monkeypatch.setattr(Session, "against_base", lambda *_: grew)
    base = Base("main", "0" * 40, pytester.path)
    monkeypatch.setattr("edgefl.regression.checkout.find_base", lambda *_: base)
    test = """
    @pixel
    def test_step(edge_device):
        with pytest.raises(AssertionError):
            edge_device.run(steps.step, mib=10, work={work}).assert_budget(peak_mib=1)
    """
    check(run(test.format(work=3)), "*nothing was measured: the function executes no more*", failed=1)
    found = run(test.format(work=100), "--edgefl-against=main", JSON)
    check(found, "*REGRESSION: step on pixel-4: time +9%", failed=1)
    assert [row.outcome for row in loaded().rows] == ["REGRESSION"]


def test_a_repeated_test_is_compared_again(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Comparison("main", unjudged="too noisy"), Comparison("main", missing="step")]
    monkeypatch.setattr(AgainstBase, "compare", lambda *_: found.pop(0))
    base = Base("main", "0" * 40, pytester.path)
    monkeypatch.setattr("edgefl.regression.checkout.find_base", lambda *_: base)
    pytester.makeconftest(RERUNS)
    assert run(TEST, "--edgefl-against=main").ret == 0
    assert found == []


def test_a_gate_without_comparisons_fails(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Base("main", "0" * 40, pytester.path)
    monkeypatch.setattr("edgefl.regression.checkout.find_base", lambda *_: base)
    found = run("def test_other(): pass", "--edgefl-against=main")
    assert found.ret == 1
    found.stdout.fnmatch_lines(["*no test with the mark edge_device ran, so nothing was compared"])


def test_a_base_that_is_not_found_is_a_usage_error_in_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_base = Mock(side_effect=ConfigError("no 'mian'"))
    monkeypatch.setattr("edgefl.regression.checkout.find_base", find_base)
    found = run("def test_other(): pass", "--edgefl-against=mian")
    assert find_base.call_args.args[0] == "mian"
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    assert found.stderr.str().strip() == "ERROR: no 'mian'"


def test_a_failure_that_a_test_expects_is_not_red(run: Run, baseline: Path) -> None:
    test = """
    @pixel
    def test_step(edge_device):
        with pytest.raises(AssertionError):
            edge_device.run(steps.step, mib=10).assert_budget(peak_mib=1)
    """
    found = run(test, "--edgefl-save", JSON)
    check(found, "  pixel-4 * OK", "    the test caught this: peak_mib 10 MiB *", passed=1)
    assert not loaded().red
    assert [one["test"] for one in json.loads(baseline.read_text())["counted"]] == ["test_step[pixel-4]"]
    run(test, "--edgefl-compare").assert_outcomes(passed=1)


def test_a_skipped_test_has_no_result_and_an_expected_failure_is_not_red(run: Run, baseline: Path) -> None:
    found = run(
        """
        import unittest
        pytestmark = pixel

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
        JSON,
    )
    check(found, "  pixel-4 * XFAIL", "    nothing was measured: *", passed=1, skipped=2, xfailed=2)
    results = loaded()
    shown = [(row.test.partition("::test_")[2], row.outcome) for row in results.rows]
    outcomes = {"step": "OK", "known": "XFAIL", "known_later": "XFAIL"}
    assert shown == [(f"{name}[pixel-4]", word) for name, word in outcomes.items()]
    assert not results.red
    assert (results.headline, colour(results)) == ("2 XFAIL, 1 OK", "brightgreen")
    assert list(workflow_commands(results)) == []
    saved = json.loads(baseline.read_text())["counted"]
    assert [entry["test"] for entry in saved] == ["test_step[pixel-4]"]


def test_errors_around_tests_are_red_in_all_outputs(
    run: Run, pytester: pytest.Pytester, baseline: Path
) -> None:
    pytester.makepyfile(test_broken="import no_such_module")
    found = run(
        """
        pytestmark = pixel

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
        JSON,
    )
    setup = ["test_device.py::test_setup", "  pixel-4 * FAIL", "    error in setup: ValueError: no disk"]
    check(found, *setup, passed=2, failed=1, errors=4)
    results = loaded()
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
    ("conftest", "stops", "code", "ended"),
    [
        ("", "pytest.exit('enough')", pytest.ExitCode.INTERRUPTED, "was interrupted"),
        ("", "pytest.exit('enough', returncode=1)", pytest.ExitCode.TESTS_FAILED, "was interrupted"),
        ("", "assert 0", pytest.ExitCode.TESTS_FAILED, "stopped early"),
        (
            "def pytest_runtest_logfinish():\n    raise OSError('disk full')\n",
            "",
            pytest.ExitCode.INTERNAL_ERROR,
            "had an internal error",
        ),
    ],
)
def test_an_interrupted_session_is_red(
    run: Run, pytester: pytest.Pytester, conftest: str, stops: str, code: pytest.ExitCode, ended: str
) -> None:
    pytester.makeconftest(conftest)
    test = TEST + f"\ndef test_stops():\n    {stops or 'pass'}\n" + "\ndef test_last():\n    pass\n"
    assert run(test, "-x", JSON).ret == code
    results = loaded()
    assert [(row.test, row.outcome, row.why) for row in results.rows] == [
        ("test_device.py::test_step[pixel-4]", "OK", results.rows[0].why),
        ("pytest", "FAIL", f"pytest {ended}, so results of other tests may be missing"),
    ]
    assert results.red


def test_listing_the_tests_writes_nothing(run: Run) -> None:
    assert run(TEST, "--collect-only", JSON).ret == 0
    assert not Path("r.json").exists()


RERUNS = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    *before, failed, _ = runtestprotocol(item, nextitem=nextitem, log=False)
    failed.outcome = "rerun"
    for report in (*before, failed):
        item.ihook.pytest_runtest_logreport(report=report)
    item._initrequest()
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
"""A conftest that runs each test twice, as pytest-rerunfailures does with a failed test."""


def test_only_the_last_attempt_of_a_test_counts(run: Run, pytester: pytest.Pytester) -> None:
    """`RERUNS` imitates pytest-rerunfailures, which runs a failed test once more."""
    junit = pytester.path / "junit.xml"
    pytester.makeconftest(RERUNS)
    found = run(
        """
        ATTEMPTS = []

        @pixel
        def test_flaky(edge_device):
            edge_device.run(steps.step)
            ATTEMPTS.append(0)
            assert len(ATTEMPTS) == 2
        """,
        JSON,
        f"--junitxml={junit}",
    )
    assert found.ret == 0
    assert [row.outcome for row in loaded().rows] == ["OK"]
    outcomes = [
        one.get("value") for one in ET.parse(junit).iter("property") if ".outcome" in one.get("name", "")
    ]
    assert outcomes == ["PASS"]


def test_a_subtest_has_no_results_of_an_earlier_attempt(run: Run, pytester: pytest.Pytester) -> None:
    pytest.importorskip("_pytest.subtests", reason="pytest before 9 has no subtests")
    pytester.makeconftest(RERUNS)
    found = run(
        """
        ATTEMPTS = []

        @pixel
        def test_flaky(edge_device, subtests):
            with subtests.test():
                edge_device.run(steps.step)
            ATTEMPTS.append(0)
            assert len(ATTEMPTS) == 2
        """,
        JSON,
    )
    assert found.ret == 0
    assert [row.outcome for row in loaded().rows] == ["OK"]


def test_errors_of_other_tests_show_no_table_or_plugin_frames(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture
        def broken():
            raise ValueError("no disk")
        """
    )
    found = run("def test_other(broken): pass")
    found.assert_outcomes(errors=1)
    assert "edgefl =" not in found.stdout.str()
    assert "edgefl/pytest_plugin.py" not in found.stdout.str()


def test_a_value_of_a_parameter_may_have_a_long_repr_or_one_that_fails(run: Run) -> None:
    found = run(
        """
        class Value:
            def __repr__(self):
                raise RuntimeError

        @pixel
        @pytest.mark.parametrize("value", [Value(), "long " * 100])
        def test_step(edge_device, value):
            edge_device.run(steps.step)
        """,
        JSON,
    )
    found.assert_outcomes(passed=2)
    first, second = (row.label for row in loaded().rows)
    assert first.endswith("value=<Value whose repr() raises RuntimeError>")
    assert len(second) < 250
