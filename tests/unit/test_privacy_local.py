"""Tests of local differential privacy: clients' uploads, and ε compared with independent exact formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_privacy_fuzz import exact_epsilon

import edgefl
from edgefl import config
from edgefl.core import Core
from edgefl.core.deaths import Deaths
from edgefl.core.events import Arrived, Died, Event, Joined, Left, Train
from edgefl.devices.fleet import fleet_of
from edgefl.errors import RunError, TrainingError
from edgefl.experiment import Attackers, Privacy
from edgefl.kernels.arguments import Floats
from edgefl.learning.train import TrainResult
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.privacy.accounting import local_epsilon
from edgefl.privacy.local import LocalNoise
from edgefl.privacy.mechanism import Mechanism
from edgefl.privacy.source import Seeded
from edgefl.results.spending import spending, summary_of
from edgefl.run.demands import checked, shape_of
from edgefl.run.server_process import _forbids_repetition
from edgefl.run.update import UpdateMaker
from edgefl.run.workload import Workload
from edgefl.strategies import names, resolve
from edgefl.strategies.base import Strategy
from edgefl.strategies.fedavg import FedAvg
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import TripFails, fleet, run_in_memory

L, SIGMA, TRIPS = 2.0, 4.0, 6
RULES = Privacy(clip_norm=L, local_noise_multiplier=SIGMA, max_participations=TRIPS, delta=1e-6)
KINDS = ("large", "opposite", "small", "zero", "nan", "infinite", "fails")


# ---- ε -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.5, 2.0, 20.0, 100.0])
def test_epsilon_is_that_of_the_analytic_gaussian_mechanism(sigma: float) -> None:
    """Balle and Wang 2018, theorem 8. Updates of norm L differ by up to 2L, and the noise has deviation σL,
    so the uploads of m trips shift by up to 2√m/σ deviations."""
    for trips, delta in itertools.product((1, 2, 7, 50), (1e-4, 1e-7, 1e-10)):
        rules = Privacy(clip_norm=0.3, local_noise_multiplier=sigma, max_participations=trips, delta=delta)
        exact = exact_epsilon(2.0 * math.sqrt(trips) / sigma, delta)
        assert exact <= local_epsilon(rules, trips) <= 1.15 * exact + 1e-3, (trips, delta)


def test_epsilon_of_several_trips_is_that_of_the_composed_losses() -> None:
    """The trips' privacy losses add up, so the distribution of their sum is that of one trip's loss,
    convolved with itself."""
    sigma, trips, delta, step = 5.0, 9, 1e-5, 1e-3
    mean = (2.0 / sigma) ** 2 / 2  # of the loss of one trip, whose variance is twice as large
    grid = np.arange(-4.0, 4.0, step)
    single = np.exp(-((grid - mean) ** 2) / (4 * mean)) / math.sqrt(4 * math.pi * mean) * step
    composed = single
    for _ in range(trips - 1):
        composed = np.convolve(composed, single)
    losses = trips * grid[0] + step * np.arange(len(composed))
    rules = Privacy(clip_norm=1.0, local_noise_multiplier=sigma, max_participations=trips, delta=delta)

    def lost(epsilon: float) -> float:
        beyond = losses > epsilon
        return float((composed[beyond] * -np.expm1(epsilon - losses[beyond])).sum())

    reported = local_epsilon(rules, trips)
    assert lost(reported) <= delta < lost(reported / 1.15)


# ---- uploads -----------------------------------------------------------------------------------------


@contextmanager
def phones(privacy: Privacy | None = RULES, **changes: Any) -> Iterator[tuple[UpdateMaker, Workload, Floats]]:
    """A client's real update maker and workload, and the model that it downloaded."""
    wanted = config.validate(
        edgefl.Experiment(
            **{
                "fleet": edgefl.Fleet(devices={"pixel-4": 5}),
                "model": edgefl.Model(name="mlp", args={"hidden": [64]}),
                "privacy": privacy,
                "stop": edgefl.Stop(versions=1),
                **changes,
            }
        ),
        Path(),
    )
    workload, strategy = Workload(wanted, fleet_of(wanted), Path()), resolve(wanted.strategy)
    base = workload.flat.array.copy()
    with closing(ParameterBuffer.create(shape_of(wanted, strategy, workload.flat.size, 5))) as buffer:
        yield UpdateMaker(workload, buffer), workload, base


def update_of(kind: str, size: int) -> Floats:
    direction = np.ones(size, np.float32) / np.float32(math.sqrt(size))
    norm = {"large": 50 * L, "opposite": -50 * L, "small": L / 10, "zero": 0.0, "nan": math.nan}
    return direction * np.float32(norm.get(kind, math.inf))


