"""The ``edge_device`` of a test: runs functions as the device would, holds them to budgets and baselines."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from edgefl.devices import load_device, load_network
from edgefl.devices.schema import Device, Network
from edgefl.errors import ConfigError, Invalid, NotMet, ProfileError
from edgefl.regression import baseline, verdict
from edgefl.regression.imports import locate
from edgefl.regression.inference import LEAST_REPETITIONS
from edgefl.regression.measurement import Measurement, Plan, measure, profile_sha256
from edgefl.regression.orders import Order
from edgefl.regression.session import Session
from edgefl.regression.verdict import TESTED, Compared, Outcome

DEFAULT_REPETITIONS = 15
DEFAULT_LIMIT_S = 120.0
DOUBTFUL = 0.5
"""Share of the tolerance beyond which a growth is looked at a second time."""
BASELINE_TIMES = 2
"""As many repetitions for a baseline: many measurements will be held against it."""


class Where(NamedTuple):
    """Which test this is."""

    test: str
    """Its node id without the file: ``test_step[pixel-3a]``."""
    file: Path
    group: str
    """Shared by the same test on its other devices."""
    devices: int
    """How many there are in the group."""


class Wishes(NamedTuple):
    """What the mark asks for."""

    profile: str
    repetitions: int | None = None
    network: str | None = None
    time_scale: float | None = None
    limit_s: float = DEFAULT_LIMIT_S
    """Wall seconds for each of its processes."""
    budgets: Mapping[str, float] = {}


class Result:
    """What one function takes on the device: medians of its repetitions, in the device's seconds."""

    def __init__(self, function: str, measured: Measurement) -> None:
        self.function = function
        self.measured = measured
        self.failures: list[str] = []
        self.invalid: str | None = None

    @property
    def device(self) -> str:
        return self.measured.device.id

    @property
    def seconds(self) -> float:
        """Device time of a call, its transfers included."""
        return statistics.median(self.measured.seconds)

    @property
    def host_cpu_s(self) -> float:
        """CPU seconds that a call takes this host."""
        return statistics.median(self.measured.host_cpu_s)

    @property
    def peak_mib(self) -> float:
        """Memory that a call takes at its peak, on top of what was there before it."""
        return statistics.median(self.measured.peak_mib)

    @property
    def sent_mib(self) -> float:
        return statistics.median(self.measured.sent_mib)

    @property
    def joules(self) -> float | None:
        """From the device's battery; None where its profile does not say what it draws."""
        try:
            return statistics.median(self.measured.joules)
        except ProfileError:
            return None

    @property
    def repetitions(self) -> int:
        return len(self.measured.repetitions)

    @property
    def outcome(self) -> Outcome:
        if self.failures:
            return "FAIL"
        return "INVALID" if self.invalid else "PASS"

    def assert_budget(self, **budgets: float) -> None:
        """Fail unless each figure is within its budget: ``seconds``, ``peak_mib``, ``sent_mib``, ``joules``.

        Held against a budget is the one-sided 95% bootstrap upper bound of the median.
        """
        __tracebackhide__ = True
        self._require(list(verdict.over_budget(self.measured, budgets)))

    def assert_pace(self, margin: float = 0.03) -> None:
        """Fail unless the device's pace is shown to be kept: two one-sided tests at 5%, ± ``margin``."""
        __tracebackhide__ = True
        why = verdict.out_of_pace(self.measured, margin)
        self._require([why] if why else [])

    def _require(self, wrong: list[str]) -> None:
        __tracebackhide__ = True
        self.failures += wrong
        if wrong:
            raise NotMet(f"{self.function} on {self.device}: {'; '.join(wrong)}")

    def __repr__(self) -> str:
        return (
            f"<{self.function} on {self.device}: {verdict.figure(self.seconds)} s, "
            f"{verdict.figure(self.peak_mib)} MiB, {self.repetitions} repetitions>"
        )


