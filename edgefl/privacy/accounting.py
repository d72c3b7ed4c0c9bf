"""What a private run has spent, by the accountant of `dp-accounting`."""

from __future__ import annotations

from edgefl.errors import ConfigError

DELTA = 1e-7
"""FedBuff's δ (Nguyen et al. 2022, section 6)."""


def epsilon(noise_multiplier: float, versions: int, participations: int = 1, delta: float = DELTA) -> float:
    """The ε of (ε, δ) user-level differential privacy after ``versions`` steps with DP-FTRL's tree.

    ``participations`` is the most updates that any one client had applied. Together they change the tree by
    at most so many times what one does, so the noise counts as that much smaller: an upper bound, and a
    loose one for many. Two data sets are neighbours if one client's updates are zero in one of them.

    Raises `ConfigError` where `dp-accounting` is not installed, ValueError for a value out of its range.
    """
    if not (noise_multiplier > 0 and versions >= 1 and participations >= 1 and 0 < delta < 1):
        raise ValueError(
            "noise_multiplier must be above 0, versions and participations at least 1, delta between 0 and 1 "
            f"(got {noise_multiplier}, {versions}, {participations}, {delta})"
        )
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise ConfigError("accounting needs dp-accounting: pip install 'edgefl[privacy]'") from None
    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(
        dp_accounting.SingleEpochTreeAggregationDpEvent(noise_multiplier / participations, versions)
    )
    return float(accountant.get_epsilon(delta))
