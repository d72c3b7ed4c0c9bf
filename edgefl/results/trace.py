"""trace.json: a run as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgefl.files import encodable, write_text
from edgefl.results.groups import profile_of, profiles_by_speed
from edgefl.results.record import Record

FILE_NAME = "trace.json"
PIDS_A_RUN = 1000
"""Number of process ids that are reserved for each run in a trace of several runs."""

Event = dict[str, Any]
_SERVER, _VERSIONS, _EVALUATIONS, _INCIDENTS = 1, 1, 2, 3


def phases(trips: Mapping[str, NDArray[np.float64]]) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return the start and end of each trip's download, training and upload.

    A download whose end is unknown has length 0. Training of unknown duration lasts until the arrival.

    >>> trip = {"sent_s": [0.0], "received_s": [np.nan], "compute_s": [np.nan], "arrived_s": [4.0]}
    >>> [(a.item(), b.item()) for a, b in phases({k: np.array(v) for k, v in trip.items()}).values()]
    [(0.0, 0.0), (0.0, 4.0), (4.0, 4.0)]
    """
    sent, received, arrived = trips["sent_s"], trips["received_s"], trips["arrived_s"]
    late = np.where(np.isnan(received), sent, np.maximum(sent, received))
    end = np.where(np.isnan(arrived), late, arrived)
    down = np.where(np.isnan(received), sent, np.minimum(received, end))
    trained = down + trips["compute_s"]
    trained = np.where(np.isnan(trained), end, np.minimum(trained, end))
    return {"down": (sent, down), "compute": (down, trained), "up": (trained, end)}


def write_trace(folder: str | Path) -> Path:
    """Write the run's ``trace.json``; return its path.

    The file is in Chrome's JSON trace format, with times in emulated microseconds. The server and each
    profile appear as processes, and the clients of a profile as threads of its process, with the download,
    training and upload of each trip.
    """
    with Record(folder) as record:
        return write_events(Path(folder) / FILE_NAME, [record])


def write_events(path: Path, records: Sequence[Record]) -> Path:
    """Write the trace of one or several runs, each with its own processes."""
    return write_text(path, trace_text(records))


def trace_text(records: Sequence[Record]) -> str:
    """Return the content of a trace file; the process names of several runs start with the run's folder."""
    events: list[Event] = []
    for k, record in enumerate(records):
        prefix = "" if len(records) == 1 else f"{encodable(record.folder.absolute().name)}: "
        events.extend(_events(record, k * PIDS_A_RUN, prefix))
    # one event per line, for text editors
    body = ",\n".join(msgspec.json.encode(event).decode() for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{body}\n]}}\n'


def _events(record: Record, first_pid: int, prefix: str) -> Iterator[Event]:
    """Yield a run's events: first the names, then the slices, ordered by process, thread and time.

    The slice of a trip precedes the slices of its download, training and upload.
    """
    server = first_pid + _SERVER
    pid_of = {name: server + 1 + k for k, name in enumerate(reversed(profiles_by_speed(record)))}
    training = np.unique(record.trips["client"])
    named = zip(training.tolist(), profile_of(record, training).tolist(), strict=True)
    home = {client: pid_of[profile] for client, profile in named if profile}
    unknown = server + 1 + len(pid_of)
    yield from _names(server, f"{prefix}server", 0, {
        _VERSIONS: "versions", _EVALUATIONS: "evaluations", _INCIDENTS: "incidents"})  # fmt: skip
    for name, pid in pid_of.items():
        threads = {client: f"client {client}" for client, theirs in home.items() if theirs == pid}
        yield from _names(pid, f"{prefix}{name}", pid - server, threads)
    yield from _server(record, server)
    yield from _trips(record, home, unknown)


def _names(pid: int, process: str, rank: int, threads: dict[int, str]) -> Iterator[Event]:
    yield _event("M", "process_name", pid, 0, 0, args={"name": process})
    yield _event("M", "process_sort_index", pid, 0, 0, args={"sort_index": rank})
    for tid, name in threads.items():
        yield _event("M", "thread_name", pid, tid, 0, args={"name": name})


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 3)


def _event(kind: str, name: str, pid: int, tid: int, ts: float, **more: Any) -> Event:
    return {"ph": kind, "name": name, "pid": pid, "tid": tid, "ts": ts, **more}


