"""What a strategy may answer, and what happens when it answers nonsense."""

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
    Finish,
    Joined,
    Release,
    Sum,
    Summed,
    Ticked,
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


FOREIGN: dict[str, Any] = {
    "step-number": 7,
    "step-none": Step((), None),  # type: ignore[arg-type]
    "step-text": Step((), ("a",)),  # type: ignore[arg-type]
    "step-tasks": Step((0,), (1.0,)),  # type: ignore[arg-type]
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
        return None if self.what == "assign-none" else view.idle  # type: ignore[return-value]

    def arrive(self, state: Any, update: Update, view: View) -> Sequence[Update]:
        if self.what == "arrive-none":
            return None  # type: ignore[return-value]
        if self.what == "arrive-tasks":
            return (update.task,)  # type: ignore[return-value]
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
            return FOREIGN[self.what]  # type: ignore[no-any-return]
        if self.what == "step-base":
            return Step((view.held[0],), (1.0,), base_scale=math.inf)
        return Step((view.held[0],), (weight,), keep=self.what == "keep")

    def wake_s(self, state: Any, view: View) -> float | None:
        return {"wake": 7.0, "wake-past": -1.0, "wake-nan": math.nan, "wake-text": "soon"}.get(self.what)  # type: ignore[return-value]


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
