"""Calls a strategy's methods and validates the results, since a user's own strategy may return anything."""

from __future__ import annotations

import math
import operator
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgefl.errors import ConfigError, RunError, described
from edgefl.kernels.steps import KINDS, ServerOptimizer
from edgefl.strategies.base import Arrivals, LocalTerms, Step, Strategy, Until, Update, Vector, VectorSum
from edgefl.strategies.rows import Rows


def call(strategy: Strategy, method: str, *args: Any, read: Callable[[Any], Any] | None = None) -> Any:
    """Call a method and convert its result with ``read``.

    Raises `RunError` if the method or the conversion raises an exception.
    """
    try:
        result = getattr(strategy, method)(*args)
        return result if read is None else read(result)
    except (Exception, SystemExit) as error:  # SystemExit would end the process silently
        raise raised(strategy, method, error) from error


def raised(strategy: Strategy, method: str, error: BaseException) -> RunError:
    """Return the `RunError` for an exception that a strategy raised.

    The error gives the place of the exception in the file that defines the strategy's class: the last line of
    the traceback that is in this file. If there is none, the file of a base class is used instead.
    """
    what = f"strategy {type(strategy).__name__}.{method} raised {described(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    for kind in type(strategy).__mro__:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        for frame in reversed(frames):
            if frame.filename == file:
                return RunError(f"{what} ({frame.filename}:{frame.lineno})")
    return RunError(what)


def invalid(strategy: Strategy, method: str, allowed: str, got: str) -> RunError:
    """Return the `RunError` for an invalid result of a strategy's method."""
    return RunError(f"strategy {type(strategy).__name__}.{method} must return {allowed}, got {got}")


def check_answers(strategy: Strategy, clients: int) -> None:
    """Check the results of the methods that a run calls before it begins; the fleet has ``clients`` clients.

    Raises `ConfigError` if a method raises an exception or returns an invalid result.
    """

    def answer(method: str, *args: Any) -> Any:
        try:
            return getattr(strategy, method)(*args)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(str(raised(strategy, method, error))) from error

    def check(method: str, found: Any, valid: bool, allowed: str) -> None:
        if not valid:
            raise ConfigError(str(invalid(strategy, method, allowed, repr(found))))

    answer("check", clients)
    optimizer = answer("optimizer")
    known = isinstance(optimizer, ServerOptimizer) and optimizer.kind in KINDS
    numbers = [getattr(optimizer, name) for name in _OPTIMIZER_NUMBERS] if known else []
    allowed = f"a ServerOptimizer of kind {', '.join(KINDS)} with finite numbers"
    check("optimizer", optimizer, known and all(map(_finite, numbers)), allowed)
    terms = answer("local_rule")
    valid = isinstance(terms, LocalTerms) and _finite(terms.prox_mu)
    check("local_rule", terms, valid, "LocalTerms with a finite prox_mu")
    for method in ("max_training", "max_held", "slots"):
        found = answer(method, clients)
        valid = isinstance(found, int) and not isinstance(found, bool) and found >= 1
        check(method, found, valid, "an int of at least 1")
    most = answer("max_weight", clients)
    check("max_weight", most, most is None or (_finite(most) and most > 0), "None or a finite number above 0")
    drawn = answer("sampling", clients)
    pair = isinstance(drawn, tuple) and len(drawn) == 2 and _finite(drawn[0]) and isinstance(drawn[1], bool)
    allowed = "None, or Sampling with a rate above 0 and at most 1, and True or False"
    check("sampling", drawn, drawn is None or (pair and 0 < drawn[0] <= 1), allowed)
    process = answer("arrivals")
    valid = process is None or (
        isinstance(process, Arrivals)
        and process.kind in ("constant", "poisson")
        and _finite(process.rate_per_s)
        and process.rate_per_s > 0
    )
    check("arrivals", process, valid, "None, or constant or poisson Arrivals with a finite rate above 0")


MAX_STEPS = 10**9
"""Maximum of `Until.steps`; ``training.steps`` has the same maximum."""
_OPTIMIZER_NUMBERS = ("lr", "momentum", "beta1", "beta2", "epsilon")


def _finite(value: Any) -> bool:
    """Return True if the value is a number other than NaN and infinity."""
    return isinstance(value, int | float | np.number) and math.isfinite(value)


def clients(result: Any) -> tuple[int, ...]:
    """Convert a result, which may contain numpy integers, to a tuple of client ids."""
    return tuple(map(operator.index, result))


def step(result: Any) -> Step | None:
    """Convert the result of `Strategy.step` to a `Step` with plain Python numbers, or to None."""
    if result is None:
        return None
    updates_, weights, base_scale, keep, parts, release = result
    read = {name: _vector_sum(*part) for name, part in parts.items()} if parts else {}
    numbers = tuple(map(float, weights)), float(base_scale)
    return Step(updates(updates_), *numbers, bool(keep), read, updates(release))


def _vector_sum(weights: Sequence[float], base_scale: float, into_model: float) -> VectorSum:
    return VectorSum(tuple(map(float, weights)), float(base_scale), float(into_model))


