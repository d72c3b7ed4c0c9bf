"""The server optimiser's step: its definition in numpy, and its fusion with the weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from edgefl.kernels import arguments
from edgefl.kernels.arguments import Checksums, Doubles, Floats, SumArguments, Update
from edgefl.kernels.selection import select, threads

KINDS = ("sgd", "adam", "yogi", "adagrad")
"""Kinds of optimiser, in the order of ef_optimizer in kernels/edgefl_kernels.h."""
CHUNK = 1 << 15
"""Number of elements per iteration of `apply`. It is small, so that these elements stay in the cache and no
temporary array is as large as the model."""

AnyFloats: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """Parameters of the server optimiser, applied to the weighted sum g = (base_scale − 1)·w + Σ weights·Δ.

    With ``sgd``, v ← momentum·v + g and w ← w + lr·v. With the other kinds (Reddi et al. 2021, Algorithm 2),
    m ← β1·m + (1 − β1)·g and w ← w + lr·m/(√v + ε), where v starts at ε² and is updated by
    v ← v + g² (``adagrad``), v ← β2·v + (1 − β2)·g² (``adam``) or
    v ← v − (1 − β2)·g²·sign(v − g²) (``yogi``).
    """

    kind: Literal["sgd", "adam", "yogi", "adagrad"] = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3

    @property
    def vectors(self) -> int:
        """Number of model-sized state vectors."""
        return 2 if self.kind != "sgd" else 1 if self.momentum else 0


class StepArguments(NamedTuple):
    """Arguments of `weighted_step`; `checked` validates them."""

    sum: SumArguments
    """Arguments of the sum; ``out`` and ``base`` are those of the step."""
    optimizer: ServerOptimizer
    old: list[Floats]
    new: list[Floats]

    def checked(self) -> StepArguments:
        """Return the checked arguments. Errors name the wrong argument."""
        given = self.sum._replace(base=None).checked()
        base = arguments.floats("base", self.sum.base, given.out.size)
        old = self._vectors("old_state", self.old, given.out.size)
        new = self._vectors("new_state", self.new, given.out.size, writable=True)
        written = {"out": given.out} | {f"new_state[{i}]": x for i, x in enumerate(new)}
        read = {"base": base} | {f"old_state[{i}]": x for i, x in enumerate(old)}
        read |= {f"updates[{k}]": x for k, x in enumerate(given.updates)}
        read |= {f"scales[{k}]": x for k, x in enumerate(given.scales) if x is not None}
        for name, array in written.items():
            for other, array2 in (read | written).items():
                if other != name and np.may_share_memory(array, array2):
                    raise ValueError(f"{other} must not overlap the output {name}")
        return StepArguments(given._replace(base=base), self.optimizer, old, new)

    def _vectors(self, name: str, value: object, size: int, *, writable: bool = False) -> list[Floats]:
        items, kind = arguments.items(name, value), self.optimizer.kind
        if len(items) != self.optimizer.vectors:
            raise ValueError(
                f"{name} must hold {self.optimizer.vectors} vectors for {kind} (got {len(items)})"
            )
        return [arguments.floats(f"{name}[{i}]", x, size, writable=writable) for i, x in enumerate(items)]


def weighted_step(
    out: Floats,
    base: Floats,
    updates: Sequence[Update],
    weights: Sequence[float] | Floats | Doubles,
    optimizer: ServerOptimizer,
    old_state: Sequence[Floats] = (),
    new_state: Sequence[Floats] = (),
    backend: str | None = None,
    *,
    base_scale: float = 1.0,
    scales: Sequence[Floats | None] | None = None,
    checksums: Checksums | None = None,
) -> Doubles:
    """Write the next model after ``base`` to ``out``; return the updates' squared L2 norms.

    The server ``optimizer`` is applied to g = (base_scale − 1)·base + Σ_k weights[k]·updates[k], computed as
    by `weighted_sum` without a base; the first term is left out if it is 0. The optimiser's state vectors,
    float32[D] each, are read from ``old_state`` and written to ``new_state``: none for plain SGD; v, which
    starts at 0, for SGD with momentum; m and v, which start at 0 and ε², for ``adam``, ``yogi`` and
    ``adagrad`` (Reddi et al. 2021, arXiv:2003.00295, Algorithm 2). The vector g itself is not stored.

    For plain SGD, the result has the same bits as the sum
    (1 + lr·(base_scale − 1))·base + Σ_k (lr·weights[k])·updates[k]. For other optimisers, it has the same
    bits as `weighted_sum` followed by `apply`.

    Outputs must not overlap inputs, so that a step can be repeated if it was interrupted or used a bad
    update. Other rules are those of `weighted_sum`.

    Raises ValueError or TypeError with the name of the wrong argument, and ConfigError if ``backend`` is not
    available.

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
    plain = optimizer.vectors == 0
    if plain:
        if len(old_state) or len(new_state):
            raise ValueError(f"old_state and new_state must be empty for plain sgd (got {len(old_state)})")
        try:
            numbers = [optimizer.lr * weight for weight in numbers]
        except TypeError:
            raise TypeError(f"weights must be numbers (got {numbers!r})") from None
    given: Any = (out, base, updates, numbers, scales, checksums)  # unchecked
    total = named = SumArguments(*given)
    if shrink != 0.0:
        # The base is an additional vector in the sum, before the updates.
        named = named._replace(base=None, updates=arguments.items("updates", updates))
        if scales is not None:
            named = named._replace(scales=arguments.items("scales", scales))
        if checksums is not None:
            named = named._replace(checksums=arguments.checksum_array(checksums, len(named.updates)))
        weighted: Any = [1.0 + optimizer.lr * shrink if plain else shrink, *numbers]
        total = SumArguments(
            out,
            None if plain else base,
            [base, *named.updates],
            weighted,
            None if named.scales is None else [None, *named.scales],
            None if checksums is None else np.empty(1 + len(named.updates), dtype=np.uint64),
        )
    chosen = select(backend)
    state: Any = (old_state, new_state)
    try:
        if plain:
            norms = chosen.weighted_sum(total, threads())
        else:
            norms = chosen.weighted_step(StepArguments(total, optimizer, *state), threads())
    except (TypeError, ValueError):
        if shrink != 0.0:
            _check_named(named, base)
        raise
    if shrink == 0.0:
        return norms
    if named.checksums is not None and total.checksums is not None:
        named.checksums[:] = total.checksums[1:]
    return norms[1:]


