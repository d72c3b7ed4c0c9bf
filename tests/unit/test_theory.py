"""Tests of `edgefl reproduce theory` and of the strategies' weights against the papers' theorems."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from theory_mutants import MUTANTS

from benchmarks import strategic
from edgefl import RunError, experiment
from edgefl.core import Core
from edgefl.core.events import Arrived, Sum
from edgefl.devices.schema import Delay
from edgefl.lab import convergence, delays, theory, unbounded
from edgefl.lab.convergence import Ratio, composition, weight_bounds
from edgefl.lab.influence import Outcome, simulate, staleness_by_buffer
from edgefl.lab.logistic import Logistic
from edgefl.lab.quadratic import Expected, Quadratic, descend
from edgefl.strategies import Step, Strategy, Update, resolve
from edgefl.strategies.fedasync import FedAsync
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import Vector, fleet, run_in_memory

FAST, SLOW = slice(10), slice(10, 15)
RATES = np.array([1 / 1.5] * 10 + [1 / 10] * 5)
SETTING: dict[str, Any] = {"buffer_size": 5, "restart": "new-version"}
FEWER = settings(max_examples=settings.default.max_examples // 4)


def outcome(strategy: Strategy) -> Outcome:
    return simulate(strategy, 500, seed=7)


@settings(max_examples=15)
@given(times=st.lists(st.integers(1, 50), min_size=3, max_size=8), size=st.integers(2, 8))
def test_a_buffer_divides_staleness_by_its_size(times: list[int], size: int) -> None:
    """With a buffer of K updates, each trip's staleness is τ_K ≤ ⌈τ_1/K⌉. So the bound also holds for the
    largest and the mean staleness (FedBuff, appendix A)."""
    size = min(size, len(times))
    delays = [Delay(dist="list", values_s=(float(time), time + 0.5)) for time in times]
    found = staleness_by_buffer(delays, [1, size], trips=20 * len(times))
    assert len(found[1].staleness) == len(found[size].staleness) > 10 * len(times)
    assert (found[size].staleness <= -(-found[1].staleness // size)).all()


def test_fedstaleweight_halves_the_unfairness_of_fedbuff_and_its_running_form_removes_it() -> None:
    """A client's share of all applied weight, times the number n of clients, is fair if it is 1 (eq. 3)."""
    plain = outcome(FedBuff(exponent=0.0, **SETTING))
    buff = outcome(FedBuff(**SETTING))
    stale = outcome(FedStaleWeight(**SETTING))
    running = outcome(FedStaleWeight(normalize="running", **SETTING))
    assert len({found.emulated_s for found in (plain, buff, stale, running)}) == 1  # the same arrivals
    assert plain.share == pytest.approx(RATES / RATES.sum() * 15, rel=0.08)
    for share, fast, slow in (
        (plain.share, 1.40, 0.21),
        (stale.share, 1.20, 0.60),
        (running.share, 1.01, 0.98),
    ):
        assert share.sum() == pytest.approx(15.0)
        assert share[FAST].mean() == pytest.approx(fast, abs=0.03)
        assert share[SLOW].mean() == pytest.approx(slow, abs=0.03)
    unfairness = [np.abs(found.share - 1).mean() for found in (buff, plain, stale, running)]
    assert unfairness == sorted(unfairness, reverse=True)
    assert unfairness[2] < 0.52 * unfairness[1]
    assert unfairness[3] < 0.1 * unfairness[1]


