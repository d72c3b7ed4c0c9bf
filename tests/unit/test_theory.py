"""What the papers prove: arrivals, weights, fairness, bounds by hand; and the settings of their studies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl import ConfigError, config, experiment
from edgefl.core import Core
from edgefl.core.events import Arrived, Sum
from edgefl.devices.schema import Delay
from edgefl.lab import PAPERS, fedstaleweight, theory
from edgefl.lab.study import Arm, Curves, Study, slug
from edgefl.lab.theory import Outcome, gains_of_slowing, simulate, staleness_by_buffer, weight_bounds
from edgefl.strategies import Strategy, Update, resolve
from edgefl.strategies.fedasync import FedAsync
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import fleet, run_in_memory

FAST, SLOW = slice(10), slice(10, 15)
RATES = np.array([1 / 1.5] * 10 + [1 / 10] * 5)
SETTING: dict[str, Any] = {"buffer_size": 5, "restart": "new-version"}


def outcome(strategy: Strategy, versions: int = 1000, seed: int = 7) -> Outcome:
    return simulate(strategy, versions, seed)


@settings(max_examples=30)
@given(times=st.lists(st.integers(1, 50), min_size=3, max_size=8), size=st.integers(2, 8))
def test_staleness_shrinks_by_the_buffer(times: list[int], size: int) -> None:
    """τ_K ≤ ⌈τ_1/K⌉ trip by trip, and so the largest and the mean (FedBuff, appendix A)."""
    size = min(size, len(times))
    delays = [Delay(dist="list", values_s=(float(time), time + 0.5)) for time in times]
    found = staleness_by_buffer(delays, [1, size], trips=20 * len(times))
    assert len(found[1]) == len(found[size]) > 10 * len(times)
    assert (found[size] <= -(-found[1] // size)).all()


def test_staleness_halves_when_the_buffer_doubles() -> None:
    delays = [Delay(dist="half-normal", scale_s=1.0)] * 200
    found = staleness_by_buffer(delays, [1, 10, 20, 40], trips=8000)
    mean = {size: values.mean() for size, values in found.items()}
    assert mean[1] == pytest.approx(199, rel=0.03)  # everybody else arrives once meanwhile
    assert mean[10] / mean[20] == pytest.approx(2.0, rel=0.05)
    assert mean[20] / mean[40] == pytest.approx(2.0, rel=0.1)


def test_expected_staleness_is_what_equation_6_says() -> None:
    found = simulate(FedStaleWeight(**SETTING), 2000, skip=200)
    mean = np.bincount(found.client, found.staleness) / np.bincount(found.client)
    assert mean == pytest.approx((RATES.sum() / RATES - 1) / 5, rel=0.12)


def test_fairness_on_the_same_arrivals_is_what_the_paper_is_about() -> None:
    """Share of all applied weight · n: 1 is fair (eq. 3). FedBuff goes by rate; FedStaleWeight halves it."""
    plain = outcome(FedBuff(exponent=0.0, **SETTING))
    buff = outcome(FedBuff(**SETTING))
    stale = outcome(FedStaleWeight(**SETTING))
    running = outcome(FedStaleWeight(normalize="running", **SETTING))
    assert len({found.emulated_s for found in (plain, buff, stale, running)}) == 1  # the very same arrivals
    assert plain.share == pytest.approx(RATES / RATES.sum() * 15, rel=0.08)
    for share, fast, slow in (
        (plain.share, 1.40, 0.21),
        (stale.share, 1.20, 0.60),
        (running.share, 1.01, 0.98),
    ):
        assert share[FAST].mean() == pytest.approx(fast, abs=0.03)
        assert share[SLOW].mean() == pytest.approx(slow, abs=0.03)
    unfairness = [np.abs(found.share - 1).mean() for found in (buff, plain, stale, running)]
    assert unfairness == sorted(unfairness, reverse=True)
    assert unfairness[2] < 0.52 * unfairness[1]
    assert unfairness[3] < 0.1 * unfairness[1]


def test_the_running_form_gives_each_client_1_in_n() -> None:
    """Every single client within 5% of its fair share, at the paper's 4,000 versions."""
    found = outcome(FedStaleWeight(normalize="running", **SETTING), versions=4000, seed=1)
    assert np.abs(found.share - 1.0).max() < 0.05


