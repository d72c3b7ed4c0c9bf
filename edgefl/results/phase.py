"""Test whether phones of one model act at the same times ("in phase"), unlike independent phones.

Two shares are compared with those expected for independent arrivals at the same rates: the share of buffers
whose updates are all from one device profile, and the share of arrivals that are closer to another arrival
than `NEAR` times the mean gap. The expected share and its 99% interval are computed from simulated runs. For
the first share, each simulated run has the real run's arrivals in random order; for the second share, it has
the same number of arrivals at uniformly distributed times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.results.record import Columns
from edgefl.seeds import stream

NEAR = 0.01
"""Two arrivals coincide if they are closer than this fraction of the mean gap between arrivals."""
SIMULATED = 400
AT_ONCE = 100_000
"""Number of updates of simulated runs that are examined at once."""
MOST_UPDATES = 20_000
"""Maximum number of updates to examine, counted from the end of the run."""
LEAST_UPDATES = 20
CONFIDENCE = 0.99


class ObservedShare(NamedTuple):
    """A share of a run's buffers or arrivals, and the share to be expected if phones were independent.

    ``low`` and ``high`` are the ends of the 99% interval of the expected share.
    """

    share: float
    expected: float
    low: float
    high: float

    @property
    def in_phase(self) -> bool:
        """True if the observed share is above the 99% interval for independent phones."""
        return self.share > self.high


class Phase(NamedTuple):
    """Whether a run's phones act in phase. A share is None if there were too few updates to compute it."""

    one_profile: ObservedShare | None
    coincident: ObservedShare | None
    by_design: str = ""
    """Reason why the strategy makes clients act together, which suppresses the warning; otherwise empty."""

    def figures(self) -> dict[str, Any]:
        """Return the results for ``summary.json``."""
        shares = {"one_profile_buffers": self.one_profile, "coincident_arrivals": self.coincident}
        plain = {name: None if one is None else one._asdict() for name, one in shares.items()}
        return {**plain, "by_design": self.by_design, "warning": self.warning}

    @property
    def warning(self) -> str:
        """A warning in one sentence if the phones act in phase; otherwise empty."""
        found = {
            "buffers hold updates of one device profile only": self.one_profile,
            "arrivals coincide with another one": self.coincident,
        }
        parts = [
            f"{one.share:.0%} of the {what} (independent phones: {one.expected:.0%}, 99% interval "
            f"{one.low:.0%} to {one.high:.0%})"
            for what, one in found.items()
            if one is not None and one.in_phase
        ]
        if self.by_design or not parts:
            return ""
        return f"Phones act in phase: {' and '.join(parts)}. Comparisons made with this fleet may not hold."


def phase_of(trips: Columns, profile: npt.NDArray[Any], by_design: str = "") -> Phase:
    """Compare a run's buffers and arrivals with those of independent phones.

    ``trips`` are the trips of a `Record`, and ``profile`` is the device profile of each trip. ``by_design``
    is `Meta.in_phase`; if it is empty but no update was stale, the strategy is assumed to use rounds.
    """
    applied = trips["applied_version"] >= 0
    arrives_s = trips["sent_s"] + trips["trip_declared_s"]
    used = np.flatnonzero(applied & np.isfinite(arrives_s))
    if len(used) < LEAST_UPDATES:
        return Phase(None, None, by_design)
    used = used[np.lexsort((arrives_s[used], trips["applied_version"][used]))][-MOST_UPDATES:]
    _, sizes = np.unique(trips["applied_version"][used], return_counts=True)
    starts = np.cumsum(sizes) - sizes
    profiles, codes = np.unique(profile[used].astype(str), return_inverse=True)
    rng = stream(0, "phase")
    one_profile = None
    if len(profiles) > 1 and (sizes > 1).any():
        share_of = partial(_one_profile, starts=starts, sizes=sizes)
        one_profile = _compared(share_of, codes, lambda: rng.permutation(codes))
    at_s = np.sort(arrives_s[used])
    coincident = _compared(_coincident, at_s, lambda: np.sort(rng.random(len(at_s))))
    if not by_design and not trips["staleness"][used].any():
        by_design = "no update was stale, so the strategy has rounds"
    return Phase(one_profile, coincident, by_design)


def _one_profile(
    codes: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """For each row, return the share of the buffers with several updates that have updates of one profile."""
    most, least = (extreme.reduceat(codes, starts, axis=1) for extreme in (np.maximum, np.minimum))
    shares: npt.NDArray[np.float64] = (most == least)[:, sizes > 1].mean(axis=1)
    return shares


def _coincident(at_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each row of ascending times, return the share of those that have a neighbour within `NEAR` times
    the row's mean gap."""
    gaps = np.diff(at_s)
    near = gaps <= NEAR * gaps.mean(axis=1, keepdims=True)
    either = np.zeros(at_s.shape, dtype=bool)
    either[:, :-1] = near
    either[:, 1:] |= near
    shares: npt.NDArray[np.float64] = either.mean(axis=1)
    return shares


def _compared(
    shares_of: Callable[[npt.NDArray[Any]], npt.NDArray[np.float64]],
    real: npt.NDArray[Any],
    simulate: Callable[[], npt.NDArray[Any]],
) -> ObservedShare:
    """Compare the share of the real run with those of simulated runs; ``shares_of`` takes a run per row."""
    rows, simulated = max(1, AT_ONCE // len(real)), list[float]()
    while len(simulated) < SIMULATED:
        runs = [simulate() for _ in range(min(rows, SIMULATED - len(simulated)))]
        simulated += shares_of(np.stack(runs)).tolist()
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(simulated, (tail, 1.0 - tail)).tolist()
    return ObservedShare(float(shares_of(real[None])[0]), math.fsum(simulated) / SIMULATED, low, high)
