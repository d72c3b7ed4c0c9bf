"""PASS, FAIL or INVALID: one measurement against its budgets and its baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from edgefl.errors import ConfigError, NotMet, ProfileError, unknown
from edgefl.regression.baseline import BaselineEntry
from edgefl.regression.measurement import (
    LEAST_REPETITIONS,
    Measurement,
    Samples,
    checked,
    equivalent,
    median_interval,
    upper_bound,
)

Outcome = Literal["PASS", "FAIL", "INVALID"]

ALPHA = 0.05
BUDGETS = {"seconds": "s", "peak_mib": "MiB", "sent_mib": "MiB", "joules": "J"}
"""Figures that a budget may be of, and their units."""
TESTED = {"cpu_s": "CPU time", "peak_mib": "peak memory", "sent_mib": "sent"}
"""Metrics that are compared with a baseline by a test, and their names."""
TOLERANCE = 0.05
LEAST_MIB = {"peak_mib": 4.0, "sent_mib": 0.0}
"""A change of so few MiB is none, however small what changed was."""


class DeviceResult:
    """Figures of one function on the device: medians of its repetitions, in the device's seconds."""

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
        """Energy from the device's battery; None where its profile does not say what it draws."""
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

        The one-sided 95% bootstrap upper bound of the median is held against a budget.
        """
        __tracebackhide__ = True
        self._require(list(over_budget(self.measured, budgets)))

    def assert_pace(self, margin: float = 0.03) -> None:
        """Fail unless the device's pace is shown to be kept: two one-sided tests at 5%, ± ``margin``."""
        __tracebackhide__ = True
        pace = self.measured.pace
        if not pace:
            raise ConfigError("the pace was not kept: time_scale is 0")
        middle, low, high = median_interval(pace)
        why = (
            f"pace on {self.device}: achieved over declared time is {middle:.3f}, 90% sure in "
            f"{low:.3f} to {high:.3f}; 1 ± {margin:g} is needed"
        )
        self._require([] if equivalent(pace, margin) else [why])

    def _require(self, wrong: list[str]) -> None:
        __tracebackhide__ = True
        self.failures += wrong
        if wrong:
            raise NotMet(f"{self.function} on {self.device}: {'; '.join(wrong)}")

    def __repr__(self) -> str:
        return (
            f"<{self.function} on {self.device}: {figure(self.seconds)} s, {figure(self.peak_mib)} MiB, "
            f"{self.repetitions} repetitions>"
        )


