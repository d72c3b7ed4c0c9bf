"""Tests of differential privacy: clipping, noise, adaptive clipping norm, limits on participation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl import Experiment, config, experiment, kernels
from edgefl.core import Core
from edgefl.core.events import Sum
from edgefl.errors import ConfigError, RunError
from edgefl.experiment import Privacy
from edgefl.parameters.buffer import FORMATS, ParameterBuffer, Shape, with_scales
from edgefl.privacy import source
from edgefl.privacy.local import LocalNoise
from edgefl.privacy.mechanism import Clipped, Mechanism
from edgefl.privacy.source import KEY_FILE, Secret, Seeded, source_of
from edgefl.privacy.tree import TreeNoise, nodes
from edgefl.run.aggregator import Aggregator
from edgefl.run.demands import checked
from edgefl.seeds import stream
from edgefl.strategies.base import ServerOptimizer, Step, VectorSum
from edgefl.strategies.fedavg import FedAvg
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import fleet, run_in_memory

SIZE = 20_000
RULES = Privacy(clip_norm=2.0, noise_multiplier=0.5)


# ---- noise -------------------------------------------------------------------------------------------


def test_the_nodes_of_a_prefix_cover_each_version_once() -> None:
    for version in range(1, 200):
        leaves = [
            leaf
            for level, index in nodes(version)
            for leaf in range((index - 1 << level) + 1, (index << level) + 1)
        ]
        assert sorted(leaves) == list(range(1, version + 1))
        assert len(nodes(version)) == version.bit_count()


def test_a_key_gives_independent_normal_numbers_for_each_name_and_key() -> None:
    one, other = Secret(bytes(32)), Secret(bytes(31) + b"\1")
    draws = [
        one.normal(SIZE, "a", 1),
        one.normal(SIZE, "a", 2),
        one.normal(SIZE, "b", 1),
        other.normal(SIZE, "a", 1),
    ]
    assert one.normal(SIZE, "a", 1).tobytes() == draws[0].tobytes()
    for k, draw in enumerate(draws):
        counted = [np.mean(draw < at) for at in (-2.0, -1.0, 0.0, 1.0, 2.0)]
        assert counted == pytest.approx([0.02275, 0.15866, 0.5, 0.84134, 0.97725], abs=0.012)
        assert all(abs(np.corrcoef(draw, draws[j])[0, 1]) < 0.035 for j in range(k))
    assert abs(np.corrcoef(draws[0][: SIZE // 2], draws[0][SIZE // 2 :])[0, 1]) < 0.05


def test_the_noise_of_steps_adds_up_to_that_of_their_prefix() -> None:
    first, again, other = (TreeNoise(Seeded(seed)).step(7, 50) for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes() != other.tobytes()
    noise = TreeNoise(Seeded(4))
    total = np.zeros(1000)
    for version in range(1, 41):
        total += noise.step(version, 1000)
        expected = np.zeros(1000)
        for node in nodes(version):
            expected += stream(4, "privacy", *node).standard_normal(1000, np.float32).astype(np.float64)
        np.testing.assert_allclose(total, expected, atol=1e-5)


@pytest.mark.parametrize("honaker", [False, True])
def test_a_resumed_tree_draws_the_same_noise_for_the_same_contents_only(honaker: bool) -> None:
    def tree() -> TreeNoise:
        return TreeNoise(Secret(bytes(32)), restart_every=6, honaker=honaker)

    whole, salts = tree(), {version: f"s{version}" for version in range(1, 17)}
    steps = {version: whole.step(version, 9, salt) for version, salt in salts.items()}
    for stop in range(1, 16):
        resumed = tree()
        resumed.restore({version: salt for version, salt in salts.items() if version <= stop})
        assert resumed.step(stop + 1, 9, salts[stop + 1]).tobytes() == steps[stop + 1].tobytes()
    again = tree()
    again.restore({version: salt for version, salt in salts.items() if version < 16})
    assert not np.isclose(again.step(16, 9, "other"), steps[16]).any()
    # A repeated attempt replaces the noise of the first attempt: its step is relative to version 15.
    assert again.step(16, 9, "s16").tobytes() == steps[16].tobytes()


# ---- a step ------------------------------------------------------------------------------------------


def made(
    rules: Privacy = RULES,
    most: float = 0.5,
    key: source.Source | None = None,
    update_format: str = "float32",
) -> Aggregator:
    buffer = ParameterBuffer.create(Shape(SIZE, 3, 4, 0, update_format))
    buffer.model(0)[:] = 0.0
    buffer.publish(version=0, entry=0)
    return Aggregator(buffer, ServerOptimizer(), None, Mechanism(rules, most, key or Secret(bytes(32))))


@pytest.fixture
def aggregator() -> Iterator[Aggregator]:
    found = made()
    yield found
    found.buffer.close()


def deliver(aggregator: Aggregator, task: int, update: Any) -> None:
    lease = aggregator.lease(task=task, client=task, version=aggregator.buffer.latest[0])
    slot = aggregator.buffer.slot(lease.slot)
    slot[:] = update
    if (scales := aggregator.buffer.scales(lease.slot)) is not None:
        scales[:] = 0.01
    aggregator.buffer.written(lease.slot, task=task, checksum=checksum_of(aggregator, task))


def test_the_server_clips_each_update_and_adds_noise_of_the_declared_deviation() -> None:
    audit(made())


def audit(aggregator: Aggregator) -> None:
    """Make six versions from updates below and above the clipping norm. Assert that each update is clipped,
    and that the noise in each version has the standard deviation of the tree mechanism."""
    rng, mechanism, clean = np.random.default_rng(0), aggregator.privacy, np.zeros(SIZE)
    assert mechanism is not None
    try:
        for version in range(1, 7):
            updates = [rng.normal(size=SIZE) * scale / math.sqrt(SIZE) for scale in (1.0, 30.0)]
            for k, update in enumerate(updates):
                deliver(aggregator, k, update.astype(np.float32))
                clean += 0.5 * min(1.0, 2.0 / float(np.linalg.norm(update))) * update
            entry = aggregator.free_entry()
            assert entry is not None
            result = aggregator.sum(Sum(version, (0, 1), (0.5, 0.5), clip_norm=2.0), entry)
            assert result.bad == ()
            assert len(result.salt) == 32
            for task in (0, 1):
                aggregator.release(task)
            noise = aggregator.buffer.model(entry) - clean
            deviation = 0.5 * 2.0 * 0.5 * math.sqrt(version.bit_count())
            assert np.std(noise) == pytest.approx(deviation, rel=0.03)
            direction = clean / np.linalg.norm(clean)  # an update that is not clipped shows here
            assert abs(float(noise @ direction)) < 5 * deviation
    finally:
        aggregator.buffer.close()


DEVIATION, NOISE, STEP = Mechanism.deviation, Mechanism.noise, TreeNoise.step


def _clip_noise(self: Mechanism, version: int, size: int, salt: str = "") -> Any:
    drawn = NOISE(self, version, size, salt)
    return drawn / max(1.0, float(np.linalg.norm(drawn)) * self.deviation(2.0) / 2.0)


@pytest.mark.parametrize(
    ("target", "name", "mutant"),
    [
        (Mechanism, "deviation", lambda self, norm: DEVIATION(self, norm) / 2),
        (Mechanism, "noise", _clip_noise),
        (Mechanism, "clip", lambda self, weights, squares, norm: Clipped(list(weights), 0)),
        (TreeNoise, "step", lambda self, version, size, salt="": STEP(self, 1, size, salt)),
    ],
    ids=["half the noise", "noise is clipped", "updates are not clipped", "one version's noise for all"],
)
def test_the_audit_finds_a_broken_mechanism(
    target: type, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = made()
    monkeypatch.setattr(target, name, mutant)
    with pytest.raises(AssertionError):
        audit(broken)


def test_a_clipped_update_is_within_the_norm_however_large_it_is() -> None:
    """Clipping factors become float32 weights. Regression: rounding weights below 2^−126 doubled a clipped
    update whose norm was 1e40."""
    norms = 10.0 ** np.arange(-3, 44, 0.25)
    found = Mechanism(RULES, 0.01, Seeded(1)).clip([0.01] * len(norms), norms**2, 1e-3).weights
    sent = np.array(found, np.float32).astype(float) * norms
    assert sent.max() <= 0.01 * 1e-3 * (1 + 1e-6)
    assert sent[:100] == pytest.approx(0.01 * 1e-3)
    trained, zeros = np.full(1000, 3e38, np.float32), np.zeros(1000, np.float32)
    assert LocalNoise(1e-5, 1e-6, 1, Seeded(1)).protect(trained, zeros, 0, 0)
    assert float(np.linalg.norm(trained.astype(float))) <= 1e-5 * (1 + 1e-3)


def test_a_repeated_version_has_the_same_noise_only_for_the_same_updates(aggregator: Aggregator) -> None:
    """If the sums before and after a kill had the same noise, they would reveal the difference of their
    updates."""

    def attempt(update: float) -> tuple[str, bytes]:
        deliver(aggregator, 0, update)
        result = aggregator.sum(Sum(1, (0,), (0.5,), clip_norm=2.0), entry=1)
        aggregator.release(0)
        found = aggregator.buffer.model(1) - 0.5 * update * min(1.0, 2.0 / (update * math.sqrt(SIZE)))
        aggregator.buffer.publish(0, 0)
        return result.salt, found.tobytes()

    first, again, other = attempt(0.001), attempt(0.001), attempt(0.002)
    assert first == again
    assert first[0] != other[0]
    a, b = (np.frombuffer(noise, np.float32) for _, noise in (first, other))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05


@pytest.mark.parametrize("update_format", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("bad", ["nan", "altered", "failed"])
def test_a_bad_update_is_summed_as_zero_in_its_place(bad: str, update_format: str) -> None:
    """If another update replaced it, every later version would reveal that it was bad."""
    models = []
    for broken in (True, False):
        aggregator = made(key=Seeded(3), update_format=update_format)
        deliver(aggregator, 0, 1)
        deliver(aggregator, 1, 0)
        raw = aggregator.buffer.raw(aggregator.leases[1].slot)
        if broken:
            raw[:] = 0xFF if bad == "nan" else 0x3F
        if broken and bad == "failed":
            aggregator.write_zero(1)
        elif bad == "nan":
            aggregator.buffer.checksum[aggregator.leases[1].slot] = checksum_of(aggregator, 1)
        result = aggregator.sum(Sum(1, (0, 1), (0.5, 0.5), clip_norm=2.0), entry=1)
        assert (result.bad, aggregator.buffer.latest) == ((), (1, 1))
        assert result.zero == ((1,) if broken and bad != "failed" else ())
        assert result.altered == ((1,) if broken and bad == "altered" else ())
        assert result.checksums[1] == checksum_of(aggregator, 1)
        models.append(aggregator.buffer.model(1).tobytes())
        aggregator.buffer.close()
    assert models[0] == models[1]


def checksum_of(aggregator: Aggregator, task: int) -> int:
    slot = aggregator.leases[task].slot
    return with_scales(kernels.checksum(aggregator.buffer.slot(slot)), aggregator.buffer.scales(slot))


def test_a_repeated_step_sums_an_update_that_was_altered_before_as_zero(aggregator: Aggregator) -> None:
    """On replay, the update is no longer altered, but the model and the noise must be the same."""
    deliver(aggregator, 0, 0.1)
    deliver(aggregator, 1, 0.2)
    order, raw = Sum(1, (0, 1), (0.5, 0.5), clip_norm=2.0), aggregator.buffer.raw(aggregator.leases[1].slot)
    whole = raw.copy()
    raw[:4] = 0x3F
    first = aggregator.sum(order, entry=1)
    assert first.zero == first.altered == (1,)
    raw[:] = whole
    aggregator.buffer.publish(0, 0)
    again = aggregator.sum(order, entry=2, zero=first.zero)
    assert (again.zero, again.altered, again.salt) == ((1,), (), first.salt)
    assert aggregator.buffer.model(1).tobytes() == aggregator.buffer.model(2).tobytes()


def test_gaussian_noise_of_versions_is_independent() -> None:
    mechanism = Mechanism(msgspec.structs.replace(RULES, mechanism="gaussian"), 0.5, Seeded(3))
    first, second = (mechanism.noise(version, SIZE) for version in (1, 2))
    assert np.std(first) == pytest.approx(1.0, rel=0.03)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.035


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_private_fedbuff_by_hand(momentum: float) -> None:
    """Clients 0, 1 and 2 send Δ = 1, 10 and 100, clipped to 4. The updates arrive as in
    test_oracle_optimizer: from clients 0 and 1 (τ = 0 and 0), then 0 and 0 (τ = 1 and 0), then 1 and 2 (τ = 1
    and 2)."""
    rules = Privacy(clip_norm=4.0, noise_multiplier=0.1, noise="seeded")
    core = Core(
        FedBuff(buffer_size=2, momentum=momentum), fleet(3), 9, experiment.Stop(versions=3), privacy=rules
    )
    deltas = (1.0, 10.0, 100.0)
    result = run_in_memory(core, [2.0, 3.0, 7.0], train=lambda client, model, trip: model + deltas[client])

    def node(*ids: int) -> float:
        return 0.1 * 4.0 / 2 * float(stream(9, "privacy", *ids).standard_normal(1, np.float32)[0])

    two, three = 2**-0.5, 3**-0.5
    steps = [
        (1 + 4) / 2 + node(0, 1),
        (two * 1 + 1) / 2 + node(1, 1) - node(0, 1),
        (two * 4 + three * 4) / 2 + node(0, 3),
    ]
    model, velocity, expected = 0.0, 0.0, [0.0]
    for step in steps:
        velocity = momentum * velocity + step
        model += velocity
        expected.append(model)
    assert [float(made[0]) for made in result.models] == pytest.approx(expected, rel=1e-6)


# ---- the adaptive clipping norm -------------------------------------------------------


def test_the_norm_follows_algorithm_1_of_andrew_et_al() -> None:
    rules = Privacy(clip_norm=1.0, quantile=0.75, quantile_rate=0.4, quantile_noise=3.0)
    mechanism = Mechanism(rules, 0.25, Seeded(5))
    clipped = mechanism.clip([0.25] * 4, [0.25, 1.0, 1.01, 100.0], 1.0)
    assert clipped.within == 2
    assert clipped.weights == pytest.approx([0.25, 0.25, 0.25 / math.sqrt(1.01), 0.025])
    noise = 3.0 * float(stream(5, "privacy-quantile", 7).standard_normal(1, np.float32)[0])
    expected = math.exp(-0.4 * ((2 + noise) / 4 - 0.75))
    assert mechanism.next_norm(7, clipped, 1.0) == pytest.approx(expected)
    assert Mechanism(RULES, 0.25, Seeded(5)).next_norm(7, clipped, 1.0) is None
    wild = Mechanism(msgspec.structs.replace(rules, quantile_rate=1e9, quantile_noise=1e9), 0.25, Seeded(5))
    found = [wild.next_norm(version, clipped, 1e12) for version in range(20)]
    assert set(found) == {1e12, 1e12 / math.e}


def shift_of_the_count(squares: list[float], client: int) -> float:
    """Return the change of the released count of updates within the norm if this client's update is zero."""
    rules = Privacy(clip_norm=2.0, quantile=0.5, quantile_rate=0.01, quantile_noise=1e-9)
    mechanism, neighbour = Mechanism(rules, 0.1, Seeded(0)), [*squares]
    neighbour[client] = 0.0
    norms = [
        mechanism.next_norm(1, mechanism.clip([0.1] * len(these), these, 2.0), 2.0)
        for these in (squares, neighbour)
    ]
    assert norms[0] is not None
    assert norms[1] is not None
    return math.log(norms[1] / norms[0]) / 0.01 * 10


