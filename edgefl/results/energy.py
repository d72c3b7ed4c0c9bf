"""The energy that a run's trips drew from the devices' batteries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.devices.energy import PowerDraw
from edgefl.results.record import Record

PARTS = ("idle_j", "compute_j", "download_j", "upload_j")


def transfers_of(record: Record, among: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the row numbers of the trips that downloaded a version, and of those that uploaded an update.

    ``among`` is a mask of the trips that are considered. If the strategy schedules transfers separately
    (DeFedAvg), a client downloads a version once for all trips that begin with it. With
    `Strategy.uploads_on_demand`, only applied updates are uploaded.
    """
    trips, rows = record.trips, np.flatnonzero(among)
    downloads = rows
    if record.meta.apart_s:
        pairs = np.stack([trips["client"][rows], trips["base_version"][rows]])
        downloads = rows[np.unique(pairs, axis=1, return_index=True)[1]]
    return downloads, rows[trips["fate"][rows] == "applied"] if record.meta.uploads_on_demand else rows


def energy_of(record: Record, until_s: float = math.inf, unstated: PowerDraw | None = None) -> dict[str, Any]:
    """Return the energy of the trips that arrived by ``until_s``, per use and profile, with 90% intervals.

    `edgefl.devices.energy` computes the joules from the declared durations of the trips' phases. As in the
    model of the battery, throttled computing is counted at its reduced power, and the time in which a client
    rests after its last step is counted as idle. If the strategy schedules transfers separately (DeFedAvg),
    one download is counted for each version from which a device trained, and one upload for each update or,
    with `Strategy.uploads_on_demand`, for each applied update. If a device's profile does not give its power
    draw, ``unstated`` is used; if that is None, the energy of the device's trips is unknown, and
    ``unknown_trips`` is the number of such trips.

    Idle power is counted only during trips. ``total_j`` is the sum of the four `PARTS`. All phones of a
    profile share the error of the profile's values, so the interval does not become narrower with more
    phones; the errors of different profiles are assumed to be independent.
    """
    trips, fleet, power = record.trips, record.fleet, record.meta.power
    kinds: dict[tuple[str, str], list[int]] = {}
    for client, profile, network in fleet.rows("client", "profile", "network"):
        kinds.setdefault((profile, network), []).append(client)
    arrived = trips["arrived_s"] <= until_s  # False for a trip that did not arrive
    known, unknown = dict[str, dict[str, float]](), 0
    for (profile, network), clients in kinds.items():
        theirs = arrived & np.isin(trips["client"], clients)
        draw = power.get(profile, {}).get(network) or unstated
        if draw is None:
            unknown += int(theirs.sum())
            continue
        columns = ("busy_s", "compute_declared_s", "down_declared_s", "up_declared_s")
        busy_s, compute_s, download_s, upload_s = (
            math.fsum(np.nan_to_num(trips[column][theirs])) for column in columns
        )
        down_s, up_s = record.meta.apart_s.get(profile, {}).get(network, (0.0, 0.0))
        downloads, uploads = transfers_of(record, theirs)
        found = draw.energy(
            compute_s=busy_s,
            idle_s=max(0.0, compute_s - busy_s),
            download_s=download_s + len(downloads) * down_s,
            upload_s=upload_s + len(uploads) * up_s,
            time_factor=record.meta.model_error_factor.get(profile, 1.0),
        )
        values = {**dict(zip(PARTS, found[:4], strict=True)), "low_j": found.low_j, "high_j": found.high_j}
        before = known.setdefault(profile, dict.fromkeys(values, 0.0))
        known[profile] = {name: before[name] + value for name, value in values.items()}
    by_profile = {
        profile: {"total_j": sum(one[part] for part in PARTS), **one} for profile, one in known.items()
    }
    parts = {part: sum(one[part] for one in by_profile.values()) for part in PARTS}
    total_j = sum(parts.values())
    below = math.hypot(*(one["total_j"] - one["low_j"] for one in by_profile.values()))
    above = math.hypot(*(one["high_j"] - one["total_j"] for one in by_profile.values()))
    return {
        "total_j": total_j,
        "low_j": total_j - below,
        "high_j": total_j + above,
        **parts,
        "unknown_trips": unknown,
        "by_profile": by_profile,
    }
