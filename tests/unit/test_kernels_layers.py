"""Tests of `kernels.average` with models made of NumPy and torch layers in every memory order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgefl import kernels
from edgefl.kernels import layers

V, T = ValueError, TypeError
WEIGHTS = [3.0, 1.0, 0.0, 4.0]
EXACT = {"rtol": 1e-6, "atol": 1e-6}
rng = np.random.default_rng(5)


def _four(make: Any) -> list[NDArray[Any]]:
    return [make(rng.standard_normal((3, 4, 6)).astype(np.float32)) for _ in WEIGHTS]


def _expected(arrays: list[Any]) -> NDArray[np.float64]:
    stacked = np.stack([np.asarray(each, np.float64) for each in arrays])
    return np.tensordot(np.array(WEIGHTS) / sum(WEIGHTS), stacked, 1)


ORDERS = {
    "rows": lambda a: a,
    "fortran": np.asfortranarray,
    "channels last": lambda a: np.ascontiguousarray(a.transpose(1, 2, 0)).transpose(2, 0, 1),
    "slice": lambda a: a[:, ::2],
    "reversed": lambda a: a[::-1],
    "broadcast": lambda a: np.broadcast_to(a[:1], (5, 4, 6)),
    "scalar": lambda a: np.array(a[0, 0, 0]),
    "empty": lambda a: a[:0],
    "big-endian": lambda a: a.astype(">f4"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_layers_may_have_any_memory_order(order: str) -> None:
    arrays = _four(ORDERS[order])
    before = [each.copy() for each in arrays]
    (found,) = kernels.average([[each] for each in arrays], WEIGHTS)
    assert (found.dtype, found.shape) == (arrays[0].dtype, arrays[0].shape)
    np.testing.assert_allclose(found, _expected(arrays), **EXACT)
    for array, was in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, was)
        assert not np.shares_memory(found, array)


@pytest.mark.parametrize("order", ["rows", "fortran", "channels last"])
def test_contiguous_layers_are_read_without_a_copy(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, seen = _four(ORDERS[order]), []
    monkeypatch.setattr(layers, "sum_into", lambda out, flat, *_: seen.append([out, *flat]))
    (found,) = kernels.average([[each] for each in arrays], WEIGHTS)
    ((out, *flat),) = seen
    assert np.shares_memory(out, found)
    assert all(np.shares_memory(a, b) for a, b in zip(flat, arrays, strict=True))


def test_models_in_different_orders_are_averaged_by_element() -> None:
    orders = [ORDERS[order] for order in ("rows", "fortran", "rows", "channels last")]
    arrays = [order(each) for order, each in zip(orders, _four(np.array), strict=True)]
    (found,) = kernels.average([[each] for each in arrays], WEIGHTS)
    np.testing.assert_allclose(found, _expected(arrays), **EXACT)


@pytest.mark.parametrize(
    ("dtype", "within"),
    [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)],
)
def test_tensors_stay_tensors_of_their_type(dtype: torch.dtype, within: float) -> None:
    tensors = [torch.randn(4, 3, 5, 5).to(dtype).to(memory_format=torch.channels_last) for _ in WEIGHTS]
    given = [
        {"weight": each.requires_grad_(), "steps": torch.tensor(7 * k)} for k, each in enumerate(tensors)
    ]
    found = kernels.average(given, WEIGHTS)
    expected = _expected([each.detach().double().numpy() for each in tensors])
    assert list(found) == ["weight", "steps"]
    assert (found["weight"].dtype, found["weight"].requires_grad) == (dtype, False)
    np.testing.assert_allclose(found["weight"].double().numpy(), expected, rtol=within, atol=within)
    assert found["steps"].dtype == torch.int64
    assert found["steps"].item() == round((0 * 3 + 7 + 14 * 0 + 21 * 4) / 8)


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.int8, np.bool_, np.float64])
def test_other_types_are_averaged_as_numbers_and_keep_their_type(dtype: Any) -> None:
    arrays = [np.array([1, 0, 1, 1]).astype(dtype), *(np.array([0, 0, 1, 1]).astype(dtype) for _ in range(3))]
    (found,) = kernels.average([[each] for each in arrays], [5, 1, 1, 1])
    assert found.dtype == dtype
    np.testing.assert_allclose(found, [5 / 8 if dtype is np.float64 else 1, 0, 1, 1])


@pytest.mark.parametrize("first", [np.float64, ">f2"])
def test_small_numbers_of_mixed_types_are_not_rounded_before_they_are_added(first: Any) -> None:
    small = np.full(3, 1e-4, np.float16)  # a thousandth of it has two significant bits in float16
    (found,) = kernels.average([[small.astype(first)], *[[small]] * 999])
    assert found.dtype == first
    np.testing.assert_allclose(found.astype(np.float64), small.astype(np.float64), rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.int8, np.uint8])
@pytest.mark.parametrize("end", ["min", "max"])
def test_the_ends_of_an_integer_type_are_their_own_average(dtype: Any, end: str) -> None:
    value = getattr(np.iinfo(dtype), end)
    (found,) = kernels.average([[np.array([value], dtype)]] * 3)  # 1/3 is rounded, as is int64's maximum
    assert found.tolist() == [value]


@pytest.mark.parametrize("value", [True, 3, 0.5])
def test_layers_without_dimensions_stay_arrays_and_tensors(value: Any) -> None:
    array, tensor = np.array(value), torch.tensor(value)
    found: list[Any] = kernels.average([[array, tensor]] * 2)
    assert [type(each) for each in found] == [np.ndarray, torch.Tensor]
    assert [each.dtype for each in found] == [array.dtype, tensor.dtype]
    assert [each.item() for each in found] == [value, value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_may_come_from_a_generator_and_hold_lazily_negated_tensors(dtype: torch.dtype) -> None:
    negative = torch.ones(2, dtype=dtype)._neg_view()
    (found,) = kernels.average(each for each in ([negative], [2 * negative]))
    assert found.tolist() == [-1.5, -1.5]


def test_equal_weights_are_the_default_and_the_backends_agree() -> None:
    models = [[each] for each in _four(np.array)]
    even = kernels.average(models)[0]
    np.testing.assert_allclose(even, np.mean([each for (each,) in models], axis=0), **EXACT)
    np.testing.assert_array_equal(kernels.average(models, [2] * 4, "reference")[0], even)


@pytest.mark.parametrize(
    ("models", "weights", "error", "says"),
    [
        ([], None, V, "at least one model"),
        ([[np.zeros(2)], [np.zeros(3)]], None, V, r"layer 0 of models\[1\] must have shape \(2,\)"),
        ([[np.zeros(2)], []], None, V, r"models\[1\] must have the same layers as models\[0\] .*: 0"),
        ([{"a": np.zeros(2)}, {"b": np.zeros(2)}], None, V, "not in both: a, b"),
        ([[np.zeros(2)]], [1, 2], V, "weights must have 1 entries"),
        ([[np.zeros(2)]] * 2, [1, -2], V, "finite numbers of at least 0"),
        ([[np.zeros(2)]] * 2, [0, 0], V, "not all 0"),
        ([[np.zeros(2)]] * 2, [1, float("nan")], V, "finite numbers"),
        ([[np.zeros(2)]] * 2, ["x", 1], T, "weights must be numbers"),
        ([["text"]], None, T, r"layer 0 of models\[0\] must be an array or a tensor .* \(got str\)"),
        ([[torch.ones(2, dtype=torch.complex64)]], None, T, r"layer 0 of .*\(got complex64, strided\)"),
        ([{"a": torch.eye(2).to_sparse()}], None, T, r"layer 'a' of .*\(got float32, sparse_coo\)"),
        ([[torch.ones(2).to(torch.float8_e5m2)]], None, T, r"layer 0 of .*\(got float8_e5m2, strided\)"),
        ([3], None, T, r"models\[0\] must be a sequence \(got int\)"),
        (3, None, T, r"models must be a sequence \(got int\)"),
    ],
)
def test_wrong_models_are_refused(models: Any, weights: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        kernels.average(models, weights)


def test_the_guides_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) >= 3
    for example in examples:
        exec(example, {})
