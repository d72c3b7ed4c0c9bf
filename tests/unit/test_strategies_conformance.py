"""Tests of all built-in strategies with `check_strategy`, and of the clients that strategies draw."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import Left, Train
from edgefl.errors import ConfigError, RunError
from edgefl.strategies import Buffered, Rows, Step, Strategy, View, names, resolve
from edgefl.strategies.base import TripInputs
from edgefl.strategies.favano import FAVANO
from edgefl.strategies.fedavg import FedAvg
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import check_strategy, fleet, run_in_memory

SETTINGS: list[dict[str, Any]] = [
    *({"name": name} for name in names()),
    {"name": "fedbuff", "buffer_size": 1},
    {"name": "fedbuff", "buffer_size": 12},
    {"name": "fedbuff", "buffer_size": 12, "restart": "new-version"},
    {"name": "fedbuff", "buffer_size": 3, "concurrency": 1},
    {"name": "fedbuff", "buffer_size": 12, "concurrency": 2, "restart": "new-version"},
    {"name": "ca2fl", "concurrency": 3},
    {"name": "fedbuff", "buffer_size": 3, "concurrency": 5, "max_staleness": 2},
    {"name": "fedbuff", "buffer_size": 3, "max_staleness": 0},
    {"name": "fedbuff", "buffer_size": 3, "arrival_process": "constant", "arrival_rate_per_s": 2.5},
    {"name": "fedasync", "arrival_process": "poisson", "arrival_rate_per_s": 4.0, "concurrency": 3},
    {"name": "fedbuff", "buffer_size": 3, "momentum": 0.9, "normalize": True},
    {"name": "fedstaleweight", "buffer_size": 3, "normalize": "running"},
    {"name": "fedstaleweight", "buffer_size": 3, "normalize": "credit", "max_step": 0.9},
    {"name": "fedstaleweight", "buffer_size": 3, "average": "cumulative"},
    {"name": "fedstaleweight", "buffer_size": 3, "average": "exponential", "restart": "immediate"},
    {"name": "fedasync", "scaling": "hinge", "concurrency": 4},
    {"name": "fedasync", "restart": "new-version", "max_staleness": 3},
    {"name": "fedavg", "cohort": 12},
    {"name": "fedavg", "cohort": 1},
    {"name": "fedavg", "cohort": 5, "over_selection": 1.3, "weighting": "uniform"},
    {"name": "fedavg", "cohort": 4, "over_selection": 3.0},
    {"name": "fedavg", "cohort": 8, "replacement": True},
    {"name": "fedbuff", "buffer_size": 12, "restart": "after-step"},
    {"name": "ca2fl", "buffer_size": 4, "restart": "after-step"},
    {"name": "defedavg-niid", "participants": 30},
    {"name": "defedavg-niid", "participants": 5, "pause": True},
    {"name": "defedavg-niid", "participants": 5, "takes": "newest"},
    {"name": "favano", "participants": 3, "interval_s": 0.7, "form": "stochastic"},
    {"name": "favano", "participants": 12},
]


@pytest.mark.parametrize("table", SETTINGS, ids=str)
def test_a_strategy_obeys_the_rules_and_gives_the_same_bits_for_the_same_seed(table: dict[str, Any]) -> None:
    strategy = resolve(table)
    run, again = (check_strategy(strategy) for _ in range(2))
    assert [model.tobytes() for model in run.models] == [model.tobytes() for model in again.models]
    assert run.events == again.events
    used = [task for order, _ in run.sums for task in order.tasks]
    assert strategy.reuses == (len(set(used)) < len(used))
    if strategy.optimizer().vectors == 0:  # momentum overshoots
        # Each client moves the model towards its own number, 0 to 11.
        assert (run.models[-1] > 0.0).all()
        assert (run.models[-1] < 11.0).all()


@dataclass(frozen=True, kw_only=True)
class NeverSteps(Strategy):
    def assign(self, state: Any, view: View) -> Sequence[int]:
        return [client for client in view.idle if view.trained_from(client) < 0]

    def step(self, state: Any, view: View) -> Step | None:
        return None


@dataclass(frozen=True, kw_only=True)
class DrawsUnseeded(FedBuff):
    """Draws weights without the run's seed, so that a replay gives other weights."""

    def weights(self, state: Any, updates: Sequence[Any], view: View) -> Sequence[float]:
        return np.random.default_rng().random(len(updates)).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class HoldsMore(FedBuff):
    """Holds more updates than it declares."""

    def max_held(self, clients: int) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class HoldsHalves(FedBuff):
    def max_held(self, clients: int) -> int:
        return clients / 2  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Raises(FedBuff):
    def weights(self, state: Any, updates: Sequence[Any], view: View) -> Sequence[float]:
        return [1 / 0]


@dataclass(frozen=True, kw_only=True)
class Exits(FedBuff):
    def weights(self, state: Any, updates: Sequence[Any], view: View) -> Sequence[float]:
        sys.exit("not good enough")


