"""The core: its transitions, the answers of strategies that it accepts, and the end of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
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
    Unmasking,
    Wake,
)
from edgefl.errors import RunError
from edgefl.strategies import Step, Strategy, Update, View
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import fleet, run_in_memory

Kind = TypeVar("Kind")


def started(
    clients: int = 3,
    strategy: Strategy | None = None,
    privacy: experiment.Privacy | None = None,
    **stop: Any,
) -> Core:
    """Return a core whose clients have all joined. By default, client i trains task i."""
    strategy = strategy or FedBuff(buffer_size=2)
    core = Core(strategy, fleet(clients), 0, experiment.Stop(**stop), 10, privacy)
    for client in range(clients):
        core.handle(Joined(client, 0.0))
    return core


def arrived(client: int, task: int, base: int = 0, at_s: float = 1.0, examples: int = 100) -> Arrived:
    return Arrived(client, task, base, examples, 5, 0.5, at_s)


def only(actions: list[Action], kind: type[Kind]) -> list[Kind]:
    return [action for action in actions if isinstance(action, kind)]


def summing(**fields: Any) -> Core:
    """Return a core that waits for the result of its first sum, which uses tasks 0 and 1."""
    core = started(**fields)
    assert core.handle(arrived(0, 0)) == [Train(0, len(core.devices), 0, 1)]
    assert core.handle(arrived(1, 1)) == [Sum(1, (0, 1), (0.5, 0.5))]
    return core


def test_a_full_buffer_is_summed_and_its_last_client_starts_from_the_new_version() -> None:
    core = started()
    assert core.handle(arrived(0, 0)) == [Train(0, 3, 0, 1)]
    assert core.handle(arrived(2, 2, at_s=2.0)) == [Sum(1, (0, 2), (0.5, 0.5))]
    assert core.update(2).client == 2
    assert core.handle(Summed(1, 2.0)) == [Release(0, "applied"), Release(2, "applied"), Train(2, 4, 1, 1)]
    assert core.version == 1
    assert core.applied_weight.tolist() == [0.5, 0.0, 0.5]
    with pytest.raises(KeyError):
        core.update(2)


def test_staleness_is_counted_from_download_to_arrival() -> None:
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
def test_an_event_that_does_not_fit_changes_nothing(event: Any) -> None:
    core = started()
    assert core.handle(event) == []
    assert (core.trips, core.failed, core.lost, core.training, core.held) == (0, 0, 0, 3, [])


def test_a_client_that_leaves_loses_its_task_but_not_its_held_update() -> None:
    core = started(strategy=FedBuff(buffer_size=3))
    core.handle(arrived(0, 0))
    assert core.handle(Left(0, 2.0, "killed")) == [Release(3, "lost", "killed")]
    assert core.lost == 1
    assert [update.task for update in core.held] == [0]
    assert core.handle(arrived(0, 3)) == []  # after the client left
    assert core.handle(Left(0, 2.0, "killed")) == []
    assert core.handle(Joined(0, 3.0)) == [Train(0, 4, 0, 2)]
    core.handle(arrived(1, 1))
    assert core.handle(arrived(2, 2)) == [Sum(1, (0, 1, 2), (1 / 3, 1 / 3, 1 / 3))]


def test_a_leaving_client_that_dies_before_its_task_ends_loses_it() -> None:
    core = started()
    assert core.handle(Left(2, 1.0, "offline", finishes=True)) == []
    assert core.handle(Left(2, 2.0, "died")) == [Release(2, "lost", "died")]
    assert (core.idle, core.connected(2), core.lost) == ([], False, 1)


def test_a_failed_task_is_lost_and_its_client_starts_again() -> None:
    core = started(strategy=FedBuff(buffer_size=3, restart="new-version"))
    assert core.handle(Failed(1, 1, 1.0, "out of memory")) == [
        Release(1, "lost", "out of memory"),
        Train(1, 3, 0, 1),
    ]
    assert (core.failed, core.trips) == (1, 0)


def test_a_bad_update_is_dropped_and_the_step_waits_for_another() -> None:
    core = summing()
    actions = core.handle(Summed(1, 1.0, bad=(0,)))
    assert actions == [Release(0, "dropped", "not finite or altered"), Train(1, 4, 0, 1)]
    assert (core.version, core.dropped, [update.task for update in core.held]) == (0, 1, [1])
    assert core.handle(arrived(2, 2)) == [Sum(1, (1, 2), (0.5, 0.5))]


def test_a_held_update_replaces_a_bad_one() -> None:
    core = summing()
    assert core.handle(arrived(2, 2)) == []  # arrives during the sum
    dropped = Release(0, "dropped", "not finite or altered")
    assert core.handle(Summed(1, 1.0, bad=(0,))) == [dropped, Sum(1, (1, 2), (0.5, 0.5))]


def test_no_task_and_no_second_sum_starts_during_a_sum() -> None:
    core = summing(clients=5)
    for client in (2, 3):
        assert core.handle(arrived(client, client)) == []
    assert core.handle(Left(4, 1.0, "gone")) == [Release(4, "lost", "gone")]
    assert core.handle(Joined(4, 1.0)) == []
    applied = [Release(task, "applied") for task in (0, 1)]
    assert core.handle(Summed(1, 1.0)) == [*applied, Sum(2, (2, 3), (0.5, 0.5))]
    assert [action.client for action in only(core.handle(Summed(2, 1.0)), Train)] == [1, 2, 3, 4]


def test_a_restarted_server_gets_the_pending_actions() -> None:
    core = started(emulated_s=10.0)
    assert core.pending() == [Wake(10.0)]
    core = summing(emulated_s=10.0)
    assert core.pending() == [Wake(10.0), Sum(1, (0, 1), (0.5, 0.5))]
    assert core.handle(Unmasking(1, 1.0, 3.0)) == [Wake(3.0)]
    assert core.pending() == [Wake(3.0), Wake(10.0), Sum(1, (0, 1), (0.5, 0.5), from_s=3.0)]
    with pytest.raises(RunError, match="Unmasking must be for a pending Sum, got version 2"):
        core.handle(Unmasking(2, 1.0, 3.0))
    core.handle(Left(0, 1.0, "interrupted"))
    assert core.handle(Ticked(3.0)) == []  # the sum continues, and no task starts
    core.handle(Summed(1, 3.0))
    assert core.pending() == [Wake(10.0)]
    core.handle(Ticked(10.0))
    assert core.pending() == []


def test_summed_must_answer_the_pending_sum() -> None:
    for event in (Summed(1, 0.0), Summed(1, 0.0, bad=(0,))):
        with pytest.raises(RunError, match="Summed must follow a Sum, got version 1"):
            started().handle(event)
    for event in (Summed(2, 0.0), Summed(1, 0.0, bad=(2,))):
        with pytest.raises(RunError, match=r"version 1 and name only tasks of \(0, 1\)"):
            summing().handle(event)


def test_an_update_with_negative_counts_is_dropped() -> None:
    core = started()
    assert core.handle(arrived(0, 0, examples=-5))[0] == Release(
        0, "dropped", "negative number of examples or steps"
    )
    assert core.dropped == 1


def test_time_never_goes_back_and_is_always_finite() -> None:
    core = started()
    for at_s in (5.0, 3.0, math.nan, math.inf, -math.inf):
        core.handle(Ticked(at_s))
        assert core.now_s == 5.0


def test_max_staleness_cancels_tasks_during_training() -> None:
    core = started(3, strategy=FedBuff(buffer_size=1, max_staleness=1))
    core.handle(arrived(0, 0))
    assert only(core.handle(Summed(1, 1.0)), Revoke) == []
    core.handle(arrived(0, 3, base=1))
    assert only(core.handle(Summed(2, 2.0)), Revoke) == [Revoke(1, 1), Revoke(2, 2)]
    assert core.handle(Failed(1, 1, 2.0, "cancelled")) == [
        Release(1, "discarded", "cancelled"),
        Train(1, 5, 2, 1),
    ]
    # the other client finished before it received the cancellation: its update is discarded, not lost
    assert core.handle(arrived(2, 2))[0] == Release(2, "discarded")
    assert (core.discarded, core.trips, core.failed) == (2, 4, 0)


def test_a_task_is_cancelled_once_and_the_clients_next_task_is_not() -> None:
    core = started(2, strategy=FedBuff(buffer_size=1, max_staleness=0))
    core.handle(arrived(0, 0))
    assert only(core.handle(Summed(1, 1.0)), Revoke) == [Revoke(1, 1)]
    core.handle(arrived(0, 2, base=1))
    assert only(core.handle(Summed(2, 1.0)), Revoke) == []
    core.handle(Left(1, 1.0, "x"))
    (train,) = core.handle(Joined(1, 1.0))
    assert core.handle(Failed(1, train.task, 2.0, "broken"))[0] == Release(train.task, "lost", "broken")


def test_an_evaluation_period_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="evaluate_every must be at least 1, got 0"):
        Core(FedBuff(), fleet(3), 0, experiment.Stop(), 0)


@dataclass(frozen=True, kw_only=True)
class Scripted(Strategy):
    """A strategy whose methods return the results of ``answers``: a function of the view per method name."""

    answers: dict[str, Any] = field(default_factory=dict)

    def _answer(self, method: str, view: View, usual: Any) -> Any:
        return self.answers[method](view) if method in self.answers else usual

    def assign(self, state: Any, view: View) -> Sequence[int]:
        return self._answer("assign", view, view.idle)

    def arrive(self, state: Any, update: Update, view: View) -> Sequence[Update]:
        return self._answer("arrive", view, ())

    def cancel(self, state: Any, view: View) -> Sequence[int]:
        return self._answer("cancel", view, ())

    def step(self, state: Any, view: View) -> Step | None:
        return self._answer("step", view, Step(view.held[:1], (1.0,))) if view.held else None

    def wake_s(self, state: Any, view: View) -> float | None:
        return self._answer("wake_s", view, None)


def driven(method: str, answer: Any) -> str:
    """Return the error message for a strategy whose ``method`` returns this answer."""
    with pytest.raises(RunError) as caught:  # noqa: PT012
        core = started(2, strategy=Scripted(answers={method: answer}))
        core.handle(arrived(0, 0))
        core.handle(Summed(1, 1.0))
    return str(caught.value)


def unknown(view: View) -> Update:
    return view.held[0]._replace(task=77)


RAISED = "strategy Scripted.%s raised "
NOT_ITERABLE = "TypeError: 'NoneType' object is not iterable"
NO_FLOAT = "ValueError: could not convert string to float: "
NOT_IDLE = "Scripted.assign must return idle clients, each at most once, got client 0"


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("assign", lambda v: (0,) if v.training else v.idle, NOT_IDLE),
        ("assign", lambda v: (0, 0), NOT_IDLE),
        ("assign", lambda v: 1 // 0, RAISED % "assign" + "ZeroDivisionError: integer division"),
        ("assign", lambda v: None, RAISED % "assign" + NOT_ITERABLE),
        ("assign", lambda v: ("0",), RAISED % "assign" + "TypeError: 'str' object cannot be interpreted"),
        ("assign", lambda v: (0.0,), RAISED % "assign" + "TypeError: 'float' object cannot be interpreted"),
        ("arrive", lambda v: (unknown(v),), "Scripted.arrive must return updates that are held, got task 77"),
        ("arrive", lambda v: (0,), RAISED % "arrive" + "TypeError: expected an Update, got int"),
        ("cancel", lambda v: (99,), "Scripted.cancel must return clients with a task, got client 99"),
        ("step", lambda v: Step(v.held, (math.nan,)), "Scripted.step must return finite weights"),
        ("step", lambda v: Step(v.held, (1.0,), base_scale=math.inf), "with base_scale inf"),
        ("step", lambda v: Step((), ()), "a weight for each of one or more updates, got 0 weights for 0"),
        ("step", lambda v: Step(v.held, ()), "got 0 weights for 1"),
        ("step", lambda v: Step((unknown(v),), (1.0,)), "must return updates that are held, got task 77"),
        ("step", lambda v: 7, RAISED % "step" + "TypeError: cannot unpack non-iterable int object"),
        ("step", lambda v: Step((), None), RAISED % "step" + NOT_ITERABLE),
        ("step", lambda v: Step((), ("a",)), RAISED % "step" + NO_FLOAT + "'a'"),
        ("step", lambda v: Step((0,), (1.0,)), RAISED % "step" + "TypeError: expected an Update, got int"),
        ("wake_s", lambda v: "soon", RAISED % "wake_s" + NO_FLOAT + "'soon'"),
    ],
)
def test_a_strategy_with_an_invalid_answer_is_named(method: str, answer: Any, message: str) -> None:
    assert message in driven(method, answer)


def test_an_error_of_a_strategy_names_its_line() -> None:
    def at_fault(view: View) -> Sequence[int]:
        raise LookupError("oh")

    assert driven("cancel", at_fault).endswith(f" ({__file__}:{at_fault.__code__.co_firstlineno + 1})")
    assert driven("step", lambda view: Step((), None)).endswith("is not iterable")  # read from its answer


@pytest.mark.parametrize(
    "answers",
    [
        {"arrive": lambda view: None},  # no update is discarded
        {"step": lambda view: Step(view.held[:1] * 3, (0.25, 0.25, 0.5))},  # one update of weight 1
    ],
)
def test_none_for_no_update_and_repeated_updates_are_valid_answers(answers: dict[str, Any]) -> None:
    core = started(2, strategy=Scripted(answers=answers))
    assert core.handle(arrived(0, 0)) == [Sum(1, (0,), (1.0,))]


def test_clients_as_numpy_integers_become_python_integers() -> None:
    core = Core(Scripted(answers={"assign": lambda v: np.array(v.idle)}), fleet(2), 0, experiment.Stop())
    (train,) = only(core.handle(Joined(0, 0.0)), Train)
    assert type(train.client) is int


def test_a_kept_update_may_be_used_again() -> None:
    keep = {"step": lambda view: Step(view.held[:1], (1.0,), keep=True)}
    core = started(2, strategy=Scripted(answers=keep), versions=2)
    core.handle(arrived(0, 0))
    assert core.handle(Summed(1, 1.0)) == [Sum(2, (0,), (1.0,))]
    assert core.handle(Summed(2, 1.0)) == [Evaluate(2), Release(0, "applied"), Finish("versions")]
    assert (core.applied, core.discarded) == (2, 0)


def test_the_mean_staleness_counts_an_update_once_that_is_used_again() -> None:
    """Regression: the live views showed another mean than the summary, such as with ca2fl."""
    keep = {"step": lambda view: Step(view.held, [1.0] * len(view.held), keep=True)}
    core = started(3, strategy=Scripted(answers=keep), versions=9)
    core.handle(arrived(0, 0))
    core.handle(Summed(1, 1.0))
    core.handle(arrived(1, 1))
    for version in (2, 3, 4):
        core.handle(Summed(version, 1.0))
    assert (core.applied, core.used, core.staleness_sum) == (6, 2, 1)


def test_a_step_releases_the_held_updates_that_it_names() -> None:
    def step(view: View) -> Step | None:
        last = view.held[-1:]
        return Step(last, (1.0,), keep=True, release=view.held[:-1]) if last else None

    core = started(3, strategy=Scripted(answers={"step": step}), versions=9)
    core.handle(arrived(0, 0))
    core.handle(arrived(1, 1))  # while the first is being summed
    assert only(core.handle(Summed(1, 1.0)), Release) == []
    assert only(core.handle(Summed(2, 1.0)), Release) == [Release(0, "applied")]
    core.handle(arrived(2, 2, base=0))
    core.handle(Summed(3, 1.0))
    assert core.discarded == 0


@pytest.mark.parametrize(("at_s", "wakes"), [(7.0, [Wake(7.0)]), (-1.0, []), (math.nan, [])])
def test_a_wake_is_requested_once_and_only_for_a_later_time(at_s: float, wakes: list[Wake]) -> None:
    core = Core(Scripted(answers={"wake_s": lambda view: at_s}), fleet(2), 0, experiment.Stop())
    assert only(core.handle(Joined(0, 0.0)), Wake) == wakes
    assert only(core.handle(Joined(1, 0.0)), Wake) == []
    assert core.handle(Ticked(6.9)) == wakes  # the timer was early and is set again
    assert core.pending() == wakes
    assert core.handle(Ticked(7.0)) == []
    assert core.pending() == []


@pytest.mark.parametrize(
    ("joined", "arrives", "stop", "ends"),
    [
        (2, (0, 1), {}, True),
        (2, (0, 1), {"wall_s": 1e9}, True),
        (2, (0, 1), {"emulated_s": 1e9}, False),  # ends at that time
        (2, (0,), {}, False),  # the other client trains
        (1, (0,), {}, False),  # the other client may still join
    ],
)
def test_a_run_whose_strategy_only_wakes_itself_ends(
    joined: int, arrives: Sequence[int], stop: dict[str, float], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.core.core.MAX_IDLE_WAKES", 50)
    answers = {
        "assign": lambda view: [] if view.held else view.idle,
        "step": lambda view: None,
        "wake_s": lambda view: view.now_s + 1.0,
    }
    core = Core(Scripted(answers=answers), fleet(2), 0, experiment.Stop(**stop))
    for client in range(joined):
        core.handle(Joined(client, 0.0))
    for client in arrives:
        core.handle(arrived(client, core.task_of(client) or 0, at_s=0.5))
    due = [action for action in core.pending() if isinstance(action, Wake)]
    for _ in range(200):
        now_s = due.pop(0).at_s
        due += only(core.handle(Ticked(now_s)), Wake)
        due.sort(key=lambda wake: wake.at_s)
        if core.stopped:
            break
    said = "no progress: the strategy was woken 50 times in a row while no client trained"
    hint = "; if it waits on purpose, set stop.emulated_s"
    assert core.stopped == (said + hint if ends else None)


def test_the_last_trip_may_complete_a_version() -> None:
    assert summing(trips=2).handle(Summed(1, 1.0))[-2:] == [Evaluate(1), Finish("trips")]


def test_after_the_end_updates_are_released_and_no_task_starts() -> None:
    core = started(4, strategy=FedBuff(buffer_size=4), trips=1)
    assert core.handle(arrived(0, 0)) == [Release(0, "discarded", "the run is over"), Finish("trips")]
    assert core.stopped == "trips"
    assert core.handle(arrived(1, 1)) == [Release(1, "discarded", "the run is over")]
    assert core.handle(Failed(2, 2, 2.0, "x")) == [Release(2, "lost", "x")]
    assert core.handle(Left(3, 2.0, "end")) == [Release(3, "lost", "end")]
    for event in (Joined(3, 2.0), Ticked(3.0), Evaluated(0, 3.0, 1.0), Halted(3.0, "x"), arrived(1, 1)):
        assert core.handle(event) == []
    assert (core.discarded, core.failed, core.lost, core.training) == (2, 1, 1, 0)


def test_a_run_ends_at_its_time_and_uses_no_later_update() -> None:
    core, other = (Core(FedBuff(buffer_size=1), fleet(2), 0, experiment.Stop(emulated_s=10.0)) for _ in "ab")
    for each in (core, other):
        # the initial model is evaluated
        assert each.handle(Joined(0, 0.0)) == [Evaluate(0), Wake(10.0), Train(0, 0, 0, 0)]
    over = Release(0, "discarded", "the run is over")
    assert core.handle(arrived(0, 0, at_s=10.0)) == [over, Finish("emulated_s")]
    assert other.handle(Ticked(9.9)) == [Wake(10.0)]  # the timer was early
    assert other.handle(Ticked(10.0)) == [Finish("emulated_s")]


def evaluations(core: Core, *accuracies: float, loss: float = 1.0) -> list[str]:
    """Evaluate versions with these accuracies; return the reasons for which the core ends the run."""
    found = []
    for number, accuracy in enumerate(accuracies):
        actions = core.handle(Evaluated(number, 1.0, accuracy, {"loss": loss / (1 + number)}))
        found += [action.reason for action in actions if isinstance(action, Finish)]
    return found


def test_patience_ends_after_evaluations_without_improvement() -> None:
    patient = {"patience_evaluations": 2, "min_improvement": 0.01}
    assert evaluations(started(**patient), 0.1, 0.2, 0.3, 0.4) == []
    assert evaluations(started(**patient), 0.1, 0.2, 0.205) == []
    assert evaluations(started(**patient), 0.1, 0.2, 0.205, 0.209) == ["patience"]
    assert evaluations(started(**patient), 0.1, 0.2, 0.205, 0.22, 0.22, 0.22) == ["patience"]
    assert evaluations(started(**patient, accuracy=0.15), 0.1, 0.2) == ["accuracy"]
    falling = experiment.MetricGoal(name="loss", at_most=0.01)  # a third of the loss is an improvement
    assert evaluations(started(**patient, metric=falling), 0.5, 0.5, 0.5, 0.5) == []
    rising = experiment.MetricGoal(name="loss", at_least=9.0)
    assert evaluations(started(**patient, metric=rising), 0.1, 0.2, 0.3) == ["patience"]
    nan = math.nan  # no accuracy: the loss, which falls; then neither
    assert evaluations(started(**patient), nan, nan, nan, nan) == []
    assert evaluations(started(**patient), nan, nan, nan, loss=nan) == ["patience"]


def test_a_run_ends_at_its_accuracy() -> None:
    core = started(accuracy=0.8)
    for low in (0.5, math.nan):
        assert core.handle(Evaluated(0, 1.0, low)) == []
    assert core.handle(Evaluated(0, 1.0, 0.8)) == [Finish("accuracy")]
    assert started().handle(Evaluated(0, 1.0, 1.0)) == []


def test_the_mean_of_the_last_evaluations_must_reach_the_accuracy() -> None:
    over = {"accuracy": 0.75, "accuracy_over": 3}
    assert evaluations(started(**over), 1.0, 1.0) == []  # too few evaluations
    assert evaluations(started(**over), 0.25, 1.0, 0.5) == []
    assert evaluations(started(**over), 0.25, 1.0, 0.5, 0.75) == ["accuracy"]


def test_a_run_is_not_longer_because_its_last_evaluation_takes_time() -> None:
    core = started(accuracy=0.8)
    assert core.stopped_s is None
    assert core.handle(Evaluated(0, 3.0, 0.8)) == [Finish("accuracy")]
    core.handle(Evaluated(0, 9.0, 0.9))
    assert (core.stopped_s, core.now_s) == (3.0, 9.0)


def test_a_run_halted_during_a_sum_ends_after_it() -> None:
    core = summing()
    assert core.handle(Halted(1.0, "wall_s")) == []
    assert core.handle(Summed(1, 1.0))[-1] == Finish("wall_s")


def test_a_run_of_only_failures_ends() -> None:
    core = started(1)
    for _ in range(1000):
        actions = core.handle(Failed(0, core.task_of(0) or 0, 1.0, "broken"))
        if core.stopped:
            break
    assert actions[-1] == Finish("no progress: 111 tasks in a row failed or gave a bad update")


@pytest.mark.parametrize(("how", "tasks"), [("failed", 121), ("invalid", 122)])
def test_a_private_run_of_only_failures_ends(how: str, tasks: int) -> None:
    """A failed trip gives an update of zero, so versions are still made. A valid update resets the count."""
    core = started(2, privacy=experiment.Privacy(clip_norm=1.0), versions=10_000)

    def end(*, valid: int = -1) -> Action:
        for trip in range(400):
            client, task = trip % 2, core.task_of(trip % 2)
            assert task is not None
            came = how == "invalid" or trip == valid
            failed, well = Failed(client, task, 1.0, "x"), arrived(client, task, core.trained_from(client))
            actions = core.handle(well if came else failed)
            for order in only(actions, Sum):
                zero = tuple(task for task in order.tasks if how == "invalid" and trip // 2 != valid // 2)
                actions = core.handle(Summed(order.version, 1.0, zero=zero))
            if core.stopped:
                break
        return actions[-1]

    said = Finish(f"no progress: {tasks} tasks in a row failed or gave a bad update")
    assert (end(), core.version, core.learned) == (said, tasks // 2, False)
    core = started(2, privacy=experiment.Privacy(clip_norm=1.0), versions=10_000)
    end(valid=100)
    assert (core.trips > 200, core.learned) == (True, True)


def test_a_run_with_only_an_accuracy_to_reach_ends_after_equal_evaluations() -> None:
    for ends, stopped in (({}, True), ({"versions": 10_000}, False), ({"wall_s": 1e9}, False)):
        core = started(accuracy=0.9, **ends)
        for at in range(19):
            assert core.handle(Evaluated(0, float(at), math.nan, {"loss": 2.3})) == []
        actions = core.handle(Evaluated(0, 20.0, math.nan, {"loss": 2.3}))
        end = Finish("no progress: 20 evaluations in a row were equal")
        assert actions[-1:] == ([end] if stopped else [])
    core = started(accuracy=0.9)
    for at in range(100):  # a loss that changes is progress
        assert core.handle(Evaluated(0, float(at), 0.1, {"loss": 2.3 + at % 15 / 1e9})) == []


@pytest.mark.parametrize(
    ("given", "versions"),
    [
        (5, [0, 5, 10]),
        # Four clients train in parallel, 1 s per trip. Two updates make a version: at 1, 1, 2, 2, … s.
        (experiment.Evaluation(every_trips=6), [0, 3, 6, 9, 12]),
        (experiment.Evaluation(every_s=1.5), [0, 3, 5, 9, 11]),
        (experiment.Evaluation(every_versions=5), [0, 5, 10]),
    ],
)
def test_evaluations_have_equal_periods(given: experiment.Evaluation | int, versions: list[int]) -> None:
    core = Core(FedBuff(buffer_size=2), fleet(4), 0, experiment.Stop(versions=13), given)
    run = run_in_memory(core, [1.0] * 4)
    assert run.evaluated == [*versions, 13]  # also the last version
