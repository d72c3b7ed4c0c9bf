"""Tests of algorithms from the papers' related work, beyond the cases of `test_oracle_optimizer`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import Arrived, Joined, Left, Release, Sum, Summed, Ticked, Train
from edgefl.strategies import Client, Update
from edgefl.strategies.aso_fed import ASOFed
from edgefl.strategies.asyncfeded import AsyncFedED
from edgefl.strategies.base import Strategy
from edgefl.strategies.ca2fl import CA2FL
from edgefl.strategies.fedat import FedAT
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedfix import FedFix
from edgefl.strategies.mifa import MIFA
from edgefl.strategies.pisces import Pisces, TripStatistics
from edgefl.strategies.quafl import QuAFL
from edgefl.strategies.safa import SAFA
from edgefl.testing import MemoryRun, Vector, fleet, run_in_memory


def test_fedfix_gives_each_client_its_importance_per_sum_in_expectation() -> None:
    """The total weight d_i of a client's updates, divided by the number of intervals, tends to p_i if the
    durations of trips are random."""
    rng = np.random.default_rng(2)
    devices = [Client(i, "a", examples) for i, examples in enumerate((10, 30, 60))]
    core = Core(FedFix(interval_s=1.0), devices, 0, experiment.Stop(versions=1_000))
    run = run_in_memory(core, lambda client, trip: float(rng.uniform(0.1, 1.0 + 4.0 * client)))
    intervals = run.history[-1][0].at_s
    assert core.applied_weight / intervals == pytest.approx([0.1, 0.3, 0.6], rel=4e-3)


def test_fedfix_skips_an_interval_without_arrivals() -> None:
    core = Core(FedFix(interval_s=1.0), fleet(2), 0, experiment.Stop(versions=2))
    run = run_in_memory(core, [2.5, 3.5])
    assert [(order.tasks, order.weights) for order, _ in run.sums] == [((0,), (1.5,)), ((1,), (2.0,))]


def test_fedfix_counts_a_clients_intervals_from_the_one_in_which_it_joined() -> None:
    core = Core(FedFix(interval_s=2.0), fleet(1), 0, experiment.Stop())
    core.handle(Joined(0, 0.0))
    core.handle(Left(0, 3.0, "died"))
    (train, *_) = core.handle(Joined(0, 5.0))
    core.handle(Ticked(6.0))
    assert core.handle(Arrived(0, train.task, 0, 100, 1, 0.0, 7.0)) == []
    assert core.handle(Ticked(8.0)) == [Sum(1, (train.task,), (2.0,))]


def test_fedfix_sums_the_arrivals_of_an_interval_even_if_its_timer_is_late() -> None:
    core = Core(FedFix(interval_s=2.0), fleet(2), 0, experiment.Stop())
    actions = [action for client in range(2) for action in core.handle(Joined(client, 0.0))]
    first, second = (action.task for action in actions if isinstance(action, Train))
    assert core.handle(Arrived(0, first, 0, 100, 1, 0.0, 1.0)) == []
    assert core.handle(Arrived(1, second, 0, 100, 1, 0.0, 2.5)) == [Sum(1, (first,), (0.5,))]


def test_asyncfeded_adapts_local_steps_to_the_target_within_bounds() -> None:
    strategy = AsyncFedED(target=2.0, kappa=2.0, max_growth=3.0)
    devices = [Client(0, "a", 100, 4)]
    state, core = strategy.begin(devices), Core(strategy, devices, 0, experiment.Stop())

    def after(norm: float, distance: float) -> int:
        strategy.arrive(state, Update(0, 0, 0, 0, 100, 4, 0.0, 0.0, norm, distance), core)
        return state[0]

    assert after(2.0, 3.0) == 5  # 4 + ⌊(2 − 1.5)·2⌋
    assert after(2.0, 4.5) == 4  # 5 + ⌊(2 − 2.25)·2⌋
    assert after(1.0, 0.0) == 8
    assert after(0.0, 0.0) == 12  # three times the initial four
    assert after(1.0, 0.0) == 12
    assert after(0.0, 1.0) == 1  # γ of an update of norm 0 is infinite
    assert strategy.rate(0.0, 1.0) == 0.0


def test_asyncfeded_drops_an_update_that_is_not_finite_on_arrival() -> None:
    core = Core(AsyncFedED(), fleet(1), 0, experiment.Stop())
    (train,) = (action for action in core.handle(Joined(0, 0.0)) if isinstance(action, Train))
    actions = core.handle(Arrived(0, train.task, 0, 100, 1, 0.0, 1.0, math.inf, 0.0))
    assert actions[0] == Release(train.task, "dropped", "not finite or altered")
    assert trained(actions) == [0]


def test_mifa_uses_the_last_update_of_an_absent_client() -> None:
    events = [Left(1, 5.0, "died"), Joined(1, 7.5)]
    core = Core(MIFA(), fleet(3), 0, experiment.Stop(versions=4))
    run = run_in_memory(core, [1.0, 2.0, 3.0], events=events)
    used = [[(one.client, one.base_version) for one in updates] for _, updates in run.sums]
    assert used[0] == [(0, 0), (1, 0), (2, 0)]  # 3 s
    assert used[1] == [(0, 1), (1, 0), (2, 1)]  # 6 s: client 1 left
    assert used[2] == [(0, 2), (1, 0), (2, 2)]  # 9 s: client 1 joined after the round's start
    assert used[3] == [(0, 3), (1, 3), (2, 3)]
    assert all(order.weights == (1 / 3,) * 3 for order, _ in run.sums)
    assert run.fates[0] == "applied", "a replaced update keeps its fate"


def test_mifa_keeps_a_clients_last_valid_update_if_its_next_one_is_not_finite() -> None:
    def train(client: int, model: Vector, trip: int) -> Vector:
        return np.full_like(model, np.nan) if (client, trip) == (2, 1) else model + 10.0 * client + trip

    core = Core(MIFA(), fleet(3), 0, experiment.Stop(versions=3))
    run = run_in_memory(core, [1.0, 1.0, 1.0], train=train)
    steps = np.diff([float(model[0]) for model in run.models])
    assert steps == pytest.approx([(0 + 10 + 20) / 3, (1 + 11 + 20) / 3, (2 + 12 + 22) / 3])
    assert core.dropped == 1


@pytest.mark.parametrize("strategy", [MIFA(gather_s=5.0), FedAT(gather_s=5.0)])
def test_mifa_and_fedat_wait_for_the_fleet_but_at_most_gather_s(strategy: Strategy) -> None:
    core = Core(strategy, fleet(2), 0, experiment.Stop())
    assert trained(core.handle(Joined(1, 0.0))) == []
    assert trained(core.handle(Ticked(5.0))) == [1]


def test_ca2fl_has_the_steps_of_its_paper() -> None:
    """Compare random trips with the paper's equations for h_i, h and v."""
    rng = np.random.default_rng(4)
    core = Core(CA2FL(buffer_size=3), fleet(7), 0, experiment.Stop(versions=60))
    run = run_in_memory(core, lambda client, trip: float(rng.uniform(0.5, 1.0 + client)))
    last = np.zeros(7)
    for version, (_, updates) in enumerate(run.sums, start=1):
        made = [0.1 * (one.client - float(run.models[one.base_version][0])) for one in updates[:3]]
        v = last.mean() + sum(new - last[one.client] for new, one in zip(made, updates, strict=False)) / 3
        for new, one in zip(made, updates, strict=False):
            last[one.client] = new
        assert float(run.models[version][0] - run.models[version - 1][0]) == pytest.approx(v, abs=1e-12)