class EdgeDevice:
    """One device in one test."""

    def __init__(self, wishes: Wishes, where: Where, session: Session) -> None:
        self._wishes = wishes
        self._where = where
        self._session = session
        self.profile: Device = load_device(wishes.profile)
        if self.profile.cpu is None:
            raise ConfigError(
                f"device {self.profile.id!r} has a delay model instead of a processor: there is nothing to "
                "time a function by"
            )
        network = wishes.network or self.profile.network
        self.network: Network | None = None if network is None else load_network(network)
        self._network_name = network
        self.results: list[Result] = []
        self._names: dict[str, int] = {}

    @property
    def name(self) -> str:
        """The profile's id."""
        return self.profile.id

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        setup: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Result:
        """Run ``function(*args, **kwargs)`` as this device would, in processes of their own.

        The function is at the top of a module; its arguments are what JSON holds: numbers, strings, lists,
        tables. ``setup(*args, **kwargs)`` runs before it in each repetition, unmeasured but within the
        device's memory; what it returns is the function's first argument. A parameter named ``edge_device``
        is given the device, whose ``send(data)`` sends. `OutOfDeviceMemory` if the device has not enough
        memory, `Invalid` if the figures cannot be believed, ConfigError for a function that cannot be
        handed over.
        """
        __tracebackhide__ = True
        where = locate(function)
        label = self._label(function)
        if self._session.options.save or self._session.options.compare:
            baseline.load(self._file)  # a broken one is found before minutes are spent
        before = self._before(label) if self._session.options.compare else None
        if isinstance(before, str) and not self._wishes.budgets:  # then there is nothing to learn
            raise Invalid(f"{label} on {self.name}: {before}")
        order = Order(
            function=where,
            setup=None if setup is None else locate(setup, "setup"),
            args=[_plain(f"argument {place}", value) for place, value in enumerate(args)],
            kwargs={name: _plain(f"argument {name}", value) for name, value in kwargs.items()},
            path=list(sys.path),
            device=self._wishes.profile,
            network=self._network_name,
            seed=0,
            against=before.reference.against if isinstance(before, baseline.Entry) else None,
            limit_s=self._wishes.limit_s,
        )
        result = Result(label, self._measure(order))
        self.results.append(result)
        self._believe(result, result.measured)
        return result

    def judge(self) -> None:
        """After the test: the budgets of its mark, and the baselines. `NotMet` or `Invalid` for the first."""
        __tracebackhide__ = True
        if not (self._names or self.results):
            raise NotMet(
                "edge_device: nothing was run; call edge_device.run(function, …), or leave the fixture out: "
                "then the test itself runs on the device"
            )
        for result in self.results:
            if self._wishes.budgets:
                result.assert_budget(**self._wishes.budgets)
            if self._session.options.compare:
                self._compare(result)

    def grown(self, result: Result, before: baseline.Entry) -> list[Compared]:
        """The metrics that take more than their baseline. `Invalid` where the host's load leaves that open.

        Where one seems to, or is on the way to it, the function is measured a second time and both
        measurements count together: what a neighbour on the host did may look like a change for some seconds,
        or hide one. A load at which nothing compares may pass, too.
        """
        __tracebackhide__ = True
        tolerance, devices = self._session.options.tolerance, self._where.devices
        group = f"{self._where.group} {result.function}"
        now = self.entry(result)
        if before.loads_apart(now) is not None:
            now = self._again(result, before)
        first = verdict.compare(before, now, tolerance * DOUBTFUL)
        changed = self._session.changed(group, devices, first)
        looks = (*first, *verdict.compare(before, now, tolerance))
        if not changed and not any(one.undecided for one in looks):
            return []
        later = self._again(result, before)
        drift = max(before.drift(now), before.drift(later))
        compared = verdict.compare(before, baseline.together(now, later), tolerance, drift)
        grew = verdict.changed(compared, devices * len(TESTED))
        found = [one for one, more in zip(compared, grew, strict=True) if more]
        for one in compared:
            if one.undecided and not found:
                why = f"{one}; the host's load is another, which makes that uncertain by {one.drift:.1%}"
                raise self._invalid(result, why)
        return found

    def _again(self, result: Result, before: baseline.Entry) -> baseline.Entry:
        """Another measurement of what was measured. `Invalid` if it does not compare with the baseline."""
        __tracebackhide__ = True
        measured = measure(self._session.process(self._where.file), result.measured.plan)
        self._believe(result, measured)
        now = self._entry(result.function, measured)
        if (why := before.loads_apart(now)) is not None:
            raise self._invalid(result, why)
        return now

    def entry(self, result: Result) -> baseline.Entry:
        """What a baseline keeps of a result."""
        return self._entry(result.function, result.measured)

    def _entry(self, function: str, measured: Measurement) -> baseline.Entry:
        return baseline.entry(self._where.test, function, measured)

    def _believe(self, result: Result, measured: Measurement) -> None:
        __tracebackhide__ = True
        if reasons := list(measured.reasons()):
            raise self._invalid(result, "; ".join(reasons))

    @property
    def _file(self) -> Path:
        return baseline.path_of(self._where.file)

    def _measure(self, order: Order) -> Measurement:
        __tracebackhide__ = True
        options, wishes = self._session.options, self._wishes
        repetitions = options.repetitions or wishes.repetitions or DEFAULT_REPETITIONS
        if options.save:
            repetitions *= BASELINE_TIMES
        scale = options.time_scale if options.time_scale is not None else wishes.time_scale
        plan = Plan(self.profile, self.network, order, repetitions, 1.0 if scale is None else scale)
        return measure(self._session.process(self._where.file), plan)

    def _label(self, function: Callable[..., Any]) -> str:
        name = function.__qualname__
        self._names[name] = self._names.get(name, 0) + 1
        return name if self._names[name] == 1 else f"{name} {self._names[name]}"

    def _compare(self, result: Result) -> None:
        __tracebackhide__ = True
        before, now = self._before(result.function), self.entry(result)
        if isinstance(before, str):
            raise self._invalid(result, before)
        more = verdict.more_flop(before, now, self._session.options.tolerance)
        wrong = [] if more is None else [more]
        try:
            wrong += map(str, self.grown(result, before))
        except Invalid:
            if not wrong:  # what is counted grew, whatever the host's load
                raise
        result.failures += wrong
        if wrong:
            raise NotMet(f"{result.function} changed since its baseline: {'; '.join(wrong)}")

    def _invalid(self, result: Result, why: str) -> Invalid:
        result.invalid = why
        return Invalid(f"{result.function} on {self.name}: {why}")

    def _before(self, function: str) -> baseline.Entry | str:
        """The function's baseline, or why there is none that compares. What is asked of it is known before
        anything is measured: figures are taken against the reference that the baseline names."""
        here, entries = baseline.this_host(), baseline.load(self._file)
        if (found := entries.get((self._where.test, function, here.fingerprint))) is not None:
            outdated = found.outdated(profile_sha256(self.profile, self.network))
            return found if outdated is None else f"{outdated}; save it again with --edgefl-save"
        if others := {
            one.host.software for key, one in entries.items() if key[:2] == (self._where.test, function)
        }:
            return (
                f"the baseline in {self._file.name} is of another host or software "
                f"({'; '.join(sorted(others))}; here: {here.software}); save one here with --edgefl-save"
            )
        return f"no baseline in {self._file}; save one with --edgefl-save"


def _plain(name: str, value: Any) -> Any:
    """The value, if another process gets the same from its JSON."""
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ConfigError(
            f"{name} must be what JSON holds, so that another process gets it: numbers, strings, lists, "
            f"tables (got a {type(value).__name__}); let setup= make anything else"
        )
    return value


def least_repetitions(value: Any) -> int:
    """How often to repeat, checked."""
    if isinstance(value, bool) or not isinstance(value, int) or value < LEAST_REPETITIONS:
        raise ConfigError(
            f"repetitions must be a whole number of at least {LEAST_REPETITIONS} (got {value!r})"
        )
    return value
