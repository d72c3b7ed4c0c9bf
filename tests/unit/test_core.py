"""The core: its transitions, the strategies' answers that it takes, and the end of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import (
    Action,
    Arrived,
    Evaluate,
    Evaluated,
    Failed,
    Finish,
    Halted,
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
from edgefl.strategies import Step, Strategy, Update, View
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


def test_a_client_that_was_to_finish_and_goes_before_loses_its_task() -> None:
    core = started()
    assert core.handle(Left(2, 1.0, "offline", finishes=True)) == []
    assert core.handle(Left(2, 2.0, "died")) == [Release(2, "lost", "died")]
    assert (core.idle, core.connected(2), core.lost) == ([], False, 1)


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


FOREIGN: dict[str, Any] = {
    "step-number": 7,
    "step-none": Step((), None),
    "step-text": Step((), ("a",)),
    "step-tasks": Step((0,), (1.0,)),
}
"""Answers of the wrong type."""


@dataclass(frozen=True, kw_only=True)
class Scripted(Strategy):
    """Answers what it is told to."""

    what: str = ""

    def assign(self, state: Any, view: View) -> Sequence[int]:
        if self.what == "assign-busy" and view.training:
            return (0,)
        if self.what == "assign-twice":
            return (0, 0)
        if self.what == "assign-raises":
            raise ZeroDivisionError("oh")
        return None if self.what == "assign-none" else view.idle

    def arrive(self, state: Any, update: Update, view: View) -> Sequence[Update]:
        if self.what == "arrive-none":
            return None
        if self.what == "arrive-tasks":
            return (update.task,)
        return (update._replace(task=77),) if self.what == "arrive-unknown" else ()

    def cancel(self, state: Any, view: View) -> Sequence[int]:
        return (99,) if self.what == "cancel-idle" else ()

    def step(self, state: Any, view: View) -> Step | None:
        if not view.held:
            return None
        weight = math.nan if self.what == "step-nan" else 1.0
        if self.what == "step-empty":
            return Step((), ())
        if self.what == "step-unknown":
            return Step((view.held[0]._replace(task=77),), (1.0,))
        if self.what == "step-short":
            return Step(view.held, ())
        if self.what == "step-twice":
            return Step((view.held[0],) * 3, (0.25, 0.25, 0.5))
        if self.what in FOREIGN:
            return FOREIGN[self.what]
        if self.what == "step-base":
            return Step((view.held[0],), (1.0,), base_scale=math.inf)
        return Step((view.held[0],), (weight,), keep=self.what == "keep")

    def wake_s(self, state: Any, view: View) -> float | None:
        return {"wake": 7.0, "wake-past": -1.0, "wake-nan": math.nan, "wake-text": "soon"}.get(self.what)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("assign-busy", "Scripted.assign must give clients that are idle, each once, got client 0"),
        ("assign-twice", "Scripted.assign must give clients that are idle, each once, got client 0"),
        ("assign-raises", "strategy Scripted.assign raised ZeroDivisionError: oh"),
        ("arrive-unknown", "Scripted.arrive must give updates that are held, got task 77"),
        ("cancel-idle", "Scripted.cancel must give clients with a task, got client 99"),
        ("step-nan", "Scripted.step must give finite weights"),
        ("step-base", "with base_scale inf"),
        ("step-empty", "Scripted.step must give a weight for each of one or more updates, got 0 for 0"),
        ("step-short", "got 0 for 1"),
        ("step-unknown", "Scripted.step must give updates that are held, got task 77"),
        ("assign-none", "strategy Scripted.assign raised TypeError: 'NoneType' object is not iterable"),
        ("arrive-tasks", "strategy Scripted.arrive raised TypeError: expected an Update, got int"),
        ("step-number", "strategy Scripted.step raised TypeError: cannot unpack non-iterable int object"),
        ("step-none", "strategy Scripted.step raised TypeError: 'NoneType' object is not iterable"),
        ("step-text", "strategy Scripted.step raised ValueError: could not convert string to float: 'a'"),
        ("step-tasks", "strategy Scripted.step raised TypeError: expected an Update, got int"),
        (
            "wake-text",
            "strategy Scripted.wake_s raised ValueError: could not convert string to float: 'soon'",
        ),
    ],
)
def test_a_strategy_that_answers_nonsense_is_named(what: str, message: str) -> None:
    def drive() -> None:
        core = started(2, strategy=Scripted(what=what))
        core.handle(arrived(0, 0))
        core.handle(Summed(1, 1.0))

    with pytest.raises(RunError) as caught:
        drive()
    assert message in str(caught.value)


class Careless(Scripted):
    """Has its faults in functions that its methods call."""

    def cancel(self, state: Any, view: View) -> Sequence[int]:
        return _at_fault()


def _at_fault() -> Sequence[int]:
    raise LookupError("oh")


@pytest.mark.parametrize(
    ("strategy", "place"),
    [
        (Careless(what="keep"), f" ({__file__}:{_at_fault.__code__.co_firstlineno + 1})"),
        (Scripted(what="step-none"), "is not iterable"),
    ],
    ids=["its own", "read from its answer"],
)
def test_a_strategy_that_raises_says_in_which_line(strategy: Scripted, place: str) -> None:
    def drive() -> None:
        core = started(2, strategy=strategy)
        core.handle(arrived(0, 0))
        core.handle(Summed(1, 1.0))

    with pytest.raises(RunError) as caught:
        drive()
    assert str(caught.value).endswith(place)


def test_no_answer_to_an_arrival_discards_nothing() -> None:
    core = started(2, strategy=Scripted(what="arrive-none"))
    assert core.handle(arrived(0, 0)) == [Sum(1, (0,), (1.0,))]


def test_an_update_named_more_than_once_is_summed_once_with_all_its_weight() -> None:
    core = started(2, strategy=Scripted(what="step-twice"))
    assert core.handle(arrived(0, 0)) == [Sum(1, (0,), (1.0,))]


def test_a_kept_update_stays_held_and_may_be_used_again() -> None:
    core = started(2, strategy=Scripted(what="keep"), versions=2)
    core.handle(arrived(0, 0))
    assert core.handle(Summed(1, 1.0)) == [Sum(2, (0,), (1.0,))]
    assert core.handle(Summed(2, 1.0)) == [
        Evaluate(2),
        Release(0, "discarded", "the run is over"),
        Finish("versions"),
    ]
    assert core.applied == 2


@pytest.mark.parametrize(("what", "wakes"), [("wake", [Wake(7.0)]), ("wake-past", []), ("wake-nan", [])])
def test_a_wake_is_asked_for_once_and_only_if_it_lies_ahead(what: str, wakes: list[Wake]) -> None:
    core = Core(Scripted(what=what), fleet(2), 0, experiment.Stop())
    assert only(core.handle(Joined(0, 0.0)), Wake) == wakes
    assert only(core.handle(Joined(1, 0.0)), Wake) == []
    assert core.handle(Ticked(6.9)) == wakes  # a timer that was early is set again
    assert core.pending() == wakes
    assert core.handle(Ticked(7.0)) == []
    assert core.pending() == []


def test_every_so_many_versions_and_the_last_are_evaluated() -> None:
    core = started(2, strategy=FedBuff(buffer_size=1), every=2, versions=5)
    evaluated = []
    for version in range(1, 6):
        core.handle(arrived(0, core.task_of(0) or 0, base=version - 1))
        actions = core.handle(Summed(version, 1.0))
        evaluated += [action.version for action in actions if isinstance(action, Evaluate)]
    assert evaluated == [2, 4, 5]


def test_the_last_version_is_not_evaluated_twice() -> None:
    core = started(1, strategy=FedBuff(buffer_size=1), every=1, versions=1)
    core.handle(arrived(0, 0))
    assert core.handle(Summed(1, 1.0)) == [Release(0, "applied"), Evaluate(1), Finish("versions")]


def test_stop_at_trips_makes_the_step_that_the_last_trip_completes() -> None:
    core = started(trips=2)
    core.handle(arrived(0, 0))
    assert core.handle(arrived(1, 1)) == [Sum(1, (0, 1), (0.5, 0.5))]
    assert core.handle(Summed(1, 1.0))[-2:] == [Evaluate(1), Finish("trips")]


def test_stop_releases_what_is_held_and_then_only_what_still_runs() -> None:
    core = started(4, strategy=FedBuff(buffer_size=4), trips=1)
    assert core.handle(arrived(0, 0)) == [Release(0, "discarded", "the run is over"), Finish("trips")]
    assert core.stopped == "trips"
    assert core.handle(arrived(1, 1)) == [Release(1, "discarded", "the run is over")]
    assert core.handle(Failed(2, 2, 2.0, "x")) == [Release(2, "lost", "x")]
    assert core.handle(Left(3, 2.0, "end")) == [Release(3, "lost", "end")]
    for event in (Joined(3, 2.0), Ticked(3.0), Evaluated(0, 3.0, 1.0), Halted(3.0, "x"), arrived(1, 1)):
        assert core.handle(event) == []
    assert (core.discarded, core.failed, core.lost, core.training) == (2, 1, 1, 0)


def test_stop_at_a_time_needs_no_arrival_and_uses_nothing_from_that_time_on() -> None:
    core = Core(FedBuff(buffer_size=1), fleet(2), 0, experiment.Stop(emulated_s=10.0))
    assert core.handle(Joined(0, 0.0)) == [Evaluate(0), Wake(10.0), Train(0, 0, 0, 0)]
    core.handle(Joined(1, 0.0))
    assert core.handle(arrived(0, 0, at_s=10.0)) == [
        Release(0, "discarded", "the run is over"),
        Finish("emulated_s"),
    ]
    other = Core(FedBuff(buffer_size=1), fleet(2), 0, experiment.Stop(emulated_s=10.0))
    other.handle(Joined(0, 0.0))
    assert other.handle(Ticked(9.9)) == [Wake(10.0)]  # the timer was early
    assert other.handle(Ticked(10.0)) == [Finish("emulated_s")]


def test_stop_at_an_accuracy() -> None:
    core = started(accuracy=0.8)
    for low in (0.5, math.nan):
        assert core.handle(Evaluated(0, 1.0, low)) == []
    assert core.handle(Evaluated(0, 1.0, 0.8)) == [Finish("accuracy")]


def test_accuracy_means_nothing_to_a_run_that_does_not_stop_by_it() -> None:
    assert started().handle(Evaluated(0, 1.0, 1.0)) == []


def test_the_server_can_end_the_run_also_while_a_sum_is_outstanding() -> None:
    core = started()
    core.handle(arrived(0, 0))
    core.handle(arrived(1, 1))
    assert core.handle(Halted(1.0, "wall_s")) == []
    assert core.handle(Summed(1, 1.0))[-1] == Finish("wall_s")


def test_a_fleet_that_only_fails_does_not_run_for_ever() -> None:
    core = started(1)
    for _ in range(1000):
        actions = core.handle(Failed(0, core.task_of(0) or 0, 1.0, "broken"))
        if core.stopped:
            break
    assert actions[-1] == Finish("no progress: 111 tasks in a row failed or gave a bad update")
