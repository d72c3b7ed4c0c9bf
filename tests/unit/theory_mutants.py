"""Wrong implementations of the algorithms: a finding of `edgefl reproduce theory` must not reproduce them.

Each function breaks the strategies or the core for as long as the `MonkeyPatch` that it is given lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgefl.core.ledger import Ledger
from edgefl.kernels.steps import ServerOptimizer
from edgefl.strategies.asynchronous import Asynchronous
from edgefl.strategies.base import Step, Strategy, Update
from edgefl.strategies.buffered import Buffered
from edgefl.strategies.defedavg_niid import DeFedAvgNIID
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight

Change = Callable[[Sequence[Update], list[float]], list[float]]


def _weights(patch: pytest.MonkeyPatch, change: Change) -> None:
    for kind in (Buffered, DeFedAvgNIID):

        def step(self: Any, state: Any, view: Any, ask: Any = kind.step) -> Step | None:
            made = ask(self, state, view)
            return made and made._replace(weights=change(made.updates, list(made.weights)))

        patch.setattr(kind, "step", step)


def doubled(patch: pytest.MonkeyPatch) -> None:
    _weights(patch, lambda updates, weights: [2.0 * weight for weight in weights])


def quartered(patch: pytest.MonkeyPatch) -> None:
    _weights(patch, lambda updates, weights: [0.25 * weight for weight in weights])


def keeps_one_of_four(patch: pytest.MonkeyPatch) -> None:
    """Three of four updates are thrown away."""
    _weights(patch, lambda updates, weights: [w if at % 4 == 0 else 0.0 for at, w in enumerate(weights)])


def _alone(weights: list[float], kept: Sequence[bool]) -> list[float]:
    """The weight of all, given to those that are kept."""
    total = sum(w for w, keep in zip(weights, kept, strict=True) if keep)
    return [
        w / total * sum(weights) if keep and total else 0.0 for w, keep in zip(weights, kept, strict=True)
    ]


def stretches_one_of_four(patch: pytest.MonkeyPatch) -> None:
    """Three of four updates are thrown away, and the others get their weight."""
    _weights(patch, lambda updates, weights: _alone(weights, [at % 4 == 0 for at in range(len(weights))]))


def two_clients(patch: pytest.MonkeyPatch) -> None:
    """Only the first two clients count."""
    _weights(patch, lambda updates, weights: _alone(weights, [one.client < 2 for one in updates]))


def averages(patch: pytest.MonkeyPatch) -> None:
    _weights(patch, lambda updates, weights: [1.0 / len(weights)] * len(weights))


def has_momentum(patch: pytest.MonkeyPatch) -> None:
    for kind in (Strategy, FedBuff):
        patch.setattr(kind, "optimizer", lambda self: ServerOptimizer(lr=self.server_lr, momentum=0.5))


def _discounts(patch: pytest.MonkeyPatch, exponent: Callable[[float], float]) -> None:
    def weights(self: Any, state: Any, updates: Sequence[Update], view: Any) -> list[float]:
        return [(1.0 + one.staleness) ** -exponent(self.exponent) / len(updates) for one in updates]

    patch.setattr(FedBuff, "weights", weights)


def discounts_more(patch: pytest.MonkeyPatch) -> None:
    """s(τ) with an exponent that is ½ too large."""
    _discounts(patch, lambda exponent: exponent + 0.5)


def discounts_nothing(patch: pytest.MonkeyPatch) -> None:
    _discounts(patch, lambda exponent: 0.0)


def _held(patch: pytest.MonkeyPatch, change: Callable[[Ledger, Update], Update]) -> None:
    hold = Ledger.hold

    def altered(self: Ledger, event: Any) -> Update:
        update = change(self, hold(self, event))
        self._updates[event.task] = self.held[-1] = update
        return update

    patch.setattr(Ledger, "hold", altered)


def stale_by_one_more(patch: pytest.MonkeyPatch) -> None:
    _held(patch, lambda books, update: update._replace(staleness=update.staleness + 1))


def stale_by_one_less(patch: pytest.MonkeyPatch) -> None:
    _held(patch, lambda books, update: update._replace(staleness=max(0, update.staleness - 1)))


def stale_in_seconds(patch: pytest.MonkeyPatch) -> None:
    """Staleness goes by the clock, and not by versions."""
    _held(patch, lambda books, update: update._replace(staleness=int(books.now_s) // (books.version + 1)))


def one_more_in_the_buffer(patch: pytest.MonkeyPatch) -> None:
    size = Buffered.size
    patch.setattr(Buffered, "size", lambda self, clients: size(self, clients) + 1)


def _restarts(patch: pytest.MonkeyPatch, rule: str) -> None:
    assign, change = Asynchronous.assign, {"restart": rule}
    patch.setattr(Asynchronous, "assign", lambda self, *given: assign(replace(self, **change), *given))


def waits_for_versions(patch: pytest.MonkeyPatch) -> None:
    """Clients wait for a version that they have not trained on, whatever the settings are."""
    _restarts(patch, "new-version")


def restarts_at_once(patch: pytest.MonkeyPatch) -> None:
    _restarts(patch, "immediate")


def _raw(patch: pytest.MonkeyPatch, raw: Callable[[float, int], float]) -> None:
    patch.setattr(FedStaleWeight, "raw", lambda self, staleness, size: raw(staleness, size))


def drops_b(patch: pytest.MonkeyPatch) -> None:
    """E[τ] + 1, as the paper's Algorithm 1 has it."""
    _raw(patch, lambda staleness, size: staleness + 1.0)