def upload(
    parts: tuple[UpdateMaker, Workload, Floats], kind: str, client: int, trip: int
) -> tuple[Floats, TrainResult]:
    """Train a client so that its update is of this kind; return its upload as read from its slot, and the
    result of the training."""
    maker, workload, base = parts

    def train(*_: Any) -> TrainResult:
        if kind == "fails":
            workload.flat.array[:] = 7.0  # left half trained
            raise ValueError("its data broke it")
        workload.flat.array += update_of(kind, base.size)
        return TrainResult(5, 100, 0.5)

    np.copyto(workload.flat.array, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workload, "train", train)
        result = maker.train(client, trip, 0, base, None)
    raw = np.zeros(4 * base.size, np.uint8)
    maker.write(raw, client, trip, base)
    return raw.view(np.float32).copy(), result


def squared_shift(kinds: list[str], others: list[str]) -> float:
    """Return μ² between two clients, one with the updates ``kinds`` and one with ``others``: the squared
    distance of all their uploads, in standard deviations of the noise."""
    with phones() as parts:
        pairs = enumerate(zip(kinds, others, strict=True))
        sent = [[upload(parts, kind, 2, trip)[0] for kind in pair] for trip, pair in pairs]
    return sum(float(np.sum(np.square((a - b) / (SIGMA * L), dtype=float))) for a, b in sent)


def faults() -> Iterator[str]:
    """Yield each error in the uploads: wrong noise, a wrong mean, or an ε above the reported one."""
    with phones() as parts:
        size = parts[2].size
        unit = update_of("small", size) * 10 / L
        clipped = dict.fromkeys(KINDS, 0 * unit)
        clipped |= {"large": L * unit, "opposite": -L * unit, "small": update_of("small", size)}
        noises = []
        for trip, kind in enumerate(KINDS[:TRIPS]):
            noise = (upload(parts, kind, 1, trip)[0] - clipped[kind]) / (SIGMA * L)
            noises.append(noise)
            counted = [np.mean(noise < at) for at in (-2.0, -1.0, 0.0, 1.0, 2.0)]
            near = np.abs(np.subtract(counted, [0.02275, 0.15866, 0.5, 0.84134, 0.97725])) < 0.03
            if not (near.all() and abs(np.sum(noise.astype(float) * unit)) < 5.0):
                yield f"{kind}: an upload is not the clipped update with noise of deviation σL"
        limit = 5.0 / math.sqrt(size)
        if any(abs(float(np.dot(a, b))) / size > limit for k, a in enumerate(noises) for b in noises[:k]):
            yield "noise of trips is correlated"
    rng = np.random.default_rng(1)
    cases = [(["large"] * TRIPS, ["opposite"] * TRIPS)]
    cases += [(rng.choice(KINDS, TRIPS).tolist(), rng.choice(KINDS, TRIPS).tolist()) for _ in range(12)]
    for kinds, others in cases:
        exact = exact_epsilon(math.sqrt(squared_shift(kinds, others)), RULES.delta)
        if exact > local_epsilon(RULES, TRIPS):
            yield f"ε of {kinds} and {others} is {exact:.3g}"


def test_a_client_sends_its_clipped_update_with_independent_noise() -> None:
    assert list(faults()) == []


def test_the_reported_epsilon_is_reached_by_opposite_updates() -> None:
    found = squared_shift(["large"] * TRIPS, ["opposite"] * TRIPS)
    assert found == pytest.approx(TRIPS * (2 / SIGMA) ** 2, rel=1e-4)


PROTECT = LocalNoise.protect


def _add_no_noise(noise: LocalNoise, trained: Floats, base: Floats, *trip: int) -> bool:
    delta = trained - base
    finite = bool(np.isfinite(delta).all())
    factor = min(1.0, noise.clip_norm / max(1e-30, float(np.linalg.norm(delta)))) if finite else 0.0
    trained[:] = base + np.nan_to_num(delta, posinf=0.0) * np.float32(factor)
    return finite


def _clip_after_the_noise(noise: LocalNoise, trained: Floats, base: Floats, *trip: int) -> bool:
    finite = PROTECT(replace(noise, clip_norm=1e9, noise_multiplier=1e-9 * SIGMA * L), trained, base, *trip)
    sent = trained - base
    trained[:] = base + sent * np.float32(min(1.0, noise.clip_norm / float(np.linalg.norm(sent))))
    return finite


def _send_no_noise_for_a_bad_update(noise: LocalNoise, trained: Floats, base: Floats, *trip: int) -> bool:
    finite = PROTECT(noise, trained, base, *trip)
    if not finite:
        trained[:] = base
    return finite


