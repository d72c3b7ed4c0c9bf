"""summary.json: a run in numbers, with its fidelity, its clients' attendance and the server's time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl.core.events import Joined
from edgefl.limits.fidelity import QUANTITIES, Conditions, Seconds, assess
from edgefl.results.measures import (
    applied_weight,
    class_accuracy,
    jain,
    label_accuracy,
    labels_by_profile,
    profile_of_trips,
    profiles_by_speed,
    rounded,
    slow_group,
    spread,
)
from edgefl.results.record import FATES, Meta, Record
from edgefl.results.run_folder import SUMMARY_FILE, write_text

_COLUMNS = {
    "compute": ("compute_declared_s", "compute_s"),
    "down": ("down_declared_s", "down_s"),
    "up": ("up_declared_s", "up_s"),
    "delay": ("delay_declared_s", "delay_s"),
    "trip": ("trip_declared_s", "trip_achieved_s"),
}
_OF_META = ("name", "status", "stop_reason", "strategy", "clock", "seed")
_LONG_TRAINING_S = 0.01
"""CPU time of a trip's training; in less, what lies between steps would be seen instead."""
# computed time has no clock to blur it: any length can be judged
_EXACT_SCALE = 1e9


def fidelity_of(record: Record) -> dict[str, Any]:
    """The errors of the trips' achieved times against the declared ones, and a verdict on the run.

    The fields of `edgefl.limits.fidelity.Fidelity`. Judged are the
    trips that reported their times; ``unmeasured`` counts the others that ended. Under the virtual clock
    times are computed, so what else the host did does not matter.
    """
    trips, meta = record.trips, record.meta
    virtual = meta.clock == "virtual"
    ended = ~np.isnan(trips["arrived_s"])
    reported = ended & ~np.isnan(trips["trip_achieved_s"]) & ~np.isnan(trips["trip_declared_s"])
    declared = {quantity: trips[columns[0]][reported] for quantity, columns in _COLUMNS.items()}
    achieved = {quantity: trips[columns[1]][reported] for quantity, columns in _COLUMNS.items()}
    declared["round"] = declared["trip"]
    round_s = (trips["arrived_s"] - trips["sent_s"])[reported]
    achieved["round"] = np.full(len(round_s), np.nan) if virtual else round_s
    assert set(declared) == set(QUANTITIES)
    late = trips["lateness_s"][reported]
    found = assess(
        profile_of_trips(record)[reported].tolist(),
        declared,
        achieved,
        time_scale=_EXACT_SCALE if virtual else meta.time_scale,
        lateness_s=late[~np.isnan(late)],
        conditions=Conditions() if virtual else _conditions(meta, _step_cost(record, reported)),
    )
    fields = _plain(msgspec.to_builtins(found))
    return {
        **{key: value for key, value in fields.items() if key != "conditions"},
        **fields["conditions"],
        "throttle": meta.throttle,
        "valid": not found.reasons,
        "reasons": list(found.reasons),
        "unmeasured": int((ended & ~reported).sum()),
    }


def _conditions(meta: Meta, step_cost: float | None) -> Conditions:
    measured = {name: getattr(meta, name) for name in ("load", "used", "others", "steal", "throttled")}
    return Conditions(step_cost=step_cost, **measured)


def _step_cost(record: Record, reported: np.ndarray[Any, np.dtype[np.bool_]]) -> float | None:
    """CPU time of training over what its steps were measured to cost before the run, where that is long."""
    trips, step_s = record.trips, record.meta.host_step_s or 0.0
    expected_s: Seconds = trips["steps"][reported] * step_s
    took: Seconds = trips["cpu_s"][reported]
    judged = (expected_s >= _LONG_TRAINING_S) & ~np.isnan(took)
    return float(np.median(took[judged] / expected_s[judged])) if judged.any() else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return rounded(value) if isinstance(value, float) else value


