"""Wrong options, marks and functions: each gives a one-line error, and the test does not pass."""

from __future__ import annotations

import runpy
from pathlib import Path

import msgspec
import pytest
import test_pytest_plugin as plugin
from test_pytest_plugin import TEST, Run, check

import edgefl
from edgefl.regression.device import MarkKeys

pytest_plugins = ["pytester"]

run = plugin.run


@pytest.mark.parametrize(
    ("option", "value", "message"),
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
def test_a_wrong_option_is_a_usage_error(run: Run, option: str, value: str, message: str) -> None:
    found = run("def test_a(): pass", f"--edgefl-{option}={value}")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines([f"ERROR: --edgefl-{option}: must be {message} (got '{value}')"])


def test_a_typing_mistake_is_one_line_before_anything_runs(run: Run) -> None:
    found = run("@pytest.mark.edge_device('pixel3a')\ndef test_a(): raise AssertionError\n")
    message = "device profile 'pixel3a' not found; did you mean 'pixel-3a'? available: *"
    check(found, f"test_device.py::test_a: {message}", errors=1)
    assert "Traceback" not in found.stdout.str()


TWO = """
@pytest.mark.edge_device("pixel-4", seconds=1000)
@pytest.mark.edge_device("moto-g4")
def test_two(edge_device):
    edge_device.run(steps.step)
"""
TWO_OF_A_CLASS = """
class TestTwo:
    pytestmark = [pytest.mark.edge_device("moto-g4"), pytest.mark.edge_device("pixel-4")]

    def test_two(self):
        pass
"""


@pytest.mark.parametrize("test", [TWO, TWO_OF_A_CLASS])
def test_two_marks_of_one_test_are_an_error(run: Run, test: str) -> None:
    why = "test_device.py::*test_two has 2 edge_device marks, but only one is allowed; name all devices in "
    why += 'one mark, edge_device("moto-g4", "pixel-4"), or write a test for each mark'
    check(run(test), why, errors=1)


def test_the_mark_of_a_test_replaces_those_of_its_class_and_module(run: Run) -> None:
    found = run(
        """
        pytestmark = pytest.mark.edge_device("pi-4")

        @pytest.mark.edge_device("pixel-3a")
        class TestSteps:
            def test_of_the_class(self, edge_device):
                assert edge_device.run(steps.step).device == "pixel-3a"

            @pytest.mark.edge_device("moto-g4")
            def test_its_own(self, edge_device):
                assert edge_device.run(steps.step).device == "moto-g4"

        class TestInherited(TestSteps):
            pass

        @pytest.mark.edge_device("pixel-4")
        class TestOther(TestSteps):
            def test_of_the_class(self, edge_device):
                assert edge_device.run(steps.step).device == "pixel-4"

        def test_of_the_module(edge_device):
            assert edge_device.run(steps.step).device == "pi-4"
        """
    )
    found.assert_outcomes(passed=7)


def test_the_mark_of_a_module_holds_for_its_tests_and_changes_nothing_else(run: Run) -> None:
    found = run(
        """
        from steps import step

        pytestmark = pytest.mark.edge_device("pi-4")

        def test_the_helpers(edge_device):
            edge_device.run(step)
            assert not hasattr(step, "pytestmark")

        class TestSteps:
            @staticmethod
            def test_itself():
                pass
        """
    )
    found.assert_outcomes(passed=2)


def test_a_mark_that_cannot_take_effect_is_an_error(run: Run) -> None:
    found = run(
        """
        import unittest
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

        @pixel
        @pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.edge_device("moto-g4")), 2])
        def test_late_for_one_value(n):
            pass
        """
    )
    case = "edge_device: a method of a unittest.TestCase cannot run on devices; use a function or a *"
    late = "edge_device: the mark was added too late; write @pytest.mark.edge_device(…) above the function"
    check(found, case, case, late, late, errors=4, passed=3, skipped=1)


def test_a_test_that_runs_no_function_or_an_unsuitable_one_never_passes(run: Run) -> None:
    found = run(
        """
        def test_no_mark(edge_device):
            pass

        @pytest.mark.parametrize("edge_device", ["pixel-4"], indirect=True)
        def test_no_mark_but_a_name(edge_device):
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

        @pytest.mark.edge_device("pixel-4", seconds=1e-9)
        def test_forgets(edge_device):
            steps.step()

        @pixel
        def test_skips(edge_device):
            pytest.skip("not today")
        """
    )
    unnamed = 'edge_device: the test names no device; mark it: @pytest.mark.edge_device("pixel-3a")'
    check(
        found,
        unnamed,
        unnamed,
        "the function must be defined at module level, *(got a lambda)",
        "argument 0 must be a JSON value, *(got a object); create anything else in setup=",
        "the function must be *(got *Net.step, a method whose class cannot be instantiated without *)",
        "test_with_the_fixture?pixel-4? is an async def, which pytest does not run by itself: *",
        "edge_device: nothing was run; call edge_device.run(function, …), or omit the fixture, so *",
        failed=5,
        errors=2,
        skipped=1,
    )


LAZY = """
class Settings:
    @property
    def __class__(self):
        raise RuntimeError("not configured")

settings = Settings()

def test_other():
    pass

test_other.pytestmark = pytest.mark.filterwarnings("ignore")  # not in a list
"""


def test_a_module_may_have_any_objects(run: Run) -> None:
    run("from unittest.mock import call\n" + LAZY + TEST).assert_outcomes(passed=2)


def test_only_the_class_methods_of_a_marked_class_are_refused(run: Run) -> None:
    found = run(
        """
        @pixel
        class TestSteps:
            @classmethod
            def test_a(cls):
                pass

            def test_b(self):
                pass
        """
    )
    check(found, "the function must be defined at module level, *", passed=1, failed=1)


def test_a_users_own_fixture_edge_device_is_an_error_only_in_marked_tests(run: Run) -> None:
    found = run(
        """
        @pytest.fixture
        def edge_device():
            return "a board in our laboratory"

        def test_other(edge_device):
            assert not edge_device

        @pixel
        def test_marked(edge_device):
            pass
        """
    )
    check(found, "edge_device: a fixture of your own with this name replaces edgefl's, *", failed=2)
    assert "test_other" not in found.stdout.str().partition("= edgefl =")[2].partition("= short")[0]


def test_an_old_pluggy_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest, "hookimpl", lambda function=None, hookwrapper=False: function)
    file = Path(edgefl.__file__).with_name("pytest_plugin.py")
    with pytest.raises(pytest.UsageError, match=r"needs pluggy 1\.2 .* -p no:edgefl\.pytest_plugin"):
        runpy.run_path(str(file))


def test_the_list_of_marks_names_each_option(run: Run) -> None:
    shown = run("def test_a(): pass", "--markers").stdout.str()
    assert [one for one in msgspec.structs.fields(MarkKeys) if f"{one.name}=" not in shown] == []
