"""The ``edge_device`` of a test: runs functions as the device would, holds them to budgets and baselines."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from edgefl.devices import load_device, load_network
from edgefl.devices.schema import Device, Network
from edgefl.errors import ConfigError, Invalid, NotMet
from edgefl.experiment import NonNegative
from edgefl.regression import baseline, verdict
from edgefl.regression.baseline import BaselineEntry
from edgefl.regression.measurement import (
    LEAST_REPETITIONS,
    Measurement,
    MeasurementPlan,
    TimeLimit,
    measure,
    profile_sha256,
)
from edgefl.regression.process import MeasuringProcess, PrepareRequest, locate
from edgefl.regression.verdict import BUDGETS, TESTED, TOLERANCE, Compared, DeviceResult
from edgefl.validation import convert

DEFAULT_REPETITIONS = 15
DEFAULT_LIMIT_S = 120.0
MOST_LIMIT_S = 86_400
DOUBTFUL = 0.5
"""Share of the tolerance beyond which a growth is looked at a second time."""
BASELINE_TIMES = 2
"""Factor for the repetitions of a baseline: many measurements will be held against it."""


class MarkKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a mark ``edge_device(…)``."""

    repetitions: Annotated[int, msgspec.Meta(ge=LEAST_REPETITIONS)] | None = None
    network: str | None = None
    time_scale: NonNegative | None = None
    limit_s: Annotated[float, msgspec.Meta(gt=0, le=MOST_LIMIT_S)] = DEFAULT_LIMIT_S
    """Wall seconds for each of its processes."""
    seconds: NonNegative | None = None
    peak_mib: NonNegative | None = None
    sent_mib: NonNegative | None = None
    joules: NonNegative | None = None

    @property
    def budgets(self) -> dict[str, float]:
        given = {name: getattr(self, name) for name in BUDGETS}
        return {name: budget for name, budget in given.items() if budget is not None}


class MarkOptions(MarkKeys, frozen=True):
    """The arguments of a mark, for one of its profiles."""

    profile: str


def mark_options(profiles: Sequence[Any], keys: Mapping[str, Any]) -> list[MarkOptions]:
    """Check a mark's arguments. ConfigError for a profile, a key or a value that is not allowed."""
    if not profiles:
        raise ConfigError('edge_device: no profile is named; name one or more: edge_device("pixel-3a")')
    for profile in profiles:
        if not isinstance(profile, str):
            raise ConfigError(f"edge_device: a profile is named by a string (got {profile!r})")
        load_device(profile)
    if len(set(profiles)) < len(profiles):
        raise ConfigError(f"edge_device: a profile is named twice: {', '.join(profiles)}")
    found = convert(keys, MarkKeys, "edge_device")
    if found.network is not None:
        load_network(found.network)
    return [MarkOptions(profile, **msgspec.structs.asdict(found)) for profile in profiles]


class SessionOptions(NamedTuple):
    """The options of pytest's command line."""

    save: bool = False
    compare: bool = False
    tolerance: float = TOLERANCE
    time_scale: float | None = None
    repetitions: int | None = None
    limit_s: float | None = None
    """Wall seconds that the measurements of one test may take."""


class Session:
    """The options, the measuring process and the comparisons of one pytest process; `close` it at its end."""

    def __init__(self, options: SessionOptions, tell: Callable[[str], None] = lambda _: None) -> None:
        self.options, self.tell = options, tell
        self._process: MeasuringProcess | None = None
        self._file: Path | None = None
        self._compared: dict[str, list[Compared]] = {}

    def process(self, file: Path) -> MeasuringProcess:
        """Return a test module's measuring process: its figures do not depend on what ran before it."""
        if self._process is None or self._file != file or self._process.popen.poll() is not None:
            self.close()
            self._process, self._file = MeasuringProcess(), file
        return self._process

    def changed(self, group: str, devices: int, compared: list[Compared]) -> list[Compared]:
        """Return the metrics that grew, by Holm's correction over the group's devices, also those to come."""
        known = self._compared.setdefault(group, [])
        known += compared
        grown = verdict.changed(known, max(len(known), devices * len(TESTED)))
        return [one for one, grew in zip(known, grown, strict=True) if grew and one in compared]

    def close(self) -> None:
        """End the measuring process."""
        if self._process is not None:
            self._process.close()
            self._process = None


