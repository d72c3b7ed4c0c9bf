"""Count a function's work in a separate process, which forks a process for each counter.

The first call is not counted: it fills caches and imports modules. Then the setup runs again, and each
counter runs the function once in a fork, so that all start from the same state. Random numbers are seeded.
Garbage collection is off, because its timing would depend on earlier code. Each counter runs twice, to detect
counts that vary.
"""

from __future__ import annotations

import gc
import inspect
import os
import resource
import statistics
import sys
import sysconfig
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from edgefl.devices.schema import Device
from edgefl.host.children import has_children
from edgefl.host.forked import call_forked
from edgefl.host.groups import process_stat
from edgefl.host.process import ThreadSchedule, keep_stops, threads_of
from edgefl.learning.operations import StepWork
from edgefl.learning.work import WorkMeter
from edgefl.regression.bytecode import CodeName, KeptThreads, NotCounted, count_instructions
from edgefl.regression.calls import seed
from edgefl.regression.counts import BY_TORCH, NATIVE_CODE, WAITS, WORKS_ON, CountedRun, Counts, cut_off
from edgefl.regression.process import Failure, result_of
from edgefl.regression.repetition import (
    INTERPRETED_STEPS,
    MIN_REST,
    DeviceCall,
    DeviceClock,
    DeviceHandle,
    beside_torch,
    calling_s,
    device_s,
    error_factor,
    make_reference,
    used_s,
)

BY_ENVIRONMENT = frozenset((
    "asyncio", "concurrent", "contextvars", "genericpath", "importlib", "logging", "multiprocessing",
    "os", "pathlib", "posixpath", "queue", "random", "secrets", "selectors", "shutil", "signal",
    "socket", "ssl", "subprocess", "tempfile", "threading", "warnings", "weakref",
))  # fmt: skip
"""Modules of Python's standard library whose instruction counts depend on paths, time, threads or the
operating system."""
_OWN = tuple(str(Path(__file__).parents[1] / name) for name in ("regression", "devices", "learning/work.py"))
_LIBRARY = sysconfig.get_paths()["stdlib"]
_PACKAGES = ("site-packages", "dist-packages")


class _Part(msgspec.Struct, frozen=True, kw_only=True, tag="part"):
    """The counts that one counter returns."""

    figures: dict[str, int] = {}
    instructions: dict[str, int] | None = None
    processes: bool = False
    kept_threads: bool = False
    link_s: float = 0.0
    untimed: str = ""


PartCounter = Callable[[Callable[[], Any], DeviceHandle], _Part]


def count(call: DeviceCall) -> CountedRun | Failure:
    """Count the work of one call of a function, twice. Call this in a temporary process."""
    call.limit()
    handle = DeviceHandle(call.device, call.network, 0)
    seed()
    known = set(sys.modules)
    if made := _undone(call.function, call.bind(handle)()):
        name = call.function.__qualname__
        return Failure("refused", f"the function must do its work when it is called (got {name}, {made})")
    imported = [name for name in sys.modules if name.startswith("torch.") and name not in known]
    seed()
    run = call.bind(handle)
    _unlimited()
    gc.collect()
    gc.freeze()
    gc.disable()
    alone = _alone()
    parts: list[_Part] = []
    for counter in (_work, _memory, _executed) * 2:
        if alone:
            part = _forked(partial(_steady, counter, run, handle))
        else:  # a process with threads cannot be forked safely
            part = _steady(counter, call.bind(handle), handle)
        if isinstance(part, Failure):
            return part
        parts.append(part)
    first, second = (
        Counts(figures=_positive({**work.figures, **memory.figures}), instructions=executed.instructions)
        for work, memory, executed in (parts[:3], parts[3:])
    )
    # Updates of parameters are already counted as operations.
    names = BY_TORCH.intersection(StepWork.__struct_fields__) - {"parameters"}
    step = StepWork(**{name: float(first.figures.get(name, 0)) for name in names})
    model_s, python_s = device_s(call.device, step), python_seconds(call.device, first.instructions or {})
    timed: _Part | Failure = _Part()
    if first.instructions is not None and not parts[0].processes:  # otherwise no time can be predicted
        timer = partial(_timed, sum(first.instructions.values()), model_s + python_s)
        if alone:
            timed = _forked(partial(_steady, timer, run, handle))
        else:
            timed = result_of(lambda: _steady(timer, call.bind(handle), handle))
    if isinstance(timed, Failure):
        timed = _Part(untimed="a further call failed")
    return CountedRun(
        first=first, second=second, model_s=model_s, python_s=python_s, processes=parts[0].processes,
        error_factor=error_factor(call._replace(like="interpreter"), step, model_s, python_s),
        kept_threads=parts[2].kept_threads, imported=imported, link_s=timed.link_s, untimed=timed.untimed,
    )  # fmt: skip


