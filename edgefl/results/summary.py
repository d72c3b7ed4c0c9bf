"""Compute the content of summary.json: a run's results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgefl.core.events import Joined, Unmasking
from edgefl.files import json_text, write_text
from edgefl.host.fidelity import Seconds, assess
from edgefl.host.verdict import Conditions
from edgefl.results.energy import energy_of, transfers_of
from edgefl.results.groups import (
    accuracy_by_client,
    applied_weight,
    class_accuracy,
    jain,
    label_accuracy,
    labels_by_profile,
    profile_of,
    profile_of_trips,
    profiles_by_speed,
    slow_group,
)
from edgefl.results.phase import phase_of
from edgefl.results.record import Record
from edgefl.results.rows import FATES, EvaluationRow, Resume, SecureCost
from edgefl.results.run_folder import SUMMARY_FILE
from edgefl.results.spending import Spending, spending, summary_of

ACHIEVED = {
    "compute": "compute_s",
    "down": "down_s",
    "up": "up_s",
    "delay": "delay_s",
    "trip": "trip_achieved_s",
}
"""The column of achieved times for each part of a trip; ``{part}_declared_s`` holds the declared times."""
_OF_META = ("name", "status", "stop_reason", "no_progress", "strategy", "clock", "seed", "processes", "data",
            "model", "parameters", "time_scale", "model_sha256")  # fmt: skip
_LONG_TRAINING_S = 0.01
"""Trips whose training is expected to take less CPU time than this, in seconds, are left out of `_step_cost`,
because overheads would dominate."""
# Time scale for judging computed times. They have no measurement error, so it is large enough that no time
# counts as too short to measure.
_EXACT_SCALE = 1e9


def rounded(value: float | np.floating[Any] | None, digits: int = 6) -> float | None:
    """Return a number for JSON with at most ``digits`` significant digits; None if missing or not finite.

    >>> rounded(0.1 + 0.2), rounded(float("nan"))
    (0.3, None)
    """
    return None if value is None or not np.isfinite(value) else float(f"{value:.{digits}g}")


def spread(values: NDArray[Any]) -> dict[str, Any]:
    """Return the mean, the median, the 95th percentile and the maximum; all are 0 if there are no values.

    >>> spread(np.array([0, 1, 1, 2]))
    {'mean': 1.0, 'median': 1.0, 'p95': 1.85, 'max': 2}
    """
    if not len(values):
        return {"mean": 0.0, "median": 0.0, "p95": 0.0, "max": 0}
    found = {"mean": values.mean(), "median": np.median(values), "p95": np.percentile(values, 95)}
    return {name: rounded(value) for name, value in found.items()} | {"max": values.max().item()}


def fidelity_of(record: Record) -> dict[str, Any]:
    """Return the errors of the trips' times and a verdict on the run: the fields of `host.fidelity.Fidelity`.

    Only trips that reported their times are judged; ``unmeasured`` counts the other completed trips. If all
    trips were made by real devices, only the state of the host is judged. Under the virtual clock, times are
    computed, so the state of the host is ignored.
    """
    trips, meta = record.trips, record.meta
    virtual = meta.clock == "virtual"
    own_pace = is_real_device(record)
    ended = ~np.isnan(trips["arrived_s"]) & ~own_pace
    reported = ended & ~np.isnan(trips["trip_achieved_s"]) & ~np.isnan(trips["trip_declared_s"])
    declared = {part: trips[f"{part}_declared_s"][reported] for part in ACHIEVED}
    achieved = {part: trips[name][reported] for part, name in ACHIEVED.items()}
    declared["round"] = declared["trip"]
    round_s = (trips["arrived_s"] - trips["sent_s"])[reported]
    achieved["round"] = np.full(len(round_s), np.nan) if virtual else round_s
    late = trips["lateness_s"][reported]
    measured = {name: getattr(meta, name) for name in ("load", "used", "others", "steal", "throttled")}
    found = assess(
        profile_of_trips(record)[reported].tolist(),
        declared,
        achieved,
        time_scale=_EXACT_SCALE if virtual else meta.time_scale,
        lateness_s=late[~np.isnan(late)],
        conditions=None if virtual else Conditions(step_cost=_step_cost(record, reported), **measured),
        emulates=not own_pace.size or not own_pace.all(),
    )
    fields = _plain(msgspec.to_builtins(found))
    conditions = fields.pop("conditions")
    unmeasured = int((ended & ~reported).sum())
    return {**fields, **conditions, "throttle": meta.throttle, "unmeasured": unmeasured}


def is_real_device(record: Record) -> NDArray[np.bool_]:
    """Return a mask of the trips made by real devices, whose speed is not controlled.

    If another host emulated such a client in a trip, the trip has a lateness and is left out.
    """
    clients = [client for node in record.meta.nodes if node.as_is for client in node.peers]
    mask: NDArray[np.bool_] = np.isin(record.trips["client"], clients) & np.isnan(record.trips["lateness_s"])
    return mask


def _network(moved: dict[str, int]) -> dict[str, Any]:
    """Return the number of bytes that the server and its nodes sent each other, in total and per version."""
    versions = moved.get("versions", 0)
    ways = {way: moved[way] for way in ("in", "out") if way in moved}
    a_version = {f"{way}_a_version": rounded(count / versions) for way, count in ways.items() if versions}
    return {**moved, **a_version}


def _transferred(record: Record) -> dict[str, int]:
    """Return the numbers of bytes that clients downloaded and uploaded in completed trips."""
    down, up = (record.trips[f"{way}_bytes"].clip(min=0) for way in ("down", "up"))
    downloads, uploads = transfers_of(record, (down > 0) | (up > 0))
    return {"down": int(down[downloads].sum()), "up": int(up[uploads].sum())}


def _real_devices(record: Record) -> list[dict[str, Any]]:
    """Return each real device's measured training time, the time in its profile, and the ratio of the two."""
    trips, found = record.trips, []
    whole = is_real_device(record) & ~np.isnan(trips["compute_s"])
    for client in np.unique(trips["client"][whole]).tolist():
        its = whole & (trips["client"] == client)
        ratios = trips["compute_s"][its] / trips["compute_declared_s"][its]
        low, median, high = np.percentile(ratios, (5, 50, 95)).tolist()
        found.append(
            {
                "client": client,
                "profile": record.clients[client].profile,
                "trips": int(its.sum()),
                "compute_s": rounded(float(trips["compute_s"][its].mean())),
                "declared_s": rounded(float(trips["compute_declared_s"][its].mean())),
                "ratio": {"p5": rounded(low), "median": rounded(median), "p95": rounded(high)},
            }
        )
    return found


