"""A client's local training: Q steps or E epochs of SGD on its own examples, on the flat vector.

    y_0 = w_k;   y_{q+1} = y_q − η_ℓ · v_q,   v_q = m · v_{q−1} + g(y_q) + λ y_q + μ (y_q − w_k)

with momentum m, weight decay λ and FedProx's μ (Li et al. 2020). With LR normalisation a step on a short
batch of n < B examples uses η_ℓ · n / B (FedBuff, Nguyen et al. 2022, §5 and C.6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from edgefl.errors import ConfigError
from edgefl.experiment import Training
from edgefl.learning.dataset import Examples
from edgefl.learning.flat import FlatModel
from edgefl.learning.randomness import torch_seed

Loss = Callable[[Tensor, Tensor], Tensor]
Rows = NDArray[np.int64]


class Work(NamedTuple):
    """What one trip does: how many steps, on how many examples in all (one counted each time it is used)."""

    steps: int
    examples: int


class TrainResult(NamedTuple):
    """What one trip did, and the mean training loss over its examples (not finite if it diverged)."""

    steps: int
    examples: int
    loss: float


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


class Trainer:
    """Trains ``flat`` in place by SGD; one may serve any number of clients, one after another.

    >>> from torch import nn
    >>> flat = FlatModel(nn.Linear(2, 3))
    >>> x, y = np.zeros((5, 2), np.float32), np.arange(5) % 3
    >>> Trainer(flat).run(x, y, LocalRule(epochs=1, batch_size=2), np.random.default_rng(0))
    TrainResult(steps=3, examples=5, loss=...)
    """

    def __init__(self, flat: FlatModel, loss: Loss = cross_entropy) -> None:
        self._flat = flat
        self._loss = loss
        self._scratch: Tensor | None = None
        self._start: Tensor | None = None
        self._velocity: Tensor | None = None

    def run(
        self,
        x: Examples,
        y: NDArray[np.int64],
        rule: LocalRule,
        rng: np.random.Generator,
        done: Callable[[int], None] | None = None,
        rows: Rows | None = None,
    ) -> TrainResult:
        """One trip from the model's present state on the examples ``rows`` of ``x`` and ``y`` (all if None).

        Batches follow a fresh order of the rows each epoch. ``done(n)`` is called after each step with the
        number of examples that it used; what it raises ends the training and reaches the caller. The same
        ``rng`` gives the same bits, dropout included; torch's global stream is left as it was.
        """
        own = np.arange(len(y), dtype=np.int64) if rows is None else rows
        if len(own) == 0:
            raise ValueError("rows must name at least one example (got none)")
        flat = self._flat
        flat.prepare()
        flat.module.train()
        step = self._stepper(rule)
        module, loss_of, grad = flat.module, self._loss, flat.grad
        full_batch, normalize, rate = rule.batch_size, rule.lr_normalization, rule.lr
        steps = examples = 0
        total = 0.0
        with torch_seed(int(rng.integers(2**63))):
            order, position = rng.permutation(own), 0
            for size in rule.batches(len(own)):
                if position == len(order):
                    order, position = rng.permutation(own), 0
                batch = order[position : position + size]
                position += size
                inputs, labels = torch.from_numpy(x[batch]), torch.from_numpy(y[batch])
                grad.zero_()
                loss = loss_of(module(inputs), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                step(rate * size / full_batch if normalize else rate)
                total += loss.item() * size
                steps += 1
                examples += size
                if done is not None:
                    done(size)
        flat.check_bound()
        return TrainResult(steps, examples, total / examples)

    def _stepper(self, rule: LocalRule) -> Callable[[float], None]:
        """The update of the weights for this rule: only the terms that it has."""
        weights, grad = self._flat.weights, self._flat.grad
        if not (rule.momentum or rule.weight_decay or rule.prox_mu):

            def plain(rate: float) -> None:
                weights.add_(grad, alpha=-rate)

            return plain
        if rule.prox_mu:
            if self._start is None or self._scratch is None:
                self._start, self._scratch = torch.empty_like(weights), torch.empty_like(weights)
            self._start.copy_(weights)
        if rule.momentum:
            if self._velocity is None:
                self._velocity = torch.empty_like(weights)
            self._velocity.zero_()
        start, scratch, velocity = self._start, self._scratch, self._velocity

        def step(rate: float) -> None:
            if rule.weight_decay:
                grad.add_(weights, alpha=rule.weight_decay)
            if rule.prox_mu and start is not None and scratch is not None:
                torch.sub(weights, start, out=scratch)
                grad.add_(scratch, alpha=rule.prox_mu)
            if rule.momentum and velocity is not None:
                velocity.mul_(rule.momentum).add_(grad)
                weights.add_(velocity, alpha=-rate)
            else:
                weights.add_(grad, alpha=-rate)

        return step
