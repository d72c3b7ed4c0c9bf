"""What ``bench fidelity`` holds each quantity to, and what comes of it: PASS, FAIL or INVALID.

A figure counts only if the run that it is from was under conditions in which it may be believed: INVALID is
no PASS, and a bar that is missed while others use the host is INVALID, not FAIL.

The statistical tests that ``bench fidelity`` judges by, each a few lines over numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.lab.fidelity_runs import Floats, Played
from edgefl.limits.fidelity import OTHERS_NOTED, Conditions, bounds

Verdict = Literal["PASS", "FAIL", "INVALID"]
ALPHA = 0.01
DELAY_MS = 1.0


class Line(NamedTuple):
    """One quantity under one mechanism."""

    quantity: str
    mechanism: str
    declared: str
    """What was declared, for people."""
    measured: int
    """Trips, packets or devices."""
    figures: dict[str, float]
    """What was found; errors are shares."""
    bar: str
    verdict: Verdict
    why: str = ""
    """Of what is not a PASS."""

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
    runs: Sequence[Played],
) -> Line:
    """The line for figures that hold their bar or do not, from these runs."""
    doubt = next((run.doubt for run in runs if run.doubt), "")
    others = max((run.conditions.others or 0.0 for run in runs), default=0.0)
    return _line(quantity, mechanism, declared, measured, figures, bar, held, doubt, others)


def _line(
    quantity: str,
    mechanism: str,
    declared: str,
    measured: int,
    figures: dict[str, float],
    bar: str,
    held: bool,
    doubt: str,
    others: float,
) -> Line:
    verdict: Verdict = "PASS" if held else "FAIL"
    why = "" if held else "the bar is missed"
    if not measured:
        verdict, why = "INVALID", "nothing was measured"
    elif doubt:
        verdict, why = "INVALID", doubt
    elif not held and others > OTHERS_NOTED:
        verdict, why = "INVALID", f"other processes used {others:.0%} of the host"
    return Line(quantity, mechanism, declared, measured, figures, bar, verdict, why)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """FAIL if any is, else INVALID if any is.

    >>> worst(["PASS", "INVALID", "PASS"])
    'INVALID'
    """
    return next((verdict for verdict in ("FAIL", "INVALID") if verdict in verdicts), "PASS")


def errors(declared: Floats, achieved: Floats) -> Floats:
    """Achieved over declared, less 1, where something was declared."""
    return achieved[declared > 0] / declared[declared > 0] - 1.0


def shares(found: Floats) -> dict[str, float]:
    """Median and 95th percentile of the errors' sizes, and their signed median."""
    size = np.abs(found)
    if not len(found):
        return {"median": float("nan"), "p95": float("nan"), "signed": float("nan")}
    return {
        "median": float(np.median(size)),
        "p95": float(np.percentile(size, 95)),
        "signed": float(np.median(found)),
    }


def rate(mechanism: str, run: Played) -> Line:
    """Compute rate: the work over the time that it took, against the declared rate."""
    declared, achieved = run.times("compute")
    found = declared / achieved - 1.0
    figures = shares(found)
    held = figures["median"] <= 0.01 and figures["p95"] <= 0.03
    return judged("compute rate", mechanism, "8 profiles", len(found), figures, "1%, p95 3%", held, [run])


def trip(mechanism: str, run: Played) -> Line:
    """The whole trip's time."""
    found = errors(*run.times("trip"))
    figures = shares(found)
    return judged(
        "whole trip", mechanism, "8 profiles", len(found), figures, "p95 3%", figures["p95"] <= 0.03, [run]
    )


def share(mechanism: str, found: Floats, conditions: Conditions) -> Line:
    """CPU time that processes which know nothing of it were let have, over what they should."""
    figures = shares(found)
    held = figures["median"] <= 0.03
    return _line(
        "core share", mechanism, f"{len(found)} processes", len(found), figures, "3%", held,
        next(iter(bounds(None, None, conditions)), ""), conditions.others or 0.0,
    )  # fmt: skip


def transfer(rate_mbps: float, network: str, run: Played) -> Line:
    """Download and upload times over links of one rate."""
    there = run.on(network)
    found = np.concatenate([errors(*run.times(way, there)) for way in ("down", "up")])
    figures, most = shares(found), 0.02 if rate_mbps <= 100 else 0.05
    held = figures["p95"] <= most
    return judged(
        "transfer", "link", f"{rate_mbps:g} Mbps", len(found), figures, f"p95 {most:.0%}", held, [run]
    )


def delay(delay_ms: float, network: str, run: Played) -> Line:
    """One-way delays of a link without jitter."""
    declared, achieved = run.times("delay", run.on(network))
    off_ms = np.abs(achieved - declared) * 1e3
    most_ms = max(DELAY_MS, 0.02 * delay_ms)
    p95 = float(np.percentile(off_ms, 95)) if len(off_ms) else float("nan")
    figures = {"median_ms": float(np.median(off_ms)) if len(off_ms) else float("nan"), "p95_ms": p95}
    return judged(
        "delay", "link", f"{delay_ms:g} ms", len(off_ms), figures, f"p95 {most_ms:g} ms",
        p95 <= most_ms, [run],
    )  # fmt: skip


def jitter(declared: str, cdf: Callable[[Floats], Floats], network: str, run: Played) -> Line:
    """Delays that vary, against the distribution that their network declares: Kolmogorov–Smirnov."""
    _, achieved = run.times("delay", run.on(network))
    distance, chance = kolmogorov_smirnov(achieved, cdf) if len(achieved) else (float("nan"), 0.0)
    figures = {"ks": distance, "p_value": chance}
    return judged(
        "jitter", "link", declared, len(achieved), figures, f"p above {ALPHA:g}", chance > ALPHA, [run]
    )


