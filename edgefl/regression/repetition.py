"""One repetition, in its own process: a call at the device's pace, then calls alternating with a reference.

Device time = t_model + t_rest + blocked + transfers. t_model is the time of the torch operations according
to the device's time model. t_rest is the CPU time of the code outside torch, multiplied by the ratio of this
host's speed to the device's speed when both run code of the same class. The test's mark names this class;
by default, it is interpreted Python.

CPU time rises with the host's load. Therefore the function alternates with a reference, a fixed piece of work
whose CPU time also rises, and the ratio of the two times is comparable between loads. If the reference is
not of the class of the code outside torch, a program of that class also alternates with the function.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from edgefl.devices import load_device, load_network
from edgefl.devices.code import clusters_of, throughput
from edgefl.devices.link import Disconnected, Link
from edgefl.devices.schema import Device, Network
from edgefl.errors import ConfigError
from edgefl.host.code_operations import program, python_bodies
from edgefl.host.host_operations import sgd_step
from edgefl.host.memory import MemoryLimit
from edgefl.host.pacing import wait_until
from edgefl.host.process import keep_freed_memory
from edgefl.learning.arithmetic import torch_seed
from edgefl.learning.operations import StepWork
from edgefl.learning.work import WorkMeter
from edgefl.regression.calls import bound
from edgefl.regression.memory import Peak, TreeWatch
from edgefl.regression.process import (
    MAX_AT_A_TIME,
    ReferenceName,
    RepeatRequest,
    Repetition,
    RestClass,
    ShotSizes,
    TrialRun,
)
from edgefl.regression.usage import ProcessUsage, cpu_ns
from edgefl.seeds import stream

INTERPRETED_FLOP = 1.5e6
"""Number of FLOP assumed for a unit of interpreted code: about as many as in a training step of the same
duration."""
INTERPRETED_STEPS = 100
"""Number of steps of the five-body problem in a unit of interpreted code. The rates of the class
``interpreter`` are in steps of the same program, so that no conversion between programs is needed."""
MIN_REST = 0.1
"""If the time outside torch is below this share of the CPU time, it is treated as overhead of torch calls."""
SMALL_SHARE = 0.1
"""A function is treated as interpreted code if it executes fewer FLOP per CPU second than this share of the
rate of a small training step."""
SHOT_S, REFERENCE_SHOT_S = 0.0003, 0.02
"""Target CPU time of a shot of the function (calls that are timed together), and maximum CPU time of a shot
of the reference, in seconds; the numbers of calls and units are then rounded to whole numbers."""
TIMED_S, WAITING_S = 0.12, 0.3
"""Approximate limits, in seconds, on the CPU time and the wall-clock time for which each repetition times the
function; a single call may exceed them."""
MAX_PAIRS = 60
REST_S = 0.06
"""Approximate CPU time in seconds, per repetition, of the stand-in program (`RestWork`); a single unit of
this program may exceed it."""
MAX_SHARES = 9
"""Maximum number of runs from which the share of CPU time outside torch is determined."""


class DeviceCall(NamedTuple):
    """A function with its arguments, and the device that it runs on."""

    function: Callable[..., Any]
    setup: Callable[..., Any] | None
    args: list[Any]
    kwargs: dict[str, Any]
    device: Device
    network: Network | None
    like: RestClass = "interpreter"
    """Class of code to which the function's code outside torch belongs, such as interpreted Python."""

    def bind(self, handle: DeviceHandle) -> Callable[[], Any]:
        """Run the setup, and return the function bound to its arguments."""
        return bound(self.function, self.setup, self.args, self.kwargs, handle)

    def limit(self) -> MemoryLimit | None:
        """Limit this process, from now on, to the memory that an app may use on the device."""
        return MemoryLimit(self.device.app_limit_mib) if self.device.app_limit_mib else None


def warm_up() -> None:
    """Run one training step in a single thread, so that torch is initialised."""
    torch.set_num_threads(1)
    make_reference("train-small").run(1)