@pytest.mark.parametrize("update", [0.0, 1e-60, 1.0, 4.0, 4.01, 1e30, math.nan, math.inf])
def test_a_client_whose_update_is_zero_moves_the_count_by_a_half_at_most(update: float) -> None:
    """The sensitivity of the count is therefore 1/2. If an update of zero were counted as within the norm, it
    would be 1."""
    squares = [1.0, 9.0, update, 0.0, 100.0, math.nan, 4.0, 16.0, 1.0, 1.0]
    moved = abs(shift_of_the_count(squares, 2))
    assert moved == pytest.approx(0.5 if math.isfinite(update) and update else 0.0, abs=1e-5)


def test_the_norm_reaches_the_quantile_and_a_replay_repeats_it() -> None:
    rules = Privacy(clip_norm=100.0, quantile=0.5, quantile_noise=0.2)
    core = Core(FedBuff(buffer_size=4), fleet(8), 0, experiment.Stop(versions=150), privacy=rules)
    result = run_in_memory(core, durations=lambda c, t: 1 + c / 9, train=lambda c, model, trip: model + c + 1)
    orders = [action for _, actions in result.history for action in actions if isinstance(action, Sum)]
    assert orders[0].clip_norm == 100.0
    assert 3.0 < float(np.median([order.clip_norm for order in orders[-50:] if order.clip_norm])) < 6.0
    again = Core(FedBuff(buffer_size=4), fleet(8), 0, experiment.Stop(versions=150), privacy=rules)
    for event, actions in result.history:
        assert again.handle(event) == actions


