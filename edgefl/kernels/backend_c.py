"""The C back end: the extension checks its arguments itself and only a wrong one comes back to Python."""

from __future__ import annotations

import atexit

import numpy as np

from edgefl.kernels import _c, arguments, differences, quantization, steps
from edgefl.kernels.arguments import Doubles, Ids
from edgefl.kernels.steps import Optimizer

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


def weighted_step(
    out: object,
    base: object,
    updates: object,
    weights: object,
    optimizer: Optimizer,
    old_state: object,
    new_state: object,
    scales: object | None,
    checksums: object | None,
    threads: int,
) -> Doubles:
    kind, numbers = steps.KINDS.index(optimizer.kind), steps.constants(optimizer)
    if isinstance(updates, list | tuple | np.ndarray):
        norms = np.empty(len(updates))
        last = (kind, numbers, old_state, new_state)
        if _c.weighted_step(out, base, updates, weights, scales, norms, checksums, threads, *last):
            return norms
    given = steps.checked(out, base, updates, weights, optimizer, old_state, new_state, scales, checksums)
    total = given.sum
    norms = np.empty(len(total.updates))
    first = (total.out, given.base, total.updates, total.weights, total.scales, norms, total.checksums)
    done = _c.weighted_step(*first, threads, kind, numbers, given.old, given.new)
    assert done, "the C back end refused arguments that the checks accept"
    return norms


def quantize(
    out: object,
    update: object,
    scales: object | None,
    residual: object | None,
    left: object | None,
    weight: float,
    threads: int,
) -> float:
    norm = _c.quantize(out, update, scales, residual, left, weight, threads)
    if norm is None:
        norm = _c.quantize(*quantization.checked(out, update, scales, residual, left, weight), threads)
    assert norm is not None, "the C back end refused arguments that the checks accept"
    return norm


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


def delta(out: object, trained: object, base: object) -> int:
    value = _c.delta(out, trained, base)
    if value is None:
        value = _c.delta(*differences.checked(out, trained, base))
    assert value is not None, "the C back end refused arguments that the checks accept"
    return value


def observe(
    mode: int, width: int, decay: float, count: Ids, state: Doubles, ids: Ids, values: Doubles, means: Doubles
) -> None:
    done = _c.observe(mode, width, decay, count, state, ids, values, means)
    assert done, "the C back end refused arguments that the checks accept"
