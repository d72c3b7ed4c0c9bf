"""Tests of the pytest plugin with real measurements: outcomes, and the files in docs/regression.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import scipy.stats  # noqa: F401
import torch  # noqa: F401

# After each inner session, pytester unloads the modules that it imported. Compiled modules cannot be loaded
# twice, so they are imported here, before the first session.
from edgefl.regression import device, gate, measurement, table  # noqa: F401

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("warm_measuring")

PAGE = Path(__file__).parents[2] / "docs" / "regression.md"
OPTIONS = (
    "-p",
    "edgefl.pytest_plugin",
    "--edgefl-time-scale=0",
    "--edgefl-repetitions=9",
    "--strict-markers",
)


@pytest.fixture(autouse=True)
def _figures_are_believed_under_any_load(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("WAITED_MAX", "STEAL_MAX", "REFERENCE_CV_MAX", "NOISY"):
        monkeypatch.setattr(measurement, limit, float("inf"))
    monkeypatch.setattr("edgefl.regression.measure.PRECISE", float("inf"))
    monkeypatch.setattr("edgefl.regression.verdict.LOAD_MAX", float("inf"))
    monkeypatch.setattr(device, "BASELINE_TIMES", 1)


def test_functions_run_on_their_devices_within_the_memory_of_these(pytester: pytest.Pytester) -> None:
    pytester.syspathinsert()
    pytester.makepyfile(
        steps="""
        import torch

        A = torch.ones(32, 64)

        def step(rounds=1, mib=0):
            held = b"x" * (mib << 20)
            for _ in range(rounds):
                torch.mm(A, A.T)
            del held

        def hungry():
            return b"x" * (1 << 30)
        """,
        test_device="""
        import pytest
        import steps
        from edgefl.errors import OutOfDeviceMemory

        @pytest.mark.edge_device("pixel-4")
        def test_step(edge_device):
            result = edge_device.run(steps.step, rounds=3, mib=10)
            assert (result.device, result.repetitions) == ("pixel-4", 9)
            assert 9 < result.peak_mib < 20
            assert result.seconds > 0

        @pytest.mark.edge_device("pi-4")
        @pytest.mark.parametrize("rounds", [3])
        def test_itself(rounds):
            assert rounds == 3
            steps.step(rounds)

        @pytest.mark.edge_device("pi-4")
        async def test_a_coroutine():
            steps.step(1)

        @pytest.mark.edge_device("pi-4")
        class TestSteps:
            rounds = 2

            def test_method(self):
                assert self.rounds == 2
                steps.step(self.rounds)

        @pytest.mark.edge_device("pixel-3a")
        def test_hungry(edge_device):
            edge_device.run(steps.hungry)

        @pytest.mark.edge_device("moto-g4")
        def test_a_test_may_expect_too_little_memory(edge_device):
            with pytest.raises(OutOfDeviceMemory):
                edge_device.run(steps.hungry)
        """,
    )
    found = pytester.runpytest_inprocess(*OPTIONS, "-Werror", "-v")
    found.assert_outcomes(passed=5, failed=1)
    found.stdout.fnmatch_lines(["*test_itself*pi-4*PASSED*"])
    found.stdout.fnmatch_lines(["E * out of memory on pixel-3a: 512 MiB allowed", "  pixel-3a * FAIL"])


def test_each_test_gives_its_environment_and_folder_to_its_function(pytester: pytest.Pytester) -> None:
    pytester.syspathinsert()
    pytester.makepyfile(
        steps="""
        import os
        from pathlib import Path

        def turns():
            return sum(1 for _ in range(int(os.environ["TURNS"]) * int(Path("turns").read_text())))
        """,
        test_device="""
        import pytest
        import steps

        @pytest.mark.edge_device("pixel-4")
        @pytest.mark.parametrize(("variable", "file"), [(1, 1), (1000, 1), (1, 1000)])
        def test_turns(edge_device, monkeypatch, tmp_path, variable, file):
            monkeypatch.setenv("TURNS", str(variable))
            monkeypatch.chdir(tmp_path)
            (tmp_path / "turns").write_text(str(file))
            executed = edge_device.run(steps.turns).counted.first.value("instructions")
            assert (executed > 1000) == (variable * file == 1000)

        @pytest.mark.edge_device("pixel-4")
        def test_later(edge_device, monkeypatch, tmp_path):
            (tmp_path / "turns").write_text("1")
            with monkeypatch.context() as changed:
                changed.setenv("TURNS", "1")
                changed.chdir(tmp_path)
                result = edge_device.run(steps.turns)
            assert result.peak_mib < 5  # is measured now
        """,
    )
    pytester.runpytest_inprocess(*OPTIONS).assert_outcomes(passed=4)


def test_a_function_may_skip_its_test_or_declare_that_it_fails(pytester: pytest.Pytester) -> None:
    pytester.syspathinsert()
    pytester.makepyfile(
        steps="""
        import unittest

        import pytest

        def skips():
            pytest.skip("no camera")

        def skips_as_unittest_does():
            raise unittest.SkipTest("no camera")

        def fails():
            pytest.xfail("known")
        """,
        test_device="""
        import pytest
        import steps

        pytestmark = pytest.mark.edge_device("pixel-4")

        @pytest.mark.parametrize("name", ["skips", "skips_as_unittest_does", "fails"])
        def test_step(edge_device, name):
            edge_device.run(getattr(steps, name))

        def test_itself():
            pytest.skip("no camera")
        """,
    )
    found = pytester.runpytest_inprocess(*OPTIONS, "-rsx", "--edgefl-save")
    found.assert_outcomes(skipped=3, xfailed=1)
    found.stdout.fnmatch_lines(["  pixel-4 * XFAIL", "    known", "SKIPPED * no camera", "XFAIL * known"])
    assert not (pytester.path / "edgefl-baselines").exists()
    again = pytester.runpytest_inprocess(*OPTIONS, "--runxfail", "-k", "fails")
    again.assert_outcomes(failed=1, deselected=3)


@pytest.mark.slow
def test_the_files_of_the_page_have_the_results_that_it_shows(pytester: pytest.Pytester) -> None:
    steps, test, slower, bigger = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    pytester.syspathinsert()
    pytester.makepyfile(test_training=test, steps=steps)
    saved = pytester.runpytest_inprocess(*OPTIONS, "--edgefl-save")
    saved.assert_outcomes(passed=1)
    saved.stdout.fnmatch_lines(["saved 1 in *edgefl-baselines/test_training.json"])
    pytester.runpytest_inprocess(*OPTIONS, "--edgefl-compare").assert_outcomes(passed=1)
    for changed, first in ((slower, "torch operations 92 → 608"), (bigger, "peak memory of tensors 5.2")):
        pytester.makepyfile(steps=f"{steps}\n{changed}")
        found = pytester.runpytest_inprocess(*OPTIONS, "--edgefl-compare")
        found.assert_outcomes(failed=1)
        found.stdout.fnmatch_lines([f"REGRESSION: train on moto-g4: {first}*"])


def test_other_tests_import_nothing_heavy_and_show_no_table(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_a():
            heavy = {"torch", "numpy", "scipy", "edgefl.regression"}
            assert not heavy & set(sys.modules)
        """
    )
    found = pytester.runpytest_subprocess(*OPTIONS[:2], "-Werror", "--strict-markers")
    found.assert_outcomes(passed=1)
    assert "edgefl =" not in found.stdout.str()
    found = pytester.runpytest_subprocess(*OPTIONS[:2], "-p", "no:terminal")
    assert found.ret == 0


