"""Run robust strategies against attackers on FashionMNIST (experiments/attacks.toml).

    python benchmarks/attacks.py [--seeds 3] [--out runs/attacks] [--set KEY=VALUE …]

The benchmark runs each of `STRATEGIES` against each of `ATTACKS` (`edgefl.sweep`), in the folder ``--out``.
It prints the table in docs/strategies.md: the final accuracy on the test examples, as the mean over the seeds
± half the width of its 95% confidence interval. Runs that the folder already contains are not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import edgefl
from edgefl import config
from edgefl.results.grouping import grouped, load, rows_of
from edgefl.results.statistics import share

EXPERIMENT = Path(__file__).parents[1] / "experiments" / "attacks.toml"
BUFFER: dict[str, Any] = {"buffer_size": 20, "restart": "after-step"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "fedbuff": {},
    "median": {},
    "trimmed-mean": {"beta": 0.3},
    "krum": {"attackers": 6, "selected": 14},
    "rfa": {"iterations": 8},
}
"""Fields of each strategy whose values differ from the defaults. The values allow for up to 6 attackers per
buffer: of the 20 updates in a buffer, 4 are from attackers on average, and rarely more than 6."""
ATTACKS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "sign-flip, scale 4": {"kind": "sign-flip", "scale": 4.0},
    "gaussian, scale 10": {"kind": "gaussian", "scale": 10.0},
    "label-flip": {"kind": "label-flip"},
    "alie": {"kind": "alie"},
    "alie, z = 1.5": {"kind": "alie", "z": 1.5},
}
SHARE = 0.2


def attacked(out: Path, name: str, seeds: range, changes: list[str]) -> dict[str, str]:
    """Run all strategies against one attack; return the accuracy of each strategy as text."""
    rules = ATTACKS[name]
    fleet = [] if rules is None else [f"fleet.attackers.{key}={value}" for key, value in rules.items()]
    fleet += [] if rules is None else [f"fleet.attackers.share={SHARE}"]
    experiment = config.load(EXPERIMENT, [*changes, *fleet])
    kinds = [{"name": strategy, **BUFFER, **fields} for strategy, fields in STRATEGIES.items()]
    found = edgefl.sweep(experiment, out, seeds=seeds, grid={"strategy": kinds}, quiet=False)
    runs = zip(STRATEGIES, found.results().values(), strict=True)
    return {
        strategy: share(rows_of(grouped(load([run.dir for run in ones])))[0].figures["accuracy"])
        for strategy, ones in runs
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Robust strategies against attackers.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/attacks"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    given = parser.parse_args()
    columns = {
        name: attacked(given.out / str(place), name, range(1, given.seeds + 1), given.changes)
        for place, name in enumerate(ATTACKS)
    }
    print(f"| strategy | {' | '.join(ATTACKS)} |\n{'|---' * (1 + len(ATTACKS))}|")
    for strategy in STRATEGIES:
        print(f"| `{strategy}` | {' | '.join(column[strategy] for column in columns.values())} |")


if __name__ == "__main__":
    main()