def _check_named(given: SumArguments, base: object) -> None:
    """Check the arguments of a step whose sum contains the base as an additional vector.

    The error messages of the sum would call the base ``updates[0]``, and the first update ``updates[1]``.
    """
    out = given.checked().out
    if np.may_share_memory(arguments.floats("base", base, out.size), out):
        raise ValueError("base must not overlap the output out")


def constants(optimizer: ServerOptimizer) -> tuple[float, float, float, float, float, float]:
    """Return keep1, add1, keep2, add2, ε and lr of ef_step (kernels/edgefl_kernels.h), not yet rounded."""
    if optimizer.kind == "sgd":
        return (optimizer.momentum, 1.0, 0.0, 0.0, 0.0, optimizer.lr)
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    return (beta1, 1.0 - beta1, beta2, 1.0 - beta2, optimizer.epsilon, optimizer.lr)


# ---- the step alone --------------------------------------------------------------------------------


def start(optimizer: ServerOptimizer, state: Sequence[AnyFloats]) -> None:
    """Initialise the optimiser's state vectors to 0, and v of ``adam``, ``yogi`` and ``adagrad`` to ε²."""
    _check_count(optimizer, state, "state")
    for vector in state:
        vector.fill(0)
    if optimizer.kind != "sgd":
        state[1].fill(optimizer.epsilon**2)


def apply(
    optimizer: ServerOptimizer,
    out: AnyFloats,
    model: AnyFloats,
    step_vector: AnyFloats,
    state_vectors: Sequence[AnyFloats] = (),
    new_state: Sequence[AnyFloats] | None = None,
) -> None:
    """Write the next model to ``out``: one step of `ServerOptimizer` from ``model`` with g = ``step_vector``.

    All arguments are flat arrays of D elements of the same dtype (float32 in the server), in which the step
    is computed. ``state_vectors`` (see `start`) are updated in place, or only read if ``new_state`` is given.
    ``out`` may be ``step_vector``. Raises `ValueError` for a wrong shape or number of vectors, and
    `TypeError` for mixed dtypes. The step is that of Reddi et al. 2021 (arXiv:2003.00295), Algorithm 2,
    without bias correction.

    >>> out = np.zeros(2, np.float32)
    >>> apply(ServerOptimizer(lr=0.5), out, np.ones(2, np.float32), np.array([2, 4], np.float32))
    >>> out
    array([2., 3.], dtype=float32)
    """
    target = state_vectors if new_state is None else new_state
    _check_count(optimizer, state_vectors, "state_vectors")
    _check_count(optimizer, target, "new_state")
    state = [
        (f"state vector {i}", vector) for group in (state_vectors, target) for i, vector in enumerate(group)
    ]
    for name, vector in (("model", model), ("step_vector", step_vector), *state):
        if vector.shape != out.shape or out.ndim != 1:
            raise ValueError(f"{name} must be 1-D with the shape of out {out.shape}, got {vector.shape}")
        if vector.dtype != out.dtype:
            raise TypeError(f"{name} must have out's dtype {out.dtype}, got {vector.dtype}")
    for first in range(0, out.size, CHUNK):
        part = slice(first, first + CHUNK)
        old, new = ([vector[part] for vector in vectors] for vectors in (state_vectors, target))
        direction = _direction(optimizer, step_vector[part], old, new)
        if optimizer.lr == 1.0:
            np.add(model[part], direction, out=out[part])
        else:
            np.add(model[part], direction * out.dtype.type(optimizer.lr), out=out[part])


def _direction(
    optimizer: ServerOptimizer, gradient: AnyFloats, old: Sequence[AnyFloats], new: Sequence[AnyFloats]
) -> AnyFloats:
    """Write the next state vectors to ``new``; return the change of the model for a learning rate of 1."""
    number = gradient.dtype.type
    if not optimizer.vectors:
        return gradient
    if optimizer.kind == "sgd":
        np.multiply(old[0], number(optimizer.momentum), out=new[0])
        velocity = new[0]
        velocity += gradient
        return velocity
    mean, square = new
    np.multiply(old[0], number(optimizer.beta1), out=mean)
    mean += gradient * number(1.0 - optimizer.beta1)
    squared = gradient * gradient
    if optimizer.kind == "adagrad":
        np.add(old[1], squared, out=square)
    elif optimizer.kind == "adam":
        np.multiply(old[1], number(optimizer.beta2), out=square)
        square += squared * number(1.0 - optimizer.beta2)
    else:
        sign = np.sign(old[1] - squared)
        np.subtract(old[1], squared * sign * number(1.0 - optimizer.beta2), out=square)
    return np.asarray(mean / (np.sqrt(square) + number(optimizer.epsilon)))


def _check_count(optimizer: ServerOptimizer, given: Sequence[AnyFloats], name: str) -> None:
    if len(given) != optimizer.vectors:
        raise ValueError(
            f"{name} must hold {optimizer.vectors} vectors for {optimizer.kind}, got {len(given)}"
        )
