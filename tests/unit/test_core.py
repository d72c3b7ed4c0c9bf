"""The core, transition by transition."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import pytest

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import (
    Action,
    Arrived,
    Evaluate,
    Failed,
    Joined,
    Left,
    Release,
    Revoke,
    Sum,
    Summed,
    Ticked,
    Train,
    Wake,
)
from edgefl.errors import RunError
from edgefl.strategies import Strategy
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import fleet

Kind = TypeVar("Kind")


def started(clients: int = 3, strategy: Strategy | None = None, every: int = 10, **stop: Any) -> Core:
    """A core whose clients have all joined: by default client i trains task i."""
    core = Core(strategy or FedBuff(buffer_size=2), fleet(clients), 0, experiment.Stop(**stop), every)
    for client in range(clients):
        core.handle(Joined(client, 0.0))
    return core


def arrived(client: int, task: int, base: int = 0, at_s: float = 1.0, examples: int = 100) -> Arrived:
    return Arrived(client, task, base, examples, 5, 0.5, at_s)


def only(actions: list[Action], kind: type[Kind]) -> list[Kind]:
    return [action for action in actions if isinstance(action, kind)]


def test_the_first_event_asks_for_an_evaluation_of_the_model_that_nobody_has_trained() -> None:
    core = Core(FedBuff(), fleet(1), 0, experiment.Stop(versions=1))
    assert core.handle(Joined(0, 0.0)) == [Evaluate(0), Train(0, 0, 0, 0)]


def test_joining_starts_a_client_and_tasks_count_up() -> None:
    core = Core(FedBuff(), fleet(3), 0, experiment.Stop())
    trains = [only(core.handle(Joined(client, 0.0)), Train)[0] for client in (2, 0, 1)]
    assert trains == [Train(2, 0, 0, 0), Train(0, 1, 0, 0), Train(1, 2, 0, 0)]
    assert list(core.running) == [2, 0, 1]
    assert core.training == 3


def test_a_full_buffer_is_summed_and_the_deliverers_start_from_the_new_version() -> None:
    core = started()
    assert core.handle(arrived(0, 0)) == [Train(0, 3, 0, 1)]
    assert core.handle(arrived(2, 2, at_s=2.0)) == [Sum(1, (0, 2), (0.5, 0.5))]
    assert core.update(2).client == 2
    assert core.handle(Summed(1, 2.0)) == [Release(0, "applied"), Release(2, "applied"), Train(2, 4, 1, 1)]
    assert core.version == 1
    assert core.applied_weight.tolist() == [0.5, 0.0, 0.5]
    with pytest.raises(KeyError):
        core.update(2)


def test_staleness_is_counted_from_download_to_arrival_not_from_upload() -> None:
    core = started(4)
    for client in (0, 1):
        core.handle(arrived(client, client))
    core.handle(Summed(1, 1.0))
    assert core.trained_from(0) == 0  # started again before the step, from the old version
    assert core.trained_from(1) == 1
    core.handle(arrived(3, 3, base=0, at_s=9.0))
    assert core.held[-1].staleness == 1
    core.handle(arrived(1, 5, base=1, at_s=9.5))
    assert core.held[-1].staleness == 0


@pytest.mark.parametrize(
    "event",
    [
        arrived(0, 99),
        arrived(0, 1),
        arrived(7, 0),
        arrived(-1, 0),
        arrived(0, 0, base=1),
        Failed(1, 0, 1.0, "x"),
        Failed(0, 99, 1.0, "x"),
        Joined(0, 1.0),
        Joined(3, 1.0),
        Joined(-1, 1.0),
        Left(3, 1.0, "x"),
        Left(-1, 1.0, "x"),
    ],
)
def test_what_does_not_fit_changes_nothing(event: Any) -> None:
    core = started()
    assert core.handle(event) == []
    assert (core.trips, core.failed, core.lost, core.training, core.held) == (0, 0, 0, 3, [])


def test_an_arrival_told_twice_counts_once() -> None:
    core = started(strategy=FedBuff(buffer_size=3))
    core.handle(arrived(0, 0))
    assert core.handle(arrived(0, 0)) == []
    assert (core.trips, len(core.held)) == (1, 1)


def test_a_client_that_leaves_loses_its_task_and_not_what_it_delivered() -> None:
    core = started(strategy=FedBuff(buffer_size=3))
    core.handle(arrived(0, 0))
    assert core.handle(Left(0, 2.0, "killed")) == [Release(3, "lost", "killed")]
    assert core.lost == 1
    assert [update.task for update in core.held] == [0]
    assert core.handle(arrived(0, 3)) == []  # told after its end
    assert core.handle(Left(0, 2.0, "killed")) == []
    assert core.handle(Joined(0, 3.0)) == [Train(0, 4, 0, 2)]
    core.handle(arrived(1, 1))
    assert core.handle(arrived(2, 2)) == [Sum(1, (0, 1, 2), (1 / 3, 1 / 3, 1 / 3))]


def test_a_client_that_leaves_idle_is_forgotten() -> None:
    core = started(strategy=FedBuff(buffer_size=3, restart="new-version"))
    core.handle(arrived(0, 0))
    assert core.idle == [0]
    assert core.handle(Left(0, 2.0, "killed")) == []
    assert core.idle == []


def test_a_failed_task_is_lost_and_its_client_starts_again() -> None:
    core = started(strategy=FedBuff(buffer_size=3, restart="new-version"))
    assert core.handle(Failed(1, 1, 1.0, "out of memory")) == [
        Release(1, "lost", "out of memory"),
        Train(1, 3, 0, 1),
    ]
    assert (core.failed, core.trips) == (1, 0)


def test_a_bad_update_is_dropped_and_the_step_waits_for_another() -> None:
    core = started()
    core.handle(arrived(0, 0))
    core.handle(arrived(1, 1))
    actions = core.handle(Summed(1, 1.0, bad=(0,)))
    assert actions == [Release(0, "dropped", "not finite or altered"), Train(1, 4, 0, 1)]
    assert (core.version, core.dropped, [update.task for update in core.held]) == (0, 1, [1])
    assert core.handle(arrived(2, 2)) == [Sum(1, (1, 2), (0.5, 0.5))]


def test_bad_updates_are_replaced_by_what_is_held_already() -> None:
    core = started(strategy=FedBuff(buffer_size=2))
    core.handle(arrived(0, 0))
    core.handle(arrived(1, 1))
    assert core.handle(arrived(2, 2)) == []  # comes in while the sum is being made
    assert core.handle(Summed(1, 1.0, bad=(0,))) == [
        Release(0, "dropped", "not finite or altered"),
        Sum(1, (1, 2), (0.5, 0.5)),
    ]


def test_nothing_is_started_or_summed_while_a_sum_is_outstanding() -> None:
    core = started(5)
    core.handle(arrived(0, 0))
    assert only(core.handle(arrived(1, 1)), Sum) == [Sum(1, (0, 1), (0.5, 0.5))]
    for client in (2, 3):
        assert core.handle(arrived(client, client)) == []
    assert core.handle(Left(4, 1.0, "gone")) == [Release(4, "lost", "gone")]
    assert core.handle(Joined(4, 1.0)) == []
    actions = core.handle(Summed(1, 1.0))
    assert actions == [
        Release(0, "applied"),
        Release(1, "applied"),
        Sum(2, (2, 3), (0.5, 0.5)),
    ]
    assert [action.client for action in only(core.handle(Summed(2, 1.0)), Train)] == [1, 2, 3, 4]


def test_a_server_that_comes_back_is_told_what_it_had_not_done() -> None:
    core = started(emulated_s=10.0)
    assert core.pending() == [Wake(10.0)]
    core.handle(arrived(0, 0))
    (order,) = core.handle(arrived(1, 1))
    assert core.pending() == [Wake(10.0), order]
    core.handle(Left(0, 1.0, "interrupted"))
    core.handle(Summed(1, 1.0))
    assert core.pending() == [Wake(10.0)]
    core.handle(Ticked(10.0))
    assert core.pending() == []


@pytest.mark.parametrize("event", [Summed(1, 0.0), Summed(1, 0.0, bad=(0,))])
def test_summed_without_a_sum_is_an_error_of_the_program(event: Summed) -> None:
    with pytest.raises(RunError, match="Summed must answer a Sum, got version 1"):
        started().handle(event)


@pytest.mark.parametrize("event", [Summed(2, 0.0), Summed(1, 0.0, bad=(2,))])
def test_summed_must_answer_the_sum_that_was_asked_for(event: Summed) -> None:
    core = started()
    core.handle(arrived(0, 0))
    core.handle(arrived(1, 1))
    with pytest.raises(RunError, match=r"version 1 and tasks \(0, 1\)"):
        core.handle(event)


def test_negative_counts_from_a_peer_are_a_bad_update() -> None:
    core = started()
    assert core.handle(arrived(0, 0, examples=-5))[0] == Release(
        0, "dropped", "its count of examples or steps is below 0"
    )
    assert core.dropped == 1


def test_time_never_goes_back_and_is_always_a_number() -> None:
    core = started()
    for at_s in (5.0, 3.0, math.nan, math.inf, -math.inf):
        core.handle(Ticked(at_s))
        assert core.now_s == 5.0


def test_max_staleness_cancels_before_the_training_is_paid_for() -> None:
    core = started(3, strategy=FedBuff(buffer_size=1, max_staleness=1))
    core.handle(arrived(0, 0))
    assert only(core.handle(Summed(1, 1.0)), Revoke) == []
    core.handle(arrived(0, 3, base=1))
    assert only(core.handle(Summed(2, 2.0)), Revoke) == [Revoke(1, 1), Revoke(2, 2)]
    assert core.handle(Failed(1, 1, 2.0, "cancelled")) == [
        Release(1, "discarded", "cancelled"),
        Train(1, 5, 2, 1),
    ]
    # the other had finished by the time the word reached it: its update is refused, not lost
    assert core.handle(arrived(2, 2))[0] == Release(2, "discarded")
    assert (core.discarded, core.trips, core.failed) == (2, 4, 0)


def test_a_task_is_cancelled_once() -> None:
    core = started(2, strategy=FedBuff(buffer_size=1, max_staleness=0))
    core.handle(arrived(0, 0))
    assert only(core.handle(Summed(1, 1.0)), Revoke) == [Revoke(1, 1)]
    core.handle(arrived(0, 2, base=1))
    assert only(core.handle(Summed(2, 1.0)), Revoke) == []


def test_a_new_task_of_a_client_whose_old_one_was_cancelled_is_not_cancelled() -> None:
    core = started(2, strategy=FedBuff(buffer_size=1, max_staleness=0))
    core.handle(arrived(0, 0))
    core.handle(Summed(1, 1.0))
    core.handle(Left(1, 1.0, "x"))
    core.handle(Joined(1, 1.0))
    assert core.handle(Failed(1, 3, 2.0, "broken"))[0] == Release(3, "lost", "broken")


def test_devices_must_be_numbered_in_order_and_evaluation_have_a_period() -> None:
    with pytest.raises(ValueError, match="numbered 0, 1, 2"):
        Core(FedBuff(), fleet(3)[1:], 0, experiment.Stop())
    with pytest.raises(ValueError, match="evaluate_every must be at least 1, got 0"):
        Core(FedBuff(), fleet(3), 0, experiment.Stop(), 0)