def multiplies_by_b(patch: pytest.MonkeyPatch) -> None:
    """b·E[τ] + 1, whatever the restart rule."""
    _raw(patch, lambda staleness, size: size * staleness + 1.0)


def drops_one(patch: pytest.MonkeyPatch) -> None:
    """b·E[τ], as the published bench has it."""
    _raw(patch, lambda staleness, size: size * staleness + 1e-9)


def squares(patch: pytest.MonkeyPatch) -> None:
    _raw(patch, lambda staleness, size: (size * staleness + 1.0) ** 2)


def turns_round(patch: pytest.MonkeyPatch) -> None:
    """The stale weigh less."""
    _raw(patch, lambda staleness, size: 1.0 / (size * staleness + 1.0))


def does_not_normalize(patch: pytest.MonkeyPatch) -> None:
    """Equation 8's α as it is, (b·E[τ] + 1)/n."""

    def weights(self: Any, state: Any, updates: Sequence[Update], view: Any) -> list[float]:
        means = state.average.mean([update.client for update in updates]).tolist()
        return [self.raw(mean, len(updates)) / len(view.devices) for mean in means]

    patch.setattr(FedStaleWeight, "weights", weights)


def forgets_credit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FedStaleWeight, "stepped", Strategy.stepped)


def pays_twice(patch: pytest.MonkeyPatch) -> None:
    """Half of the credit that was paid is owed still."""
    stepped = FedStaleWeight.stepped

    def keeps(self: Any, state: Any, step: Step, view: Any) -> None:
        before = dict(state.credit)
        stepped(self, state, step, view)
        for client, weight in before.items():
            state.credit[client] = state.credit.get(client, 0.0) + weight / 2

    patch.setattr(FedStaleWeight, "stepped", keeps)


def owes_everybody(patch: pytest.MonkeyPatch) -> None:
    """What is withheld from one is owed to all."""
    stepped = FedStaleWeight.stepped

    def spreads(self: Any, state: Any, step: Step, view: Any) -> None:
        stepped(self, state, step, view)
        share = sum(state.credit.values()) / len(view.devices)
        state.credit = {client.client: share for client in view.devices}

    patch.setattr(FedStaleWeight, "stepped", spreads)


def _draws(patch: pytest.MonkeyPatch, integers: Callable[[Any, int, int], Any]) -> None:
    """DeFedAvg-nIID's sample is drawn by ``integers(rng, clients, count)``."""

    class Draws:
        def __init__(self, rng: np.random.Generator) -> None:
            self._rng = rng

        def integers(self, high: int, size: int) -> Any:
            return integers(self._rng, high, size)

    class Seen:
        def __init__(self, view: Any) -> None:
            self._view, self.rng = view, Draws(view.rng)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._view, name)

    step = DeFedAvgNIID.step
    patch.setattr(DeFedAvgNIID, "step", lambda self, state, view: step(self, state, Seen(view)))


def draws_without_replacement(patch: pytest.MonkeyPatch) -> None:
    _draws(patch, lambda rng, high, size: rng.permutation(high)[:size])


def draws_the_first_half(patch: pytest.MonkeyPatch) -> None:
    _draws(patch, lambda rng, high, size: rng.integers(max(1, high // 2), size=size))


def draws_the_last_half_as_often(patch: pytest.MonkeyPatch) -> None:
    _draws(patch, lambda rng, high, size: (rng.integers(1, 2 * high, size=size)) // 2)
