"""Group a run's clients by profile, speed and classes, and compute their applied weight and accuracy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgefl.results.record import Record
from edgefl.results.rows import EvaluationRow

BY_CHANCE = ("dirichlet", "iid", "natural", "shards")
"""Partitions with which the seed decides which classes a profile's clients hold. The same applies to Flower's
partitions (``flwr:…``)."""


class Group(NamedTuple):
    """A group of profiles, their clients, and the classes that only these clients hold."""

    profiles: tuple[str, ...]
    clients: NDArray[np.int64]
    labels: tuple[int, ...]


class Shares(NamedTuple):
    """Client ids in ascending order, and each client's applied weight relative to the fair share."""

    clients: NDArray[np.int64]
    shares: NDArray[np.float64]


def profiles_by_speed(record: Record, *others: Record) -> list[str]:
    """Return the profiles of the runs' fleets in order of the declared time of a whole trip, slowest first.

    If several runs have a profile, the first of them determines its time. A record from a version before
    1.0.0 has no such times. Its profiles are ordered by the median declared time of their trips instead. The
    training time of each trip is scaled to the median number of steps over all trips, so that the order does
    not depend on how the examples are split. Profiles without a completed trip come first.
    """
    known = dict[str, tuple[float, float, str]]()
    for each in (record, *others):
        known = {**_ranks(each), **known}
    return sorted(known, key=known.__getitem__)


def _ranks(record: Record) -> dict[str, tuple[float, float, str]]:
    """Return the sort key of each profile of the run's fleet: see `profiles_by_speed`."""
    trips, fleet, trip_s = record.trips, record.fleet, record.meta.trip_s
    names: dict[str, None] = dict.fromkeys(fleet["profile"].tolist())
    of_each = np.nan_to_num(fleet["step_s"])
    step_s = {name: float(np.median(of_each[fleet["profile"] == name])) for name in names}
    if not trip_s:
        steps, compute_s = trips["steps"], np.nan_to_num(trips["compute_declared_s"])
        equal = np.median(steps) / np.maximum(steps, 1) if steps.any() else 1.0
        trip_s = by_profile(record, trips["trip_declared_s"] + compute_s * (equal - 1.0))
    return {name: (-trip_s.get(name, math.inf), -step_s[name], name) for name in names}


def labels_by_profile(record: Record) -> dict[str, set[int]]:
    """Return, for each profile, the classes that its clients hold, with the slowest profile first."""
    held: dict[str, set[int]] = {profile: set() for profile in profiles_by_speed(record)}
    for profile, labels in record.select("SELECT DISTINCT profile, labels FROM clients"):
        held[profile].update(json.loads(labels))
    return held


def slow_group(record: Record, *others: Record) -> Group:
    """Return the slowest profiles, their clients, and the classes that no faster profile holds in any run.

    The group is the smallest set of slowest profiles with a class that no faster profile holds. If there is
    no such set, or if the seed decides the classes (`BY_CHANCE`), the group is the slowest profile alone.
    """
    order = profiles_by_speed(record, *others)
    held: dict[str, set[int]] = {name: set() for name in order}
    for each in (record, *others):
        for name, labels in labels_by_profile(each).items():
            held[name] |= labels
    chosen, only = order[:1], set[int]()
    for k in range(1, len(order)):
        slow, fast = (set().union(*(held[p] for p in part)) for part in (order[:k], order[k:]))
        if slow - fast:
            chosen, only = order[:k], slow - fast
            break
        if record.meta.partition in BY_CHANCE or record.meta.partition.startswith("flwr:"):
            break
    profile = record.fleet["profile"]
    theirs = np.logical_or.reduce([profile == name for name in chosen]) if chosen else slice(0)
    return Group(tuple(chosen), record.fleet["client"][theirs], tuple(sorted(only)))


def profile_of(record: Record, clients: NDArray[np.int64]) -> NDArray[Any]:
    """Return the profile of each client; "" for a client that is not in the record."""
    known, profile = record.fleet["client"], record.fleet["profile"]
    found = np.full(len(clients), "", dtype=object)
    place = np.searchsorted(known, clients)
    there = place < len(known)
    there[there] = known[place[there]] == clients[there]
    found[there] = profile[place[there]]
    return found


def profile_of_trips(record: Record) -> NDArray[Any]:
    """Return the profile of each trip, ordered by task; "" for a client that is not in the record."""
    return profile_of(record, record.trips["client"])


def applied_profiles(record: Record) -> set[str]:
    """Return the profiles with at least one applied update; the others have no staleness."""
    return {*profile_of_trips(record)[record.trips["uses"] > 0].tolist()}


def by_profile(record: Record, values: NDArray[np.float64]) -> dict[str, float]:
    """Return the median of ``values``, one per trip, for each profile. Missing values are ignored."""
    profile, known = profile_of_trips(record), np.isfinite(values)
    return {
        name: float(np.median(values[chosen]))
        for name in sorted(set(profile.tolist()))
        if (chosen := known & (profile == name)).any()
    }


def applied_weight(record: Record) -> Shares:
    """Return each client's share of the total applied weight, multiplied by the number of clients.

    A value of 1 is fair according to the definition of FedStaleWeight (Ma 2024, eq. 3). The result is empty
    if no weight was applied.
    """
    weight, owner = record.trips["weight"], record.trips["client"]
    clients = record.fleet["client"] if len(record.fleet["client"]) else np.unique(owner)
    used = np.isfinite(weight)
    total = float(weight[used].sum())
    if not len(clients) or not total > 0.0:
        return Shares(clients[:0], np.empty(0))
    size = max(int(clients[-1]), int(owner.max(initial=0))) + 1
    sums = np.bincount(owner[used], weights=weight[used], minlength=size)
    return Shares(clients, sums[clients] * len(clients) / total)


def jain(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return Jain's fairness index (Σx)² / (n·Σx²): 1 if all x are equal, 1/n if all but one are 0.

    >>> jain([1.0, 1.0]), jain([2.0, 0.0])
    (1.0, 0.5)
    """
    x = np.asarray(values, dtype=np.float64)
    squares = float((x * x).sum())
    return float(x.sum()) ** 2 / (x.size * squares) if squares > 0.0 else float("nan")


def class_accuracy(row: EvaluationRow) -> NDArray[np.float64]:
    """Return the accuracy in each class; NaN for a class without test examples."""
    correct, total = (np.array(counts, dtype=np.float64) for counts in (row.correct, row.total))
    share: NDArray[np.float64] = np.full(total.shape, np.nan)
    return np.divide(correct, total, out=share, where=total > 0)


def label_accuracy(row: EvaluationRow, labels: Iterable[int]) -> float:
    """Return the accuracy over all test examples of the classes ``labels``; NaN if there are none."""
    known = [label for label in labels if 0 <= label < len(row.total)]
    total = sum(row.total[label] for label in known)
    return sum(row.correct[label] for label in known) / total if total else float("nan")


def accuracy_by_client(record: Record) -> tuple[dict[int, float], str]:
    """Return the last evaluated model's accuracy for each client, and a description of the examples used."""
    row = next((row for row in reversed(record.evaluations) if row.client_accuracy), None)
    if row is not None:
        return dict(zip(row.clients, row.client_accuracy, strict=True)), "their own held-out examples"
    if not record.evaluations:
        return {}, ""
    held = record.select("SELECT client, labels FROM clients")
    found = {client: label_accuracy(record.evaluations[-1], json.loads(labels)) for client, labels in held}
    return {client: value for client, value in found.items() if np.isfinite(value)}, "their classes"
