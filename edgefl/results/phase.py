"""Test whether phones of one model act at the same times ("in phase"), unlike independent phones.

Two shares are compared with those expected for independent arrivals at the same rates: the share of buffers
whose updates are all from one device profile, and the share of arrivals that are closer to another arrival
than `NEAR` times the mean gap. The expected share and its 99% interval are computed from simulated runs. For
the first share, each simulated run has the real run's arrivals in random order; for the second share, it has
the same number of arrivals at uniformly distributed times.

A share may also be above its interval because some clients are present for only a part of the run. A share
above its interval is therefore compared again, with simulated runs in which each update arrives earlier or
later by a random time, which is at most the duration of its trip, but not before the first real arrival or
after the last. In these runs, nearly the same clients are present at each time, but they do not act in phase.
If the share is also above the interval of these runs, the phones act in phase, and the first comparison is
reported; otherwise, the second is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.results.record import Columns
from edgefl.seeds import stream

NEAR = 0.01
"""Two arrivals coincide if they are closer than this fraction of the mean gap between arrivals."""
SIMULATED = 400
MAX_SIMULATED_UPDATES = 1 << 16
"""Maximum number of updates in the runs that are simulated at once."""
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
            _one_profile(codes[None], starts, sizes),
            _simulated(
                len(codes),
                lambda runs: _one_profile(
                    np.stack([rng.permutation(codes) for _ in range(runs)]), starts, sizes
                ),
            ),
        )
    at_s, trip_s = arrives_s[used], trips["trip_declared_s"][used]
    uniform = _simulated(len(at_s), lambda runs: _coincident(np.sort(rng.random((runs, len(at_s))))))
    coincident = _compared(_coincident(np.sort(at_s)[None]), uniform)
    if not by_design and not trips["staleness"][used].any():
        by_design = "no update was stale, so the strategy has rounds"
    if by_design:
        return Phase(one_profile, coincident, by_design)

    # Outside this span, only updates of phones with long trips would arrive. These updates would increase the
    # mean gap and fill buffers of their own, so the simulated phones would seem to be in phase.
    first_s, span_s = at_s.min(), np.ptp(at_s) or 1.0

    def shifted_s(runs: int) -> npt.NDArray[np.float64]:
        """Return simulated arrival times, reflected at the first and at the last real arrival."""
        since_s = at_s - first_s + trip_s * rng.uniform(-1.0, 1.0, (runs, len(at_s)))
        reflected_s: npt.NDArray[np.float64] = span_s - np.abs(span_s - since_s % (2.0 * span_s))
        return reflected_s

    if one_profile is not None and one_profile.in_phase:
        shares = _simulated(
            len(at_s), lambda runs: _one_profile(codes[np.argsort(shifted_s(runs))], starts, sizes)
        )
        one_profile = _unless_in_phase(_compared([one_profile.share], shares), one_profile)
    if coincident.in_phase:
        shares = _simulated(len(at_s), lambda runs: _coincident(np.sort(shifted_s(runs))))
        coincident = _unless_in_phase(_compared([coincident.share], shares), coincident)
    return Phase(one_profile, coincident)


def _simulated(updates: int, shares: Callable[[int], list[float]]) -> list[float]:
    """Return the shares of `SIMULATED` runs; ``shares`` simulates a number of runs that fits in memory."""
    at_once = max(1, MAX_SIMULATED_UPDATES // updates)
    return [share for k in range(0, SIMULATED, at_once) for share in shares(min(at_once, SIMULATED - k))]


def _one_profile(
    codes: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> list[float]:
    """Return each run's share of single-profile buffers among the buffers with several updates.

    ``codes`` has a row per run: the device profile of each update, as a number.
    """
    same = np.maximum.reduceat(codes, starts, axis=1) == np.minimum.reduceat(codes, starts, axis=1)
    shares: list[float] = same[:, sizes > 1].mean(axis=1).tolist()
    return shares


def _coincident(at_s: npt.NDArray[np.float64]) -> list[float]:
    """Return each run's share of times that have a neighbour within `NEAR` times the mean gap.

    ``at_s`` has a row per run: times in ascending order.
    """
    gaps = np.diff(at_s)
    near = np.zeros((len(at_s), at_s.shape[1] + 1), np.bool_)
    near[:, 1:-1] = gaps <= NEAR * gaps.mean(axis=1, keepdims=True)
    shares: list[float] = (near[:, 1:] | near[:, :-1]).mean(axis=1).tolist()
    return shares


def _unless_in_phase(found: ObservedShare, otherwise: ObservedShare) -> ObservedShare:
    """Return ``found``, or ``otherwise`` if ``found`` is also above its interval."""
    return otherwise if found.in_phase else found


def _compared(observed: list[float], simulated: Sequence[float]) -> ObservedShare:
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(simulated, (tail, 1.0 - tail)).tolist()
    return ObservedShare(observed[0], math.fsum(simulated) / len(simulated), low, high)
