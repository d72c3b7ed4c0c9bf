"""Compare the speed of the numba back end's sums with that of the C back end, which calculates the same bits.

    python benchmarks/numba_ratio.py [--turns 41]

Prints the time of `c` divided by that of numba (below 1: `c` is faster), the median over turns. In each turn
both sum the same updates for about 20 ms, and the one that starts alternates.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np

from edgefl import kernels
from edgefl.kernels.arguments import SCALE_BLOCK
from edgefl.results.tables import short_time, show, table

BACKENDS = ("c", "numba")
TYPES: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8,
}  # fmt: skip
SIZES = ((62_006, 5), (62_006, 10), (468_458, 10), (1_663_370, 10), (11_173_962, 10), (25_000_000, 10))
TURN_S = 0.02
MIB_PER_S = 10_000
"""Roughly a host's rate; it only decides the number of calls in a turn."""


def updates(size: int, count: int, dtype: Any) -> tuple[list[Any], list[Any]]:
    """Return so many random updates of a type and their scales, which only int8 has."""
    found, scales = [], []
    rng = np.random.default_rng(0)
    for _ in range(count):
        update = rng.standard_normal(size, dtype=np.float32)
        out = np.empty(size, dtype)
        scale = np.empty(-(-size // SCALE_BLOCK), np.float32) if dtype is np.int8 else None
        kernels.quantize(out, update, scales=scale)
        found.append(out)
        scales.append(scale)
    return found, scales


def seconds(size: int, count: int, dtype: Any, turns: int) -> dict[str, list[float]]:
    """Return the seconds of a sum in each turn, by back end."""
    given, scales = updates(size, count, dtype)
    base, weights = np.zeros(size, np.float32), [1 / count] * count
    out = {name: np.empty(size, np.float32) for name in BACKENDS}
    calls = max(1, int(TURN_S * MIB_PER_S * 2**20 / (size * count * given[0].itemsize)))
    taken: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for turn in range(-1, turns):  # the first only warms up
        for name in BACKENDS if turn % 2 else reversed(BACKENDS):
            start = time.perf_counter()
            for _ in range(calls):
                kernels.weighted_sum(out[name], base, given, weights, name, scales=scales)
            if turn >= 0:
                taken[name].append((time.perf_counter() - start) / calls)
    if out["c"].tobytes() != out["numba"].tobytes():
        raise SystemExit(f"{size} x {count}: the two back ends differ")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=41)
    turns = parser.parse_args().turns
    rows = []
    for kind, dtype in TYPES.items():
        for size, count in SIZES:
            taken = seconds(size, count, dtype, turns)
            ratio = median(c / numba for c, numba in zip(taken["c"], taken["numba"], strict=True))
            rows.append(
                (kind, f"{size} x {count}", *(short_time(median(taken[n])) for n in BACKENDS), f"{ratio:.2f}")
            )
    heads = ("type", ">parameters x updates", ">c", ">numba", ">c / numba")
    show(table(heads, rows, f"Time of a weighted sum, {kernels.threads()} threads"))


if __name__ == "__main__":
    main()