@pytest.mark.parametrize(
    ("restart", "fair", "crossed", "versions"),
    [
        ("after-step", "algorithm-1", (0.866, 1.281), 1000),
        pytest.param("immediate", "derivation", (1.087, 0.837), 2000, marks=pytest.mark.slow),
        ("new-version", "derivation", (1.087, 0.839), 2000),
    ],
)
def test_only_the_form_for_the_restart_rule_is_fair(
    restart: Any, fair: Any, crossed: tuple[float, float], versions: int
) -> None:
    """In the paper's fleet, each client's weight, times n and without normalisation per buffer, must be 1."""
    other: Any = "derivation" if fair == "algorithm-1" else "algorithm-1"
    fields: dict[str, Any] = {"buffer_size": 5, "restart": restart, "normalize": "running", "max_step": 1e9}
    seen = {
        form: simulate(FedStaleWeight(form=form, **fields), versions, skip=versions // 4).applied()
        for form in ("by-restart", other)
    }
    assert np.abs(seen["by-restart"] - 1.0).max() < 0.025
    groups = {form: (found[FAST].mean(), found[SLOW].mean()) for form, found in seen.items()}
    assert groups["by-restart"] == pytest.approx((1.0, 1.0), abs=0.01)
    assert groups[other] == pytest.approx(crossed, abs=0.01)
    forms: tuple[Any, ...] = ("by-restart", fair, other)
    remarks = {form: FedStaleWeight(restart=restart, form=form).remark for form in forms}
    assert remarks["by-restart"] == remarks[fair] == ""
    assert "\n" not in remarks[other]
    assert all(f'"{word}"' in remarks[other] for word in (restart, fair, other))


@pytest.mark.parametrize(
    "limit", [{"concurrency": 6}, {"arrival_process": "constant", "arrival_rate_per_s": 1.0}]
)
def test_weights_are_not_fair_if_clients_wait_to_be_drawn_and_a_line_says_so(limit: dict[str, Any]) -> None:
    """Staleness does not include the time in which clients wait, so slow clients are overcompensated."""
    strategy = FedStaleWeight(buffer_size=5, normalize="running", max_step=1e9, **limit)
    found = simulate(strategy, 1500, skip=300).applied()
    assert found[SLOW].mean() > 1.1 > 0.95 > found[FAST].mean()
    assert "assumes that no client waits to be drawn" in strategy.remark
    assert "\n" not in strategy.remark


PROBLEM = Quadratic(4, smoothness=0.5, variance=2.0, distance=3.0, spread=0.25)


def test_the_quadratics_constants_equal_those_computed_from_its_definition() -> None:
    """Client i's objective is f_i(w) = L/2 ‖w − c_i‖²."""
    centres, start = PROBLEM.centres(), PROBLEM.start()
    least = centres.mean(axis=0)

    def value(w: Vector) -> float:
        return float(np.mean([PROBLEM.smoothness / 2 * np.sum((w - centre) ** 2) for centre in centres]))

    assert value(start) - value(least) == pytest.approx(PROBLEM.gap)
    gradients = PROBLEM.smoothness * (start - centres)
    apart = np.sum((gradients - gradients.mean(axis=0)) ** 2, axis=1)
    assert apart == pytest.approx([PROBLEM.diversity] * 4)  # γ², and each client's own
    assert np.linalg.norm(start - least) == pytest.approx(PROBLEM.distance)


def test_a_skewed_population_has_the_same_mean_diversity_but_one_client_has_all_of_it() -> None:
    for skewed in (False, True):
        problem = PROBLEM._replace(skewed=skewed)
        centres = problem.centres()
        apart = PROBLEM.smoothness**2 * np.sum((centres - centres.mean(axis=0)) ** 2, axis=1)
        assert apart.mean() == pytest.approx(problem.diversity) == PROBLEM.diversity
        assert apart.max() == pytest.approx(problem.largest_diversity)
    assert problem.largest_diversity == 3 * PROBLEM.diversity


def test_the_noise_of_a_trip_is_in_inverse_proportion_to_the_batch() -> None:
    problem = Quadratic(2, distance=0.0, batches=(1, 16))
    squares = []
    for each in (problem, problem._replace(batches=())):
        run = descend(each, FedBuff(buffer_size=1, exponent=0.0), 400, rate=0.01, seed=2)
        squares.append(np.sort(np.sum(np.diff(run.models, axis=0) ** 2, axis=1)))
    assert np.median(squares[0][:150]) * 16 == pytest.approx(np.median(squares[0][-150:]), rel=0.2)
    assert np.median(squares[1]) == pytest.approx(0.01**2, rel=0.2)


def test_the_logistic_regressions_constants_bound_its_losses_gradients_and_curvature() -> None:
    problem = Logistic(3, 20, 4, 0.5)
    of, rng = problem.constants(), np.random.default_rng(0)
    assert problem.gradient(problem.optimum) == pytest.approx(np.zeros(4), abs=1e-12)
    for size in (0.1, 1.0, 10.0):
        w, step = size * rng.normal(size=4), 1e-6 * rng.normal(size=4)
        each = problem.each(w)
        by_client, whole = each.mean(axis=1), problem.gradient(w)
        numeric = problem.losses(w + step) - problem.losses(w - step)
        assert numeric == pytest.approx(2 * by_client @ step, rel=1e-4, abs=1e-12)
        assert 2 * problem.hessian(w) @ step == pytest.approx(
            problem.gradient(w + step) - problem.gradient(w - step), rel=1e-3, abs=1e-12
        )
        spread = ((each - by_client[:, None]) ** 2).sum(axis=2).mean(axis=1)
        assert spread.max() <= of.variance
        assert ((by_client - whole) ** 2).sum(axis=1).mean() <= of.diversity
        assert np.linalg.eigvalsh(problem.hessian(w)).max() <= of.smoothness
    assert of.gap == pytest.approx(
        float(np.mean(problem.losses(np.zeros(4)) - problem.losses(problem.optimum)))
    )


def test_a_run_on_the_quadratic_is_deterministic_and_makes_the_steps_of_its_strategy() -> None:
    first, again = (
        descend(PROBLEM, FedBuff(buffer_size=2, exponent=0.0), 50, rate=0.1, steps=2, seed=3)
        for _ in range(2)
    )
    assert (first.models == again.models).all()
    assert first.models.shape == (51, 513 + 4)
    fresh = descend(PROBLEM, FedBuff(buffer_size=4, restart="new-version"), 3, rate=0.1, steps=2)
    expected = 3.0 * 0.95 ** (2 * np.arange(4))  # each version uses four updates of staleness 0
    assert fresh.models[:, 0] == pytest.approx(expected)
    assert fresh.staleness == 0
    assert fresh.shares() == pytest.approx(np.ones(4))


def test_the_prediction_for_one_version_is_the_one_worked_out_by_hand() -> None:
    """The means are over versions 0 and 1. A version has a step of ½ and averages two updates."""
    made = Expected(Quadratic(4, variance=2.0, distance=3.0, spread=1.0), 2, 0.5, concentration=0.5)
    assert made.step == 0.5
    assert made.descent() == pytest.approx((9.0 + 9.0 / 4) / 2)
    assert made.floor() == pytest.approx(0.5**2 * 2.0 * 0.5 / 2)
    assert made.sampling() == pytest.approx(0.5**2 * 12.0 * 0.5 / 2)


def test_bounds_equal_the_formulas_of_the_papers() -> None:
    run = descend(PROBLEM, FedBuff(buffer_size=2, exponent=0.0), 200, rate=0.01, seed=1)
    L, s, g, n, F = PROBLEM.smoothness, PROBLEM.variance, PROBLEM.diversity, 4, PROBLEM.gap
    T, tau, Q, G = 200, run.staleness, 3, float(run.squares.max())
    batched = PROBLEM._replace(batches=(2, 4, 8, 8))
    of = unbounded.constants(batched)
    assert of == (L, s / 2, g, F, n)
    of = unbounded.constants(PROBLEM)
    assert unbounded.gradient_bound(of, T, tau, Q) == pytest.approx(
        8 * L**0.5 * F / T**0.5
        + 16 * L**0.5 * (s + g) / T**0.5
        + 320 * L * (Q + 1) * (tau**2 + 1) * (s + n * g) / T
    )
    assert unbounded.least_versions(L, tau, Q) == math.ceil(160 * L * (Q + 7) * (tau + 1) ** 3)
    long, c, late = 10**6, 2.0, 3
    eta = 1 / (Q * (L * long) ** 0.5)
    phi = 8 * eta**2 * Q**2 * (1 + 2 * Q) * (1 + c**2) * (1 + 4 * eta * c * L)
    assert unbounded.scaled_bound(of, long, late, Q, c) == pytest.approx(
        8 * F / (eta * c * Q * long)
        + 16 * eta * c * Q * L * (s + g)
        + 8 * L**2 * (1 + late**2) * phi * (s + n * g)
    )
    assert unbounded.scaled_bound(of, 10, late, Q, c) == math.inf  # inequality 37 does not hold
    enough = unbounded.least_versions(L, late, Q)
    assert unbounded.scaled_bound(of, enough, late, Q, 1.0) <= unbounded.gradient_bound(of, enough, late, Q)
    assert convergence.fedbuff_bound(run, T, 0.01, Q, 2.0) == pytest.approx(
        2 * F / (2 * 0.01 * Q * T)
        + L / 2 * 0.02 * s
        + 3 * (L * Q * 0.01) ** 2 * (4 * tau**2 + 1) * (s + g + G)
    )
    b, low, high = 5, 1 / (4 * (5 * tau + 1) + 1), (5 * tau + 1) / (5 * (tau + 1))
    assert convergence.fedstaleweight_bound(run, T, 0.01, b) == pytest.approx(
        2 * F / (0.01 * T)
        + 12 * tau**2 * 0.01**2 * L**2 * ((b * tau + 1) / (tau + 1)) ** 2 * (s + g + G)
        + 12 * 0.01**2 * L**2 * (s + g + G)
        + 4 * b**2 * max((0.2 - low) ** 2, (0.2 - high) ** 2) * G
    )
    assert convergence.iid_bound(run, T, 8, Q, units=False) == pytest.approx(
        math.sqrt(128 * F / (8 * Q * T)) + 8 * L / (Q * T)
    )
    assert convergence.niid_bound(run, T, 8, Q, 0.7) == pytest.approx(
        math.sqrt(256 * F * (16 * s * L + 8 * L * 0.7 * Q) / (8 * Q * T))
        + (s + 8 * Q * g) * 8 * L**2 / ((4 * s * L + 2 * L * Q * 0.7) * Q * T)
    )


def test_a_ratio_agrees_if_its_mean_is_within_the_tolerance_despite_its_spread() -> None:
    assert Ratio("noise", [0.9, 1.12], 0.02).agrees
    assert not Ratio("noise", [1.05, 1.0], 0.02).agrees
    assert not Ratio("noise", [math.nan, 1.0], 0.02).agrees
    assert Ratio("noise", [0.99, 1.0, 1.01], 0.03).agrees
    assert not Ratio("noise", [0.9, 1.0, 1.1], 0.1).agrees  # ±0.25
    assert convergence.worst("rate", [[1.0, 0.7], [1.2, 0.9]], 0.1).ratios == [0.7, 0.9]


@pytest.mark.parametrize("size", [1, 3])
def test_the_composition_of_buffers_equals_that_of_independent_draws(size: int) -> None:
    rates, raw = (3.0, 1.0, 1.0), (1.0, 2.0, 5.0)
    made = composition(rates, size, raw)
    assert sum(made.shares) == pytest.approx(3.0)
    drawn = np.random.default_rng(0).choice(3, (20_000, size), p=np.array(rates) / 5.0)
    weights = np.array(raw)[drawn]
    weights /= weights.sum(axis=1, keepdims=True)
    assert made.shares == pytest.approx(np.bincount(drawn.ravel(), weights.ravel()) * 3 / 20_000, rel=0.03)
    assert made.concentration == pytest.approx(np.mean(np.sum(weights**2, axis=1)), rel=0.03)


def test_no_form_gives_slow_clients_more_weight_than_the_cap_allows() -> None:
    for slow_by in (1.0, 4.0):
        seen = theory.measure(2.0, slow_by, 150, (1,), churn=slow_by == 4.0)
        (most,), (plain,), (paid,) = seen.most, seen.running, seen.credit
        assert plain < paid <= most * (1 + 1e-9)
        assert seen.owed[0] > 0


STEPS = "doubled quartered keeps_one_of_four stretches_one_of_four has_momentum"
CAUGHT = {
    "staleness_over_k": "stale_by_one_more stale_by_one_less stale_in_seconds one_more_in_the_buffer "
    "waits_for_versions",
    "fixed_delay": "doubled quartered has_momentum discounts_more discounts_nothing stale_by_one_more "
    "stale_by_one_less one_more_in_the_buffer",
    "fedbuff": f"{STEPS} two_clients discounts_more one_more_in_the_buffer",
    "toghani_uribe": f"{STEPS} two_clients discounts_more one_more_in_the_buffer",
    "remark_1": f"{STEPS} two_clients one_more_in_the_buffer ignores_the_step_size",
    "remark_2": STEPS,
    "unequal_batches": f"{STEPS} two_clients one_more_in_the_buffer weights_by_batch",
    "not_uniform": "doubled quartered two_clients pays_slow_clients",
    "transfers": "stale_by_one_more stale_by_one_less one_more_in_the_buffer",
    "logistic": "doubled quartered keeps_one_of_four",
    "expected_staleness": "stale_by_one_more stale_by_one_less one_more_in_the_buffer",
    "waiting_staleness": "stale_by_one_more stale_by_one_less waits_for_versions restarts_at_once "
    "multiplies_by_b averages squares turns_round",
    "fair_influence": "doubled averages drops_b drops_one squares turns_round does_not_normalize "
    "stale_by_one_more",
    "normalized_influence": "doubled averages drops_b squares turns_round does_not_normalize "
    "stale_by_one_more",
    "credit_reaches_it": "forgets_credit pays_twice owes_everybody",
    "lr_normalization": "steps_in_full steps_by_the_root steps_by_the_square",
    "times": "selects_no_more one_fewer_at_once starts_the_first",
    "throttling": "averages squares turns_round restarts_at_once",
    "any_target": "averages squares turns_round forgets_targets squares_targets",
    "slowing_down": "averages squares turns_round stale_by_one_more",
    "fedstaleweight": f"{STEPS} two_clients averages squares turns_round does_not_normalize",
    "defedavg_iid": f"{STEPS} two_clients one_more_in_the_buffer",
    "delays_iid": "one_more_in_the_buffer waits_for_the_step",
    "delays_niid": "draws_without_replacement draws_the_first_half never_waits",
    "condition_13": f"{STEPS} two_clients",
    "condition_11": f"{STEPS} two_clients",
    "defedavg_niid": f"{STEPS} two_clients draws_without_replacement draws_the_first_half "
    "draws_the_last_half_as_often",
}
"""For each finding, the mutants in `theory_mutants` with which it must not be reproduced."""
REFUTED = {
    "fedbuff_as_printed": "doubled quartered has_momentum two_clients",
    "fedstaleweight_as_printed": STEPS,
    "defedavg_iid_as_printed": STEPS,
}
"""Bounds that do not hold as their papers print them, with the mutants that must not refute them."""
QUICK = "fixed_delay"
"""This finding takes seconds; the others are only tested by `make soak`."""
JUDGES = {judge.__name__: judge for judge in theory.FINDINGS}


def soaked(names: Iterable[str]) -> list[Any]:
    soak = (pytest.mark.slow, pytest.mark.timeout(900))
    return [name if name == QUICK else pytest.param(name, marks=soak) for name in names]


def test_every_finding_names_its_mutants() -> None:
    assert CAUGHT.keys() | REFUTED.keys() == JUDGES.keys()
    assert all((*CAUGHT.values(), *REFUTED.values()))


def mutated(name: str, mutants: str) -> Iterator[tuple[str, Any]]:
    """Yield each mutant and the finding that it gives, except for mutants that diverge."""
    for mutant in mutants.split():
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(RunError):
            MUTANTS[mutant](patch)
            yield mutant, JUDGES[name](True)


@pytest.mark.parametrize("name", soaked(CAUGHT))
def test_a_finding_is_reproduced_but_not_with_its_mutants(name: str) -> None:
    found = dict(mutated(name, CAUGHT[name]))
    assert {mutant: one.ours for mutant, one in found.items() if one.verdict != "not reproduced"} == {}
    assert JUDGES[name](True).verdict == "reproduced"  # after all mutants are undone


@pytest.mark.slow
@pytest.mark.parametrize("name", ["condition_11", "condition_13"])
def test_a_condition_on_the_step_is_not_reproduced_with_twice_the_measured_delay(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = delays.largest_delay
    monkeypatch.setattr(delays, "largest_delay", lambda *given: 2 * right(*given))
    assert JUDGES[name](True).verdict == "not reproduced"


@pytest.mark.parametrize("name", soaked(REFUTED))
def test_a_refuted_bound_is_exceeded_but_not_with_its_mutants(name: str) -> None:
    found = JUDGES[name](True)
    assert found.verdict == "not reproduced"
    assert float(found.ours.partition(" times the bound")[0]) > 1.0
    wrong = dict(mutated(name, REFUTED[name]))
    assert {mutant: one.ours for mutant, one in wrong.items() if one.verdict == "not reproduced"} == {}


@pytest.mark.parametrize(("staleness", "weight"), [(0, 0.6), (4, 0.6), (5, 0.6 / 3), (9, 0.6 / 11)])
def test_fedasyncs_hinge_weight_is_that_of_its_paper(staleness: int, weight: float) -> None:
    assert FedAsync(scaling="hinge", a=2.0).mixing(staleness) == pytest.approx(weight)


def weights_after(strategy: FedStaleWeight, observed: Sequence[Sequence[int]]) -> list[float]:
    """Return the weights of a buffer with the last update of each client, after all updates have arrived.
    ``observed`` has the staleness of each client's updates."""
    devices = fleet(len(observed))
    core = Core(strategy, devices, 0, experiment.Stop())
    state = strategy.begin(devices)
    buffer = []
    for client, values in enumerate(observed):
        for staleness in values:
            update = Update(0, client, 0, staleness, 1, 1, 0.0, 0.0)
            strategy.arrive(state, update, core)
        buffer.append(update)
    return list(strategy.weights(state, buffer, core))


@pytest.mark.parametrize(
    ("average", "mean"),
    [("window", 5.0), ("cumulative", 4.0), ("exponential", 0.5 * (0.5 * 2 + 0.5 * 4) + 0.5 * 6)],
)
def test_weights_follow_the_chosen_moving_average(average: Any, mean: float) -> None:
    strategy = FedStaleWeight(buffer_size=2, form="derivation", average=average, window=2, decay=0.5)
    raw = 2 * mean + 1
    assert weights_after(strategy, [[2, 4, 6], [0]]) == pytest.approx([raw / (raw + 1), 1 / (raw + 1)])


def test_the_staleness_of_a_discarded_update_is_not_observed() -> None:
    strategy = FedStaleWeight(buffer_size=2, max_staleness=3)
    assert weights_after(strategy, [[50], [0]]) == [0.5, 0.5]


def test_defedavg_niid_averages_the_newest_update_of_a_uniform_sample() -> None:
    strategy = resolve({"name": "defedavg-niid", "participants": 4, "takes": "newest"})
    core = Core(strategy, fleet(6), 0, experiment.Stop(versions=400))
    run = run_in_memory(core, [1.0, 1.0, 2.0, 3.0, 5.0, 8.0], train=lambda client, model, trip: model + 1.0)
    newest: dict[int, int] = {}
    steps = iter(run.sums)
    for event, actions in run.history:
        if isinstance(event, Arrived):
            newest[event.client] = event.task
        if any(isinstance(action, Sum) for action in actions):
            order, updates = next(steps)
            assert [newest[update.client] for update in updates] == list(order.tasks)
            multiples = np.array(order.weights) * 4
            # A client that is drawn twice counts twice.
            assert multiples == pytest.approx(np.round(multiples))
            assert sum(order.weights) == pytest.approx(1.0)
    assert [float(model[0]) for model in run.models] == pytest.approx(np.arange(401.0))
    share = core.applied_weight / core.applied_weight.sum()
    assert share == pytest.approx(np.full(6, 1 / 6), rel=0.15)  # also of slow clients
    assert core.discarded > 0  # updates that a newer one replaced


BUFFERS = st.lists(st.integers(0, 10_000), min_size=2, max_size=40)


def weights_of(strategy: FedStaleWeight, staleness: Sequence[int]) -> list[float]:
    """Return the weights of a buffer with one update of each client, which has the given staleness."""
    return weights_after(strategy, [[tau] for tau in staleness])


@FEWER
@given(staleness=BUFFERS)
def test_fedstaleweights_weights_add_up_to_1_and_are_within_theorem_1s_bounds(staleness: list[int]) -> None:
    b, largest = len(staleness), max(staleness)
    weights = weights_of(FedStaleWeight(buffer_size=b, form="derivation"), staleness)
    assert sum(weights) == pytest.approx(1.0, rel=1e-12)
    low, high = weight_bounds(b, largest)
    assert all(low * (1 - 1e-12) <= weight <= high * (1 + 1e-12) for weight in weights)


@FEWER
@given(b=st.integers(2, 40), largest=st.integers(1, 10_000))
def test_theorem_1s_bounds_are_reached(b: int, largest: int) -> None:
    """One fresh update among stale ones has the lower bound as its weight, and one stale update among fresh
    ones has the upper bound."""
    one_fresh = weights_of(FedStaleWeight(buffer_size=b, form="derivation"), [0] + [largest] * (b - 1))
    one_stale = weights_of(FedStaleWeight(buffer_size=b, form="derivation"), [largest] + [0] * (b - 1))
    low, high = 1 / ((b - 1) * (b * largest + 1) + 1), (b * largest + 1) / (b * (largest + 1))
    assert one_fresh[0] == pytest.approx(low, rel=1e-12)
    assert one_stale[0] == pytest.approx(high, rel=1e-12)
    assert weight_bounds(b, largest) == pytest.approx((low, high), rel=1e-15)


@FEWER
@given(staleness=BUFFERS, form=st.sampled_from(["derivation", "algorithm-1"]))
def test_stale_updates_weigh_more_in_fedstaleweight_and_less_in_fedbuff(
    staleness: list[int], form: Any
) -> None:
    stale = weights_of(FedStaleWeight(buffer_size=len(staleness), form=form), staleness)
    updates = [Update(i, i, 0, tau, 1, 1, 0.0, 0.0) for i, tau in enumerate(staleness)]
    core = Core(FedBuff(), fleet(len(staleness)), 0, experiment.Stop())
    buff = FedBuff().weights(None, updates, core)
    order = np.argsort(staleness, kind="stable")
    assert (np.diff(np.array(stale)[order]) >= 0).all()
    assert (np.diff(np.array(buff)[order]) <= 0).all()
    assert all(0 < weight <= 1 / len(staleness) for weight in buff)


@FEWER
@given(staleness=BUFFERS, most=st.floats(0.5, 3.0))
def test_the_step_of_the_running_form_is_at_most_max_step(staleness: list[int], most: float) -> None:
    strategy = FedStaleWeight(buffer_size=len(staleness), normalize="running", max_step=most)
    assert sum(weights_of(strategy, staleness)) <= most * (1 + 1e-12)


@FEWER
@given(
    buffers=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=4), max_size=12
    ),
    most=st.floats(0.5, 3.0),
)
def test_a_clients_applied_weight_and_credit_add_up_to_its_fair_weight(
    buffers: list[list[tuple[int, int]]], most: float
) -> None:
    """This holds for each client after each version, also if a version uses two updates of a client."""
    strategies = [
        FedStaleWeight(normalize="credit", max_step=most),
        FedStaleWeight(normalize="running", max_step=1e9),
    ]
    core = Core(strategies[0], fleet(4), 0, experiment.Stop())
    states = [strategy.begin(core.devices) for strategy in strategies]
    had, fair = np.zeros(4), np.zeros(4)
    for buffer in buffers:
        updates = [Update(i, client, 0, tau, 1, 1, 0.0, 0.0) for i, (client, tau) in enumerate(buffer)]
        asked = []
        for strategy, state in zip(strategies, states, strict=True):
            for update in updates:
                strategy.arrive(state, update, core)
            strategy.weights(state, updates[:1], core)  # computing weights changes no state
            asked.append(strategy.weights(state, updates, core))
            strategy.stepped(state, Step(updates, asked[-1]), core)
        assert sum(asked[0]) <= most * (1 + 1e-12)
        np.add.at(had, [one.client for one in updates], asked[0])
        np.add.at(fair, [one.client for one in updates], asked[1])
        owed = [states[0].credit.get(client, 0.0) for client in range(4)]
        assert min(asked[0]) > 0
        np.testing.assert_allclose(had + owed, fair, rtol=1e-9, atol=1e-12)


