"""Pure functions that judge a function's measurements by its budgets and its baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from edgefl.errors import ConfigError, ProfileError, as_config_error, unknown
from edgefl.host.verdict import Outcome
from edgefl.regression.baseline import Samples, samples
from edgefl.regression.counts import share_text
from edgefl.regression.measurement import Measurement, median_interval

ALPHA = 0.05
BUDGETS = {"seconds": "s", "peak_mib": "MiB", "sent_mib": "MiB", "joules": "J"}
"""Metrics that may have a budget, and their units."""
BY_TIME = frozenset({"seconds", "joules"})
"""Metrics that may have a budget and depend on time. Only these become uncertain on a disturbed host."""
TESTED = {"cpu_s": "CPU time", "peak_mib": "peak memory", "sent_mib": "sent"}
"""Metrics that a statistical test compares with the baseline, and their names."""
NEGLIGIBLE = {"cpu_s": 1e-6, "peak_mib": 0.1, "sent_mib": 0.01}
"""Minimum amounts in the baseline, in s or MiB, for which growth is stated in percent."""
TOLERANCE = 0.05
DOUBTFUL = 0.5
"""If the first measurement shows growth above this share of the tolerance, a second measurement is made."""
MIN_MIB = 4.0
"""Memory growth, in MiB, that is always ignored, however large it is relative to the baseline."""
HEAD_ROOM = 2.0
"""Even unreliable measurements pass if the ratio of the budget to their upper bound exceeds this."""
LOAD_MAX, LOAD_SAME = 1.2, 1.05
"""Limits on the ratio of the reference's CPU time to its CPU time in the baseline. Up to the first limit,
measurements are comparable; up to the second, the host's load is treated as unchanged."""
DRIFT, DRIFT_WAITED = 0.6, 0.16
"""Tolerances for a host that changes. If the reference's CPU time changes by a fraction x beyond `LOAD_SAME`,
and the fraction of time spent waiting for a core by y, the function's CPU time may change by a fraction
``DRIFT * x + DRIFT_WAITED * y``."""


@dataclass(frozen=True)
class Verdict:
    """The outcome for one function on one device, and its reason."""

    outcome: Outcome = "PASS"
    why: str = ""
    note: str = ""
    """A message if unreliable measurements passed; else empty."""
    grew: tuple[str, ...] = ()
    """Metrics whose growth since the baseline is the reason for FAIL."""
    compared: tuple[Compared, ...] = ()
    """The comparisons of the first measurement with the baseline, one for each metric."""


@dataclass(frozen=True)
class NeedMore:
    """Further measurements are needed; ``otherwise`` is the verdict if they cannot be made."""

    measurements: int = 1
    otherwise: Verdict | None = None
    compared: tuple[Compared, ...] = ()


class Family(NamedTuple):
    """The comparisons of one test on all its devices, which share a correction for multiple testing."""

    devices: int = 1
    known: Sequence[Compared] = ()
    """Comparisons already made on the test's other devices."""


ONE_DEVICE = Family()


def judge(
    measurements: Sequence[Measurement],
    budgets: Mapping[str, float],
    baseline: Samples | str | None = None,
    *,
    settled: bool = False,
    slow_end: bool = False,
    tolerance: float = TOLERANCE,
    family: Family = ONE_DEVICE,
) -> Verdict | NeedMore:
    """Judge a function's first measurement, and further measurements that `NeedMore` requested.

    ``baseline`` is None if nothing is compared, or a string that states why there is no comparable baseline.
    If ``settled`` is true, doubts about the first measurement are ignored. If ``slow_end`` is true, a budget
    of seconds must hold at the slow end of the time model's interval. Raises ConfigError for an invalid
    budget.
    """
    first, *later = measurements
    found = within(first, budgets, settled=settled, slow_end=slow_end)
    if found.outcome != "PASS" or baseline is None:
        return found
    if isinstance(baseline, str):
        return Verdict("INVALID", baseline)
    figures = [samples(measured) for measured in measurements]
    spoilt = next((doubted(measured) for measured in later if measured.doubts), None)
    since = spoilt or grown(baseline, figures, tolerance, family)
    more = more_flop(baseline, figures[0], tolerance)
    return since if more is None else _with_flop(more, since)


def doubted(measured: Measurement) -> Verdict:
    """Return INVALID if the measurements are unreliable, else PASS."""
    return Verdict("INVALID", "; ".join(measured.doubts)) if measured.doubts else Verdict()