def _step_cost(record: Record, reported: NDArray[np.bool_]) -> float | None:
    """Return the median, over trips, of the training's CPU time divided by the time expected for its steps.

    The expected time of a step was measured on the trip's host before the run, or before the last resume
    that preceded the trip. Trips with short training are left out.
    """
    trips, meta = record.trips, record.meta
    there_s = np.empty(len(trips["client"]))
    parts = [Resume(-math.inf, meta.host_step_s or 0.0, 0), *meta.resumes]
    ends = [*(part.nodes for part in parts[1:]), len(meta.nodes)]
    for part, end in zip(parts, ends, strict=True):
        its = ~(trips["arrived_s"] <= part.at_s)  # includes later trips; the next part overwrites these
        there_s[its] = part.host_step_s
        for node in meta.nodes[part.nodes : end]:
            there_s[its & np.isin(trips["client"], node.peers)] = node.host_step_s
    expected_s: Seconds = (trips["steps"] * there_s)[reported]
    took: Seconds = trips["cpu_s"][reported]
    judged = (expected_s >= _LONG_TRAINING_S) & ~np.isnan(took)
    return float(np.median(took[judged] / expected_s[judged])) if judged.any() else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return rounded(value) if isinstance(value, float) else value


def is_client_trip(record: Record) -> NDArray[np.bool_]:
    """Return a mask of the trips that count as client trips: completed and cancelled, but not lost ones."""
    trips = record.trips
    counted: NDArray[np.bool_] = np.isin(trips["fate"], ("applied", "discarded", "dropped"))
    counted |= ~np.isnan(trips["arrived_s"])
    return counted


