"""Run every strategy on one experiment, experiments/strategies.toml, for the same emulated time.

    python benchmarks/every_strategy.py [NAME …] [--seeds 3] [--out runs/strategies]

Each strategy runs with its default settings, except for the fields in `SETTINGS`. Nothing is tuned, so the
table shows how the algorithms behave on this fleet, but does not rank them. docs/strategies.md contains the
table. The runs are a sweep in the folder ``--out`` (`edgefl.sweep`). Runs that the folder already contains
are not repeated.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import edgefl
from edgefl import config
from edgefl.results.grouping import Run, grouped, load, rows_of
from edgefl.results.statistics import estimate, share
from edgefl.results.targets import RaceTarget
from edgefl.strategies import names

EXPERIMENT = Path(__file__).parents[1] / "experiments" / "strategies.toml"
TARGET = 0.8
ADAPTIVE = {"server_lr": 0.03}
POLLED = {"interval_s": 0.2}
SETTINGS: dict[str, dict[str, Any]] = {
    "asysg": {"server_lr": 0.2},
    "favano": POLLED,
    "fedadagrad": ADAPTIVE,
    "fedadam": ADAPTIVE,
    "fedavgm": {"momentum": 0.9, "server_lr": 0.3},
    "feddyn": {"alpha": 0.1},
    "fedfix": POLLED,
    "fedprox": {"mu": 0.1},
    "fedyogi": ADAPTIVE,
    "pisces": {"concurrency": 12},
    "quafl": {"participants": 10, **POLLED},
}
"""Fields of strategies whose values differ from the defaults. A polling interval is about as long as a trip.
Server learning rates are changed for strategies that use an adaptive optimiser or momentum, or that add up
updates instead of averaging them. The concurrency of Pisces is below the fleet's size, so that it can choose
among the clients."""


def seconds(runs: Sequence[Run]) -> str:
    """Return the emulated seconds until the smoothed accuracy reached `TARGET`, as text.

    It is the mean over the seeds, or a dash if a run did not reach the target.
    """
    found = estimate([RaceTarget(TARGET, "given").reached(run.record, "at_s") for run in runs])
    return "–" if math.isnan(found.mean) else f"{found.mean:.1f}"


def row(name: str, runs: Sequence[Run]) -> str:
    """Return the strategy's row of the table, in Markdown."""
    (found,) = rows_of(grouped(runs))
    fields = ", ".join(f"`{key} = {value}`" for key, value in SETTINGS.get(name, {}).items())
    figures = found.figures
    stale = f"{figures['staleness_mean'].mean:.1f} / {figures['staleness_max'].mean:.0f}"
    trips, versions = (f"{figures[key].mean:,.0f}" for key in ("client_trips", "versions"))
    cells = (f"`{name}`", fields, share(figures["accuracy"]), seconds(runs), trips, versions, stale)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Every strategy on one experiment.")
    parser.add_argument("names", nargs="*", choices=[*names(), []], metavar="NAME", help="all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/strategies"))
    given = parser.parse_args()
    chosen = given.names or names()
    kinds = [{"name": name, **SETTINGS.get(name, {})} for name in chosen]
    seeds = range(1, given.seeds + 1)
    found = edgefl.sweep(
        config.load(EXPERIMENT), given.out, seeds=seeds, grid={"strategy": kinds}, quiet=False
    )
    head = (
        "strategy",
        "fields",
        "accuracy",
        f"{TARGET:.0%} after, s",
        "trips",
        "versions",
        "staleness, mean / max",
    )
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for name, runs in zip(chosen, found.results().values(), strict=True):
        print(row(name, load([run.dir for run in runs])))


if __name__ == "__main__":
    main()
