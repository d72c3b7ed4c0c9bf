"""The core decides from the journal's events alone whether and when a client that died rejoins."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.deaths import Deaths
from edgefl.core.events import Arrived, Died, Drop, Halted, Joined, Left, Rejoin, Release, Train
from edgefl.strategies import resolve
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedfix import FedFix
from edgefl.testing import fleet, run_in_memory

MAX = Deaths.MAX_IN_A_ROW


def dies(at_s: float, client: int = 0, *, declared: bool = False) -> Died:
    return Died(client, at_s, "signal 9", declared)


def core(deaths: Deaths | None = None, privacy: experiment.Privacy | None = None) -> Core:
    stop = experiment.Stop(versions=9)
    made = Core(FedBuff(buffer_size=9), fleet(2), 1, stop, privacy=privacy, deaths=deaths)
    for client in range(2):
        made.handle(Joined(client, 0.0))
    return made


def test_a_client_is_dropped_after_its_fifth_death_in_a_row() -> None:
    deaths = Deaths(rejoin_s=30.0)
    assert deaths.returns_s(0) == -math.inf
    for at in range(1, MAX):
        assert deaths.died(dies(100.0 * at)) == Rejoin(0, 100.0 * at + 30.0)
        assert deaths.returns_s(0) == 100.0 * at + 30.0
    assert deaths.died(dies(999.0)) == Drop(0, f"died {MAX} times in a row")
    assert (deaths.returns_s(0), deaths.returns_s(1)) == (math.inf, -math.inf)  # not the other client


def test_an_update_resets_the_count_of_deaths() -> None:
    made = core(Deaths())
    for at in range(1, MAX):
        assert made.handle(dies(float(at)))[0] == Rejoin(0, float(at))
    (train,) = made.handle(Joined(0, 5.0))
    assert isinstance(train, Train)
    made.handle(Arrived(0, train.task, 0, 60, 5, 1.0, 5.0))
    assert made.handle(dies(6.0))[0] == Rejoin(0, 6.0)


def test_declared_deaths_do_not_count_and_on_death_drop_is_final() -> None:
    deaths = Deaths(rejoin_s=7.5)
    for _ in range(2 * MAX):
        assert deaths.died(dies(1.0, declared=True)) == Rejoin(0, 8.5)
    for declared in (True, False):
        assert Deaths("drop").died(dies(1.0, declared=declared)) == Drop(0, "")


def test_a_death_ends_the_clients_task_and_has_no_effect_after_the_run() -> None:
    made = core()
    assert made.handle(dies(1.0))[:2] == [Rejoin(0, 1.0), Release(0, "lost", "signal 9")]
    assert (made.connected(0), made.task_of(0), made.lost) == (False, None, 1)
    assert made.handle(Left(0, 1.0, "signal 9")) == []
    assert [made.handle(dies(2.0, client)) for client in (-1, 2)] == [[], []]  # no such clients
    made.handle(Halted(3.0, "halted"))
    assert not [action for action in made.handle(dies(4.0, 1)) if isinstance(action, Rejoin | Drop)]


def test_in_a_private_run_only_a_declared_death_removes_the_client() -> None:
    made = core(privacy=experiment.Privacy(clip_norm=1.0))
    assert made.handle(dies(1.0)) == [Rejoin(0, 1.0)]  # its task fails when its update would have arrived
    assert (made.connected(0), made.task_of(0)) == (True, 0)
    assert made.handle(Died(0, 2.0, "its training", task=0)) == [Train(0, 2, 0, 1)]  # no Rejoin, no Drop
    assert (made.connected(0), made.is_zero(0)) == (True, True)
    made.handle(dies(3.0, 1, declared=True))
    assert (made.connected(1), made.lost) == (False, 1)


@pytest.mark.parametrize("restarts", [0, 1, 4])
def test_a_replay_of_the_journal_continues_the_count_of_deaths(restarts: int) -> None:
    """A server that replaces a dead one knows only what is in the journal."""
    journal, made = [dies(float(at)) for at in range(MAX)], core()
    for event in journal[:restarts]:
        made.handle(event)
    again = core()
    for event in journal[:restarts]:
        again.handle(event)
    answers = [again.handle(event) for event in journal[restarts:]]
    assert answers == [made.handle(event) for event in journal[restarts:]]
    assert isinstance(answers[-1][0], Drop)


@pytest.mark.parametrize("strategy", ["favano", "fedfix", "quafl"])
@pytest.mark.parametrize(
    ("on_death", "end_s", "reason"),
    [
        ("drop", None, "too few clients are left: 0 of 3"),
        ("drop", 50.0, "emulated_s"),  # the run ends by itself
        ("replace", 50.0, "emulated_s"),
    ],
)
def test_a_run_whose_strategy_wakes_itself_ends_when_all_clients_were_dropped(
    strategy: str, on_death: Literal["replace", "drop"], end_s: float | None, reason: str
) -> None:
    made = resolve({"name": strategy, "interval_s": 1.0})
    stop = experiment.Stop(versions=1000, emulated_s=end_s)
    core = Core(made, fleet(3), 1, stop, deaths=Deaths(on_death, rejoin_s=100.0))
    events = [dies(4.0 + client, client) for client in range(3)]
    run_in_memory(core, [0.4, 1.0, 2.5], model=np.zeros(3), events=events, max_events=10_000)
    assert (core.stopped, core.now_s) == (reason, end_s or 6.0)


def test_a_held_update_is_used_after_the_last_client_died() -> None:
    core = Core(FedFix(interval_s=5.0), fleet(1), 1, experiment.Stop(versions=9), deaths=Deaths("drop"))
    result = run_in_memory(core, [1.0], model=np.zeros(3), events=[dies(3.0)], max_events=100)
    assert (core.stopped, core.now_s, len(result.sums)) == ("too few clients are left: 0 of 1", 5.0, 1)


def test_a_client_that_died_returns_in_memory_too() -> None:
    """Regression: the client never returned, and the run had no events left."""
    core = Core(FedBuff(buffer_size=1), fleet(1), 1, experiment.Stop(versions=2), deaths=Deaths(rejoin_s=3.0))
    run_in_memory(core, [1.0], events=[dies(0.5)])
    assert core.now_s == 5.5  # it returns at 3.5 s


@pytest.mark.parametrize("died", [dies(0.5), Died(0, 0.5, "its training", task=0)], ids=["process", "task"])
def test_the_trip_of_a_client_that_died_counts_as_zero_in_memory_too(died: Died) -> None:
    """Regression: the update was used, or the client got two tasks."""
    private, stop = experiment.Privacy(clip_norm=1.0), experiment.Stop(versions=2)
    core = Core(FedBuff(buffer_size=1), fleet(1), 1, stop, privacy=private)
    run = run_in_memory(core, [1.0], train=lambda client, model, trip: model + 1.0, events=[died])
    assert [float(model[0]) for model in run.models] == [0.0, 0.0, 1.0]
