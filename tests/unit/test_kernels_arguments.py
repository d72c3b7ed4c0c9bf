"""Tests that every back end refuses the same arguments with the same message."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest

from edgefl import kernels
from edgefl.strategies import ServerOptimizer

Wrong: TypeAlias = list[tuple[dict[str, Any], type[Exception], str]]
V, T = ValueError, TypeError


def _f(size: int = 4, dtype: Any = np.float32, *, frozen: bool = False) -> Any:
    array = np.ones(size, dtype)
    array.flags.writeable = not frozen
    return array


SHARED, F, Q = _f(8), _f(), _f(300, np.int8)
S = SHARED[:4]
OUTPUT = "must not overlap the output"
ALLOWED = "must be float32, float16, uint16 (bfloat16) or int8 (with scales)"
INT8 = {"out": _f(300), "base": None, "updates": [Q], "weights": [1.0]}
SUM = {"out": F, "base": _f(), "updates": [_f(), _f()], "weights": [1.0, 2.0]}
WRONG_SUM: Wrong = [
    ({"out": [0.0] * 4}, T, "out must be a flat array (got list)"),
    ({"out": np.ones(4)}, T, "out must be float32 (got float64)"),
    ({"out": np.ones((2, 2), np.float32)}, V, "out must be a flat array (got shape (2, 2))"),
    ({"out": _f(8)[::2]}, V, "out must be contiguous (got stride 8 bytes)"),
    ({"out": _f(frozen=True)}, V, "out must be writable (got a read-only array)"),
    ({"base": _f(3)}, V, "base must have 4 elements, as many as out (got 3)"),
    ({"base": _f(4, np.float16)}, T, "base must be float32 (got float16)"),
    (
        {"out": S, "base": SHARED[1:5]},
        V,
        "base must be the same array as out, or not overlap it (got a partial overlap)",
    ),
    ({"out": S, "updates": [F, SHARED[3:7]]}, V, "updates[1] must not overlap the output array (out)"),
    ({"updates": [_f(), _f(5)]}, V, "updates[1] must have 4 elements, as many as out (got 5)"),
    ({"updates": [_f(), np.ones(4)]}, T, f"updates[1] {ALLOWED} (got float64)"),
    ({"updates": [_f(4, ">f4"), F]}, T, f"updates[0] {ALLOWED} (got >f4)"),
    ({"updates": [_f(8)[::2], F]}, V, "updates[0] must be contiguous (got stride 8 bytes)"),
    ({"updates": [None, F]}, T, "updates[0] must be a flat array (got NoneType)"),
    ({"updates": 3}, T, "updates must be a sequence (got int)"),
    ({"weights": [1.0]}, V, "weights must have 2 entries, one per update (got 1)"),
    ({"weights": [1.0, "x"]}, T, "weights must be numbers (got [1.0, 'x'])"),
    ({"weights": [1.0, None]}, T, "weights must be numbers (got [1.0, None])"),
    ({"weights": [[1.0], [2.0]]}, T, "weights must be numbers (got [[1.0], [2.0]])"),
    ({"weights": None}, T, "weights must be a sequence (got NoneType)"),
    ({"checksums": _f(1, np.uint64)}, V, "checksums must have 2 entries, as many as updates (got 1)"),
    ({"checksums": _f(2, np.int64)}, T, "checksums must be uint64 (got int64)"),
    ({"scales": [None]}, V, "scales must have 2 entries, one per update (got 1)"),
    ({"scales": [F, None]}, V, "scales[0] must be None for a float32 update (got ndarray)"),
    ({"updates": [_f(4, np.int8), _f()]}, V, "scales[0] must be given for an int8 update (got None)"),
    (INT8 | {"scales": [_f(3)]}, V, "scales[0] must have 2 entries, one per 256 elements (got 3)"),
    (INT8 | {"scales": [np.ones(2)]}, T, "scales[0] must be float32 (got float64)"),
]

OLD_OVER_NEW = f"old_state[0] {OUTPUT} new_state[0]"
LION = SimpleNamespace(kind="lion")
STEP = {"out": F, "base": _f(), "updates": [_f()], "weights": [1.0]}
STEP |= {"optimizer": ServerOptimizer(kind="adam")}
STEP |= {"old_state": [_f(), _f()], "new_state": [_f(), _f()]}
PLAIN = {"optimizer": ServerOptimizer(lr=0.5), "old_state": [], "new_state": []}
WRONG_STEP: Wrong = [
    ({"optimizer": LION}, V, "optimizer.kind must be one of sgd, adam, yogi, adagrad (got 'lion')"),
    ({"base": _f(3)}, V, "base must have 4 elements (got 3)"),
    ({"base": None}, T, "base must be a flat array (got NoneType)"),
    ({"old_state": [_f()]}, V, "old_state must hold 2 vectors for adam (got 1)"),
    ({"new_state": [_f()] * 3}, V, "new_state must hold 2 vectors for adam (got 3)"),
    ({"new_state": [_f(), np.ones(4)]}, T, "new_state[1] must be float32 (got float64)"),
    ({"new_state": [_f(frozen=True), _f()]}, V, "new_state[0] must be writable (got a read-only array)"),
    ({"old_state": [S, _f()], "new_state": [S, _f()]}, V, OLD_OVER_NEW),
    ({"base": F}, V, f"base {OUTPUT} out"),
    ({"new_state": [S, S]}, V, f"new_state[1] {OUTPUT} new_state[0]"),
    ({"updates": [S], "new_state": [_f(), S]}, V, f"updates[0] {OUTPUT} new_state[1]"),
    ({"weights": [1.0, 2.0]}, V, "weights must have 1 entries, one per update (got 2)"),
    ({"optimizer": ServerOptimizer()}, V, "old_state and new_state must be empty for plain sgd (got 2)"),
    *[
        (kind | {"base_scale": 0.5} | change, error, says)
        for kind in ({}, PLAIN)
        for change, error, says in (
            ({"base": _f(3)}, V, "base must have 4 elements (got 3)"),
            ({"base": F}, V, f"base {OUTPUT} out"),
            ({"updates": 3}, T, "updates must be a sequence (got int)"),
            ({"updates": [_f(3)]}, V, "updates[0] must have 4 elements, as many as out (got 3)"),
            ({"scales": [F]}, V, "scales[0] must be None for a float32 update (got ndarray)"),
            ({"weights": [1.0, 2.0]}, V, "weights must have 1 entries, one per update (got 2)"),
            ({"checksums": _f(2, np.uint64)}, V, "checksums must have 1 entries, as many as updates (got 2)"),
        )
    ],
    (PLAIN | {"weights": ["x"]}, T, "weights must be numbers (got ['x'])"),
    (PLAIN | {"weights": [None]}, T, "weights must be numbers (got [None])"),
    ({"checksums": _f(3, np.uint64)}, V, "checksums must have 1 entries, as many as updates (got 3)"),
]

UPDATE = _f(300)
QUANTIZE = {"out": _f(300, np.float16), "update": UPDATE}
WRONG_QUANTIZE: Wrong = [
    ({"out": np.ones(300)}, T, f"out {ALLOWED} (got float64)"),
    ({"out": _f(3, np.float16)}, V, "out must have 300 elements like update (got 3)"),
    ({"update": np.ones(300)}, T, "update must be float32 (got float64)"),
    ({"out": Q}, V, "scales must be given for int8 (got NoneType)"),
    ({"scales": _f(2)}, V, "scales must be None for float16 (got ndarray)"),
    ({"out": Q, "scales": _f(1)}, V, "scales must have 2 elements (got 1)"),
    ({"residual": UPDATE[:3]}, V, "residual must have 300 elements (got 3)"),
    ({"new_residual": UPDATE}, V, f"update {OUTPUT} new_residual"),
    ({"weight": "x"}, T, "weight must be a number (got 'x')"),
    ({"weight": None}, T, "weight must be a number (got None)"),
]

DELTA = {"out": F, "trained": _f(), "base": _f()}
WRONG_DELTA: Wrong = [
    *[({name: np.ones(4)}, T, f"{name} must be float32 (got float64)") for name in DELTA],
    *[({name: [1.0] * 4}, T, f"{name} must be a flat array (got list)") for name in DELTA],
    *[({name: _f(8)[::2]}, V, f"{name} must be contiguous (got stride 8 bytes)") for name in DELTA],
    ({"trained": _f(5)}, V, "trained must have 4 elements, as many as out (got 5)"),
    ({"base": _f(5)}, V, "base must have 4 elements, as many as out (got 5)"),
    ({"trained": F}, V, "out must not overlap trained"),
    ({"base": F}, V, "out must not overlap base"),
]

STRIDED = np.zeros(4)[::2]
WRONG_CHECKSUM: Wrong = [
    ({"update": [1, 2]}, T, "update must be a flat array (got list)"),
    ({"update": np.zeros((2, 2))}, V, "update must be a flat array (got shape (2, 2))"),
    ({"update": STRIDED}, V, "update must be contiguous (got stride 16 bytes)"),
]
WRONG_NORM: Wrong = [
    ({"update": _f(3, np.int64)}, T, f"update {ALLOWED} (got int64)"),
    ({"update": Q}, V, "scales must be given for an int8 update (got None)"),
]


@pytest.mark.parametrize(
    ("call", "right", "wrong"),
    [
        (kernels.weighted_sum, SUM, WRONG_SUM),
        (kernels.weighted_step, STEP, WRONG_STEP),
        (kernels.quantize, QUANTIZE, WRONG_QUANTIZE),
        (kernels.delta, DELTA, WRONG_DELTA),
        (kernels.checksum, {}, WRONG_CHECKSUM),
        (kernels.sq_norm, {}, WRONG_NORM),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_wrong_argument_is_named_and_no_output_is_written(
    backend: str, call: Any, right: dict[str, Any], wrong: Wrong
) -> None:
    for change, error, words in wrong:
        given = right | change
        before = np.array(given.get("out"))
        with pytest.raises(error) as caught:
            call(**given, backend=backend)
        assert str(caught.value) == words
        np.testing.assert_array_equal(np.asarray(given.get("out")), before, err_msg=words)


@pytest.mark.parametrize("field", ["weights", "scales"])
def test_many_updates_with_too_few_weights_or_scales_are_refused(backend: str, field: str) -> None:
    given: dict[str, Any] = {"updates": [_f()] * 200, "weights": [1.0] * 200, "scales": [None] * 200}
    given[field] = given[field][:199]
    with pytest.raises(ValueError, match=f"{field} must have 200 entries, one per update \\(got 199\\)"):
        kernels.weighted_sum(_f(), None, **given, backend=backend)


def test_beside_weights_of_an_iterator_the_wrong_argument_is_named(backend: str) -> None:
    weights: Any = iter([1.0, 2.0])
    with pytest.raises(TypeError, match=r"updates\[1\] must be float32"):
        kernels.weighted_sum(_f(), None, [_f(), np.ones(4)], weights, backend)


def test_updates_are_held_until_they_are_summed(backend: str) -> None:
    """Another thread may remove an update from the caller's list while the sum runs without the GIL."""
    updates, held = [_f()], list[bool]()
    update, out = weakref.ref(updates[0]), np.empty(4, np.float32)

    class Weight:
        def __float__(self) -> float:
            updates.clear()
            held.append(update() is not None)
            return 2.0

    weights: Any = [Weight()]
    kernels.weighted_sum(out, None, updates, weights, backend)
    assert all(held)
    assert out.tolist() == [2.0] * 4


def test_scales_may_be_the_rows_of_an_array(backend: str) -> None:
    scales: Any = np.full((2, 2), 0.5, np.float32)
    out = np.empty(300, np.float32)
    kernels.weighted_sum(out, None, [Q, Q], [1.0, 3.0], backend, scales=scales)
    assert out.tolist() == [2.0] * 300


def test_updates_and_weights_may_be_any_sequence(backend: str) -> None:
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    expected = (0.5 * rows[0] + 2 * rows[1]).tolist()
    for kind in (np.asarray, list, tuple, lambda rows: [memoryview(row) for row in rows], iter):
        for weights in ([0.5, 2], (0.5, 2.0), np.array([0.5, 2.0]), np.array([0.5, 2.0], np.float32)):
            out = np.empty(4, dtype=np.float32)
            kernels.weighted_sum(memoryview(out), None, kind(rows), weights, backend)
            assert out.tolist() == expected


def test_updates_and_base_may_be_read_only(backend: str) -> None:
    out, frozen = np.empty(4, dtype=np.float32), _f(frozen=True)
    assert kernels.weighted_sum(out, frozen, [frozen], [2.0], backend).tolist() == [4.0]
    assert out.tolist() == [3.0] * 4