def _undone(function: Callable[..., Any], result: object) -> str:
    """Return a description of a call's result if it is a coroutine or an iterator that has not run yet.

    Otherwise, return an empty string.
    """
    if inspect.iscoroutine(result):
        result.close()
        return "which returned a coroutine that nothing awaits"
    own = getattr(inspect.unwrap(function), "__code__", None)
    name = type(result).__name__.removeprefix("async_")
    started = inspect.isgenerator(result) and inspect.getgeneratorstate(result) != inspect.GEN_CREATED
    lazy = inspect.isgenerator(result) or isinstance(result, map | filter | zip)
    if (own is not None and own is getattr(result, "ag_code", None)) or (lazy and not started):
        return f"which returned a {name} that nothing iterates over"
    return ""


def _positive(figures: Mapping[str, int]) -> dict[str, int]:
    return {name: value for name, value in figures.items() if value}


def _unlimited() -> None:
    """Lift the memory limit, because the counters themselves need memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _steady(counter: PartCounter, run: Callable[[], Any], handle: DeviceHandle) -> _Part:
    """Reset the number of sent bytes, seed the random number generators, and run the counter."""
    handle.begin(None)
    seed()
    return counter(run, handle)


def _forked(measure: Callable[[], _Part]) -> _Part | Failure:
    """Run ``measure`` in a forked process whose output is discarded; return the result, or why it failed."""
    restore_stops = keep_stops()

    def call() -> bytes:
        restore_stops()
        return msgspec.msgpack.encode(result_of(measure))

    data, end = call_forked("edgefl-count", call)
    if not data:
        if end.signal:
            return Failure("signal", str(end))
        return Failure("raised", f"the function ended its process with {end}")
    return msgspec.msgpack.decode(data, type=_Part | Failure)


def _work(run: Callable[[], Any], handle: DeviceHandle) -> _Part:
    with WorkMeter() as meter:
        run()
    figures = {name: round(amount) for name, amount in msgspec.structs.asdict(meter.work()).items()}
    figures["parameters"] = meter.updated_parameters
    figures["tensor_peak_bytes"] = max(meter.live.line, default=0)
    figures["tensor_kept_bytes"] = meter.live.bytes
    figures["sent_bytes"] = handle.sent_bytes
    waited_for = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt > 0
    return _Part(figures=figures, processes=waited_for or has_children())


def _memory(run: Callable[[], Any], handle: DeviceHandle) -> _Part:
    tracemalloc.start(1)
    tracemalloc.reset_peak()  # the first call may have started it
    before, _ = tracemalloc.get_traced_memory()
    stop = tracemalloc.stop
    vars(tracemalloc)["stop"] = lambda: None  # the function may measure its own memory
    try:
        run()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        vars(tracemalloc)["stop"] = stop
        stop()
    grew = {"python_peak_bytes": peak - before, "python_kept_bytes": kept - before}
    return _Part(figures={name: max(0, count) for name, count in grew.items()})


def _executed(run: Callable[[], Any], handle: DeviceHandle) -> _Part:
    threads = KeptThreads()
    try:
        counts = by_owner(count_instructions(run))
        return _Part(instructions=counts, kept_threads=threads.computed())
    except NotCounted:
        return _Part()


NATIVE_TIMES, SOME_S = 6, 1e-4
"""A function is treated as native code, whose time cannot be computed from counts, if its CPU time exceeds
`NATIVE_TIMES` times the time of its counted instructions at the speed of `_ordinary`, plus `SOME_S`
seconds."""
AFTER_S = 0.05
"""Time in seconds for which threads that a call left running are watched after the call."""
THREAD_WAITS = 4
"""Number of seconds for which a call may wait per CPU second of its other threads."""
MIN_CALLS, MAX_CALLS = 3, 10
"""Minimum and maximum number of timed calls, of which the one with the shortest waits counts. More than the
minimum are made only while all calls so far have waited, because a busy host may delay several in a row."""
MORE_S, PAUSE_S = 1.0, 0.02
"""Time in seconds after which calls are not repeated any more, and the pause before each repeated call."""
ORDINARY_STEPS = 98.0
"""Number of steps of the five-body problem in Python that take as long as `_ordinary`, measured in CPython
3.11 on an AMD EPYC (90 to 102 in 15 repetitions)."""


def _ordinary() -> None:
    """Run Python code with a typical time per bytecode instruction.

    The five-body problem, which is arithmetic with floats, needs half as much time per instruction.
    """
    counts: dict[int, int] = {}
    for number in range(4000):
        rest = number % 97
        counts[rest] = counts.get(rest, 0) + (number << 1)


def _timed(instructions: int, known_s: float, run: Callable[[], Any], handle: DeviceHandle) -> _Part:
    """Check whether the counts explain a call's time; return the time of the transfers, or why they do not.

    The instructions must explain the CPU time outside torch, and the call must hardly wait. Waits during
    which other threads compute, or are runnable without a core, are tolerated. If such a thread ends during
    the call, its time without a core is unknown, so waits of several times its CPU time are tolerated.
    ``known_s`` is the predicted time on the device without transfers.
    """
    ordinary_s = min(used_s(_ordinary) for _ in range(5))
    expected_s = instructions / sum(count_instructions(_ordinary).values()) * ordinary_s
    per_call_s = calling_s()
    native_s, waits_s, links_s = list[float](), list[float](), list[float]()
    limit_s, until_s = 0.0, time.monotonic() + MORE_S
    for number in range(MAX_CALLS):
        if number >= MIN_CALLS:
            if min(waits_s) <= limit_s or time.monotonic() > until_s:
                break
            time.sleep(PAUSE_S)
        clock, others_s, delayed_s = DeviceClock(0.0, 0.0), _others_s(), _others_delayed_s()
        handle.begin(clock)
        beside_s, all_s, calls = beside_torch(run, 1)
        times, others_s = clock.end(0.0), _others_s() - others_s
        delayed_s = max(0.0, _others_delayed_s() - delayed_s)
        outside_s = beside_s - calls * per_call_s
        native_s.append(outside_s - max(NATIVE_TIMES * expected_s, MIN_REST * all_s))
        waits_s.append(times.blocked_s - THREAD_WAITS * others_s - delayed_s)
        links_s.append(times.radio_s)
        link_s = statistics.median(links_s)
        limit_s = MIN_REST * (known_s + link_s) + SOME_S
    if min(waits_s) > limit_s:
        return _Part(untimed=WAITS)
    if min(native_s) > MIN_REST * link_s + SOME_S:  # sending itself takes some CPU time
        return _Part(untimed=NATIVE_CODE)
    return _Part(untimed=WORKS_ON) if _works_on() else _Part(link_s=link_s)


def _works_on() -> bool:
    """Return True if other threads compute in the next `AFTER_S` seconds, or then wait for a core."""
    if _alone():
        return False
    others_s = _others_s()
    time.sleep(AFTER_S)
    return _others_s() - others_s > SOME_S or any(process_stat(one)[:1] == ["R"] for one in _others())


def _alone() -> bool:
    """Return True if this process has one thread."""
    return len(os.listdir("/proc/self/task")) == 1


def _others() -> dict[str, ThreadSchedule]:
    """Return the schedules of this process's other threads, keyed by ``PID/task/TID``."""
    own = f"{os.getpid()}/task/{threading.get_native_id()}"
    return {thread: schedule for thread, schedule in threads_of(os.getpid()) if thread != own}


