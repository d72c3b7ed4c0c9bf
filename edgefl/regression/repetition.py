"""One repetition, in a process of its own: one call as on the device, then calls beside a reference."""

from __future__ import annotations

import gc
import inspect
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from edgefl.devices.schema import Device, Network
from edgefl.limits.memory import MemoryLimit, limit_memory
from edgefl.regression import reference as references
from edgefl.regression.device_clock import DeviceClock, Usage, cpu_ns
from edgefl.regression.orders import MOST_AT_A_TIME, Against, Ready, Repetition
from edgefl.regression.peak import Peak
from edgefl.regression.phone import Phone
from edgefl.regression.reference import Reference
from edgefl.run.process import keep_freed_memory
from edgefl.seeds import stream

SHOT_S = 0.0003
"""CPU seconds that a shot takes at least: shorter calls are timed several at once."""
REFERENCE_SHOT_S = 0.02
"""And a shot of the reference at most; up to there it is as long as the function's."""
TIMED_S = 0.12
"""CPU seconds in which the function is timed in each repetition; one call where that takes longer."""
MOST_PAIRS = 60
WAITING_S = 0.3
"""Wall seconds in which it is timed at most, beyond one call: one that waits takes little CPU time."""

PHONE = "edge_device"
"""A parameter of this name is given the device."""


class Subject(NamedTuple):
    """What is measured, on which device."""

    function: Callable[..., Any]
    setup: Callable[..., Any] | None
    args: list[Any]
    kwargs: dict[str, Any]
    device: Device
    network: Network | None
    seed: int

    def call(self, phone: Phone) -> Callable[[], Any]:
        """The function with its arguments, set up anew."""
        args, kwargs = list(self.args), dict(self.kwargs)
        if self.setup is not None:
            args.insert(0, self.setup(*args, **kwargs))
        if PHONE in inspect.signature(self.function).parameters:
            kwargs[PHONE] = phone
        function = self.function
        return lambda: function(*args, **kwargs)

    def limit(self) -> MemoryLimit | None:
        """Hold this process to what the device gives an app, from now on."""
        return limit_memory(self.device.app_limit_mib) if self.device.app_limit_mib else None

    def phone(self, index: int) -> Phone:
        return Phone(self.device, self.network, stream(self.seed, "edge-device", index))


def get_ready(subject: Subject, wanted: Against | None) -> Ready:
    """Learn what a call costs and what it is like, in a process that is thrown away."""
    from edgefl.learning.flops import FlopCount

    subject.limit()
    known = set(sys.modules)
    run = subject.call(subject.phone(0))
    run()
    imported = [name for name in sys.modules if name.startswith("torch.") and name not in known]
    with FlopCount() as count:
        run()
    cpu_s, wall_s = (min(both) for both in zip(*(_cpu_and_wall_s(run) for _ in range(2)), strict=True))
    most_calls = max(1, round(WAITING_S / wall_s))
    small = references.make("train-small")
    small_s = min(_cpu_s(lambda: small.run(1)) for _ in range(20))
    name = (
        wanted.reference
        if wanted is not None
        else references.most_like(count.total, count.operations, cpu_s, small.flop / small_s)
    )
    reference = references.make(name)
    unit_s = min(_cpu_s(lambda: reference.run(1)) for _ in range(5))
    calls = min(most_calls, MOST_AT_A_TIME, max(1, round(SHOT_S / cpu_s)))
    units = min(MOST_AT_A_TIME, max(1, round(min(calls * cpu_s, REFERENCE_SHOT_S) / unit_s)))
    against = wanted or Against(reference=name, units=units, calls=calls)
    shot_s = against.calls * cpu_s
    return Ready(
        against=against,
        reference_flop=reference.flop,
        unit_cpu_s=unit_s,
        flop=float(count.total),
        imported=imported,
        pairs=min(MOST_PAIRS, max(1, round(TIMED_S / shot_s)), max(1, most_calls // against.calls)),
    )


def repeat(subject: Subject, ready: Ready, reference: Reference, time_scale: float, index: int) -> Repetition:
    """Measure once. MemoryError where the function needs more than the device has."""
    limit = subject.limit()
    phone = subject.phone(index)
    run = subject.call(phone)
    reference.run(ready.against.units)
    rate = subject.device.train_flop_per_s
    peak = Peak()
    clock = DeviceClock(reference.flop / rate / ready.unit_cpu_s, time_scale)
    phone.begin(clock)
    run()
    first = clock.end(ready.flop / rate)
    peak_mib, sent_bytes = peak.mib(), phone.sent_bytes
    phone.begin(None)
    if limit is not None and max(peak_mib, limit.peak_mib) > limit.limit_mib:
        raise MemoryError
    keep_freed_memory()
    before = Usage.now()
    cpu_s, reference_cpu_s = _in_turn(run, ready, reference)
    used = Usage.now().since(before)
    return Repetition(
        cpu_s=cpu_s,
        reference_cpu_s=reference_cpu_s,
        blocked_s=first.blocked_s,
        peak_mib=peak_mib,
        sent_bytes=sent_bytes,
        radio_s=first.radio_s,
        declared_s=first.declared_s,
        achieved_s=first.achieved_s,
        waited=used.runnable_ns / max(1, used.runnable_ns + used.cpu_ns),
    )


def _in_turn(run: Callable[[], Any], ready: Ready, reference: Reference) -> tuple[list[float], list[float]]:
    """Shots of the function and of the reference in turn, the reference first and last."""

    def shot() -> None:
        for _ in range(ready.against.calls):
            run()

    def reference_shot() -> None:
        reference.run(ready.against.units)

    gc.collect()
    cpu_s, reference_cpu_s = [], [_cpu_s(reference_shot)]
    for _ in range(ready.pairs):
        cpu_s.append(_cpu_s(shot))
        reference_cpu_s.append(_cpu_s(reference_shot))
    return cpu_s, reference_cpu_s


def _cpu_and_wall_s(run: Callable[[], Any]) -> tuple[float, float]:
    start_ns = time.monotonic_ns()
    return _cpu_s(run), (time.monotonic_ns() - start_ns) / 1e9


def _cpu_s(run: Callable[[], Any]) -> float:
    start_ns = cpu_ns()
    run()
    return (cpu_ns() - start_ns) / 1e9