def test_in_fedbuff_slowing_down_costs_what_it_saves() -> None:
    (gain,) = gains_of_slowing(FedBuff(exponent=0.0, **SETTING), [2.0], versions=2000)
    assert gain == pytest.approx(0.5, abs=0.04)


def test_shares_are_those_of_the_core_and_the_same_every_time() -> None:
    first, again = (outcome(FedStaleWeight(**SETTING), versions=50) for _ in range(2))
    assert first.share.tolist() == again.share.tolist()
    assert first.share.sum() == pytest.approx(15.0)
    problem = theory.Quadratic(seed=1)
    assert theory.bounded_run(problem, 300, seed=2) == theory.bounded_run(problem, 300, seed=2)


def test_the_constants_are_upper_bounds_of_what_is_seen() -> None:
    problem = theory.Quadratic(seed=1)
    rng = np.random.default_rng(0)
    for _ in range(20):
        w = problem.start + rng.normal(size=problem.start.size)
        v = w + 0.1 * rng.normal(size=w.size)
        samples = np.array([[problem.sample(i, w, rng) for _ in range(400)] for i in range(problem.clients)])
        local = samples.mean(axis=1)
        assert np.linalg.norm(problem.gradient(w) - problem.gradient(v)) <= (
            problem.smoothness * np.linalg.norm(w - v) * (1 + 1e-9)
        )
        assert samples.var(axis=1).sum(axis=1).max() <= problem.variance * 1.3
        spread = ((local - local.mean(axis=0)) ** 2).sum(axis=1).mean()
        assert spread <= problem.diversity * 1.3 + problem.variance / 100
        np.testing.assert_allclose(
            local.mean(axis=0), problem.gradient(w), atol=5 * math.sqrt(problem.variance / 1600)
        )


def test_the_gradient_is_that_of_the_gap() -> None:
    """f(w_0) − f* of the quadratic by integrating its gradient along the way."""
    problem = theory.Quadratic(seed=3)
    steps = np.linspace(0.0, 1.0, 2001)
    least = problem.start - np.linalg.solve(
        np.diag(np.linspace(0.2, 1.0, 6) * problem.smoothness), problem.gradient(problem.start)
    )
    values = [problem.gradient(least + t * (problem.start - least)) @ (problem.start - least) for t in steps]
    assert np.trapezoid(values, steps) == pytest.approx(problem.gap, rel=1e-6)


def test_the_right_side_is_the_theorem_s() -> None:
    problem = theory.Quadratic(seed=1)
    L, s, g, n = problem.smoothness, problem.variance, problem.diversity, problem.clients
    T, tau, Q = 10_000, 3, theory.LOCAL_STEPS
    by_hand = (
        8 * math.sqrt(L) * problem.gap / math.sqrt(T)
        + 16 * math.sqrt(L) * (s + g) / math.sqrt(T)
        + 320 * L * (Q + 1) * (tau**2 + 1) * (s + n * g) / T
    )
    assert theory.gradient_bound(problem, T, tau) == pytest.approx(by_hand, rel=1e-12)
    assert theory.least_versions(problem, tau) == math.ceil(160 * L * (Q + 7) * (tau + 1) ** 3)


@pytest.mark.slow
def test_every_claim_is_judged_and_stands() -> None:
    said: list[str] = []
    found = theory.findings(quick=True, say=said.append)
    assert len(found) == 7
    assert [one.claim for one in found if one.verdict != "reproduced"] == []
    assert said


