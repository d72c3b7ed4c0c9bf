"""Weighted averages of models given as lists or dicts of layers: NumPy arrays or torch tensors.

Layers are read in place, except that layers on a GPU and non-contiguous layers are copied first. Layers of
types other than float32, float16 and bfloat16 are averaged in float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgefl.kernels.arguments import FLOAT32, Floats, SumArguments, items
from edgefl.kernels.selection import select, threads
from edgefl.sequences import added

Model = TypeVar("Model", bound=Sequence[Any] | Mapping[str, Any])

_DIRECT = (FLOAT32, np.dtype(np.float16))
"""NumPy dtypes that the kernels read in place, in addition to torch's bfloat16, which NumPy lacks."""


def average(
    models: Sequence[Model], weights: Sequence[float] | None = None, backend: str | None = None
) -> Model:
    """Return the weighted average of ``models``, layer by layer: Σ_k w_k · x_k / Σ_k w_k, with k ascending.

    Each model is a list of layers or a mapping of names to layers (a ``state_dict``). All models must have
    the same layers; a layer is a NumPy array or torch tensor that has the same shape in all models.
    ``weights`` holds one number of at least 0 per model, such as the number of examples of its client; by
    default all weights are equal. The models are not changed.

    Returns a list, or a dict with the names of the first model. Each layer is new, and has the class, dtype
    and device of the same layer in the first model. Layers of float32, float16 and bfloat16 are summed in
    float32, where each product and each sum is rounded, as in `weighted_sum`. Other types are summed in
    float64; integers are rounded at the end.

    Raises ValueError or TypeError with the name of the wrong layer or argument, and ConfigError if
    ``backend`` is not available.

    The average is that of McMahan et al., *Communication-Efficient Learning of Deep Networks from
    Decentralized Data*, algorithm 1.

    >>> import numpy as np
    >>> client_a = [np.array([[0, 4]], np.float32), np.array([1], np.float32)]
    >>> client_b = [np.array([[4, 0]], np.float32), np.array([5], np.float32)]
    >>> average([client_a, client_b], weights=[300, 100])
    [array([[1., 3.]], dtype=float32), array([2.], dtype=float32)]
    >>> average([{"bias": client_a[1]}, {"bias": client_b[1]}])
    {'bias': array([3.], dtype=float32)}
    """
    given = items("models", models)
    tables = [_table(k, model) for k, model in enumerate(given)]
    if not tables:
        raise ValueError("models must hold at least one model (got none)")
    for k, table in enumerate(tables):
        if table.keys() != tables[0].keys():
            odd = ", ".join(map(str, sorted(table.keys() ^ tables[0].keys(), key=str)[:3]))
            raise ValueError(f"models[{k}] must have the same layers as models[0] (not in both: {odd})")
    shares = _shares(weights, len(tables))
    made = {name: _layer(name, [table[name] for table in tables], shares, backend) for name in tables[0]}
    result: Any = made if isinstance(given[0], Mapping) else list(made.values())
    return result  # type: ignore[no-any-return]


def weighted_layer(
    arrays: Sequence[NDArray[Any]], factors: Sequence[float], backend: str | None = None
) -> Floats:
    """Return Σ_k factors[k] · arrays[k] in float32.

    The arrays have the same shape, and types of `_DIRECT` or bfloat16. If all have the same contiguous memory
    layout, they are read in place, and the result has the same layout. Otherwise arrays that are not
    C-contiguous are copied.
    """
    out = np.empty_like(arrays[0], np.float32, subok=False)
    in_place = all(each.strides == arrays[0].strides for each in arrays)
    in_place = in_place and _order(out) == _order(arrays[0])
    if in_place:
        sum_into(out.ravel("K"), [each.ravel("K") for each in arrays], factors, backend)
        return out
    out = np.empty(arrays[0].shape, np.float32)
    sum_into(out.reshape(-1), [np.ascontiguousarray(each).reshape(-1) for each in arrays], factors, backend)
    return out


def sum_into(
    out: Floats, flat: Sequence[NDArray[Any]], factors: Sequence[float], backend: str | None = None
) -> None:
    """Write Σ_k factors[k] · flat[k] to ``out`` by `weighted_sum` without a base. Arrays may be empty."""
    if out.size:
        given: Any = (out, None, flat, factors, None, None)
        select(backend).weighted_sum(SumArguments(*given), threads())