WINDOWS = """
import os
import sys

import pytest

sys.modules.update(dict.fromkeys(("fcntl", "resource", "termios")))  # they cannot be imported
del os.fork

@pytest.hookimpl(tryfirst=True)
def pytest_configure():
    sys.platform = "win32"
"""


def test_where_there_is_no_linux_tests_on_devices_are_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        windows=WINDOWS,
        test_broken="import nothing_of_this_name",
        test_device="""
        import unittest

        import pytest

        @pytest.mark.edge_device("pixel-4", "moto-g4")
        def test_itself():
            raise AssertionError

        @pytest.mark.edge_device("pixel-4")
        class TestSteps:
            def test_step(self, edge_device):
                raise AssertionError

        @pytest.mark.edge_device("pixel-4")
        class TestCase(unittest.TestCase):
            def test_method(self):
                raise AssertionError

        @pytest.fixture(scope="module")
        def fails_after_the_last_test():
            yield
            raise OSError

        def test_other(fails_after_the_last_test):
            pass

        def test_without_a_mark(edge_device):
            raise AssertionError
        """,
    )
    options = ("-p", "windows", *OPTIONS, "--edgefl-save", "--continue-on-collection-errors")
    found = pytester.runpytest_subprocess(*options, "-rs")
    found.assert_outcomes(skipped=4, passed=1, errors=2)
    found.stdout.fnmatch_lines(["SKIPPED [[]4[]] *: edgefl needs Linux"])
    assert "INTERNALERROR" not in found.stdout.str() + found.stderr.str()
    found = pytester.runpytest_subprocess(*options, "--edgefl-json=r.json")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["ERROR: --edgefl-json: edgefl needs Linux"])


