"""PASS, FAIL or INVALID: one measurement against its budgets and its baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from edgefl.errors import ConfigError, NotMet, ProfileError, unknown
from edgefl.regression import inference
from edgefl.regression.baseline import Entry
from edgefl.regression.measurement import Measurement

Outcome = Literal["PASS", "FAIL", "INVALID"]

BUDGETS = {"seconds": "s", "peak_mib": "MiB", "sent_mib": "MiB", "joules": "J"}
"""What a budget may be of, and its unit."""
TESTED = {"cpu_s": "CPU time", "peak_mib": "peak memory", "sent_mib": "sent"}
"""What is compared with a baseline by a test, and what it is called."""
TOLERANCE = 0.05
LEAST_MIB = {"peak_mib": 4.0, "sent_mib": 0.0}
"""A change of so few MiB is none, however small what changed was."""


def over_budget(measured: Measurement, budgets: Mapping[str, float]) -> Iterator[str]:
    """What does not hold, a line each: the one-sided 95% upper bound of the median must be within its budget.

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
        bound = inference.upper_bound(samples)
        if bound > allowed:
            unit = BUDGETS[name]
            middle = statistics.median(samples)
            yield (
                f"{name} {figure(middle)} {unit} (95% sure: at most {figure(bound)} {unit}), "
                f"{figure(allowed)} {unit} are allowed"
            )


class Compared(NamedTuple):
    """One metric against the baseline."""

    device: str
    metric: str
    change: inference.Change
    tolerance: float
    """Share of the baseline by which the median may grow."""
    drift: float = 0.0
    """Share of it that may be the host's, which was not loaded as it was before."""

    @property
    def grew(self) -> bool:
        """By more than is tolerated and the host explains; whether by chance is for its p-value to say."""
        return self.change.shift > self.tolerance + self.drift

    @property
    def undecided(self) -> bool:
        """The host's other load may be what makes it more than is tolerated, or what hides that it is."""
        return self.drift > 0 and abs(self.change.shift - self.tolerance) <= self.drift

    def __str__(self) -> str:
        then, now = figure(self.change.before), figure(self.change.now)
        return (
            f"{TESTED[self.metric]} {self.change.shift:+.1%} on {self.device}: {then} → {now} "
            f"{_unit(self.metric)}, p = {self.change.p:.2g} (more than {self.tolerance:.1%} fails)"
        )


def compare(
    before: Entry, now: Entry, tolerance: float = TOLERANCE, drift: float | None = None
) -> list[Compared]:
    """Every tested metric of an entry against that of its baseline.

    ``drift`` is how much of the CPU clock may be the host's load; None: what the two entries' loads say.
    """
    drift = before.drift(now) if drift is None else drift
    found = []
    for metric in TESTED:
        old, new = getattr(before, metric), getattr(now, metric)
        change = inference.change(old, new)
        least = LEAST_MIB.get(metric, 0.0)
        allowed = max(tolerance, least / change.before if change.before else math.inf if least else 0.0)
        found.append(Compared(now.device, metric, change, allowed, drift if metric == "cpu_s" else 0.0))
    return found


def more_flop(before: Entry, now: Entry, tolerance: float = TOLERANCE) -> str | None:
    """Why the model clock fails, if it does: it is counted, so any growth above the tolerance is real."""
    if now.flop <= before.flop * (1 + tolerance):
        return None
    share = f"{now.flop / before.flop - 1:+.1%}" if before.flop else "from none"
    return f"counted FLOP {share} on {now.device}: {figure(before.flop)} → {figure(now.flop)}"


def changed(known: Sequence[Compared], tests: int) -> list[bool]:
    """Which metrics grew: above the tolerance and, by Holm's correction over all ``tests``, not by chance."""
    adjusted = inference.holm([one.change.p for one in known], tests)
    return [one.grew and p <= inference.ALPHA for one, p in zip(known, adjusted, strict=True)]


def out_of_pace(measured: Measurement, margin: float) -> str | None:
    """Why the pace is not shown to be the device's to ± ``margin``; None if it is."""
    pace = measured.pace
    if not pace:
        raise ConfigError("the pace was not kept: time_scale is 0")
    if inference.equivalent(pace, margin):
        return None
    interval = inference.median_interval(pace)
    return (
        f"pace on {measured.device.id}: achieved over declared time is {interval.median:.3f}, 90% sure in "
        f"{interval.low:.3f} to {interval.high:.3f}; 1 ± {margin:g} is needed"
    )


def figure(value: float) -> str:
    """Four digits.

    >>> figure(1234.5), figure(0.00123456), figure(0.0)
    ('1234', '0.001235', '0')
    """
    if abs(value) >= 1e6:
        return f"{value:.4g}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _unit(metric: str) -> str:
    return "s" if metric == "cpu_s" else "MiB"


def raise_if(lines: Sequence[str]) -> None:
    """`NotMet` with all that does not hold."""
    if lines:
        raise NotMet("; ".join(lines))
