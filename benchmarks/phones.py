"""Compare FedStaleWeight with FedBuff on phones (experiments/phones.toml), over plausible fleets and seeds.

    python -m benchmarks.phones [--world mixed] [--fleets 20] [--seeds 5] [--mutants] [--out runs/phones]

The speeds of a plausible fleet are drawn from the intervals in the device profiles. There are two
distributions of the data (worlds). In ``mixed``, the classes of each phone are drawn (Dirichlet, α = 0.3),
regardless of its speed. In ``slow-hold``, only the slowest third of the phones holds classes 0 to 2. The step
sizes of each strategy are tuned first, with two other seeds: of the values in `GRID`, those with the best
accuracy, averaged over a run, are used. The table in docs/findings.md compares the emulated time and the
energy until a strategy reaches the target in each world. It shows in how many plausible fleets FedStaleWeight
is ahead, and the ratio of the costs over seeds. With ``--mutants``, wrong implementations of FedStaleWeight
(`edgefl.lab.mutants`) are compared with FedBuff as well, with the same step sizes and fleets. Runs that the
folder already contains are not repeated.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgefl
from edgefl import config
from edgefl.devices.energy import PowerDraw, draw_of
from edgefl.devices.profiles import bundled_names, load_device, load_network
from edgefl.errors import ProfileError
from edgefl.experiment import Experiment
from edgefl.lab.mutants import MUTANTS
from edgefl.results.energy import energy_of
from edgefl.results.fleets import ahead
from edgefl.results.record import Record
from edgefl.results.statistics import estimate, ratio, share
from edgefl.results.targets import RaceTarget, ratio_text

EXPERIMENT = Path(__file__).parents[1] / "experiments" / "phones.toml"
STRATEGIES = ("fedbuff", "fedstaleweight")
GRID: dict[str, list[float]] = {
    "training.lr": [0.01, 0.03, 0.1, 0.3],
    "strategy.server_lr": [0.03, 0.1, 0.3, 1.0],
}
TUNING_SEEDS = (101, 102)
SLOW_SHARE = 1 / 3
SLOW_CLASSES = 3
Steps = tuple[float, ...]
"""One value for each key of `GRID`, in the order of the keys."""
TARGETS = {"mixed": (0.65, 0.7), "slow-hold": (0.6, 0.65)}


def slow_hold(
    labels: NDArray[np.int64], profiles: Sequence[str], rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Split the classes below `SLOW_CLASSES` evenly among the slowest phones, and the others among the rest.

    ``profiles`` lists the profile of each client. The slowest phones have the lowest training rates.
    """
    rates = []
    for profile in profiles:
        cpu = load_device(profile).cpu
        assert cpu is not None
        rates.append(cpu.rate_gflops.train)
    order = np.argsort(rates, kind="stable")
    slow = order[: round(SLOW_SHARE * len(order))]
    rows: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(order)
    for clients, held in ((slow, labels < SLOW_CLASSES), (order[len(slow) :], labels >= SLOW_CLASSES)):
        shuffled = rng.permutation(np.flatnonzero(held))
        for client, part in zip(clients, np.array_split(shuffled, len(clients)), strict=True):
            rows[client] = part
    return rows


WORLDS: dict[str, Callable[..., Any] | None] = {"mixed": None, "slow-hold": slow_hold}


@cache
def typical(network: str) -> PowerDraw:
    """Return the median power draw on a network, over the bundled devices whose profiles give one."""
    stated = []
    for name in bundled_names("devices"):
        with suppress(ProfileError):
            stated.append(draw_of(load_device(name), load_network(network)))
    fields = ("idle_w", "compute_w", "download_w", "upload_w")
    return PowerDraw(
        **{field: statistics.median(getattr(draw, field) for draw in stated if draw) for field in fields}
    )


def joules(record: Record, until_s: float) -> float:
    """Return the energy in joules of all trips that arrived by ``until_s``; NaN if ``until_s`` is NaN.

    A phone whose profile does not give its power draw, such as most phones of phones-2020, is assumed to have
    the `typical` one.
    """
    if math.isnan(until_s):
        return math.nan
    return float(energy_of(record, until_s, typical(str(record.fleet["network"][0])))["total_j"])


