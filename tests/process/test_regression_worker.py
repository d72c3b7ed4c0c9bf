"""The measuring process: every figure of a real one, every way in which a function can end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from edgefl.devices import load_device, load_network
from edgefl.errors import ConfigError, NotMet, OutOfDeviceMemory, RunError
from edgefl.regression import measurement
from edgefl.regression.measurement import Measurement, MeasurementPlan, measure
from edgefl.regression.process import (
    Failure,
    FunctionLocation,
    MeasuringProcess,
    PrepareRequest,
    RepeatRequest,
    Repetition,
    ShotSizes,
    TrialRun,
    alone,
    locate,
)
from tests.process import measured_steps as steps


@pytest.fixture(scope="module")
def process() -> Iterator[MeasuringProcess]:
    with MeasuringProcess() as started:
        yield started


def order(function: Callable[..., Any], *args: Any, **options: Any) -> PrepareRequest:
    given = {
        "setup": None,
        "args": list(args),
        "kwargs": {},
        "path": list(sys.path),
        "device": "pixel-3a",
        "network": "lte",
        "shots": None,
        "limit_s": 60.0,
    }
    return PrepareRequest(function=locate(function), **{**given, **options})


def once(process: MeasuringProcess, function: Callable[..., Any], *args: Any, **options: Any) -> Repetition:
    scale = options.pop("time_scale", 0.0)
    assert isinstance(process.prepare(order(function, *args, **options)), TrialRun)
    found = process.repeat(RepeatRequest(0, scale))
    assert isinstance(found, Repetition)
    return found


def test_memory_is_what_a_call_takes_at_its_peak(process: MeasuringProcess) -> None:
    small, large = (once(process, steps.step, kwargs={"mib": mib}).peak_mib for mib in (10, 30))
    assert 9 < small < 15
    assert 19 < large - small < 21


def test_what_torch_imports_when_it_is_first_used_is_no_repetitions_memory(process: MeasuringProcess) -> None:
    assert once(process, steps.makes_an_optimizer).peak_mib < 5


def test_a_repetition_times_the_function_and_the_reference_in_turn(process: MeasuringProcess) -> None:
    trial = process.prepare(order(steps.step))
    assert isinstance(trial, TrialRun)
    assert trial.flop == 3 * 2 * 8 * 64 * 64
    assert min(trial.shots.calls, trial.shots.units) >= 1
    found = process.repeat(RepeatRequest(0, 0.0))
    assert isinstance(found, Repetition)
    assert len(found.cpu_s) == trial.pairs
    assert len(found.reference_cpu_s) == trial.pairs + 1
    assert min(found.cpu_s + found.reference_cpu_s) > 0
    assert found.blocked_s == 0.0
    assert 0 <= found.waited < 1


def test_the_reference_and_the_shots_asked_for_are_taken(process: MeasuringProcess) -> None:
    wanted = ShotSizes(reference="interpreted", units=3, calls=2)
    trial = process.prepare(order(steps.step, shots=wanted))
    assert isinstance(trial, TrialRun)
    assert trial.shots == wanted


def test_what_is_sent_is_counted_and_takes_the_links_time(process: MeasuringProcess) -> None:
    found = once(process, steps.upload, kwargs={"count": 100_000}, time_scale=0.1)
    assert found.sent_bytes == 100_000
    assert found.radio_s >= 100_000 * 8 / (load_network("lte").up.rate_mbps or 0) / 1e6
    assert found.achieved_s >= found.declared_s >= found.radio_s


def test_a_paced_call_is_never_done_before_the_device(process: MeasuringProcess) -> None:
    found = once(process, steps.step, kwargs={"batch": 2000}, time_scale=1.0)
    flop = 3 * 2 * 2000 * 64 * 64
    assert found.achieved_s >= found.declared_s >= flop / load_device("pixel-3a").train_flop_per_s


def test_being_blocked_takes_the_device_as_long(process: MeasuringProcess) -> None:
    assert once(process, steps.sleeps).blocked_s >= 0.045


def test_what_a_child_process_computes_counts(process: MeasuringProcess) -> None:
    assert min(once(process, steps.works_in_a_child).cpu_s) > 0.01


def test_setup_makes_the_first_argument(process: MeasuringProcess) -> None:
    once(process, steps.with_setup, kwargs={"batch": 4}, setup=locate(steps.prepared))


def test_every_repetition_starts_from_the_same_state(process: MeasuringProcess) -> None:
    assert isinstance(process.prepare(order(steps.remembers)), TrialRun)
    for index in range(3):
        assert isinstance(process.repeat(RepeatRequest(index, 0.0)), Repetition)


@pytest.mark.parametrize("function", [steps.torch_hungry, steps.python_hungry])
def test_too_much_memory_ends_the_process_as_the_device_would(
    process: MeasuringProcess, function: Callable[..., Any]
) -> None:
    with pytest.raises(OutOfDeviceMemory) as caught:
        measure(process, plan(function))
    assert str(caught.value) == "out of memory on pixel-3a: 512 MiB allowed"
    assert once(process, steps.step).peak_mib < 100  # and the next one runs


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (steps.broken, "ValueError: the loss is\nnot finite"),
        (steps.dies, "its process was ended by SIGSEGV"),
        (steps.leaves, "the function ended its process with exit code 3"),
    ],
)
def test_a_function_that_fails_says_how(
    process: MeasuringProcess, function: Callable[..., Any], says: str
) -> None:
    with pytest.raises(NotMet) as caught:
        measure(process, plan(function))
    assert function.__name__ in str(caught.value)
    assert says in str(caught.value)


def test_a_traceback_begins_in_the_users_code(process: MeasuringProcess) -> None:
    ended = process.prepare(order(steps.broken))
    assert isinstance(ended, Failure)
    assert ended.why.startswith('  File "')
    assert "measured_steps.py" in ended.why.splitlines()[0]


def test_arguments_that_do_not_fit_are_the_functions_own_error(process: MeasuringProcess) -> None:
    with pytest.raises(NotMet, match="unexpected keyword argument 'size'"):
        measure(process, plan(steps.step, kwargs={"size": 1}))


def test_sending_without_a_network_is_one_line(process: MeasuringProcess) -> None:
    with pytest.raises(ConfigError, match="device 'pixel-3a' has no network to send over"):
        process.prepare(order(steps.upload, kwargs={"count": 1}, network=None))


def test_a_module_that_starts_threads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def step(): pass\n"
    )
    function = FunctionLocation("threaded", str(tmp_path / "threaded.py"), "step")
    # In a process of its own: the threads stay in it.
    refused = pytest.raises(ConfigError, match=r"threaded\.py: importing it starts 1 threads")
    with MeasuringProcess() as own, refused:
        own.prepare(msgspec.structs.replace(order(steps.step), function=function))


def test_a_module_that_starts_processes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(
        "import os, signal\nif not os.fork():\n    signal.pause()\ndef step(): pass\n"
    )
    function = FunctionLocation("forking", str(tmp_path / "forking.py"), "step")
    refused = pytest.raises(ConfigError, match=r"forking\.py: importing it starts processes")
    with MeasuringProcess() as own, refused:
        own.prepare(msgspec.structs.replace(order(steps.step), function=function))


@pytest.mark.parametrize("function", [steps.leaves_a_daemon, steps.comes_back_twice])
def test_what_a_function_leaves_running_is_ended_and_keeps_nobody_waiting(
    process: MeasuringProcess, function: Callable[..., Any]
) -> None:
    assert len(once(process, function).cpu_s) > 1
    assert psutil.Process(process.pid).children() == []


def test_a_function_that_hangs_is_ended_at_its_limit(process: MeasuringProcess) -> None:
    with pytest.raises(NotMet) as caught:
        measure(process, plan(steps.leaves_a_daemon_and_hangs, limit_s=0.2))
    assert str(caught.value).startswith(
        "leaves_a_daemon_and_hangs on pixel-3a: not done after 0.2 s; limit_s="
    )
    assert psutil.Process(process.pid).children() == []


def plan(function: Callable[..., Any], device: str = "pixel-3a", **options: Any) -> MeasurementPlan:
    asked = order(function, device=device, **options)
    return MeasurementPlan(load_device(device), load_network("lte"), asked, 9, 0.0)


def test_it_repeats_until_the_median_is_known_and_no_longer(
    process: MeasuringProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "PRECISE", math.inf)
    assert len(measure(process, plan(steps.step)).repetitions) == 9
    monkeypatch.setattr(measurement, "PRECISE", 0.0)
    monkeypatch.setattr(measurement, "MOST_REPETITIONS", 11)
    assert len(measure(process, plan(steps.step)).repetitions) == 11


@pytest.mark.parametrize(("in_the_way", "measurements"), [(0, 1), (1, 2), (9, 2)])
def test_what_cannot_be_believed_is_measured_once_more(
    process: MeasuringProcess, monkeypatch: pytest.MonkeyPatch, in_the_way: int, measurements: int
) -> None:
    monkeypatch.setattr(measurement, "PRECISE", math.inf)
    judged: list[Measurement] = []

    def reasons(self: Measurement) -> list[str]:
        if self not in judged:
            judged.append(self)
        return ["a neighbour"] if judged.index(self) < in_the_way else []

    asked: list[RepeatRequest] = []
    repeat = process.repeat
    monkeypatch.setattr(process, "repeat", lambda one: (asked.append(one), repeat(one))[1])
    monkeypatch.setattr(Measurement, "reasons", reasons)
    found = measure(process, plan(steps.step))
    assert [one.index for one in asked] == [*range(9)] * measurements
    assert list(found.reasons()) == (["a neighbour"] if in_the_way > 1 else [])


def test_half_the_rate_takes_twice_the_time(
    process: MeasuringProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "PRECISE", math.inf)
    found: list[Measurement] = [
        measure(process, plan(steps.step, device)) for device in ("pixel-3a", "pi-zero-2w")
    ]
    rates = [one.device.train_flop_per_s for one in found]
    assert rates[0] > 2 * rates[1]
    assert sorted(found[1].seconds)[4] > sorted(found[0].seconds)[4]


def test_two_measurements_at_once_wait_for_each_other(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from edgefl.regression.process import alone\n"
        "with alone():\n"
        "    print('in', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "in\n"
        waiting = subprocess.Popen(
            [sys.executable, "-c", script.replace("sys.stdin.read()", "pass")],
            stdout=subprocess.PIPE,
            text=True,
        )
        with waiting:
            assert waiting.stdout is not None
            while not _waits_for_a_lock(waiting.pid):
                assert waiting.poll() is None
            other.stdin.close()
            assert waiting.stdout.readline() == "in\n"
    with alone():
        pass


def _waits_for_a_lock(pid: int) -> bool:
    """Whether the kernel's list of locks has it behind an arrow: waiting."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f" {pid} " in line for line in lines)


