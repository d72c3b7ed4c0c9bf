"""FAVANO against models worked out by hand, and its α against its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import Arrived, Joined, Left, Sum, Ticked, Train
from edgefl.errors import ConfigError, RunError
from edgefl.strategies import Client, View
from edgefl.strategies.base import Until
from edgefl.strategies.favano import FAVANO
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import MemoryRun, Vector, fleet, run_in_memory

SPEEDS = (1.0, 10.0)


def run(strategy: FAVANO, durations: Sequence[float], versions: int, steps: int = 3, seed: int = 0) -> Any:
    """A step of client i adds SPEEDS[i], so y − w_init is the number of steps made times that."""
    devices = [Client(i, "a", 100, steps, 0.0, compute_s) for i, compute_s in enumerate(durations)]
    core = Core(strategy, devices, seed, experiment.Stop(versions=versions))

    def add(client: int, model: Vector, trip: int) -> Vector:
        return np.asarray(model + SPEEDS[client % 2])

    return run_in_memory(core, durations, train=add, steps=steps)


def numbers(result: MemoryRun) -> list[float]:
    return [float(model[0]) for model in result.models]


@pytest.mark.parametrize("form", ["deterministic", "stochastic"])
def test_one_of_two_taken_at_each_poll(form: Any) -> None:
    """K = 3, polls every 2 s, each takes one of two clients: a taken one has trained since it was last taken.

    Client 0 (0.5 s a step) has min(E, K) = 3 at every poll. Client 1 (1.5 s a step) has 1, 2, 3, 3, … after
    2, 4, 6, … s, with the chances ½, ¼, ⅛ …: α = ½·1 + ¼·2 + ¼·3.
    """
    strategy = FAVANO(participants=1, interval_s=2.0, form=form)
    result = run(strategy, [1.5, 4.5], versions=40)
    alphas = (3.0, 0.5 * 1 + 0.25 * 2 + 0.25 * 3) if form == "deterministic" else (1.0, 1.0)
    models, since = [0.0], [(0.0, 0), (0.0, 0)]  # of each client: its w_init, and the poll that gave it that
    for poll, (order, (update,)) in enumerate(result.sums, start=1):
        client = update.client
        init, last = since[client]
        made = min(3, math.floor(2.0 * (poll - last) / (0.5, 1.5)[client]))
        alpha = alphas[client] * (1 if form == "deterministic" else made)
        unbiased = init + made * SPEEDS[client] / alpha
        models.append((models[-1] + unbiased) / 2)
        since[client] = (models[-1], poll)
        assert (order.weights, order.base_scale) == ((0.5,), 0.5)
        assert update.staleness == poll - 1 - last
    assert numbers(result) == pytest.approx(models, rel=1e-12)
    assert {update.steps for _, (update,) in result.sums} == {1, 2, 3}


def test_alpha_is_the_mean_over_the_polls_that_may_take_the_client() -> None:
    strategy = FAVANO(participants=3, interval_s=0.7)
    device = Client(0, "a", 100, steps=20, down_s=0.3, compute_s=9.0)
    rng = np.random.default_rng(1)
    intervals = rng.geometric(3 / 10, size=400_000) - 1
    made = np.clip(np.floor((0.2 + 0.7 * intervals - 0.3) / 0.45), 0, 20)
    assert strategy.alpha(device, 0.2, clients=10) == pytest.approx(made.mean(), rel=0.01)
    chance = FAVANO(participants=3, interval_s=0.7, form="stochastic").alpha(device, 0.2, clients=10)
    assert chance == pytest.approx((made > 0).mean(), rel=0.01)
    assert 0.0 < chance < 1.0
    for compute_s, alpha in ((0.0, 5.0), (5.0, 2.0), (1e9, 0.0)):  # all taken: the steps of an interval
        device = Client(0, "a", 100, steps=5, compute_s=compute_s)
        assert FAVANO(participants=2, interval_s=2.0).alpha(device, 2.0, clients=2) == alpha


def test_a_client_without_a_step_sends_the_model_that_it_was_given() -> None:
    result = run(FAVANO(participants=2, interval_s=2.0), [1.5, 99.0], versions=2)
    assert numbers(result) == pytest.approx([0.0, (0 + 1 + 0) / 3, 1 / 3 + 1 / 3], rel=1e-14)


def started(clients: int = 2, interval_s: float = 2.0) -> tuple[Core, list[Train]]:
    core = Core(FAVANO(participants=clients, interval_s=interval_s), fleet(clients), 0, experiment.Stop())
    actions = [core.handle(Joined(client, 0.0)) for client in range(clients)]
    return core, [action for made in actions for action in made if isinstance(action, Train)]


def test_the_poll_waits_for_uploads_and_passes_over_who_is_away() -> None:
    core, trains = started(3)
    assert [train.until for train in trains] == [Until(2.0)] * 3
    core.handle(Left(1, 1.0, "died"))
    assert core.handle(Ticked(2.0)) == []
    assert core.handle(Arrived(2, trains[2].task, 0, 100, 1, 0.0, 2.1)) == []
    order = core.handle(Arrived(0, trains[0].task, 0, 100, 1, 0.0, 2.2))
    assert order == [Sum(1, (trains[0].task, trains[2].task), (1 / 3, 1 / 3), 1 / 3)]


def test_a_poll_that_finds_nobody_makes_no_version() -> None:
    core, _ = started(2)
    core.handle(Left(0, 1.0, "died"))
    core.handle(Left(1, 1.5, "died"))
    core.handle(Ticked(2.0))
    assert core.version == 0
    (train,) = [action for action in core.handle(Joined(1, 3.0)) if isinstance(action, Train)]
    assert train.until == Until(4.0)


def test_more_participants_than_clients_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        FAVANO(participants=4).check(3)
    assert str(caught.value) == "strategy.participants must be at most the fleet's 3 clients, got 4"


@pytest.mark.parametrize("until", [Until(-1.0), Until(math.inf), Until(math.nan), Until(1.0, math.nan)])
def test_an_instant_that_cannot_be_is_refused(until: Until) -> None:
    class Odd(FedBuff):
        def until(self, state: Any, client: int, view: View) -> Until:
            return until

    core = Core(Odd(), fleet(1), 0, experiment.Stop())
    with pytest.raises(RunError) as caught:
        core.handle(Joined(0, 0.0))
    wanted = "strategy Odd.until must give an instant from now on and a finite gain, got Until"
    assert str(caught.value).startswith(wanted)
