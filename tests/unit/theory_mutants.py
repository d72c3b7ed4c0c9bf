"""Wrong implementations, with which the findings of `edgefl reproduce theory` must not be reproduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from edgefl.core.ledger import Ledger
from edgefl.kernels.steps import ServerOptimizer
from edgefl.learning.train import Trainer
from edgefl.strategies.asynchronous import Asynchronous
from edgefl.strategies.base import Step, Strategy, Update
from edgefl.strategies.buffered import Buffered
from edgefl.strategies.defedavg_iid import DeFedAvgIID
from edgefl.strategies.defedavg_niid import DeFedAvgNIID
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.strategies.rounds import Rounds

Mutant = Callable[[pytest.MonkeyPatch], None]
"""Breaks a strategy or the core until the patch is undone."""


def weights(change: Callable[[Sequence[Update], list[float]], list[float]]) -> Mutant:
    """Changes the weights of every step."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        for kind in (Buffered, DeFedAvgIID, DeFedAvgNIID):

            def step(
                self: Any, state: Any, view: Any, ask: Any = kind.step, kind: type = kind
            ) -> Step | None:
                made = ask(self, state, view)
                if kind is DeFedAvgIID and not self.overlap:
                    return made  # `Buffered.step` has changed the weights
                return made and made._replace(weights=change(made.updates, list(made.weights)))

            patch.setattr(kind, "step", step)

    return mutate


def only(kept: Callable[[int, Update], bool]) -> Mutant:
    """Gives all weight to the updates for which ``kept`` returns true for the index and the update."""

    def change(updates: Sequence[Update], given: list[float]) -> list[float]:
        alone = [w if kept(at, u) else 0.0 for at, (u, w) in enumerate(zip(updates, given, strict=True))]
        total = sum(alone)
        return [w / total * sum(given) if total else 0.0 for w in alone]

    return weights(change)


def favoured(factor: Callable[[int], float]) -> Mutant:
    """Multiplies each weight by a factor that depends on the client, and rescales all to keep their sum."""

    def change(updates: Sequence[Update], given: list[float]) -> list[float]:
        more = [weight * factor(one.client) for one, weight in zip(updates, given, strict=True)]
        return [weight / sum(more) * sum(given) for weight in more]

    return weights(change)


def method(kind: type, name: str, wrong: Callable[..., Any]) -> Mutant:
    """Replaces a method by ``wrong``, whose first argument is the right method."""
    right = getattr(kind, name)

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(kind, name, lambda *given: wrong(right, *given))

    return mutate


def held(change: Callable[[Ledger, Update], int]) -> Mutant:
    """Changes the staleness of each update that arrives."""

    def hold(right: Any, self: Ledger, *given: Any) -> Update:
        update = right(self, *given)
        update = self._updates[update.task] = self.held[-1] = update._replace(staleness=change(self, update))
        return update

    return method(Ledger, "hold", hold)


def discount(more: Callable[[float], float]) -> Mutant:
    def wrong(_: Any, self: Any, state: Any, updates: Sequence[Update], view: Any) -> list[float]:
        return [(1.0 + one.staleness) ** -more(self.exponent) / len(updates) for one in updates]

    return method(FedBuff, "weights", wrong)


@cache
def changed(strategy: Any, **fields: Any) -> Any:
    """Return the strategy with these fields changed; cached, since checking fields is slow."""
    return replace(strategy, **fields)


def restarts(rule: Any) -> Mutant:
    return method(
        Asynchronous, "assign", lambda right, self, *given: right(changed(self, restart=rule), *given)
    )


def raw(formula: Callable[[float, int], float]) -> Mutant:
    return method(FedStaleWeight, "raw", lambda _, self, staleness, size: formula(staleness, size))


def draws(integers: Callable[[np.random.Generator, int, int], Any]) -> Mutant:
    """Draws DeFedAvg-nIID's sample with ``integers(rng, clients, count)``."""

    class Seen:
        def __init__(self, view: Any) -> None:
            self._view, self.rng = view, self

        def integers(self, high: int, size: int) -> Any:
            return integers(self._view.rng, high, size)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._view, name)

    return method(DeFedAvgNIID, "step", lambda right, self, state, view: right(self, state, Seen(view)))


def targets(change: Callable[[float], float]) -> Mutant:
    """Changes the target n·p_i of each client."""

    def wrong(right: Any, self: Any, devices: Any) -> Any:
        state = right(self, devices)
        state.relative = [change(one) for one in state.relative]
        return state

    return method(FedStaleWeight, "begin", wrong)


def scales(step: Callable[[float], float]) -> Mutant:
    """Uses a step size of η·step(b/B), instead of η·b/B, on a batch of b examples; a full batch has B."""

    def wrong(right: Any, self: Any, rule: Any, *more: Any) -> Callable[[float], None]:
        descend = right(self, rule, *more)
        return lambda rate: descend(rule.lr * step(rate / rule.lr))

    return method(Trainer, "_stepper", wrong)