def test_an_interrupted_question_ends_the_process_and_what_it_runs() -> None:
    process = MeasuringProcess()
    measuring = psutil.Process(process.pid)
    previous = signal.signal(signal.SIGALRM, _interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(KeyboardInterrupt):
            process.prepare(order(steps.hangs))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not process.alive
    assert not measuring.is_running()


def test_an_interrupted_import_ends_too(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, threading\n"
        "pathlib.Path(__file__).with_name('started').touch()\n"
        "threading.Event().wait()\n"
    )

    def interrupt(*_: object) -> None:
        if (tmp_path / "started").exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    function = FunctionLocation("slow", str(tmp_path / "slow.py"), "step")
    process = MeasuringProcess()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(KeyboardInterrupt):
            process.prepare(msgspec.structs.replace(order(steps.step), function=function))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not process.alive


def test_when_the_tests_process_is_killed_all_of_it_ends() -> None:
    script = (
        "from tests.process.test_regression_worker import *\n"
        "MeasuringProcess().prepare(order(steps.leaves_a_daemon_and_hangs))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as testing:
        assert testing.stdout is not None
        assert testing.stdout.readline() == "hanging\n"
        testing.kill()  # what is left is for the fixture of every process test to find


def _interrupt(*_: object) -> None:
    children = psutil.Process().children(recursive=True)
    if any(_name(child) == "edgefl-device" for child in children):
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def test_a_process_that_died_is_an_error_and_not_a_wait() -> None:
    with MeasuringProcess() as process:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="the measuring process ended with exit code -9"):
            process.prepare(order(steps.step))