@pytest.mark.parametrize(
    ("strategy", "error", "message"),
    [
        (NeverSteps(), RunError, "no event is left at version 0"),
        (DrawsUnseeded(buffer_size=3), AssertionError, "replaying .* gave different actions"),
        (HoldsMore(buffer_size=3), AssertionError, "are held, more than max_held"),
        (HoldsHalves(buffer_size=3), ConfigError, r"max_held must return an int of at least 1, got 6\.0"),
        (Raises(buffer_size=3), RunError, "strategy Raises.step raised ZeroDivisionError"),
        (Exits(buffer_size=3), RunError, "strategy Exits.step raised SystemExit: not good enough"),
    ],
)
def test_check_strategy_detects_faults(strategy: Strategy, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_strategy(strategy)


@dataclass(frozen=True, kw_only=True)
class CannotCombine(Buffered):
    reads: ClassVar[Literal["metadata", "updates"]] = "updates"

    def combine(self, rows: Rows, weights: Sequence[float]) -> Sequence[float]:
        raise ValueError("no update is good enough")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"name": "median"}, 1.25),
        ({"name": "trimmed-mean"}, (1.2 + 1.25 + 1.4) / 3),
        ({"name": "krum"}, 1.2),
        ({"name": "rfa", "iterations": 200}, 1.25),
    ],
)
def test_updates_are_combined_in_memory_too(table: dict[str, Any], expected: float) -> None:
    changes = [100.0, 1.1, 1.2, 1.25, 1.4]

    def train(client: int, model: NDArray[Any], trip: int) -> NDArray[Any]:
        return model + changes[client]

    strategy = resolve({"buffer_size": 5, "server_lr": 0.5, **table})
    for first in (np.zeros(1), np.zeros(3, np.float32)):
        core = Core(strategy, fleet(5), 0, experiment.Stop(versions=1))
        run = run_in_memory(core, [1.0] * 5, model=first, train=train)
        assert np.allclose(run.models[-1], 0.5 * expected, rtol=0.01)
        assert run.models[-1].dtype == first.dtype
    with pytest.raises(RunError, match=r"CannotCombine.combine raised ValueError: no update is good enough"):
        check_strategy(CannotCombine(buffer_size=3))


def test_a_client_that_finishes_its_task_before_it_leaves_delivers_in_memory() -> None:
    core = Core(FedBuff(buffer_size=3, restart="after-step"), fleet(3), 0, experiment.Stop(versions=1))
    run = run_in_memory(core, [1.0, 2.0, 3.0], events=[Left(2, 0.5, "leaves", finishes=True)])
    assert sorted(update.client for update in run.sums[0][1]) == [0, 1, 2]
    assert not core.connected(2)


def test_a_trip_may_change_its_model_in_place() -> None:
    def trip(client: int, model: NDArray[Any], number: int, given: TripInputs) -> NDArray[Any]:
        model += 1.0
        return model

    core = Core(FedAvg(cohort=1), fleet(1), 0, experiment.Stop(versions=2))
    assert [float(model[0]) for model in run_in_memory(core, [1.0], trip=trip).models] == [0.0, 1.0, 2.0]


def test_a_run_that_never_stops_is_ended_by_max_events() -> None:
    core = Core(FedBuff(buffer_size=1), fleet(2), 0, experiment.Stop())
    with pytest.raises(RunError, match="did not stop within 50 events"):
        run_in_memory(core, [1.0, 2.0], max_events=50)


def check_uniform(drawn: Sequence[int]) -> None:
    counts = np.bincount(drawn, minlength=20)
    expected = counts.sum() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # χ² with 19 degrees of freedom, 0.1%


def test_idle_clients_are_drawn_uniformly() -> None:
    core = Core(FedBuff(buffer_size=1, concurrency=5), fleet(20), 0, experiment.Stop(versions=1500))
    check_uniform(list(run_in_memory(core, lambda client, trip: 1.0).owners.values()))


@pytest.mark.parametrize(
    ("strategy", "size"),
    [(FedAvg(cohort=4, over_selection=1.5), 6), (FAVANO(participants=4, interval_s=1.0), 4)],
)
def test_cohorts_and_polls_are_drawn_uniformly_without_replacement(strategy: Strategy, size: int) -> None:
    core = Core(strategy, fleet(20), 0, experiment.Stop(versions=300))
    run = run_in_memory(core, [0.3 + 0.2 * client for client in range(20)])
    drawn: dict[int, list[int]] = {}
    if isinstance(strategy, FAVANO):  # all clients train, and some are polled
        drawn = {order.version: [update.client for update in updates] for order, updates in run.sums}
    else:
        for action in run.actions:
            if isinstance(action, Train):
                drawn.setdefault(action.version, []).append(action.client)
    assert all(len(set(clients)) == len(clients) == size for clients in drawn.values())
    check_uniform(np.concatenate(list(drawn.values())))


def test_the_ledger_knows_which_clients_trained_from_the_current_version() -> None:
    strategy = FedStaleWeight(buffer_size=3, concurrency=6, restart="new-version")
    core = Core(strategy, fleet(12), 0, experiment.Stop(versions=60))
    for event, _ in check_strategy(strategy, versions=60).history:  # with clients that leave during a trip
        core.handle(event)
        current = {client for client in range(12) if core.trained_from(client) == core.version}
        assert set(core.up_to_date) == current
    assert core.version == 60


def test_a_strategy_class_and_a_wrong_number_of_durations_or_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^strategy: must be a Strategy object, such as FedBuff"):
        check_strategy(FedBuff)  # type: ignore[arg-type]
    core = Core(FedAvg(cohort=2), fleet(2), seed=0, stop=experiment.Stop(versions=1))
    with pytest.raises(ConfigError, match=r"^durations: must be one number for each of 2 clients, got 1$"):
        run_in_memory(core, [1.0])
    with pytest.raises(ConfigError, match=r"^steps: must be one number for each of 2 clients, got 3$"):
        run_in_memory(core, [1.0, 1.0], steps=[1, 1, 1])
