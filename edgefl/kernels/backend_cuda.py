"""The CUDA back end: sums, optimiser steps and masks on a GPU, for arrays in host memory.

Elements and checksums have the same bits as those of the reference back end. Norms are summed in another
order: they agree within a relative error of 1e-12, and are the same in every run. Other functions run on the
CPU, because copying their data to the GPU costs more than it saves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError, GpuError
from edgefl.kernels import arguments, cuda_library, selection, steps
from edgefl.kernels.arguments import Doubles, Floats, SumArguments
from edgefl.kernels.backend_reference import folded
from edgefl.kernels.field import CodeArguments, FieldSumArguments
from edgefl.kernels.steps import ServerOptimizer, StepArguments


class Vector(ctypes.Structure):
    """The struct ef_update of kernels/edgefl_kernels.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("weight", ctypes.c_float),
        ("dtype", ctypes.c_int),
    )


class StepVectors(ctypes.Structure):
    """The struct ef_step of kernels/edgefl_kernels.h."""

    _fields_ = (
        ("kind", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("keep1", "add1", "keep2", "add2", "epsilon", "lr")),
        *((name, ctypes.c_void_p) for name in ("out", "new_a", "new_b", "base", "old_a", "old_b")),
    )


_library: ctypes.CDLL | None = None


def library() -> ctypes.CDLL:
    """Load the kernel library and check that there is a GPU. Raises `ConfigError` if either is missing."""
    global _library
    if _library is None:
        loaded = cuda_library.load(selection.ABI)
        try:
            _declare(loaded)
        except AttributeError as error:
            why = f"was built from older sources; build it again: {error}"
            raise ConfigError(f"the CUDA kernels' library {why}") from None
        if loaded.efc_devices() < 1:
            raise ConfigError(f"kernel back end 'cuda' is not available: {_reason(loaded)}")
        _library = loaded
    return _library


def _declare(loaded: ctypes.CDLL) -> None:
    """Declare the library's functions. Raises AttributeError if one is missing."""
    address, size = ctypes.c_void_p, ctypes.c_int64
    whole, number = ctypes.c_int, ctypes.c_float
    loaded.efc_error.restype = ctypes.c_char_p
    loaded.efc_sum_host.argtypes = [*[address] * 3, size, size, *[address] * 3]
    loaded.efc_register.argtypes = [address, size]
    loaded.efc_unregister.argtypes = [address]
    loaded.efc_field_sum.argtypes = [*[address] * 3, size, size]
    loaded.efc_field_code.argtypes = [whole, *[address] * 3, size, number, number, address]


def _reason(loaded: ctypes.CDLL) -> str:
    return cast(bytes, loaded.efc_error()).decode(errors="replace") or "no CUDA device"


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def vectors(updates: Sequence[Any], weights: Floats, scales: Sequence[Any | None]) -> Any:
    """Convert the updates to the library's C array of addresses, weights and dtypes."""
    made = (Vector * len(updates))()
    for each, update, weight, scale in zip(made, updates, weights.tolist(), scales, strict=True):
        each.data, each.weight, each.dtype = _address(update), weight, arguments.DTYPES.index(update.dtype)
        each.scales = None if scale is None else _address(scale)
    return made


def weighted_sum(given: SumArguments, threads: int) -> Doubles:
    return _host_call(given.checked(), None)


def weighted_step(given: StepArguments, threads: int) -> Doubles:
    total, optimizer, old, new = given.checked()
    step = step_vectors(optimizer, total.out, total.base, old, new)
    return _host_call(total._replace(base=None), step)


def _host_call(given: SumArguments, step: StepVectors | None) -> Doubles:
    out, base, updates, weights, scales, checksums = given
    count, listed = len(updates), vectors(updates, weights, scales)
    norms, sums = np.empty(count), np.zeros((count, 2), dtype=np.uint64)
    failed = library().efc_sum_host(
        _address(out),
        None if base is None else _address(base),
        ctypes.addressof(listed) if count else None,
        count,
        out.size,
        _address(norms),
        None if checksums is None else _address(sums),
        None if step is None else ctypes.addressof(step),
    )
    _raise_if(failed)
    if checksums is not None:
        pairs = zip(sums.tolist(), updates, strict=True)
        checksums[:] = [folded(s1, s2, update.nbytes) for (s1, s2), update in pairs]
    return norms


def step_vectors(
    optimizer: ServerOptimizer, out: Any, base: Any, old: Sequence[Any], new: Sequence[Any]
) -> StepVectors:
    """Convert an optimiser step to the library's C struct."""
    old_a, old_b = [*map(_address, old), None][:2]
    new_a, new_b = [*map(_address, new), None][:2]
    numbers = steps.constants(optimizer)
    places = (_address(out), new_a, new_b, _address(base), old_a, old_b)
    return StepVectors(steps.KINDS.index(optimizer.kind), *numbers, *places)


def field_sum(given: FieldSumArguments, threads: int) -> None:
    out, vectors, weights = given.checked()
    addresses, factors = np.array([_address(v) for v in vectors], np.uint64), np.array(weights, np.uint64)
    size = (len(vectors), out.size)
    _raise_if(library().efc_field_sum(_address(out), _address(addresses), _address(factors), *size))


def field_encode(given: CodeArguments, threads: int) -> int:
    return _code(given.checked())


def field_decode(given: CodeArguments, threads: int) -> int:
    return _code(given.checked())


def _code(given: CodeArguments) -> int:
    floats, words, mask, factor, clip = given
    places, result = map(_address, (floats, words, mask)), np.zeros(1, np.uint32)
    encodes, limit = clip is not None, clip or 0.0
    _raise_if(library().efc_field_code(encodes, *places, words.size, limit, factor, _address(result)))
    return int(result[0])


def register(memory: Any) -> None:
    """Page-lock host memory, so that copies overlap the sum. Raises `GpuError` if CUDA cannot lock it."""
    array = np.frombuffer(memory, dtype=np.uint8)
    _raise_if(library().efc_register(_address(array), array.nbytes))


def unregister(memory: Any) -> None:
    """Undo `register`. This must be called before the memory is freed."""
    _raise_if(library().efc_unregister(_address(np.frombuffer(memory, dtype=np.uint8))))


def _raise_if(failed: int) -> None:
    if failed:
        raise GpuError(f"CUDA: {_reason(library())}")


_ON_CPU = ("quantize", "trimmed_mean", "products", "sq_norm", "checksum", "delta", "observe")


def __getattr__(name: str) -> Any:
    """Return the fastest CPU back end's version of a function that has no GPU version."""
    if name in _ON_CPU:
        return getattr(selection.fastest(), name)
    raise AttributeError(name)