def summarize(run: Record | str | Path) -> dict[str, Any]:
    """Return the run's results, with None for each result that was not measured.

    ``client_trips`` counts trips as ``stop.trips`` does: completed trips (download, training and upload),
    whether or not their update was used, and cancelled trips, but not lost trips. Staleness covers only
    applied updates.
    """
    record = run if isinstance(run, Record) else Record(run)
    meta, trips = record.meta, record.trips
    ended = is_client_trip(record)
    fates = Counter(trips["fate"].tolist())
    last = record.evaluations[-1] if record.evaluations else None
    finite = [row.accuracy for row in record.evaluations if np.isfinite(row.accuracy)]
    versions, done, spent = record.versions, meta.aggregation, spending(record)
    times = np.concatenate([[0.0], versions["at_s"], trips["arrived_s"]])
    emulated_s, wall_s = float(np.nanmax(times)), float(versions["wall_s"].max(initial=0.0))
    if meta.status == "running":  # the recorded times, if any, are those of the last interruption
        emulated_s, wall_s = max(meta.emulated_s, emulated_s), max(meta.wall_s, wall_s)
    else:
        emulated_s, wall_s = meta.emulated_s or emulated_s, meta.wall_s or wall_s
    # if one of the two checksums is missing, their comparison is NULL, which COUNT ignores
    ((checked, altered),) = record.select(
        "SELECT COUNT(checksum_sent != checksum_seen), TOTAL(checksum_sent != checksum_seen) FROM trips"
    )
    trained = trips["trained_version"]
    return {
        **{name: getattr(meta, name) for name in _OF_META},
        "clients": meta.clients or len(record.fleet["client"]),
        "versions": int(versions["version"].max(initial=0)),
        "client_trips": int(ended.sum()),
        "accuracy": rounded(last.accuracy) if last else None,
        "loss": rounded(last.loss) if last else None,
        "metrics": {name: rounded(value) for name, value in last.metrics.items()} if last else {},
        "evaluated_version": last.version if last else None,
        "curve": _curve(record, spent),
        "best_accuracy": rounded(max(finite, default=None)),
        "emulated_s": rounded(emulated_s, 9),
        "wall_s": rounded(wall_s, 9),
        "dropped_updates": fates["dropped"],
        "trips": {**{fate: fates[fate] for fate in FATES}, "open": fates[""]},
        "privacy": summary_of(spent),
        "staleness": _staleness(record),
        "fidelity": fidelity_of(record),
        "model_error_factor": meta.model_error_factor,
        "aggregation": {
            **{name: getattr(done, name) for name in ("backend", "threads", "updates")},
            "seconds": rounded(done.seconds),
            "gbytes_per_s": rounded(done.bytes / done.seconds / 1e9) if done.seconds > 0 else 0.0,
        },
        "on_clients": on_clients(record),
        "per_class": [
            {"label": k, "name": str(k), "accuracy": rounded(value), "examples": last.total[k]}
            for last in record.evaluations[-1:]
            for k, value in enumerate(class_accuracy(last))
        ],
        "accuracy_by_profile_labels": {
            profile: rounded(label_accuracy(last, labels))
            for last in record.evaluations[-1:]
            for profile, labels in labels_by_profile(record).items()
        },
        **_weights(record),
        "integrity": {
            "checked": checked,
            "checksum_mismatches": int(altered),
            "version_mismatches": int(((trained >= 0) & (trained != trips["base_version"])).sum()),
        },
        "phase": _plain(phase_of(trips, profile_of_trips(record), meta.in_phase).figures()),
        "availability": attendance_of(record, emulated_s),
        "incidents": dict(sorted(Counter(row.kind for row in record.incidents).items())),
        "energy": energy_of(record),
        "bytes": _transferred(record),
        "memory": _memory(record),
        "nodes": [msgspec.to_builtins(node) for node in meta.nodes],
        "network": _network(meta.network),
        "real_devices": _real_devices(record),
        "server_trip_us": rounded(meta.server_trip_us),
        "server_time": breakdown(record),
        "server": {row.stage: {"seconds": rounded(row.seconds), "calls": row.calls} for row in record.costs},
    }


def _curve(record: Record, spent: Spending | None) -> dict[str, list[float | None]]:
    """Return the evaluations as columns: version, at_s, trips, accuracy, loss, the user's metrics, and ε."""
    rows = record.evaluations
    curve: dict[str, list[float | None]] = {
        name: [getattr(row, name) for row in rows] for name in ("version", "trips")
    }
    curve["at_s"] = [rounded(row.at_s, 9) for row in rows]
    for name in ("accuracy", "loss", *metric_names(record)):
        curve.setdefault(name, [rounded(value_of(row, name)) for row in rows])
    if spent is not None:
        curve["epsilon"] = [rounded(spent.epsilon[row.version]) for row in rows]
    return curve


