"""The C back end. The extension checks its arguments; if one is wrong, Python code raises the error."""

from __future__ import annotations

import atexit
from typing import TypeVar

import numpy as np

from edgefl.kernels import _c, arguments, steps
from edgefl.kernels.arguments import Averages, Doubles, Ids, SumArguments
from edgefl.kernels.field import CodeArguments, FieldSumArguments
from edgefl.kernels.quantization import QuantizationArguments
from edgefl.kernels.ranks import RankArguments, network
from edgefl.kernels.steps import StepArguments

_SIZED = (list, tuple, np.ndarray)
T = TypeVar("T")

close_pool = _c.close_pool
atexit.register(close_pool)


def _sum(given: SumArguments, threads: int, *step: object) -> Doubles | None:
    out, base, updates, weights, scales, checksums = given
    norms = np.empty(len(updates))
    done = _c.weighted_sum(out, base, updates, weights, scales, norms, checksums, threads, *step)
    return norms if done else None


def _accepted(value: T | None) -> T:
    assert value is not None, "the C back end rejected arguments that edgefl.kernels.arguments accepts"
    return value


def _repeats(given: SumArguments) -> bool:
    """Return True if every sequence can be read a second time in case the extension rejects an argument."""
    scales = given.scales
    known = isinstance(given.updates, _SIZED) and isinstance(given.weights, _SIZED)
    return known and (scales is None or isinstance(scales, _SIZED))


def weighted_sum(given: SumArguments, threads: int) -> Doubles:
    norms = _sum(given, threads) if _repeats(given) else None
    # None means that an argument is invalid or must first be converted (such as a memoryview of format "<f").
    return _accepted(_sum(given.checked(), threads)) if norms is None else norms


def weighted_step(given: StepArguments, threads: int) -> Doubles:
    norms = _step(given, threads) if _repeats(given.sum) else None
    return _accepted(_step(given.checked(), threads)) if norms is None else norms


def _step(given: StepArguments, threads: int) -> Doubles | None:
    kind, numbers = steps.KINDS.index(given.optimizer.kind), steps.constants(given.optimizer)
    return _sum(given.sum, threads, kind, numbers, given.old, given.new)


def quantize(given: QuantizationArguments, threads: int) -> float:
    norm = _c.quantize(*given, threads)
    return _accepted(_c.quantize(*given.checked(), threads)) if norm is None else norm


def trimmed_mean(given: RankArguments, threads: int) -> None:
    checked = given.checked()
    comparisons = network(len(checked.updates), checked.trim)
    _accepted(
        _c.trimmed_mean(checked.out, checked.updates, checked.scales, comparisons, checked.trim, threads)
    )


def products(given: RankArguments, threads: int) -> Doubles:
    checked = given.checked()
    found = np.empty((len(checked.updates), len(checked.updates)))
    _accepted(_c.products(found.reshape(-1), checked.updates, checked.scales, threads))
    return found


def field_sum(given: FieldSumArguments, threads: int) -> None:
    _accepted(_c.field_sum(*given.checked(), threads))


def field_encode(given: CodeArguments, threads: int) -> int:
    update, out, mask, factor, clip = given.checked()
    return _accepted(_c.field_encode(out, update, mask, clip, factor, threads))


def field_decode(given: CodeArguments, threads: int) -> int:
    return _accepted(_c.field_decode(*given.checked()[:4], threads))


def sq_norm(update: object, scale: object | None, threads: int) -> float:
    norm = _c.sq_norm(update, scale, threads)
    if norm is None:
        return _accepted(_c.sq_norm(*arguments.update("update", update, None, scale), threads))
    return norm


def checksum(update: object, threads: int) -> int:
    value = _c.checksum(update, threads)
    if value is None:
        return _accepted(_c.checksum(arguments.flat("update", update).view(np.uint8), threads))
    return value


def delta(out: object, trained: object, base: object) -> int:
    value = _c.delta(out, trained, base)
    return _accepted(_c.delta(*arguments.delta(out, trained, base))) if value is None else value


def observe(averages: Averages, ids: Ids, values: Doubles, means: Doubles) -> None:
    _accepted(_c.observe(*averages, ids, values, means))
