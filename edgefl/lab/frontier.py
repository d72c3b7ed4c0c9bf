"""The fairest weights that a bounded step allows, beside those of FedStaleWeight's forms.

A version's weights add up to at most c. A group of clients that is in φ of all versions therefore gets at
most c·φ of weight per version from any strategy. If that is less than its share of the fleet, no weights are
fair. The tables of docs/findings.md: ``python -m benchmarks.frontier``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from edgefl.core.events import Event, Joined, Left
from edgefl.lab.convergence import judged, worst
from edgefl.lab.influence import FAST_ONES, FEDSTALEWEIGHT, Outcome, simulate
from edgefl.lab.study import Finding
from edgefl.seeds import stream
from edgefl.strategies.fedstaleweight import FedStaleWeight


class Short(NamedTuple):
    """Weight of slow clients under a cap ÷ their weight without one; one value per seed."""

    most: list[float]
    """Upper bound by the cap: weight c·φ per version, at most 1."""
    running: list[float]
    credit: list[float]
    owed: list[float]
    """Largest credit of a client at the end, in updates of its own fair weight."""


def measure(cap: float, slow_by: float, versions: int, seeds: Sequence[int], churn: bool = False) -> Short:
    """Run FedStaleWeight's fleet, its slow clients ``slow_by`` times slower, in the running and credit forms.

    Clients restart immediately, as in equation 6: without a cap each of them then has 1/n.
    """
    seen = Short([], [], [], [])
    slow = slice(len(FAST_ONES), None)
    for seed in seeds:
        forms = (("running", cap), ("credit", cap), ("running", 1e9))
        run = [_run(form, most, slow_by, versions, seed, churn) for form, most in forms]
        running, credit, fair = (each.applied() for each in run)
        room = cap * run[1].versions_with_slow * len(FEDSTALEWEIGHT)
        seen.most.append(min(1.0, room / float(fair[slow].sum())))
        seen.running.append(float(running[slow].sum() / fair[slow].sum()))
        seen.credit.append(float(credit[slow].sum() / fair[slow].sum()))
        updates = np.bincount(run[1].client, minlength=len(fair))
        seen.owed.append(float(((fair - credit) / fair * updates).max()))
    return seen


def _run(form: str, cap: float, slow_by: float, versions: int, seed: int, churn: bool) -> Outcome:
    fields: dict[str, Any] = {"buffer_size": 5, "restart": "immediate", "normalize": form, "max_step": cap}
    events = comings_and_goings(versions, seed) if churn else ()
    return simulate(FedStaleWeight(**fields), versions, seed, slow_by=slow_by, events=events)


def comings_and_goings(versions: int, seed: int) -> list[Event]:
    """Return events by which each client is offline for Exp(10) s at a time, a fifth of the time in total."""
    events: list[Event] = []
    for client in range(len(FEDSTALEWEIGHT)):
        draws, now_s = stream(seed, "churn", client), 0.0
        while now_s < versions:
            gone_s = now_s + float(draws.exponential(40.0))
            now_s = gone_s + float(draws.exponential(10.0))
            events += [Left(client, gone_s, "churn"), Joined(client, now_s)]
    return events


def credit_reaches_it(quick: bool = False) -> Finding:
    """Compare both forms at c = 2, for fleets in which fair weights are possible to fleets in which not."""
    versions, seeds = (2_000, (1,)) if quick else (8_000, (1, 2, 3))
    rows = [measure(2.0, slow_by, versions, seeds) for slow_by in (1.0, 1.5, 4.0)]
    ratios = [[one.credit[at] / one.most[at] for one in rows] for at in range(len(seeds))]
    plain, paid = (
        ", ".join(f"{1.0 - sum(values) / len(values):.0%}" for values in each)
        for each in ([one.running for one in rows], [one.credit for one in rows])
    )
    return judged(
        "with credit slow clients have 1/n each, or all that max_step = 2 lets any weights give them",
        "ours, beyond the paper",
        "at most c·φ a version, φ of the versions being with them",
        [worst("weight of slow clients", ratios, 0.04)],
        f"slow clients 1, 1.5, 4 times slower: {paid} short of 1/n; running form {plain}",
        max(map(max, ratios)) <= 1.0 + 1e-9,
    )
