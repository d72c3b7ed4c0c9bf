"""The server's hot path on flat arrays: weighted sums and steps, norms, checksums and moving averages.

    arguments.py           validation of arguments, with their error messages
    steps.py               the server optimiser's step, alone or fused with the weighted sum
    quantization.py        quantisation with error feedback, clipping
    layers.py              weighted averages of whole models, layer by layer
    ranks.py               trimmed means and inner products of updates, for robust aggregation
    field.py               arithmetic modulo a prime, for secure aggregation
    staleness.py           moving averages indexed by client
    selection.py           selection of the back end and the number of threads
    backend_reference.py   the reference, in plain numpy
    backend_numba.py       the fallback without a C compiler, compiled at run time
    numba_sums.py          the numba back end's sums, and the compiled code of its threads
    numba_vectors.py       the numba back end's vector loops, as LLVM code
    numba_threads.py       the numba back end's pool of threads
    backend_c.py, _c       the native extension, built from the repository's kernels/
    backend_cuda.py        NVIDIA GPUs; cuda_library loads or builds kernels/cuda.cu

All CPU back ends give the same bits, for any instruction set and any number of threads: updates are added in
order, every product and every sum is rounded to float32, and norms are summed in float64 over fixed blocks of
`TILE` elements. (The sign and payload of NaNs are unspecified.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.kernels.arguments import SCALE_BLOCK, TILE, Checksums, Doubles, Floats, SumArguments, Update
from edgefl.kernels.field import field_decode, field_encode, field_sum
from edgefl.kernels.layers import average
from edgefl.kernels.quantization import clip_factors, quantize
from edgefl.kernels.ranks import products, trimmed_mean
from edgefl.kernels.selection import backend, backends, select, set_threads, threads
from edgefl.kernels.staleness import MovingAverage
from edgefl.kernels.steps import weighted_step

__all__ = [
    "SCALE_BLOCK",
    "TILE",
    "MovingAverage",
    "average",
    "backend",
    "backends",
    "checksum",
    "clip_factors",
    "delta",
    "field_decode",
    "field_encode",
    "field_sum",
    "page_locked",
    "products",
    "quantize",
    "set_threads",
    "sq_norm",
    "threads",
    "trimmed_mean",
    "weighted_step",
    "weighted_sum",
]


def weighted_sum(
    out: Floats,
    base: Floats | None,
    updates: Sequence[Update],
    weights: Sequence[float] | Floats | Doubles,
    backend: str | None = None,
    *,
    scales: Sequence[Floats | None] | None = None,
    checksums: Checksums | None = None,
) -> Doubles:
    """Write base + Σ_k weights[k] · updates[k] to ``out`` and return the updates' squared L2 norms.

    out[i] = base[i] + Σ_k weights[k] · updates[k][i] with k ascending; every product and every sum is
    rounded to float32, without fused multiply-add. A missing base counts as +0.0, so that a sum of -0.0
    becomes +0.0.

    ``out`` and ``base`` are flat float32 arrays of D elements. ``base`` may be ``out`` itself; otherwise the
    two must not overlap. No update may overlap ``out``. Each of the K ``updates`` has D elements of float32,
    float16, bfloat16 (as uint16) or int8. An int8 element has the value scales[k][i // 256] · q[i], rounded
    to float32, with float32 scales. Types may differ between updates. Weights are rounded to float32.

    ``checksums`` (uint64[K]) receives each update's `checksum`, computed in the same pass over memory.

    Returns float64[K], with the same bits for any number of threads: Σ_i u[i]², computed in float64, or for
    int8 Σ_b scales[b]² · Σ q², where the inner sum is computed in integers. A non-finite norm marks a bad
    update, which contains an inf or NaN (for int8, in its scales).

    Raises ValueError or TypeError with the name of the wrong argument, and ConfigError if ``backend`` is not
    available.

    >>> import numpy as np
    >>> out = np.empty(2, np.float32)
    >>> updates = [np.array([3, 4], np.float32), np.array([1, 0], np.float32)]
    >>> weighted_sum(out, np.ones(2, np.float32), updates, [0.5, 2.0]).tolist()
    [25.0, 1.0]
    >>> out.tolist()
    [4.5, 3.0]
    """
    given: Any = (out, base, updates, weights, scales, checksums)  # unchecked
    return select(backend).weighted_sum(SumArguments(*given), threads())


@contextmanager
def page_locked(memory: NDArray[np.uint8], backend: str | None = None) -> Iterator[None]:
    """Page-lock host memory for a GPU, so that copies overlap the sum. With CPU back ends this does nothing.

    Raises ConfigError if ``backend`` is not available, and `GpuError` if CUDA cannot lock the memory.
    """
    chosen: Any = select(backend)
    if not hasattr(chosen, "register"):
        yield
        return
    chosen.register(memory)
    try:
        yield
    finally:
        chosen.unregister(memory)


def sq_norm(update: Update, backend: str | None = None, *, scale: Floats | None = None) -> float:
    """Return the squared L2 norm of a flat update in float64, bit for bit as `weighted_sum` computes it.

    >>> import numpy as np
    >>> sq_norm(np.array([3, 4], np.float32))
    25.0
    """
    return select(backend).sq_norm(update, scale, threads())


def checksum(update: Any, backend: str | None = None) -> int:
    """Return a 64-bit checksum of a flat array's bytes, against accidental changes (not cryptographic).

    The bytes are read as little-endian uint32 words w_i, the last one padded with zeros. The sums s1 = Σ w_i
    and s2 = Σ (i+1)·w_i modulo 2^64 are combined with the size into one value. The checksum detects any
    change within one word and any swap of two words less than 2^31 apart, and other changes with a
    probability of 1 − 2^−64.

    >>> import numpy as np
    >>> hex(checksum(np.arange(5, dtype=np.float32)))
    '0xda5046a4ae2f6115'
    """
    return select(backend).checksum(update, threads())


def delta(out: Floats, trained: Floats, base: Floats, backend: str | None = None) -> int:
    """Write trained − base to ``out`` and return its `checksum`, in one pass over memory.

    All three are flat float32 arrays of the same size; ``out`` must not overlap the others. The function runs
    in the calling thread only, because a client has one core. Raises ValueError or TypeError with the name of
    the wrong argument.

    >>> import numpy as np
    >>> out = np.empty(2, np.float32)
    >>> sum_of_it = delta(out, np.array([3, 5], np.float32), np.ones(2, np.float32))
    >>> out.tolist(), sum_of_it == checksum(out)
    ([2.0, 4.0], True)
    """
    return select(backend).delta(out, trained, base)
