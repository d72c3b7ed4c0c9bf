"""A weighted sum and the server optimiser's step made of it, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from edgefl.kernels import arguments
from edgefl.kernels.arguments import Checksums, Doubles, Floats, Sum, Update
from edgefl.kernels.selection import select
from edgefl.kernels.thread_count import threads

KINDS = ("sgd", "adam", "yogi", "adagrad")
"""In the order of ef_optimizer in kernels/edgefl_kernels.h."""


class Optimizer(Protocol):
    """What a step needs to know; `edgefl.strategies.ServerOptimizer` has it and holds the equations."""

    @property
    def kind(self) -> Any: ...
    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def epsilon(self) -> float: ...


class Step(NamedTuple):
    """Checked arguments of a step; the sum's ``out`` is the step's and its base None."""

    sum: Sum
    base: Floats
    old: list[Floats]
    new: list[Floats]


def weighted_step(
    out: Floats,
    base: Floats,
    updates: Sequence[Update],
    weights: Sequence[float] | Floats | Doubles,
    optimizer: Optimizer,
    old_state: Sequence[Floats] = (),
    new_state: Sequence[Floats] = (),
    backend: str | None = None,
    *,
    base_scale: float = 1.0,
    scales: Sequence[Floats | None] | None = None,
    checksums: Checksums | None = None,
) -> Doubles:
    """Write the model after ``base`` to ``out`` and return the updates' squared L2 norms.

    The step g = (base_scale − 1)·base + Σ_k weights[k]·updates[k] (`weighted_sum` without a base; the
    first term only where it is not 0) goes through the server ``optimizer``, whose vectors of D float32
    are read from ``old_state`` and written to ``new_state``: none for plain SGD, one for SGD with momentum,
    two for ``adam``, ``yogi`` and ``adagrad`` (Reddi et al. 2021, arXiv:2003.00295, Algorithm 2). g itself
    is never stored. The bits are those of `weighted_sum` followed by `edgefl.strategies.optimizer.apply`;
    for plain SGD, those of base + Σ_k (lr·weights[k])·updates[k], which is one sum.

    Nothing that is written may overlap anything that is read, so that a step that turns out to be of a bad
    update, or is cut short, can be made again. All else is as for `weighted_sum`.

    Raises ValueError or TypeError naming the argument, ConfigError if ``backend`` is not there.

    >>> from edgefl.strategies import ServerOptimizer
    >>> out, new = np.empty(2, np.float32), np.empty(2, np.float32)
    >>> base, old = np.ones(2, np.float32), np.full(2, 4, np.float32)
    >>> update = np.array([1, 2], np.float32)
    >>> momentum = ServerOptimizer(lr=0.5, momentum=0.25)
    >>> weighted_step(out, base, [update], [2.0], momentum, [old], [new]).tolist()
    [5.0]
    >>> new.tolist(), out.tolist()
    ([3.0, 5.0], [2.5, 3.5])
    """
    if optimizer.kind not in KINDS:
        raise ValueError(f"optimizer.kind must be one of {', '.join(KINDS)} (got {optimizer.kind!r})")
    numbers = arguments.items("weights", weights)
    shrink = base_scale - 1.0
    plain = vectors(optimizer) == 0
    if plain:
        if len(old_state) or len(new_state):
            raise ValueError(f"old_state and new_state must be empty for plain sgd (got {len(old_state)})")
        numbers = [optimizer.lr * weight for weight in numbers]
    if shrink != 0.0:
        # The base is one more vector of the sum, ahead of the updates.
        updates = [base, *updates]
        numbers = [1.0 + optimizer.lr * shrink if plain else shrink, *numbers]
        scales = None if scales is None else [None, *scales]
    sums = checksums if checksums is None or shrink == 0.0 else np.empty(len(updates), dtype=np.uint64)
    chosen = select(backend)
    if plain:
        start = base if shrink == 0.0 else None
        norms = chosen.weighted_sum(out, start, updates, numbers, scales, sums, threads())
    else:
        norms = chosen.weighted_step(
            out, base, updates, numbers, optimizer, old_state, new_state, scales, sums, threads()
        )
    if shrink == 0.0:
        return norms
    if checksums is not None and sums is not None:
        arguments.checksum_array(checksums, len(updates) - 1)[:] = sums[1:]
    return norms[1:]


def vectors(optimizer: Optimizer) -> int:
    """How many vectors of the model's size an optimiser keeps."""
    return 2 if optimizer.kind != "sgd" else 1 if optimizer.momentum else 0


def constants(optimizer: Optimizer) -> tuple[float, float, float, float, float, float]:
    """keep1, add1, keep2, add2, ε and the learning rate, before they are rounded to float32."""
    if optimizer.kind == "sgd":
        return (optimizer.momentum, 1.0, 0.0, 0.0, 0.0, optimizer.lr)
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    return (beta1, 1.0 - beta1, beta2, 1.0 - beta2, optimizer.epsilon, optimizer.lr)


def checked(
    out: object,
    base: object,
    updates: object,
    weights: object,
    optimizer: Optimizer,
    old_state: object,
    new_state: object,
    scales: object | None,
    checksums: object | None,
) -> Step:
    """The arguments of `weighted_step`, or the error that names the wrong one."""
    given = arguments.weighted_sum(out, None, updates, weights, scales, checksums)
    size = given.out.size
    model = arguments.floats("base", base, size)
    groups: dict[str, list[Floats]] = {}
    for name, value in (("old_state", old_state), ("new_state", new_state)):
        items = arguments.items(name, value)
        if len(items) != vectors(optimizer):
            raise ValueError(
                f"{name} must hold {vectors(optimizer)} vectors for {optimizer.kind} (got {len(items)})"
            )
        writable = name == "new_state"
        groups[name] = [
            arguments.floats(f"{name}[{i}]", item, size, writable=writable) for i, item in enumerate(items)
        ]
    written = {"out": given.out} | {f"new_state[{i}]": x for i, x in enumerate(groups["new_state"])}
    read = {"base": model} | {f"old_state[{i}]": x for i, x in enumerate(groups["old_state"])}
    read |= {f"updates[{k}]": x for k, x in enumerate(given.updates)}
    read |= {f"scales[{k}]": x for k, x in enumerate(given.scales) if x is not None}
    for name, array in written.items():
        for other, array2 in (read | written).items():
            if other != name and np.may_share_memory(array, array2):
                raise ValueError(f"{other} must not overlap {name}, which is written")
    return Step(given, model, groups["old_state"], groups["new_state"])
