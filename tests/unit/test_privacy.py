"""FedBuff's private form: clipping, DP-FTRL's tree, and what it spends."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from edgefl import experiment, kernels
from edgefl.core import Core
from edgefl.core.events import Sum
from edgefl.errors import ConfigError
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.run.slots import Aggregator
from edgefl.seeds import stream
from edgefl.strategies.base import Privacy, ServerOptimizer
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.noise import TreeNoise, epsilon, nodes
from edgefl.testing import fleet, run_in_memory


def test_the_nodes_of_a_prefix_cover_each_version_once() -> None:
    for version in range(1, 200):
        leaves = [
            leaf
            for level, index in nodes(version)
            for leaf in range((index - 1 << level) + 1, (index << level) + 1)
        ]
        assert sorted(leaves) == list(range(1, version + 1))
        assert len(nodes(version)) == version.bit_count()
    # What makes the tree worth having: one update touches log2(T) + 1 nodes and not T prefixes.
    every = {node for version in range(5, 129) for node in nodes(version)}
    assert sum((index - 1 << level) < 5 <= index << level for level, index in every) <= math.log2(128) + 1


def test_steps_add_up_to_the_prefixs_noise() -> None:
    first, again, other = (TreeNoise(seed, 1.0).step(7, 50) for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes() != other.tobytes()
    noise = TreeNoise(seed=4, deviation=0.5)
    total = np.zeros(1000)
    for version in range(1, 41):
        total += noise.step(version, 1000)
        expected = np.zeros(1000)
        for node in nodes(version):
            expected += 0.5 * stream(4, "privacy", *node).standard_normal(1000, np.float32).astype(np.float64)
        np.testing.assert_allclose(total, expected, atol=1e-5)
        deviation = 0.5 * math.sqrt(version.bit_count())
        assert np.std(expected) == pytest.approx(deviation, rel=0.12)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_private_fedbuff_by_hand(momentum: float) -> None:
    """Δ = 1, 10, 100 clipped to 4; arrivals as in test_oracle_optimizer: 0τ0 1τ0 · 0τ1 0τ0 · 1τ1 2τ2."""
    strategy = FedBuff(buffer_size=2, clip_norm=4.0, noise_multiplier=0.1, momentum=momentum)
    core = Core(strategy, fleet(3), 9, experiment.Stop(versions=3))
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


@pytest.fixture
def aggregator() -> Any:
    buffer = ParameterBuffer.create(Shape(1000, 3, 4, 0))
    buffer.model(0)[:] = 0.0
    buffer.publish(version=0, entry=0)
    yield Aggregator(buffer, ServerOptimizer(), None, Privacy(clip_norm=2.0, deviation=0.25), seed=3)
    buffer.close()


def deliver(aggregator: Aggregator, task: int, update: Any) -> None:
    lease = aggregator.lease(task=task, client=task, version=0)
    slot = aggregator.buffer.slot(lease.slot)
    slot[:] = update
    aggregator.buffer.written(lease.slot, task=task, checksum=kernels.checksum(slot))


def test_the_server_clips_and_adds_the_same_noise(aggregator: Aggregator) -> None:
    rng = np.random.default_rng(0)
    updates = [rng.normal(scale=scale, size=1000).astype(np.float32) for scale in (0.001, 0.5, 5.0)]
    for task, update in enumerate(updates):
        deliver(aggregator, task, update)
    result = aggregator.sum(Sum(1, (0, 1, 2), (0.5, 0.25, 0.25)), entry=1)
    assert result.bad == ()
    assert result.norms == pytest.approx([float(np.sum(u.astype(np.float64) ** 2)) for u in updates])
    expected = TreeNoise(3, 0.25).step(1, 1000).astype(np.float64)
    for update, weight in zip(updates, (0.5, 0.25, 0.25), strict=True):
        size = float(np.linalg.norm(update.astype(np.float64)))
        expected += weight * min(1.0, 2.0 / size) * update
    np.testing.assert_allclose(aggregator.buffer.model(1), expected, atol=1e-6)
    assert result.checksums == tuple(kernels.checksum(update) for update in updates)


def test_an_update_that_is_not_finite_is_found_all_the_same(aggregator: Aggregator) -> None:
    deliver(aggregator, 0, 1.0)
    deliver(aggregator, 1, np.nan)
    assert aggregator.sum(Sum(1, (0, 1), (0.5, 0.5)), entry=1).bad == (1,)
    assert aggregator.buffer.latest == (0, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"noise_multiplier": 1.0},
            "strategy.noise_multiplier must go with a strategy.clip_norm, got 1 with",
        ),
        ({"clip_norm": 1.0, "normalize": True}, "strategy.normalize must be false with a strategy.clip_norm"),
    ],
)
def test_what_is_not_private_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FedBuff(**fields).check(20)
    assert str(caught.value).startswith(message)


def test_clipping_alone_adds_no_noise() -> None:
    assert FedBuff(clip_norm=1.0, buffer_size=5).privacy(20) == Privacy(1.0, 0.0)
    assert FedBuff(clip_norm=3.0, noise_multiplier=0.5, buffer_size=5).privacy(20) == Privacy(3.0, 0.3)
    assert FedBuff().privacy(20) is None


def test_epsilon_is_that_of_a_gaussian_for_each_node_on_the_way_to_the_root() -> None:
    """Rényi divergence α·h/(2σ²) for h = log2(T) + 1 nodes, turned into (ε, δ) at the best order."""
    pytest.importorskip(
        "dp_accounting", reason="dp-accounting is not installed: pip install 'edgefl[privacy]'"
    )
    sigma, delta = 3.0, 1e-7
    found = epsilon(sigma, versions=1024, delta=delta)
    orders = np.arange(1.01, 200, 0.01)
    rdp = orders * 11 / (2 * sigma**2)
    bound = rdp + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    assert found == pytest.approx(bound.min(), rel=0.02)
    assert epsilon(sigma, 1024, 2) == pytest.approx(epsilon(sigma / 2, 1024), rel=1e-9)
    assert found < epsilon(sigma, 2048) < epsilon(sigma, 1024, participations=3)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError) as caught:
        epsilon(1.0, 10)
    assert str(caught.value) == "accounting needs dp-accounting: pip install 'edgefl[privacy]'"


@pytest.mark.parametrize("wrong", [(0.0, 1, 1, 0.1), (1.0, 0, 1, 0.1), (1.0, 1, 0, 0.1), (1.0, 1, 1, 1.0)])
def test_values_out_of_their_range_are_refused(wrong: tuple[float, int, int, float]) -> None:
    with pytest.raises(ValueError, match="noise_multiplier must be above 0"):
        epsilon(*wrong)