def metric_names(record: Record) -> list[str]:
    """Return the names of the metrics from the user's evaluation function, in order of appearance."""
    return list(dict.fromkeys(name for row in record.evaluations for name in row.metrics))


def value_of(row: EvaluationRow, name: str) -> float:
    """Return a metric of an evaluation, such as ``loss`` or ``accuracy``; NaN if the metric is missing."""
    return float(getattr(row, name) if name in ("loss", "accuracy") else row.metrics.get(name, math.nan))


def measured(
    record: Record, name: str, over: str, labels: Sequence[int] | None = None
) -> NDArray[np.float64]:
    """Return a metric's finite values over ``at_s``, ``trips`` or ``version``, as an array with rows x and y.

    If ``labels`` is given, the metric is the accuracy on these classes.
    """
    found = [
        (getattr(row, over), value_of(row, name) if labels is None else label_accuracy(row, labels))
        for row in record.evaluations
    ]
    points = np.array(found, np.float64).reshape(-1, 2).T
    return points[:, np.isfinite(points[1])]


def is_scored(known: Mapping[str, bool]) -> bool:
    """Return False if a loss is known but no accuracy, as in a regression task; otherwise True."""
    return known["accuracy"] or not known["loss"]


def worst_decile(values: NDArray[np.float64], *, largest: bool = False) -> float:
    """Return the mean of the worst tenth of the values, or of the worst value if there are fewer than ten.

    The worst values are the smallest or, if ``largest``, the largest.

    >>> worst_decile(np.arange(20.0)), worst_decile(np.arange(20.0), largest=True)
    (0.5, 18.5)
    """
    ranked = np.sort(values)[::-1] if largest else np.sort(values)
    return float(ranked[: max(1, len(ranked) // 10)].mean())


def on_clients(record: Record) -> dict[str, Any] | None:
    """Return metrics of the last evaluation on the clients' held-out examples; None if there was none.

    The metrics are the mean accuracy or, for a task without classes, the mean loss, over all clients and over
    the worst tenth of them. All clients have the same weight. The ``global`` model and the clients'
    ``personal`` models (the global model after one trip's training on each client) have separate metrics.
    """
    row = next((row for row in reversed(record.evaluations) if row.clients), None)
    if row is None:
        return None
    profile = profile_of(record, np.array(row.clients))
    measure = "accuracy" if row.client_accuracy else "loss"
    columns = {"global": getattr(row, f"client_{measure}"), "personal": getattr(row, f"personal_{measure}")}
    found = {name: np.array(values) for name, values in columns.items() if values}
    return {
        "version": row.version,
        "clients": len(row.clients),
        "measure": measure,
        **{
            name: {
                "mean": rounded(values.mean()),
                "worst_decile": rounded(worst_decile(values, largest=measure == "loss")),
            }
            for name, values in found.items()
        },
        "by_profile": {
            name: {"clients": int((profile == name).sum())}
            | {kind: rounded(values[profile == name].mean()) for kind, values in found.items()}
            for name in profiles_by_speed(record)
            if (profile == name).any()
        },
    }


def measures(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the last evaluation's metrics except loss and accuracy, keyed by their names in tables."""
    found: dict[str, float | None] = dict(summary["metrics"])
    clients = summary["on_clients"] or {}
    for kind in ("global", "personal"):
        for figure, value in clients.get(kind, {}).items():
            found[f"{kind} {clients['measure']} on clients, {figure.replace('_', ' ')}"] = value
    return found


def write_summary(folder: str | Path, summary: dict[str, Any] | None = None) -> Path:
    """Write ``summary`` to the run's ``summary.json``, and return the path of this file.

    If ``summary`` is None, `summarize` computes it.
    """
    text = summary_text(folder) if summary is None else json_text(summary)
    return write_text(Path(folder) / SUMMARY_FILE, text)


def summary_text(run: str | Path | Record) -> str:
    """Return the text of the run's ``summary.json``, which `summarize` computes."""
    return json_text(summarize(run))


def _staleness(record: Record) -> dict[str, Any]:
    staleness = record.trips["staleness"]
    known = (staleness >= 0) & ~np.isnan(record.trips["arrived_s"])
    used = known & (record.trips["uses"] > 0)
    profile, names = profile_of_trips(record), profiles_by_speed(record)
    by_profile = {name: spread(staleness[used & (profile == name)]) for name in names}
    return {**spread(staleness[used]), "arrived": spread(staleness[known]), "by_profile": by_profile}


def _secure(cost: SecureCost, record: Record) -> dict[str, Any]:
    """Return the settings and costs of secure aggregation."""
    spans_s = (event.until_s - event.at_s for _, event in record.events() if isinstance(event, Unmasking))
    exchange_s = np.array([span_s for span_s in spans_s if span_s > 0])  # 0 if the sum waited for clients
    return {
        **msgspec.structs.asdict(cost.settings),
        "step": cost.step,
        "share_bytes_per_trip": cost.share_bytes,
        "holder_bytes_per_update": cost.held_bytes[0],
        "holder_bytes_per_version": cost.held_bytes[1],
        **({"exchange_s": spread(exchange_s)} if exchange_s.size else {}),
        "masking_s": {name: rounded(seconds) for name, seconds in cost.masking_s.items()},
    }


def _attackers(record: Record, clients: NDArray[np.int64], share: NDArray[np.float64]) -> dict[str, Any]:
    """Return the applied weight and accuracy of honest and attacking clients, given each client's ``share``.

    A client's accuracy is the last model's accuracy on the client's own held-out examples if they were used
    in the evaluation, and otherwise on the test examples of the client's classes. Failed trips are those in
    which the user's own attack function failed. They are counted from the table of trips, because a trip that
    a resumed run repeated has two incidents.
    """
    accuracy, basis = accuracy_by_client(record)
    known, found = np.array(list(accuracy)), np.array(list(accuracy.values()))
    groups = {}
    for name in ("honest", "attacking"):
        invert = name == "honest"
        theirs = share[np.isin(clients, record.meta.attackers, invert=invert)]
        scores = found[np.isin(known, record.meta.attackers, invert=invert)]
        groups[name] = {
            "weight_share": rounded(theirs.sum() / (share.sum() or 1.0)),
            "weight": rounded(theirs.mean()) if len(theirs) else None,
            "accuracy": rounded(scores.mean()) if len(scores) else None,
        }
    failed = [reason for reason in record.trips["reason"].tolist() if "fleet.attackers.kind: " in reason]
    return {
        "clients": len(record.meta.attackers),
        "weight_share": groups["attacking"]["weight_share"],
        "accuracy_on": basis,
        "failed_trips": len(failed),
        "first_failure": failed[0].partition("fleet.attackers.kind: ")[2] if failed else "",
        **groups,
    }


def _weights(record: Record) -> dict[str, dict[str, Any]]:
    group, (clients, share) = slow_group(record), applied_weight(record)
    weights = share[np.isin(clients, group.clients)]
    accuracy = label_accuracy(record.evaluations[-1], group.labels) if record.evaluations else None
    profile = profile_of(record, clients)
    groups = {name: share[profile == name] for name in [*profiles_by_speed(record), ""]}
    training = np.isin(clients, record.trips["client"])
    return {
        **({"secure": _secure(record.meta.secure, record)} if record.meta.secure is not None else {}),
        **({"attackers": _attackers(record, clients, share)} if record.meta.attackers else {}),
        "slow_phones": {
            "profiles": list(group.profiles),
            "clients": len(group.clients),
            "labels": list(group.labels),
            "accuracy": rounded(accuracy),
            "applied_weight": rounded(np.mean(weights)) if len(weights) else None,
        },
        "applied_weight": {
            "by_profile": {name: rounded(np.mean(found)) for name, found in groups.items() if len(found)},
            "by_client": {
                str(client): rounded(value)
                for client, value in zip(clients[training].tolist(), share[training].tolist(), strict=True)
            },
            "min": rounded(share.min()) if len(share) else None,
            "max": rounded(share.max()) if len(share) else None,
            "jain": rounded(jain(share)),
        },
    }


def _memory(record: Record) -> dict[str, Any]:
    """Return the memory of the processes in MiB, in total and for each profile.

    A profile's entry has the predicted peak memory of training, its limit, and the largest growth of a
    process.
    """
    memory, peak, grew = record.meta.memory, record.trips["peak_mib"], record.trips["process_grew_mib"]
    sizes = list(memory.clients_mib.values())
    profile, known = profile_of_trips(record), ~np.isnan(peak)
    limit = dict(record.fleet.rows("profile", "memory_mib"))
    return {
        **{name: size for name, size in msgspec.structs.asdict(memory).items() if name != "clients_mib"},
        "per_process_mib": rounded(np.mean(sizes)) if sizes else None,
        "processes_mib": rounded(sum(sizes)) if sizes else None,
        "by_profile": {
            name: {
                "peak_mib": rounded(float(peak[chosen].max())),
                "limit_mib": rounded(limit[name], 15),
                "process_grew_mib": rounded(float(grew[chosen].max())),
            }
            for name in profiles_by_speed(record)
            if (chosen := known & (profile == name)).any()
        },
    }


def attendance_of(record: Record, emulated_s: float) -> dict[str, Any]:
    """Return the share of time that clients were online, and the numbers of departures and returns.

    Departures are also counted by reason. A client that finishes its task before it leaves is counted as
    online until it was due to leave, and then as offline until it rejoins. It does not rejoin before the task
    has ended, even if it was due back earlier.
    """
    since: dict[int, float] = {}
    joined, reasons = Counter[int](), Counter[str]()
    online_s = 0.0
    for move in record.moves():
        if isinstance(move, Joined):
            joined[move.client] += 1
            since.setdefault(move.client, move.at_s)
        else:
            began_s = since.pop(move.client, move.at_s)
            online_s += max(0.0, min(move.at_s, emulated_s) - began_s)  # it may leave after the run has ended
            reasons[move.reason] += 1
    online_s += sum(max(0.0, emulated_s - at_s) for at_s in since.values())
    clients_s = len(record.fleet["client"]) * emulated_s
    return {
        "online_share": rounded(online_s / clients_s) if clients_s > 0 else None,
        "left": reasons.total(),
        "returned": joined.total() - len(joined),
        "reasons": dict(sorted(reasons.items())),
    }


WORDS = {
    "receive": "receiving messages",
    "check": "checking messages and assigning tasks",
    "decide": "deciding",
    "sum": "summing updates",
    "publish": "publishing versions",
    "send": "sending tasks",
    "record": "writing the record",
    "report": "reporting progress",
    "checkpoint": "writing checkpoints",
}
"""Descriptions of the stages into which the server's time is divided."""
BUSY = 0.9
"""Share of the time for which the server must be busy to be considered the run's bottleneck."""


def breakdown(record: Record) -> dict[str, Any]:
    """Return the server's time by stage, and the run's bottleneck in one sentence.

    The time counts from the first task; the wait for the last evaluation after the run is left out.

    ``busy`` is the share of the time during which the server did not wait, and ``us_a_trip`` is a stage's
    wall time per completed trip, in microseconds. ``limited_by`` is ``server`` if the server is the
    bottleneck, and otherwise ``phones`` (wall clock), ``training`` (virtual clock) or ``evaluation`` (virtual
    clock, if the server mostly waits for evaluations that can end the run); it is None if nothing was
    recorded.
    """
    seconds = {row.stage: row.seconds for row in record.costs if row.stage not in ("start", "end")}
    total = sum(seconds.values())
    if not total > 0.0:
        return {"busy": None, "limited_by": None, "says": "", "stages": {}}
    work = {stage: spent for stage, spent in seconds.items() if stage not in ("wait", "evaluation")}
    worked = sum(work.values())
    busy = worked / total
    trips = int((record.trips["arrived_s"] >= 0).sum()) or math.nan
    limited = "server" if busy >= BUSY else "phones" if record.meta.clock == "wall" else "training"
    if limited == "training" and seconds.get("evaluation", 0.0) > seconds.get("wait", 0.0):
        limited = "evaluation"
    first = max(work, key=lambda stage: work[stage], default="")
    share = work[first] / worked if worked > 0 else 0.0
    most = f"{WORDS.get(first, first)} takes {share:.0%} of its busy time"
    done = record.meta.aggregation
    if first == "sum" and done.seconds > 0:
        most += f", at {done.bytes / done.seconds / 1e9:.1f} GB/s"
    says = {
        "server": f"The server limits this run: it is busy {busy:.0%} of the time, and {most}.",
        "phones": f"The phones set the pace: the server waits {1 - busy:.0%} of the time; {most}.",
        "training": f"Training limits this run: the server waits {1 - busy:.0%} of the time; {most}.",
        "evaluation": f"Evaluations limit this run: the server waits {1 - busy:.0%} of the time; {most}.",
    }
    stages = {
        stage: {"share": rounded(spent / total), "us_a_trip": rounded(spent / trips * 1e6)}
        for stage, spent in sorted(seconds.items(), key=lambda item: -item[1])
    }
    return {"busy": rounded(busy), "limited_by": limited, "says": says[limited], "stages": stages}
