"""The one place where a run record's figures are handed to the emulation's judgement of itself."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from edgefl.limits.fidelity import QUANTITIES, Conditions, Seconds, assess
from edgefl.results.measures import profile_of_trips, rounded
from edgefl.results.record import Record
from edgefl.results.rows import Meta

_COLUMNS = {
    "compute": ("compute_declared_s", "compute_s"),
    "down": ("down_declared_s", "down_s"),
    "up": ("up_declared_s", "up_s"),
    "delay": ("delay_declared_s", "delay_s"),
    "trip": ("trip_declared_s", "trip_achieved_s"),
}
_LONG_TRAINING_S = 0.01
"""CPU time of a trip's training; in less, what lies between steps would be seen instead."""
# computed time has no clock to blur it: any length can be judged
_EXACT_SCALE = 1e9


def fidelity_of(record: Record) -> dict[str, Any]:
    """How far the trips' achieved times were from the declared ones, and whether the run may be believed.

    The fields of `edgefl.limits.fidelity.Fidelity`; reasons of ``Meta.invalid`` count too. Judged are the
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
    reasons = [*found.reasons, *meta.invalid]
    fields = _plain(msgspec.to_builtins(found))
    return {
        **{key: value for key, value in fields.items() if key != "conditions"},
        **fields["conditions"],
        "throttle": meta.throttle,
        "valid": not reasons,
        "reasons": reasons,
        "unmeasured": int((ended & ~reported).sum()),
    }


def _conditions(meta: Meta, step_cost: float | None) -> Conditions:
    return Conditions(
        load=meta.load,
        used=meta.used,
        others=meta.others,
        steal=meta.steal,
        throttled=meta.throttled,
        step_cost=step_cost,
    )


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
