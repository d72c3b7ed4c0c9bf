"""Test whether phones of one model act at the same times ("in phase"), unlike independent phones.

Two shares are compared with those expected for independent arrivals at the same rates: the share of buffers
whose updates are all from one device profile, and the share of arrivals that are closer to another arrival
than `NEAR` times the mean gap. The expected share and its 99% interval are computed from simulated runs. For
the first share, each simulated run has the real run's arrivals in random order; for the second share, it has
the same number of arrivals at uniformly distributed times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.results.record import Columns
from edgefl.seeds import stream

NEAR = 0.01
"""Two arrivals coincide if they are closer than this fraction of the mean gap between arrivals."""
SIMULATED = 400
MAX_UPDATES = 20_000
"""Maximum number of updates to examine, counted from the end of the run."""
MIN_UPDATES = 20
CONFIDENCE = 0.99


class ObservedShare(NamedTuple):
    """A share of a run's buffers or arrivals, and the share expected if phones were independent.

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
    """Result of the test for phones in phase. A share is None if there were too few updates to compute it."""

    one_profile: ObservedShare | None
    coincident: ObservedShare | None
    by_design: str = ""
    """Reason why clients are meant to act together, which suppresses the warning; otherwise empty."""

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
    is the reason why clients are meant to act together (`Meta.in_phase`). If it is empty but no update
    was stale, the strategy is assumed to train in rounds.
    """
    applied = trips["applied_version"] >= 0
    arrives_s = trips["sent_s"] + trips["trip_declared_s"]
    used = np.flatnonzero(applied & np.isfinite(arrives_s))
    if len(used) < MIN_UPDATES:
        return Phase(None, None, by_design)
    used = used[np.lexsort((arrives_s[used], trips["applied_version"][used]))][-MAX_UPDATES:]
    _, sizes = np.unique(trips["applied_version"][used], return_counts=True)
    starts = np.cumsum(sizes) - sizes
    profiles, codes = np.unique(profile[used].astype(str), return_inverse=True)
    rng = stream(0, "phase")
    one_profile = None
    if len(profiles) > 1 and (sizes > 1).any():
        one_profile = _compared(
            _one_profile(codes, starts, sizes),
            [_one_profile(rng.permutation(codes), starts, sizes) for _ in range(SIMULATED)],
        )
    at_s = np.sort(arrives_s[used])
    uniform = (np.sort(rng.random(len(at_s))) for _ in range(SIMULATED))
    coincident = _compared(_coincident(at_s), [_coincident(one) for one in uniform])
    if not by_design and not trips["staleness"][used].any():
        by_design = "no update was stale, so the strategy has rounds"
    return Phase(one_profile, coincident, by_design)


def _one_profile(
    codes: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> float:
    """Return the share of single-profile buffers among the buffers with several updates."""
    same = np.maximum.reduceat(codes, starts) == np.minimum.reduceat(codes, starts)
    return float(np.mean(same[sizes > 1]))


def _coincident(at_s: npt.NDArray[np.float64]) -> float:
    """Return the share of times that have a neighbour within `NEAR` times the mean gap.

    The times are in ascending order.
    """
    gaps = np.diff(at_s)
    near = gaps <= NEAR * float(gaps.mean())
    return float(np.mean(np.append(near, False) | np.insert(near, 0, False)))


def _compared(share: float, simulated: Sequence[float]) -> ObservedShare:
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(simulated, (tail, 1.0 - tail)).tolist()
    return ObservedShare(share, math.fsum(simulated) / len(simulated), low, high)
