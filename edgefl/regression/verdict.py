"""The judge: a function's measurements against its budgets and its baseline. Pure; `measure` has the loop."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from edgefl.errors import ConfigError, ProfileError, unknown
from edgefl.host.verdict import Outcome
from edgefl.regression.baseline import Samples, samples
from edgefl.regression.measurement import Measurement, median_interval

ALPHA = 0.05
BUDGETS = {"seconds": "s", "peak_mib": "MiB", "sent_mib": "MiB", "joules": "J"}
"""Figures that may have a budget, and their units."""
TESTED = {"cpu_s": "CPU time", "peak_mib": "peak memory", "sent_mib": "sent"}
"""Metrics that are compared with a baseline by a test, and their names."""
TOLERANCE = 0.05
DOUBTFUL = 0.5
"""Share of the tolerance beyond which a growth is measured a second time."""
LEAST_MIB = 4.0
"""Growth of memory up to which nothing has changed, whatever share it is."""
HEAD_ROOM = 2.0
"""A budget so many times the upper bound holds, whatever the host did to the figures."""
LOAD_MAX, LOAD_SAME = 1.2, 1.05
"""Factors between the reference's CPU times then and now: figures compare; the host is as it was."""
DRIFT, DRIFT_WAITED = 0.6, 0.16
"""Shares of changes of the reference's CPU time and of waiting for a core that explain the function's."""


@dataclass(frozen=True)
class Verdict:
    """The outcome for one function on one device, and its reason."""

    outcome: Outcome = "PASS"
    why: str = ""
    note: str = ""
    """Set where doubtful figures passed."""
    grew: tuple[str, ...] = ()
    """Metrics that grew since the baseline, if it fails by them."""
    compared: tuple[Compared, ...] = ()
    """The first comparison with the baseline."""


@dataclass(frozen=True)
class NeedMore:
    """So many further measurements decide; ``otherwise`` is the verdict where they cannot be made."""

    measurements: int = 1
    otherwise: Verdict | None = None
    compared: tuple[Compared, ...] = ()


class Family(NamedTuple):
    """The comparisons that one correction for chance is over: a test's on all its devices."""

    devices: int = 1
    known: Sequence[Compared] = ()
    """Comparisons of the devices before this one."""


ONE_DEVICE = Family()


def judge(
    measurements: Sequence[Measurement],
    budgets: Mapping[str, float],
    baseline: Samples | str | None = None,
    *,
    settled: bool = False,
    tolerance: float = TOLERANCE,
    family: Family = ONE_DEVICE,
) -> Verdict | NeedMore:
    """Judge a function's first measurement, and those that were made since because `NeedMore` asked for them.

    ``baseline`` is None where nothing is compared, and a string says why none compares. With ``settled`` the
    first measurement's doubts no longer matter. ConfigError for a budget that cannot be held.
    """
    first, *later = measurements
    found = within(first, budgets, settled=settled)
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
    """Return INVALID if the figures do not count, else PASS."""
    return Verdict("INVALID", "; ".join(measured.doubts)) if measured.doubts else Verdict()


def within(measured: Measurement, budgets: Mapping[str, float], *, settled: bool = False) -> Verdict:
    """Hold each figure to its budget: the one-sided 95% bootstrap upper bound of the median.

    Doubtful figures must be below half of every budget, and have one.
    """
    wrong, narrow = [], []
    for name, allowed in budgets.items():
        if name not in BUDGETS:
            raise ConfigError(unknown("budget", name, BUDGETS))
        if not 0 <= allowed < math.inf:
            raise ConfigError(f"budget {name} must be a finite number of at least 0 (got {allowed!r})")
        try:
            middle, _, bound = median_interval(getattr(measured, name))
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
    if measured.doubts and not settled:
        why = "; ".join(measured.doubts)
        if narrow:
            return Verdict("INVALID", f"{why}; not below half of the budget for {', '.join(narrow)}")
        if not budgets:
            return Verdict("INVALID", why)
        return Verdict(note=f"passed on head-room: below half of each budget, though {why}")
    return Verdict("FAIL", "; ".join(wrong)) if wrong else Verdict()