@pytest.mark.parametrize(
    ("limit_s", "lag", "size"),
    [(None, 99, 3), (2.5, 99, 3), (None, 1, 3), (0.8, 2, 3), (None, 1, 1), (None, 0, 2), (None, 2, 1)],
)
def test_safa_has_the_models_of_its_paper(limit_s: float | None, lag: int, size: int) -> None:
    """Compare with an oracle for the paper's cache, picked clients and bypass.

    A client that has just delivered keeps its cache entry, however stale its base version was.
    """
    rng, examples = np.random.default_rng(6), np.array([10.0, 20.0, 30.0, 5.0, 15.0, 40.0])
    devices = [Client(i, "a", int(count)) for i, count in enumerate(examples)]
    strategy = SAFA(participants=size, lag_tolerance=lag, round_limit_s=limit_s)
    core = Core(strategy, devices, 0, experiment.Stop(versions=80))
    start, rate = np.array([7.0]), 1.0 + 2.0 * np.arange(6)
    run = run_in_memory(core, lambda client, trip: float(rng.uniform(0.5, rate[client])), model=start)
    cache, picked = dict[int, float](), set[int]()
    bypassed, given, arrived = dict[int, float](), [0] * 6, list[Arrived]()
    kept_at_limit = 0
    for event, actions in run.history:
        if isinstance(event, Summed):
            for k in (*picked, *bypassed):
                kept_at_limit += k in picked and event.version - given[k] == lag + 1
                given[k] = event.version
            cache = {k: model for k, model in cache.items() if event.version - given[k] <= lag}
        for action in actions:
            if isinstance(action, Train):
                given[action.client] = action.version
        released = [action.task for action in actions if isinstance(action, Release)]
        if isinstance(event, Arrived) and event.task not in released:
            arrived.append(event)
        for order in (action for action in actions if isinstance(action, Sum)):
            first = [one for one in arrived if one.client not in picked]
            ordered = first + [one for one in arrived if one.client in picked]
            cache |= bypassed | {one.client: model_after(run, one) for one in ordered[:size]}
            entries = [cache.get(k, float(run.models[order.version - 1][0])) for k in range(6)]
            made = float(run.models[order.version][0])
            assert made == pytest.approx(np.array(entries) @ examples / examples.sum(), abs=1e-9)
            picked = {one.client for one in ordered[:size]}
            bypassed = {one.client: model_after(run, one) for one in ordered[size:]}
            arrived = []
    assert sum(fate == "applied" for fate in run.fates.values()) > 60
    assert lag == 99 or kept_at_limit > 0


