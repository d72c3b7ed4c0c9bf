"""The contenders of ``bench aggregate``: edgefl's back ends, the usual ways, other frameworks, the limits.

All of them sum the same arrays, which `arrays_of` makes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl import kernels

LAYERS = 10
DTYPES: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8
}  # fmt: skip

Floats = npt.NDArray[np.float32]
Call = Callable[[], object]


class SumArrays(NamedTuple):
    """One row's arrays, all aligned to 64 bytes as slots of the parameter buffer are."""

    stacked: npt.NDArray[Any]
    scales: list[Floats | None]
    base: Floats
    out: Floats
    weights: list[float]
    threads: int

    @property
    def layers(self) -> list[slice]:
        """The places of ten layers, for those that sum layer by layer."""
        ends = np.linspace(0, self.base.size, LAYERS + 1).astype(int).tolist()
        return [slice(a, b) for a, b in pairwise(ends)]

    @property
    def moved_bytes(self) -> int:
        """Updates, their scales and the base read, the result written."""
        scales = sum(scale.nbytes for scale in self.scales if scale is not None)
        return self.stacked.nbytes + scales + 2 * self.base.nbytes


def aligned(size: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
    size_bytes = size * np.dtype(dtype).itemsize
    raw = np.zeros(size_bytes + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size_bytes].view(dtype)


def arrays_of(parameters: int, updates: int, dtype: str, threads: int) -> SumArrays:
    """Updates with one random stretch again and again: the values do not matter, but zeros might."""
    rng = np.random.default_rng([parameters, updates])
    base, out = aligned(parameters), aligned(parameters)
    base[:] = np.resize(rng.standard_normal(min(parameters, 1 << 20), dtype=np.float32), parameters)
    stacked = aligned(updates * parameters, DTYPES[dtype]).reshape(updates, parameters)
    scales: list[Floats | None] = [None] * updates
    for k, row in enumerate(stacked):
        scales[k] = aligned(-(-parameters // kernels.SCALE_BLOCK)) if dtype == "int8" else None
        if k == 0 or dtype != "float32":
            kernels.quantize(row, base, scales=scales[k])
        else:
            np.multiply(base, np.float32(1 + k / updates), out=row)
    return SumArrays(stacked, scales, base, out, rng.random(updates).tolist(), threads)


RAW = "c, one thread, bare"
"""The C function itself on one thread, its arguments prepared: what a call of a small sum adds to."""
NEEDS_STACK = ("BLAS gemv", "torch addmv")
"""Ways that need all updates in one matrix, which no server has without a copy."""
SPIN = ("BLAS gemv", "torch addmv", "torch _foreach")
"""Their threads wait for more work without sleeping."""
ONE_THREAD = ("edgefl c", "edgefl numba", RAW, "read loop")
"""Those that are measured on one thread, too."""


def contenders(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    """Names and calls; every sum is checked against numpy's before it is measured."""
    yield from _ours(arrays)
    if arrays.stacked.dtype == np.float32:
        expected = arrays.base + np.asarray(arrays.weights, np.float32) @ arrays.stacked
        for name, call in _usual(arrays):
            arrays.out.fill(np.nan)
            call()
            np.testing.assert_allclose(arrays.out, expected, rtol=1e-4, atol=1e-4, err_msg=name)
            yield name, call
        yield from frameworks(arrays)
    yield from _limits(arrays)


def _ours(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    stacked, scales, base, out, weights, _ = arrays
    rows, expected = list(stacked), np.empty_like(out)
    usable = [name for name, status in kernels.backends().items() if status == "ok" and name != "reference"]
    kernels.weighted_sum(expected, base, rows, weights, usable[-1], scales=scales)

    def sum_with(name: str) -> Call:
        return lambda: kernels.weighted_sum(out, base, rows, weights, name, scales=scales)

    for name in usable:
        sum_with(name)()
        np.testing.assert_array_equal(out, expected)
        yield f"edgefl {name}", sum_with(name)
    if "c" in usable:
        from edgefl.kernels import _c

        norms = np.empty(len(rows))
        yield RAW, lambda: _c.weighted_sum(out, base, rows, weights, scales, norms, None, 1)


def _usual(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    stacked, _, base, out, _, _ = arrays
    weights, layers = np.asarray(arrays.weights, np.float32), arrays.layers

    def gemv() -> None:
        np.matmul(weights, stacked, out=out)
        np.add(out, base, out=out)

    def by_layer() -> None:
        for layer in layers:
            total = base[layer].copy()
            for weight, update in zip(weights, stacked, strict=True):
                total += weight * update[layer]
            out[layer] = total

    yield "BLAS gemv", gemv
    with contextlib.suppress(ImportError):
        import torch

        rows, vector = torch.from_numpy(stacked), torch.from_numpy(weights)
        start, end = torch.from_numpy(base), torch.from_numpy(out)
        parts, targets = [[row[layer] for layer in layers] for row in rows], [end[layer] for layer in layers]

        def foreach() -> None:
            end.copy_(start)
            for weight, layer_updates in zip(arrays.weights, parts, strict=True):
                torch._foreach_add_(targets, layer_updates, alpha=weight)

        yield "torch addmv", lambda: torch.addmv(start, rows.T, vector, out=end)
        yield "torch _foreach", foreach
    yield "numpy by layer", by_layer


def _limits(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    """As many bytes: only read; two read for one written; one read for one written."""
    third, half = arrays.moved_bytes // 12, arrays.moved_bytes // 8
    try:
        from edgefl.lab import _probe
    except ImportError:  # no C compiler when edgefl was installed
        source, target = np.ones(half, np.float32), np.ones(half, np.float32)
        yield "copy (one thread)", lambda: np.copyto(target, source)
        return
    updates, vectors, threads = list(arrays.stacked), [arrays.base, arrays.out], arrays.threads
    groups = [updates[i : i + 60] for i in range(0, len(updates), 60)]
    is_float = arrays.stacked.dtype == np.float32
    groups = [[*updates, *vectors]] if is_float and len(updates) < 60 else [*groups, vectors]

    def read() -> None:
        for group in groups:
            _probe.read(group, threads)

    yield "read loop", read
    if not is_float:
        return
    space = arrays.stacked.reshape(-1)  # no more memory than the sum itself has, where it is large enough
    if space.size < (room := max(3 * third, 2 * half)):
        space = np.ones(room, np.float32)
    a, b, c = (space[i * third : (i + 1) * third] for i in range(3))
    yield "STREAM triad", lambda: _probe.triad(a, b, c, 0.0, threads)
    yield "copy", lambda: _probe.copy(space[half : 2 * half], space[:half], threads)


def frameworks(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    """Other frameworks' own functions on the same arrays, where they are installed.

    They average, so no base is added; their figures count the same bytes as everybody's.
    """
    parts = [[row[layer] for layer in arrays.layers] for row in arrays.stacked]
    examples = list(range(1, len(parts) + 1))
    expected = np.asarray(examples, np.float32) @ arrays.stacked / sum(examples)
    for name, make in (("Flower", _flower), ("NVFlare", _nvflare), ("pfl-research", _pfl)):
        try:
            call, exact = make(parts, examples)
        except ImportError:
            continue
        if exact:
            np.testing.assert_allclose(np.concatenate(call()), expected, rtol=1e-3, atol=1e-3, err_msg=name)
        yield name, call


def _flower(parts: Any, examples: list[int]) -> tuple[Callable[[], Any], bool]:
    module = importlib.import_module("flwr.server.strategy.aggregate")
    results = list(zip(parts, examples, strict=True))
    return lambda: module.aggregate(results), True


def _nvflare(parts: Any, examples: list[int]) -> tuple[Callable[[], Any], bool]:
    module = importlib.import_module("nvflare.app_common.aggregators.weighted_aggregation_helper")
    named = [{str(i): layer for i, layer in enumerate(layers)} for layers in parts]

    def call() -> list[Floats]:
        helper = module.WeightedAggregationHelper()
        with contextlib.redirect_stdout(io.StringIO()):  # some releases print each array's range
            for i, (data, weight) in enumerate(zip(named, examples, strict=True)):
                helper.add(data, weight, f"site-{i}", 0)
        return list(helper.get_result().values())

    return call, True


def _pfl(parts: Any, examples: list[int]) -> tuple[Callable[[], Any], bool]:
    """Its clients weigh their own statistics, so that this is the plain sum and one division."""
    statistics = importlib.import_module("pfl.stats").MappedVectorStatistics
    each = [
        statistics({str(i): layer for i, layer in enumerate(layers)}, weight=float(weight))
        for layers, weight in zip(parts, examples, strict=True)
    ]

    def call() -> Any:
        total = each[0]
        for other in each[1:]:
            total = total + other
        total.average()
        return total

    return call, False