# ---- limits on participation --------------------------------------------------------------------------


def limited(
    strategy: FedBuff | FedAvg, clients: int, versions: int, **limits: int
) -> tuple[Core, list[list[int]]]:
    """Run in memory with these limits; return the core at the end, and the clients in each version."""
    rules, rng = Privacy(clip_norm=1.0, **limits), np.random.default_rng(1)
    core = Core(strategy, fleet(clients), 0, experiment.Stop(versions=versions), privacy=rules)
    result = run_in_memory(core, durations=lambda client, trip: 1.0 + client % 3 + rng.random())
    return core, [[update.client for update in updates] for _, updates in result.sums]


@pytest.mark.parametrize(
    "strategy",
    [
        FedBuff(buffer_size=3),
        FedBuff(buffer_size=3, concurrency=4, restart="new-version"),
        FedBuff(buffer_size=3, max_staleness=1),
        FedAvg(cohort=3, weighting="uniform"),
        FedAvg(cohort=3, over_selection=1.5, weighting="uniform"),
    ],
    ids=range(5),
)
def test_participations_and_their_separation_are_limited(strategy: FedBuff | FedAvg) -> None:
    core, versions = limited(strategy, clients=12, versions=1000, max_participations=5, min_separation=3)
    taken = [client for clients in versions for client in clients]
    assert max(map(taken.count, range(12))) == 5
    assert core.stopped == "participations"
    last: dict[int, int] = {}
    for version, clients in enumerate(versions):
        for client in clients:
            assert version - last.get(client, -3) >= 3
            last[client] = version
    # No further version was possible: fewer participations are left than a version needs, or the clients that
    # have some left were in one of the last versions.
    assert 12 * 5 - len(taken) < 3 * 3 * 3
    assert core.participation is not None
    assert core.participation.applied == [taken.count(client) for client in range(12)]


