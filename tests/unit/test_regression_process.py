"""Tests of how another process finds a function, of the bytes that it sends, and of the device's clock."""

from __future__ import annotations

import abc
import array
import fcntl
import functools
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest
import torch

from edgefl.devices import load_device, load_network
from edgefl.devices.link import Disconnected
from edgefl.errors import ConfigError
from edgefl.regression import worker
from edgefl.regression.memory import kib
from edgefl.regression.process import Failure, FunctionLocation, Surroundings, alone, failure_of, find, locate
from edgefl.regression.repetition import DeviceClock, DeviceHandle, ProcessUsage, nbytes


def at_the_top() -> int:
    return 7


@torch.no_grad()
def decorated() -> int:
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


class Test:
    def run(self) -> int:
        return 7


class Step:
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def run(self) -> int:
        return 7

    @staticmethod
    def alone() -> int:
        return 7


class Counter:
    def __init__(self, start: int = 7) -> None:
        self.start = start

    def run(self) -> int:
        return self.start


class Doubled(Counter):
    def __init__(self) -> None:
        super().__init__(14)


class Abstract(abc.ABC):
    def run(self) -> int:
        return 7

    @abc.abstractmethod
    def rest(self) -> None: ...


class Whole(Abstract):
    def rest(self) -> None: ...


def inner() -> object:
    def function() -> None: ...

    return function


def gives() -> Iterator[int]:
    yield 7


async def gives_later() -> AsyncIterator[int]:
    yield 7


def test_a_function_at_the_top_is_found_again() -> None:
    for function in (at_the_top, decorated):  # the decorator's own function is in a file of torch
        where = locate(function)
        here = (__name__, function.__name__, str(Path(__file__).resolve()))
        assert (where.module, where.qualname, where.file) == here
        assert find(where) is function
    assert find(locate(Step.alone)) is Step.alone


def test_a_method_of_a_class_that_needs_no_arguments_is_bound_to_a_new_object() -> None:
    for method in (Test.run, Counter.run):
        assert find(locate(method))() == 7
    methods = ((Counter.run, Doubled, 14), (Abstract.run, Whole, 7), (at_the_top, Whole, 7))
    for inherited, owner, expected in methods:
        assert find(locate(inherited, owner=owner))() == expected


LOST = "must be defined at module level, so that another process can import it (got "
LATE = "must do its work when it is called, as a plain function does (got "
KEPT = "must do its work whenever it is called (got cached, whose results functools caches); "
NONE = "must be a function at the top of a module (got "


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: 7, f"{LOST}a lambda)"),
        (functools.partial(at_the_top), f"{LOST}a partial)"),
        (cached, f"{KEPT}call it in a function that calls cached.cache_clear() first"),
        (Step(1).run, f"{LOST}a method)"),
        (Step.run, f"{LOST}Step.run, a method whose class cannot be instantiated without arguments)"),
        (Abstract.run, f"{LOST}Abstract.run, a method whose class cannot be instantiated without arguments)"),
        (Step, f"{LOST}a type)"),
        (inner(), f"{LOST}inner.function, which is inside another function)"),
        (globals()["impostor"], f"{LOST}{__name__}.renamed, but this name refers to another object)"),
        (gives, f"{LATE}gives, a generator function)"),
        (gives_later, f"{LATE}gives_later, an async generator function)"),
        (functools.partial(functools.partial(gives)), f"{LATE}gives, a generator function)"),
        (3, f"{NONE}3: not callable)"),
        (["a\nb"], rf"{NONE}['a\nb']: not callable)"),
    ],
)
@pytest.mark.parametrize("name", ["the function", "setup"])
def test_a_function_that_another_process_cannot_run_is_refused(
    function: object, message: str, name: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(function, name)
    assert str(caught.value) == f"{name} {message}"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "steps_of_this_test.py"
    file.write_text("def step():\n    return 5\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield file
    sys.modules.pop("steps_of_this_test", None)


def test_a_module_comes_from_its_file_and_not_from_another_of_its_name(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / module.name).write_text("def step():\n    return 6\n")
    monkeypatch.syspath_prepend(str(other))
    assert find(FunctionLocation("steps_of_this_test", str(module), "step"))() == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module\n", "cannot be imported: ModuleNotFoundError: No module named"),
        ("def step(:\n", "cannot be imported: SyntaxError: "),
        ("raise SystemError('two\\nlines')\n", "cannot be imported: SystemError: two lines"),
        ("raise SystemExit(3)\n", "cannot be imported: SystemExit: 3"),
        (r"raise OSError('caf\udce9')", r"cannot be imported: OSError: caf\udce9"),
        ("import pytest\npytest.skip('off', allow_module_level=True)\n", "cannot be imported: Skipped: off"),
        ("", "cannot be imported: AttributeError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(module: Path, text: str, message: str) -> None:
    module.write_text(text)
    with pytest.raises(ConfigError) as caught:
        find(FunctionLocation("steps_of_this_test", str(module), "step"))
    assert str(caught.value).startswith(f"{module}: {message}")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError) as again:
        find(FunctionLocation("steps_of_this_test", str(module), "step"))
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize("init", [True, False])
def test_a_module_may_import_its_package_if_no_path_leads_there(tmp_path: Path, init: bool) -> None:
    """With pytest's import mode ``importlib``, no folder in ``sys.path`` contains the package."""
    folder = tmp_path / "package_of_this_test" / "inner"
    folder.mkdir(parents=True)
    for each in (folder.parent, folder) if init else ():
        (each / "__init__.py").touch()
    (folder / "helpers.py").write_text("def step():\n    return 5\n")
    module = folder / "test_steps.py"
    module.write_text("from package_of_this_test.inner import helpers\nfrom .helpers import step\n")
    try:
        assert find(FunctionLocation("package_of_this_test.inner.test_steps", str(module), "step"))() == 5
    finally:
        for name in [name for name in sys.modules if name.startswith("package_of_this_test")]:
            del sys.modules[name]


def test_coverage_does_not_start_in_measuring_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"COV_CORE_SOURCE", "COVERAGE_PROCESS_START", "COVERED"}
    for name in names:
        monkeypatch.setenv(name, "1")
    assert names & Surroundings.now().environment.keys() == {"COVERED"}


def test_functions_get_only_the_entries_of_sys_path_that_python_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])  # Python ignores an entry that is a Path
    assert Surroundings.now().path == sys.path[1:]