def model_after(run: MemoryRun, event: Arrived) -> float:
    start = float(run.models[event.base_version][0])
    return start + 0.1 * (event.client - start)


@pytest.mark.parametrize(("tiers", "cohort"), [(1, 9), (2, 9), (3, 2), (3, 1), (7, 1)])
def test_fedat_mixes_the_models_of_its_tiers_last_rounds(tiers: int, cohort: int) -> None:
    """Compare with an oracle for each tier's members, models and number of rounds."""
    rng, examples = np.random.default_rng(5), (10, 20, 30, 5, 15, 40, 25)
    latency_s = [3.0, 1.0, 9.0, 0.5, 6.0, 2.0, 4.0]
    devices = [Client(i, "a", examples[i], 1, 0.0, latency_s[i]) for i in range(7)]
    core = Core(FedAT(tiers=tiers, cohort=cohort), devices, 0, experiment.Stop(versions=90))
    run = run_in_memory(core, lambda client, trip: latency_s[client] * float(rng.uniform(0.8, 1.5)), lr=0.1)
    by_speed = np.argsort(latency_s)
    members = [set(part.tolist()) for part in np.array_split(by_speed, tiers)]
    tier_of = {client: tier for tier, part in enumerate(members) for client in part}
    waits_for, arrived = [set[int]() for _ in range(tiers)], [dict[int, float]() for _ in range(tiers)]
    models, rounds = [dict[int, float]() for _ in range(tiers)], [0] * tiers
    complete: list[int] = []
    for event, actions in run.history:
        if isinstance(event, Arrived):
            tier = tier_of[event.client]
            waits_for[tier].remove(event.client)
            arrived[tier][event.client] = model_after(run, event)
            if not waits_for[tier]:
                complete.append(tier)
        for action in actions:
            if isinstance(action, Sum):
                tier = complete.pop(0)
                models[tier], arrived[tier] = arrived[tier], {}
                rounds[tier] += 1
                before, expected = float(run.models[action.version - 1][0]), 0.0
                for number, own in enumerate(models):
                    share = rounds[tiers - 1 - number] / sum(rounds)
                    total = sum(examples[client] for client in own)
                    weighted = sum(model * examples[client] for client, model in own.items())
                    expected += share * (weighted / total if own else before)
                assert float(run.models[action.version][0]) == pytest.approx(expected, abs=1e-12)
            if isinstance(action, Train):
                waits_for[tier_of[action.client]].add(action.client)
        assert all(len(one) <= cohort for one in waits_for)
    assert all(rounds)
    assert tiers == 1 or rounds[0] > 2 * rounds[-1]


