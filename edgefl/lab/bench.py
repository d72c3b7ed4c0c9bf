"""Code shared by all ``edgefl bench`` commands: measured runs, description of the host, medians, verdicts."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgefl.experiment import Checkpoint, Evaluation, Experiment
from edgefl.host.capacity import host
from edgefl.host.verdict import Conditions, Outcome, outcome, unfit
from edgefl.results.record import Record
from edgefl.run import supervisor

Say = Callable[[str], None]
NEVER = 10**9


def silent(text: str) -> None:
    """Discard a progress line."""


def machine(**more: Any) -> dict[str, Any]:
    """Return the ``host`` entry of a result: a description of the host, its current load, and ``more``."""
    return {**host()._asdict(), "load_1min": round(os.getloadavg()[0], 2), **more}


def machine_line(facts: dict[str, Any], *more: str) -> str:
    """Format the result of `machine` as one line, with the strings in ``more`` before the load."""
    return ", ".join([facts["cpu"], f"{facts['cores']} cores", *more, f"load {facts['load_1min']}"])


def median_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the interquartile range divided by the median."""
    low, middle, high = np.percentile(samples, [25, 50, 75]).tolist()
    return middle, (high - low) / middle


def settings(**fields: Any) -> Experiment:
    """Return an experiment that evaluates no version and writes no checkpoint while it runs."""
    evaluation, checkpoint = Evaluation(every_versions=NEVER), Checkpoint(every_s=float(NEVER))
    return Experiment(evaluation=evaluation, checkpoint=checkpoint, **fields)


@contextmanager
def run_record(experiment: Experiment, workload: str, out: Path | None = None) -> Iterator[Record]:
    """Run the experiment with the workload class that ``workload`` names, and yield the record of the run.

    The run's folder is kept only if ``out`` specifies its path.
    """
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name:
        folder = Path(name) / "run" if out is None else out
        done = supervisor.run(experiment, folder, quiet=True, base=folder.parent, workload=workload)
        with done.record as record:
            yield record


class Judged(NamedTuple):
    """A measured quantity, its limit and the verdict."""

    quantity: str
    mechanism: str
    declared: str
    measured: int
    """Number of trips, packets or devices that were measured."""
    figures: dict[str, float | None]
    """Measured values by name. Errors are relative: 0.01 means 1%."""
    bar: str
    verdict: Outcome
    why: str = ""
    """The reason for a verdict other than PASS."""


def judged(
    what: tuple[str, str, str],
    measured: int,
    figures: dict[str, float],
    bar: str,
    held: bool,
    *conditions: Conditions,
) -> Judged:
    """Judge values measured under ``conditions``; ``held`` is True if they are within the limit ``bar``.

    ``what`` contains the quantity, the mechanism and the declared value. If the limit is missed while other
    processes use the host, the verdict is INVALID instead of FAIL.
    """
    busy = [line for each in conditions if not held for line in each.busy]
    doubts = [*(line for each in conditions for line in unfit(each)), *busy]
    if not measured:
        doubts = ["nothing was measured"]
    known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    why = next(iter(doubts), "" if held else "the limit is missed")
    return Judged(*what, measured, known, bar, outcome(held, doubts), why)