def test_the_module_of_a_script_has_another_name(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    exec(compile(module.read_text(), str(module), "exec"), script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    where = locate(script.step)
    assert where.module == "_script_steps_of_this_test"
    try:
        assert find(where)() == 5
    finally:
        sys.modules.pop(where.module, None)


def test_only_an_allocators_error_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert failure_of(caught.value) == failure_of(MemoryError()) == Failure("memory", "")
    for error in (ValueError("can't allocate memory in the pool"), RuntimeError("can't allocate memory: B")):
        found = failure_of(error)
        assert (found.kind, found.why) == ("raised", f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"abc", 3),
        (bytearray(5), 5),
        (memoryview(b"abcd"), 4),
        (array.array("d", [1.0, 2.0]), 16),
        (np.zeros((3, 4), np.float16), 24),
        (np.zeros((4, 4))[::2, ::2], 32),
        (torch.zeros(10, requires_grad=True), 40),
        (torch.zeros(10, dtype=torch.bfloat16), 20),
    ],
)
def test_the_bytes_of_every_kind_of_buffer_are_counted(data: object, count: int) -> None:
    assert nbytes(data) == count


@pytest.mark.parametrize("data", ["text", 7, [1, 2], None, {"a": b""}])
def test_data_without_bytes_is_refused(data: object) -> None:
    with pytest.raises(TypeError, match=r"send\(\) takes bytes, an array or a tensor \(got "):
        nbytes(data)


def test_a_link_that_breaks_raises_disconnected() -> None:
    link = load_network("lte")
    breaks = msgspec.structs.replace(link.up, loss_pct=50.0, on_loss="disconnect")
    handle = DeviceHandle(load_device("pixel-3a"), msgspec.structs.replace(link, up=breaks), 0)
    with pytest.raises(Disconnected, match="the link was lost after"):
        handle.send(bytes(10_000_000))


def test_the_clock_adds_computing_and_transfers_and_is_never_early() -> None:
    clock = DeviceClock(slowdown=3.0, time_scale=0.1)
    start_ns = ProcessUsage.now().cpu_ns
    while (used_s := (ProcessUsage.now().cpu_ns - start_ns) / 1e9) < 0.002:
        pass
    assert clock.now_s() >= 3.0 * used_s
    clock.transfer(0.05)
    times = clock.end(model_s=0.0)
    assert times.radio_s == 0.05
    assert times.declared_s >= 3.0 * used_s + 0.05
    assert times.achieved_s >= times.declared_s


def test_the_clock_waits_for_the_models_time_but_for_nothing_without_a_time_scale() -> None:
    times = DeviceClock(slowdown=1.0, time_scale=0.1).end(model_s=0.2)
    assert 0.2 <= times.declared_s <= times.achieved_s
    assert times.blocked_s < 0.001  # readings of two clocks differ by microseconds
    clock = DeviceClock(slowdown=1.0, time_scale=0.0)
    clock.transfer(1e6)
    assert clock.end(0.0).declared_s >= 1e6


@pytest.mark.parametrize("name", [b"\xc3", b"a kB"])
def test_a_process_may_have_any_name(name: bytes) -> None:
    file = Path("/proc/self/comm")
    before = file.read_bytes()
    file.write_bytes(name)
    try:
        assert kib("status")["VmRSS"] > 0
    finally:
        file.write_bytes(before)


def test_a_module_is_refused_for_its_own_threads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU's driver, torch's first backward pass leaves a thread in the worker."""
    monkeypatch.setattr(worker, "has_children", bool)  # other tests leave some in this process
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        count = worker.num_threads()
        assert count >= 2
        monkeypatch.setattr(worker, "num_threads", lambda: count)  # a thread of another test may end
        worker.refuse_started("steps.py", count)
        with pytest.raises(ConfigError, match=r"^steps\.py: importing it starts 1 thread,"):
            worker.refuse_started("steps.py", count - 1)
    finally:
        stop.set()
        thread.join()


def test_a_process_that_is_forked_during_a_measurement_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a copy of the descriptor, the process holds the same open folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with alone():
        found = {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        (copy,) = [os.dup(int(fd)) for fd, path in found.items() if path == os.path.realpath(tmp_path)]
    again = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(copy)
        os.close(again)