def test_a_round_of_fedat_ends_with_the_members_that_remain() -> None:
    core = Core(FedAT(tiers=1), fleet(3), 0, experiment.Stop())
    actions = [action for client in range(3) for action in core.handle(Joined(client, 0.0))]
    assert trained(actions) == [0, 1, 2]  # the last to join completes the fleet
    tasks = {action.client: action.task for action in actions if isinstance(action, Train)}
    core.handle(Left(1, 1.0, "died"))
    assert core.handle(Arrived(0, tasks[0], 0, 100, 1, 0.0, 2.0)) == []
    (order,) = core.handle(Arrived(2, tasks[2], 0, 100, 1, 0.0, 3.0))
    assert (order.tasks, order.weights) == ((tasks[0], tasks[2]), (0.5, 0.5))
    assert trained(core.handle(Summed(1, 3.0))) == [0, 2]


def test_safa_gives_the_newest_version_to_clients_beyond_the_lag_tolerance() -> None:
    core = Core(SAFA(participants=1, lag_tolerance=2), fleet(3), 0, experiment.Stop(versions=8))
    run = run_in_memory(core, [1.0, 1.2, 99.0])
    bases = [action.version for action in run.actions if isinstance(action, Train) and action.client == 2]
    assert bases == [0, 3, 6]
    assert "discarded" in run.fates.values()


def test_quafl_sums_without_absent_clients_and_updates_that_are_not_finite() -> None:
    core = Core(QuAFL(participants=2, interval_s=2.0), fleet(2), 0, experiment.Stop(versions=4))

    def train(client: int, model: Vector, trip: int) -> Vector:
        return np.full_like(model, np.nan) if (client, trip) == (1, 1) else model + 1.0

    run = run_in_memory(core, [1.0, 1.0], train=train, events=[Left(0, 5.0, "died"), Joined(0, 6.5)])
    clients = [[update.client for update in updates] for _, updates in run.sums]
    assert clients == [[0, 1], [0], [1], [0, 1]]


def test_aso_fed_has_the_models_of_its_paper() -> None:
    """Compare random trips with the paper's algorithms for the client and the server."""
    rng = np.random.default_rng(8)
    devices = [Client(i, "a", 10 * (i + 1)) for i in range(4)]
    strategy = ASOFed(lam=0.0, beta=0.3, dynamic_step=False)
    core = Core(strategy, devices, 0, experiment.Stop(versions=60))
    run = run_in_memory(core, lambda client, trip: float(rng.uniform(0.5, 2.0)))
    h, v, w = np.zeros(4), np.zeros(4), 0.0
    for version, (_, (update,)) in enumerate(run.sums, start=1):
        k, start = update.client, float(run.models[update.base_version][0])
        gradient = -0.1 * (k - start)
        w -= 10 * (k + 1) / 100 * (gradient - v[k] + h[k])
        h[k], v[k] = 0.3 * h[k] + 0.7 * v[k], gradient
        assert float(run.models[version][0]) == pytest.approx(w, abs=1e-12)


def trained(actions: Any) -> list[int]:
    return [action.client for action in actions if isinstance(action, Train)]


def test_pisces_starts_each_client_once_and_then_the_most_useful_one() -> None:
    losses = (1.0, 4.0, 2.0)
    core = Core(Pisces(concurrency=1, exploration=1.0, exploration_decay=1.0), fleet(3), 0, experiment.Stop())
    actions = [action for client in range(3) for action in core.handle(Joined(client, 0.0))]
    started = trained(actions)
    for turn in range(5):
        client = started[-1]
        task = core.task_of(client)
        assert task is not None
        base = core.trained_from(client)
        actions = core.handle(Arrived(client, task, base, 100, 1, losses[client], turn + 1.0))
        assert [type(action) for action in actions] == [Sum]  # nobody trains, so the sum need not wait
        started += trained(core.handle(Summed(core.version + 1, turn + 1.0)))
    assert sorted(started[:3]) == [0, 1, 2]
    assert started[0] == 0  # the first that joined
    assert started[3:] == [1, 1, 1]


