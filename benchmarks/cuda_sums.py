"""Compare the speed of sums and masks on the GPU with the C back end and with the copies to the GPU.

    python benchmarks/cuda_sums.py [--json FILE]

Updates are in host memory, so a call takes at least the time to copy its inputs to the GPU. The column `of
copy` is this copy time (at the rate measured in the same run for page-locked memory) divided by the time of
the call. The column `c ms` is the time of the C back end on the same arrays, with its default number of
threads. In the rows `masked`, a call is the sum modulo 2^32 - 5 that secure aggregation uses; `encode` masks
an update, and `decode` unmasks a sum. Every result is compared bit for bit with that of the C back end. Times
are medians of nine or more calls. The benchmark needs a build of torch with CUDA support.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgefl import kernels
from edgefl.kernels.field import PRIME

SIZES = ((62_006, 5), (468_458, 10), (1_663_370, 10), (11_173_962, 10), (11_173_962, 32), (25_000_000, 10))
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "int8": np.int8}
PAGE = 4096
LARGE = 1 << 30
CODED = (468_458, 25_000_000)
"""Numbers of parameters for which `encode` (masking) and `decode` (unmasking) are measured."""


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
    """Return the rates in GB/s of copies to the GPU, from it, and within its memory.

    Copies to the GPU are measured from page-locked and from pageable memory. For copies within the GPU's
    memory, the rate counts both the bytes read and the bytes written.
    """
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
    # Allocate all updates together, as in the parameter buffer, so that one call page-locks them.
    stride = -(-parameters // PAGE) * PAGE
    space = paged(updates * stride, DTYPES[dtype])
    stacked = space.reshape(updates, stride)[:, :parameters]
    scales = [paged(-(-parameters // kernels.SCALE_BLOCK)) if dtype == "int8" else None] * updates
    for row, scale in zip(stacked, scales, strict=True):
        kernels.quantize(row, base, scales=scale)
    weights = rng.random(updates).tolist()

    row = timed(
        lambda name: kernels.weighted_sum(outs[name], base, list(stacked), weights, name, scales=scales),
        (space, base, outs["cuda"]),
        (stacked.itemsize * parameters * updates + base.nbytes) / (to_gpu * 1e9),
    )
    equal = outs["c"].tobytes() == outs["cuda"].tobytes()
    return {"parameters": parameters, "updates": updates, "kind": dtype, **row, "equal": equal}


def measured_masks(parameters: int, updates: int, kind: str, to_gpu: float) -> dict[str, Any]:
    rng = np.random.default_rng([parameters, updates])
    outs, floats = (
        {name: paged(parameters, dtype) for name in ("c", "cuda")} for dtype in (np.uint32, np.float32)
    )
    stride = -(-parameters // PAGE) * PAGE
    space, update = paged(updates * stride, np.uint32), paged(parameters)
    words = space.reshape(updates, stride)[:, :parameters]
    words[:] = rng.integers(0, PRIME, words.shape, dtype=np.uint32)
    update[:] = rng.standard_normal(parameters, dtype=np.float32)
    weights = rng.integers(1, 256, updates).tolist()
    calls: dict[str, Callable[[str], object]] = {
        "masked": lambda name: kernels.field_sum(outs[name], list(words), weights, name),
        "encode": lambda name: kernels.field_encode(outs[name], update, words[0], 4.0, 2.0**20, name),
        "decode": lambda name: kernels.field_decode(floats[name], words[0], words[-1], 2.0**-20, name),
    }
    copies = updates if kind == "masked" else 2
    least_s = copies * 4 * parameters / (to_gpu * 1e9)
    row = timed(calls[kind], (space, update, outs["cuda"], floats["cuda"]), least_s)
    equal = all(made["c"].tobytes() == made["cuda"].tobytes() for made in (outs, floats))
    return {"parameters": parameters, "updates": updates, "kind": kind, **row, "equal": equal}


def timed(call: Callable[[str], object], arrays: Sequence[Any], least_s: float) -> dict[str, float]:
    """Return the median time of ``call`` in seconds in C, in CUDA, and in CUDA with page-locked ``arrays``.

    ``of_copy`` is the copy time ``least_s`` divided by the last of these times.
    """
    row = {"c_s": median_s(lambda: call("c")), "cuda_pageable_s": median_s(lambda: call("cuda"))}
    with ExitStack() as locked:
        for array in arrays:
            locked.enter_context(kernels.page_locked(array.view(np.uint8), "cuda"))
        row["cuda_s"] = median_s(lambda: call("cuda"))
    return row | {"of_copy": least_s / row["cuda_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates = copy_rates()
    print(f"{torch.cuda.get_device_name()}, c with {kernels.threads()} threads; copies in GB/s:")
    print("  " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
    print(f"{'D':>12} {'K':>3} {'kind':>8} {'c ms':>9} {'cuda ms':>9} {'pageable':>9} {'of copy':>8}  bits")
    rows = []
    cases = [(measured, *size, dtype) for dtype in DTYPES for size in SIZES]
    cases += [(measured_masks, *size, "masked") for size in SIZES]
    cases += [(measured_masks, parameters, 2, kind) for kind in ("encode", "decode") for parameters in CODED]
    for measure, parameters, updates, kind in cases:
        row = measure(parameters, updates, kind, rates["to_gpu"])
        rows.append(row)
        times = " ".join(f"{row[name] * 1e3:9.3f}" for name in ("c_s", "cuda_s", "cuda_pageable_s"))
        print(f"{parameters:12} {updates:3} {row['kind']:>8} {times} {row['of_copy']:8.2f}  "
              f"{'equal' if row['equal'] else 'DIFFERENT'}")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"gb_per_s": rates, "rows": rows}, indent=1) + "\n")
    if not all(row["equal"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
