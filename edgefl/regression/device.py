"""The fixture ``edge_device``: runs functions at a device's pace and judges them by budgets and baselines."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pytest

from edgefl.devices import load_device, load_network
from edgefl.devices.profiles import is_path
from edgefl.devices.schema import Device, Network
from edgefl.errors import ConfigError, Invalid, NotMet
from edgefl.experiment import NonNegative
from edgefl.host.verdict import Outcome
from edgefl.regression import baseline, verdict
from edgefl.regression.baseline import BaselineEntry, Samples
from edgefl.regression.callgrind import count_native
from edgefl.regression.counts import FIGURES, CountedEntry, CountedRun, Figure, compare, entry_of, summary
from edgefl.regression.measure import TimeLimit, count, judged, measure
from edgefl.regression.measurement import MIN_REPETITIONS, Measurement, MeasurementPlan, profile_sha256
from edgefl.regression.process import PrepareRequest, RestClass, Surroundings, locate
from edgefl.regression.session import Session
from edgefl.regression.sides import CallRequest
from edgefl.regression.verdict import BUDGETS, BY_TIME, Family, NeedMore, Verdict, figure
from edgefl.validation import convert

DEFAULT_REPETITIONS = 15
DEFAULT_LIMIT_S = 120.0
MAX_LIMIT_S = 86_400
NOTHING_DONE = (
    "nothing was measured: the function executes no more instructions than an empty function, calls no torch "
    "operation and sends nothing; pass the function that does the work to run()"
)
BASELINE_TIMES = 2
"""Factor by which the number of repetitions is increased for a baseline. A baseline needs more repetitions,
because many measurements are compared with it."""


class MarkKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keyword arguments of a mark ``edge_device(…)``."""

    repetitions: Annotated[int, msgspec.Meta(ge=MIN_REPETITIONS)] | None = None
    network: str | None = None
    time_scale: NonNegative | None = None
    like: RestClass = "interpreter"
    """Class of code to which the function's code outside torch belongs, such as interpreted Python. The
    device has a separate speed for each class."""
    limit_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_LIMIT_S)] = DEFAULT_LIMIT_S
    """Maximum wall-clock time of each process that runs the function, in seconds."""
    seconds: NonNegative | None = None
    peak_mib: NonNegative | None = None
    sent_mib: NonNegative | None = None
    joules: NonNegative | None = None
    end: Literal["middle", "slow"] = "middle"
    """Which real devices must meet the budget ``seconds``: those in the middle of the time model's 90%
    interval, or also those at its slow end."""
    counted: Literal["python", "native"] = "python"
    """With ``native``, native instructions are also counted (under Valgrind), including those of all
    programs that the function starts."""
    tolerance: NonNegative = 0.0
    """Percentage by which each counted metric may grow."""

    @property
    def budgets(self) -> dict[str, float]:
        given = {name: getattr(self, name) for name in BUDGETS}
        return {name: budget for name, budget in given.items() if budget is not None}


class MarkOptions(MarkKeys, frozen=True):
    """The arguments of a mark, for one of the device profiles that it names."""

    profile: str


def mark_options(profiles: Sequence[Any], keys: Mapping[str, Any]) -> list[MarkOptions]:
    """Validate a mark's arguments. Raises ConfigError for an unknown or invalid profile, key or value."""
    if not profiles:
        raise ConfigError('edge_device: no profile is named; name one or more: edge_device("pixel-3a")')
    for profile in profiles:
        if not isinstance(profile, str):
            raise ConfigError(f"edge_device: a profile must be named by a string (got {profile!r})")
        load_device(profile)
    if len(set(profiles)) < len(profiles):
        raise ConfigError(f"edge_device: a profile is named twice: {', '.join(profiles)}")
    found = convert(keys, MarkKeys, "edge_device")
    if found.network is not None:
        load_network(found.network)
        found = msgspec.structs.replace(found, network=_absolute(found.network))
    return [MarkOptions(_absolute(profile), **msgspec.structs.asdict(found)) for profile in profiles]