def test_pisces_explores_with_a_probability_that_decays_to_its_minimum() -> None:
    """In the paper's code, the probability starts at 0.3 and is multiplied by 0.99 down to a minimum of 0.1.

    One client is started at a time; five of the six clients have no utility yet.
    """
    strategy, first = Pisces(concurrency=1), list[float]()
    for seed in range(400):
        view = IdleView(Core(strategy, fleet(6), seed, experiment.Stop()))
        state = strategy.begin(view.devices)
        state.utility[0] = 1.0
        (started,) = strategy.assign(state, view)  # type: ignore[arg-type]
        first.append(float(started != 0))
        assert state.exploration == pytest.approx(0.3 * 0.99)
    for _ in range(200):
        strategy.assign(state, view)  # type: ignore[arg-type]
    assert state.exploration == 0.1
    less = Pisces(concurrency=1, exploration=0.05, exploration_decay=1.0)  # below min_exploration
    state = less.begin(view.devices)
    state.utility[0] = 1.0
    less.assign(state, view)  # type: ignore[arg-type]
    assert state.exploration == 0.05
    assert np.mean(first) == pytest.approx(0.3, abs=0.07)


class IdleView:
    """A fleet whose clients are all idle."""

    def __init__(self, core: Core) -> None:
        self.devices, self.rng, self.idle = core.devices, core.rng, range(len(core.devices))
        self.held, self.training, self.openings, self.now_s = (), 0, len(core.devices), 0.0


def test_pisces_discounts_updates_by_the_clients_mean_staleness() -> None:
    """The weight is p_i · (E[τ_i] + 1)^−γ. E[τ_i] is the mean staleness on arrival of the client's last five
    updates."""
    strategies = (Pisces(weighting="uniform"), Pisces(weighting="uniform", staleness_discount=0.0))
    for strategy, factor in zip(strategies, (1.0, 0.0), strict=True):
        core = Core(strategy, fleet(4), 0, experiment.Stop(versions=40))
        run = run_in_memory(core, [1.0, 1.6, 4.3, 9.1])
        seen: dict[int, list[int]] = {}
        for order, updates in run.sums:
            for update, weight in zip(updates, order.weights, strict=True):
                seen.setdefault(update.client, []).append(update.staleness)
                mean = float(np.mean(seen[update.client][-5:]))
                assert weight == pytest.approx((mean + 1.0) ** (-0.5 * factor) / len(updates), rel=1e-12)
        assert max(update.staleness for _, updates in run.sums for update in updates) > 0


def test_pisces_utility_falls_with_the_mean_staleness_of_the_last_updates() -> None:
    strategy = Pisces(staleness_penalty=1.0, window=2, concurrency=2)
    state = strategy.begin(fleet(1))
    assert strategy.utility(100, 3.0, float(state.staleness.observe(0, 2.0))) == 100.0
    assert strategy.utility(100, 3.0, float(state.staleness.observe(0, 0.0))) == 150.0
    assert strategy.utility(100, 3.0, float(state.staleness.observe(0, 0.0))) == 300.0


@pytest.mark.parametrize("bound", [1, 3, 8])
def test_pisces_bounds_staleness_if_each_client_has_constant_durations(bound: int) -> None:
    """The durations are constant except that they decrease by a fraction of 1e-9 from trip to trip, so that
    no arrival coincides with a server step."""
    durations = [1.0, 1.3, 2.9, 7.7, 12.1]
    devices = [Client(i, "a", 100, 1, 0.0, 0.1 * s, 0.9 * s) for i, s in enumerate(durations)]
    core = Core(Pisces(staleness_bound=bound), devices, 0, experiment.Stop(versions=150))
    run = run_in_memory(core, lambda client, trip: durations[client] * (1 - 1e-9 * (trip + 1)))
    assert all(update.staleness <= bound for _, updates in run.sums for update in updates)
    assert max(update.staleness for _, updates in run.sums for update in updates) >= math.ceil(bound / 2)


@pytest.mark.parametrize(
    ("strategy", "clients", "happens"),
    [
        (SAFA(participants=1), 3, [0, (1, ()), 0, 1, (2, ()), 2, (3, (3,)), 0]),
        (CA2FL(buffer_size=1), 2, [0, (1, ()), 1, (2, (0,)), (2, ())]),
    ],
    ids=["safa", "ca2fl"],
)
def test_a_bad_model_in_the_cache_is_dropped(strategy: Strategy, clients: int, happens: list[Any]) -> None:
    """A cached model may be added to a sum several rounds after it arrived."""
    core = Core(strategy, fleet(clients), 0, experiment.Stop())
    for client in range(clients):
        core.handle(Joined(client, 0.0))
    for at_s, event in enumerate(happens, 1):
        if isinstance(event, int):
            task = core.task_of(event)
            assert task is not None
            core.handle(Arrived(event, task, core.trained_from(event), 100, 1, 0.5, float(at_s)))
        else:
            version, bad = event
            core.handle(Summed(version, float(at_s), bad))
    assert core.dropped == 1


