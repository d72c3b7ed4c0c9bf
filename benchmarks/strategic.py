"""Print the table in docs/findings.md about clients that slow themselves down to gain weight.

    python -m benchmarks.strategic

Two thirds of the clients are fast and the others are slow, as in section 6.2 of the FedStaleWeight paper.
Some of the fast clients (``count``) take ``slowed`` times as long as they could. Nothing is trained. The
table shows the weight and the number of trips of these clients, in per cent of those that they have at full
speed in the same emulated time. The last line gives the energy that one phone saves at half its speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl import config
from edgefl.devices.energy import draw_of
from edgefl.devices.fleet import Trips, device_of, fleet_of
from edgefl.devices.profiles import load_network
from edgefl.experiment import Stop
from edgefl.lab.influence import FAST, SLOW, arrivals
from edgefl.learning.models import mlp
from edgefl.learning.work import batch_work
from edgefl.results.statistics import estimate
from edgefl.strategies.base import Strategy
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight

Restart = Literal["after-step", "immediate"]
FORMS: dict[str, Callable[[Restart], Strategy]] = {
    "FedBuff": lambda restart: FedBuff(buffer_size=5, restart=restart),
    "FedStaleWeight": lambda restart: FedStaleWeight(buffer_size=5, restart=restart),
    "its running form": lambda restart: FedStaleWeight(buffer_size=5, restart=restart, normalize="running"),
    "its credit form": lambda restart: FedStaleWeight(buffer_size=5, restart=restart, normalize="credit"),
}
RULES: tuple[Restart, ...] = ("after-step", "immediate")
FLEETS = ((15, 600.0), (60, 200.0), (250, 200.0), (1000, 200.0))
"""Number of clients and emulated duration in seconds of each run."""


class FleetShares(NamedTuple):
    """Share of weight and number of trips of each client in a run."""

    share: npt.NDArray[np.float64]
    """Share of all applied weight."""
    trips: npt.NDArray[np.int64]
    """Number of applied updates, which determines the client's energy."""


@cache
def run(
    form: str, restart: Restart, clients: int, emulated_s: float, seed: int, count: int, slowed: float
) -> FleetShares:
    """Run a fleet whose first ``count`` clients take ``slowed`` times as long as they could."""
    fast = 2 * clients // 3
    delays, factors = [FAST] * fast + [SLOW] * (clients - fast), [slowed] * count + [1.0] * (clients - count)
    made, _ = arrivals(FORMS[form](restart), delays, Stop(emulated_s=emulated_s), seed, factors)
    owner = np.array([update.client for _, updates in made.sums for update in updates])
    weight = np.concatenate([order.weights for order, _ in made.sums])
    share: npt.NDArray[np.float64] = np.bincount(owner, weight, clients) / weight.sum()
    return FleetShares(share, np.bincount(owner, minlength=clients))


def gain(
    form: str, restart: Restart, clients: int, emulated_s: float, seed: int, count: int, slowed: float
) -> tuple[float, float]:
    """Return the weight and the trips of the first ``count`` clients after they slow down, as ratios to the
    values at full speed."""
    before, after = (
        run(form, restart, clients, emulated_s, seed, *how) for how in ((0, 1.0), (count, slowed))
    )
    left = [float(b[:count].sum() / a[:count].sum()) for a, b in zip(before, after, strict=True)]
    return left[0], left[1]


class HalfSpeed(NamedTuple):
    """Energy of a phone that takes twice as long for its trips, because its cores wait half of the time."""

    idle: float
    """Energy that a phone uses when idle for the time of a trip, as a share of the trip's energy."""
    saved: float
    """Energy that the phone saves at half its speed, with half as many trips in the same time, as a share of
    its energy at full speed."""


def half_speed(device: str = "pixel-4", network: str = "lte") -> HalfSpeed:
    """Compute the energy that a phone in ``experiments/phones.toml`` saves at half its speed."""
    kind = (f'fleet={{devices={{{device}=1}}, network="{network}", units="identical", variation=0.0}}',)
    experiment = config.load(Path(__file__).parents[1] / "experiments" / "phones.toml", kind)
    clients = fleet_of(experiment)
    model = mlp((28, 28), 10, **experiment.model.args)
    size = 4 * sum(one.numel() for one in model.parameters())
    trip = Trips(experiment, clients, [600], batch_work(model, (28, 28)), size, size).plan(0, 0)
    draw = draw_of(device_of(experiment, 0, device), load_network(network))
    assert draw is not None
    full = draw.energy(compute_s=trip.compute_s, download_s=trip.down_s, upload_s=trip.up_s)
    waited = draw.energy(idle_s=trip.down_s + trip.compute_s + trip.up_s)
    return HalfSpeed(full.idle_j / full.total_j, 0.5 - 0.5 * waited.total_j / full.total_j)


def main(slowed: float = 2.0, seeds: tuple[int, ...] = (1, 2, 3)) -> None:
    print("| clients | restart | slowed clients | " + " | ".join(FORMS) + " | trips |")
    print("|---|---|---|" + "---|" * (len(FORMS) + 1))
    for restart, clients, emulated_s in ((rule, *fleet) for rule in RULES for fleet in FLEETS):
        for count in (1, clients // 5, 2 * clients // 3):
            how = [(restart, clients, emulated_s, seed, count, slowed) for seed in seeds]
            found = {form: [gain(form, *each) for each in how] for form in FORMS}
            left = [[100.0 * weight for weight, _ in outcomes] for outcomes in found.values()]
            left.append([100.0 * trips for _, trips in found["FedBuff"]])
            row = [str(clients), restart, str(count), *(estimate(values).at(".0f") for values in left)]
            print("| " + " | ".join(row) + " |", flush=True)
    energy = half_speed()
    print(
        f"Pixel 4 on LTE: idle {energy.idle:.1%} of a trip's joules; half the speed saves {energy.saved:.0%}"
    )


if __name__ == "__main__":
    main()
