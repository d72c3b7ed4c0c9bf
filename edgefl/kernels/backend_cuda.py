"""The CUDA back end: sums and steps on a GPU, over host memory or device memory.

Its elements and checksums have the reference's bits. Its norms are summed in an order of the device's own:
the same bits from run to run, within 1e-12 of the reference's. What is not worth a trip over the bus (the
norm or checksum of one vector, quantisation at the client, moving averages) runs on the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from edgefl.errors import ConfigError
from edgefl.kernels import arguments, cuda_library, selection, steps
from edgefl.kernels.arguments import Averages, Checksums, Doubles, Floats, Ids, SumArguments, Update
from edgefl.kernels.backend_reference import folded
from edgefl.kernels.quantization import QuantizationArguments
from edgefl.kernels.steps import Optimizer, StepArguments

_MASK = (1 << 64) - 1


class Vector(ctypes.Structure):
    """ef_update of kernels/edgefl_kernels.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("weight", ctypes.c_float),
        ("dtype", ctypes.c_int),
    )


class StepVectors(ctypes.Structure):
    """ef_step of kernels/edgefl_kernels.h."""

    _fields_ = (
        ("kind", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("keep1", "add1", "keep2", "add2", "epsilon", "lr")),
        *((name, ctypes.c_void_p) for name in ("out", "new_a", "new_b", "base", "old_a", "old_b")),
    )


_library: ctypes.CDLL | None = None


def library() -> ctypes.CDLL:
    """The kernels, ready to run. `ConfigError` where there is no device."""
    global _library
    if _library is None:
        loaded = cuda_library.load(selection.ABI)
        address, size = ctypes.c_void_p, ctypes.c_int64
        loaded.efc_error.restype = ctypes.c_char_p
        for name in ("efc_sum_host", "efc_sum_device"):
            getattr(loaded, name).argtypes = [
                address,
                address,
                address,
                size,
                size,
                address,
                address,
                address,
            ]
        loaded.efc_register.argtypes = [address, size]
        loaded.efc_unregister.argtypes = [address]
        if loaded.efc_devices() < 1:
            raise ConfigError(f"kernel back end 'cuda' is not there: {_reason(loaded)}")
        _library = loaded
    return _library


def _reason(loaded: ctypes.CDLL) -> str:
    return cast(bytes, loaded.efc_error()).decode(errors="replace") or "no CUDA device"


