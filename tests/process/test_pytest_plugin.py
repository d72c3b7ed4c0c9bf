"""The pytest plugin as its users meet it: outcomes, baselines, the table, and every way to ask wrongly."""

# ruff: noqa: F811 (a fixture is imported to be an argument)

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from edgefl.regression import measurement

from .plugin_runs import PLUGIN, Run, run  # noqa: F401

pytest_plugins = ["pytester"]

UNCHANGED = """
import pytest
import steps

@pytest.mark.edge_device("pixel-4")
def test_step(edge_device):
    edge_device.run(steps.step, rounds=20, mib=10)
"""


def baseline_file(pytester: pytest.Pytester) -> Path:
    return pytester.path / "edgefl-baselines" / "test_device.json"


def test_within_its_budgets_a_test_passes_on_each_device(run: Run, pytester: pytest.Pytester) -> None:
    found = run(
        """
        import pytest
        import steps

        @pytest.mark.edge_device("pixel-4", "moto-g4")
        def test_step(edge_device):
            result = edge_device.run(steps.step, rounds=3, mib=10)
            assert result.device == edge_device.name
            assert result.repetitions == 9
            assert 9 < result.peak_mib < 20
            assert result.seconds > 0
            result.assert_budget(seconds=1000, peak_mib=100, sent_mib=0, joules=10000)
        """,
        "-v",
        "--junitxml=out.xml",
    )
    found.assert_outcomes(passed=2)
    found.stdout.fnmatch_lines(
        [
            "*test_step?pixel-4? PASSED*",
            "*test_step?moto-g4? PASSED*",
            "=*= edgefl =*=",
            "*device  host CPU    MiB  sent MiB        J   n",
            "test_device.py::test_step: step",
            "  pixel-4 * 9  PASS",
            "  moto-g4 * 9  PASS",
        ]
    )
    shown = found.stdout.str().partition("= edgefl =")[2].splitlines()[1:6]
    assert max(map(len, shown)) <= 80
    properties = {
        item.get("name"): item.get("value") for item in ET.parse(pytester.path / "out.xml").iter("property")
    }
    assert properties["edgefl.pixel-4.step.outcome"] == "PASS"
    assert float(properties["edgefl.moto-g4.step.seconds"] or 0) > 0


def test_over_a_budget_it_fails_and_says_by_how_much(run: Run) -> None:
    found = run(
        """
        import pytest
        import steps

        @pytest.mark.edge_device("pixel-3a")
        def test_step(edge_device):
            edge_device.run(steps.step, mib=30).assert_budget(seconds=1000, peak_mib=20)

        @pytest.mark.edge_device("pixel-3a", peak_mib=20)
        def test_by_the_mark(edge_device):
            edge_device.run(steps.step, mib=30)

        @pytest.mark.edge_device("pixel-3a", seconds=1e-9)
        def test_itself():
            steps.step()
        """
    )
    found.assert_outcomes(failed=3)
    found.stdout.fnmatch_lines(
        [
            "E * step on pixel-3a: peak_mib * MiB (95% sure: at most * MiB), 20 MiB are allowed",
            "step on pixel-3a: peak_mib *",
            "test_itself on pixel-3a: seconds * s are allowed",
            "test_device.py::test_step: step",
            "  pixel-3a * FAIL",
            "test_device.py::test_itself",
        ]
    )
    assert "edgefl/regression" not in found.stdout.str()  # the traceback is the test's own


def test_out_of_the_devices_memory_it_fails(run: Run) -> None:
    found = run(
        """
        import pytest
        import steps

        @pytest.mark.edge_device("pixel-3a")
        def test_hungry(edge_device):
            edge_device.run(steps.hungry)
        """
    )
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["E * out of memory on pixel-3a: 512 MiB allowed", "  pixel-3a * FAIL"])


INVALID = """
import pytest
import steps

@pytest.mark.edge_device("pixel-3a")
def test_step(edge_device):
    edge_device.run(steps.step)
    raise AssertionError("not reached")
"""


def test_what_cannot_be_believed_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "WAITED_MAX", -1.0)
    found = run(INVALID)
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(
        ["INVALID: step on pixel-3a: the host is overloaded: *", "  pixel-3a * INVALID"]
    )