def within(
    measured: Measurement, budgets: Mapping[str, float], *, settled: bool = False, slow_end: bool = False
) -> Verdict:
    """Compare the one-sided 95% bootstrap upper bound of each median with its budget.

    If ``slow_end`` is true, the bound of seconds is multiplied by the time model's 90% factor, because the
    budget must also hold on slow real devices. Unreliable measurements pass only if there are budgets and
    each bound that depends on the time is 0 or below half of its budget.
    """
    doubts = "" if settled or not measured.plan.precise else "; ".join(measured.doubts)
    wrong, narrow = [], []
    for name, allowed in budgets.items():
        if name not in BUDGETS:
            raise ConfigError(unknown("budget", name, BUDGETS))
        if not 0 <= allowed < math.inf:
            raise ConfigError(f"budget {name} must be a finite number of at least 0 (got {allowed!r})")
        with as_config_error(f"budget {name}", ProfileError):
            middle, _, bound = median_interval(getattr(measured, name))
        unit, sure = BUDGETS[name], "95% sure"
        if slow_end and name == "seconds":
            bound *= measured.trial.error_factor or 1.0
            sure = "slow end of the model's 90% interval"
        if doubts and name in BY_TIME:
            if 0 < bound >= allowed / HEAD_ROOM:
                narrow.append(f"{name}: {figure(bound)} of {figure(allowed)} {unit}")
        elif bound > allowed:
            wrong.append(
                f"{name} {figure(middle)} {unit} ({sure}: at most {figure(bound)} {unit}), "
                f"{figure(allowed)} {unit} are allowed{_model_error(name, measured)}"
            )
    if wrong:
        return Verdict("FAIL", "; ".join(wrong))
    if narrow:
        return Verdict("INVALID", f"{doubts}; not below half of the budget for {', '.join(narrow)}")
    by_time = BY_TIME.intersection(budgets)
    if not doubts or (budgets and not by_time):
        return Verdict()
    if not budgets:
        return Verdict("INVALID", doubts)
    each = "each budget" if len(by_time) == len(budgets) else "each budget of time"
    return Verdict(note=f"passed on head-room: below half of {each}, though {doubts}")


def _model_error(name: str, measured: Measurement) -> str:
    """Return a description of how far the time of a real device may be from the measured time."""
    factor = measured.trial.error_factor
    if name != "seconds" or factor is None:
        return ""
    return f" (a real {measured.plan.device.id}: within a factor of {factor:.2g}, 90%)"


def paced(measured: Measurement, margin: float, *, settled: bool = False) -> Verdict:
    """Judge by two one-sided tests at the 5% level whether the device's pace is kept within ± ``margin``."""
    if measured.doubts and not settled:
        return doubted(measured)
    if not measured.pace:
        raise ConfigError("the pace cannot be judged, because pacing is off: time_scale is 0")
    middle, low, high = median_interval(measured.pace)
    if 1 - margin <= low and high <= 1 + margin:
        return Verdict()
    why = (
        f"pace on {measured.plan.device.id}: achieved over declared time is {middle:.3f}, 90% interval "
        f"{low:.3f} to {high:.3f}; 1 ± {margin:g} is needed"
    )
    return Verdict("FAIL", why)


def _with_flop(more: str, found: Verdict | NeedMore) -> Verdict | NeedMore:
    """Add ``more``, a message about the growth of counted FLOP, to a verdict.

    The new verdict is FAIL whatever the host's load, which does not affect counts.
    """
    grew, why = (found.grew, found.why) if isinstance(found, Verdict) and found.grew else ((), "")
    fails = Verdict("FAIL", "; ".join(filter(None, (more, why))), "", ("flop", *grew), found.compared)
    return fails if isinstance(found, Verdict) else NeedMore(otherwise=fails, compared=found.compared)


def grown(
    before: Samples, measured: Sequence[Samples], tolerance: float = TOLERANCE, family: Family = ONE_DEVICE
) -> Verdict | NeedMore:
    """Judge the measured metrics: FAIL if one grew, INVALID if the host's load does not permit a decision.

    Other processes may imitate or hide a change. If a metric may have grown, a second measurement is made
    and pooled with the first. If the host's load during the first measurement differs too much from the
    baseline's, the second measurement replaces the first.
    """
    now, *later = measured
    if loads_apart(before, now) is not None:
        if not later:
            return NeedMore()
        now, *later = later
        if (why := loads_apart(before, now)) is not None:
            return Verdict("INVALID", why)
    first = tuple(compare(before, now, tolerance * DOUBTFUL))
    known, tests = (*family.known, *first), family.devices * len(TESTED)
    seems = any(changed(known, max(len(known), tests))[len(family.known) :])
    if not seems and not any(one.undecided for one in (*first, *compare(before, now, tolerance))):
        return Verdict(compared=first)
    if not later:
        return NeedMore(compared=first)
    if (why := loads_apart(before, later[0])) is not None:
        return Verdict("INVALID", why, compared=first)
    most = max(drift(before, now), drift(before, later[0]))
    compared = compare(before, together(now, later[0]), tolerance, most)
    grew = [one for one, more in zip(compared, changed(compared, tests), strict=True) if more]
    if grew:
        why, metrics = "; ".join(map(str, grew)), tuple(one.metric for one in grew)
        return Verdict("FAIL", why, grew=metrics, compared=first)
    for one in compared:
        if one.undecided:
            why = f"{one}; the host's load has changed, which makes this result uncertain by {one.drift:.1%}"
            return Verdict("INVALID", why, compared=first)
    return Verdict(compared=first)


