"""The server's hot path over flat buffers: weighted sums and steps, norms, checksums, moving averages.

    arguments.py           what is accepted, and the words of the errors
    steps.py               the server optimiser's step, and the sum and the step in one pass
    quantization.py        updates in fewer bits, clipping
    layers.py              weighted averages of whole models, layer by layer
    staleness.py           moving averages indexed by client
    selection.py           which back end runs, on how many threads
    backend_reference.py   numpy, the oracle
    backend_numba.py       compiled at run time, where there was no C compiler
    backend_c.py, _c       the native extension, built from the repository's kernels/
    backend_cuda.py        a GPU, where there is one; cuda_library finds or builds kernels/cuda.cu

All CPU back ends give the same bits, for any instruction set and any number of threads: updates are
added in ascending order, every product and every sum is rounded to float32, and norms are summed in
float64 over fixed blocks of `TILE` elements. (Which NaN a NaN is, its sign and payload, is left open.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.kernels.arguments import SCALE_BLOCK, TILE, Checksums, Doubles, Floats, SumArguments, Update
from edgefl.kernels.layers import average
from edgefl.kernels.quantization import clip_factors, quantize
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
    "page_locked",
    "quantize",
    "set_threads",
    "sq_norm",
    "threads",
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
    rounded to float32 and none is fused. No base is a base of +0.0, so a sum of -0.0 alone gives +0.0.

    ``out`` and ``base`` are flat float32 arrays of D elements; ``base`` may be ``out``, else the two must
    not overlap, and no update may overlap ``out``. Each of the K ``updates`` has D elements of float32,
    float16, bfloat16 (as uint16) or int8; an int8 update counts scales[k][i // 256] · q[i], rounded to
    float32, with float32 scales. Types may differ from update to update. Weights are rounded to float32.

    ``checksums`` (uint64[K]) is filled with each update's `checksum`, in the same pass over memory.

    Returns float64[K], the same bits for any number of threads: Σ_i u[i]² in float64, and for int8
    Σ_b scales[b]² · Σ q², where the inner sum is of integers. A norm that is not finite marks a bad update
    (an inf or NaN, or one in its scales).

    Raises ValueError or TypeError naming the argument, ConfigError if ``backend`` is not there.

    >>> import numpy as np
    >>> out = np.empty(2, np.float32)
    >>> updates = [np.array([3, 4], np.float32), np.array([1, 0], np.float32)]
    >>> weighted_sum(out, np.ones(2, np.float32), updates, [0.5, 2.0]).tolist()
    [25.0, 1.0]
    >>> out.tolist()
    [4.5, 3.0]
    """
    given: Any = (out, base, updates, weights, scales, checksums)  # not checked yet
    return select(backend).weighted_sum(SumArguments(*given), threads())


@contextmanager
def page_locked(memory: NDArray[np.uint8], backend: str | None = None) -> Iterator[None]:
    """Hold host memory in place for a GPU, so that copies of it overlap the sum; nothing on other back ends.

    Raises ConfigError if ``backend`` is not there, RuntimeError if the device refuses.
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
    """The squared L2 norm of a flat update, in float64: the bits that `weighted_sum` returns for it.

    >>> import numpy as np
    >>> sq_norm(np.array([3, 4], np.float32))
    25.0
    """
    return select(backend).sq_norm(update, scale, threads())


def checksum(update: Any, backend: str | None = None) -> int:
    """A 64-bit checksum of a flat array's bytes (not a secure one: it finds accidents).

    Over the bytes as n little-endian uint32 words w_i, the last one padded with zeros: s1 = Σ w_i and
    s2 = Σ (i+1)·w_i modulo 2^64, folded with the size into one value. Any change within one word and any
    swap of two words less than 2^31 apart changes it, other changes with probability 1 − 2^−64.

    >>> import numpy as np
    >>> hex(checksum(np.arange(5, dtype=np.float32)))
    '0xda5046a4ae2f6115'
    """
    return select(backend).checksum(update, threads())


def delta(out: Floats, trained: Floats, base: Floats, backend: str | None = None) -> int:
    """Write trained − base to ``out`` and return its `checksum`, in one pass over memory.

    All three are flat float32 arrays of one size; ``out`` must not overlap the others. It runs in the calling
    thread alone: a client has one core. Raises ValueError or TypeError naming the argument.

    >>> import numpy as np
    >>> out = np.empty(2, np.float32)
    >>> sum_of_it = delta(out, np.array([3, 5], np.float32), np.ones(2, np.float32))
    >>> out.tolist(), sum_of_it == checksum(out)
    ([2.0, 4.0], True)
    """
    return select(backend).delta(out, trained, base)