@pytest.mark.parametrize(("credits", "excluded"), [(3, [0]), (9, []), (None, [])])
def test_pisces_excludes_clients_that_are_often_outliers(credits: int | None, excluded: list[int]) -> None:
    """Client 0's losses are outliers 5 times, in pools of the clients' recent losses. That is too often for 3
    credits, but not for 9."""
    strategy = Pisces(concurrency=4, credits=credits, outlier_window=2)
    devices = fleet(6)
    state, core = strategy.begin(devices), Core(strategy, devices, 0, experiment.Stop())
    state.begun_s.update(dict.fromkeys(range(6), 0.0))

    def arrive(client: int, version: int, loss: float) -> None:
        strategy.arrive(state, Update(0, client, version, 0, 100, 1, loss, 1.0, 0.0, 0.0), core)

    for client, loss in enumerate((9.0, 2.0, 2.2)):  # three losses are too few
        arrive(client, 0, loss)
    assert state.outlying == {}
    for client, loss in ((3, 1.9), (4, 2.4), (5, 2.3)):
        arrive(client, 1, loss)
    assert state.outlying == ({0: 3} if credits else {})
    for client in (1, 2, 3):  # version 0, with client 0's loss, is out of the window
        arrive(client, 2, 2.0)
    assert state.outlying == ({0: 3} if credits else {})
    for client in (0, 4):  # three large enough pools have client 0's loss now
        arrive(client, 2, 9.0 if client == 0 else 2.1)
    assert state.outlying == ({0: 5} if credits else {})
    assert [client for client in range(6) if strategy.excludes(state, client)] == excluded
    view = IdleView(core)
    view.openings, strategy = 6, Pisces(concurrency=6, credits=credits)
    assert sorted(strategy.assign(state, view)) == [i for i in range(6) if i not in excluded]  # type: ignore[arg-type]


def test_pisces_forgets_losses_outside_all_pools() -> None:
    states: list[TripStatistics] = []

    class Watched(Pisces):
        def begin(self, devices: Sequence[Client]) -> TripStatistics:
            states.append(super().begin(devices))
            return states[0]

    core = Core(Watched(credits=5, outlier_window=3), fleet(4), 0, experiment.Stop(versions=60))
    run_in_memory(core, [1.0, 1.6, 4.3, 9.1])
    assert 0 < len(states[0].losses) < 12


def test_pisces_without_losses_starts_all_clients_about_equally_often() -> None:
    core, started = Core(Pisces(concurrency=2), fleet(6), 0, experiment.Stop(trips=150)), [0] * 6
    actions = [action for client in range(6) for action in core.handle(Joined(client, 0.0))]
    running: list[Train] = []
    at_s = 0.0
    while core.stopped is None:
        for action in actions:
            if isinstance(action, Train):
                running.append(action)
                started[action.client] += 1
        if sums := [action.version for action in actions if isinstance(action, Sum)]:
            actions = core.handle(Summed(sums[0], at_s))
        else:
            train, at_s = running.pop(0), at_s + 1.0
            actions = core.handle(Arrived(train.client, train.task, train.version, 100, 1, math.nan, at_s))
    assert max(started) - min(started) < 20


def test_pisces_ranks_losses_even_if_some_are_nan() -> None:
    strategy = Pisces(concurrency=1)
    state = strategy.begin(fleet(5))
    core = Core(strategy, fleet(5), 0, experiment.Stop())
    state.begun_s.update(dict.fromkeys(range(5), 0.0))
    for client, loss in enumerate((math.nan, 5.0, math.nan, 9.0, 1.0)):
        strategy.arrive(state, Update(client, client, 0, 0, 100, 1, loss, 1.0, 0.0, 0.0), core)
    assert sorted(state.utility, key=lambda client: -state.utility[client]) == [3, 1, 4]


def test_fedbuff_averages_updates_without_examples() -> None:
    strategy = FedBuff(buffer_size=2, weighting="examples")
    updates = [Update(client, client, 0, 0, 0, 1, 0.0, 1.0, 0.0, 0.0) for client in range(2)]
    assert strategy.weights(None, updates, Core(strategy, fleet(2), 0, experiment.Stop())) == [0.5, 0.5]
