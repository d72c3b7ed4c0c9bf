"""The headline metrics of a run as text, as shown in its report, on its live page and in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from edgefl.results.tables import many, number, percent, seconds


class Stat(NamedTuple):
    """One metric: its name, its value, a note, and the value's tone ("", "good" or "bad")."""

    name: str
    value: str
    note: str = ""
    tone: str = ""

    @property
    def text(self) -> str:
        """The value and the note on one line."""
        return ", ".join(filter(None, (self.value, self.note)))


def learned(accuracy: float | None, loss: float | None, metrics: Mapping[str, float | None]) -> Stat:
    """Return the accuracy, or the loss if the task has no accuracy; the note lists the user's own metrics.

    >>> learned(0.812, 0.75, {"f1": 0.8}).text, learned(None, 0.25, {}).text
    ('81.2%, loss 0.75, f1 0.8', '0.25, no accuracy')
    >>> learned(0.103, math.nan, {}).text, learned(None, None, {}).text
    ('10.3%, loss not finite', '–, not measured')
    """
    own = [f"{name} {number(value, 4)}" for name, value in metrics.items()]
    text = "" if loss is None else number(loss) if math.isfinite(loss) else "not finite"
    if accuracy is None and text:
        return Stat("Loss", text, ", ".join(own) or "no accuracy")
    known = [f"loss {text}"] if text else []
    return Stat("Accuracy", percent(accuracy), ", ".join([*known, *own]) or "not measured")


def learned_by(summary: Mapping[str, Any]) -> Stat:
    """Return the result of `learned` for a run's ``summary``.

    If the run was evaluated but the loss in the summary is None, the loss was not finite.
    """
    loss = summary["loss"]
    if loss is None and summary["evaluated_version"] is not None:
        loss = math.nan
    return learned(summary["accuracy"], loss, summary["metrics"])


def emulated_time(emulated_s: float, wall_s: float) -> Stat:
    return Stat("Emulated time", seconds(emulated_s), f"{seconds(wall_s)} of wall time")


def fidelity(found: Mapping[str, Any], clock: str) -> Stat:
    """Return the verdict on a run; ``found`` is the field ``fidelity`` of the run's summary."""
    median, p95 = found["median_abs_error"], found["p95_abs_error"]
    note = errors(median, p95)
    if median is None:
        note = "no trip was timed"
    elif clock == "virtual" and found["valid"]:
        note = "times computed, not enforced"
    elif warnings := found["warnings"]:
        note += f"; warning: {warnings[0]}" + f"; {len(warnings) - 1} more" * (len(warnings) > 1)
    value, tone = ("VALID", "good") if found["valid"] else ("INVALID", "bad")
    return Stat("Fidelity", value, note, tone)


def errors(median: float | None, p95: float | None) -> str:
    """Return as text the median and the 95th percentile of the errors of a run's times."""
    return f"error median {percent(median, 2)}, p95 {percent(p95, 2)}"


def headline(summary: Mapping[str, Any]) -> list[Stat]:
    """Return the most important metrics of a run's ``summary``."""
    trips, staleness, slow = summary["trips"], summary["staleness"], summary["slow_phones"]
    lost = [f"{trips[fate]:,} {fate}" for fate in ("discarded", "dropped", "lost", "open") if trips[fate]]
    weight, theirs = slow["applied_weight"], slow["accuracy"]
    note = "no update applied" if weight is None else f"weight {number(weight)} of the fair share"
    of_slow = Stat("Slow phones' classes", percent(theirs), note)
    if theirs is None and weight is not None:
        of_slow = Stat("Slow phones' weight", number(weight), "1 is fair")
    stale = f"staleness {number(staleness['mean'])} mean, {staleness['max']} max"
    return [
        Stat("Strategy", summary["strategy"] or "–", many(summary["processes"], "training process")),
        learned_by(summary),
        of_slow,
        Stat("Client trips", f"{summary['client_trips']:,}", ", ".join(lost) or "no update was lost"),
        Stat("Versions", f"{summary['versions']:,}", stale),
        emulated_time(summary["emulated_s"], summary["wall_s"]),
        fidelity(summary["fidelity"], summary["clock"]),
    ]
