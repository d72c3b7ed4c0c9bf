"""The C back end: the extension checks its arguments itself and only a wrong one comes back to Python."""

from __future__ import annotations

import atexit

import numpy as np

from edgefl.kernels import _c, arguments
from edgefl.kernels.arguments import Doubles, Ids

close_pool = _c.close_pool
atexit.register(close_pool)


def weighted_sum(
    out: object,
    base: object | None,
    updates: object,
    weights: object,
    scales: object | None,
    checksums: object | None,
    threads: int,
) -> Doubles:
    if isinstance(updates, list | tuple | np.ndarray):
        norms = np.empty(len(updates))
        if _c.weighted_sum(out, base, updates, weights, scales, norms, checksums, threads):
            return norms
    # A wrong argument, or one that is right in another form, such as a memoryview of format "<f".
    given = arguments.weighted_sum(out, base, updates, weights, scales, checksums)
    norms = np.empty(len(given.updates))
    done = _c.weighted_sum(*given[:5], norms, given.checksums, threads)
    assert done, "the C back end refused arguments that the checks accept"
    return norms


def sq_norm(update: object, scale: object | None, threads: int) -> float:
    norm = _c.sq_norm(update, scale, threads)
    if norm is None:
        norm = _c.sq_norm(*arguments.update("update", update, None, scale), threads)
    assert norm is not None, "the C back end refused arguments that the checks accept"
    return norm


def checksum(update: object, threads: int) -> int:
    value = _c.checksum(update, threads)
    if value is None:
        value = _c.checksum(arguments.flat("update", update).view(np.uint8), threads)
    assert value is not None, "the C back end refused arguments that the checks accept"
    return value


def observe(
    mode: int, width: int, decay: float, count: Ids, state: Doubles, ids: Ids, values: Doubles, means: Doubles
) -> None:
    done = _c.observe(mode, width, decay, count, state, ids, values, means)
    assert done, "the C back end refused arguments that the checks accept"