def _order(array: NDArray[Any]) -> tuple[int, ...]:
    """Return the strides in elements, which are equal for two arrays of the same memory layout."""
    return tuple(stride // array.itemsize for stride in array.strides)


def _table(k: int, model: Any) -> dict[Any, Any]:
    if isinstance(model, Mapping):
        return dict(model)
    return dict(enumerate(items(f"models[{k}]", model)))


def _shares(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return the weights divided by their sum."""
    numbers = [1.0] * count if weights is None else items("weights", weights)
    if len(numbers) != count:
        raise ValueError(f"weights must have {count} entries, as many as models (got {len(numbers)})")
    try:
        numbers = [float(number) for number in numbers]
    except (TypeError, ValueError):
        raise TypeError(f"weights must be numbers (got {numbers!r})") from None
    total = added(numbers)
    if not (math.isfinite(total) and total > 0 and min(numbers) >= 0):
        raise ValueError(f"weights must be finite numbers of at least 0, and not all 0 (got {numbers!r})")
    return [number / total for number in numbers]


def _layer(name: Any, layers: list[Any], shares: list[float], backend: str | None) -> Any:
    arrays = [_array(f"layer {name!r} of models[{k}]", layer) for k, layer in enumerate(layers)]
    shape = arrays[0].shape
    for k, array in enumerate(arrays):
        if array.shape != shape:
            where = f"layer {name!r} of models[{k}]"
            raise ValueError(f"{where} must have shape {shape} like models[0]'s (got {array.shape})")
    read = (
        array.dtype in _DIRECT or _is_bfloat16(layer) for layer, array in zip(layers, arrays, strict=True)
    )
    if all(read):
        summed: NDArray[Any] = weighted_layer(arrays, shares, backend)
    else:
        summed = _in_float64(layers, arrays, shares)
    if not _is_tensor(layers[0]):
        return summed.astype(arrays[0].dtype, copy=False)
    return sys.modules["torch"].from_numpy(summed).to(device=layers[0].device, dtype=layers[0].dtype)


def _in_float64(layers: list[Any], arrays: list[NDArray[Any]], shares: list[float]) -> NDArray[Any]:
    total = np.zeros(arrays[0].shape)
    for layer, array, share in zip(layers, arrays, shares, strict=True):
        wide = layer.detach().cpu().double().resolve_neg().numpy() if _is_tensor(layer) else array
        # A product of a Python float and a float16 or float32 array would be rounded to the array's type.
        total += share * wide.astype(np.float64, copy=False)
    whole = arrays[0].dtype.kind in "iub" and not _is_bfloat16(layers[0])
    return _whole(total, arrays[0].dtype) if whole else total


def _whole(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round the values in place, and return them as integers of ``dtype``.

    Values that float64 rounding has moved out of the range of ``dtype`` are clamped to the range.
    """
    # Without ``out``, an array without dimensions would become a scalar.
    rounded: NDArray[Any] = np.rint(values, out=values)
    if dtype.kind == "b":
        return rounded.astype(dtype)
    ends = np.iinfo(dtype)
    above = rounded >= float(ends.max)  # for 64-bit types, float(ends.max) is ends.max + 1
    made = np.where(above, 0.0, np.maximum(rounded, float(ends.min))).astype(dtype)
    made[above] = ends.max
    return made


def _array(name: str, layer: Any) -> NDArray[Any]:
    """Return the layer as an array, without copying host memory. bfloat16 becomes uint16 (the same bits)."""
    if _is_tensor(layer):
        torch, here = sys.modules["torch"], layer.detach().cpu()
        try:
            if here.is_complex():
                raise TypeError
            here = here.resolve_neg()
            bits: NDArray[Any] = (here.view(torch.int16) if _is_bfloat16(layer) else here).numpy()
        except (TypeError, RuntimeError):  # also sparse and quantised tensors, and types that NumPy lacks
            got = f"{layer.dtype}, {layer.layout}".replace("torch.", "")
            raise TypeError(
                f"{name} must be a dense tensor of real numbers, float8 excluded (got {got})"
            ) from None
        return bits.view(np.uint16) if _is_bfloat16(layer) else bits
    array = np.asarray(layer)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be an array or a tensor of real numbers (got {type(layer).__name__})")
    return array


def _is_bfloat16(layer: Any) -> bool:
    return _is_tensor(layer) and layer.dtype is sys.modules["torch"].bfloat16


def _is_tensor(layer: Any) -> bool:
    torch = sys.modules.get("torch")  # if the caller has a tensor, torch has been imported
    return torch is not None and isinstance(layer, torch.Tensor)
