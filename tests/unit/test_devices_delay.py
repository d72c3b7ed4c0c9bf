"""Declared delays: their distributions, and what is said of wrong ones."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from edgefl.devices import load_device
from edgefl.devices.schema import Delay
from edgefl.validation import faults


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


MEANS = [
    (Delay(dist="uniform", low_s=1.0, high_s=2.0), 1.5),
    (Delay(dist="half-normal", scale_s=math.sqrt(math.pi / 2)), 1.0),
    (Delay(dist="exponential", mean_s=3.0), 3.0),
    (Delay(dist="log-normal", median_s=2.0, sigma=0.5), 2.0 * math.exp(0.5**2 / 2)),
    (Delay(dist="pareto", min_s=1.0, alpha=4.0), 4.0 / 3.0),
    (Delay(dist="list", values_s=(1.0, 2.0, 6.0)), 3.0),
]


@pytest.mark.parametrize(("delay", "mean"), MEANS, ids=lambda value: getattr(value, "dist", ""))
def test_delays_have_their_mean_and_are_never_negative(delay: Delay, mean: float) -> None:
    generator = rng(11)
    drawn = np.array([delay.draw(generator) for _ in range(8000)])
    assert drawn.min() >= 0
    assert abs(drawn.mean() - mean) < 4.5 * drawn.std() / math.sqrt(8000)


def test_fedbuffs_clients_have_mean_one() -> None:
    delay = load_device("paper-half-normal").delay_model
    assert delay is not None
    assert delay.scale_s is not None
    assert delay.scale_s * math.sqrt(2 / math.pi) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "delay",
    [
        Delay(dist="log-normal", median_s=1e9, sigma=10.0),
        Delay(dist="pareto", min_s=1e9, alpha=0.1),
        Delay(dist="exponential", mean_s=1e9),
    ],
    ids=lambda d: d.dist,
)
def test_the_widest_delays_that_are_allowed_are_finite(delay: Delay) -> None:
    class Extreme:
        """Draws as far out as a generator can."""

        def standard_normal(self) -> float:
            return 40.0

        def random(self) -> float:
            return math.nextafter(1.0, 0.0)

        def exponential(self, mean: float) -> float:
            return 800.0 * mean

    assert list(faults(msgspec.to_builtins(delay), Delay)) == []
    assert math.isfinite(delay.draw(Extreme(), examples=10**9))  # type: ignore[arg-type]