def advice(before: Samples, now: Samples, tolerance: float = TOLERANCE) -> str:
    """Return a message that names the metrics that seem to have grown on this host.

    The message is empty if no metric has grown, or if the host's load has changed.
    """
    if loads_apart(before, now) is not None:
        return ""
    compared = compare(before, now, tolerance)
    grew = [one for one, more in zip(compared, changed(compared, len(TESTED)), strict=True) if more]
    why = "; ".join(map(str, grew))
    return f"advice: {why}; with --edgefl-timed, this would fail" if grew else ""


def loads_apart(before: Samples, now: Samples) -> str | None:
    """Return a message if the host's load differs too much from that in the baseline; otherwise None."""
    factor = _load(before, now)
    if 1 / LOAD_MAX <= factor <= LOAD_MAX:
        return None
    return (
        f"this host's load differs too much from the baseline's: {now.reference} takes {factor:.2f} times "
        f"the CPU time of the baseline; at most a factor of {LOAD_MAX:g} is allowed"
    )


def drift(before: Samples, now: Samples) -> float:
    """Return the fraction by which a change in the host's load may have changed the CPU time."""
    slower = max(0.0, abs(math.log(_load(before, now))) - math.log(LOAD_SAME))
    return DRIFT * slower + DRIFT_WAITED * abs(now.waited - before.waited)


def _load(before: Samples, now: Samples) -> float:
    return statistics.median(now.reference_cpu_s) / statistics.median(before.reference_cpu_s)


def together(first: Samples, second: Samples) -> Samples:
    """Pool the samples of two measurements of a function; the other fields are those of the first."""
    joined: dict[str, Any] = {name: (*getattr(first, name), *getattr(second, name)) for name in TESTED}
    return first._replace(**joined)


def holm(p_values: Sequence[float], tests: int) -> list[float]:
    """Return p-values adjusted by Holm's step-down method.

    If all hypotheses with an adjusted p-value of at most α are rejected, the probability of any false
    rejection is at most α. ``tests`` is the total number of tests. Tests that have not been run yet count
    as p = 1, so that they cannot revoke a rejection.
    """
    adjusted = [1.0] * len(p_values)
    worst = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (tests - place) * p_values[index]))
        adjusted[index] = worst
    return adjusted


class Compared(NamedTuple):
    """The comparison of one metric with the baseline."""

    device: str
    metric: str
    before: float
    """Median in the baseline."""
    now: float
    """Median in the new measurement."""
    p: float
    """p-value of a two-sided Mann–Whitney test."""
    tolerance: float
    """Growth of the median that is allowed, as a share of the baseline."""
    drift: float
    """Growth of the median that the host's load may explain, as a share of the baseline."""
    least: float
    """Growth of the median that is always ignored, however large it is relative to the baseline."""

    @property
    def shift(self) -> float:
        """Relative growth, now / before − 1; infinite if only ``before`` is 0."""
        if self.before:
            return self.now / self.before - 1
        return math.inf if self.now else 0.0

    @property
    def grew(self) -> bool:
        """True if the median grew by more than tolerance and host load explain, even if not significantly."""
        return self.now - self.before > max(self.least, (self.tolerance + self.drift) * self.before)

    @property
    def undecided(self) -> bool:
        """True if the host's load may have caused growth beyond the tolerance, or may hide it."""
        return self.drift > 0 and abs(self.shift - self.tolerance) <= self.drift

    def __str__(self) -> str:
        unit = "s" if self.metric == "cpu_s" else "MiB"
        share = share_text(self.before, self.now, NEGLIGIBLE[self.metric]) or "grew"
        in_mib = self.least > self.tolerance * self.before
        allowed = f"{figure(self.least)} MiB" if in_mib else f"{self.tolerance:.1%}"
        return (
            f"{TESTED[self.metric]} {share} on {self.device}: {figure(self.before)} → "
            f"{figure(self.now)} {unit}, p = {self.p:.2g} (growth by more than {allowed} fails)"
        )


def compare(
    before: Samples, now: Samples, tolerance: float = TOLERANCE, most: float | None = None
) -> list[Compared]:
    """Compare every tested metric with the baseline.

    ``most`` is the share by which the host's load may have changed the CPU time. If it is None, this share is
    computed from both loads.
    """
    from scipy.stats import mannwhitneyu  # takes half a second to import

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
                drift=0.0 if metric != "cpu_s" else drift(before, now) if most is None else most,
                least=MIN_MIB if metric == "peak_mib" else 0.0,
            )
        )
    return found


def more_flop(before: Samples, now: Samples, tolerance: float = TOLERANCE) -> str | None:
    """Return a message if the number of counted FLOP grew by more than the tolerance, otherwise None.

    No statistical test is needed, because counts have no noise.
    """
    if now.flop <= before.flop * (1 + tolerance):
        return None
    share = share_text(before.flop, now.flop) or "grew"
    return f"counted FLOP {share} on {now.device}: {figure(before.flop)} → {figure(now.flop)}"


def changed(known: Sequence[Compared], tests: int) -> list[bool]:
    """Return whether each comparison shows significant growth after Holm's correction for ``tests`` tests."""
    adjusted = holm([one.p for one in known], tests)
    return [one.grew and p <= ALPHA for one, p in zip(known, adjusted, strict=True)]


def figure(value: float) -> str:
    """Format a number with four significant digits; from 1,000 to a million, as a whole number."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"