def test_poisson_cohorts_vary_in_size_and_all_updates_have_one_weight() -> None:
    strategy = FedAvg(cohort=40, weighting="uniform", cohorts="poisson")
    strategy.check(120)
    core = Core(strategy, fleet(120), 0, experiment.Stop(versions=40), privacy=RULES)
    result = run_in_memory(core, durations=[1.0] * 120)
    sizes = [len(action.tasks) for action, _ in result.sums]
    assert abs(np.mean(sizes) - 40) < 4
    assert 3.0 < np.std(sizes) < 8.0  # √(120·⅓·⅔) = 5.2
    assert all(set(action.weights) == {1 / 40} for action, _ in result.sums)
    assert max(sizes) <= strategy.max_held(120) == 97
    with pytest.raises(ConfigError, match=r"strategy\.cohorts = 'poisson' also requires"):
        FedAvg(cohort=10, weighting="uniform", cohorts="poisson").check(120)


def test_without_limits_a_client_may_be_in_consecutive_versions() -> None:
    core, versions = limited(FedBuff(buffer_size=3), clients=6, versions=40)
    assert core.stopped == "versions"
    assert core.participation is None
    assert any(set(clients) & set(after) for clients, after in pairwise(versions))


TOO_HEAVY = r"step must return weights of at most max_weight, 0\.5, got 0\.6"
NOT_ALONE = r"step must return only weights under \[privacy\], got keep, a base_scale or parts"


