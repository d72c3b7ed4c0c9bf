"""Synchronous strategies against models worked out by hand, and their rules when clients are late or lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgefl import experiment
from edgefl.core import Core, events
from edgefl.core.events import Arrived, Failed, Joined, Left, Release, Revoke, Sum, Summed, Ticked, Train
from edgefl.strategies import Client, Strategy
from edgefl.strategies.fedavg import FedAvg
from edgefl.testing import MemoryRun, Vector, fleet, run_in_memory

DELTAS = (1.0, 10.0, 100.0)
DEVICES = [Client(0, "a", 10), Client(1, "a", 30), Client(2, "b", 60)]


def core_of(strategy: Strategy, versions: int = 3, devices: Sequence[Client] = DEVICES) -> Core:
    return Core(strategy, devices, 0, experiment.Stop(versions=versions))


def add(client: int, model: Vector, trip: int) -> Vector:
    return np.asarray(model + DELTAS[client])


def numbers(result: MemoryRun) -> list[float]:
    return [float(model[0]) for model in result.models]


def test_a_cohort_sums_in_the_order_of_clients_whoever_came_first() -> None:
    core = core_of(FedAvg())
    result = run_in_memory(core, [3.0, 1.0, 2.0])
    assert core.now_s == 9.0  # each round waits for the slowest
    assert (core.staleness_max, core.trips, core.discarded) == (0, 9, 0)
    assert all([update.client for update in updates] == [0, 1, 2] for _, updates in result.sums)


def test_fedavg_leaves_what_each_client_trained_alone() -> None:
    trained: dict[tuple[int, int], tuple[Vector, Vector]] = {}

    def train(client: int, model: Vector, trip: int) -> Vector:
        out = np.asarray(model + DELTAS[client])
        trained[client, trip] = (out, out.copy())
        return out

    run_in_memory(core_of(FedAvg()), [1.0, 2.0, 3.0], train=train)
    assert len(trained) == 9
    assert all(after.tobytes() == before.tobytes() for after, before in trained.values())


def test_without_any_examples_the_average_is_uniform() -> None:
    core = core_of(FedAvg(), devices=fleet(3, examples=0))
    assert run_in_memory(core, [1.0] * 3).sums[0][0].weights == (1 / 3,) * 3


def test_over_selection_takes_the_first_and_counts_the_rest_as_trips() -> None:
    core = core_of(FedAvg(cohort=2, over_selection=1.5), versions=4)
    result = run_in_memory(core, [1.0, 9.0, 2.0], train=add)
    average = (10 * 1 + 60 * 100) / 70
    assert numbers(result) == pytest.approx([0, *(average * version for version in (1, 2, 3, 4))])
    assert core.now_s == 8.0
    assert [action.client for action in result.actions if isinstance(action, Revoke)] == [1, 1, 1, 1]
    assert (core.trips, core.discarded) == (2 * 4 + 3, 3)  # the last round's straggler still runs
    assert core.staleness_max == 0


def joined(strategy: Strategy, clients: int = 3) -> tuple[Core, list[Train]]:
    core = core_of(strategy, 9, fleet(clients))
    trains: list[Train] = []
    for client in range(clients):
        trains += [action for action in core.handle(Joined(client, 0.0)) if isinstance(action, Train)]
    return core, trains


def arrive(train: Train, at_s: float = 1.0) -> Arrived:
    return Arrived(train.client, train.task, train.version, 100, 5, 0.1, at_s)


def two_arrive(core: Core, begun: Sequence[Train]) -> None:
    for train in begun[:2]:
        core.handle(arrive(train))


def trains(actions: Sequence[object]) -> list[Train]:
    return [action for action in actions if isinstance(action, Train)]


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


def test_a_bad_update_in_a_round_is_replaced_and_the_good_one_kept() -> None:
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


def test_a_straggler_that_finished_before_the_cancel_reached_it_is_discarded() -> None:
    core, begun = joined(FedAvg(cohort=2, over_selection=1.5), 3)
    two_arrive(core, begun)
    actions = core.handle(Summed(1, 1.0))
    assert Revoke(begun[2].client, begun[2].task) in actions
    assert core.handle(arrive(begun[2], 1.1))[0] == Release(begun[2].task, "discarded")
    assert core.held == []


def test_an_update_beyond_the_cohort_that_comes_in_during_the_sum_is_discarded() -> None:
    core, begun = joined(FedAvg(cohort=2, over_selection=1.5), 3)
    two_arrive(core, begun)
    assert core.handle(arrive(begun[2])) == [Release(begun[2].task, "discarded")]
    assert {action.client for action in trains(core.handle(Summed(1, 1.0)))} == {0, 1, 2}


def test_a_straggler_drawn_again_starts_when_it_has_given_up() -> None:
    core, begun = joined(FedAvg(cohort=2, over_selection=1.5), 3)
    two_arrive(core, begun)
    assert len(trains(core.handle(Summed(1, 1.0)))) == 2
    (late,) = trains(core.handle(Failed(begun[2].client, begun[2].task, 1.0, "cancelled")))
    assert (late.client, late.version, late.trip) == (begun[2].client, 1, 1)


def test_the_first_round_waits_for_the_whole_fleet_but_not_for_ever() -> None:
    core = core_of(FedAvg(cohort=1, gather_s=5.0), devices=fleet(3))
    actions = core.handle(Joined(2, 0.0))
    assert [action for action in actions if isinstance(action, Train | events.Wake)] == [events.Wake(5.0)]
    assert core.handle(Joined(0, 1.0)) == []
    assert len(trains(core.handle(Ticked(5.0)))) == 1
    everybody = core_of(FedAvg(cohort=1, gather_s=5.0), devices=fleet(2))
    everybody.handle(Joined(0, 0.0))
    assert len(trains(everybody.handle(Joined(1, 0.0)))) == 1


def test_a_round_that_lacks_clients_fills_up_when_they_come() -> None:
    core = core_of(FedAvg(cohort=3, gather_s=0.0), devices=fleet(3))
    coming: list[events.Event] = [Joined(0, 0.0), Ticked(1.0), Joined(1, 2.0), Joined(2, 3.0)]
    assert [[train.client for train in trains(core.handle(event))] for event in coming] == [[0], [], [1], [2]]


def test_stragglers_that_take_their_time_to_give_up_keep_the_next_rounds_within_bounds() -> None:
    strategy = FedAvg(cohort=1, over_selection=2.0)
    core, begun = joined(strategy, 10)
    assert strategy.max_training(10) == 4
    while begun:
        core.handle(arrive(begun[0]))
        begun = trains(core.handle(Summed(core.version + 1, 1.0)))
        assert core.training <= 4
    # Nobody of the round could start: its members are stragglers themselves, or all slots are theirs.
    for straggler in list(core.running):
        task = core.task_of(straggler)
        assert task is not None
        begun += trains(core.handle(Failed(straggler, task, 2.0, "cancelled")))
    assert [member.version for member in begun] == [core.version] * 2