@pytest.mark.parametrize(("staleness", "weight"), [(0, 0.6), (4, 0.6), (5, 0.6 / 3), (9, 0.6 / 11)])
def test_fedasync_hinge(staleness: int, weight: float) -> None:
    assert FedAsync(scaling="hinge", a=2.0).mixing(staleness) == pytest.approx(weight)


def weights_after(strategy: FedStaleWeight, observed: Sequence[Sequence[int]]) -> list[float]:
    """The weights of a buffer of one update of each client, the last of those that each was observed with."""
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


def test_the_window_drops_the_oldest_observation_and_keeps_the_newest() -> None:
    strategy = FedStaleWeight(buffer_size=2, window=3)
    assert weights_after(strategy, [[9, 0, 0], [0]]) == pytest.approx([7 / 8, 1 / 8])  # E = 3: 2·3 + 1
    assert weights_after(strategy, [[9, 0, 0, 0], [0]]) == pytest.approx([1 / 2, 1 / 2])
    assert weights_after(strategy, [[0, 0, 0, 9], [0]]) == pytest.approx([7 / 8, 1 / 8])


@pytest.mark.parametrize(
    ("average", "mean"),
    [("window", 5.0), ("cumulative", 4.0), ("exponential", 0.5 * (0.5 * 2 + 0.5 * 4) + 0.5 * 6)],
)
def test_each_moving_average(average: Any, mean: float) -> None:
    strategy = FedStaleWeight(buffer_size=2, average=average, window=2, decay=0.5)
    raw = 2 * mean + 1
    assert weights_after(strategy, [[2, 4, 6], [0]]) == pytest.approx([raw / (raw + 1), 1 / (raw + 1)])


def test_an_update_that_is_refused_is_not_observed() -> None:
    strategy = FedStaleWeight(buffer_size=2, max_staleness=3)
    assert weights_after(strategy, [[50], [0]]) == [0.5, 0.5]


def test_defedavg_niid_averages_the_newest_update_of_a_uniform_sample() -> None:
    strategy = resolve({"name": "defedavg-niid", "participants": 4, "takes": "newest"})
    core = Core(strategy, fleet(6), 0, experiment.Stop(versions=3000))
    result = run_in_memory(
        core, [1.0, 1.0, 2.0, 3.0, 5.0, 8.0], train=lambda client, model, trip: model + 1.0
    )
    newest: dict[int, int] = {}
    steps = iter(result.sums)
    for event, actions in result.history:
        if isinstance(event, Arrived):
            newest[event.client] = event.task
        if any(isinstance(action, Sum) for action in actions):
            order, updates = next(steps)
            assert [newest[update.client] for update in updates] == list(order.tasks)
            multiples = np.array(order.weights) * 4
            assert multiples == pytest.approx(np.round(multiples))  # drawn twice counts twice
            assert sum(order.weights) == pytest.approx(1.0)
    assert [float(model[0]) for model in result.models] == pytest.approx(np.arange(3001.0))
    share = core.applied_weight / core.applied_weight.sum()
    assert share == pytest.approx(np.full(6, 1 / 6), rel=0.05)  # however slow a client is
    assert core.discarded > 0  # send buffers that were overwritten


def test_defedavg_niid_paused_trains_only_what_is_taken() -> None:
    strategy = resolve({"name": "defedavg-niid", "participants": 4, "pause": True})
    core = Core(strategy, fleet(6), 0, experiment.Stop(versions=500))
    run_in_memory(core, [1.0, 1.0, 2.0, 3.0, 5.0, 8.0])
    assert core.discarded <= 6  # only what is held when the run ends
    assert core.applied_weight == pytest.approx(np.full(6, 500 / 6), rel=0.15)


BUFFERS = st.lists(st.integers(0, 10_000), min_size=2, max_size=40)


def weights_of(strategy: FedStaleWeight, staleness: Sequence[int]) -> list[float]:
    """The weights of one buffer in which client i was observed once, with the i-th staleness."""
    return weights_after(strategy, [[tau] for tau in staleness])