@pytest.mark.parametrize(
    ("updates", "weights", "others", "message"),
    [
        (1, [0.6], {}, TOO_HEAVY),
        (1, [-0.6], {}, TOO_HEAVY),
        (2, [0.3, -0.3], {}, TOO_HEAVY),  # of one update, twice
        (1, [0.5], {"keep": True}, NOT_ALONE),
        (1, [0.5], {"base_scale": 0.9}, NOT_ALONE),
        (1, [0.5], {"parts": {"x": VectorSum([1.0])}}, NOT_ALONE),
    ],
)
def test_a_step_that_reveals_more_than_the_noise_hides_ends_the_run(
    updates: int, weights: list[float], others: dict[str, Any], message: str
) -> None:
    class Heavy(FedBuff):
        vectors = ("x",)

        def step(self, state: Any, view: Any) -> Step | None:
            return Step(view.held[:1] * updates, weights, **others) if view.held else None

    core = Core(Heavy(buffer_size=2), fleet(2), 0, experiment.Stop(versions=1), privacy=RULES)
    with pytest.raises(RunError, match=message):
        run_in_memory(core, [1.0, 1.0])


# ---- validation -------------------------------------------------------------------------------------


def wanted(privacy: dict[str, Any], **changes: Any) -> Experiment:
    given: dict[str, Any] = {"fleet": {"devices": {"pixel-4": 6}}, "stop": {"versions": 2}, **changes}
    return config.validate(Experiment(**given, privacy={"clip_norm": 1.0, **privacy}))  # type: ignore[arg-type]