def loss(loss_pct: float, lost: int, sent: int, run: Played) -> Line:
    """Packets that were sent again, as the transfers' times show them, of all that were sent."""
    low, high = binomial_interval(sent, loss_pct / 100.0) if sent else (0, 0)
    figures = {"lost": float(lost), "sent": float(sent), "share": lost / sent if sent else float("nan")}
    return judged(
        "loss", "link", f"{loss_pct:g}%", sent, figures, f"{low} to {high}",
        low <= lost <= high, [run],
    )  # fmt: skip


def thermal(seconds: float, predicted_s: Floats, achieved_s: Floats, run: Played) -> Line:
    """Speeds of phones that get hot, trip by trip, against a simulation in small steps."""
    found = predicted_s / achieved_s - 1.0
    rmse = float(np.sqrt(np.mean(found**2))) if len(found) else float("nan")
    figures = {"rmse": rmse, **shares(found)}
    return judged(
        "thermal curve",
        "paced",
        f"{seconds / 60:g} min",
        len(found),
        figures,
        "RMSE 3%",
        rmse <= 0.03,
        [run],
    )


def isolation(mechanism: str, alone: Played, beside: Played, profile: str) -> Line:
    """How much a client's times move when 15 others run."""
    shift, measured = {}, 0
    for quantity in ("compute", "trip"):
        medians = []
        for run in (alone, beside):
            of_profile = np.array([name == profile for name in run.profiles])
            declared, achieved = run.times(quantity, of_profile)
            measured = min(len(achieved), measured or len(achieved))
            medians.append(float(np.median(achieved / declared)) if len(achieved) else float("nan"))
        shift[quantity] = abs(medians[1] / medians[0] - 1.0)
    held = max(shift.values()) < 0.02
    return judged(
        "isolation", mechanism, f"{profile}, 15 others", measured, shift, "below 2%", held,
        [alone, beside],
    )  # fmt: skip


def ranks(run: Played, rates: Floats) -> tuple[Line, Floats]:
    """Rank correlation of measured and declared speed over all devices; and the speeds, by client."""
    speeds = np.full(len(run.profiles), np.nan)
    declared, achieved = run.times("compute")
    for client in range(len(speeds)):
        mine = run.client == client
        if mine.any():
            speeds[client] = rates[client] * float(np.median(declared[mine] / achieved[mine]))
    known = ~np.isnan(speeds)
    rho = spearman(rates[known], speeds[known]) if known.sum() > 2 else float("nan")
    line = judged(
        "ranks", "paced", f"{int(known.sum())} devices", int(known.sum()), {"rho": rho},
        "ρ from 0.99", rho >= 0.99, [run],
    )  # fmt: skip
    return line, speeds


def kolmogorov_smirnov(samples: npt.ArrayLike, cdf: Callable[[Floats], Floats]) -> tuple[float, float]:
    """Largest distance D between the samples' distribution and ``cdf``, and the chance of one as large.

    The asymptotic distribution with Stephens' correction, good from some ten samples on:
    Q(λ) = 2 Σ (−1)^(j−1) exp(−2 j² λ²), λ = (√n + 0.12 + 0.11/√n) D.

    >>> d, p = kolmogorov_smirnov(np.linspace(0.005, 0.995, 100), lambda x: x)
    >>> round(d, 3), round(p, 3)
    (0.005, 1.0)
    >>> kolmogorov_smirnov(np.linspace(0, 0.5, 100), lambda x: x)[1] < 1e-6
    True
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    n = len(ordered)
    if not n:
        raise ValueError("samples must not be empty")
    below = cdf(ordered)
    distance = float(max((np.arange(1, n + 1) / n - below).max(), (below - np.arange(n) / n).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if scaled < 0.2:  # the series converges too slowly there, and is 1 to ten digits
        return distance, 1.0
    terms = [(-1.0) ** (j - 1) * math.exp(-2.0 * j * j * scaled * scaled) for j in range(1, 101)]
    return distance, min(1.0, max(0.0, 2.0 * sum(terms)))


def binomial_interval(trials: int, chance: float, confidence: float = 0.99) -> tuple[int, int]:
    """The narrowest central interval of counts that holds at least ``confidence`` of Binomial(n, p).

    >>> binomial_interval(1000, 0.05)
    (33, 69)
    """
    if trials < 0 or not 0.0 < chance < 1.0:
        raise ValueError(f"trials must be at least 0 and chance between 0 and 1 (got {trials}, {chance})")
    counts = np.arange(trials + 1)
    logs = (
        math.lgamma(trials + 1)
        - np.array([math.lgamma(k + 1) + math.lgamma(trials - k + 1) for k in counts.tolist()])
        + counts * math.log(chance)
        + (trials - counts) * math.log1p(-chance)
    )
    total = np.cumsum(np.exp(logs))
    tail = (1.0 - confidence) / 2
    return int(np.searchsorted(total, tail)), int(np.searchsorted(total, 1.0 - tail))


def spearman(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Rank correlation, ties at their mean rank.

    >>> round(spearman([1, 2, 3, 4], [10, 20, 40, 30]), 3)
    0.8
    """
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: npt.ArrayLike) -> Floats:
    _, place, count = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    ranks: Floats = (last - (count - 1) / 2)[place]
    return ranks