@given(staleness=BUFFERS)
def test_fedstaleweights_weights_add_up_to_1_within_theorem_1s_bounds(staleness: list[int]) -> None:
    b, largest = len(staleness), max(staleness)
    weights = weights_of(FedStaleWeight(buffer_size=b), staleness)
    assert sum(weights) == pytest.approx(1.0, rel=1e-12)
    low, high = weight_bounds(b, largest)
    assert all(low * (1 - 1e-12) <= weight <= high * (1 + 1e-12) for weight in weights)


@given(b=st.integers(2, 40), largest=st.integers(1, 10_000))
def test_theorem_1s_bounds_are_reached(b: int, largest: int) -> None:
    """The lower by one fresh update among the stalest, the upper by the stalest among fresh ones."""
    one_fresh = weights_of(FedStaleWeight(buffer_size=b), [0] + [largest] * (b - 1))
    one_stale = weights_of(FedStaleWeight(buffer_size=b), [largest] + [0] * (b - 1))
    low, high = 1 / ((b - 1) * (b * largest + 1) + 1), (b * largest + 1) / (b * (largest + 1))
    assert one_fresh[0] == pytest.approx(low, rel=1e-12)
    assert one_stale[0] == pytest.approx(high, rel=1e-12)
    assert weight_bounds(b, largest) == pytest.approx((low, high), rel=1e-15)


@given(staleness=BUFFERS, form=st.sampled_from(["derivation", "algorithm-1"]))
def test_the_stale_weigh_more_in_fedstaleweight_and_less_in_fedbuff(staleness: list[int], form: Any) -> None:
    stale = weights_of(FedStaleWeight(buffer_size=len(staleness), form=form), staleness)
    updates = [Update(i, i, 0, tau, 1, 1, 0.0, 0.0) for i, tau in enumerate(staleness)]
    core = Core(FedBuff(), fleet(len(staleness)), 0, experiment.Stop())
    buff = FedBuff().weights(None, updates, core)
    order = np.argsort(staleness, kind="stable")
    assert (np.diff(np.array(stale)[order]) >= 0).all()
    assert (np.diff(np.array(buff)[order]) <= 0).all()
    assert all(0 < weight <= 1 / len(staleness) for weight in buff)


@given(staleness=BUFFERS, most=st.floats(0.5, 3.0))
def test_a_running_step_is_bounded(staleness: list[int], most: float) -> None:
    strategy = FedStaleWeight(buffer_size=len(staleness), normalize="running", max_step=most)
    assert sum(weights_of(strategy, staleness)) <= most * (1 + 1e-12)


@pytest.mark.parametrize("size", [1, 2, 5, 40])
@pytest.mark.parametrize("fields", [{}, {"form": "algorithm-1"}, {"normalize": "running"}])
def test_fresh_updates_are_averaged(size: int, fields: dict[str, Any]) -> None:
    assert weights_of(FedStaleWeight(buffer_size=size, **fields), [0] * size) == pytest.approx(
        [1 / size] * size
    )


STUDIES = [import_module(f"edgefl.lab.{name}").study for name in PAPERS if name != "theory"]
TWO = Study(
    "fedbuff", "", "", (Arm("a", ()), Arm("b", ("strategy.buffer_size=2",))), lambda curves: [], seeds=(1, 2)
)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_arm_is_an_experiment_that_can_be_run(study: Study, quick: bool) -> None:
    checked = [
        config.validate(study.experiment(arm, 1, quick=quick), study.file(quick).parent) for arm in study.arms
    ]
    texts = [config.dump(each) for each in checked]
    assert len(set(texts)) == len(texts)
    assert len({slug(arm) for arm in study.arms}) == len(study.arms)
    assert all(each.clock.kind == "virtual" for each in checked)
    assert (checked[0].data.name == "digits") == quick


