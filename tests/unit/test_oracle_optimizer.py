"""Server optimisers against their equations in float64, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgefl.kernels.steps import CHUNK, apply, start
from edgefl.strategies import ServerOptimizer

OPTIMIZERS = [
    ServerOptimizer(),
    ServerOptimizer(lr=0.3),
    ServerOptimizer(lr=0.3, momentum=0.9),
    ServerOptimizer(kind="adam", lr=0.1),
    ServerOptimizer(kind="yogi", lr=0.1, beta1=0.5, beta2=0.8, epsilon=0.1),
    ServerOptimizer(kind="adagrad", lr=0.1, beta1=0.0),
]


def reference_step(optimizer: ServerOptimizer, model: Any, g: Any, kept: dict[str, Any]) -> Any:
    """The equations of `ServerOptimizer`, read one after the other; Reddi et al. 2021, Algorithm 2."""
    m, v = kept.get("m", 0.0), kept.get("v", optimizer.epsilon**2)
    if optimizer.kind == "sgd":
        kept["m"] = m = optimizer.momentum * m + g
        return model + optimizer.lr * m
    kept["m"] = m = optimizer.beta1 * m + (1 - optimizer.beta1) * g
    if optimizer.kind == "adagrad":
        v = v + g**2
    elif optimizer.kind == "adam":
        v = optimizer.beta2 * v + (1 - optimizer.beta2) * g**2
    else:
        v = v - (1 - optimizer.beta2) * g**2 * np.sign(v - g**2)
    kept["v"] = v
    return model + optimizer.lr * m / (np.sqrt(v) + optimizer.epsilon)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 1000, CHUNK, 2 * CHUNK + 17])
def test_apply_follows_its_equations(optimizer: ServerOptimizer, dtype: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    model = rng.normal(size=size).astype(dtype)
    gradients = [rng.normal(scale=0.1, size=size).astype(dtype) for _ in range(5)]
    state = [np.empty(size, dtype) for _ in range(optimizer.vectors)]
    start(optimizer, state)
    current, expected, kept = model, model.astype(np.float64), dict[str, Any]()
    for gradient in gradients:
        expected = reference_step(optimizer, expected, gradient.astype(np.float64), kept)
        out = np.full(size, np.nan, dtype)
        apply(optimizer, out, current, gradient, state)
        assert out.dtype == dtype
        current = out
    tolerance = 3e-5 if dtype is np.float32 else 1e-12
    np.testing.assert_allclose(current, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_bits_do_not_depend_on_where_an_element_or_the_result_lies(optimizer: ServerOptimizer) -> None:
    size = CHUNK + 5
    rng = np.random.default_rng(0)
    model, gradient = (rng.normal(size=size).astype(np.float32) for _ in range(2))
    state = [rng.random(size).astype(np.float32) for _ in range(optimizer.vectors)]
    whole, part, over = np.empty_like(model), np.empty(7, np.float32), gradient.copy()
    apply(optimizer, part, model[-7:], gradient[-7:].copy(), [vector[-7:].copy() for vector in state])
    fresh = [np.empty_like(vector) for vector in state]
    before = [vector.copy() for vector in state]
    apply(optimizer, whole, model, gradient, state, fresh)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(state, before, strict=True))
    apply(optimizer, over, model, over, state)  # in place: of the gradient, and of the state
    assert whole[-7:].tobytes() == part.tobytes()
    assert over.tobytes() == whole.tobytes()
    assert all(one.tobytes() == other.tobytes() for one, other in zip(state, fresh, strict=True))


def test_plain_averaging_adds_the_step_and_nothing_else() -> None:
    model = np.array([1.0, 2.0], np.float32)
    step = np.array([0.1, -0.7], np.float32)
    out = np.empty_like(model)
    apply(ServerOptimizer(), out, model, step)
    assert out.tobytes() == (model + step).tobytes()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": np.zeros(3, np.float32)}, ValueError, "model must be flat and as long as out"),
        ({"step_vector": np.zeros((2, 1), np.float32)}, ValueError, "step_vector must be flat"),
        ({"model": np.zeros(2)}, TypeError, "model must have out's dtype float32, got float64"),
        ({"state_vectors": ()}, ValueError, "state_vectors must hold 1 vectors for sgd, got 0"),
        ({"new_state": ()}, ValueError, "new_state must hold 1 vectors for sgd, got 0"),
        ({"state_vectors": [np.zeros(3, np.float32)]}, ValueError, "state vector 0 must be flat"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "out": np.zeros(2, np.float32),
        "model": np.zeros(2, np.float32),
        "step_vector": np.zeros(2, np.float32),
        "state_vectors": [np.zeros(2, np.float32)],
    }
    with pytest.raises(error) as caught:
        apply(ServerOptimizer(momentum=0.5), **(arguments | change))
    assert message in str(caught.value)
    assert not arguments["out"].any()