UNBOUNDED = r"\[privacy\] needs a strategy that bounds an update's weight, got"
UNIFORM = {"weighting": "uniform"}
LOCAL = {"local_noise_multiplier": 2.0, "max_participations": 3}
FEDBUFF = {"name": "fedbuff"}
WITHOUT = "has no effect without "


@pytest.mark.parametrize(
    ("privacy", "strategy", "message"),
    [
        ({}, {"name": "fedbuff", "normalize": True}, UNBOUNDED),
        ({}, {"name": "fedavg"}, UNBOUNDED),
        ({}, {"name": "scaffold", **UNIFORM}, UNBOUNDED),
        ({}, {"name": "fednova", **UNIFORM}, UNBOUNDED),
        ({}, {"name": "fedavg", "replacement": True, **UNIFORM}, UNBOUNDED),
        ({}, {"name": "fedavg", "redraw": False, **UNIFORM}, UNBOUNDED),  # in a smaller round
        ({**LOCAL, "noise_multiplier": 1.0}, {"name": "fedasync"}, UNBOUNDED),
        (
            LOCAL,
            {"name": "scaffold"},
            "local_noise_multiplier: .* strategy 'scaffold' also exchanges c; choose another",
        ),
        (LOCAL, {"name": "pisces", "credits": 5}, r"strategy.credits: has no effect with \[privacy\]"),
        ({"local_noise_multiplier": 2.0}, FEDBUFF, "max_participations: missing; it sets on how many trips"),
        ({**LOCAL, "quantile": 0.5}, FEDBUFF, "quantile: must be unset with local_noise_multiplier"),
        ({**LOCAL, "honaker": True}, FEDBUFF, f"honaker: {WITHOUT}privacy.noise_multiplier above 0"),
        ({**LOCAL, "mechanism": "gaussian"}, FEDBUFF, f"mechanism: {WITHOUT}privacy.noise_multi"),
        (
            {"min_separation": 3},
            {"name": "fedbuff", "buffer_size": 3},
            "min_separation must be at most 2 for 6 clients and 3 updates per version, got 3",
        ),
        ({"mechanism": "gaussian", "honaker": True}, FEDBUFF, f"honaker: {WITHOUT}privacy.mech"),
        ({"mechanism": "gaussian", "restart_every": 4}, FEDBUFF, f"restart_every: {WITHOUT}"),
        ({"quantile_noise": 4.0}, FEDBUFF, f"quantile_noise: {WITHOUT}privacy.quantile, got 4"),
        ({"quantile": 1.0}, FEDBUFF, "quantile: must be"),
    ],
)
def test_settings_that_give_no_privacy_are_refused(
    privacy: dict[str, Any], strategy: dict[str, Any], message: str, tmp_path: Path
) -> None:
    start = "" if message == UNBOUNDED or message.startswith("strategy") else r"privacy\."
    with pytest.raises(ConfigError, match=f"^{start}{message}"):
        checked(wanted(privacy, strategy=strategy), tmp_path)