def _absolute(profile: str) -> str:
    """Make the path of a profile absolute, because a test may change the working folder before it runs."""
    return os.path.abspath(profile) if is_path(profile) else profile


class DeviceResult:
    """Metrics of one function on the device: its counted work, and medians over its repetitions.

    All times except ``host_cpu_s`` are seconds on the device. The function is not measured until a metric
    other than its counted work is read. ``measure`` is called with True if the time must be precise. If
    ``slow_end`` is true, a budget of seconds must hold at the slow end of the time model's interval.
    """

    def __init__(
        self,
        function: str,
        device: str,
        measure: Callable[[bool], Measurement],
        counted: CountedRun | None = None,
        *,
        slow_end: bool = False,
    ) -> None:
        self.function, self.device, self.counted = function, device, counted
        self._measure, self._slow_end = measure, slow_end
        self.timed: Measurement | None = None
        """The measurement; None if the function has not been timed yet."""
        self.advice = ""
        """Description of growth that was measured on this host but does not fail the test; empty if none."""
        self.left_out = ""
        """The metrics that were not compared with the baseline, and why; empty if all were compared."""
        self._verdicts: list[Verdict] = []
        self._unasked: list[Verdict] = []

    def measurement(self, precise: bool) -> Measurement:
        """Return the measurement. If ``precise`` is False, its time may be unreliable."""
        if self.timed is None or (precise and not self.timed.plan.precise and self.timed.doubts):
            self.timed = self._measure(precise)
        return self.timed

    @property
    def measured(self) -> Measurement:
        """The precise measurement; it is made when this property is first read."""
        return self.measurement(precise=True)

    @property
    def repetitions(self) -> int:
        return len(self.measurement(precise=False).repetitions)

    @property
    def seconds(self) -> float:
        """Median time of a call on the device, including transfers."""
        return statistics.median(self.measured.seconds)

    @property
    def host_cpu_s(self) -> float:
        """Median CPU time of a call on this host, in seconds."""
        return statistics.median(self.measured.host_cpu_s)

    @property
    def peak_mib(self) -> float:
        """Median, over the repetitions, of the peak memory growth during the first call, in MiB."""
        return statistics.median(self.measurement(precise=False).peak_mib)

    @property
    def sent_mib(self) -> float:
        """Median amount of data sent per call, in MiB."""
        return statistics.median(self.measurement(precise=False).sent_mib)

    @property
    def joules(self) -> float | None:
        """Median energy that a call draws from the battery, in joules; None if the power is not known."""
        return self.measured.median("joules")

    @property
    def note(self) -> str:
        """A message if unreliable measurements passed because they are far below the budgets; else empty."""
        return next((one.note for one in self._verdicts if one.note), "")

    @property
    def doubt(self) -> str:
        """Why the time is unreliable; empty if it is reliable, not requested or far below the budgets."""
        asked = self.timed is not None and self.timed.plan.precise and not self.note
        return verdict.doubted(self.measured).why if asked else ""

    @property
    def outcome(self) -> Outcome:
        outcomes = {one.outcome for one in self._verdicts}
        return "FAIL" if "FAIL" in outcomes else "INVALID" if "INVALID" in outcomes or self.doubt else "PASS"

    @property
    def why(self) -> str:
        """The reason for the outcome, or else notes, such as why unreliable measurements passed."""
        whys = [one.why for one in self._verdicts if one.outcome == self.outcome and one.why]
        return (
            "; ".join(whys) or self.doubt or "; ".join(filter(None, (self.note, self.advice, self.left_out)))
        )

    @property
    def grew(self) -> bool:
        """True if a metric grew since the baseline."""
        return any(one.grew for one in self._verdicts)

    def assert_budget(self, **budgets: float) -> None:
        """Fail unless each metric is within its budget: ``seconds``, ``peak_mib``, ``sent_mib``, ``joules``.

        The one-sided 95% bootstrap upper bound of each median must be within the budget; with the mark's
        ``end="slow"``, ``seconds`` is judged at the slow end of the time model's interval. Raises `Invalid`
        if the measurements are unreliable and not below half of each budget. Raises ConfigError if a budget
        is unknown, or if its metric cannot be computed from the device's profile.
        """
        __tracebackhide__ = True
        if budgets:
            measured = self.measurement(not BY_TIME.isdisjoint(budgets))
            found = verdict.within(measured, budgets, settled=bool(self.note), slow_end=self._slow_end)
            self.require(found, asked=True)

    def assert_pace(self, margin: float = 0.03) -> None:
        """Fail unless two one-sided tests at the 5% level show that the pace was kept within ± ``margin``.

        The pace is the ratio of the achieved to the declared time of a call; it should be 1.
        """
        __tracebackhide__ = True
        self.require(verdict.paced(self.measured, margin, settled=bool(self.note)), asked=True)

    def require(self, found: Verdict, *, asked: bool = False) -> None:
        """Record a verdict; raise `NotMet` or `Invalid` unless it is PASS. ``asked`` is True if the test
        itself requested the verdict."""
        __tracebackhide__ = True
        self._verdicts.append(found)
        if not asked:
            self._unasked.append(found)
        self._raise(found)

    def require_unasked(self) -> None:
        """Raise the first exception of an unrequested verdict again, because the test may have caught it."""
        __tracebackhide__ = True
        for found in self._unasked:
            self._raise(found)

    def _raise(self, found: Verdict) -> None:
        __tracebackhide__ = True
        why = f"{self.function} on {self.device}: {found.why}"
        if found.grew:
            why = f"REGRESSION: {why}"
        if found.outcome != "PASS":
            raise NotMet(why) if found.outcome == "FAIL" else Invalid(why)

    def __repr__(self) -> str:
        figures = "" if self.counted is None else summary(self.counted)
        if self.timed is not None:
            seconds = figure(statistics.median(self.timed.seconds))
            figures = f"{seconds} s, {figure(self.peak_mib)} MiB, {self.repetitions} repetitions"
        return f"<{self.function} on {self.device}: {figures}>"