def over_budget(measured: Measurement, budgets: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each budget that the one-sided 95% upper bound of its median is not within.

    ConfigError for a budget of something unknown, or that this device's profile cannot tell.
    """
    for name, allowed in budgets.items():
        if name not in BUDGETS:
            raise ConfigError(unknown("budget", name, BUDGETS))
        if not 0 <= allowed < math.inf:
            raise ConfigError(f"budget {name} must be a finite number of at least 0 (got {allowed!r})")
        try:
            samples: Sequence[float] = getattr(measured, name)
        except ProfileError as error:
            raise ConfigError(f"budget {name}: {error}") from None
        bound = upper_bound(samples)
        if bound > allowed:
            unit = BUDGETS[name]
            middle = statistics.median(samples)
            yield (
                f"{name} {figure(middle)} {unit} (95% sure: at most {figure(bound)} {unit}), "
                f"{figure(allowed)} {unit} are allowed"
            )


class Change(NamedTuple):
    """Difference between two sets of repetitions."""

    before: float
    """Median."""
    now: float
    """Median."""
    p: float
    """Two-sided Mann–Whitney test: how likely so different ranks are if nothing changed."""

    @property
    def shift(self) -> float:
        """now / before − 1 of the medians; infinite from 0 to something.

        >>> round(Change(2.0, 2.2, 0.0).shift, 3)
        0.1
        """
        if self.before:
            return self.now / self.before - 1
        return math.copysign(math.inf, self.now) if self.now else 0.0


def change(before: Samples, now: Samples) -> Change:
    """Compare two sets of repetitions (Mann and Whitney 1947). ValueError below 9 repetitions in either."""
    old, new = checked(before, "before"), checked(now, "now")
    for name, samples in (("before", old), ("now", new)):
        if len(samples) < LEAST_REPETITIONS:
            raise ValueError(
                f"{name} must hold at least {LEAST_REPETITIONS} repetitions (got {len(samples)})"
            )
    if (old == old[0]).all() and (new == old[0]).all():
        return Change(float(old[0]), float(new[0]), 1.0)
    from scipy.stats import mannwhitneyu  # half a second to import: only where something is compared

    p = float(mannwhitneyu(new, old, alternative="two-sided").pvalue)
    return Change(float(np.median(old)), float(np.median(new)), p)


def holm(p_values: Sequence[float], tests: int | None = None) -> list[float]:
    """Return p-values adjusted by Holm's step-down: rejecting those ≤ α keeps the chance of an alarm ≤ α.

    ``tests`` is how many there are in all where some are not known yet: these count as 1, so what
    is rejected now stays rejected when they are.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    >>> holm([0.01], tests=3)
    [0.03]
    """
    count = max(tests or 0, len(p_values))
    adjusted = [1.0] * len(p_values)
    worst = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (count - place) * p_values[index]))
        adjusted[index] = worst
    return adjusted


class Compared(NamedTuple):
    """One metric against the baseline."""

    device: str
    metric: str
    change: Change
    tolerance: float
    """Share of the baseline by which the median may grow."""
    drift: float = 0.0
    """Share of it that may be the host's, which was not loaded as it was before."""

    @property
    def grew(self) -> bool:
        """Growth by more than is tolerated and the host explains; its p-value tells it from chance."""
        return self.change.shift > self.tolerance + self.drift

    @property
    def undecided(self) -> bool:
        """The host's other load may be what makes it more than is tolerated, or what hides that it is."""
        return self.drift > 0 and abs(self.change.shift - self.tolerance) <= self.drift

    def __str__(self) -> str:
        then, now = figure(self.change.before), figure(self.change.now)
        unit = "s" if self.metric == "cpu_s" else "MiB"
        return (
            f"{TESTED[self.metric]} {self.change.shift:+.1%} on {self.device}: {then} → {now} {unit}, "
            f"p = {self.change.p:.2g} (more than {self.tolerance:.1%} fails)"
        )


def compare(
    before: BaselineEntry, now: BaselineEntry, tolerance: float = TOLERANCE, drift: float | None = None
) -> list[Compared]:
    """Compare every tested metric of an entry with that of its baseline.

    ``drift`` is how much of the CPU clock may be the host's load; None: what the two entries' loads say.
    """
    drift = before.drift(now) if drift is None else drift
    found = []
    for metric in TESTED:
        moved = change(getattr(before, metric), getattr(now, metric))
        least = LEAST_MIB.get(metric, 0.0)
        allowed = max(tolerance, least / moved.before if moved.before else math.inf if least else 0.0)
        found.append(Compared(now.device, metric, moved, allowed, drift if metric == "cpu_s" else 0.0))
    return found


def more_flop(before: BaselineEntry, now: BaselineEntry, tolerance: float = TOLERANCE) -> str | None:
    """Return how the model clock grew; None within the tolerance. It is counted, so any growth is real."""
    if now.flop <= before.flop * (1 + tolerance):
        return None
    share = f"{now.flop / before.flop - 1:+.1%}" if before.flop else "from none"
    return f"counted FLOP {share} on {now.device}: {figure(before.flop)} → {figure(now.flop)}"


def changed(known: Sequence[Compared], tests: int) -> list[bool]:
    """Tell which metrics grew: above the tolerance and, by Holm's correction over all, not by chance."""
    adjusted = holm([one.change.p for one in known], tests)
    return [one.grew and p <= ALPHA for one, p in zip(known, adjusted, strict=True)]


def figure(value: float) -> str:
    """Return four digits.

    >>> figure(1234.5), figure(0.00123456), figure(0.0)
    ('1234', '0.001235', '0')
    """
    if abs(value) >= 1e6:
        return f"{value:.4g}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