def _slice(name: str, pid: int, tid: int, start: float, end: float, **args: Any) -> Event:
    # the ends, not the durations, are rounded, so that neighbours touch and parts stay inside their trip
    more = {"args": args} if args else {}
    return _event("X", name, pid, tid, start, dur=round(end - start, 3), **more)


def _instant(name: str, pid: int, tid: int, time_s: float, **args: Any) -> Event:
    return _event("i", name, pid, tid, _us(time_s), s="t", args=args)


def _counter(name: str, pid: int, time_s: float, value: float) -> Event:
    return _event("C", name, pid, 0, _us(time_s), args={name: value})


def _server(record: Record, pid: int) -> Iterator[Event]:
    # A version is published when its sum ends. The sum's wall time is converted to emulated time; under the
    # virtual clock, a sum takes no emulated time.
    scale = record.meta.time_scale if record.meta.clock == "wall" else math.inf
    rows = list(record.versions.rows("version", "at_s", "updates", "weight_sum", "sum_s", "wall_s"))
    last = 0.0
    for version, at_s, updates, weight, sum_s, wall_s in rows:
        end = _us(at_s)
        start = min(end, max(last, _us(at_s - sum_s / scale)))
        last = end
        detail = {"updates": updates, "weight": weight, "sum_s": sum_s, "wall_s": wall_s}
        yield _slice(f"version {version}", pid, _VERSIONS, start, end, **detail)
    for row in record.evaluations:
        args = {"accuracy": _finite(row.accuracy), "loss": _finite(row.loss), "trips": row.trips}
        args |= {"metrics": row.metrics} if row.metrics else {}
        yield _instant(f"evaluation of {row.version}", pid, _EVALUATIONS, row.at_s, **args)
    for what in sorted(record.incidents, key=lambda incident: incident.at_s):
        yield _instant(what.kind, pid, _INCIDENTS, what.at_s, client=what.client, detail=what.detail)
    for version, at_s, *_ in rows:
        yield _counter("version", pid, at_s, version)
    for row in record.evaluations:
        if np.isfinite(row.accuracy):
            yield _counter("accuracy", pid, row.at_s, row.accuracy)
    held = 0
    for at_s, change in _buffer(record):
        held += change
        yield _counter("updates held", pid, at_s, held)


def _buffer(record: Record) -> list[tuple[float, int]]:
    """Return the times at which the number of updates in the buffer changes, in order, with the changes.

    The change is +1 when an update arrives, and −1 when the update is applied or dropped in the step that
    publishes a version.
    """
    at_s = dict(record.versions.rows("version", "at_s"))
    changes: list[tuple[float, int]] = []
    for arrived, version, fate in record.trips.rows("arrived_s", "applied_version", "fate"):
        if arrived == arrived and (fate in ("applied", "") or version >= 0):
            changes.append((arrived, 1))
            if fate and version in at_s:
                changes.append((max(at_s[version], arrived), -1))
    # at equal times arrivals come first, so that the count is never negative
    return sorted(changes, key=lambda change: (change[0], -change[1]))


_ARGS = ("base_version", "staleness", "weight", "applied_version", "fate", "reason", "loss", "examples",
         "steps")  # fmt: skip


def _trips(record: Record, home: dict[int, int], unknown: int) -> Iterator[Event]:
    trips = record.trips
    order = np.lexsort((trips["task"], trips["sent_s"], trips["client"])).tolist()
    columns = {name: trips[name].tolist() for name in ("client", "task", "sent_s", "arrived_s", *_ARGS)}
    ends = [part_ends.tolist() for _, part_ends in phases(trips).values()]
    for position, k in enumerate(order):
        client, arrived, sent_s = (columns[name][k] for name in ("client", "arrived_s", "sent_s"))
        pid, start = home.get(client, unknown), _us(sent_s)
        args = {"task": columns["task"][k]} | {name: _finite(columns[name][k]) for name in _ARGS}
        if arrived != arrived:
            yield _instant(f"task {args['task']} {args['fate'] or 'running'}", pid, client, sent_s, **args)
            continue
        end = max(start, _us(arrived))
        for following in order[position + 1 : position + 2]:
            if columns["client"][following] == client:
                end = max(start, min(end, _us(columns["sent_s"][following])))
        yield _slice(f"task {args['task']}", pid, client, start, end, **args)
        at = start
        for name, stops_s in zip(("download", "compute", "upload"), ends, strict=True):
            stop = min(max(at, _us(stops_s[k])), end)
            if stop > at:
                yield _slice(name, pid, client, at, stop)
            at = stop


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value