def paced(measured: Measurement, margin: float, *, settled: bool = False) -> Verdict:
    """Show that the device's pace is kept: two one-sided tests at 5%, ± ``margin``."""
    if measured.doubts and not settled:
        return doubted(measured)
    if not measured.pace:
        raise ConfigError("the pace was not kept: time_scale is 0")
    middle, low, high = median_interval(measured.pace)
    if 1 - margin <= low and high <= 1 + margin:
        return Verdict()
    why = (
        f"pace on {measured.plan.device.id}: achieved over declared time is {middle:.3f}, 90% sure in "
        f"{low:.3f} to {high:.3f}; 1 ± {margin:g} is needed"
    )
    return Verdict("FAIL", why)


def _with_flop(more: str, found: Verdict | NeedMore) -> Verdict | NeedMore:
    """Add that counted FLOP grew, which fails whatever the host's load."""
    grew, why = (found.grew, found.why) if isinstance(found, Verdict) and found.grew else ((), "")
    fails = Verdict("FAIL", "; ".join(filter(None, (more, why))), "", ("flop", *grew), found.compared)
    return fails if isinstance(found, Verdict) else NeedMore(otherwise=fails, compared=found.compared)


def grown(
    before: Samples, measured: Sequence[Samples], tolerance: float = TOLERANCE, family: Family = ONE_DEVICE
) -> Verdict | NeedMore:
    """Judge the metrics that are measured: FAIL if one grew, INVALID if the host's load leaves that open.

    Where one seems to have grown, or nearly so, two measurements count together: what a neighbour did may
    look like a change, or hide one. A first one under a load too far from the baseline's is replaced.
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
            why = f"{one}; the host's load is another, which makes that uncertain by {one.drift:.1%}"
            return Verdict("INVALID", why, compared=first)
    return Verdict(compared=first)


def loads_apart(before: Samples, now: Samples) -> str | None:
    """Return why the host was too busy, then or now, for the two to be compared; None if it was not."""
    factor = _load(before, now)
    if 1 / LOAD_MAX <= factor <= LOAD_MAX:
        return None
    return (
        f"this host is not what it was: {now.reference} takes {factor:.2f} times the "
        f"CPU time of the baseline, at most {LOAD_MAX:g} compares"
    )


def drift(before: Samples, now: Samples) -> float:
    """Return the share of the CPU clock that may be due to the host's load: 0 where that is the same."""
    slower = max(0.0, abs(math.log(_load(before, now))) - math.log(LOAD_SAME))
    return DRIFT * slower + DRIFT_WAITED * abs(now.waited - before.waited)


def _load(before: Samples, now: Samples) -> float:
    return statistics.median(now.reference_cpu_s) / statistics.median(before.reference_cpu_s)


def together(first: Samples, second: Samples) -> Samples:
    """Join the samples of two measurements of the same function; all else is the first's."""
    joined: dict[str, Any] = {name: (*getattr(first, name), *getattr(second, name)) for name in TESTED}
    return first._replace(**joined)


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
    """Shares of the baseline by which the median may grow, and that may be due to the host's load."""
    least: float
    """Growth of the median up to which nothing has changed, whatever share it is."""

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
        """The host's load may have caused a growth beyond the tolerance, or may hide one."""
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
    before: Samples, now: Samples, tolerance: float = TOLERANCE, most: float | None = None
) -> list[Compared]:
    """Compare every tested metric with its baseline's.

    ``most`` is the share of the CPU clock that may be due to the host's load; None: by these two's loads.
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
                drift=0.0 if metric != "cpu_s" else drift(before, now) if most is None else most,
                least=LEAST_MIB if metric == "peak_mib" else 0.0,
            )
        )
    return found


def more_flop(before: Samples, now: Samples, tolerance: float = TOLERANCE) -> str | None:
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