def summarize(run: Record | str | Path) -> dict[str, Any]:
    """The run in numbers.

    A figure that was not measured (no evaluation, no trip) is None. ``client_trips`` counts whole trips
    (download, training, upload), whatever became of their update; staleness is of applied updates.
    """
    record = run if isinstance(run, Record) else Record(run)
    meta, trips = record.meta, record.trips
    ended = ~np.isnan(trips["arrived_s"])
    fates = Counter(trips["fate"].tolist())
    last = record.evaluations[-1] if record.evaluations else None
    finite = [row.accuracy for row in record.evaluations if np.isfinite(row.accuracy)]
    versions = record.versions
    emulated_s = meta.emulated_s or _latest(record)
    return {
        **{name: getattr(meta, name) for name in _OF_META},
        "clients": meta.clients or len(record.clients),
        "processes": meta.processes,
        "data": meta.data,
        "model": meta.model,
        "parameters": meta.parameters,
        "versions": int(versions["version"].max(initial=0)),
        "client_trips": int(ended.sum()),
        "accuracy": rounded(last.accuracy) if last else None,
        "loss": rounded(last.loss) if last else None,
        "evaluated_version": last.version if last else None,
        "best_accuracy": rounded(max(finite, default=None)),
        "emulated_s": rounded(emulated_s, 9),
        "wall_s": rounded(meta.wall_s or float(versions["wall_s"].max(initial=0.0)), 9),
        "time_scale": meta.time_scale,
        "model_sha256": meta.model_sha256,
        "dropped_updates": fates["dropped"],
        "trips": {**{fate: fates[fate] for fate in FATES}, "open": fates[""]},
        "staleness": _staleness(record),
        "fidelity": fidelity_of(record),
        "aggregation": _aggregation(record),
        "per_class": _per_class(record),
        "accuracy_by_profile_labels": _by_profile_labels(record),
        "slow_phones": _slow_clients(record),
        "applied_weight": _applied_weight(record),
        "integrity": _integrity(record),
        "availability": attendance_of(record, emulated_s),
        "incidents": dict(sorted(Counter(row.kind for row in record.incidents).items())),
        "bytes": {way: int(trips[f"{way}_bytes"].clip(min=0).sum()) for way in ("down", "up")},
        "memory": _memory(record),
        "server_trip_us": rounded(meta.server_trip_us),
        "server_time": breakdown(record),
        "server": {row.stage: {"seconds": rounded(row.seconds), "calls": row.calls} for row in record.costs},
    }


def write_summary(folder: str | Path) -> Path:
    """Write `summarize` of the run to ``<folder>/summary.json``; returns its path."""
    text = json.dumps(summarize(folder), indent=2, ensure_ascii=False, allow_nan=False)
    return write_text(Path(folder) / SUMMARY_FILE, text + "\n")


def _latest(record: Record) -> float:
    times = (record.versions["at_s"], record.trips["arrived_s"])
    return max((float(np.nanmax(t)) for t in times if t.size and not np.isnan(t).all()), default=0.0)


def _staleness(record: Record) -> dict[str, Any]:
    staleness = record.trips["staleness"]
    known = (staleness >= 0) & ~np.isnan(record.trips["arrived_s"])
    used = known & (record.trips["uses"] > 0)
    profile = profile_of_trips(record)
    return {
        **spread(staleness[used]),
        "arrived": spread(staleness[known]),
        "by_profile": {
            name: spread(staleness[used & (profile == name)]) for name in profiles_by_speed(record)
        },
    }


def _aggregation(record: Record) -> dict[str, Any]:
    done = record.meta.aggregation
    return {
        "backend": done.backend,
        "threads": done.threads,
        "updates": done.updates,
        "seconds": rounded(done.seconds),
        "gbytes_per_s": rounded(done.bytes / done.seconds / 1e9) if done.seconds > 0 else 0.0,
    }


def _per_class(record: Record) -> list[dict[str, Any]]:
    if not record.evaluations:
        return []
    last = record.evaluations[-1]
    shares = zip(class_accuracy(last), last.total, strict=True)
    return [
        {"label": label, "name": str(label), "accuracy": rounded(float(value)), "examples": total}
        for label, (value, total) in enumerate(shares)
    ]


