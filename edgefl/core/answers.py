"""What a strategy answers, as the core takes it: a user's own may answer anything."""

from __future__ import annotations

from typing import Any

from edgefl.strategies.base import Step, Until, Update


def step(answer: Any) -> Step | None:
    """A `Step` of plain numbers, or None."""
    if answer is None:
        return None
    updates_, weights, base_scale, keep = answer
    return Step(updates(updates_), tuple(map(float, weights)), float(base_scale), bool(keep))


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
    at_s, gain, per_step = answer
    return Until(float(at_s), float(gain), bool(per_step))


def instant(answer: Any) -> float | None:
    """An emulated time, or None."""
    return None if answer is None else float(answer)