def test_under_xdist_the_main_process_saves_the_results_of_the_workers(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    pytester.makeconftest(
        f"""
        import sys

        def pytest_configure(config):
            if hasattr(config, "workerinput"):  # its figures are invented
                sys.path.append({str(Path(__file__).parents[1] / "unit")!r})
                from regression_samples import TRIAL, counted, repetition
                from edgefl.regression import device, measurement

                device.Session.process = lambda *_: None
                device.count = lambda *_: counted()
                device.measure = lambda _, plan, *how: measurement.Measurement(
                    plan, TRIAL, [repetition()] * plan.repetitions, 0.0
                )
        """
    )
    pytester.makepyfile(
        test_device="""
        import pytest

        @pytest.mark.edge_device("pixel-4", "moto-g4")
        def test_step():
            pass
        """
    )
    found = pytester.runpytest_inprocess(*OPTIONS, "-p", "xdist", "-n2", "--edgefl-save")
    found.assert_outcomes(passed=2)
    found.stdout.fnmatch_lines(["  moto-g4 * OK", "saved 2 in *"])


def test_a_test_whose_xdist_worker_crashed_is_failed(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    file = pytester.path / "r.json"
    pytester.makepyfile(
        test_device="""
        import os
        import pytest

        @pytest.mark.edge_device("pixel-4")
        def test_crash(edge_device):
            os._exit(3)
        """
    )
    found = pytester.runpytest_inprocess(*OPTIONS, "-p", "xdist", "-n1", f"--edgefl-json={file}")
    found.assert_outcomes(failed=1)
    (row,) = gate.load_results(file).rows
    assert (row.test, row.outcome, row.file) == (
        "test_device.py::test_crash[pixel-4]",
        "FAIL",
        "test_device.py",
    )
    assert row.why == "worker 'gw0' crashed while running 'test_device.py::test_crash[pixel-4]'"


LEAKS = """
import subprocess
import sys

CODE = "held = b'x' * (60 << 20); print(flush=True); input()"
HELD = []

def leaks(mib):
    if not HELD:
        HELD.append(b"x" * (mib << 20))

def starts_one_that_takes_60_mib():
    command = [sys.executable, "-I", "-S", "-c", CODE]
    HELD.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    HELD[-1].stdout.readline()
"""
LEAK_TEST = """
import pytest
import steps

@pytest.mark.edge_device("pixel-4")
def test_leak(edge_device):
    edge_device.run(steps.leaks, mib={mib})
"""
CHILD_TEST = """
import pytest
import steps

@pytest.mark.edge_device("pixel-4", peak_mib=30)
def test_child(edge_device):
    edge_device.run(steps.starts_one_that_takes_60_mib)
"""


def test_leaks_and_memory_of_children_are_found(pytester: pytest.Pytester) -> None:
    pytester.syspathinsert()
    pytester.makepyfile(steps=LEAKS, test_leak=LEAK_TEST.format(mib=0))
    pytester.runpytest_inprocess(*OPTIONS, "--edgefl-save", "--edgefl-timed").assert_outcomes(passed=1)
    pytester.makepyfile(test_leak=LEAK_TEST.format(mib=30), test_child=CHILD_TEST)
    found = pytester.runpytest_inprocess(*OPTIONS, "--edgefl-compare", "--edgefl-timed", "test_leak.py")
    found.assert_outcomes(failed=1)
    # on a busy host, the time of a call (half a microsecond) may have increased as well
    found.stdout.re_match_lines([r"REGRESSION: leaks on .*peak memory .* on pixel-4: .* → 3\d.* MiB"])
    found = pytester.runpytest_inprocess(*OPTIONS, "test_child.py")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*peak_mib [67]*, 30 MiB are allowed*"])
