"""weighted_sum and sq_norm: what they refuse, and with which words, is the same for every back end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgefl import kernels

BACKENDS = [name for name, status in kernels.backends().items() if status == "ok"]


def _floats(size: int = 4) -> np.ndarray:
    return np.ones(size, dtype=np.float32)


def _read_only() -> np.ndarray:
    array = _floats()
    array.flags.writeable = False
    return array


_SHARED = np.zeros(8, dtype=np.float32)
_QUANTISED = np.ones(300, dtype=np.int8)

WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("out-list", {"out": [0.0] * 4}, TypeError, "out must be a flat array (got list)"),
    ("out-double", {"out": np.ones(4)}, TypeError, "out must be float32 (got float64)"),
    (
        "out-matrix",
        {"out": np.ones((2, 2), np.float32)},
        ValueError,
        "out must be a flat array (got shape (2, 2))",
    ),
    ("out-strided", {"out": _floats(8)[::2]}, ValueError, "out must be contiguous (got stride 8 bytes)"),
    ("out-frozen", {"out": _read_only()}, ValueError, "out must be writable (got a read-only array)"),
    ("base-short", {"base": _floats(3)}, ValueError, "base must have 4 elements like out (got 3)"),
    ("base-half", {"base": np.ones(4, np.float16)}, TypeError, "base must be float32 (got float16)"),
    (
        "base-overlap",
        {"out": _SHARED[:4], "base": _SHARED[1:5]},
        ValueError,
        "base must be out itself or not overlap it (got a part of it)",
    ),
    (
        "update-overlap",
        {"out": _SHARED[:4], "updates": [_floats(), _SHARED[3:7]]},
        ValueError,
        "updates[1] must not overlap out, which is written while it is read",
    ),
    (
        "update-short",
        {"updates": [_floats(), _floats(5)]},
        ValueError,
        "updates[1] must have 4 elements like out (got 5)",
    ),
    (
        "update-double",
        {"updates": [_floats(), np.ones(4)]},
        TypeError,
        "updates[1] must be float32, float16, uint16 (bfloat16) or int8 (with scales) (got float64)",
    ),
    (
        "update-swapped",
        {"updates": [np.ones(4, ">f4"), _floats()]},
        TypeError,
        "updates[0] must be float32, float16, uint16 (bfloat16) or int8 (with scales) (got >f4)",
    ),
    (
        "update-strided",
        {"updates": [_floats(8)[::2], _floats()]},
        ValueError,
        "updates[0] must be contiguous (got stride 8 bytes)",
    ),
    (
        "update-none",
        {"updates": [None, _floats()]},
        TypeError,
        "updates[0] must be a flat array (got NoneType)",
    ),
    ("updates-number", {"updates": 3}, TypeError, "updates must be a sequence (got int)"),
    ("weights-few", {"weights": [1.0]}, ValueError, "weights must have 2 entries like updates (got 1)"),
    ("weights-text", {"weights": [1.0, "x"]}, TypeError, "weights must be numbers (got [1.0, 'x'])"),
    ("weights-none", {"weights": None}, TypeError, "weights must be a sequence (got NoneType)"),
    (
        "checksums-few",
        {"checksums": np.zeros(1, np.uint64)},
        ValueError,
        "checksums must have 2 entries like updates (got 1)",
    ),
    (
        "checksums-signed",
        {"checksums": np.zeros(2, np.int64)},
        TypeError,
        "checksums must be uint64 (got int64)",
    ),
    ("scales-few", {"scales": [None]}, ValueError, "scales must have 2 entries like updates (got 1)"),
    (
        "scales-extra",
        {"scales": [_floats(1), None]},
        ValueError,
        "scales[0] must be None for a float32 update (got ndarray)",
    ),
    (
        "scales-missing",
        {"updates": [np.ones(4, np.int8), _floats()]},
        ValueError,
        "scales[0] must be given for an int8 update (got None)",
    ),
    (
        "scales-wrong",
        {
            "out": _floats(300),
            "base": None,
            "updates": [_QUANTISED],
            "weights": [1.0],
            "scales": [_floats(3)],
        },
        ValueError,
        "scales[0] must have 2 entries, one for each 256 elements (got 3)",
    ),
    (
        "scales-double",
        {
            "out": _floats(300),
            "base": None,
            "updates": [_QUANTISED],
            "weights": [1.0],
            "scales": [np.ones(2)],
        },
        TypeError,
        "scales[0] must be float32 (got float64)",
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "error", "words"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_arguments_are_named(
    backend: str, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments = {
        "out": _floats(),
        "base": _floats(),
        "updates": [_floats()] * 2,
        "weights": [1.0, 2.0],
    } | change
    out = np.array(arguments["out"])
    with pytest.raises(error) as caught:
        kernels.weighted_sum(**arguments, backend=backend)
    assert str(caught.value) == words
    np.testing.assert_array_equal(np.asarray(arguments["out"]), out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_of_many_kinds(backend: str) -> None:
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    expected = (0.5 * rows[0] + 2 * rows[1]).tolist()
    for updates in (rows, list(rows), tuple(rows), [memoryview(row) for row in rows], iter(rows)):
        for weights in ([0.5, 2], (0.5, 2.0), np.array([0.5, 2.0]), np.array([0.5, 2.0], np.float32)):
            out = np.empty(4, dtype=np.float32)
            if not isinstance(updates, list | tuple | np.ndarray):
                updates = iter(rows)
            kernels.weighted_sum(memoryview(out), None, updates, weights, backend)
            assert out.tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_read_only_updates_and_base(backend: str) -> None:
    out = np.empty(4, dtype=np.float32)
    assert kernels.weighted_sum(out, _read_only(), [_read_only()], [2.0], backend).tolist() == [4.0]
    assert out.tolist() == [3.0] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_rounded_to_float32(backend: str) -> None:
    out = np.empty(1, dtype=np.float32)
    kernels.weighted_sum(out, None, [_floats(1)], [0.1], backend)
    assert out[0] == np.float32(0.1)
    kernels.weighted_sum(out, None, [_floats(1)], [1e300], backend)
    assert out[0] == np.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_update_shows_in_its_norm_alone(backend: str) -> None:
    bad = _floats(70_000)
    bad[69_999] = np.nan
    infinite = _floats(70_000)
    infinite[3] = -np.inf
    out = np.empty(70_000, dtype=np.float32)
    norms = kernels.weighted_sum(out, None, [_floats(70_000), bad, infinite], [1.0] * 3, backend)
    assert norms[0] == 70_000
    assert np.isnan(norms[1])
    assert norms[2] == np.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_largest_values_have_a_finite_norm(backend: str) -> None:
    largest = np.full(3, np.finfo(np.float32).max, dtype=np.float32)
    assert kernels.sq_norm(largest, backend) == 3 * float(largest[0]) ** 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_sq_norm_refuses(backend: str) -> None:
    with pytest.raises(TypeError, match=r"^update must be float32, .* \(got int64\)$"):
        kernels.sq_norm(np.ones(3, dtype=np.int64), backend)
    with pytest.raises(ValueError, match=r"^scales must be given for an int8 update"):
        kernels.sq_norm(np.ones(3, dtype=np.int8), backend)
    assert kernels.sq_norm(np.full(3, 2, np.int8), backend, scale=np.array([0.5], np.float32)) == 3.0


def test_the_callers_rounding_state_does_not_matter() -> None:
    """torch can set a thread to flush denormals; the C kernels count them all the same."""
    torch = pytest.importorskip("torch")
    if kernels.backends()["c"] != "ok" or not torch.set_flush_denormal(True):
        pytest.skip("needs the C back end and a CPU that can flush denormals")
    try:
        tiny = np.full(9, 1e-42, dtype=np.float32)
        out = np.empty(9, dtype=np.float32)
        norms = kernels.weighted_sum(out, None, [tiny], [1.0], "c")
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(out.view(np.uint32), tiny.view(np.uint32))
    assert norms[0] == kernels.sq_norm(tiny, "reference")