def _others_s() -> float:
    """Return the CPU time of this process's other threads so far, in seconds."""
    return (time.process_time_ns() - time.thread_time_ns()) / 1e9


def _others_delayed_s() -> float:
    """Return the time during which this process's other threads were runnable but had no core, in seconds.

    Threads that have ended are left out.
    """
    return sum(schedule.waited_ns for schedule in _others().values()) / 1e9


def by_owner(counts: Mapping[CodeName, int]) -> dict[str, int]:
    """Return the number of instructions for each of the user's functions, and each version of a package.

    edgefl's own measuring code is left out, and so is library code whose work depends on the environment.
    """
    known = sorted(sys.modules.items())  # the value of a module whose import is blocked is None
    modules = {str(getattr(module, "__dict__", {}).get("__file__")): name for name, module in known}
    found: Counter[str] = Counter()
    for code, count in counts.items():
        if (owner := _owner(code, modules)) is not None:
            found[owner] += count
    return cut_off(found)


def _owner(code: CodeName, modules: Mapping[str, str]) -> str | None:
    file = code.file
    if file.startswith(("<", *_OWN)):  # also generated code, such as a dataclass's methods
        return None
    if (folder := next((each for each in _PACKAGES if f"/{each}/" in file), None)) is not None:
        package = file.rpartition(f"/{folder}/")[2].partition("/")[0].removesuffix(".py")
        version = str(getattr(sys.modules.get(package), "__version__", "?")).partition("+")[0]
        return f"{package} {version.replace(' ', '')}"
    if file.startswith(_LIBRARY):
        top = file[len(_LIBRARY) + 1 :].partition("/")[0].removesuffix(".py")
        return None if top in BY_ENVIRONMENT else f"Python {sys.version.partition(' ')[0]}"
    return f"{modules.get(file, Path(file).stem)}.{code.qualname}".replace(" ", "-")


def python_seconds(device: Device, instructions: Mapping[str, int]) -> float:
    """Return the time in seconds that the device takes to execute the instructions outside torch.

    torch's own Python code is left out, because the time model's cost of an operation includes the call.
    """
    executed = sum(count for name, count in instructions.items() if name.rpartition(" ")[0] != "torch")
    steps = ORDINARY_STEPS * executed / sum(count_instructions(_ordinary).values())
    return steps / INTERPRETED_STEPS * make_reference("interpreted").device_s(device)
