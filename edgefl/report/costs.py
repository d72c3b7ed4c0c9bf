"""Where the server's time went, and what the run waited for."""

from __future__ import annotations

from typing import Any

from edgefl.record import Record
from edgefl.report.measures import rounded

IDLE = ("start", "wait")
WORDS = {
    "receive": "taking in messages",
    "check": "checking messages and giving out tasks",
    "decide": "deciding",
    "sum": "summing updates",
    "publish": "publishing versions",
    "send": "sending tasks",
    "record": "writing the record",
    "report": "reporting progress",
    "checkpoint": "writing checkpoints",
}
"""Stages of the server's stopwatch in words; one that is not here is called by its name."""

BUSY = 0.9
"""From this share of the time on the server itself is what limits the run."""


def breakdown(record: Record) -> dict[str, Any]:
    """The server's time from its first task on, by stage, and the run's bottleneck in one sentence.

    ``busy`` is the share of its time that the server did not wait, ``us_a_trip`` each stage's wall time over
    the trips that ended, ``limited_by`` one of ``phones`` (wall clock: the server waits for them, as it
    should), ``training`` (virtual clock: it waits for the workers) and ``server``, or None where nothing
    was recorded.
    """
    seconds = {row.stage: row.seconds for row in record.costs if row.stage != "start"}
    total = sum(seconds.values())
    if not total > 0.0:
        return {"busy": None, "limited_by": None, "says": "", "stages": {}}
    work = {stage: spent for stage, spent in seconds.items() if stage not in IDLE}
    busy = sum(work.values()) / total
    trips = int((record.trips["arrived_s"] >= 0).sum())
    limited = "server" if busy >= BUSY else "phones" if record.meta.clock == "wall" else "training"
    return {
        "busy": rounded(busy),
        "limited_by": limited,
        "says": _says(limited, busy, work, record),
        "stages": {
            stage: {
                "share": rounded(spent / total),
                "us_a_trip": rounded(spent / trips * 1e6) if trips else None,
            }
            for stage, spent in sorted(seconds.items(), key=lambda item: -item[1])
        },
    }


def _says(limited: str, busy: float, work: dict[str, float], record: Record) -> str:
    first = max(work, key=lambda stage: work[stage], default="")
    share = work[first] / sum(work.values()) if work and sum(work.values()) > 0 else 0.0
    most = f"{WORDS.get(first, first)} takes {share:.0%} of its work"
    done = record.meta.aggregation
    if first == "sum" and done.seconds > 0:
        most += f", at {done.bytes / done.seconds / 1e9:.1f} GB/s"
    match limited:
        case "server":
            return f"The server limits this run: it is busy {busy:.0%} of the time, and {most}."
        case "phones":
            return f"The phones set the pace: the server waits {1 - busy:.0%} of the time; {most}."
        case _:
            return f"Training limits this run: the server waits {1 - busy:.0%} of the time; {most}."
