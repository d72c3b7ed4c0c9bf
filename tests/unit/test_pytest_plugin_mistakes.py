"""Wrong options and marks, and functions that cannot be handed over: one line each, and never a pass."""

from __future__ import annotations

import pytest
import test_pytest_plugin as plugin
from test_pytest_plugin import TEST, Run

pytest_plugins = ["pytester"]

run = plugin.run


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("tolerance", "much", "a number of at least 0"),
        ("tolerance", "-1", "a number of at least 0"),
        ("time-scale", "nan", "a number of at least 0"),
        ("repetitions", "8", "a whole number of at least 9"),
        ("repetitions", "9.5", "a whole number of at least 9"),
        ("limit", "0", "a number of at least 1"),
        ("json", "", "the name of a file"),
        ("report", "", "the name of a file"),
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