def updates(result: Any) -> tuple[Update, ...]:
    """Convert a result to a tuple of updates.

    None, which a method without a ``return`` returns, becomes an empty tuple.
    """
    converted = () if result is None else tuple(result)
    for update in converted:
        if not isinstance(update, Update):
            raise TypeError(f"expected an Update, got {type(update).__name__}")
    return converted


def until(result: Any) -> Until | None:
    """Convert the result of `Strategy.until` to an `Until` with plain Python numbers, or to None."""
    if result is None:
        return None
    at_s, gain, per_step, steps = result
    return Until(float(at_s), float(gain), bool(per_step), None if steps is None else int(steps))


def possible(until: Until, now_s: float) -> bool:
    """Return True if a task can end as ``until`` requires.

    ``steps`` must be from 1 to `MAX_STEPS`; if it is None, ``at_s`` must be finite. ``at_s`` must not be
    before ``now_s``, and ``gain`` must be finite.
    """
    ends = until.at_s < math.inf if until.steps is None else 1 <= until.steps <= MAX_STEPS
    return ends and until.at_s >= now_s and math.isfinite(until.gain)


def time_s(result: Any) -> float | None:
    """Convert the result of `Strategy.wake_s` to an emulated time in seconds, or to None."""
    return None if result is None else float(result)


def weights(strategy: Strategy, step: Step, holds: Callable[[Update], bool]) -> dict[int, float]:
    """Validate a step; return each task's weight, summed over all occurrences of its update in the step."""
    got = f"{len(step.weights)} weights for {len(step.updates)} updates"
    if not step.updates or len(step.updates) != len(step.weights):
        raise invalid(strategy, "step", "a weight for each of one or more updates", got)
    total: dict[int, float] = {}
    for update, weight in zip(step.updates, step.weights, strict=True):
        if not holds(update):
            raise invalid(strategy, "step", "updates that are held", f"task {update.task}")
        total[update.task] = total.get(update.task, 0.0) + weight
    if not (math.isfinite(step.base_scale) and all(map(math.isfinite, total.values()))):
        raise invalid(strategy, "step", "finite weights", f"{step.weights} with base_scale {step.base_scale}")
    return total


def combined(strategy: Strategy, rows: Rows, step_weights: Sequence[float]) -> list[float] | Vector:
    """Call ``strategy.combine``; return its weights or its vector. Raises `RunError` for any other result."""
    found = call(strategy, "combine", rows, step_weights)
    allowed = f"{len(rows)} finite weights or a float32 vector of {rows.size} finite elements"
    if isinstance(found, np.ndarray) and found.dtype == np.float32 and found.shape == (rows.size,):
        if not np.isfinite(found).all():
            raise invalid(strategy, "combine", allowed, "a vector with NaN or infinity")
        return found
    try:
        numbers = [float(weight) for weight in found]
    except (TypeError, ValueError):
        raise invalid(strategy, "combine", allowed, type(found).__name__) from None
    if len(numbers) != len(rows) or not all(map(math.isfinite, numbers)):
        kind = f" of {found.dtype}" if isinstance(found, np.ndarray) else ""
        got = f"{len(numbers)} numbers{kind}" if len(numbers) != len(rows) else f"{numbers}"
        raise invalid(strategy, "combine", allowed, got)
    return numbers


def check_private(strategy: Strategy, step: Step, most: float) -> None:
    """Raise `RunError` if a step exceeds the sensitivity for which the privacy noise was scaled."""
    if step.keep or step.base_scale != 1.0 or step.parts:
        raise invalid(strategy, "step", "only weights under [privacy]", "keep, a base_scale or parts")
    total: dict[int, float] = {}
    for update, weight in zip(step.updates, step.weights, strict=True):
        total[update.task] = total.get(update.task, 0.0) + abs(weight)
    if max(total.values()) > most * (1.0 + 1e-9):
        allowed = f"weights of at most max_weight, {most:g}"
        raise invalid(strategy, "step", allowed, f"{max(total.values()):g}")


def parts(strategy: Strategy, step: Step) -> dict[str, VectorSum]:
    """Validate a step's sums of auxiliary vectors; return each with one total weight per task."""
    names, valid = (*strategy.vectors, *strategy.server_vectors), {}
    for name, part in step.parts.items():
        if name not in names:
            raise invalid(strategy, "step", f"parts of {', '.join(names) or 'no vector'}", repr(name))
        if len(part.weights) != len(step.updates):
            allowed = f"a weight of {name} for each of {len(step.updates)} updates"
            raise invalid(strategy, "step", allowed, str(len(part.weights)))
        if not all(map(math.isfinite, (*part.weights, part.base_scale, part.into_model))):
            raise invalid(strategy, "step", f"finite numbers for {name}", repr(part))
        by_task: dict[int, float] = {}
        for update, weight in zip(step.updates, part.weights, strict=True):
            by_task[update.task] = by_task.get(update.task, 0.0) + weight
        valid[name] = part._replace(weights=tuple(by_task.values()))
    return valid
