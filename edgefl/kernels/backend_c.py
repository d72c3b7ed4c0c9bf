"""The C back end: the extension checks its arguments itself and only a wrong one comes back to Python."""

from __future__ import annotations

import atexit

import numpy as np

from edgefl.kernels import _c, arguments, steps
from edgefl.kernels.arguments import Averages, Doubles, Ids, SumArguments
from edgefl.kernels.quantization import QuantizationArguments
from edgefl.kernels.steps import StepArguments

_SIZED = (list, tuple, np.ndarray)
_REFUSED = "the C back end refused arguments that the checks accept"

close_pool = _c.close_pool
atexit.register(close_pool)


def _sum(given: SumArguments, threads: int, *step: object) -> Doubles | None:
    out, base, updates, weights, scales, checksums = given
    norms = np.empty(len(updates))
    done = _c.weighted_sum(out, base, updates, weights, scales, norms, checksums, threads, *step)
    return norms if done else None


def weighted_sum(given: SumArguments, threads: int) -> Doubles:
    norms = _sum(given, threads) if isinstance(given.updates, _SIZED) else None
    if norms is None:  # a wrong argument, or one in another form, such as a memoryview of format "<f"
        norms = _sum(given.checked(), threads)
    assert norms is not None, _REFUSED
    return norms


def weighted_step(given: StepArguments, threads: int) -> Doubles:
    norms = _step(given, threads) if isinstance(given.sum.updates, _SIZED) else None
    if norms is None:
        norms = _step(given.checked(), threads)
    assert norms is not None, _REFUSED
    return norms


def _step(given: StepArguments, threads: int) -> Doubles | None:
    kind, numbers = steps.KINDS.index(given.optimizer.kind), steps.constants(given.optimizer)
    return _sum(given.sum, threads, kind, numbers, given.old, given.new)


def quantize(given: QuantizationArguments, threads: int) -> float:
    norm = _c.quantize(*given, threads)
    if norm is None:
        norm = _c.quantize(*given.checked(), threads)
    assert norm is not None, _REFUSED
    return norm


def sq_norm(update: object, scale: object | None, threads: int) -> float:
    norm = _c.sq_norm(update, scale, threads)
    if norm is None:
        norm = _c.sq_norm(*arguments.update("update", update, None, scale), threads)
    assert norm is not None, _REFUSED
    return norm


def checksum(update: object, threads: int) -> int:
    value = _c.checksum(update, threads)
    if value is None:
        value = _c.checksum(arguments.flat("update", update).view(np.uint8), threads)
    assert value is not None, _REFUSED
    return value


def delta(out: object, trained: object, base: object) -> int:
    value = _c.delta(out, trained, base)
    if value is None:
        value = _c.delta(*arguments.delta(out, trained, base))
    assert value is not None, _REFUSED
    return value


def observe(averages: Averages, ids: Ids, values: Doubles, means: Doubles) -> None:
    done = _c.observe(*averages, ids, values, means)
    assert done, _REFUSED