@pytest.mark.parametrize(
    "mutant",
    [
        _add_no_noise,
        _clip_after_the_noise,
        _send_no_noise_for_a_bad_update,
        lambda noise, *given: PROTECT(replace(noise, noise_multiplier=SIGMA / 5), *given),
        lambda noise, *given: PROTECT(
            replace(noise, clip_norm=1e6, noise_multiplier=SIGMA * L / 1e6), *given
        ),
        lambda noise, *given: PROTECT(noise, *given[:-1], 0),
    ],
    ids=[
        "none",
        "clipped",
        "none for bad updates",
        "a fifth",
        "updates are not clipped",
        "same for all trips",
    ],
)
def test_wrong_noise_is_found(mutant: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalNoise, "protect", mutant)
    assert next(faults(), "")


def test_the_summary_counts_trips_after_the_last_version() -> None:
    """The only version is made at 1 s, and client 1 begins its second trip at 2 s."""
    rules = Privacy(clip_norm=1.0, local_noise_multiplier=4.0, max_participations=9)
    trips = {"task": [0, 1, 2], "client": [0, 1, 1], "trip": [0, 0, 1], "sent_s": [0.0, 0.0, 2.0]}
    record: Any = SimpleNamespace(
        meta=SimpleNamespace(privacy=rules, sampling=None, max_weight=None, secure=None),
        fleet={"client": np.arange(2)},
        trips={name: np.array(values) for name, values in trips.items()},
        versions={"at_s": np.array([1.0])},
        sums=lambda: [(1, np.array([0, 1]), None)],
        events=list,
    )
    assert (found := spending(record)) is not None
    assert (figures := summary_of(found)) is not None
    assert found.epsilon.tolist() == [local_epsilon(rules, 1)] * 2
    assert figures["epsilon"] == figures["local"]["epsilon"] == local_epsilon(rules, 2)


def test_a_failed_training_sends_the_upload_of_an_update_of_zero() -> None:
    """Only the record shows the failure and its reason."""
    with phones() as parts:
        zero = upload(parts, "zero", 1, 3)[0]
        for kind, why in (
            ("fails", "ValueError: its data broke it"),
            ("nan", "not finite"),
            ("infinite", "not finite"),
        ):
            sent, result = upload(parts, kind, 1, 3)
            assert sent.tobytes() == zero.tobytes()
            assert result.failed == why
        assert upload(parts, "small", 1, 3)[1].failed == ""
    with phones(privacy=None) as parts, pytest.raises(ValueError, match="broke"):
        upload(parts, "fails", 1, 3)


def test_a_client_makes_no_trip_beyond_the_declared_ones() -> None:
    with phones() as parts:
        upload(parts, "small", 1, TRIPS - 1)
        with pytest.raises(TrainingError, match="max_participations: 6 trips"):
            upload(parts, "small", 1, TRIPS)


def test_attackers_that_replace_their_update_add_no_noise() -> None:
    for kind, noisy in (("sign-flip", False), ("label-flip", True)):
        fleet = edgefl.Fleet(devices={"pixel-4": 5}, attackers=Attackers(share=0.2, kind=kind))
        with phones(fleet=fleet) as parts:
            (attacker,) = parts[1].attack.clients
            for client in range(5):
                sent = upload(parts, "small", client, 0)[0]
                assert (float(np.std(sent)) > L) == (noisy or client != attacker)


# ---- a run -------------------------------------------------------------------------------------------


def most_trips(strategy: Strategy, seed: int, patch: Callable[[Core], None] = lambda core: None) -> int:
    """Run with failures, NaN, departures and cancellations; return the most trips that a client begins."""
    rng, clients = np.random.default_rng(seed), 8
    core = Core(strategy, fleet(clients), seed, edgefl.Stop(versions=60), privacy=RULES)
    patch(core)
    kinds = rng.choice(["good", "nan", "fails"], 10_000, p=[0.6, 0.2, 0.2]).tolist()
    absent = np.sort(rng.uniform(0.0, 60.0, (10, 2)), axis=1).tolist()
    events: list[Event] = []
    for client, (gone_s, back_s) in zip(rng.integers(clients, size=10).tolist(), absent, strict=True):
        events += [Left(client, gone_s, "offline"), Joined(client, back_s)]

    def train(client: int, model: NDArray[Any], trip: int) -> NDArray[Any]:
        kind = kinds[client * 100 + trip]
        if kind == "fails":
            raise TripFails("broke")
        return model * math.nan if kind == "nan" else model + 1.0

    began = [0] * clients
    real = core.handle

    def handle(event: Event) -> list[Any]:
        actions = real(event)
        for action in actions:
            if isinstance(action, Train):
                began[action.client] += 1
        return actions

    core.handle = handle  # type: ignore[method-assign]
    speed = rng.uniform(1.0, 5.0, clients).tolist()
    with suppress(RunError):  # too few clients are left
        run_in_memory(core, speed, model=np.zeros(3), train=train, events=events)
    return max(began)