def _one_fewer(right: Any, self: Any, state: Any, view: Any) -> Any:
    return right(changed(self, concurrency=self.concurrency - 1), state, view)


def _the_first(right: Any, self: Any, state: Any, view: Any) -> Any:
    return list(view.idle)[: len(right(self, state, view))]


def has_momentum(patch: pytest.MonkeyPatch) -> None:
    for kind in (Strategy, FedBuff):
        patch.setattr(kind, "optimizer", lambda self: ServerOptimizer(lr=self.server_lr, momentum=0.5))


def ignores_the_step_size(patch: pytest.MonkeyPatch) -> None:
    for kind in (Strategy, FedBuff):
        patch.setattr(kind, "optimizer", lambda self: ServerOptimizer())


def _not_normalized(_: Any, self: Any, state: Any, updates: Sequence[Update], view: Any) -> list[float]:
    """Returns equation 8's α without normalization, (b·E[τ] + 1)/n."""
    means = state.average.mean([update.client for update in updates]).tolist()
    return [self.raw(mean, len(updates)) / len(view.devices) for mean in means]


def _pays_twice(right: Any, self: Any, state: Any, step: Step, view: Any) -> None:
    """After each step, adds half of the credit from before the step again."""
    before = dict(state.credit)
    right(self, state, step, view)
    for client, weight in before.items():
        state.credit[client] = state.credit.get(client, 0.0) + weight / 2


def _owes_everybody(right: Any, self: Any, state: Any, step: Step, view: Any) -> None:
    """Divides the credit of each client among all clients."""
    right(self, state, step, view)
    share = sum(state.credit.values()) / len(view.devices)
    state.credit = {client.client: share for client in view.devices}


MUTANTS: dict[str, Mutant] = {
    "doubled": weights(lambda _, given: [2.0 * weight for weight in given]),
    "quartered": weights(lambda _, given: [0.25 * weight for weight in given]),
    "keeps_one_of_four": weights(lambda _, given: [w * (at % 4 == 0) for at, w in enumerate(given)]),
    "stretches_one_of_four": only(lambda at, _: at % 4 == 0),
    "two_clients": only(lambda _, update: update.client < 2),
    "weights_by_batch": favoured(lambda client: 8.0 if client % 2 else 1.0),
    "pays_slow_clients": favoured(lambda client: 9.0 if client % 2 else 1.0),
    "averages": weights(lambda _, given: [1.0 / len(given)] * len(given)),
    "has_momentum": has_momentum,
    "ignores_the_step_size": ignores_the_step_size,
    "discounts_more": discount(lambda exponent: exponent + 0.5),
    "discounts_nothing": discount(lambda exponent: 0.0),
    "stale_by_one_more": held(lambda _, update: update.staleness + 1),
    "stale_by_one_less": held(lambda _, update: max(0, update.staleness - 1)),
    "stale_in_seconds": held(lambda books, _: int(books.now_s) // (books.version + 1)),
    "one_more_in_the_buffer": method(Buffered, "size", lambda right, *given: right(*given) + 1),
    "waits_for_versions": restarts("new-version"),
    "waits_for_the_step": restarts("after-step"),
    "never_waits": method(
        DeFedAvgNIID, "assign", lambda right, self, *given: right(replace(self, pause=False), *given)
    ),
    "restarts_at_once": restarts("immediate"),
    "drops_b": raw(lambda staleness, size: staleness + 1.0),  # as the paper's Algorithm 1
    "multiplies_by_b": raw(lambda staleness, size: size * staleness + 1.0),
    "drops_one": raw(lambda staleness, size: size * staleness + 1e-9),  # as the published bench
    "squares": raw(lambda staleness, size: (size * staleness + 1.0) ** 2),
    "turns_round": raw(lambda staleness, size: 1.0 / (size * staleness + 1.0)),
    "steps_in_full": scales(lambda share: 1.0),
    "steps_by_the_root": scales(math.sqrt),
    "steps_by_the_square": scales(lambda share: share**2),
    "selects_no_more": method(
        Rounds, "assign", lambda right, self, *given: right(changed(self, over_selection=1.0), *given)
    ),
    "one_fewer_at_once": method(Asynchronous, "assign", _one_fewer),
    "starts_the_first": method(Asynchronous, "assign", _the_first),
    "forgets_targets": targets(lambda relative: 1.0),
    "squares_targets": targets(lambda relative: relative**2),
    "does_not_normalize": method(FedStaleWeight, "weights", _not_normalized),
    "forgets_credit": method(FedStaleWeight, "stepped", lambda right, *given: None),
    "pays_twice": method(FedStaleWeight, "stepped", _pays_twice),
    "owes_everybody": method(FedStaleWeight, "stepped", _owes_everybody),
    "draws_without_replacement": draws(lambda rng, high, size: rng.permutation(high)[:size]),
    "draws_the_first_half": draws(lambda rng, high, size: rng.integers(max(1, high // 2), size=size)),
    "draws_the_last_half_as_often": draws(lambda rng, high, size: rng.integers(1, 2 * high, size=size) // 2),
}
