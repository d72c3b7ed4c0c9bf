"""Carries a `ServerOptimizer` out on flat vectors: the last part of every step, after the weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgefl.strategies.base import ServerOptimizer

Vector = npt.NDArray[Any]

CHUNK = 1 << 15
"""Elements at a time: they stay in cache, and no temporary of the model's size is made."""


def start(optimizer: ServerOptimizer, state: Sequence[Vector]) -> None:
    """Fill the optimiser's vectors with what they hold before the first step: 0, and ε² for Reddi's v."""
    _check_count(optimizer, state, "state")
    for vector in state:
        vector.fill(0)
    if optimizer.kind != "sgd":
        state[1].fill(optimizer.epsilon**2)


def apply(
    optimizer: ServerOptimizer,
    out: Vector,
    model: Vector,
    step_vector: Vector,
    state_vectors: Sequence[Vector] = (),
    new_state: Sequence[Vector] | None = None,
) -> None:
    """Write the next model to ``out``: ``model`` stepped by ``step_vector`` g (see `ServerOptimizer`).

    All are flat arrays of D elements of one dtype (float32 in the server); the arithmetic is done in that
    dtype, element by element, so the bits depend on nothing else. ``state_vectors`` are the optimiser's
    ``vectors`` (see `start`); they are updated in place, or only read and the result written to
    ``new_state`` if that is given, so that a step that is cut short can be made again. ``out`` may be
    ``step_vector``. `ValueError` for a wrong shape or number of vectors, `TypeError` for a mix of dtypes.

    Reddi et al. 2021 (arXiv:2003.00295), Algorithm 2, without bias correction as there.

    >>> out = np.zeros(2, np.float32)
    >>> apply(ServerOptimizer(lr=0.5), out, np.ones(2, np.float32), np.array([2, 4], np.float32))
    >>> out
    array([2., 3.], dtype=float32)
    """
    target = state_vectors if new_state is None else new_state
    _check_count(optimizer, state_vectors, "state_vectors")
    _check_count(optimizer, target, "new_state")
    for name, vector in (("model", model), ("step_vector", step_vector), *_named(state_vectors, target)):
        if vector.shape != out.shape or out.ndim != 1:
            raise ValueError(f"{name} must be flat and as long as out {out.shape}, got {vector.shape}")
        if vector.dtype != out.dtype:
            raise TypeError(f"{name} must have out's dtype {out.dtype}, got {vector.dtype}")
    for first in range(0, out.size, CHUNK):
        part = slice(first, first + CHUNK)
        gradient = step_vector[part]
        if optimizer.kind == "sgd":
            direction = _momentum(optimizer, gradient, state_vectors, target, part)
        else:
            direction = _adaptive(optimizer, gradient, state_vectors, target, part)
        if optimizer.lr == 1.0:
            np.add(model[part], direction, out=out[part])
        else:
            np.add(model[part], direction * out.dtype.type(optimizer.lr), out=out[part])


def _momentum(
    optimizer: ServerOptimizer, gradient: Vector, old: Sequence[Vector], new: Sequence[Vector], part: slice
) -> Vector:
    if not optimizer.momentum:
        return gradient
    velocity = new[0][part]
    np.multiply(old[0][part], gradient.dtype.type(optimizer.momentum), out=velocity)
    velocity += gradient
    return velocity


def _adaptive(
    optimizer: ServerOptimizer, gradient: Vector, old: Sequence[Vector], new: Sequence[Vector], part: slice
) -> Vector:
    number = gradient.dtype.type
    mean, square = new[0][part], new[1][part]
    np.multiply(old[0][part], number(optimizer.beta1), out=mean)
    mean += gradient * number(1.0 - optimizer.beta1)
    squared = gradient * gradient
    if optimizer.kind == "adagrad":
        np.add(old[1][part], squared, out=square)
    elif optimizer.kind == "adam":
        np.multiply(old[1][part], number(optimizer.beta2), out=square)
        square += squared * number(1.0 - optimizer.beta2)
    else:
        sign = np.sign(old[1][part] - squared)
        np.subtract(old[1][part], squared * sign * number(1.0 - optimizer.beta2), out=square)
    return np.asarray(mean / (np.sqrt(square) + number(optimizer.epsilon)))


def _named(*groups: Sequence[Vector]) -> list[tuple[str, Vector]]:
    return [(f"state vector {index}", vector) for group in groups for index, vector in enumerate(group)]


def _check_count(optimizer: ServerOptimizer, vectors: Sequence[Vector], name: str) -> None:
    if len(vectors) != optimizer.vectors:
        raise ValueError(
            f"{name} must hold {optimizer.vectors} vectors for {optimizer.kind}, got {len(vectors)}"
        )
