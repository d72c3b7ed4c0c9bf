"""The bars that ``bench fidelity`` holds each quantity to, and its verdicts: PASS, FAIL or INVALID.

A figure counts only if the run that it is from was under conditions in which it may be believed: INVALID is
no PASS, and a bar that is missed while others use the host is INVALID, not FAIL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import stats

from edgefl.lab.fidelity_runs import Floats, TripTimes
from edgefl.limits.fidelity import OTHERS_NOTED, Conditions, bounds

Verdict = Literal["PASS", "FAIL", "INVALID"]
ALPHA = 0.01
CONFIDENCE = 0.99
DELAY_MS = 1.0
SAME = 0.03
"""A slowed run's times may be off by so much."""


class JudgedQuantity(NamedTuple):
    """One quantity under one mechanism."""

    quantity: str
    mechanism: str
    declared: str
    """The declared value, for people."""
    measured: int
    """Trips, packets or devices."""
    figures: dict[str, float]
    """Measured values; errors are shares."""
    bar: str
    verdict: Verdict
    why: str = ""
    """The reason of a verdict that is no PASS."""

    def plain(self) -> dict[str, Any]:
        """Its fields for JSON: a figure that is none is None."""
        figures = {name: value if math.isfinite(value) else None for name, value in self.figures.items()}
        return {**self._asdict(), "figures": figures}


def judged(
    quantity: str,
    mechanism: str,
    declared: str,
    measured: int,
    figures: dict[str, float],
    bar: str,
    held: bool,
    *conditions: Conditions,
) -> JudgedQuantity:
    """The verdict on figures that hold their bar or do not, found under these conditions."""
    doubt = next((why for each in conditions for why in bounds(None, None, each)), "")
    others = max(each.others or 0.0 for each in conditions)
    verdict: Verdict = "PASS" if held else "FAIL"
    why = "" if held else "the bar is missed"
    if not measured:
        verdict, why = "INVALID", "nothing was measured"
    elif doubt:
        verdict, why = "INVALID", doubt
    elif not held and others > OTHERS_NOTED:
        verdict, why = "INVALID", f"other processes used {others:.0%} of the host"
    return JudgedQuantity(quantity, mechanism, declared, measured, figures, bar, verdict, why)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """FAIL if any is, else INVALID if any is.

    >>> worst(["PASS", "INVALID", "PASS"])
    'INVALID'
    """
    return next((verdict for verdict in ("FAIL", "INVALID") if verdict in verdicts), "PASS")


def errors(declared: Floats, achieved: Floats) -> Floats:
    """Achieved over declared, less 1, where something was declared."""
    return achieved[declared > 0] / declared[declared > 0] - 1.0


def summary_of(found: Floats) -> dict[str, float]:
    """Median and 95th percentile of the errors' sizes, and their signed median."""
    size = np.abs(found)
    return {"median": _median(size), "p95": _p95(size), "signed": _median(found)}


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _p95(values: Floats) -> float:
    return float(np.percentile(values, 95)) if len(values) else math.nan


def _within(
    quantity: str,
    mechanism: str,
    declared: str,
    found: Floats,
    most: dict[str, float],
    conditions: Conditions,
) -> JudgedQuantity:
    """The verdict on errors of which these figures may be so much at most."""
    figures = summary_of(found)
    bar = ", ".join(f"{name} {limit:.0%}".removeprefix("median ") for name, limit in most.items())
    held = all(figures[name] <= limit for name, limit in most.items())
    return judged(quantity, mechanism, declared, len(found), figures, bar, held, conditions)


def rate(mechanism: str, run: TripTimes) -> JudgedQuantity:
    """Compute rate: the work over the time that it took, against the declared rate."""
    declared, achieved = run.times("compute")
    most = {"median": 0.01, "p95": 0.03}
    return _within("compute rate", mechanism, "8 profiles", declared / achieved - 1.0, most, run.conditions)


def trip(mechanism: str, run: TripTimes) -> JudgedQuantity:
    """The whole trip's time."""
    found = errors(*run.times("trip"))
    return _within("whole trip", mechanism, "8 profiles", found, {"p95": 0.03}, run.conditions)


def share(mechanism: str, found: Floats, conditions: Conditions) -> JudgedQuantity:
    """CPU time that processes which know nothing of it were let have, over what they should."""
    return _within("core share", mechanism, f"{len(found)} processes", found, {"median": 0.03}, conditions)


def transfer(rate_mbps: float, network: str, run: TripTimes) -> JudgedQuantity:
    """Download and upload times over links of one rate."""
    there = run.on(network)
    found = np.concatenate([errors(*run.times(way, there)) for way in ("down", "up")])
    most = {"p95": 0.02 if rate_mbps <= 100 else 0.05}
    return _within("transfer", "link", f"{rate_mbps:g} Mbps", found, most, run.conditions)