def try_out(call: DeviceCall, wanted: ShotSizes | None) -> TrialRun:
    """Measure a function's cost, and choose the most similar reference. Call this in a temporary process."""
    call.limit()
    known = set(sys.modules)
    run = call.bind(DeviceHandle(call.device, call.network, 0))
    run()
    imported = [name for name in sys.modules if name.startswith("torch.") and name not in known]
    with WorkMeter() as meter, in_threads(meter):
        run()
    work = meter.work()
    cpu_s = wall_s = math.inf
    for _ in range(2):
        start_ns = time.monotonic_ns()
        cpu_s = min(cpu_s, used_s(run))
        wall_s = min(wall_s, (time.monotonic_ns() - start_ns) / 1e9)
    most_calls = max(1, round(WAITING_S / wall_s))
    name = wanted.reference if wanted is not None else _most_like(work, cpu_s)
    reference = make_reference(name)
    unit_s = min(used_s(partial(reference.run, 1)) for _ in range(5))
    calls = min(most_calls, MAX_AT_A_TIME, max(1, round(SHOT_S / cpu_s)))
    units = min(MAX_AT_A_TIME, max(1, round(min(calls * cpu_s, REFERENCE_SHOT_S) / unit_s)))
    shots = wanted or ShotSizes(reference=name, units=units, calls=calls)
    shot_s, model_s = shots.calls * cpu_s, device_s(call.device, work)
    rest = _rest(call, work, run, cpu_s)
    beside = rest_work(call, name) if rest else None
    slowdown = reference.device_s(call.device) / unit_s if beside is None else beside.slowdown()
    return TrialRun(
        shots=shots,
        reference_flop=reference.flop,
        reference_s=reference.device_s(call.device),
        flop=work.flop,
        model_s=model_s,
        rest=rest,
        rest_s=0.0 if beside is None else beside.device_s,
        pace=rest * slowdown,
        error_factor=error_factor(call, work, model_s, rest * cpu_s * slowdown),
        imported=imported,
        pairs=min(MAX_PAIRS, max(1, round(TIMED_S / shot_s)), max(1, most_calls // shots.calls)),
    )


def error_factor(call: DeviceCall, work: StepWork, model_s: float, rest_s: float) -> float | None:
    """Return the 90% error factor of the sum of ``model_s`` (for torch's ``work``) and ``rest_s`` (for other
    code); None if the sum is 0, or if the device has no time model or its profile lists no cores."""
    device = call.device
    model = device.time_model()
    if model is None or not device.clusters or not model_s + rest_s:
        return None
    spread = throughput(clusters_of(device), call.like, 1).spread
    logs = model_s * math.log(model.error_factor_of(work)), rest_s * math.log(spread)
    return math.exp(math.hypot(*logs) / (model_s + rest_s))


@contextlib.contextmanager
def in_threads(mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Enter a torch mode, which applies to one thread only, in every thread that starts in this context.

    A thread that is still running afterwards stays in the mode.
    """
    start = threading.Thread.start

    def start_in_mode(thread: threading.Thread) -> None:
        run = thread.run

        def run_in_mode() -> None:
            with mode:
                run()

        thread.run = run_in_mode  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_in_mode  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


class TorchTimer(TorchFunctionMode):
    """Counts all calls of torch's functions within its context, and measures their CPU time."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_ns = self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        alone = threading.active_count() == 1  # otherwise the process's time includes that of other threads
        now_ns = time.process_time_ns if alone else time.thread_time_ns
        start_ns = now_ns()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.cpu_ns += now_ns() - start_ns
            self.calls += 1


def beside_torch(run: Callable[[], Any], times: int, *, threads: bool = False) -> tuple[float, float, int]:
    """Return a run's CPU seconds outside torch functions and in total, and its number of torch calls.

    The function is run ``times`` times; the result is from the run with the fewest seconds outside torch
    functions. Torch's functions in threads that the run starts are included if ``threads`` is true.
    """
    found = []
    for _ in range(times):
        with TorchTimer() as timer, in_threads(timer) if threads else contextlib.nullcontext():
            cpu_s = used_s(run)
        found.append((cpu_s - timer.cpu_ns / 1e9, cpu_s, timer.calls))
    return min(found)


def calling_s() -> float:
    """Return the CPU seconds of overhead per call of a torch function, such as in a module's ``__call__``.

    This time is treated as torch's work. It is measured in the reference ``train-small``.
    """
    beside_s, _, calls = beside_torch(partial(make_reference("train-small").run, 1), 20)
    return beside_s / calls


def _rest(call: DeviceCall, work: StepWork, run: Callable[[], Any], cpu_s: float) -> float:
    """Return the share of a run's CPU time that is spent outside torch; 1 if the device has no time model.

    ``cpu_s`` is the run's whole CPU time in seconds.
    """
    if call.device.time_model() is None:
        return 1.0
    share = 1.0
    if work.calls:
        per_call_s = calling_s()
        times = max(2, min(MAX_SHARES, round(TIMED_S / cpu_s)))
        beside_s, all_s, calls = beside_torch(run, times, threads=True)
        share = (beside_s - calls * per_call_s) / all_s
    return share if share >= MIN_REST else 0.0


class RestWork(NamedTuple):
    """The stand-in program for the function's code outside torch.

    ``run`` executes a unit of it, which takes ``device_s`` seconds on the device.
    """

    run: Callable[[], Any]
    device_s: float

    def slowdown(self) -> float:
        """Return the ratio of a unit's time on the device to its CPU time on this host."""
        return self.device_s / min(used_s(self.run) for _ in range(5))


def rest_work(call: DeviceCall, reference: ReferenceName) -> RestWork | None:
    """Return the stand-in program, which is of the class of code that the test's mark names.

    Return None if the reference itself is of that class, or if the device has no time model.
    """
    if call.device.time_model() is None or (call.like, reference) == ("interpreter", "interpreted"):
        return None
    if call.like == "interpreter":
        interpreted = make_reference("interpreted")
        return RestWork(partial(interpreted.run, 1), interpreted.device_s(call.device))
    run, units = program(call.like)
    return RestWork(run, units / throughput(clusters_of(call.device), call.like, 1).value)


def prepared(call: DeviceCall, trial: TrialRun, watch: TreeWatch) -> Callable[[RepeatRequest], Repetition]:
    """Return a function that measures one repetition.

    The function raises MemoryError if the call exceeds the device's memory.
    """
    reference = make_reference(trial.shots.reference)
    reference.run(1)
    reference_shot = partial(reference.run, trial.shots.units)
    beside = rest_work(call, trial.shots.reference) if trial.rest_s else None
    every = 1 if beside is None else max(1, round(trial.pairs * used_s(beside.run) / REST_S))

    def repeat(request: RepeatRequest) -> Repetition:
        limit = call.limit()
        handle = DeviceHandle(call.device, call.network, request.index)
        run = call.bind(handle)
        reference_shot()
        peak = Peak(watch)
        clock = DeviceClock(trial.pace, request.time_scale)
        handle.begin(clock)
        run()
        first = clock.end(trial.model_s)
        peak_mib, sent_bytes = peak.mib(), handle.sent_bytes
        handle.begin(None)
        if limit is not None and max(peak_mib, limit.peak_mib) > limit.limit_mib:
            raise MemoryError
        keep_freed_memory()

        def shot() -> None:
            for _ in range(trial.shots.calls):
                run()

        before = ProcessUsage.now()
        gc.collect()
        cpu_s, reference_cpu_s, rest_cpu_s = [], [used_s(reference_shot)], []
        for pair in range(trial.pairs):
            cpu_s.append(used_s(shot))
            reference_cpu_s.append(used_s(reference_shot))
            if beside is not None and pair % every == 0:
                rest_cpu_s.append(used_s(beside.run))
        used = ProcessUsage.now().since(before)
        return Repetition(
            cpu_s=cpu_s,
            reference_cpu_s=reference_cpu_s,
            rest_cpu_s=rest_cpu_s,
            peak_mib=peak_mib,
            sent_bytes=sent_bytes,
            **first._asdict(),
            waited=used.runnable_ns / max(1, used.runnable_ns + used.cpu_ns),
        )

    return repeat


def used_s(run: Callable[[], Any]) -> float:
    """Return the CPU time of a call in seconds, including that of child processes that the call reaped."""
    start_ns = cpu_ns()
    run()
    return (cpu_ns() - start_ns) / 1e9


class CallTimes(NamedTuple):
    """Times of one call, in emulated seconds; `Repetition` describes the fields."""

    blocked_s: float
    radio_s: float
    declared_s: float
    achieved_s: float


class DeviceClock:
    """Keeps one call at the device's pace. The call starts when this object is created.

    ``slowdown`` is the number of emulated seconds that code outside torch takes per CPU second of the whole
    call on this host. If ``time_scale`` is 0, the clock never waits.
    """

    def __init__(self, slowdown: float, time_scale: float) -> None:
        self._slowdown, self._time_scale = slowdown, time_scale
        self._radio_s = 0.0
        self._away_ns = self._waits = 0
        """Time in ns that the clock idled to keep the pace, and number of times that it gave up the core."""
        self._began = ProcessUsage.now()

    def now_s(self) -> float:
        """Return the time that the call has taken on the device so far, in seconds."""
        return (cpu_ns() - self._began.cpu_ns) / 1e9 * self._slowdown + self._radio_s

    def transfer(self, seconds: float) -> None:
        """Wait until the device would have finished the computation so far and then this transfer."""
        due_s = self.now_s() + seconds
        self._radio_s += seconds
        self._wait(due_s)

    def end(self, model_s: float) -> CallTimes:
        """Wait until the device would have finished the call; its torch operations take ``model_s`` there."""
        used = ProcessUsage.now().since(self._began)
        # A process that never gave up its core was not blocked: any remaining wall time is clock error.
        idle_ns = used.wall_ns - used.cpu_ns - used.runnable_ns - self._away_ns
        blocked_s = max(0, idle_ns) / 1e9 if used.gave_up > self._waits else 0.0
        declared_s = model_s + used.cpu_ns / 1e9 * self._slowdown + blocked_s + self._radio_s
        self._wait(declared_s)
        took_s = (time.monotonic_ns() - self._began.wall_ns) / 1e9
        achieved_s = took_s / self._time_scale if self._time_scale else took_s
        return CallTimes(blocked_s, self._radio_s, declared_s, achieved_s)

    def _wait(self, due_s: float) -> None:
        if not self._time_scale:
            return
        before = ProcessUsage.now()
        wait_until(self._began.wall_ns + round(due_s * self._time_scale * 1e9))
        waited = ProcessUsage.now().since(before)
        self._away_ns += waited.wall_ns - waited.cpu_ns - waited.runnable_ns
        self._waits += waited.gave_up


class DeviceHandle:
    """The device and its link, which the measured function receives as its parameter ``edge_device``."""

    def __init__(self, device: Device, network: Network | None, index: int) -> None:
        self.name, self._network = device.id, network
        self._rng = stream(0, "edge-device", index)
        self._clock: DeviceClock | None = None
        self.sent_bytes = 0

    @classmethod
    def named(cls, device: str, network: str | None) -> DeviceHandle:
        """Return the handle of the device and the network with these names."""
        return cls(load_device(device), None if network is None else load_network(network), 0)

    def begin(self, clock: DeviceClock | None) -> None:
        """Begin a call, and reset the number of sent bytes. If ``clock`` is None, transfers do not wait."""
        self._clock = clock
        self.sent_bytes = 0

    def send(self, data: Any) -> float:
        """Send ``data`` (bytes, an array, a tensor or another buffer) over the device's uplink.

        Returns after the time that the link takes; the result is this time in emulated seconds. Raises
        TypeError if ``data`` is not a buffer, and `Disconnected` if the link breaks.

        >>> handle = DeviceHandle.named("pi-4", "defedavg-400")
        >>> round(handle.send(bytes(2_200_000)), 3), handle.sent_bytes
        (0.044, 2200000)
        """
        count = nbytes(data)
        if self._network is None:
            raise ConfigError(
                f"device {self.name!r} has no network to send over; name one: "
                f'@pytest.mark.edge_device("{self.name}", network="lte")'
            )
        at_s = self._clock.now_s() if self._clock is not None else 0.0
        transfer = Link(self._network, self._rng, at_s=at_s).up(count)
        if transfer.breaks_after is not None:
            raise Disconnected(transfer.broken)
        self.sent_bytes += count
        if self._clock is not None:
            self._clock.transfer(transfer.declared_s)
        return transfer.declared_s


def nbytes(data: Any) -> int:
    """Return the size of ``data`` in bytes. Raises TypeError if it is not a buffer."""
    try:
        return int(data.nbytes if hasattr(data, "nbytes") else memoryview(data).nbytes)
    except TypeError:
        raise TypeError(f"send() takes bytes, an array or a tensor (got {type(data).__name__})") from None


class ReferenceWork(NamedTuple):
    """A reference program: ``run(n)`` does n units, and ``work`` counts the torch operations of one unit."""

    work: StepWork
    run: Callable[[int], None]

    @property
    def flop(self) -> float:
        return self.work.flop or INTERPRETED_FLOP

    def device_s(self, device: Device) -> float:
        """Return the time in seconds that a unit takes on the device.

        For interpreted code, the time depends on how fast the device's fastest core runs Python, or on the
        device's training rate if the profile lists no cores.
        """
        if self.work.calls and (seconds := device_s(device, self.work)):
            return seconds
        if not self.work.calls and device.clusters:
            return INTERPRETED_STEPS / throughput(clusters_of(device), "interpreter", 1).value
        return self.flop / device.train_flop_per_s


def device_s(device: Device, work: StepWork) -> float:
    model = device.time_model()
    return model.seconds(work) if model is not None and work.calls else 0.0


def make_reference(name: ReferenceName) -> ReferenceWork:
    """Return the reference with this name, ready to run."""
    if name == "interpreted":
        return ReferenceWork(StepWork(), _interpreted)
    with torch_seed(0):
        net, inputs = _net(name)
    # With a learning rate of 0, all steps do the same computation.
    step = sgd_step(net, inputs, torch.arange(len(inputs)) % 10, 0.0)

    def run(units: int) -> None:
        for _ in range(units):
            step()

    with WorkMeter() as meter:
        run(1)
    return ReferenceWork(meter.work(), run)


def _most_like(work: StepWork, cpu_s: float) -> ReferenceName:
    """Return the reference that is most similar to a function with this torch work and CPU time."""
    small = make_reference("train-small")
    small_s = min(used_s(partial(small.run, 1)) for _ in range(20))
    if not work.calls or work.flop < SMALL_SHARE * small.flop / small_s * cpu_s:
        return "interpreted"
    per_call = math.log(max(1.0, work.flop / work.calls))

    def distance(name: ReferenceName) -> float:
        like = make_reference(name).work
        return abs(math.log(like.flop / like.calls) - per_call)

    names: tuple[ReferenceName, ...] = ("train-small", "train-large")
    return min(names, key=distance)


def _net(name: ReferenceName) -> tuple[nn.Module, torch.Tensor]:
    if name == "train-small":  # dominated by the overhead of calls into torch
        return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)), torch.randn(32, 64)
    # dominated by convolutions and matrix products
    first = nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    last = nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*first, *second, *last), torch.randn(8, 1, 28, 28)


def _interpreted(units: int) -> None:
    python_bodies(INTERPRETED_STEPS * units)
