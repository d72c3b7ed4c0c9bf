"""The plan of a client's training as data: the number of steps in a trip, and their batch sizes.

This module does not import torch. A trip is a client's download, training and upload.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from edgefl.errors import ConfigError, unknown
from edgefl.experiment import Training
from edgefl.strategies.base import NO_TERMS, LocalTerms, Strategy


class Work(NamedTuple):
    """The work of one trip: the number of steps, and the number of examples in them.

    An example is counted each time it is used.
    """

    steps: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class LocalRule:
    """A client's training on one trip: ``steps`` or ``epochs`` of SGD, or one epoch if neither is given.

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
    terms: LocalTerms = NO_TERMS
    """Terms that the strategy adds to the gradient of each step."""

    @classmethod
    def of(cls, training: Training, terms: LocalTerms = NO_TERMS) -> LocalRule:
        """Create the rule from the experiment's ``[training]`` table and the strategy's gradient terms."""
        own = {item.name: getattr(training, item.name) for item in fields(cls) if item.name != "terms"}
        return cls(**own, terms=terms)

    @property
    def state_vectors(self) -> int:
        """Number of vectors that SGD needs in addition to weights and gradient, each as large as the weights.

        Momentum needs one vector, the proximal term two, and the strategy's other terms one in total.
        """
        return (self.momentum > 0) + 2 * (self.terms.prox_mu > 0) + bool(self.terms.vectors)

    def batches(self, examples: int, steps: int | None = None) -> Iterator[int]:
        """Yield the batch size of each step for a client with this number of examples.

        The last batch of an epoch may be smaller. ``steps`` overrides the rule's number of steps.
        """
        epoch, steps = self._lengths(examples, steps)
        for step in range(steps):
            yield min(self.batch_size, examples - step % epoch * self.batch_size)

    def sizes(self, examples: int, steps: int | None = None) -> dict[int, int]:
        """Return the number of steps with each batch size, for the same arguments as `batches`.

        This takes constant time, whatever the number of steps.

        >>> LocalRule(epochs=2, batch_size=4).sizes(10)
        {4: 4, 2: 2}
        """
        epoch, steps = self._lengths(examples, steps)
        whole, rest = divmod(examples, self.batch_size)
        epochs, further = divmod(steps, epoch) if steps else (0, 0)
        counts = {self.batch_size: epochs * whole + min(further, whole), rest: epochs if rest else 0}
        return {size: count for size, count in counts.items() if count}

    def _lengths(self, examples: int, steps: int | None) -> tuple[int, int]:
        """Return the number of steps in an epoch, and in a trip."""
        epoch = math.ceil(examples / self.batch_size)
        if steps is None:
            steps = self.steps if self.steps is not None else epoch * (self.epochs or 1)
        return epoch, steps

    def work(self, examples: int) -> Work:
        """Return the work of one trip for a client with this number of examples."""
        sizes = self.sizes(examples)
        return Work(sum(sizes.values()), sum(size * count for size, count in sizes.items()))


def check_terms(strategy: Strategy, rule: LocalRule, profiles: Sequence[str]) -> None:
    """Raise `ConfigError` if the terms that the strategy adds to SGD do not fit this fleet."""
    kind, terms, kept = type(strategy).__name__, rule.terms, strategy.client_vectors
    exchanged, own = terms.control or (None, None)
    for name, have in ((exchanged, strategy.vectors), (own, kept), (terms.linear, kept)):
        if name is not None and name not in have:
            raise ConfigError(f"{kind}.local_rule: " + unknown("vector", name, have))
    if terms.control is not None and rule.momentum:
        raise ConfigError(
            f"training.momentum: must be 0 with {kind}, whose clients derive their mean gradient from the "
            f"change of the model, got {rule.momentum:g}"
        )
    if isinstance(terms.lr, Mapping):
        for name in terms.lr.keys() - set(profiles):
            raise ConfigError(
                f"{kind}.local_rule: lr: " + unknown("device of the fleet", name, set(profiles))
            )
    elif terms.lr is not None and len(terms.lr) != len(profiles):
        raise ConfigError(f"{kind}.local_rule: lr: must be {len(profiles)} factors, got {len(terms.lr)}")
    factors: Any = terms.lr.values() if isinstance(terms.lr, Mapping) else terms.lr
    for factor in () if factors is None else factors:
        if not (isinstance(factor, int | float) and 0 < factor < math.inf):
            raise ConfigError(f"{kind}.local_rule: lr: factors must be finite and above 0, got {factor!r}")