def delay(delay_ms: float, network: str, run: TripTimes) -> JudgedQuantity:
    """One-way delays of a link without jitter."""
    declared, achieved = run.times("delay", run.on(network))
    off_ms = np.abs(achieved - declared) * 1e3
    most_ms = max(DELAY_MS, 0.02 * delay_ms)
    figures = {"median_ms": _median(off_ms), "p95_ms": _p95(off_ms)}
    held, bar = figures["p95_ms"] <= most_ms, f"p95 {most_ms:g} ms"
    return judged("delay", "link", f"{delay_ms:g} ms", len(off_ms), figures, bar, held, run.conditions)


def jitter(declared: str, distribution: Any, network: str, run: TripTimes) -> JudgedQuantity:
    """Delays that vary, against their network's ``distribution`` in ms (scipy's): Kolmogorov–Smirnov."""
    _, achieved = run.times("delay", run.on(network))
    distance, chance = stats.kstest(achieved * 1e3, distribution.cdf) if len(achieved) else (math.nan, 0.0)
    figures = {"ks": float(distance), "p_value": float(chance)}
    bar, held = f"p above {ALPHA:g}", bool(chance > ALPHA)
    return judged("jitter", "link", declared, len(achieved), figures, bar, held, run.conditions)


def loss(loss_pct: float, lost: int, sent: int, run: TripTimes) -> JudgedQuantity:
    """Packets that were sent again, as the transfers' times show them, of all that were sent."""
    low, high = map(int, stats.binom.interval(CONFIDENCE, sent, loss_pct / 100.0)) if sent else (0, 0)
    figures = {"lost": float(lost), "sent": float(sent), "share": lost / sent if sent else math.nan}
    held = low <= lost <= high
    return judged("loss", "link", f"{loss_pct:g}%", sent, figures, f"{low} to {high}", held, run.conditions)


def thermal(seconds: float, predicted_s: Floats, achieved_s: Floats, run: TripTimes) -> JudgedQuantity:
    """Speeds of devices that get hot, trip by trip, against a simulation in small steps."""
    found = predicted_s / achieved_s - 1.0
    rmse = float(np.sqrt(np.mean(found**2))) if len(found) else math.nan
    figures, declared = {"rmse": rmse, **summary_of(found)}, f"{seconds / 60:g} min"
    return judged(
        "thermal curve", "paced", declared, len(found), figures, "RMSE 3%", rmse <= 0.03, run.conditions
    )


def isolation(mechanism: str, alone: TripTimes, beside: TripTimes, profile: str) -> JudgedQuantity:
    """The shift of a client's times when 15 others run."""
    shift, measured = {}, 0
    for quantity in ("compute", "trip"):
        medians = []
        for run in (alone, beside):
            declared, achieved = run.times(quantity, run.of(profile))
            measured = min(len(achieved), measured or len(achieved))
            medians.append(_median(achieved / declared))
        shift[quantity] = abs(medians[1] / medians[0] - 1.0)
    held = max(shift.values()) < 0.02
    declared_as, conditions = f"{profile}, 15 others", (alone.conditions, beside.conditions)
    return judged("isolation", mechanism, declared_as, measured, shift, "below 2%", held, *conditions)


def ranks(run: TripTimes, rates: Floats) -> JudgedQuantity:
    """Rank correlation of measured and declared speed over all devices."""
    declared, achieved = run.times("compute")
    speeds = np.array(
        [rates[client] * _median((declared / achieved)[run.client == client]) for client in range(len(rates))]
    )
    known = ~np.isnan(speeds)
    count = int(known.sum())
    rho = float(stats.spearmanr(rates[known], speeds[known]).statistic) if count > 2 else math.nan
    figures, held = {"rho": rho}, rho >= 0.99
    return judged("ranks", "paced", f"{count} devices", count, figures, "ρ from 0.99", held, run.conditions)


def same(how: str, plain: TripTimes, slowed: TripTimes) -> JudgedQuantity:
    """PASS if the slowed run has the times of the plain one, or says INVALID; FAIL if neither."""
    found = _sums(slowed)
    off = max(
        (abs(found.get(what, np.inf) / was - 1.0) for what, was in _sums(plain).items()), default=np.inf
    )
    shares = {name: getattr(slowed.conditions, name) for name in ("load", "used", "others", "throttled")}
    figures = {"off": off, "time_scale": slowed.time_scale}
    figures |= {name: value for name, value in shares.items() if value is not None}
    said = slowed.reasons[0] if slowed.reasons else ""
    verdict: Verdict = "PASS"
    why = f"says INVALID: {said}" if said else ""
    if plain.reasons:
        verdict, why = "INVALID", f"as it is: {plain.reasons[0]}"
    elif not said and off > SAME:
        verdict, why = "FAIL", "wrong times, and not a word"
    bar = f"the same within {SAME:.0%}, or INVALID"
    return JudgedQuantity(how, "paced", "", len(slowed.client), figures, bar, verdict, why)


def _sums(run: TripTimes) -> dict[str, float]:
    """Achieved over declared time: of all training, and of each device's trips."""
    sums = {"training": run.times("compute")}
    for name in sorted(set(run.profiles)):
        sums[name] = run.times("trip", run.of(name))
    return {
        what: float(achieved.sum() / declared.sum())
        for what, (declared, achieved) in sums.items()
        if len(declared)
    }
