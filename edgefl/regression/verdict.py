"""PASS, FAIL or INVALID: one measurement against its budgets and its baseline."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from edgefl.errors import ConfigError, Invalid, NotMet, ProfileError, unknown
from edgefl.regression.baseline import BaselineEntry
from edgefl.regression.measurement import Measurement, median_interval

Outcome = Literal["PASS", "FAIL", "INVALID"]

ALPHA = 0.05
BUDGETS = {"seconds": "s", "peak_mib": "MiB", "sent_mib": "MiB", "joules": "J"}
"""Figures that a budget may be of, and their units."""
TESTED = {"cpu_s": "CPU time", "peak_mib": "peak memory", "sent_mib": "sent"}
"""Metrics that are compared with a baseline by a test, and their names."""
TOLERANCE = 0.05
LEAST_MIB = 4.0
"""A change of so little memory is none, however small what changed was."""
HEAD_ROOM = 2.0
"""A budget so many times the upper bound holds, whatever the host did to the figures."""


class DeviceResult:
    """Figures of one function on the device: medians of its repetitions, in the device's seconds."""

    def __init__(self, function: str, measured: Measurement) -> None:
        self.function, self.measured, self.device = function, measured, measured.device.id
        self.repetitions = len(measured.repetitions)
        figures = (measured.seconds, measured.host_cpu_s, measured.peak_mib, measured.sent_mib)
        self.seconds, self.host_cpu_s, self.peak_mib, self.sent_mib = map(statistics.median, figures)
        """Device time with transfers, this host's CPU time, growth of memory, and bytes of a call."""
        self.joules: float | None = None
        """Energy from the device's battery; None where its profile does not say what it draws."""
        with contextlib.suppress(ProfileError):
            self.joules = statistics.median(measured.joules)
        self.failures: list[str] = []
        self.invalid: str | None = None
        self.doubt = self.note = ""
        """Why the figures cannot be believed; and why that is no matter, once it is known."""

    @property
    def outcome(self) -> Outcome:
        if self.failures:
            return "FAIL"
        return "INVALID" if self.invalid or self.doubt else "PASS"

    def assert_budget(self, **budgets: float) -> None:
        """Fail unless each figure is within its budget: ``seconds``, ``peak_mib``, ``sent_mib``, ``joules``.

        The one-sided 95% bootstrap upper bound of the median must be within its budget. Of figures that
        cannot be believed it must be below half of it, else they are `Invalid`. ConfigError for a budget of
        something unknown, or that this device's profile cannot tell.
        """
        __tracebackhide__ = True
        wrong, narrow = [], []
        for name, allowed in budgets.items():
            if name not in BUDGETS:
                raise ConfigError(unknown("budget", name, BUDGETS))
            if not 0 <= allowed < math.inf:
                raise ConfigError(f"budget {name} must be a finite number of at least 0 (got {allowed!r})")
            try:
                middle, _, bound = median_interval(getattr(self.measured, name))
            except ProfileError as error:
                raise ConfigError(f"budget {name}: {error}") from None
            unit = BUDGETS[name]
            if bound > allowed:
                wrong.append(
                    f"{name} {figure(middle)} {unit} (95% sure: at most {figure(bound)} {unit}), "
                    f"{figure(allowed)} {unit} are allowed"
                )
            if bound * HEAD_ROOM > allowed:
                narrow.append(f"{name}: {figure(bound)} of {figure(allowed)} {unit}")
        if self.doubt and budgets:
            self._settle(narrow)
        self._require(wrong)

    def _settle(self, narrow: list[str]) -> None:
        """Take doubtful figures for what they are worth: below half of every budget they suffice."""
        __tracebackhide__ = True
        if narrow:
            far = f"not below half of the budget for {', '.join(narrow)}"
            self.invalid = f"{self.doubt}; {far}"
            raise Invalid(f"{self.function} on {self.device}: {self.invalid}")
        self.note = f"passed on head-room: below half of each budget, though {self.doubt}"
        self.doubt = ""

    def assert_pace(self, margin: float = 0.03) -> None:
        """Fail unless the device's pace is shown to be kept: two one-sided tests at 5%, ± ``margin``."""
        __tracebackhide__ = True
        pace = self.measured.pace
        if self.doubt:
            raise Invalid(f"{self.function} on {self.device}: {self.doubt}")
        if not pace:
            raise ConfigError("the pace was not kept: time_scale is 0")
        middle, low, high = median_interval(pace)
        why = (
            f"pace on {self.device}: achieved over declared time is {middle:.3f}, 90% sure in "
            f"{low:.3f} to {high:.3f}; 1 ± {margin:g} is needed"
        )
        self._require([] if 1 - margin <= low and high <= 1 + margin else [why])

    def _require(self, wrong: list[str]) -> None:
        __tracebackhide__ = True
        self.failures += wrong
        if wrong:
            raise NotMet(f"{self.function} on {self.device}: {'; '.join(wrong)}")

    def __repr__(self) -> str:
        figures = f"{figure(self.seconds)} s, {figure(self.peak_mib)} MiB, {self.repetitions} repetitions"
        return f"<{self.function} on {self.device}: {figures}>"


