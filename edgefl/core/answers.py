"""Reads a strategy's answers: a user's own may answer anything."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from edgefl.errors import RunError
from edgefl.strategies.base import Step, Strategy, Until, Update, VectorSum


def ask(strategy: Strategy, method: str, *args: Any, read: Callable[[Any], Any] | None = None) -> Any:
    """Returns the strategy's answer as ``read`` takes it. `RunError` if it raises."""
    try:
        answer = getattr(strategy, method)(*args)
        return answer if read is None else read(answer)
    except Exception as error:
        raise raised(strategy, method, error) from error


def raised(strategy: Strategy, method: str, error: Exception) -> RunError:
    """The run's end because a strategy raised, at a line of its own file or of a class it builds on."""
    what = f"strategy {type(strategy).__name__}.{method} raised {type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    for kind in type(strategy).__mro__:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        for frame in reversed(frames):
            if frame.filename == file:
                return RunError(f"{what} ({frame.filename}:{frame.lineno})")
    return RunError(what)


def wrong(strategy: Strategy, method: str, allowed: str, got: str) -> RunError:
    """The run's end because a strategy answered what cannot be done."""
    return RunError(f"strategy {type(strategy).__name__}.{method} must give {allowed}, got {got}")


def step(answer: Any) -> Step | None:
    """A `Step` of plain numbers, or None."""
    if answer is None:
        return None
    updates_, weights, base_scale, keep, parts, release = answer
    read = {name: _vector_sum(*part) for name, part in parts.items()} if parts else {}
    numbers = tuple(map(float, weights)), float(base_scale)
    return Step(updates(updates_), *numbers, bool(keep), read, updates(release))


def _vector_sum(weights: Sequence[float], base_scale: float, into_model: float) -> VectorSum:
    return VectorSum(tuple(map(float, weights)), float(base_scale), float(into_model))


def updates(answer: Any) -> tuple[Update, ...]:
    """Updates; no answer means none, as of a method without a return."""
    found = () if answer is None else tuple(answer)
    for update in found:
        if not isinstance(update, Update):
            raise TypeError(f"expected an Update, got {type(update).__name__}")
    return found


def until(answer: Any) -> Until | None:
    """An `Until` of plain numbers, or None."""
    if answer is None:
        return None
    at_s, gain, per_step, steps = answer
    return Until(float(at_s), float(gain), bool(per_step), None if steps is None else int(steps))


def possible(until: Until, now_s: float) -> bool:
    """True for a task that can end so: at an instant from ``now_s`` on, or after one or more steps."""
    ends = until.at_s < math.inf if until.steps is None else until.steps >= 1
    return ends and until.at_s >= now_s and math.isfinite(until.gain)


def instant(answer: Any) -> float | None:
    """An emulated time, or None."""
    return None if answer is None else float(answer)


def weights(strategy: Strategy, step: Step, holds: Callable[[Update], bool]) -> dict[int, float]:
    """The weight of each task of a step that can be made; of an update that is named twice the sum."""
    got = f"{len(step.weights)} for {len(step.updates)}"
    if not step.updates or len(step.updates) != len(step.weights):
        raise wrong(strategy, "step", "a weight for each of one or more updates", got)
    found: dict[int, float] = {}
    for update, weight in zip(step.updates, step.weights, strict=True):
        if not holds(update):
            raise wrong(strategy, "step", "updates that are held", f"task {update.task}")
        found[update.task] = found.get(update.task, 0.0) + weight
    if not (math.isfinite(step.base_scale) and all(map(math.isfinite, found.values()))):
        raise wrong(strategy, "step", "finite weights", f"{step.weights} with base_scale {step.base_scale}")
    return found


def bounded(strategy: Strategy, step: Step, most: float) -> None:
    """Raise `RunError` for a step of a private run that could say more of an update than its noise hides."""
    if step.keep or step.base_scale != 1.0 or step.parts:
        raise wrong(strategy, "step", "weights alone with [privacy]", "keep, a base_scale or parts")
    total: dict[int, float] = {}
    for update, weight in zip(step.updates, step.weights, strict=True):
        total[update.task] = total.get(update.task, 0.0) + abs(weight)
    if max(total.values()) > most * (1.0 + 1e-9):
        raise wrong(strategy, "step", f"weights of at most max_weight, {most:g}", f"{max(total.values()):g}")


def parts(strategy: Strategy, step: Step) -> dict[str, VectorSum]:
    """The steps of vectors of a step that can be made, with one weight for each task as in `weights`."""
    names, found = (*strategy.vectors, *strategy.server_vectors), {}
    for name, part in step.parts.items():
        if name not in names:
            raise wrong(strategy, "step", f"parts of {', '.join(names) or 'no vector'}", repr(name))
        if len(part.weights) != len(step.updates):
            allowed = f"a weight of {name} for each of {len(step.updates)} updates"
            raise wrong(strategy, "step", allowed, str(len(part.weights)))
        if not all(map(math.isfinite, (*part.weights, part.base_scale, part.into_model))):
            raise wrong(strategy, "step", f"finite numbers for {name}", repr(part))
        by_task: dict[int, float] = {}
        for update, weight in zip(step.updates, part.weights, strict=True):
            by_task[update.task] = by_task.get(update.task, 0.0) + weight
        found[name] = part._replace(weights=tuple(by_task.values()))
    return found