class DeviceTest(NamedTuple):
    """The test that a device belongs to."""

    test: str
    """Its node id without the file: ``test_step[pixel-3a]``."""
    file: Path
    group: str
    devices: int
    """A name shared by the same test on its other devices, and their number."""


class EdgeDevice:
    """One device in one test."""

    def __init__(self, mark: MarkOptions, test: DeviceTest, session: Session) -> None:
        self._mark, self._test, self.session = mark, test, session
        self.profile: Device = load_device(mark.profile)
        if self.profile.cpu is None:
            why = "has a delay model instead of a processor: there is nothing to time a function by"
            raise ConfigError(f"device {self.profile.id!r} {why}")
        self._network_name = mark.network or self.profile.network
        self.network: Network | None = load_network(self._network_name) if self._network_name else None
        self.name = self.profile.id
        self.results: list[DeviceResult] = []
        self._calls: Counter[str] = Counter()
        self._limit = TimeLimit(session.options.limit_s)

    def run(
        self, function: Callable[..., Any], *args: Any, setup: Callable[..., Any] | None = None, **kwargs: Any
    ) -> DeviceResult:
        """Run ``function(*args, **kwargs)`` as this device would, in processes of their own.

        The function is at the top of a module; its arguments are what JSON holds: numbers of 64 bits,
        strings, lists, tables. ``setup(*args, **kwargs)`` runs before it in each repetition, unmeasured but
        within the device's memory; what it returns is the function's first argument. A parameter named
        ``edge_device`` is given the device, whose ``send(data)`` sends. `OutOfDeviceMemory` if the device has
        not enough memory, ConfigError for what cannot be handed over. Figures that cannot be believed are
        `Invalid`: at once where they are saved or compared, else unless `DeviceResult.assert_budget` finds
        them far below.
        """
        __tracebackhide__ = True
        location = locate(function)
        self._calls[location.qualname] += 1
        calls = self._calls[location.qualname]
        label = location.qualname if calls == 1 else f"{location.qualname} {calls}"
        options, mark = self.session.options, self._mark
        if options.save:  # a broken file is said before minutes are spent
            baseline.load(baseline.path_of(self._test.file))
        before = self._baseline(label) if options.compare else None
        if isinstance(before, str) and not mark.budgets:
            raise Invalid(f"{label} on {self.name}: {before}")
        request = PrepareRequest(
            function=location,
            setup=None if setup is None else locate(setup, "setup"),
            args=[_plain(f"argument {place}", value) for place, value in enumerate(args)],
            kwargs={name: _plain(f"argument {name}", value) for name, value in kwargs.items()},
            path=list(sys.path),
            device=mark.profile,
            network=self._network_name,
            shots=before.reference.against if isinstance(before, BaselineEntry) else None,
            limit_s=min(mark.limit_s, self._limit.seconds),
        )
        repetitions = options.repetitions or mark.repetitions or DEFAULT_REPETITIONS
        repetitions *= BASELINE_TIMES if options.save else 1
        scale = next((one for one in (options.time_scale, mark.time_scale) if one is not None), 1.0)
        tell = partial(self._tell, label)
        plan = MeasurementPlan(
            self.profile, self.network, request, repetitions, scale, limit=self._limit, tell=tell
        )
        result = DeviceResult(label, measure(self.session.process(self._test.file), plan))
        self.results.append(result)
        if options.save or options.compare:
            self._believe(result, result.measured)
        result.doubt = "; ".join(result.measured.reasons())
        return result

    @property
    def doubt(self) -> str:
        """The reason why a result is not believed that no budget far above its figures has made up for."""
        found = (f"{one.function} on {self.name}: {one.doubt}" for one in self.results if one.doubt)
        return next(found, "")

    def _tell(self, label: str, about: str) -> None:
        self.session.tell(f"{label} on {self.name}: {about}")

    def judge(self) -> None:
        """Hold a test's results to its mark's budgets and the baselines: `NotMet` or `Invalid`."""
        __tracebackhide__ = True
        if not (self._calls or self.results):
            raise NotMet(
                "edge_device: nothing was run; call edge_device.run(function, …), or leave the fixture out: "
                "then the test itself runs on the device"
            )
        for result in self.results:
            if self._mark.budgets:
                result.assert_budget(**self._mark.budgets)
            if result.doubt:
                raise self._invalid(result, result.doubt)
            if not self.session.options.compare:
                continue
            before = self._baseline(result.function)
            if isinstance(before, str):
                raise self._invalid(result, before)
            more = verdict.more_flop(before, self.entry(result), self.session.options.tolerance)
            wrong = [] if more is None else [more]
            try:
                wrong += map(str, self.grown(result, before))
            except Invalid:
                if not wrong:  # what is counted grew, whatever the host's load
                    raise
            result.failures += wrong
            if wrong:
                raise NotMet(f"{result.function} changed since its baseline: {'; '.join(wrong)}")

    def grown(self, result: DeviceResult, before: BaselineEntry) -> list[Compared]:
        """Return the metrics that take more than their baseline. `Invalid` where the load leaves that open.

        Where one seems to, or is on the way to it, the function is measured a second time and both
        measurements count together: what a neighbour did may look like a change, or hide one.
        """
        __tracebackhide__ = True
        tolerance, devices = self.session.options.tolerance, self._test.devices
        now = self.entry(result)
        if before.loads_apart(now) is not None:
            now = self._again(result, before)
        first = verdict.compare(before, now, tolerance * DOUBTFUL)
        changed = self.session.changed(f"{self._test.group} {result.function}", devices, first)
        looks = (*first, *verdict.compare(before, now, tolerance))
        if not changed and not any(one.undecided for one in looks):
            return []
        later = self._again(result, before)
        drift = max(before.drift(now), before.drift(later))
        compared = verdict.compare(before, baseline.together(now, later), tolerance, drift)
        grew = verdict.changed(compared, devices * len(TESTED))
        found = [one for one, more in zip(compared, grew, strict=True) if more]
        for one in () if found else compared:
            if one.undecided:
                why = f"{one}; the host's load is another, which makes that uncertain by {one.drift:.1%}"
                raise self._invalid(result, why)
        return found

    def entry(self, result: DeviceResult, measured: Measurement | None = None) -> BaselineEntry:
        """Return the baseline's entry of a result, or of another measurement of it."""
        return baseline.entry(self._test.test, result.function, measured or result.measured)

    def _again(self, result: DeviceResult, before: BaselineEntry) -> BaselineEntry:
        """Measure the function once more. `Invalid` if that does not compare with the baseline."""
        __tracebackhide__ = True
        measured = measure(self.session.process(self._test.file), result.measured.plan)
        self._believe(result, measured)
        now = self.entry(result, measured)
        if (why := before.loads_apart(now)) is not None:
            raise self._invalid(result, why)
        return now

    def _believe(self, result: DeviceResult, measured: Measurement) -> None:
        __tracebackhide__ = True
        if reasons := list(measured.reasons()):
            raise self._invalid(result, "; ".join(reasons))

    def _invalid(self, result: DeviceResult, why: str) -> Invalid:
        result.invalid = why
        return Invalid(f"{result.function} on {self.name}: {why}")

    def _baseline(self, function: str) -> BaselineEntry | str:
        """Return the function's baseline, or why there is none that compares."""
        file = baseline.path_of(self._test.file)
        here, entries, mine = baseline.this_host(), baseline.load(file), (self._test.test, function)
        if (found := entries.get((*mine, here.fingerprint))) is not None:
            outdated = found.outdated(profile_sha256(self.profile, self.network))
            return found if outdated is None else f"{outdated}; save it again with --edgefl-save"
        if others := {one.host.software for key, one in entries.items() if key[:2] == mine}:
            return (
                f"the baseline in {file.name} is of another host or software "
                f"({'; '.join(sorted(others))}; here: {here.software}); save one here with --edgefl-save"
            )
        return f"no baseline in {file}; save one with --edgefl-save"


def _plain(name: str, value: Any) -> Any:
    """Return the value, if another process gets the same from its JSON."""
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
        msgspec.msgpack.encode(value)  # as it is sent
    except (TypeError, ValueError, OverflowError):
        same = False
    if not same:
        raise ConfigError(
            f"{name} must be what JSON holds, so that another process gets it: numbers of 64 bits, "
            f"strings, lists, tables (got a {type(value).__name__}); let setup= make anything else"
        )
    return value
