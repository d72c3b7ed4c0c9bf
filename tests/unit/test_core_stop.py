"""When a run ends, what is evaluated, and what still happens after its end."""

from __future__ import annotations

import math
from typing import Any, TypeVar

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
    Sum,
    Summed,
    Ticked,
    Train,
    Wake,
)
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
