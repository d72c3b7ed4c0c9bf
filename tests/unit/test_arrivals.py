"""Strategies whose clients arrive on their own initiative, at a constant rate or as a Poisson process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.deaths import Deaths
from edgefl.core.events import Arrived, Died, Joined, Left, Summed, Ticked, Train, Unmasking, Wake
from edgefl.core.participation import Schedule
from edgefl.errors import ConfigError, RunError
from edgefl.strategies import View, resolve
from edgefl.strategies.base import Arrivals
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import MemoryRun, fleet, run_in_memory


def run(clients: int, trips: int, duration: Any, **fields: Any) -> tuple[Core, MemoryRun]:
    core = Core(FedBuff(buffer_size=1, **fields), fleet(clients), 3, experiment.Stop(trips=trips), 10**9)
    return core, run_in_memory(core, duration)


def starts(result: MemoryRun) -> list[float]:
    return [event.at_s for event, done in result.history for action in done if isinstance(action, Train)]


def concurrency(result: MemoryRun) -> float:
    """Return the time average of the number of clients that train."""
    running, area, last = 0, 0.0, 0.0
    for event, actions in result.history:
        area += running * (event.at_s - last)
        last = event.at_s
        running += sum(isinstance(action, Train) for action in actions) - (type(event).__name__ == "Arrived")
    return area / last


def test_a_constant_rate_starts_clients_at_equal_intervals() -> None:
    _, result = run(40, 1000, [7.3] * 40, arrival_process="constant", arrival_rate_per_s=4.0)
    assert starts(result) == [(k + 1) / 4.0 for k in range(len(starts(result)))]
    assert concurrency(result) == pytest.approx(4.0 * 7.3, rel=0.02)  # Little's law


def test_intervals_of_a_poisson_process_are_exponential() -> None:
    _, result = run(60, 4000, [7.3] * 60, arrival_process="poisson", arrival_rate_per_s=4.0)
    gaps = np.diff([0.0, *starts(result)])
    assert stats.kstest(gaps, "expon", args=(0.0, 0.25)).pvalue > 0.01
    assert concurrency(result) == pytest.approx(4.0 * 7.3, rel=0.05)


def test_a_run_ends_if_arrivals_find_only_clients_that_wait_for_a_step() -> None:
    """One client may train again after the next step, but the clients that could supply the updates for this
    step have no trips left."""
    fields: dict[str, Any] = {"arrival_process": "constant", "arrival_rate_per_s": 1.0}
    strategy = FedBuff(buffer_size=3, restart="after-step", **fields)
    rules = experiment.Privacy(clip_norm=1.0, max_participations=2)
    core = Core(strategy, fleet(4), 0, experiment.Stop(versions=9), privacy=rules)
    run_in_memory(core, [0.5] * 4)
    assert (core.version, core.stopped, core.now_s) == (2, "participations", 107.0)


@pytest.mark.parametrize("dropped", [True, False])
def test_a_run_ends_if_arrivals_find_only_clients_that_wait_for_a_dropped_one(dropped: bool) -> None:
    """Regression: the run continued for 100,000 arrivals."""
    rate: dict[str, Any] = {"arrival_process": "constant", "arrival_rate_per_s": 1.0}
    strategy = FedBuff(buffer_size=3, restart="after-step", **rate)
    core = Core(strategy, fleet(3), 0, experiment.Stop(versions=9), deaths=Deaths("drop"))
    gone: Died | Left = Died(2, 0.5, "signal 9") if dropped else Left(2, 0.5, "offline")
    if not dropped:
        with pytest.raises(RunError, match="the run did not stop within 500 events"):
            run_in_memory(core, [0.5] * 3, events=[gone], max_events=500)
        return
    run_in_memory(core, [0.5] * 3, events=[gone], max_events=500)
    left = "too few clients are left: 2 of 3"
    assert (core.version, core.stopped, core.now_s) == (0, left, 102.0)


def test_arriving_clients_are_drawn_uniformly_from_the_idle_ones() -> None:
    _, result = run(20, 3000, [1.0] * 20, arrival_process="poisson", arrival_rate_per_s=5.0)
    counts = np.bincount(list(result.owners.values()), minlength=20)
    expected = counts.sum() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # χ² with 19 degrees of freedom, 0.1%


@pytest.mark.parametrize("limit", [{"concurrency": 3}, {}])
def test_an_arrival_without_a_free_place_is_lost(limit: dict[str, int]) -> None:
    """By Erlang's formula, 3 servers lose the share B(3, 3) = 0.346 of Poisson arrivals at 3 erlangs."""
    clients = 30 if limit else 3  # the limit is reached, or no client is idle
    fields = {"arrival_process": "poisson", "arrival_rate_per_s": 3.0, **limit}
    _, result = run(clients, 4_000, [1.0] * clients, **fields)
    came = sum(type(event).__name__ == "Ticked" for event in result.events)
    assert 1 - len(starts(result)) / came == pytest.approx(0.346, abs=0.02)


