"""The fairest weights that a bounded step allows, beside those of FedStaleWeight's forms.

    python -m edgefl.lab.frontier            the tables of docs/findings.md

A version's weights add up to at most c, so a group of clients that is in φ of all versions has at most c·φ
of weight a version, whoever gives it. Where that is less than the group's part of the fleet, no weights are
fair.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from edgefl.core.events import Event, Joined, Left
from edgefl.lab.convergence import judged, worst
from edgefl.lab.influence import FAST_ONES, FEDSTALEWEIGHT, Outcome, simulate
from edgefl.lab.study import Finding
from edgefl.results.statistics import estimate
from edgefl.seeds import stream
from edgefl.strategies.fedstaleweight import FedStaleWeight

SLOW_BY = (1.0, 2.0, 4.0, 8.0)
CAPS = (2.0, 4.0)


class Short(NamedTuple):
    """One cap in one fleet, one value a seed; the slow clients' weight, over what it is without a cap."""

    most: list[float]
    """Upper bound by the cap: weight c·φ per version, at most 1."""
    running: list[float]
    credit: list[float]
    owed: list[float]
    """The most that the credit form owes a client at the end, in updates of its own fair weight."""


def measure(cap: float, slow_by: float, versions: int, seeds: Sequence[int], churn: bool = False) -> Short:
    """FedStaleWeight's fleet whose slow clients are ``slow_by`` times slower, in both forms.

    Clients go on at once, as equation 6 has it: without a cap each then has 1/n.
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
    """Each client is away for a fifth of the time, for Exp(10) s at a time, with what it was doing lost."""
    events: list[Event] = []
    for client in range(len(FEDSTALEWEIGHT)):
        draws, now_s = stream(seed, "churn", client), 0.0
        while now_s < versions:
            gone_s = now_s + float(draws.exponential(40.0))
            now_s = gone_s + float(draws.exponential(10.0))
            events += [Left(client, gone_s, "churn"), Joined(client, now_s)]
    return events


def credit_reaches_it(quick: bool = False) -> Finding:
    """At c = 2, from where the bounded form is nearly fair to where no form can be."""
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


def main(versions: int = 4_000, seeds: Sequence[int] = (1, 2, 3)) -> None:
    """Print the tables: by how much slow clients' weight falls short, in per cent; and what waiting does."""
    print("| slow clients | c | any form, at least | running | credit | owed at the end, updates |")
    print("|---|---|---|---|---|---|")
    for slow_by, cap in product(SLOW_BY, CAPS):
        print(_row(f"× {slow_by:g}", cap, measure(cap, slow_by, versions, seeds)), flush=True)
    for slow_by in SLOW_BY:
        seen = measure(2.0, slow_by, versions, seeds, churn=True)
        print(_row(f"× {slow_by:g}, churn", 2.0, seen), flush=True)
    print("\n| restart | form | a fast client's weight · n | a slow one's |\n|---|---|---|---|")
    for restart, form in product(("immediate", "new-version", "after-step"), ("derivation", "algorithm-1")):
        print(waiting(restart, form, versions, seeds), flush=True)


def waiting(restart: str, form: str, versions: int, seeds: Sequence[int]) -> str:
    """A row on the weights of the running form without a cap, under a restart rule."""
    fields: dict[str, Any] = {"buffer_size": 5, "restart": restart, "form": form}
    strategy = FedStaleWeight(**fields, normalize="running", max_step=1e9)
    runs = [simulate(strategy, versions, seed).applied() for seed in seeds]
    groups = (slice(0, len(FAST_ONES)), slice(len(FAST_ONES), None))
    means = [estimate([float(run[group].mean()) for run in runs]) for group in groups]
    return f"| `{restart}` | `{form}` | " + " | ".join(mean.at(".3f") for mean in means) + " |"


def _row(label: str, cap: float, seen: Short) -> str:
    columns = (seen.most, seen.running, seen.credit)
    short = (estimate([100.0 * (1.0 - value) for value in values]) for values in columns)
    cells = [label, f"{cap:g}", *(each.at(".1f") for each in short), f"{max(seen.owed):.1f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