def test_defedavg_takes_the_steps_of_its_table() -> None:
    study = next(study for study in STUDIES if study.name == "defedavg")
    steps = {}
    for arm in study.arms:
        each = study.experiment(arm, 1, quick=False)
        steps[arm.label] = (each.strategy["server_lr"], each.training.lr)
    assert steps == {  # Wang 2024, table II, FashionMNIST, n = 10
        "DeFedAvg-nIID": (0.1, 0.05),
        "non-IID FedAvg": (0.1, 0.05),
        "non-IID FedBuff": (0.1, 0.005),
        "non-IID FedBuff, s(τ)": (0.1, 0.005),
        "non-IID FAVANO": (1.0, 0.05),  # the table has no other step for it
        "DeFedAvg-IID": (0.1, 0.05),
        "IID FedAvg": (1.0, 0.1),
        "IID FAVANO": (1.0, 0.1),
        "IID AsySG": (0.1, 0.01),  # the table has 0.1, with which it diverges here
    }


def test_what_an_arm_changes_in_small_it_changes_only_there() -> None:
    arm = Arm("a", (), full=("training.lr=0.5",), quick=("training.lr=0.25",))
    assert [TWO.experiment(arm, 1, quick=quick).training.lr for quick in (False, True)] == [0.5, 0.25]
    with pytest.raises(ConfigError, match=r"training\.lr is what tells a from the other arms"):
        replace(TWO, arms=(arm, Arm("b", ()))).changed(["training.lr=1"])


def test_a_change_goes_into_every_run_but_not_into_what_tells_the_arms_apart() -> None:
    changed = TWO.changed(["stop.versions=2", "training.lr=0.25"])
    for arm in changed.arms:
        wanted = changed.experiment(arm, 1, quick=True)
        assert (wanted.stop.versions, wanted.training.lr) == (2, 0.25)
    assert "stop.versions=2, training.lr=0.25" in changed.notes[-1]
    assert TWO.changed([]) == TWO
    for change in ("strategy.buffer_size=3", " strategy . buffer_size=3", "strategy={name='fedavg'}"):
        with pytest.raises(ConfigError, match=r"strategy\.buffer_size is what tells b from the other arms"):
            TWO.changed([change])
    with pytest.raises(ConfigError, match="every arm runs with seeds 1, 2"):
        TWO.changed(["seed=7"])


def test_a_change_that_would_take_back_what_an_arm_sets_is_refused() -> None:
    one_step = replace(TWO, arms=(*TWO.arms, Arm("c", ("training.steps=1",))))
    for change in ("training.epochs=2", "training.steps=2", "training={epochs=2}"):
        with pytest.raises(ConfigError, match=r"training\.steps is what tells c from the other arms"):
            one_step.changed([change])
    assert TWO.changed(["training.epochs=2"]).experiment(TWO.arms[1], 1, quick=True).training.epochs == 2


class Known(Curves):
    """Curves of one seed whose weights are given and all else is alike."""

    def __init__(self, slow: Mapping[str, float]) -> None:
        super().__init__(dict.fromkeys(slow, ()))
        self._slow = slow

    def weights(self, label: str, profile: str) -> list[float]:
        slow = self._slow[label]
        return [slow if profile == fedstaleweight.SLOW else (15.0 - 5.0 * slow) / 10.0]

    def accuracy(self, label: str, last: int = 0) -> list[float]:
        return [0.9]

    best = accuracy

    def reached(self, label: str, target: float, over: str) -> list[float]:
        return [100.0]


@pytest.mark.parametrize(
    ("slow", "says"), [(0.6, "reproduced"), (1.4, "reproduced"), (2.5, "not reproduced")]
)
def test_fairer_is_nearer_to_1_and_not_more_for_the_slow(slow: float, says: str) -> None:
    arms = dict.fromkeys((fedstaleweight.RUNNING, fedstaleweight.AVERAGE, fedstaleweight.FEDBUFF), 0.2)
    judged = fedstaleweight.judge(Known({fedstaleweight.PAPER: slow, **arms}))
    (found,) = [one for one in judged if one.claim.startswith("fairer")]
    assert found.verdict == says
