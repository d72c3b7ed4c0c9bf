"""Measuring loops: repeat a function until its time is precise; measure it again if there is no verdict."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from edgefl.errors import Invalid, NotMet, OutOfDeviceMemory
from edgefl.host.capacity import StealMeter
from edgefl.regression.counts import CountedRun
from edgefl.regression.measurement import MIN_REPETITIONS, Measurement, MeasurementPlan
from edgefl.regression.process import (
    Answer,
    CountRequest,
    Failure,
    MeasuringProcess,
    RepeatRequest,
    Repetition,
    Request,
    TrialRun,
    alone,
)
from edgefl.regression.verdict import NeedMore, Verdict

MAX_REPETITIONS = 60
PRECISE = 0.0125
"""Measuring ends when half the width of the 90% interval of the median time is at most this share of the
median."""

COUNTED_CALLS = 10
"""Time limit for counting, as a multiple of the time limit for one process. The function is called up to ten
times to count its work, and most of these calls are slowed down by a counter."""

Tell = Callable[[str], None]


class TimeLimit:
    """Limit on the total wall-clock time of one test's measurements, excluding waits for other tests."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._before_s, self._began_s = 0.0, math.nan

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time that is spent in this context towards the limit."""
        self._began_s = time.monotonic()
        try:
            yield
        finally:
            self._before_s, self._began_s = self.spent_s, math.nan

    @property
    def spent_s(self) -> float:
        passed_s = time.monotonic() - self._began_s
        return self._before_s + (passed_s if passed_s == passed_s else 0.0)

    def allows(self, seconds: float) -> bool:
        """Return True if at least ``seconds`` are left."""
        return self.spent_s + seconds <= self.seconds


def judged(
    judge: Callable[[Sequence[Measurement]], Verdict | NeedMore],
    first: Measurement,
    again: Callable[[], Measurement],
) -> Verdict:
    """Judge the ``first`` measurement; call ``again`` for further measurements while ``judge`` needs more.

    If a further measurement raises `Invalid`, return `NeedMore.otherwise`; if that is None, raise `Invalid`.
    """
    __tracebackhide__ = True
    made = [first]
    while isinstance(found := judge(made), NeedMore):
        try:
            made += [again() for _ in range(found.measurements)]
        except Invalid:
            if found.otherwise is None:
                raise
            return found.otherwise
    return found


def count(process: MeasuringProcess, plan: MeasurementPlan, tell: Tell = lambda _: None) -> CountedRun:
    """Count the function's work, without waiting for other tests. Raises the same exceptions as `measure`."""
    __tracebackhide__ = True
    tell("counting")
    fields = msgspec.structs.asdict(plan.request)
    fields["limit_s"] *= COUNTED_CALLS
    answer = _ask(process, plan, CountRequest(**fields))
    assert isinstance(answer, CountedRun)
    return answer


def measure(
    process: MeasuringProcess, plan: MeasurementPlan, limit: TimeLimit, tell: Tell = lambda _: None
) -> Measurement:
    """Repeat the function until its median time is known to ±1.25%.

    There are at least ``plan.repetitions`` repetitions. If the plan is ``precise``, there may be up to 60, or
    ``plan.repetitions`` if that is more; otherwise there are no further ones. No other test measures on this
    host at the same time. If the result of a precise plan is unreliable and the time limit allows it,
    everything is measured once more, because the disturbance may have ended. ``tell`` is called before each
    repetition. Raises `OutOfDeviceMemory` if the function exceeds the device's memory, `NotMet` if it raises
    an exception, is killed or takes too long, pytest's own exception if it skips the test or calls
    `pytest.xfail`, and `Invalid` if fewer than nine repetitions, or not even the first calls, fit into
    ``limit``.
    """
    __tracebackhide__ = True
    with alone(), limit.counted():
        before_s = limit.spent_s
        measured = _measured(process, plan, limit, tell)
        if not (plan.precise and measured.doubts) or not limit.allows(limit.spent_s - before_s):
            return measured
        tell(f"measuring once more: {measured.doubts[0]}")
        return _measured(process, plan, limit, tell)


def _measured(process: MeasuringProcess, plan: MeasurementPlan, limit: TimeLimit, tell: Tell) -> Measurement:
    __tracebackhide__ = True
    meter = StealMeter()
    limit_s = min(plan.request.limit_s, limit.seconds)
    trial = _ask(process, plan, msgspec.structs.replace(plan.request, limit_s=limit_s), limit)
    assert isinstance(trial, TrialRun)
    repetitions: list[Repetition] = []
    most = max(MAX_REPETITIONS if plan.precise else 0, plan.repetitions)
    for index in range(most):
        before_s = limit.spent_s
        tell(f"time on the device, repetition {index + 1} of at least {plan.repetitions} and at most {most}")
        found = _ask(process, plan, RepeatRequest(index, plan.time_scale), limit)
        assert isinstance(found, Repetition)
        repetitions.append(found)
        enough = index + 1 >= plan.repetitions
        if enough and Measurement(plan, trial, repetitions, None).noise <= PRECISE:
            break
        if not limit.allows(limit.spent_s - before_s):
            _require_enough(plan, limit, index + 1)
            break
    return Measurement(plan, trial, repetitions, meter.share())


def _require_enough(plan: MeasurementPlan, limit: TimeLimit, made: int) -> None:
    __tracebackhide__ = True
    if made < MIN_REPETITIONS:
        raise Invalid(
            f"{plan.request.function.qualname} on {plan.device.id}: only {made} repetitions fit into the "
            f"{limit.seconds:g} s that --edgefl-limit allows; at least {MIN_REPETITIONS} are needed"
        )


def _ask(
    process: MeasuringProcess, plan: MeasurementPlan, request: Request, limit: TimeLimit | None = None
) -> Answer:
    __tracebackhide__ = True
    answer = process.ask(request)
    if not isinstance(answer, Failure):
        return answer
    device, name, why = plan.device.id, plan.request.function.qualname, answer.why
    match answer.kind:
        case "memory":
            allowed_mib = plan.device.app_limit_mib  # None: the function used up this host's memory
            allowed = "no memory was left" if allowed_mib is None else f"{allowed_mib:g} MiB allowed"
            raise OutOfDeviceMemory(f"out of memory on {device}: {allowed}")
        case "signal":
            raise NotMet(f"{name} on {device}: its process was ended by {why}")
        case "late" if limit is not None and limit.seconds < plan.request.limit_s:
            raise Invalid(f"{name} on {device}: not finished in the {why} s that --edgefl-limit allows")
        case "late":
            late = f"not finished in {why} s"
            if isinstance(request, CountRequest):
                late = f"not counted in {why} s, {COUNTED_CALLS} times limit_s"
            raise NotMet(f"{name} on {device}: {late}; set a larger limit_s= in the mark")
        case "skipped":
            pytest.skip(why)
        case "expected":
            pytest.xfail(why)  # with --runxfail, this does nothing
            raise NotMet(f"{name} on {device}: expected to fail: {why}")
        case _:
            raise NotMet(f"{name} failed on {device}:\n{why}")
