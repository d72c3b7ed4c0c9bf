"""A function is named by one process and found by another, or refused in one line."""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from edgefl.errors import ConfigError
from edgefl.regression.process import FunctionLocation, find, locate


def at_the_top() -> int:
    return 7


@functools.cache
def cached() -> int:
    return 7


def renamed() -> int:
    return 7


def _take_its_name() -> None:
    def renamed() -> int:
        return 8

    renamed.__qualname__ = "renamed"
    globals()["impostor"] = renamed


_take_its_name()


class Step:
    def run(self) -> int:
        return 7

    @staticmethod
    def alone() -> int:
        return 7


def test_a_function_at_the_top_is_found_again() -> None:
    where = locate(at_the_top)
    assert (where.module, where.qualname, where.file) == (
        __name__,
        "at_the_top",
        str(Path(__file__).resolve()),
    )
    assert find(where) is at_the_top
    assert find(locate(Step.alone)) is Step.alone


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda: 7, "(got a lambda)"),
        (functools.partial(at_the_top), "(got a partial)"),
        (cached, "(got a _lru_cache_wrapper)"),
        (Step().run, "(got a method)"),
        (Step.run, "(got Step.run, a method, which would need its object)"),
        (Step, "(got a type)"),
        (globals()["impostor"], "renamed, whose name there is another object's)"),
    ],
)
def test_what_another_process_could_not_find_is_refused(function: object, got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(function)
    assert str(caught.value).startswith("the function must be defined at the top of a module, so that")
    assert str(caught.value).endswith(got)


async def waits() -> int:
    return 7


def gives() -> Iterator[int]:
    yield 7


async def gives_later() -> AsyncIterator[int]:
    yield 7


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (waits, "waits, a coroutine function"),
        (gives, "gives, a generator function"),
        (gives_later, "gives_later, an async generator function"),
        (functools.partial(waits), "waits, a coroutine function"),
        (functools.partial(functools.partial(gives)), "gives, a generator function"),
    ],
)
def test_a_function_that_would_do_nothing_yet_is_refused(function: object, got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(function, "setup")
    assert str(caught.value) == (
        f"setup must do its work when it is called, as a plain function does (got {got})"
    )


@pytest.mark.parametrize(("thing", "got"), [(3, "3"), (None, "None"), (["a\nb"], r"['a\nb']")])
def test_what_cannot_be_called_is_refused(thing: object, got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(thing)
    assert (
        str(caught.value)
        == f"the function must be a function at the top of a module (got {got}: not callable)"
    )


def test_an_inner_function_is_refused_by_name() -> None:
    def inner() -> None: ...

    with pytest.raises(ConfigError, match=r"setup must be .* \(got test_an_inner_.*\.inner, which is inside"):
        locate(inner, "setup")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "steps_of_this_test.py"
    file.write_text("def step():\n    return 5\n")
    monkeypatch.delitem(sys.modules, "steps_of_this_test", raising=False)
    yield file
    sys.modules.pop("steps_of_this_test", None)


def test_a_module_that_is_on_no_path_is_loaded_from_its_file(module: Path) -> None:
    assert find(FunctionLocation("steps_of_this_test", str(module), "step"))() == 5


def test_a_module_of_the_same_name_elsewhere_is_not_taken_for_it(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / module.name).write_text("def step():\n    return 6\n")
    monkeypatch.syspath_prepend(str(other))
    assert find(FunctionLocation("steps_of_this_test", str(module), "step"))() == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import no_such_module\n", "cannot be imported: ModuleNotFoundError: No module named"),
        ("def step(:\n", "cannot be imported: SyntaxError: "),
        ("raise SystemError('two\\nlines')\n", "cannot be imported: SystemError: two lines"),
        ("", "cannot be imported: AttributeError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(module: Path, text: str, says: str) -> None:
    module.write_text(text)
    with pytest.raises(ConfigError) as caught:
        find(FunctionLocation("steps_of_this_test", str(module), "step"))
    assert str(caught.value).startswith(f"{module}: {says}")
    assert "\n" not in str(caught.value)


def test_a_scripts_function_has_a_module_of_another_name(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("__main__")
    code = compile(module.read_text(), str(module), "exec")
    exec(code, script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    where = locate(script.step)
    assert where.module == "_script_steps_of_this_test"
    try:
        assert find(where)() == 5
    finally:
        sys.modules.pop(where.module, None)