def _address(array: Any) -> int:
    """The address of an array, on the host or (where it has ``__cuda_array_interface__``) on the device."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        interface = array.__array_interface__
    return int(interface["data"][0])


def vectors(updates: Sequence[Any], weights: Floats, scales: Sequence[Any | None]) -> Any:
    """The list that the library takes: addresses, weights and types."""
    made = (Vector * len(updates))()
    for each, update, weight, scale in zip(made, updates, weights.tolist(), scales, strict=True):
        each.data, each.weight, each.dtype = _address(update), weight, dtype_code(update)
        each.scales = None if scale is None else _address(scale)
    return made


def dtype_code(update: Any) -> int:
    """ef_dtype of kernels/edgefl_kernels.h."""
    interface = getattr(update, "__cuda_array_interface__", None)
    dtype = np.dtype(interface["typestr"]) if interface else update.dtype
    if dtype == np.int16:  # torch has bfloat16 but shows it as this after .view(torch.int16)
        dtype = np.dtype(np.uint16)
    if dtype not in arguments.DTYPES:
        raise TypeError(f"updates must be {arguments.ALLOWED} (got {dtype})")
    return arguments.DTYPES.index(dtype)


def _call(
    name: str,
    out: Any,
    base: Any | None,
    listed: Any,
    size: int,
    checksums: Checksums | None,
    step: StepVectors | None,
    bytes_of: Sequence[int],
) -> Doubles:
    count = len(listed)
    norms, sums = np.empty(count), np.zeros((count, 2), dtype=np.uint64)
    failed = getattr(library(), name)(
        _address(out),
        None if base is None else _address(base),
        ctypes.addressof(listed) if count else None,
        count,
        size,
        _address(norms),
        None if checksums is None else _address(sums),
        None if step is None else ctypes.addressof(step),
    )
    if failed:
        raise RuntimeError(f"CUDA: {_reason(library())}")
    if checksums is not None:
        checksums[:] = [folded(s1, s2, n) for (s1, s2), n in zip(sums.tolist(), bytes_of, strict=True)]
    return norms


def weighted_sum(given: SumArguments, threads: int) -> Doubles:
    return _host_call(given.checked(), None)


def weighted_step(given: StepArguments, threads: int) -> Doubles:
    total, optimizer, old, new = given.checked()
    step = step_vectors(optimizer, total.out, total.base, old, new)
    return _host_call(total._replace(base=None), step)


def _host_call(given: SumArguments, step: StepVectors | None) -> Doubles:
    sizes = [update.nbytes for update in given.updates]
    listed = vectors(given.updates, given.weights, given.scales)
    return _call("efc_sum_host", given.out, given.base, listed, given.out.size, given.checksums, step, sizes)


def step_vectors(
    optimizer: Optimizer, out: Any, base: Any, old: Sequence[Any], new: Sequence[Any]
) -> StepVectors:
    """The step that the library takes."""
    old_a, old_b = [*map(_address, old), None][:2]
    new_a, new_b = [*map(_address, new), None][:2]
    numbers = steps.constants(optimizer)
    places = (_address(out), new_a, new_b, _address(base), old_a, old_b)
    return StepVectors(steps.KINDS.index(optimizer.kind), *numbers, *places)


def weighted_sum_on_device(
    out: Any,
    base: Any | None,
    updates: Sequence[Any],
    weights: Sequence[float],
    scales: Sequence[Any | None] | None = None,
) -> Doubles:
    """`edgefl.kernels.weighted_sum` on vectors that are on the GPU, such as torch's CUDA tensors.

    All of them flat, contiguous and aligned to 16 bytes; ``out`` and ``base`` float32, and no update in
    ``out``. Their producers' work must be done (``torch.cuda.synchronize()``). ValueError or TypeError
    for a vector that is not like that.
    """
    size = int(out.__cuda_array_interface__["shape"][0])
    named = {"out": out} | ({} if base is None else {"base": base})
    named |= {f"updates[{k}]": update for k, update in enumerate(updates)}
    for name, vector in named.items():
        interface = vector.__cuda_array_interface__
        if tuple(interface["shape"]) != (size,) or interface.get("strides") is not None:
            raise ValueError(
                f"{name} must be flat, contiguous and of {size} elements (got {interface['shape']})"
            )
        if interface["data"][0] % 16:
            raise ValueError(f"{name} must be aligned to 16 bytes (got address {interface['data'][0]:#x})")
        if name in ("out", "base") and np.dtype(interface["typestr"]) != np.float32:
            raise TypeError(f"{name} must be float32 (got {interface['typestr']})")
    if len(weights) != len(updates):
        raise ValueError(f"weights must have {len(updates)} entries like updates (got {len(weights)})")
    per_update = [None] * len(updates) if scales is None else list(scales)
    listed = vectors(updates, np.asarray(weights, dtype=np.float32), per_update)
    return _call("efc_sum_device", out, base, listed, size, None, None, ())


def register(memory: Any) -> None:
    """Page-lock host memory, so that copies of it overlap the sum. RuntimeError if that is refused."""
    array = np.frombuffer(memory, dtype=np.uint8)
    if library().efc_register(_address(array), array.nbytes):
        raise RuntimeError(f"CUDA: {_reason(library())}")


def unregister(memory: Any) -> None:
    """Undo `register`, before the memory goes."""
    if library().efc_unregister(_address(np.frombuffer(memory, dtype=np.uint8))):
        raise RuntimeError(f"CUDA: {_reason(library())}")


# ---- what stays on the CPU -----------------------------------------------------------------------


def _cpu() -> selection.Backend:
    return selection.fastest()


def quantize(given: QuantizationArguments, threads: int) -> float:
    return _cpu().quantize(given, threads)


def sq_norm(update: Update, scale: object | None, threads: int) -> float:
    return _cpu().sq_norm(update, scale, threads)


def checksum(update: object, threads: int) -> int:
    return _cpu().checksum(update, threads)


def delta(out: object, trained: object, base: object) -> int:
    return _cpu().delta(out, trained, base)


def observe(averages: Averages, ids: Ids, values: Doubles, means: Doubles) -> None:
    _cpu().observe(averages, ids, values, means)
