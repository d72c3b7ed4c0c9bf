"""The one place where a run record's figures are handed to the emulation's judgement of itself."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from edgefl.emulation.fidelity import QUANTITIES, assess
from edgefl.record import Record
from edgefl.report.measures import profile_of_trips, rounded

_COLUMNS = {
    "compute": ("compute_declared_s", "compute_s"),
    "down": ("down_declared_s", "down_s"),
    "up": ("up_declared_s", "up_s"),
    "trip": ("trip_declared_s", "trip_achieved_s"),
}
# computed time has no clock to blur it: any length can be judged
_EXACT_SCALE = 1e9


def fidelity_of(record: Record) -> dict[str, Any]:
    """How far the trips' achieved times were from the declared ones, and whether the run may be believed.

    The fields of `edgefl.emulation.fidelity.Fidelity`; reasons of ``Meta.invalid`` count too. Judged are the
    trips that reported their times; ``unmeasured`` counts the others that ended. Under the virtual clock
    times are computed, so the host's load and steal do not matter.
    """
    trips, meta = record.trips, record.meta
    virtual = meta.clock == "virtual"
    ended = ~np.isnan(trips["arrived_s"])
    reported = ended & ~np.isnan(trips["trip_achieved_s"]) & ~np.isnan(trips["trip_declared_s"])
    late = trips["lateness_s"][reported]
    found = assess(
        profile_of_trips(record)[reported].tolist(),
        {quantity: trips[_COLUMNS[quantity][0]][reported] for quantity in QUANTITIES},
        {quantity: trips[_COLUMNS[quantity][1]][reported] for quantity in QUANTITIES},
        time_scale=_EXACT_SCALE if virtual else meta.time_scale,
        lateness_s=late[~np.isnan(late)],
        load=None if virtual else meta.load,
        steal=None if virtual else meta.steal,
    )
    reasons = [*found.reasons, *meta.invalid]
    fields = _plain(msgspec.to_builtins(found))
    return {**fields, "valid": not reasons, "reasons": reasons, "unmeasured": int((ended & ~reported).sum())}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return rounded(value) if isinstance(value, float) else value