@pytest.mark.parametrize("update_format", ["float16", "bfloat16", "int8"])
def test_both_kinds_of_noise_are_refused_with_rounded_updates(update_format: str) -> None:
    """The server's noise is scaled for updates that differ by at most L. After rounding, noisy updates can
    differ by more."""
    size, server = 20_000, {"server": {"update_format": update_format}}
    kind, noise = FORMATS[update_format], LocalNoise(1.0, 4.0, 1, Seeded(3))
    true = np.full(size, size**-0.5, np.float32)
    received = []
    for update in (true, np.zeros(size, np.float32)):
        raw, sum_of = np.zeros(kind.nbytes(size), np.uint8), np.zeros(size, np.float32)
        assert noise.protect(update, np.zeros(size, np.float32), client=0, trip=0)
        values, scales = kind.values(raw, size), kind.scales(raw, size)
        kernels.quantize(values, update, scales=scales)
        kernels.weighted_sum(sum_of, None, [values], [1.0], scales=None if scales is None else [scales])
        received.append(sum_of.astype(float))
    assert np.linalg.norm(received[0] - received[1]) > 1.01
    with pytest.raises(ConfigError, match="update_format: must be 'float32' with both noise_multiplier and"):
        wanted({**LOCAL, "noise_multiplier": 1.0}, **server)
    for alone in (LOCAL, {"noise_multiplier": 1.0}):
        assert wanted(alone, **server).server.update_format == update_format


READER = """
from dataclasses import dataclass

from edgefl.strategies import Buffered


@dataclass(frozen=True, kw_only=True)
class Reader(Buffered):
    reads = "updates"

    def max_weight(self, clients):
        return 1.0 / self.size(clients)

    def combine(self, rows, weights):
        return 100 * rows[0]
"""


def test_a_strategy_that_reads_updates_is_private_by_local_noise_only(tmp_path: Path) -> None:
    """The strategy's result may be a single client's update with any factor: it does not get the weights and
    the noise of a sum."""
    (tmp_path / "reader.py").write_text(READER)
    changes = {"strategy": {"name": "reader:Reader", "buffer_size": 2}}
    with pytest.raises(ConfigError, match=r"^\[privacy\] .* strategy 'reader:Reader' reads individual"):
        checked(wanted({"noise_multiplier": 1.0}, **changes), tmp_path)
    assert checked(wanted(LOCAL, **changes), tmp_path).privacy is not None
    with pytest.raises(ConfigError, match="reads individual updates"):
        checked(wanted({**LOCAL, "noise_multiplier": 1.0}, **changes), tmp_path)


def test_a_fresh_run_makes_a_key_and_a_resumed_one_needs_it(tmp_path: Path) -> None:
    secret = wanted({"noise_multiplier": 1.0})
    made, again = source_of(secret, tmp_path, fresh=True), source_of(secret, tmp_path)
    assert made.normal(3, "a").tobytes() == again.normal(3, "a").tobytes()
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert source_of(secret, tmp_path, fresh=True).normal(3, "a").tobytes() != made.normal(3, "a").tobytes()
    (tmp_path / KEY_FILE).unlink()
    with pytest.raises(ConfigError, match=f"the secret noise key {KEY_FILE} is missing"):
        source_of(secret, tmp_path)
    (tmp_path / KEY_FILE).mkdir()
    with pytest.raises(ConfigError, match=f"{KEY_FILE}: cannot be read: Is a directory"):
        source_of(secret, tmp_path)
    (tmp_path / KEY_FILE).rmdir()
    for seeded in (wanted({}), wanted({"noise_multiplier": 1.0, "noise": "seeded"})):
        assert isinstance(source_of(seeded, tmp_path, fresh=True), Seeded)
    assert not (tmp_path / KEY_FILE).exists()
