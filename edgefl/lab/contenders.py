"""What takes part in ``bench aggregate``: edgefl's back ends, the usual ways, other frameworks, the limits.

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


class Work(NamedTuple):
    """One row's arrays, all aligned to 64 bytes as slots of the parameter buffer are."""

    stacked: npt.NDArray[Any]
    scales: list[Floats | None]
    base: Floats
    out: Floats
    weights: list[float]
    threads: int

    @property
    def layers(self) -> list[slice]:
        """Where each of ten layers is, for those that sum layer by layer."""
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


def work_of(parameters: int, updates: int, dtype: str, threads: int) -> Work:
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
    return Work(stacked, scales, base, out, rng.random(updates).tolist(), threads)


RAW = "c, one thread, bare"
"""The C function itself on one thread, its arguments prepared: what a call of a small sum adds to."""
NEEDS_STACK = ("BLAS gemv", "torch addmv")
"""Ways that need all updates in one matrix, which no server has without a copy."""
SPIN = ("BLAS gemv", "torch addmv", "torch _foreach")
"""Their threads wait for more work without sleeping."""
ONE_THREAD = ("edgefl c", "edgefl numba", RAW, "read loop")
"""Who is measured on one thread, too."""


def contenders(work: Work) -> Iterator[tuple[str, Call]]:
    """Names and calls; every sum is checked against numpy's before it is measured."""
    yield from _ours(work)
    if work.stacked.dtype == np.float32:
        expected = work.base + np.asarray(work.weights, np.float32) @ work.stacked
        for name, call in _usual(work):
            work.out.fill(np.nan)
            call()
            np.testing.assert_allclose(work.out, expected, rtol=1e-4, atol=1e-4, err_msg=name)
            yield name, call
        yield from frameworks(work)
    yield from _limits(work)


def _ours(work: Work) -> Iterator[tuple[str, Call]]:
    rows, expected = list(work.stacked), np.empty_like(work.out)
    usable = [name for name, status in kernels.backends().items() if status == "ok" and name != "reference"]
    kernels.weighted_sum(expected, work.base, rows, work.weights, usable[-1], scales=work.scales)

    def sum_with(name: str) -> Call:
        return lambda: kernels.weighted_sum(work.out, work.base, rows, work.weights, name, scales=work.scales)

    for name in usable:
        sum_with(name)()
        np.testing.assert_array_equal(work.out, expected)
        yield f"edgefl {name}", sum_with(name)
    if "c" in usable:
        from edgefl.kernels import _c

        norms, scales = np.empty(len(rows)), work.scales
        yield RAW, lambda: _c.weighted_sum(work.out, work.base, rows, work.weights, scales, norms, None, 1)


def _usual(work: Work) -> Iterator[tuple[str, Call]]:
    weights, layers = np.asarray(work.weights, np.float32), work.layers

    def gemv() -> None:
        np.matmul(weights, work.stacked, out=work.out)
        np.add(work.out, work.base, out=work.out)

    def by_layer() -> None:
        for layer in layers:
            total = work.base[layer].copy()
            for weight, update in zip(weights, work.stacked, strict=True):
                total += weight * update[layer]
            work.out[layer] = total

    yield "BLAS gemv", gemv
    with contextlib.suppress(ImportError):
        import torch

        matrix, vector = torch.from_numpy(work.stacked).T, torch.from_numpy(weights)
        base, out = torch.from_numpy(work.base), torch.from_numpy(work.out)
        parts = [[row[layer] for layer in layers] for row in torch.from_numpy(work.stacked)]
        targets = [out[layer] for layer in layers]

        def foreach() -> None:
            out.copy_(base)
            for weight, layer_updates in zip(work.weights, parts, strict=True):
                torch._foreach_add_(targets, layer_updates, alpha=weight)

        yield "torch addmv", lambda: torch.addmv(base, matrix, vector, out=out)
        yield "torch _foreach", foreach
    yield "numpy by layer", by_layer


def _limits(work: Work) -> Iterator[tuple[str, Call]]:
    """As many bytes: only read; two read for one written; one read for one written."""
    if kernels.backends()["c"] != "ok":
        source, target = (np.ones(work.moved_bytes // 8, np.float32) for _ in range(2))
        yield "copy (one thread)", lambda: np.copyto(target, source)
        return
    from edgefl.kernels import _c

    updates, vectors, threads = list(work.stacked), [work.base, work.out], work.threads
    groups = [updates[i : i + 60] for i in range(0, len(updates), 60)]
    if work.stacked.dtype == np.float32 and len(updates) < 60:
        groups, vectors = [[*updates, *vectors]], []

    def read() -> None:
        for group in [*groups, vectors] if vectors else groups:
            _c.read(group, threads)

    yield "read loop", read
    if work.stacked.dtype != np.float32:
        return
    third, half = work.moved_bytes // 12, work.moved_bytes // 8
    space = work.stacked.reshape(-1)  # no more memory than the sum itself has, where it is large enough
    room = max(3 * third, 2 * half)
    if space.size < room:
        space = np.ones(room, np.float32)
    a, b, c = (space[i * third : (i + 1) * third] for i in range(3))
    source, target = space[:half], space[half : 2 * half]
    yield "STREAM triad", lambda: _c.triad(a, b, c, 0.0, threads)
    yield "copy", lambda: _c.copy(target, source, threads)


def frameworks(work: Work) -> Iterator[tuple[str, Call]]:
    """Other frameworks' own functions on the same arrays, where they are installed.

    They average, so no base is added; their figures count the same bytes as everybody's.
    """
    parts = [[row[layer] for layer in work.layers] for row in work.stacked]
    examples = list(range(1, len(parts) + 1))
    expected = np.asarray(examples, np.float32) @ work.stacked / sum(examples)
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
