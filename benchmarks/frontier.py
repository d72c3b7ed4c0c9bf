"""Print the table in docs/findings.md about slow clients' weight under a bounded step, and a second table.

    python -m benchmarks.frontier

The first table shows by how many per cent the weight of slow clients is below the fair share 1/n if the
server's step is bounded. The second table is for an unbounded step, and shows how the weights of fast and
slow clients depend on when clients start their next trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from edgefl.lab.influence import FAST_ONES, simulate
from edgefl.lab.theory import Short, measure
from edgefl.results.statistics import estimate
from edgefl.strategies.fedstaleweight import FedStaleWeight

SLOW_BY = (1.0, 2.0, 4.0, 8.0)
CAPS = (2.0, 4.0)


def main(versions: int = 4_000, seeds: Sequence[int] = (1, 2, 3)) -> None:
    print("| slow clients | c | smallest shortfall possible | running | credit | max final credit, updates |")
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
    """Return a table row with the mean weights of a fast and of a slow client under a restart rule.

    Each weight is multiplied by the number of clients, so that 1 is the fair weight. The strategy is
    FedStaleWeight with ``normalize="running"`` and without a bound on the step.
    """
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