def tuned(experiment: Experiment, world: str, strategy: str, out: Path) -> Steps:
    """Return the values of `GRID` with the best accuracy, averaged over a run and over `TUNING_SEEDS`."""
    found = edgefl.sweep(
        experiment,
        out / f"{world}-{strategy}-tuning",
        grid={"strategy.name": [strategy], **GRID},
        partition=WORLDS[world],
        seeds=TUNING_SEEDS,
    )
    scores: dict[Steps, list[float]] = {}
    for run in found.runs:
        steps = tuple(float(run.changes[key]) for key in GRID)
        accuracies = [row.accuracy for row in run.result.record.evaluations]
        scores.setdefault(steps, []).append(statistics.fmean(accuracies))
    means = {steps: statistics.fmean(each) for steps, each in scores.items()}
    for steps, mean in means.items():
        print(f"{world}, {strategy}, {steps}: mean accuracy {mean:.3f}", flush=True)
    return max(means, key=lambda steps: means[steps])


def raced(experiment: Experiment, world: str, name: str, steps: Steps, out: Path, **how: Any) -> list[Record]:
    """Run the experiment with these step sizes for each seed or fleet in ``how``; return the runs' records.

    The folder of the runs is named after ``world`` and ``name``.
    """
    grid = {key: [value] for key, value in zip(GRID, steps, strict=True)}
    found = edgefl.sweep(
        experiment, out / f"{world}-{name}-{'-'.join(how)}", grid=grid, partition=WORLDS[world], **how
    )
    return [run.result.record for run in found.runs]


def compared(world: str, target: float, fedbuff: list[Record], other: list[Record]) -> Iterator[str]:
    """Yield one table row for the time and one for the energy needed to reach the target accuracy.

    A row contains the means for FedBuff and for the ``other`` strategy, how often the other strategy needs
    less, and the ratio of its cost to FedBuff's.
    """
    goal = RaceTarget(target, "given")
    for cost in ("time", "energy"):
        costs, ends = list[list[float]](), list[list[float]]()
        for records in (fedbuff, other):
            reached = [goal.reached(record, "at_s") for record in records]
            end = [goal.curve(record, "at_s").end for record in records]
            if cost == "energy":
                reached = [joules(*pair) for pair in zip(records, reached, strict=True)]
                end = [joules(*pair) for pair in zip(records, end, strict=True)]
            costs.append(reached)
            ends.append(end)
        unit = "s" if cost == "time" else "J"
        there = [[each for each in one if each > 0.0] for one in costs]
        means = [
            f"{estimate(found or [math.nan])} {unit} ({len(found)} of {len(one)})"
            for found, one in zip(there, costs, strict=True)
        ]
        lead = ahead(costs[1], costs[0], ends[1], ends[0])
        over = ratio(costs[1], costs[0], ends[1], ends[0])
        relation = ratio_text(over) if over else "not settled"
        yield f"| {world} | {target:.0%} | {cost} | {' | '.join(means)} | {lead} | {relation} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="FedStaleWeight against FedBuff on phones.")
    parser.add_argument("--world", choices=sorted(WORLDS), action="append")
    parser.add_argument("--fleets", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--mutants", action="store_true", help="also compare wrong forms of FedStaleWeight")
    parser.add_argument("--out", type=Path, default=Path("runs/phones"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()

    def _with(*changes: str) -> Experiment:
        return config.load(EXPERIMENT, [*options.set, *changes])

    experiment = _with()
    for world in options.world or WORLDS:
        steps = {name: tuned(experiment, world, name, options.out) for name in STRATEGIES}
        print(world, steps)
        for kind, how in (
            ("fleets", {"fleets": options.fleets}),
            ("seeds", {"seeds": range(1, options.seeds + 1)}),
        ):
            runs = {
                name: raced(_with(f"strategy.name={name}"), world, name, steps[name], options.out, **how)
                for name in STRATEGIES
            }
            if options.mutants and kind == "fleets":
                for at, wrong in enumerate(MUTANTS["fedstaleweight"]):
                    changed = _with("strategy.name=fedstaleweight", *wrong.changes)
                    step = steps["fedstaleweight"]
                    runs[wrong.label] = raced(changed, world, f"mutant-{at}", step, options.out, **how)
            for name in list(runs)[1:]:
                pair = runs["fedbuff"], runs[name]
                rows = (row for target in TARGETS[world] for row in compared(world, target, *pair))
                print(f"{kind}: FedBuff against {name}", *rows, sep="\n", flush=True)
            for name, records in runs.items():
                last = [record.evaluations[-1] for record in records]
                slow = [sum(row.correct[:SLOW_CLASSES]) / sum(row.total[:SLOW_CLASSES]) for row in last]
                print(f"{name}: final accuracy {share(estimate([row.accuracy for row in last]))}, ", end="")
                print(f"on classes 0 to {SLOW_CLASSES - 1} {share(estimate(slow))}", flush=True)


if __name__ == "__main__":
    main()
