"""The pytest plugin asked wrongly: what cannot be run, handed over or understood never passes."""

# ruff: noqa: F811 (a fixture is imported to be an argument)

from __future__ import annotations

import pytest

from .plugin_runs import Run, run  # noqa: F401

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ('"pixel3a"', "device profile 'pixel3a' not found; did you mean 'pixel-3a'? have: *"),
        ("", "edge_device: no profile is named; name one or more: *"),
        ('"pixel-3a", second=1', "edge_device key 'second' not found; did you mean 'seconds'? *"),
    ],
)
def test_a_typing_mistake_is_one_line_before_anything_runs(run: Run, mark: str, says: str) -> None:
    found = run(f"import pytest\n@pytest.mark.edge_device({mark})\ndef test_a(): raise AssertionError\n")
    found.assert_outcomes(errors=1)
    found.stdout.fnmatch_lines([f"test_device.py::test_a: {says}"])
    assert "Traceback" not in found.stdout.str()


def test_what_cannot_be_handed_over_is_one_line(run: Run) -> None:
    found = run(
        """
        import pytest
        import steps

        @pytest.mark.edge_device("pixel-3a")
        def test_lambda(edge_device):
            edge_device.run(lambda: 1)

        @pytest.mark.edge_device("pixel-3a")
        def test_argument(edge_device):
            edge_device.run(steps.step, object())

        @pytest.mark.edge_device("pixel-3a")
        class TestMethods:
            def test_method(self):
                pass

        def test_no_mark(edge_device):
            pass

        @pytest.mark.edge_device("pixel-3a")
        def test_number(edge_device):
            edge_device.run(3)
        """
    )
    found.assert_outcomes(failed=4, errors=1)
    found.stdout.fnmatch_lines(
        [
            'edge_device: which one? Mark the test: @pytest.mark.edge_device("pixel-3a")',
            "the function must be defined at the top of a module, *(got a lambda)",
            "argument 0 must be what JSON holds, *(got a object); let setup= make anything else",
            "the function must be *(got TestMethods.test_method, a method, which would need its object)",
            "the function must be a function at the top of a module (got 3: not callable)",
        ]
    )


def test_what_runs_nothing_never_passes(run: Run) -> None:
    found = run(
        """
        import pytest
        import steps

        @pytest.mark.edge_device("pixel-3a")
        async def test_itself():
            steps.step()

        async def later():
            steps.step()

        def one_by_one():
            yield steps.step()

        @pytest.mark.edge_device("pixel-3a")
        def test_coroutine(edge_device):
            edge_device.run(later)

        @pytest.mark.edge_device("pixel-3a")
        def test_generator(edge_device):
            edge_device.run(one_by_one)

        @pytest.mark.edge_device("pixel-3a", seconds=1e-9)
        def test_forgets(edge_device):
            steps.step()

        @pytest.mark.edge_device("pixel-3a")
        def test_skips(edge_device):
            pytest.skip("not today")
        """
    )
    found.assert_outcomes(failed=4, skipped=1)
    plain = "the function must do its work when it is called, as a plain function does (got "
    found.stdout.fnmatch_lines(
        [
            f"{plain}test_itself, a coroutine function)",
            f"{plain}later, a coroutine function)",
            f"{plain}one_by_one, a generator function)",
            "edge_device: nothing was run; call edge_device.run(function, …), or leave the fixture out: *",
        ]
    )


def test_a_device_that_was_asked_and_had_too_little_memory_was_used(run: Run) -> None:
    found = run(
        """
        import pytest
        import steps
        from edgefl.errors import OutOfDeviceMemory

        @pytest.mark.edge_device("moto-g4")
        def test_hungry(edge_device):
            with pytest.raises(OutOfDeviceMemory):
                edge_device.run(steps.hungry)
        """
    )
    found.assert_outcomes(passed=1)