def _by_profile_labels(record: Record) -> dict[str, float | None]:
    if not record.evaluations:
        return {}
    last = record.evaluations[-1]
    return {
        profile: rounded(label_accuracy(last, labels))
        for profile, labels in labels_by_profile(record).items()
    }


def _slow_clients(record: Record) -> dict[str, Any]:
    group, share = slow_group(record), applied_weight(record)
    weights = [share[client] for client in group.clients if client in share]
    accuracy = label_accuracy(record.evaluations[-1], group.labels) if record.evaluations else float("nan")
    return {
        "profiles": list(group.profiles),
        "clients": len(group.clients),
        "labels": list(group.labels),
        "accuracy": rounded(accuracy),
        "applied_weight": rounded(np.mean(weights)) if weights else None,
    }


def _applied_weight(record: Record) -> dict[str, Any]:
    share = applied_weight(record)
    profile = {row.client: row.profile for row in record.clients}
    groups: dict[str, list[float]] = {name: [] for name in profiles_by_speed(record)}
    for client, value in share.items():
        groups.setdefault(profile.get(client, ""), []).append(value)
    return {
        "by_profile": {name: rounded(float(np.mean(v))) for name, v in groups.items() if v},
        "by_client": {str(client): rounded(value) for client, value in share.items()},
        "min": rounded(min(share.values(), default=None)),
        "max": rounded(max(share.values(), default=None)),
        "jain": rounded(jain(share.values())),
    }


def _integrity(record: Record) -> dict[str, int]:
    trips = record.trips
    ((checked,),) = record.select(
        "SELECT COUNT(*) FROM trips WHERE checksum_sent IS NOT NULL AND checksum_seen IS NOT NULL"
    )
    ((altered,),) = record.select("SELECT COUNT(*) FROM trips WHERE checksum_sent != checksum_seen")
    trained = trips["trained_version"]
    return {
        "checked": int(checked),
        "checksum_mismatches": int(altered),
        "version_mismatches": int(((trained >= 0) & (trained != trips["base_version"])).sum()),
    }


def _memory(record: Record) -> dict[str, Any]:
    memory, peak = record.meta.memory, record.trips["peak_mib"]
    sizes = list(memory.clients_mib.values())
    profile, known = profile_of_trips(record), ~np.isnan(peak)
    limit = {row.profile: row.memory_mib for row in record.clients}
    processes = {what: size for what, size in msgspec.to_builtins(memory).items() if what != "clients_mib"}
    return {
        **processes,
        "per_process_mib": rounded(np.mean(sizes)) if sizes else None,
        "processes_mib": rounded(sum(sizes)) if sizes else None,
        "by_profile": {
            name: {"peak_mib": rounded(float(peak[chosen].max())), "limit_mib": limit[name]}
            for name in profiles_by_speed(record)
            if (chosen := known & (profile == name)).any()
        },
    }


def attendance_of(record: Record, emulated_s: float) -> dict[str, Any]:
    """The share of all clients' time that they were online, how often one left and came back, and why.

    A client is online from when it joined to when it left; one that finished its task first counts to when
    it should have gone. Clients that had joined once and come again have returned.
    """
    since: dict[int, float] = {}
    known: set[int] = set()
    online_s, returned = 0.0, 0
    reasons: Counter[str] = Counter()
    for move in record.moves():
        if isinstance(move, Joined):
            returned += move.client in known
            known.add(move.client)
            since.setdefault(move.client, move.at_s)
        else:
            online_s += move.at_s - since.pop(move.client, move.at_s)
            reasons[move.reason] += 1
    online_s += sum(max(0.0, emulated_s - at_s) for at_s in since.values())
    clients_s = len(record.clients) * emulated_s
    return {
        "online_share": rounded(online_s / clients_s) if clients_s > 0 else None,
        "left": sum(reasons.values()),
        "returned": returned,
        "reasons": dict(sorted(reasons.items())),
    }


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
