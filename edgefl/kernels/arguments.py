"""Validation of the kernels' arguments. Error messages name the wrong argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

TILE = 2048
"""Number of elements per block; a norm is computed as one partial sum per block."""
LANES = 8
"""Number of interleaved float64 accumulators per block."""
SCALE_BLOCK = 256
"""Number of elements of an int8 update that share one float32 scale."""

Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = NDArray[np.int64]
Checksums: TypeAlias = NDArray[np.uint64]
Update: TypeAlias = NDArray[Any]

FLOAT32 = np.dtype(np.float32)
DTYPES = (FLOAT32, np.dtype(np.float16), np.dtype(np.uint16), np.dtype(np.int8))
ALLOWED = "float32, float16, uint16 (bfloat16) or int8 (with scales)"


class Averages(NamedTuple):
    """The state of a `MovingAverage`.

    ``counts`` is int64[clients], and ``state`` is a flat float64 array of clients × width elements.
    """

    mode: int
    """0 for a moving window, 1 for the mean of all observations, 2 for an exponential average."""
    width: int
    decay: float
    counts: Ids
    state: Doubles


def flat(name: str, value: object, *, writable: bool = False) -> NDArray[Any]:
    """Check that ``value`` is a flat C-contiguous buffer; return it as an array without copying."""
    array = value
    if not isinstance(array, np.ndarray):
        try:
            array = np.asarray(memoryview(value))  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"{name} must be a flat array (got {type(value).__name__})") from None
    if array.ndim != 1:
        raise ValueError(f"{name} must be a flat array (got shape {array.shape})")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous (got stride {array.strides[0]} bytes)")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} must be writable (got a read-only array)")
    return array


def floats(
    name: str, value: object, size: int | None = None, *, writable: bool = False, like: str = ""
) -> Floats:
    """Check that ``value`` is a flat float32 array of ``size`` elements (of any size if None); return it."""
    array = flat(name, value, writable=writable)
    if array.dtype != np.float32 or not array.dtype.isnative:
        raise TypeError(f"{name} must be float32 (got {array.dtype})")
    if size is not None and array.size != size:
        raise ValueError(f"{name} must have {size} elements{like} (got {array.size})")
    return array


def packed(name: str, value: object, *, writable: bool = False) -> Update:
    """Check that ``value`` is a flat array with a dtype that updates may have; return it."""
    array = flat(name, value, writable=writable)
    if array.dtype not in DTYPES or not array.dtype.isnative:
        raise TypeError(f"{name} must be {ALLOWED} (got {array.dtype})")
    return array


def items(name: str, value: object) -> list[Any]:
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]
    except TypeError:
        raise TypeError(f"{name} must be a sequence (got {type(value).__name__})") from None


def update(name: str, value: object, size: int | None, scale: object | None) -> tuple[Update, Floats | None]:
    """Check an update of ``size`` elements (of any size if None) and, for int8, its scales; return both."""
    array = packed(name, value)
    if size is not None and array.size != size:
        raise ValueError(f"{name} must have {size} elements, as many as out (got {array.size})")
    owner = name.replace("updates", "scales") if "updates" in name else "scales"
    if array.dtype != np.int8:
        if scale is not None:
            raise ValueError(f"{owner} must be None for a {array.dtype} update (got {type(scale).__name__})")
        return array, None
    if scale is None:
        raise ValueError(f"{owner} must be given for an int8 update (got None)")
    checked = floats(owner, scale)
    blocks = -(-array.size // SCALE_BLOCK)
    if checked.size != blocks:
        raise ValueError(
            f"{owner} must have {blocks} entries, one per {SCALE_BLOCK} elements (got {checked.size})"
        )
    return array, checked


def checksum_array(value: object, size: int) -> Checksums:
    array = flat("checksums", value, writable=True)
    if array.dtype != np.uint64:
        raise TypeError(f"checksums must be uint64 (got {array.dtype})")
    if array.size != size:
        raise ValueError(f"checksums must have {size} entries, as many as updates (got {array.size})")
    return array


def delta(out: object, trained: object, base: object) -> tuple[Floats, Floats, Floats]:
    """Check the arguments of `edgefl.kernels.delta`, and return them."""
    target = floats("out", out, writable=True)
    read = []
    for name, value in (("trained", trained), ("base", base)):
        array = floats(name, value, target.size, like=", as many as out")
        if np.may_share_memory(array, target):
            raise ValueError(f"out must not overlap {name}")
        read.append(array)
    return target, read[0], read[1]


class SumArguments(NamedTuple):
    """Arguments of `edgefl.kernels.weighted_sum`; `checked` validates them."""

    out: Floats
    base: Floats | None
    updates: Sequence[Update]
    weights: Floats
    scales: Any
    """One entry per update: a float32 array for int8, otherwise None. If no update is int8, ``scales`` itself
    may be None."""
    checksums: Checksums | None

    def checked(self) -> SumArguments:
        """Return the validated arguments, with float32 weights. Error messages name the invalid argument."""
        checked_out = floats("out", self.out, writable=True)
        size = checked_out.size
        vectors, numbers = items("updates", self.updates), items("weights", self.weights)
        per_update = [None] * len(vectors) if self.scales is None else items("scales", self.scales)
        for name, entries in (("weights", numbers), ("scales", per_update)):
            if len(entries) != len(vectors):
                raise ValueError(
                    f"{name} must have {len(vectors)} entries, one per update (got {len(entries)})"
                )
        try:
            doubles = np.array([float(w) for w in numbers], dtype=np.float64)
        except (TypeError, ValueError):
            raise TypeError(f"weights must be numbers (got {numbers!r})") from None
        with np.errstate(over="ignore"):
            rounded = doubles.astype(np.float32)
        base = None if self.base is None else floats("base", self.base, size, like=", as many as out")
        apart = base is None or base.ctypes.data == checked_out.ctypes.data
        if not apart and np.may_share_memory(base, checked_out):
            raise ValueError("base must be the same array as out, or not overlap it (got a partial overlap)")
        pairs = []
        for k, (item, scale) in enumerate(zip(vectors, per_update, strict=True)):
            # Fast path: building argument names would dominate the cost of a small sum.
            usual = scale is None and type(item) is np.ndarray and item.dtype is FLOAT32
            if usual and item.shape == checked_out.shape and item.flags.c_contiguous:
                array, blocks = item, None
            else:
                array, blocks = update(f"updates[{k}]", item, size, scale)
            for name, other in (("updates", array), ("scales", blocks)):
                if other is not None and np.may_share_memory(checked_out, other):
                    raise ValueError(f"{name}[{k}] must not overlap the output array (out)")
            pairs.append((array, blocks))
        sums = None if self.checksums is None else checksum_array(self.checksums, len(vectors))
        arrays, blocks_of = [a for a, _ in pairs], [s for _, s in pairs]
        return SumArguments(checked_out, base, arrays, rounded, blocks_of, sums)


def observations(
    clients: int, ids: Sequence[int] | Ids | int, values: Sequence[float] | Doubles | float
) -> tuple[Ids, Doubles]:
    """Check client ids and observed values; return flat arrays."""
    checked = client_ids(clients, ids)
    try:
        numbers = np.atleast_1d(np.ascontiguousarray(values, dtype=np.float64))
    except (TypeError, ValueError):
        raise TypeError(f"values must be numbers (got {values!r})") from None
    if numbers.shape != checked.shape:
        raise ValueError(
            f"values must have {checked.size} entries, as many as client_ids (got shape {numbers.shape})"
        )
    if not np.isfinite(numbers).all():
        raise ValueError(f"values must be finite (got {numbers[~np.isfinite(numbers)][0]})")
    return checked, numbers


def client_ids(clients: int, ids: Sequence[int] | Ids | int) -> Ids:
    """Return client ids as a flat int64 array. Raises ValueError or TypeError if they are invalid."""
    raw = np.atleast_1d(np.asarray(ids))
    if raw.ndim != 1:
        raise ValueError(f"client_ids must be flat (got shape {raw.shape})")
    if raw.size and raw.dtype.kind not in "iu":
        raise TypeError(f"client_ids must be integers (got {raw.dtype})")
    if raw.size and (raw.min() < 0 or raw.max() >= clients):
        wrong = raw[(raw < 0) | (raw >= clients)][0]
        raise ValueError(f"client_ids must be from 0 to {clients - 1} (got {wrong})")
    return np.ascontiguousarray(raw, dtype=np.int64)
