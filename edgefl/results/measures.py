"""Figures that reports share: weight by client, medians by profile, accuracy on some clients' classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgefl.results.record import EvaluationRow, Record


class Group(NamedTuple):
    """A part of the fleet."""

    profiles: tuple[str, ...]
    clients: tuple[int, ...]
    labels: tuple[int, ...]


def rounded(value: float | np.floating[Any] | None, digits: int = 6) -> float | None:
    """A figure for JSON: None if it is missing or not finite, without noise digits otherwise.

    >>> rounded(0.1 + 0.2), rounded(float("nan"))
    (0.3, None)
    """
    return None if value is None or not np.isfinite(value) else float(f"{value:.{digits}g}")


def spread(values: NDArray[Any]) -> dict[str, Any]:
    """Mean, median, 95th percentile and maximum; zeros for no values.

    >>> spread(np.array([0, 1, 1, 2]))
    {'mean': 1.0, 'median': 1.0, 'p95': 1.85, 'max': 2}
    """
    if not len(values):
        return {"mean": 0.0, "median": 0.0, "p95": 0.0, "max": 0}
    return {
        "mean": rounded(float(values.mean())),
        "median": rounded(float(np.median(values))),
        "p95": rounded(float(np.percentile(values, 95))),
        "max": values.max().item(),
    }


def profiles_by_speed(record: Record) -> list[str]:
    """The fleet's profiles, slowest first.

    By declared rate of training; profiles without one, or with the same, by the median declared time of
    their trips (longest first), then by name.
    """
    trip_s = by_profile(record, record.trips["trip_declared_s"])
    rate: dict[str, float] = {}
    for row in record.clients:
        rate[row.profile] = row.train_gflops or 0.0

    def key(profile: str) -> tuple[float, float, str]:
        seconds = trip_s.get(profile, float("nan"))
        return rate[profile], -seconds if np.isfinite(seconds) else 0.0, profile

    return sorted(rate, key=key)


def labels_by_profile(record: Record) -> dict[str, set[int]]:
    """The classes that a profile's clients hold, slowest profile first."""
    held: dict[str, set[int]] = {profile: set() for profile in profiles_by_speed(record)}
    for row in record.clients:
        held[row.profile].update(row.labels)
    return held


def slow_group(record: Record) -> Group:
    """The clients of the slowest profiles, and the classes that only they hold.

    With profiles ordered from slow to fast, the smallest number k ≥ 1 of slowest profiles such that some
    class is held by a client of those and by no client of a faster profile. Where there is none (one
    profile, or every class also on a fast client) the group is the slowest profile and has no classes.
    """
    held = labels_by_profile(record)
    order = list(held)
    chosen: tuple[str, ...] = tuple(order[:1])
    only: set[int] = set()
    for k in range(1, len(order)):
        slow = set().union(*(held[p] for p in order[:k]))
        fast = set().union(*(held[p] for p in order[k:]))
        if slow - fast:
            chosen, only = tuple(order[:k]), slow - fast
            break
    clients = tuple(row.client for row in record.clients if row.profile in chosen)
    return Group(chosen, clients, tuple(sorted(only)))


def profile_of_trips(record: Record) -> NDArray[Any]:
    """Each trip's profile, by task; "" for a client that the record does not know."""
    names = {row.client: row.profile for row in record.clients}
    return np.array([names.get(client, "") for client in record.trips["client"].tolist()], dtype=object)


def by_profile(
    record: Record, values: NDArray[np.float64], reduce: Callable[..., Any] = np.median
) -> dict[str, float]:
    """Median (or what ``reduce`` makes) of each profile's trips, missing values left out."""
    profile, known = profile_of_trips(record), np.isfinite(values)
    return {
        name: float(reduce(values[chosen]))
        for name in sorted(set(profile.tolist()))
        if (chosen := known & (profile == name)).any()
    }


def applied_weight(record: Record) -> dict[int, float]:
    """Each client's share of all applied weight, times the number of clients: 1 is fair.

    FedStaleWeight's fairness (Ma 2024, eq. 3) asks for 1/n each. Empty if nothing was applied.
    """
    clients = [row.client for row in record.clients] or sorted(set(record.trips["client"].tolist()))
    weight, owner = record.trips["weight"], record.trips["client"]
    used = np.isfinite(weight)
    total = float(weight[used].sum())
    if not clients or not total > 0.0:
        return {}
    size = max(*clients, int(owner.max(initial=0)), 0) + 1
    sums = np.bincount(owner[used], weights=weight[used], minlength=size)
    return {client: float(sums[client]) * len(clients) / total for client in clients}


def jain(values: Iterable[float]) -> float:
    """Jain's fairness index (Σx)² / (n·Σx²): 1 if all are equal, 1/n if one has everything.

    >>> jain([1.0, 1.0]), jain([2.0, 0.0])
    (1.0, 0.5)
    """
    x = np.fromiter(values, dtype=np.float64)
    squares = float((x * x).sum())
    return float(x.sum()) ** 2 / (x.size * squares) if squares > 0.0 else float("nan")


def class_accuracy(row: EvaluationRow) -> NDArray[np.float64]:
    """Share of right answers in each class; NaN for a class without test examples."""
    correct, total = np.array(row.correct, dtype=np.float64), np.array(row.total, dtype=np.float64)
    share: NDArray[np.float64] = np.full(total.shape, np.nan)
    np.divide(correct, total, out=share, where=total > 0)
    return share


def label_accuracy(row: EvaluationRow, labels: Iterable[int]) -> float:
    """Share of right answers over the test examples of ``labels`` together; NaN if there are none."""
    known = [label for label in labels if 0 <= label < len(row.total)]
    total = sum(row.total[label] for label in known)
    return sum(row.correct[label] for label in known) / total if total else float("nan")


def phases(
    sent_s: float, received_s: float, compute_s: float, arrived_s: float
) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    """Start and end of a trip's download, training and upload; what is not known has no length.

    >>> phases(0.0, 1.0, 2.0, 4.0)
    ((0.0, 1.0), (1.0, 3.0), (3.0, 4.0))
    >>> phases(0.0, float("nan"), float("nan"), 4.0)
    ((0.0, 0.0), (0.0, 4.0), (4.0, 4.0))
    """
    end = (
        arrived_s
        if arrived_s == arrived_s
        else max(sent_s, received_s if received_s == received_s else sent_s)
    )
    down = min(received_s, end) if received_s == received_s else sent_s
    trained = min(down + compute_s, end) if compute_s == compute_s else end
    return (sent_s, down), (down, trained), (trained, end)
