"""Claims about the experiment with FedStaleWeight (Ma 2024, section 6.2)."""

from __future__ import annotations

from edgefl.lab.claims import Gain, judged
from edgefl.lab.study import Curves, Finding, share, verdict
from edgefl.results.statistics import difference, higher, p_of_ratio, p_value

FAST, SLOW = "paper-fast-u1-2", "paper-slow-u8-12"
PAPER, RUNNING, AVERAGE, FEDBUFF = "FedStaleWeight", "running form", "buffered FedAvg", "FedBuff"
FAIR = 0.05
"""A group of clients gets a fair share of the weight if its mean share per client differs from 1/n by at most
this fraction of 1/n."""
NEAR = 0.95
"""Ratio of the target accuracy to the final accuracy of the weakest run. The ratio is below 1, so that a
short peak in accuracy does not decide the race."""


def claims(curves: Curves) -> list[Finding]:
    """Judge the paper's claims, and our claims about FedStaleWeight with ``normalize="running"``."""
    final = {label: curves.accuracy(label) for label in curves.records}
    target = NEAR * min(*final[PAPER], *final[AVERAGE])
    trips = curves.race(PAPER, AVERAGE, target, "trips")
    weight = {
        (label, profile): curves.weights(label, profile)
        for label in curves.records
        for profile in (FAST, SLOW)
    }
    running = [*weight[RUNNING, FAST], *weight[RUNNING, SLOW]]

    def unfair(label: str) -> list[float]:
        """Return, for each seed, how much the clients' shares of the weight differ from the fair share 1/n.

        Each value is the mean of two relative differences, one for the fast and one for the slow group.
        """
        groups = zip(weight[label, FAST], weight[label, SLOW], strict=True)
        return [(abs(fast - 1.0) + abs(slow - 1.0)) / 2 for fast, slow in groups]

    def fairness(label: str) -> str:
        fast, slow = weight[label, FAST], weight[label, SLOW]
        return f"fast {sum(fast) / len(fast):.2f}/n, slow {sum(slow) / len(slow):.2f}/n"

    at_end = Gain(PAPER, AVERAGE, "higher final accuracy than buffered FedAvg", "section 6.2", "higher")
    what = "the running form is ahead of the paper's in mean accuracy over the run"
    ahead = Gain(RUNNING, PAPER, what, "ours, beyond the paper", "higher", last=0).finding(curves)
    fairer, seeds = difference(unfair(AVERAGE), unfair(PAPER)), len(final[PAPER])
    return [
        at_end.finding(curves),
        Finding(
            f"fewer trips than buffered FedAvg to {target:.1%}",
            "section 6.2",
            "fewer",
            f"buffered FedAvg takes {trips or 'not settled'}",
            judged(trips, None),
            f"{NEAR:.0%} of the lowest final accuracy of both arms' runs; the paper gives no figure",
            (PAPER,),
            (AVERAGE,),
            p_of_ratio(trips, seeds),
        ),
        Finding(
            "fairer than buffered FedAvg in applied weight per client",
            "eq. 3",
            "1/n each",
            f"{fairness(PAPER)}; averaging: {fairness(AVERAGE)}",
            verdict(higher(fairer)),
            "normalising inside each buffer still distorts it",
            (PAPER,),
            (AVERAGE,),
            p_value(fairer, seeds),
        ),
        Finding(
            "the running form is fair to 5%",
            "ours, beyond the paper",
            "1/n each",
            fairness(RUNNING),
            verdict(all(abs(value - 1.0) <= FAIR for value in running)),
            "",
            (RUNNING,),
        ),
        ahead._replace(note=f"at the end: {share(final[RUNNING])} against {share(final[PAPER])}"),
    ]
