"""Compare the speed of weighted sums in the numba and C back ends, whose results are bit-identical.

    python benchmarks/numba_ratio.py [--turns 41]

The benchmark prints the ratio of the time in C to the time in numba (below 1: C is faster) as the median over
turns. In each turn, both back ends sum the same updates for about 20 ms, and they take turns in going first.
`edgefl bench aggregate` also measures both, but together with other libraries, whose threads disturb them.
"""

from __future__ import annotations

import argparse
import timeit
from statistics import median

from edgefl import kernels
from edgefl.lab.aggregate import DTYPES, PARAMETERS, arrays_of, contenders
from edgefl.results.tables import short_time, show, table

BACKENDS = ("edgefl c", "edgefl numba")
SIZES = [(PARAMETERS[0], 5), *((parameters, 10) for parameters in PARAMETERS[:5])]
TURN_S = 0.02


def seconds(parameters: int, updates: int, dtype: str, turns: int) -> list[tuple[float, ...]]:
    """Return, for each turn, the time of a sum in seconds in the C back end and in the numba back end."""
    arrays = arrays_of(parameters, updates, dtype, kernels.threads())
    calls = {name: call for name, call in contenders(arrays) if name in BACKENDS}
    count = max(1, round(TURN_S / min(timeit.repeat(calls[BACKENDS[0]], number=1, repeat=3))))
    found = []
    for turn in range(turns):
        order = BACKENDS[:: 1 if turn % 2 else -1]
        taken = {name: timeit.timeit(calls[name], number=count) / count for name in order}
        found.append(tuple(taken[name] for name in BACKENDS))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=41)
    turns = parser.parse_args().turns
    rows = []
    for dtype in DTYPES:
        for size in SIZES:
            taken = seconds(*size, dtype, turns)
            times = [short_time(median(one)) for one in zip(*taken, strict=True)]
            rows.append((dtype, "{} x {}".format(*size), *times, f"{median(c / n for c, n in taken):.2f}"))
    heads = ("type", ">parameters x updates", ">c", ">numba", ">c / numba")
    show(table(heads, rows, f"Time of a weighted sum, {kernels.threads()} threads"))


if __name__ == "__main__":
    main()