def holm(p_values: Sequence[float], tests: int) -> list[float]:
    """Return p-values adjusted by Holm's step-down: rejecting those ≤ α keeps the chance of an alarm ≤ α.

    Of the ``tests`` those not known yet count as 1, so what is rejected now stays rejected when they are.
    """
    adjusted = [1.0] * len(p_values)
    worst = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (tests - place) * p_values[index]))
        adjusted[index] = worst
    return adjusted


class Compared(NamedTuple):
    """One metric against the baseline."""

    device: str
    metric: str
    before: float
    now: float
    """Medians."""
    p: float
    """Two-sided Mann–Whitney test: how likely so different ranks are if nothing changed."""
    tolerance: float
    drift: float
    """Shares of the baseline by which the median may grow, and that may be the host's other load."""
    least: float
    """Growth of the median that is none, whatever share it is."""

    @property
    def shift(self) -> float:
        """now / before − 1; infinite from 0 to something."""
        if self.before:
            return self.now / self.before - 1
        return math.inf if self.now else 0.0

    @property
    def grew(self) -> bool:
        """Growth by more than is tolerated and the host explains; its p-value tells it from chance."""
        return self.now - self.before > max(self.least, (self.tolerance + self.drift) * self.before)

    @property
    def undecided(self) -> bool:
        """The host's other load may be what makes it more than is tolerated, or what hides that it is."""
        return self.drift > 0 and abs(self.shift - self.tolerance) <= self.drift

    def __str__(self) -> str:
        unit = "s" if self.metric == "cpu_s" else "MiB"
        share = f"{self.shift:+.1%}" if self.before else "from none"
        in_mib = self.least > self.tolerance * self.before
        allowed = f"{figure(self.least)} MiB" if in_mib else f"{self.tolerance:.1%}"
        return (
            f"{TESTED[self.metric]} {share} on {self.device}: {figure(self.before)} → "
            f"{figure(self.now)} {unit}, p = {self.p:.2g} (growth by more than {allowed} fails)"
        )


def compare(
    before: BaselineEntry, now: BaselineEntry, tolerance: float = TOLERANCE, drift: float | None = None
) -> list[Compared]:
    """Compare every tested metric of an entry with that of its baseline.

    ``drift`` is how much of the CPU clock may be the host's load; None: what the two entries' loads say.
    """
    from scipy.stats import mannwhitneyu  # half a second to import: only where something is compared

    found = []
    for metric in TESTED:
        old, new = getattr(before, metric), getattr(now, metric)
        differ = len({*old, *new}) > 1
        found.append(
            Compared(
                device=now.device,
                metric=metric,
                before=statistics.median(old),
                now=statistics.median(new),
                p=float(mannwhitneyu(new, old, alternative="two-sided").pvalue) if differ else 1.0,
                tolerance=tolerance,
                drift=0.0 if metric != "cpu_s" else before.drift(now) if drift is None else drift,
                least=LEAST_MIB if metric == "peak_mib" else 0.0,
            )
        )
    return found


def more_flop(before: BaselineEntry, now: BaselineEntry, tolerance: float = TOLERANCE) -> str | None:
    """Return how the model clock grew; None within the tolerance. It is counted, so any growth is real."""
    if now.flop <= before.flop * (1 + tolerance):
        return None
    share = f"{now.flop / before.flop - 1:+.1%}" if before.flop else "from none"
    return f"counted FLOP {share} on {now.device}: {figure(before.flop)} → {figure(now.flop)}"


def changed(known: Sequence[Compared], tests: int) -> list[bool]:
    """Tell which metrics grew: above the tolerance and, by Holm's correction over all, not by chance."""
    adjusted = holm([one.p for one in known], tests)
    return [one.grew and p <= ALPHA for one, p in zip(known, adjusted, strict=True)]


def figure(value: float) -> str:
    """Return four digits, and whole numbers below a million."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"
