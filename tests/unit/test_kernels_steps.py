"""weighted_step: what it reads and writes, and what it refuses, with the same words from every back end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgefl import kernels
from edgefl.strategies import ServerOptimizer

BACKENDS = [name for name, status in kernels.backends().items() if status == "ok"]
ADAM = ServerOptimizer(kind="adam")
MOMENTUM = ServerOptimizer(momentum=0.5)


def _floats(value: float = 1.0, size: int = 4) -> np.ndarray:
    return np.full(size, value, dtype=np.float32)


_SHARED = _floats()
_FROZEN = _floats()
_FROZEN.flags.writeable = False

WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "kind",
        {"optimizer": SimpleNamespace(kind="lion")},
        ValueError,
        "optimizer.kind must be one of sgd, adam",
    ),
    ("base-short", {"base": _floats(size=3)}, ValueError, "base must have 4 elements (got 3)"),
    ("base-none", {"base": None}, TypeError, "base must be a flat array (got NoneType)"),
    ("old-few", {"old_state": [_floats()]}, ValueError, "old_state must hold 2 vectors for adam (got 1)"),
    (
        "new-many",
        {"new_state": [_floats()] * 3},
        ValueError,
        "new_state must hold 2 vectors for adam (got 3)",
    ),
    (
        "new-type",
        {"new_state": [_floats(), np.ones(4)]},
        TypeError,
        "new_state[1] must be float32 (got float64)",
    ),
    (
        "new-frozen",
        {"new_state": [_FROZEN, _floats()]},
        ValueError,
        "new_state[0] must be writable (got a read",
    ),
    (
        "in-place",
        {"old_state": [_SHARED, _floats()], "new_state": [_SHARED, _floats()]},
        ValueError,
        "old_state[0] must not overlap new_state[0], which is written",
    ),
    (
        "base-out",
        {"base": _SHARED, "out": _SHARED},
        ValueError,
        "base must not overlap out, which is written",
    ),
    (
        "twice",
        {"new_state": [_SHARED, _SHARED]},
        ValueError,
        "new_state[1] must not overlap new_state[0], which is written",
    ),
    (
        "update-new",
        {"updates": [_SHARED], "new_state": [_floats(), _SHARED]},
        ValueError,
        "updates[0] must not overlap new_state[1], which is written",
    ),
    ("weights", {"weights": [1.0, 2.0]}, ValueError, "weights must have 1 entries like updates (got 2)"),
    (
        "plain",
        {"optimizer": ServerOptimizer()},
        ValueError,
        "old_state and new_state must be empty for plain sgd (got 2)",
    ),
    (
        "checksums",
        {"checksums": np.zeros(3, np.uint64)},
        ValueError,
        "checksums must have 1 entries like updates (got 3)",
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "error", "words"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_arguments_are_named(
    backend: str, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    given: dict[str, Any] = {
        "out": _floats(),
        "base": _floats(),
        "updates": [_floats()],
        "weights": [1.0],
        "optimizer": ADAM,
        "old_state": [_floats(), _floats()],
        "new_state": [_floats(9), _floats(9)],
    } | change
    with pytest.raises(error) as caught:
        kernels.weighted_step(**given, backend=backend)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_that_is_read_changes(backend: str) -> None:
    base, old, updates = _floats(3), [_floats(0.5), _floats(0.25)], [_floats(2), _floats(4)]
    before = [x.tobytes() for x in (base, *old, *updates)]
    out, new = np.empty(4, np.float32), [np.empty(4, np.float32) for _ in range(2)]
    first = kernels.weighted_step(out, base, updates, [0.5, 0.5], ADAM, old, new, backend)
    made = [x.tobytes() for x in (out, *new)]
    again = kernels.weighted_step(out, base, updates, [0.5, 0.5], ADAM, old, new, backend)
    assert [x.tobytes() for x in (out, *new)] == made
    assert [x.tobytes() for x in (base, *old, *updates)] == before
    assert first.tolist() == again.tolist() == [16.0, 64.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", [ServerOptimizer(lr=0.5), MOMENTUM], ids=["sgd", "momentum"])
def test_base_scale_shrinks_the_model(backend: str, optimizer: ServerOptimizer) -> None:
    """g = (0.5 − 1)·4 + 2·3 = 4, and the norms and checksums are of the updates alone."""
    state = [_floats(8)] * optimizer.vectors
    out, new = np.empty(4, np.float32), [np.empty(4, np.float32) for _ in state]
    sums = np.zeros(1, np.uint64)
    norms = kernels.weighted_step(
        out, _floats(4), [_floats(3)], [2.0], optimizer, state, new, backend, base_scale=0.5, checksums=sums
    )
    assert out.tolist() == [4 + 0.5 * 4] * 4 if not state else [4 + 0.5 * 8 + 4] * 4
    assert norms.tolist() == [36.0]
    assert sums.tolist() == [kernels.checksum(_floats(3))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_update_shows_in_its_norm(backend: str) -> None:
    bad = _floats()
    bad[2] = np.nan
    out, new = np.empty(4, np.float32), [np.empty(4, np.float32)]
    norms = kernels.weighted_step(
        out, _floats(), [_floats(), bad], [1, 1], MOMENTUM, [_floats()], new, backend
    )
    assert norms[0] == 4.0
    assert np.isnan(norms[1])
    assert np.isnan(new[0]).tolist() == [False, False, True, False]
