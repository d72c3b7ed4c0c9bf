"""A client's local training: Q steps or E epochs of SGD on its own examples.

The weights are one flat vector y, which starts as the downloaded model w_k:

    y_0 = w_k;   y_{q+1} = y_q − η_ℓ · v_q,   v_q = m · v_{q−1} + g(y_q) + λ y_q + μ (y_q − w_k)

with the momentum m, the weight decay λ and the weight μ of FedProx (Li et al. 2020); g(y) may include vectors
that the client keeps (`edgefl.strategies.base.LocalTerms`). With ``lr_normalization``, a step on a short
batch of n < B examples uses the learning rate η_ℓ · n / B (FedBuff, Nguyen et al. 2022, §5 and C.6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from edgefl.learning.arithmetic import Arithmetic, torch_seed
from edgefl.learning.dataset import Examples
from edgefl.learning.flat import FlatModel
from edgefl.learning.losses import Loss
from edgefl.learning.rule import LocalRule
from edgefl.strategies.base import LocalTerms, TripInputs

Rows = NDArray[np.int64]


class TrainResult(NamedTuple):
    """Result of one trip: its numbers of steps and examples, and its mean training loss.

    The loss is not finite if the training diverged.
    """

    steps: int
    examples: int
    loss: float
    metrics: Mapping[str, float] = {}
    """Metrics that the user's function logged."""
    counted: int | None = None
    """Number of examples by which the update is weighted; None for the client's total number."""
    failed: str = ""
    """Reason why a client that adds local noise sends only noise; empty if it sends an update."""


class Trainer:
    """Trains the model ``flat`` in place by SGD; one trainer can train any number of clients, one by one.

    >>> from torch import nn
    >>> flat = FlatModel(nn.Linear(2, 3))
    >>> x, y = np.zeros((5, 2), np.float32), np.arange(5) % 3
    >>> Trainer(flat).run(x, y, LocalRule(epochs=1, batch_size=2), np.random.default_rng(0))
    TrainResult(steps=3, examples=5, loss=...)
    """

    def __init__(
        self, flat: FlatModel, loss: Loss = cross_entropy, arithmetic: Arithmetic | None = None
    ) -> None:
        self._flat = flat
        self._loss = loss
        self._arithmetic = arithmetic or Arithmetic()
        self._vectors: dict[str, Tensor] = {}

    def run(
        self,
        x: Examples,
        y: NDArray[Any],
        rule: LocalRule,
        rng: np.random.Generator,
        done: Callable[[int], None] | None = None,
        rows: Rows | None = None,
        steps: int | None = None,
        given: TripInputs | None = None,
    ) -> TrainResult:
        """Run one trip from the model's current state on ``rows`` (default: all) of ``x`` and ``y``.

        Each epoch uses the rows in a new order. ``steps`` overrides the rule's number of steps. ``done(n)``
        is called after each step on n examples; if it raises an exception, the training ends. With
        the same ``rng``, the result is exactly the same, even with dropout.
        """
        own = np.arange(len(y), dtype=np.int64) if rows is None else rows
        if len(own) == 0:
            raise ValueError("rows must contain at least one example (got none)")
        flat, arithmetic, device = self._flat, self._arithmetic, self._flat.vector.device
        flat.begin_training()
        terms = _VectorTerms(flat, rule.terms, given) if rule.terms.vectors else None
        step = self._stepper(rule, terms, given)
        module, loss_of = flat.module, self._loss
        made = examples = 0
        total = 0.0
        with torch_seed(int(rng.integers(2**63)), device):
            order, position = rng.permutation(own), 0
            for size in rule.batches(len(own), steps):
                if position == len(order):
                    order, position = rng.permutation(own), 0
                batch = order[position : position + size]
                position += size
                inputs, targets = arithmetic.batch(x[batch], device), torch.from_numpy(y[batch]).to(device)
                flat.discard_gradients()
                with arithmetic.cast(device):
                    loss = loss_of(module(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                step(rule.lr * size / rule.batch_size if rule.lr_normalization else rule.lr)
                total += loss.item() * size
                made += 1
                examples += size
                if done is not None:
                    done(size)
        flat.discard_gradients()
        if terms is not None and made:
            terms.finish()
        flat.check_bound()
        flat.pull()
        return TrainResult(made, examples, total / examples if made else math.nan)

    def _stepper(
        self, rule: LocalRule, terms: _VectorTerms | None, given: TripInputs | None
    ) -> Callable[[float], None]:
        """Return a function that updates the weights and computes only the terms that the rule needs.

        The proximal term uses the downloaded model in ``given``, because `Strategy.begin_trip` may have
        changed the weights; without ``given`` it uses the current weights.
        """
        flat, weights, grad, mu = self._flat, self._flat.weights, self._flat.grad, rule.terms.prox_mu
        if not (mu or terms or rule.momentum or rule.weight_decay):
            return flat.descend
        start = None
        if mu:
            downloaded = weights if given is None else torch.from_numpy(given.start[: flat.trainable].copy())
            start = self._vector("start").copy_(downloaded)
        scratch = self._vector("scratch") if mu else None
        velocity = self._vector("velocity").zero_() if rule.momentum else None

        def step(rate: float) -> None:
            flat.gather_gradients()
            if rule.weight_decay:
                grad.add_(weights, alpha=rule.weight_decay)
            if start is not None:
                grad.add_(torch.sub(weights, start, out=scratch), alpha=mu)
            if terms is not None:
                terms.add(grad, rate)
            if velocity is not None:
                velocity.mul_(rule.momentum).add_(grad)
            weights.add_(grad if velocity is None else velocity, alpha=-rate)

        return step

    def _vector(self, name: str) -> Tensor:
        """Return the scratch vector ``name``, as large as the weights and uninitialised; trips reuse it."""
        weights, kept = self._flat.weights, self._vectors.get(name)
        if kept is None or kept.device != weights.device:
            kept = self._vectors[name] = torch.empty_like(weights)
        return kept


class _VectorTerms:
    """Gradient terms that depend on a trip's vectors, and the changes to these vectors after the trip."""

    def __init__(self, flat: FlatModel, terms: LocalTerms, given: TripInputs | None) -> None:
        assert given is not None, "a trip with vector terms needs their vectors"
        self._flat, self._terms, self._given = flat, terms, given
        self._rates = 0.0
        part = slice(flat.trainable)
        shift = np.zeros(flat.trainable, np.float32)
        if terms.control is not None:
            common, own = terms.control
            shift += given.vectors[common][part] - given.kept[own][part]
        if terms.linear is not None:
            shift -= given.kept[terms.linear][part]
        self._shift = torch.from_numpy(shift).to(flat.weights.device)

    def add(self, grad: Tensor, rate: float) -> None:
        """Add the terms to the gradient of a step whose learning rate is ``rate``."""
        grad.add_(self._shift)
        self._rates += rate

    def finish(self) -> None:
        """Update the vectors that the client keeps and uploads, after the last step."""
        part, given, terms = slice(self._flat.trainable), self._given, self._terms
        moved = self._flat.weights.cpu().numpy() - given.start[part]
        if terms.control is not None:
            common, own = terms.control
            change = -given.vectors[common][part] - moved * np.float32(1.0 / self._rates)
            given.send[common][part] = change
            given.kept[own][part] += change
        if terms.linear is not None:
            given.kept[terms.linear][part] -= np.float32(terms.prox_mu) * moved
