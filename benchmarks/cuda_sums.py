"""Measure the CUDA back end's weighted sum beside the rates at which this machine copies to and from its GPU.

    python benchmarks/cuda_sums.py [--json FILE]

Updates lie in host memory, so a sum takes at least the time to copy its updates and base to the GPU.
`of copy` is that time, at the rate measured for page-locked memory in the same run, divided by the time of
the sum. `c` is the C back end on the same arrays with as many threads as it uses by default. Every result
is compared with C's bits. Needs a torch that is built for CUDA. Times are medians of at least nine calls.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgefl import kernels

SIZES = ((62_006, 5), (468_458, 10), (1_663_370, 10), (11_173_962, 10), (11_173_962, 32), (25_000_000, 10))
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "int8": np.int8}
PAGE = 4096
LARGE = 1 << 30


def paged(size: int, dtype: Any = np.float32) -> Any:
    """Return zeros that share no memory page with anything else, as page-locking requires."""
    size_bytes = -(-size * np.dtype(dtype).itemsize // PAGE) * PAGE
    raw = np.zeros(size_bytes + PAGE, dtype=np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + size * np.dtype(dtype).itemsize].view(dtype)


def median_s(call: Callable[[], object], least: int = 9) -> float:
    call()
    taken = []
    until = time.perf_counter() + 0.3
    while len(taken) < least or (time.perf_counter() < until and len(taken) < 1000):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


def copy_rates() -> dict[str, float]:
    """Rates in GB/s of copies to the GPU, from it, and within its memory (bytes read plus bytes written)."""
    there = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(there)
    pinned, pageable = torch.ones(LARGE, dtype=torch.uint8).pin_memory(), torch.ones(LARGE, dtype=torch.uint8)

    def rate(to: torch.Tensor, source: torch.Tensor, passes: int = 1) -> float:
        def call() -> None:
            to.copy_(source)
            torch.cuda.synchronize()

        return passes * LARGE / median_s(call) / 1e9

    return {
        "to_gpu": rate(there, pinned),
        "from_gpu": rate(pinned, there),
        "to_gpu_pageable": rate(there, pageable),
        "within_gpu": rate(other, there, 2),
    }


def measured(parameters: int, updates: int, dtype: str, to_gpu: float) -> dict[str, Any]:
    rng = np.random.default_rng([parameters, updates])
    base, outs = paged(parameters), {name: paged(parameters) for name in ("c", "cuda")}
    base[:] = rng.standard_normal(parameters, dtype=np.float32)
    # One allocation for all updates, like the parameter buffer, so that one call page-locks it.
    stride = -(-parameters // PAGE) * PAGE
    space = paged(updates * stride, DTYPES[dtype])
    stacked = space.reshape(updates, stride)[:, :parameters]
    scales = [paged(-(-parameters // kernels.SCALE_BLOCK)) if dtype == "int8" else None] * updates
    for row, scale in zip(stacked, scales, strict=True):
        kernels.quantize(row, base, scales=scale)
    weights = rng.random(updates).tolist()

    def call(name: str) -> Callable[[], object]:
        return lambda: kernels.weighted_sum(outs[name], base, list(stacked), weights, name, scales=scales)

    moved = stacked.itemsize * parameters * updates + base.nbytes
    row: dict[str, Any] = {"parameters": parameters, "updates": updates, "dtype": dtype}
    row["c_s"], row["cuda_pageable_s"] = median_s(call("c")), median_s(call("cuda"))
    with ExitStack() as locked:
        for array in (space, base, outs["cuda"]):
            locked.enter_context(kernels.page_locked(array.view(np.uint8), "cuda"))
        row["cuda_s"] = median_s(call("cuda"))
    row["of_copy"] = moved / (to_gpu * 1e9) / row["cuda_s"]
    row["equal"] = outs["c"].tobytes() == outs["cuda"].tobytes()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates = copy_rates()
    print(f"{torch.cuda.get_device_name()}, c with {kernels.threads()} threads; copies in GB/s:")
    print("  " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
    print(f"{'D':>12} {'K':>3} {'type':>8} {'c ms':>9} {'cuda ms':>9} {'pageable':>9} {'of copy':>8}  bits")
    rows = []
    for dtype in DTYPES:
        for parameters, updates in SIZES:
            row = measured(parameters, updates, dtype, rates["to_gpu"])
            rows.append(row)
            times = " ".join(f"{row[name] * 1e3:9.3f}" for name in ("c_s", "cuda_s", "cuda_pageable_s"))
            print(f"{parameters:12} {updates:3} {dtype:>8} {times} {row['of_copy']:8.2f}  "
                  f"{'equal' if row['equal'] else 'DIFFERENT'}")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"gb_per_s": rates, "rows": rows}, indent=1) + "\n")
    if not all(row["equal"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