@dataclass
class Reasons:
    """Reasons why a test ``failed`` or is ``invalid``; both are empty if the test passed or was skipped."""

    failed: str = ""
    invalid: str = ""
    skipped: bool = False


class DeviceTest(NamedTuple):
    """A test, run on one of its devices."""

    test: str
    """Pytest's node id without the file: ``test_step[pixel-3a]``."""
    file: Path
    group: str
    """Identifies the test and its parameters' values; the same for all devices of the test."""
    devices: int
    """Number of devices on which the test runs."""
    label: str = ""
    """Name of the test with its parameters' values, as it is shown; by default ``group``."""


class EdgeDevice:
    """The object that the fixture provides: one device in one test."""

    def __init__(self, mark: MarkOptions, test: DeviceTest, session: Session) -> None:
        self._mark, self._test, self.session = mark, test, session
        self.profile: Device = load_device(mark.profile)
        if self.profile.cpu is None:
            why = "has a delay model instead of a processor, so it cannot time a function"
            raise ConfigError(f"device {self.profile.id!r} {why}")
        if mark.end == "slow" and not self.profile.clusters:
            why = "lists no cores, so the slow end of its times is not known; leave out end='slow'"
            raise ConfigError(f"device {self.profile.id!r} {why}")
        self._network_name = mark.network or self.profile.network
        self.network: Network | None = load_network(self._network_name) if self._network_name else None
        self.name = self.profile.id
        self.results: list[DeviceResult] = []
        self._calls: Counter[str] = Counter()
        self._surroundings: dict[str, Surroundings] = {}
        """Surroundings of the test at each call of `run`, keyed by the call's label."""
        self._limit = TimeLimit(session.options.limit_s)

    def run(
        self, function: Callable[..., Any], *args: Any, setup: Callable[..., Any] | None = None, **kwargs: Any
    ) -> DeviceResult:
        """Run ``function(*args, **kwargs)`` at this device's pace, in separate processes.

        The function must be at the top level of a module; its arguments must be JSON values: 64-bit numbers,
        strings, lists, dicts. ``setup(*args, **kwargs)`` runs before it in each repetition; it is not
        measured, but the device's memory limit applies to it. Its result is passed as the function's first
        argument. If the function has a parameter named ``edge_device``, this receives the device; the
        function calls ``edge_device.send(data)`` to send data. Raises `OutOfDeviceMemory` if the device has
        too little memory, ConfigError for arguments that cannot be passed, and `Invalid` for unreliable
        measurements: always if they are saved or compared, otherwise only if they come close to a budget or
        exceed it. Without budgets, only the work is counted, and the function is measured when a metric of
        the result is read.
        """
        __tracebackhide__ = True
        return self.run_call(function, setup, args, kwargs)

    def run_call(
        self,
        function: Callable[..., Any],
        setup: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        owner: type | None = None,
    ) -> DeviceResult:
        """Run a function as `run` does; its arguments may also be named ``function`` or ``setup``.

        If ``owner`` is given, the function is a method of this class, which may have inherited it.
        """
        __tracebackhide__ = True
        location = locate(function, owner=owner)
        self._calls[location.qualname] += 1
        calls = self._calls[location.qualname]
        label = location.qualname if calls == 1 else f"{location.qualname} {calls}"
        here = self._surroundings[label] = Surroundings.now()
        options, mark = self.session.options, self._mark
        if options.save:  # so that a broken file is reported now, not after minutes of measuring
            baseline.load(baseline.path_of(self._test.file))
        before = self._baseline(label) if options.compare and options.timed else None
        self._require_comparable(label, before)
        request = PrepareRequest(
            function=location,
            setup=None if setup is None else locate(setup, "setup"),
            args=[_plain(f"argument {place}", value) for place, value in enumerate(args)],
            kwargs={name: _plain(f"argument {name}", value) for name, value in kwargs.items()},
            path=here.path,
            device=mark.profile,
            network=self._network_name,
            like=mark.like,
            shots=before.reference.against if isinstance(before, BaselineEntry) else None,
            limit_s=mark.limit_s,
            folder=here.folder,
        )
        repetitions = options.repetitions or mark.repetitions or DEFAULT_REPETITIONS
        repetitions *= BASELINE_TIMES if options.save and options.timed else 1
        scale = next((one for one in (options.time_scale, mark.time_scale) if one is not None), 1.0)
        plan = MeasurementPlan(self.profile, self.network, request, repetitions, scale)
        process = self.session.process(self._test.file, here, location)
        counted = count(process, plan, partial(self._tell, label))
        if mark.counted == "native":
            self._tell(label, "counting native instructions")
            counted = counted.with_native(count_native(request))
        result = DeviceResult(
            label,
            self.name,
            lambda precise: self._measured(label, plan._replace(precise=precise)),
            counted,
            slow_end=mark.end == "slow",
        )
        self.results.append(result)
        if counted.nothing:
            result.require(Verdict("FAIL", NOTHING_DONE))
        if options.against is not None:
            result.require(self._of_base(label, request))
        if options.timed or mark.budgets:
            measured = result.measurement(options.timed or not BY_TIME.isdisjoint(mark.budgets))
            if options.timed and (options.save or options.compare):
                result.require(verdict.doubted(measured))
        return result

    def _of_base(self, label: str, request: PrepareRequest) -> Verdict:
        __tracebackhide__ = True
        call = CallRequest(
            function=request.function, setup=request.setup, args=request.args, kwargs=request.kwargs,
            device=request.device, network=request.network, layout=0, limit_s=self._mark.limit_s,
        )  # fmt: skip
        group = f"{self._test.group} {label}"
        return self.session.against_base(group, label, call, partial(self._tell, label))

    def _require_comparable(self, label: str, timed: BaselineEntry | str | None) -> None:
        """Raise `Invalid` before anything runs if the test has no budgets and a baseline is missing."""
        __tracebackhide__ = True
        if self._mark.budgets or not self.session.options.compare:
            return
        counted = self._counted_baseline(label)
        for found in (counted, timed):
            if isinstance(found, str):
                raise Invalid(f"{label} on {self.name}: {found}")

    def _measured(self, label: str, plan: MeasurementPlan) -> Measurement:
        __tracebackhide__ = True
        tell = partial(self._tell, label)
        process = self.session.process(self._test.file, self._surroundings[label], plan.request.function)
        return measure(process, plan, self._limit, tell)

    @property
    def doubt(self) -> str:
        """Reason why a result is unreliable; empty if all results are reliable or far below their budgets."""
        found = (f"{one.function} on {self.name}: {one.doubt}" for one in self.results if one.doubt)
        return next(found, "")

    @property
    def label(self) -> str:
        """The test's name with its parameters, without the device."""
        return self._test.label or self._test.group

    def _tell(self, label: str, about: str) -> None:
        self.session.tell(f"{label} on {self.name}: {about}")

    def judge(self) -> None:
        """Judge all results by the budgets in the mark and by the baselines; raises `NotMet` or `Invalid`."""
        __tracebackhide__ = True
        if not (self._calls or self.results):
            raise NotMet(
                "edge_device: nothing was run; call edge_device.run(function, …), or omit the fixture, so "
                "that the test itself runs on the device"
            )
        failed: list[str] = []
        invalid: list[str] = []
        for result in self.results:
            try:
                self._judge(result)
            except NotMet as error:
                failed.append(str(error))
            except Invalid as error:
                invalid.append(str(error))
        if failed:
            raise NotMet("\n".join(failed))
        if invalid:
            raise Invalid("\n".join(invalid))

    def _judge(self, result: DeviceResult) -> None:
        __tracebackhide__ = True
        result.require_unasked()
        counted = self._counted_verdict(result)
        if counted.outcome == "FAIL":
            result.require(counted)
        if result.timed is not None:
            result.require(self._timed_verdict(result, result.timed))
            if result.doubt:
                result.require(Verdict("INVALID", result.doubt))
        result.require(counted)

    def _counted_verdict(self, result: DeviceResult) -> Verdict:
        """Compare the counted work with its baseline."""
        if not self.session.options.compare or result.counted is None:
            return Verdict()
        before = self._counted_baseline(result.function)
        if isinstance(before, str):
            return Verdict("INVALID", before)
        tolerance = self._mark.tolerance / 100
        found = compare(before, result.counted, baseline.versions(), tolerance)
        if found.left_out:
            names = ", ".join(FIGURES.get(name, Figure(name)).text for name in found.left_out)
            result.left_out = f"not compared, because two counts differed when they were saved: {names}"
        unjudged = "; ".join(found.unjudged)
        if not found.grew:
            return Verdict("INVALID", unjudged) if unjudged else Verdict()
        sure = f"counts are the same on every host; growth by more than {self._mark.tolerance:g}% fails"
        why = f"{'; '.join(map(str, found.grew))} ({sure})"
        more = f"; not judged: {unjudged}" if unjudged else ""
        return Verdict("FAIL", why + more, grew=tuple(one.name for one in found.grew))

    def _timed_verdict(self, result: DeviceResult, measured: Measurement) -> Verdict:
        """Judge the measurement by the budgets, and by this host's baseline if requested."""
        __tracebackhide__ = True
        options = self.session.options
        before = self._baseline(result.function) if options.compare else None
        samples = before.samples if isinstance(before, BaselineEntry) else before
        if options.compare and not options.timed:
            if isinstance(samples, Samples):
                result.advice = verdict.advice(samples, baseline.samples(measured), options.tolerance)
            samples = None
        return self.verdict(result, measured, samples)

    @contextlib.contextmanager
    def judged(self) -> Iterator[Reasons]:
        """Judge the test that runs in this context, and write the reasons to the yielded `Reasons` on exit.

        `Invalid`, ConfigError and a `NotMet` from `judge` are recorded but suppressed. Other exceptions are
        recorded and propagate, except that an AssertionError of the test makes it INVALID if the measurements
        are unreliable.
        """
        found = Reasons()
        try:
            yield found
            try:
                self.judge()
            except NotMet as error:  # raised by `judge`, not by a line of the test
                found.failed = str(error)
        except Invalid as error:
            found.invalid = str(error)
        except ConfigError as error:
            found.failed = str(error)
        except (pytest.skip.Exception, unittest.SkipTest):
            found.skipped = True
            raise
        except BaseException as error:
            why = shortened(str(error)) or type(error).__name__
            if not (self.doubt and isinstance(error, AssertionError)) or isinstance(error, NotMet):
                found.failed = why
                raise
            found.invalid = f"{self.doubt}; the test's own assertion failed: {why}"

    def verdict(self, result: DeviceResult, measured: Measurement, before: Samples | str | None) -> Verdict:
        """Judge the measurement of a result by its budgets and a baseline; measure again if needed."""
        __tracebackhide__ = True
        by_test = self.session.compared.setdefault(f"{self._test.group} {result.function}", {})
        known = [one for test, its in by_test.items() if test != self._test.test for one in its]

        def judge(measurements: Sequence[Measurement]) -> Verdict | NeedMore:
            found = verdict.judge(
                measurements,
                self._mark.budgets,
                before,
                slow_end=self._mark.end == "slow",
                settled=bool(result.note),
                tolerance=self.session.options.tolerance,
                family=Family(self._test.devices, known),
            )
            if found.compared:
                by_test[self._test.test] = found.compared
            return found

        return judged(judge, measured, lambda: self._measured(result.function, measured.plan))

    def entry(self, result: DeviceResult) -> BaselineEntry | None:
        """Return the baseline entry with the times of a result; None if the session does not save times."""
        if not self.session.options.timed:
            return None
        return baseline.entry(self._test.test, result.function, result.measured)

    def counted_entry(self, result: DeviceResult) -> CountedEntry | None:
        """Return the baseline entry with the counted work of a result; None if nothing was counted."""
        if result.counted is None:
            return None
        return entry_of(self._test.test, result.function, result.counted, baseline.versions())

    def _baseline(self, function: str) -> BaselineEntry | str:
        """Return the function's baseline of times, or why no comparable baseline exists."""
        file = baseline.path_of(self._test.file)
        here, entries, mine = baseline.this_host(), baseline.load(file), (self._test.test, function)
        if (found := entries.get((*mine, here.fingerprint))) is not None:
            outdated = found.outdated(profile_sha256(self.profile, self.network))
            return (
                found if outdated is None else f"{outdated}; save it again with --edgefl-save --edgefl-timed"
            )
        if others := [one.host.differences(here) for key, one in entries.items() if key[:2] == mine]:
            differs = "; ".join(min(others, key=lambda one: len(list(one))))
            return (
                f"the times in {file.name} were measured on another host ({differs}); save this host's times "
                "with --edgefl-save --edgefl-timed, or compare only counts, without --edgefl-timed"
            )
        return f"no times in {file}; save them with --edgefl-save --edgefl-timed"

    def _counted_baseline(self, function: str) -> CountedEntry | str:
        """Return the function's baseline of counted work, or why no such baseline exists."""
        file = baseline.path_of(self._test.file)
        found = baseline.load_counted(file).get((self._test.test, function))
        return f"no baseline in {file}; save one with --edgefl-save" if found is None else found


MESSAGE_LINES = 3
"""Maximum number of lines of an exception's message that the table shows after the first line."""


def shortened(message: str) -> str:
    """Join the first line of a message and the lines after a traceback's frames into one line."""
    first, *rest = message.split("\n")
    after = itertools.dropwhile(lambda line: line.startswith("  "), rest)  # frames are indented
    return " ".join(" ".join((first, *itertools.islice(after, MESSAGE_LINES))).split())


def _plain(name: str, value: Any) -> Any:
    """Return the value if encoding it as JSON loses nothing; else raise ConfigError."""
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
        msgspec.msgpack.encode(value)  # the format in which arguments are sent
    except (TypeError, ValueError, OverflowError):
        same = False
    if not same:
        raise ConfigError(
            f"{name} must be a JSON value, so that it can be sent to another process: 64-bit numbers, "
            f"strings, lists, dicts (got a {type(value).__name__}); create anything else in setup="
        )
    return value
