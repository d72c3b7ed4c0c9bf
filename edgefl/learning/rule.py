"""How a client trains, as data: how many steps a trip has and how large their batches are. Without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from edgefl.errors import ConfigError
from edgefl.experiment import Training


class Work(NamedTuple):
    """What one trip does: how many steps, on how many examples in all (one counted each time it is used)."""

    steps: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class LocalRule:
    """How a client trains on one trip: ``steps`` or ``epochs`` of SGD (neither given: one epoch).

    Raises `ConfigError` for both of them or for a value out of its range.

    >>> LocalRule(epochs=2, batch_size=4, lr=0.1).work(10)
    Work(steps=6, examples=20)
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 32
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_normalization: bool = False
    prox_mu: float = 0.0

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"training: give steps or epochs (got both: {self.steps}, {self.epochs})")
        for name in ("steps", "epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"training.{name} must be at least 1 (got {value})")
        for name in ("lr", "weight_decay", "prox_mu"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"training.{name} must be a finite number ≥ 0 (got {value})")
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"training.momentum must be in [0, 1) (got {self.momentum})")

    @classmethod
    def of(cls, training: Training, prox_mu: float = 0.0) -> LocalRule:
        """The rule that the experiment's ``[training]`` asks for, with the strategy's proximal μ."""
        return cls(
            steps=training.steps,
            epochs=training.epochs,
            batch_size=training.batch_size,
            lr=training.lr,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            lr_normalization=training.lr_normalization,
            prox_mu=prox_mu,
        )

    def batches(self, examples: int) -> Iterator[int]:
        """The size of each step's batch for a client with so many examples; an epoch's last may be short."""
        epoch = math.ceil(examples / self.batch_size)
        steps = self.steps if self.steps is not None else epoch * (self.epochs or 1)
        for step in range(steps):
            yield min(self.batch_size, examples - step % epoch * self.batch_size)

    def work(self, examples: int) -> Work:
        """What one trip of a client with so many examples does, known before it is done."""
        sizes = list(self.batches(examples))
        return Work(len(sizes), sum(sizes))
