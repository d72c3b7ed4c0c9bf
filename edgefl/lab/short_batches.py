"""Tests learning-rate normalisation in FedBuff (Nguyen 2022, theorem of appendix C.6.1) on the real trainer.

A client's step on a batch of b ≤ B examples has the size η·b/B. The problem is F(w) = L/2 ‖w‖². The gradient
of an example contains noise of known variance in all coordinates except the first. The first coordinate
starts away from the optimum, and the other coordinates start at the optimum. Every trip uses new examples, as
the theorem assumes, and continues from the model of the previous trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edgefl.lab.convergence import judged, worst
from edgefl.lab.study import Finding
from edgefl.learning.rule import LocalRule
from edgefl.seeds import stream

SMOOTHNESS, VARIANCE, DISTANCE = 2.0, 3.0, 4.0
"""The smoothness constant L, the variance σ² of the gradient of an example, and the distance ‖y_1 − w*‖."""
NOISY = 256
"""Number of coordinates in which gradients contain noise."""
BATCH = 8
"""The full batch size B."""
RATE = 0.1
"""The learning rate η, which must be below 1/(L·(M/B + 1)); the theorem's constant M is 0 here."""


class Squares(NamedTuple):
    """Contributions of descent and of noise to the weighted mean Σ η_q·E‖∇F(y_q)‖²/A_Q over the steps q.

    The model before step q is y_q, the size of its batch is b_q, η_q = η·b_q/B, and A_Q = Σ η_q.
    """

    descent: float
    noise: float


def expected(sizes: Sequence[int]) -> Squares:
    """Compute the expected weighted means for batches of these sizes, from E[w²] before each step."""
    rates = [RATE * size / BATCH for size in sizes]
    left, noise, means = DISTANCE**2, 0.0, np.zeros(2)
    for rate, size in zip(rates, sizes, strict=True):
        means += rate * SMOOTHNESS**2 * np.array([left, noise])
        kept = (1.0 - rate * SMOOTHNESS) ** 2
        left, noise = kept * left, kept * noise + rate**2 * VARIANCE / size
    return Squares(*(means / sum(rates)).tolist())


def bound(sizes: Sequence[int]) -> float:
    """Return the theorem's bound on the weighted mean, 2(F(y_1) − F*)/A_Q + η·L·σ²/B."""
    total = RATE * sum(sizes) / BATCH
    return SMOOTHNESS * DISTANCE**2 / total + RATE * SMOOTHNESS * VARIANCE / BATCH


def measured(sizes: Sequence[int], seed: int) -> Squares:
    """Train one trip of one step for each batch size in ``sizes``; return the weighted means."""
    import torch

    from edgefl.learning.flat import FlatModel
    from edgefl.learning.train import Trainer

    class Distances(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1 + NOISY))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w - x

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return SMOOTHNESS / 2.0 * outputs.square().sum(dim=1).mean()

    flat, draws = FlatModel(Distances()), stream(seed, "short-batches")
    flat.load(np.array([DISTANCE] + [0.0] * NOISY, np.float32))
    trainer = Trainer(flat, loss)
    rule = LocalRule(epochs=1, batch_size=BATCH, lr=RATE, lr_normalization=True)
    scale = (VARIANCE / NOISY) ** 0.5 / SMOOTHNESS
    means = np.zeros(2)
    for size in sizes:
        squares = SMOOTHNESS**2 * np.square(flat.array, dtype=np.float64)
        means += size * np.array([squares[0], squares[1:].sum()])
        x = np.zeros((size, 1 + NOISY), np.float32)
        x[:, 1:] = draws.normal(scale=scale, size=(size, NOISY))
        trainer.run(x, np.zeros(size, np.int64), rule, draws)
    return Squares(*(means / sum(sizes)).tolist())


def lr_normalization(quick: bool = False) -> Finding:
    """Train on full batches, on single examples, and on batches of 1 to B examples, and test the theorem."""
    steps, seeds = (800, (1,)) if quick else (3_000, (1, 2, 3))
    mixed = 1 + stream(0, "sizes").integers(BATCH, size=steps)
    cases = [[BATCH] * steps, [1] * steps, mixed.tolist()]
    runs = [[measured(sizes, seed) for sizes in cases] for seed in seeds]
    told = [expected(sizes) for sizes in cases]
    ratios = [
        [[one[at] / each[at] for one, each in zip(row, told, strict=True)] for row in runs] for at in (0, 1)
    ]
    part = max(sum(one) / bound(sizes) for row in runs for one, sizes in zip(row, cases, strict=True))
    return judged(
        "steps of η·b/B on short batches keep the bound and the noise of full batches",
        "Nguyen 2022, appendix C.6.1, theorem",
        "at most 2(F(y_1) − F*)/A_Q + η·L·σ²/B",
        [worst("descent", ratios[0], 0.02), worst("noise", ratios[1], 0.08)],
        f"b = {BATCH}, 1, and 1 to {BATCH}; at most {part:.2g} of the bound; noise of b = 1 ÷ that of "
        f"b = {BATCH}: {np.mean([row[1].noise / row[0].noise for row in runs]):.2f}",
        part <= 1.0,
    )