def test_or_is_skipped_where_that_is_asked_for_and_never_passes(
    run: Run, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    monkeypatch.setattr(measurement, "WAITED_MAX", -1.0)
    found = run(INVALID, "--edgefl-invalid=skip", "-rs", "--edgefl-save")
    found.assert_outcomes(skipped=1)
    found.stdout.fnmatch_lines(["  pixel-3a * INVALID", "SKIPPED*INVALID: step on pixel-3a: *"])
    assert not baseline_file(pytester).exists()


def test_a_baseline_is_saved_and_what_grew_fails(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = baseline_file(pytester)
    found = run(UNCHANGED, "--edgefl-save")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines([f"saved 1 in {file}"])
    saved = json.loads(file.read_text())
    assert [one["test"] for one in saved["entries"]] == ["test_step[pixel-4]"]

    # As slow as the code is, its time must not fail on a busy host: what is looked at here is memory.
    monkeypatch.setattr("edgefl.regression.baseline.LOAD_MAX", 1000.0)
    wide = ("--edgefl-compare", "--edgefl-tolerance=99")
    run(UNCHANGED, *wide).assert_outcomes(passed=1)
    found = run(UNCHANGED.replace("rounds=20", "rounds=40").replace("mib=10", "mib=30"), *wide)
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(
        [
            "step changed since its baseline: counted FLOP +100.0% *peak memory +*% on pixel-4: "
            "* → * MiB, p = * fails)"
        ]
    )


def test_a_baseline_that_is_not_fit_to_compare_with_is_no_verdict(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = baseline_file(pytester)
    with monkeypatch.context() as before_anything_is_measured:
        before_anything_is_measured.delattr("edgefl.regression.device.measure")
        found = run(UNCHANGED, "--edgefl-compare")
        found.assert_outcomes(failed=1)
        none = f"INVALID: step on pixel-4: no baseline in {file}; save one with --edgefl-*"
        found.stdout.fnmatch_lines([none, "  pixel-4 * – * INVALID"])

    run(UNCHANGED, "--edgefl-save").assert_outcomes(passed=1)
    found = run(UNCHANGED.replace('"pixel-4"', '"pixel-4", network="3g"'), "--edgefl-compare")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["INVALID: * the profile of pixel-4 or its network has changed since*"])

    monkeypatch.setattr("edgefl.regression.baseline.fingerprint", lambda: "another")
    found = run(UNCHANGED.replace('"pixel-4"', '"pixel-4", peak_mib=1'), "--edgefl-compare")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*peak_mib * 1 MiB are allowed"])  # a budget holds on any host
    monkeypatch.delattr("edgefl.regression.device.measure")
    found = run(UNCHANGED, "--edgefl-compare")
    found.stdout.fnmatch_lines(["INVALID: *is of another host or software (torch*"])

    file.write_text("{")
    for option in ("--edgefl-compare", "--edgefl-save"):
        found = run(UNCHANGED, option)
        found.assert_outcomes(failed=1)
        found.stdout.fnmatch_lines([f"{file}: not a file of baselines: Input data was truncated"])
    assert file.read_text() == "{"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--edgefl-tolerance=much", "--edgefl-tolerance: a number of at least 0 (got 'much')"),
        ("--edgefl-tolerance=-1", "--edgefl-tolerance: a number of at least 0 (got '-1')"),
        ("--edgefl-time-scale=nan", "--edgefl-time-scale: a number of at least 0 (got 'nan')"),
        ("--edgefl-repetitions=8", "--edgefl-repetitions: a whole number of at least 9 (got '8')"),
        ("--edgefl-repetitions=9.5", "--edgefl-repetitions: a whole number of at least 9 (got '9.5')"),
    ],
)
def test_a_wrong_option_is_a_usage_error(run: Run, option: str, says: str) -> None:
    found = run("def test_a(): pass", option)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines([f"ERROR: {says}"])


def test_other_tests_notice_nothing(pytester: pytest.Pytester) -> None:
    """In a process of its own: neither torch nor anything that measures is imported, no table is shown."""
    pytester.makepyfile(
        """
        import sys

        def test_a():
            heavy = {"torch", "numpy", "scipy", "edgefl.regression"}
            assert not heavy & set(sys.modules)
        """
    )
    found = pytester.runpytest_subprocess(*PLUGIN, "-Werror", "--strict-markers")
    found.assert_outcomes(passed=1)
    assert "edgefl =" not in found.stdout.str()
    found = pytester.runpytest_subprocess(*PLUGIN, "-p", "no:terminal")
    assert found.ret == 0


def test_the_options_and_the_mark_explain_themselves(pytester: pytest.Pytester) -> None:
    found = pytester.runpytest_inprocess(*PLUGIN, "--help")
    found.stdout.fnmatch_lines(
        ["edgefl: tests on emulated devices:", "*--edgefl-save*", "*--edgefl-invalid*"]
    )
    found = pytester.runpytest_inprocess(*PLUGIN, "--markers")
    found.stdout.fnmatch_lines(["@pytest.mark.edge_device(?profiles*"])


def test_a_fixture_of_ones_own_may_use_the_device(run: Run) -> None:
    found = run(
        """
        import pytest
        import steps

        @pytest.fixture
        def phone(edge_device):
            return edge_device

        @pytest.mark.edge_device("pixel-3a")
        @pytest.mark.parametrize("rounds", [1, 2])
        def test_step(phone, rounds):
            assert phone.run(steps.step, rounds=rounds).outcome == "PASS"

        @pytest.mark.edge_device("pi-4")
        @pytest.mark.parametrize("rounds", [3])
        def test_itself(rounds):
            assert rounds == 3
            steps.step(rounds)
        """,
        "-v",
    )
    found.assert_outcomes(passed=3)
    found.stdout.fnmatch_lines(["*test_itself*pi-4*PASSED*"])


def test_under_xdist_workers_report_and_one_process_saves(run: Run, pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    found = run(UNCHANGED.replace('"pixel-4"', '"pixel-4", "moto-g4"'), "-p", "xdist", "-n2", "--edgefl-save")
    found.assert_outcomes(passed=2)
    found.stdout.fnmatch_lines(["  moto-g4 * PASS", "saved 2 in *"])