def test_a_refused_step_pays_no_credit() -> None:
    """If a sum is refused, the core asks the strategy for the step again, without the bad update."""
    strategy = FedStaleWeight(buffer_size=2, normalize="credit", max_step=0.5, restart="immediate")
    core = Core(strategy, fleet(3), 0, experiment.Stop(versions=40))
    broken = iter([False, True, False] * 100)

    def train(client: int, model: Vector, trip: int) -> Vector:
        return np.full_like(model, np.nan) if next(broken) else model + 1.0

    run = run_in_memory(core, [1.0, 1.7, 6.1], train=train)
    assert core.dropped > 10
    weights = [sum(order.weights) for order, _ in run.sums]
    assert weights == pytest.approx([0.5] * 40)  # the maximum, since there is always more credit than that


@pytest.mark.parametrize("size", [1, 2, 5, 40])
@pytest.mark.parametrize(
    "fields", [{}, {"form": "algorithm-1"}, {"normalize": "running"}, {"normalize": "credit"}]
)
def test_updates_of_staleness_0_are_averaged(size: int, fields: dict[str, Any]) -> None:
    weights = weights_of(FedStaleWeight(buffer_size=size, **fields), [0] * size)
    assert weights == pytest.approx([1 / size] * size)


def test_a_client_that_halves_its_speed_loses_weight_with_fedbuff_but_not_with_the_running_form() -> None:
    fedbuff, fair = (
        strategic.gain(form, "immediate", 15, 60.0, seed=1, count=3, slowed=2.0)
        for form in ("FedBuff", "its running form")
    )
    assert fedbuff[0] < 0.7 < fair[0]
    assert fedbuff[1] == pytest.approx(0.5, abs=0.05)