@pytest.mark.parametrize(
    "strategy",
    [
        FedBuff(buffer_size=3, max_staleness=1),
        FedAvg(cohort=3, over_selection=1.5, weighting="uniform"),
    ],
    ids=["fedbuff", "over-selection"],
)
def test_no_client_begins_more_trips_than_declared(strategy: Strategy) -> None:
    """A trip counts when it begins, whether its update is used, cancelled, discarded, not finite or lost."""

    def count_applied_updates_only(core: Core) -> None:
        assert core.participation is not None
        core.participation._counts_tasks = False

    assert max(most_trips(strategy, seed) for seed in range(10)) == TRIPS
    assert any(most_trips(strategy, seed, count_applied_updates_only) > TRIPS for seed in range(10))


@pytest.mark.parametrize("why", ["broke", "not finite"])
def test_a_failed_trip_arrives_as_zero_in_memory_too(why: str) -> None:
    """Regression: the update was lost or dropped, as in a run without local noise."""

    def train(client: int, model: NDArray[Any], trip: int) -> NDArray[Any]:
        if trip == 0 and why == "broke":
            raise TripFails(why)
        return model + (1.0 if trip else math.nan)

    core = Core(FedBuff(buffer_size=1), fleet(1), 1, edgefl.Stop(versions=2), privacy=RULES)
    run = run_in_memory(core, [1.0], train=train)
    assert [float(model[0]) for model in run.models] == [0.0, 0.0, 1.0]
    assert [event.failed for event in run.events if isinstance(event, Arrived)] == [why, ""]


def test_the_server_does_not_clip_the_noise_of_clients() -> None:
    both = Privacy(clip_norm=L, noise_multiplier=1.0, local_noise_multiplier=SIGMA, max_participations=3)
    found = Mechanism(both, 0.5, Seeded(1)).clip([0.5, 0.25, 0.25], [1e6, 4.0, math.nan], L)
    assert found.weights == [0.5, 0.25, 0.0]


@pytest.mark.parametrize("strategy", sorted({*names()} - {"scaffold"}))
def test_local_noise_alone_works_with_all_strategies_but_scaffold(strategy: str) -> None:
    """Some strategies hold more updates than there are clients, or apply an update more than once."""
    timed = {"interval_s": 1.0} if strategy in ("favano", "fedfix", "quafl") else {}
    wanted = edgefl.Experiment(
        fleet=edgefl.Fleet(devices={"pixel-4": 5}),
        strategy={"name": strategy, **timed},
        privacy=RULES,
        stop=edgefl.Stop(versions=1),
    )
    assert checked(wanted, Path()).privacy == RULES
    core = Core(resolve(wanted.strategy), fleet(5), 1, edgefl.Stop(versions=12), privacy=RULES)
    result = run_in_memory(core, [1.0, 1.0, 2.0, 3.0, 4.0], model=np.zeros(3))
    assert core.stopped in ("versions", "participations")
    assert len(result.sums) > 1
    assert core.participation is not None
    assert max(core.participation.applied) <= TRIPS


@pytest.mark.parametrize("strategy", ["favano", "fedfix", "quafl"])
@pytest.mark.parametrize("died", [0, 2, 5])
def test_a_run_with_a_timed_strategy_ends_when_no_client_may_start(strategy: str, died: int) -> None:
    """Clients that are dropped have not used up their participations, and never will."""
    made, deaths = resolve({"name": strategy, "interval_s": 1.0}), Deaths("drop")
    core = Core(made, fleet(5), 1, edgefl.Stop(versions=1000), privacy=RULES, deaths=deaths)
    events = [Died(client, 2.5, "signal 9", declared=True) for client in range(died)]
    durations = [0.4, 0.4, 0.9, 1.0, 2.5]
    result = run_in_memory(core, durations, model=np.zeros(3), events=events, max_events=10_000)
    assert core.stopped == (f"too few clients are left: {5 - died} of 5" if died else "participations")
    assert died or core.trips == 5 * TRIPS == sum(len(action.tasks) for action, _ in result.sums)
    limits = core.participation
    assert limits is not None
    assert [limits.exhausted(client) for client in range(5)] == [client >= died for client in range(5)]


@pytest.mark.parametrize(
    ("clock", "privacy", "forbidden"),
    [
        ("wall", RULES, True),
        ("virtual", RULES, False),
        ("wall", Privacy(clip_norm=1.0, noise_multiplier=1.0, noise="seeded"), False),
        ("wall", None, False),
    ],
)
def test_trips_known_to_the_server_are_not_repeated_under_the_wall_clock(
    clock: Any, privacy: Privacy | None, forbidden: bool
) -> None:
    """A repeated trip would send another update with the same noise, and not be counted."""
    wanted = edgefl.Experiment(
        fleet=edgefl.Fleet(devices={"pixel-4": 5}), clock=edgefl.Clock(kind=clock), privacy=privacy
    )
    assert _forbids_repetition(wanted) == forbidden
