"""What the claims are read off: each arm's runs, one a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from edgefl import config
from edgefl.results.comparison import reached
from edgefl.results.measures import applied_weight
from edgefl.results.record import Record
from edgefl.results.run_folder import EXPERIMENT_FILE

LAST = 5
"""Evaluations at the end whose mean is the final accuracy: a single one swings by percents."""


class Curves:
    """The records of a study, by arm and seed.

    Accuracies and counts come as one value a seed, in the order of the seeds, so that they can be paired.
    """

    def __init__(self, records: Mapping[str, Sequence[Record]]) -> None:
        self.records = {label: tuple(found) for label, found in records.items()}

    def accuracy(self, label: str) -> list[float]:
        """Final accuracy: the mean over the last evaluations."""
        out = []
        for record in self.records[label]:
            values = [row.accuracy for row in record.evaluations[-LAST:]]
            out.append(float(np.mean(values)) if values else math.nan)
        return out

    def mean_accuracy(self, label: str) -> list[float]:
        """Mean accuracy over all evaluations: who learns sooner has more."""
        return [
            float(np.mean([row.accuracy for row in record.evaluations])) if record.evaluations else math.nan
            for record in self.records[label]
        ]

    def best(self, label: str) -> list[float]:
        """The best accuracy at any evaluation."""
        return [
            max((row.accuracy for row in record.evaluations), default=math.nan)
            for record in self.records[label]
        ]

    def trips_to(self, label: str, target: float) -> list[float]:
        """Client trips until the first evaluation that reached ``target``; NaN where none did."""
        return [reached(record, target)[0] for record in self.records[label]]

    def seconds_to(self, label: str, target: float) -> list[float]:
        """Emulated seconds until the first evaluation that reached ``target``; NaN where none did."""
        return [reached(record, target)[1] for record in self.records[label]]

    def ended_s(self, label: str) -> list[float]:
        """Emulated seconds until the last evaluation; NaN where there is none."""
        return [
            record.evaluations[-1].at_s if record.evaluations else math.nan for record in self.records[label]
        ]

    def ended_trips(self, label: str) -> list[float]:
        """Client trips until the last evaluation; NaN where there is none."""
        return [
            float(record.evaluations[-1].trips) if record.evaluations else math.nan
            for record in self.records[label]
        ]

    def staleness(self, label: str) -> list[float]:
        """Mean staleness of the updates that arrived."""
        out = []
        for record in self.records[label]:
            trips = record.trips
            known = (trips["staleness"] >= 0) & ~np.isnan(trips["arrived_s"])
            out.append(float(trips["staleness"][known].mean()) if known.any() else math.nan)
        return out

    def weights(self, label: str, profile: str) -> list[float]:
        """Mean share of applied weight of a client of ``profile``, times n: 1 is fair."""
        out = []
        for record in self.records[label]:
            share = applied_weight(record)
            mine = [share.get(row.client, 0.0) for row in record.clients if row.profile == profile]
            out.append(float(np.mean(mine)) if mine else math.nan)
        return out

    def target(self, label: str) -> float:
        """The accuracy that the arm's runs were to stop at."""
        (record, *_) = self.records[label]
        target = config.load(record.folder / EXPERIMENT_FILE).stop.accuracy
        assert target is not None, "the settings stop at a target accuracy"
        return target