@pytest.mark.parametrize(("ends_s", "start"), [(9.5, 0), (9.0, 1)])
def test_arrivals_during_an_exchange_of_secure_aggregation_are_lost(ends_s: float, start: int) -> None:
    """An arrival when the exchange ends is not lost. Mutant: all arrivals during the exchange start then."""
    strategy = FedBuff(buffer_size=1, arrival_process="constant", arrival_rate_per_s=1.0)
    core = Core(strategy, fleet(20), 0, experiment.Stop(versions=9))
    for client in range(20):
        core.handle(Joined(client, 0.0))
    (first,) = (action for action in core.handle(Ticked(1.0)) if isinstance(action, Train))
    core.handle(Arrived(first.client, first.task, 0, 1, 1, 0.0, 1.5))
    core.handle(Unmasking(1, 1.5, ends_s))
    done = [*core.handle(Ticked(5.0)), *core.handle(Ticked(ends_s)), *core.handle(Summed(1, ends_s))]
    assert sum(isinstance(action, Train) for action in done) == start
    assert sum(isinstance(action, Train) for action in core.handle(Ticked(10.0))) == 1


def test_the_same_seed_gives_the_same_arrivals() -> None:
    fields = {"arrival_process": "poisson", "arrival_rate_per_s": 2.0}
    first, second = (starts(run(9, 200, [3.0] * 9, **fields)[1]) for _ in range(2))
    assert first == second
    other = Schedule(Arrivals("poisson", 2.0), np.random.default_rng(9))
    assert other.next_s != first[0]


def test_no_client_starts_before_the_next_arrival() -> None:
    strategy = FedBuff(buffer_size=2, arrival_process="constant", arrival_rate_per_s=0.5)
    core = Core(strategy, fleet(3), 0, experiment.Stop())
    actions = [action for client in range(3) for action in core.handle(Joined(client, 0.0))]
    assert [action for action in actions if isinstance(action, Train | Wake)] == [Wake(2.0)]
    wake, train = core.handle(Ticked(2.0))
    assert wake == Wake(4.0)
    assert isinstance(train, Train)
    assert core.openings == 1


def test_nobody_arrives_while_no_client_is_connected() -> None:
    strategy = FedBuff(buffer_size=1, arrival_process="constant", arrival_rate_per_s=0.5)
    core = Core(strategy, fleet(1), 0, experiment.Stop(emulated_s=99.0))
    assert Wake(2.0) in core.handle(Joined(0, 0.0))
    assert core.awaits
    core.handle(Left(0, 1.0, "died"))
    assert core.handle(Ticked(2.0)) == []
    assert not core.awaits
    assert core.handle(Joined(0, 5.0)) == [Wake(6.0)]  # the arrival due at 4 s is omitted


def test_a_rate_and_a_process_are_given_together() -> None:
    rate = {"arrival_rate_per_s": 2.0}
    for fields in ({"arrival_process": "constant"}, rate, {"arrival_process": "as-needed"} | rate):
        with pytest.raises(ConfigError, match=r"^strategy\.arrival_rate_per_s must be given with arrival_"):
            FedBuff(**fields).check(20)


def test_a_rate_above_a_million_per_second_is_refused() -> None:
    fields = {"name": "fedbuff", "arrival_process": "constant"}
    resolve({**fields, "arrival_rate_per_s": 1e6})
    with pytest.raises(ConfigError, match=r"strategy\.arrival_rate_per_s.* 1e\+06, got 1000000000\.0$"):
        resolve({**fields, "arrival_rate_per_s": 1e9})


def test_a_strategy_that_starts_more_clients_than_arrived_is_named() -> None:
    class Hasty(FedBuff):
        def assign(self, state: Any, view: View) -> Sequence[int]:
            return view.idle

    core = Core(Hasty(arrival_process="constant", arrival_rate_per_s=1.0), fleet(2), 0, experiment.Stop())
    core.handle(Joined(0, 0.0))
    core.handle(Joined(1, 0.0))
    with pytest.raises(RunError) as caught:
        core.handle(Ticked(1.0))
    assert str(caught.value) == "strategy Hasty.assign must return at most 1 clients now, got 2"
