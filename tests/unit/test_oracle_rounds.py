"""Tests of rounds with late and lost clients, and of FAVANO with its α."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from edgefl import experiment
from edgefl.core import Core, events
from edgefl.core.events import Arrived, Failed, Joined, Left, Release, Revoke, Sum, Summed, Ticked, Train
from edgefl.errors import RunError
from edgefl.strategies import Client, Step, Strategy, View
from edgefl.strategies.base import Until
from edgefl.strategies.favano import FAVANO
from edgefl.strategies.fedavg import FedAvg
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.rounds import Round
from edgefl.testing import MemoryRun, TripFails, Vector, fleet, run_in_memory

DELTAS = (1.0, 10.0, 100.0)
DEVICES = [Client(0, "a", 10), Client(1, "a", 30), Client(2, "b", 60)]


def core_of(strategy: Strategy, versions: int = 3, devices: Sequence[Client] = DEVICES) -> Core:
    return Core(strategy, devices, 0, experiment.Stop(versions=versions))


def add(client: int, model: Vector, trip: int) -> Vector:
    return np.asarray(model + DELTAS[client])


def numbers(result: MemoryRun) -> list[float]:
    return [float(model[0]) for model in result.models]


def trains(actions: Sequence[object]) -> list[Train]:
    return [action for action in actions if isinstance(action, Train)]


def joined(strategy: Strategy, clients: int = 3) -> tuple[Core, list[Train]]:
    """Return a core whose clients have joined, and the tasks that it started."""
    core = core_of(strategy, 9, fleet(clients))
    return core, [train for client in range(clients) for train in trains(core.handle(Joined(client, 0.0)))]


def arrive(train: Train, at_s: float = 1.0) -> Arrived:
    return Arrived(train.client, train.task, train.version, 100, 5, 0.1, at_s)


def test_a_cohort_is_summed_in_the_order_of_clients() -> None:
    core = core_of(FedAvg())
    result = run_in_memory(core, [3.0, 1.0, 2.0])
    assert core.now_s == 9.0  # each round waits for the slowest
    assert (core.staleness_max, core.trips, core.discarded) == (0, 9, 0)
    assert all([update.client for update in updates] == [0, 1, 2] for _, updates in result.sums)


def test_fedavg_does_not_change_the_clients_models() -> None:
    trained: dict[tuple[int, int], tuple[Vector, Vector]] = {}

    def train(client: int, model: Vector, trip: int) -> Vector:
        out = np.asarray(model + DELTAS[client])
        trained[client, trip] = (out, out.copy())
        return out

    run_in_memory(core_of(FedAvg()), [1.0, 2.0, 3.0], train=train)
    assert len(trained) == 9
    assert all(after.tobytes() == before.tobytes() for after, before in trained.values())


def test_a_closed_round_ends_with_the_members_that_remain() -> None:
    """Mutants: a lost member is replaced or awaited; a client that joins starts in the current round."""
    core, started = joined(FedAvg(cohort=3, redraw=False), 5)
    members = tuple(action.client for action in started)
    assert len(members) == 3
    assert {action.cohort for action in started} == {events.Cohort(0, members)}
    lost, other, last = started
    failed = core.handle(Failed(lost.client, lost.task, 1.0, "memory"))
    assert failed == [Release(lost.task, "lost", "memory")]
    assert core.handle(arrive(other, 2.0)) == []
    (order,) = core.handle(arrive(last, 3.0))
    assert sorted(order.tasks) == [other.task, last.task]
    assert order.weights == (0.5, 0.5)
    after = trains(core.handle(Summed(1, 3.0)))
    assert [action.cohort.first_task for action in after if action.cohort is not None] == [3, 3, 3]


def test_a_closed_round_whose_sum_is_refused_is_drawn_again() -> None:
    """Mutant: the members of a refused sum stay in the round, so that no other round begins."""
    core, started = joined(FedAvg(redraw=False))
    for train in started:
        core.handle(arrive(train))
    after = trains(core.handle(Summed(1, 1.0, tuple(train.task for train in started))))
    clients = tuple(action.client for action in after)
    assert sorted(clients) == [0, 1, 2]
    assert [(action.version, action.cohort) for action in after] == [(0, events.Cohort(3, clients))] * 3


def test_a_closed_round_starts_with_all_its_members() -> None:
    """The next round starts after the late members of the last round have ended; idle clients wait for it.

    Mutants: a round starts with the idle members; two rounds run at the same time.
    """
    strategy = FedAvg(cohort=3, over_selection=4 / 3, redraw=False, gather_s=0.0)
    core = core_of(strategy, devices=fleet(9))
    started = [core.handle(Joined(client, 0.0))[-1:] for client in range(4)]
    assert [len(actions) for actions in started] == [1, 0, 1, 0]  # the first is the evaluation
    for client in range(3):
        core.handle(Arrived(client, core.task_of(client) or 0, 0, 10, 1, 0.0, 1.0))
    *second, late = trains(core.handle(Summed(1, 1.0)))
    assert sorted(train.client for train in (*second, late)) == [0, 1, 2, 3]
    for train in second:
        core.handle(arrive(train, 2.0))
    assert trains(core.handle(Summed(2, 2.0))) == []
    assert len(trains(core.handle(Failed(late.client, late.task, 2.0, "cancelled")))) == 4
    for client in range(4, 9):
        assert core.handle(Joined(client, 3.0)) == []


def test_without_examples_the_average_is_uniform() -> None:
    core = core_of(FedAvg(), devices=fleet(3, examples=0))
    assert run_in_memory(core, [1.0] * 3).sums[0][0].weights == (1 / 3,) * 3


def test_over_selection_uses_the_first_and_cancels_the_others() -> None:
    core = core_of(FedAvg(cohort=2, over_selection=1.5), versions=4)
    result = run_in_memory(core, [1.0, 9.0, 2.0], train=add)
    average = (10 * 1 + 60 * 100) / 70
    assert numbers(result) == pytest.approx([0, *(average * version for version in (1, 2, 3, 4))])
    assert core.now_s == 8.0
    assert [action.client for action in result.actions if isinstance(action, Revoke)] == [1, 1, 1, 1]
    assert (core.trips, core.discarded) == (2 * 4 + 3, 3)  # the last round's straggler still trains
    assert core.staleness_max == 0


def two_arrive(core: Core, begun: Sequence[Train]) -> None:
    for train in begun[:2]:
        core.handle(arrive(train))


@pytest.mark.parametrize("how", [Failed, Left])
def test_a_lost_member_is_replaced_by_another_client(how: type[Failed] | type[Left]) -> None:
    core, begun = joined(FedAvg(cohort=2), 3)
    (other,) = {0, 1, 2} - {train.client for train in begun}
    lost = begun[0]
    event = Left(lost.client, 1.0, "x") if how is Left else Failed(lost.client, lost.task, 1.0, "x")
    (replacement,) = trains(core.handle(event))
    assert replacement.client in ({other} if how is Left else {other, lost.client})
    core.handle(arrive(begun[1]))
    tasks = [train.task for train in sorted([begun[1], replacement], key=lambda train: train.client)]
    assert core.handle(arrive(replacement)) == [Sum(1, tuple(tasks), (0.5, 0.5))]


def test_a_bad_update_in_a_round_is_replaced_and_good_ones_are_kept() -> None:
    core, begun = joined(FedAvg(cohort=2), 2)
    two_arrive(core, begun)
    actions = core.handle(Summed(1, 1.0, bad=(begun[1].task,)))
    assert actions[0] == Release(begun[1].task, "dropped", "not finite or altered")
    (again,) = trains(actions)
    assert (again.client, again.version) == (begun[1].client, 0)
    assert [update.task for update in core.held] == [begun[0].task]


def test_a_member_that_left_after_delivering_is_not_replaced() -> None:
    core, begun = joined(FedAvg(cohort=2), 3)
    core.handle(arrive(begun[0]))
    assert core.handle(Left(begun[0].client, 1.0, "x")) == []
    assert len(core.held) == 1


def test_a_straggler_that_finishes_before_its_cancellation_is_discarded() -> None:
    core, begun = joined(FedAvg(cohort=2, over_selection=1.5), 3)
    two_arrive(core, begun)
    actions = core.handle(Summed(1, 1.0))
    assert Revoke(begun[2].client, begun[2].task) in actions
    assert core.handle(arrive(begun[2], 1.1))[0] == Release(begun[2].task, "discarded")
    assert core.held == []


def test_an_update_beyond_the_cohort_that_arrives_during_the_sum_is_discarded() -> None:
    core, begun = joined(FedAvg(cohort=2, over_selection=1.5), 3)
    two_arrive(core, begun)
    assert core.handle(arrive(begun[2])) == [Release(begun[2].task, "discarded")]
    assert {action.client for action in trains(core.handle(Summed(1, 1.0)))} == {0, 1, 2}


def test_a_straggler_drawn_again_starts_after_its_cancellation() -> None:
    core, begun = joined(FedAvg(cohort=2, over_selection=1.5), 3)
    two_arrive(core, begun)
    assert len(trains(core.handle(Summed(1, 1.0)))) == 2
    (late,) = trains(core.handle(Failed(begun[2].client, begun[2].task, 1.0, "cancelled")))
    assert (late.client, late.version, late.trip) == (begun[2].client, 1, 1)


def test_the_first_round_waits_for_the_fleet_but_at_most_gather_s() -> None:
    core = core_of(FedAvg(cohort=1, gather_s=5.0), devices=fleet(3))
    actions = core.handle(Joined(2, 0.0))
    assert [action for action in actions if isinstance(action, Train | events.Wake)] == [events.Wake(5.0)]
    assert core.handle(Joined(0, 1.0)) == []
    assert len(trains(core.handle(Ticked(5.0)))) == 1
    everybody = core_of(FedAvg(cohort=1, gather_s=5.0), devices=fleet(2))
    everybody.handle(Joined(0, 0.0))
    assert len(trains(everybody.handle(Joined(1, 0.0)))) == 1


def test_a_round_that_lacks_clients_is_completed_as_they_join() -> None:
    core = core_of(FedAvg(cohort=3, gather_s=0.0), devices=fleet(3))
    coming: list[events.Event] = [Joined(0, 0.0), Ticked(1.0), Joined(1, 2.0), Joined(2, 3.0)]
    assert [[train.client for train in trains(core.handle(event))] for event in coming] == [[0], [], [1], [2]]


def test_stragglers_count_towards_the_clients_that_train() -> None:
    strategy = FedAvg(cohort=1, over_selection=2.0)
    core, begun = joined(strategy, 10)
    assert strategy.max_training(10) == 4
    while begun:
        core.handle(arrive(begun[0]))
        begun = trains(core.handle(Summed(core.version + 1, 1.0)))
        assert core.training <= 4
    # No member of the round could start: the members are stragglers, or stragglers hold all slots.
    for straggler in list(core.running):
        task = core.task_of(straggler)
        assert task is not None
        begun += trains(core.handle(Failed(straggler, task, 2.0, "cancelled")))
    assert [member.version for member in begun] == [core.version] * 2


SPEEDS = (1.0, 10.0)


def run(strategy: FAVANO, durations: Sequence[float], versions: int, steps: int = 3, seed: int = 0) -> Any:
    """Run with steps of client i that add SPEEDS[i] to the model, so that y − w_init is the number of steps
    times SPEEDS[i]."""
    devices = [Client(i, "a", 100, steps, 0.0, compute_s) for i, compute_s in enumerate(durations)]
    core = Core(strategy, devices, seed, experiment.Stop(versions=versions))

    def add(client: int, model: Vector, trip: int) -> Vector:
        return np.asarray(model + SPEEDS[client % 2])

    return run_in_memory(core, durations, train=add, steps=steps)


@pytest.mark.parametrize("form", ["deterministic", "stochastic"])
def test_favano_with_one_of_two_clients_per_poll_has_the_papers_models(form: Any) -> None:
    """A trip has K = 3 steps. Every 2 s, a poll takes one of two clients. E is the number of steps for which
    the client had time since it was last taken.

    For client 0 (0.5 s per step), min(E, K) = 3 at every poll. For client 1 (1.5 s per step), it is 1, 2, 3,
    3, … after 2, 4, 6, 8, … s, with the probabilities ½, ¼, ⅛, …, so α = ½·1 + ¼·2 + ¼·3.
    """
    strategy = FAVANO(participants=1, interval_s=2.0, form=form)
    result = run(strategy, [1.5, 4.5], versions=40)
    alphas = (3.0, 0.5 * 1 + 0.25 * 2 + 0.25 * 3) if form == "deterministic" else (1.0, 1.0)
    models, since = [0.0], [(0.0, 0), (0.0, 0)]  # w_init of each client, and its poll
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


def test_favanos_alpha_is_the_mean_over_the_polls_that_may_take_the_client() -> None:
    strategy = FAVANO(participants=3, interval_s=0.7)
    device = Client(0, "a", 100, steps=20, down_s=0.3, compute_s=9.0)
    rng = np.random.default_rng(1)
    intervals = rng.geometric(3 / 10, size=400_000) - 1
    made = np.clip(np.floor((0.2 + 0.7 * intervals - 0.3) / 0.45), 0, 20)
    assert strategy.alpha(device, 0.2, clients=10) == pytest.approx(made.mean(), rel=0.01)
    chance = FAVANO(participants=3, interval_s=0.7, form="stochastic").alpha(device, 0.2, clients=10)
    assert chance == pytest.approx((made > 0).mean(), rel=0.01)
    assert 0.0 < chance < 1.0
    # If each poll takes all clients, alpha is the number of steps that fit into one interval.
    for compute_s, alpha in ((0.0, 5.0), (5.0, 2.0), (1e9, 0.0)):
        device = Client(0, "a", 100, steps=5, compute_s=compute_s)
        assert FAVANO(participants=2, interval_s=2.0).alpha(device, 2.0, clients=2) == alpha


def test_a_client_without_a_step_sends_the_model_that_it_received() -> None:
    result = run(FAVANO(participants=2, interval_s=2.0), [1.5, 99.0], versions=2)
    assert numbers(result) == pytest.approx([0.0, (0 + 1 + 0) / 3, 1 / 3 + 1 / 3], rel=1e-14)


def test_a_poll_waits_for_uploads_of_present_clients() -> None:
    core, begun = joined(FAVANO(participants=3, interval_s=2.0))
    assert [train.until for train in begun] == [Until(2.0)] * 3
    core.handle(Left(1, 1.0, "died"))
    assert core.handle(Ticked(2.0)) == []
    assert core.handle(arrive(begun[2], 2.1)) == []
    order = core.handle(arrive(begun[0], 2.2))
    assert order == [Sum(1, (begun[0].task, begun[2].task), (1 / 3, 1 / 3), 1 / 3)]


def test_a_poll_of_absent_clients_makes_no_version() -> None:
    core, _ = joined(FAVANO(participants=2, interval_s=2.0), 2)
    core.handle(Left(0, 1.0, "died"))
    core.handle(Left(1, 1.5, "died"))
    core.handle(Ticked(2.0))
    assert core.version == 0
    (train,) = trains(core.handle(Joined(1, 3.0)))
    assert train.until == Until(4.0)


TIMES = [Until(-1.0), Until(math.inf), Until(math.nan), Until(1.0, math.nan), Until(math.nan, steps=1)]
NUMBERS = [Until(steps=0), Until(steps=10**9 + 1), Until(5.0, steps=2**70)]


@pytest.mark.parametrize("until", [*TIMES, *NUMBERS])
def test_an_impossible_end_of_a_trip_is_refused(until: Until) -> None:
    class Odd(FedBuff):
        def until(self, state: Any, client: int, view: View) -> Until:
            return until

    core = Core(Odd(), fleet(1), 0, experiment.Stop())
    with pytest.raises(RunError) as caught:
        core.handle(Joined(0, 0.0))
    wanted = "strategy Odd.until must return a time that has not passed, or 1 to 1,000,000,000 steps,"
    assert str(caught.value).startswith(wanted)


@pytest.mark.parametrize("seed", range(12))
def test_a_round_ends_if_a_lost_member_is_replaced_by_one_that_has_delivered(seed: int) -> None:
    """A draw with replacement may select a client that has already delivered. Mutant: no event then ends the
    round."""

    def train(client: int, model: Vector, trip: int) -> Vector:
        if client == 1:
            raise TripFails("its training fails")
        return model + 1.0

    strategy = FedAvg(cohort=2, replacement=True, weighting="uniform")
    run = run_in_memory(Core(strategy, fleet(2), seed, experiment.Stop(versions=8)), [1.0, 2.0], train=train)
    assert [order.weights for order, _ in run.sums] == [(1.0,)] * 8
    assert run.models[-1] == 8.0


@dataclass(frozen=True, kw_only=True)
class WaitsForAll(FedAvg):
    """Ends a round when no member trains any more, although it needs only the first updates."""

    def step(self, state: Round, view: View) -> Step | None:
        return None if view.training else super().step(state, view)


def test_a_strategy_of_ones_own_may_end_its_rounds_later() -> None:
    """Mutant: the server is woken again and again at the same time, so that emulated time stands still."""
    core = core_of(WaitsForAll(cohort=2, over_selection=1.5), versions=2)
    run_in_memory(core, [1.0, 2.0, 3.0], max_events=50)
    assert core.now_s == 6.0
