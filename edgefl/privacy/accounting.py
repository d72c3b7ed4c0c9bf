"""Computes the ε of user-level (ε, δ)-differential privacy from Rényi divergences (Mironov 2017,
arXiv:1702.07476).

Two fleets are neighbours if they differ only in one client, whose updates are zero in one of the fleets. In
both fleets the same clients participate in the same steps, because participation depends on devices and
random draws, but not on the clients' examples. For this reason, failed trips and updates that are not finite
participate as zero updates (`edgefl.core`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgefl.experiment import Privacy
from edgefl.privacy.tree import place

ORDERS = 1.0 + np.geomspace(1e-2, 1e6, 2000)
"""Orders α of the Rényi divergence over which ε is minimised."""
SAMPLED_ORDERS = np.arange(2, 257)
"""Orders α for steps with randomly drawn clients. Their bounds hold for integer orders only."""

SMALLEST_DEVIATION = 1e-100
"""Below this standard deviation, the bounds for randomly drawn clients are not computed, because they would
exceed the bound that ignores the draw."""


def gaussian_rdp(orders: ArrayLike, square: ArrayLike) -> NDArray[np.float64]:
    """Return the Rényi divergence between N(0, 1) and N(shift, 1) for each order α: α·``square``/2, where
    ``square`` is shift².

    See Mironov 2017, corollary 3. The squared shifts of successive steps add up, even if each step depends on
    the results of earlier ones (proposition 1).

    >>> float(gaussian_rdp(8.0, 0.25))
    1.0
    """
    half: NDArray[np.float64] = np.asarray(square, np.float64) / 2.0
    return half * np.asarray(orders, np.float64)


def sampled_rdp(
    orders: Sequence[int] | NDArray[np.int64], rate: float, noise_multiplier: float
) -> NDArray[np.float64]:
    """Return an upper bound on the Rényi divergence of a step whose clients are drawn uniformly without
    replacement.

    This is theorem 9 of Wang, Balle and Kasiviswanathan 2019 (arXiv:1808.00087), for integers α ≥ 2. With
    γ = ``rate``, the share of the fleet that is drawn, the bound is log(1 + γ² C(α,2) min(4(e^ε(2) − 1),
    2e^ε(2)) + 2 Σ_j≥3 γ^j C(α,j) e^((j−1)ε(j))) / (α − 1). In this theorem, neighbours differ in one update
    that is replaced with another. The replacement changes a sum by up to 2L, so ε(j) = 2j/σ².

    >>> full = gaussian_rdp(2, 4 / 5.0**2)
    >>> float(sampled_rdp([2], 0.01, 5.0)[0]) < float(full) / 1000
    True
    """
    divergences = []
    for order in np.asarray(orders).tolist():
        ways = [math.log(math.comb(order, j)) + j * math.log(rate) for j in range(2, order + 1)]
        each = [2.0 * j / noise_multiplier**2 for j in range(2, order + 1)]
        sizes = [math.log(2.0) + (j - 1) * x for j, x in enumerate(each, start=2)]
        sizes[0] = each[0] + min(math.log(2.0), math.log(-4.0 * math.expm1(-each[0])))
        divergences.append(np.logaddexp.reduce([0.0, *np.add(ways, sizes)]) / (order - 1))
    return np.array(divergences)


def poisson_rdp(
    orders: Sequence[int] | NDArray[np.int64], rate: float, noise_multiplier: float
) -> NDArray[np.float64]:
    """Return the Rényi divergence of a step for which each client is drawn independently with probability
    q = ``rate``.

    According to Mironov, Talwar and Zhang 2019 (arXiv:1908.10530), section 3.3, it is
    log(Σ_k C(α,k) (1 − q)^(α−k) q^k e^((k² − k)/(2σ²))) / (α − 1) for integers α ≥ 2.

    >>> 2 * float(poisson_rdp([2], 0.01, 5.0)[0]) < float(sampled_rdp([2], 0.01, 5.0)[0])
    True
    """
    divergences = []
    for order in np.asarray(orders).tolist():
        drawn = [k * math.log(rate) + (order - k) * math.log1p(-rate) for k in range(order + 1)]
        sizes = [
            math.log(math.comb(order, k)) + k * (k - 1) / (2.0 * noise_multiplier**2)
            for k in range(order + 1)
        ]
        divergences.append(np.logaddexp.reduce(np.add(drawn, sizes)) / (order - 1))
    return np.array(divergences)


def epsilon(orders: NDArray[Any], divergence: NDArray[np.float64], delta: float) -> float:
    """Return the smallest ε that holds for ``delta``, given the Rényi ``divergence`` τ(α) at each order α.

    According to Canonne, Kamath and Steinke 2020 (arXiv:2004.00010), proposition 12, each order gives
    ε = τ(α) + log((α − 1)/α) − (log δ + log α)/(α − 1).

    >>> round(epsilon(ORDERS, gaussian_rdp(ORDERS, 1.0), 1e-5), 2)  # 4.38 is exact
    4.73
    """
    bound = divergence + np.log1p(-1.0 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1.0)
    return max(0.0, float(bound.min()))


def local_epsilon(rules: Privacy, trips: int) -> float:
    """Return the ε of (ε, δ)-local differential privacy for all uploads of a client in ``trips`` trips.

    For any two data sets that a client might have, no set of possible uploads is more than e^ε times as
    likely with one data set as with the other, except for a probability of δ. One upload is a Gaussian
    mechanism: clipped updates differ by at most 2L, and the standard deviation of the noise is σL, so the
    shift is μ = 2/σ. The squared shifts of successive trips add up, even though each trip starts from a model
    that depends on earlier uploads (`gaussian_rdp`).

    >>> rules = Privacy(clip_norm=1.0, local_noise_multiplier=20.0, delta=1e-5)
    >>> round(local_epsilon(rules, 1), 2), round(local_epsilon(rules, 100), 2)  # 0.34 and 4.38 are exact
    (0.38, 4.73)
    """
    if not rules.local_noise_multiplier:
        return math.inf
    return epsilon(ORDERS, gaussian_rdp(ORDERS, local_square(rules, trips)), rules.delta) if trips else 0.0


def local_square(rules: Privacy, trips: int) -> float:
    """Return the sum of the squared shifts μ² of a client's uploads in ``trips`` trips (see
    `local_epsilon`)."""
    shift = 2.0 / rules.local_noise_multiplier
    return trips * shift * shift


class PrivacyAccount:
    """Computes the ε that the versions of a run have spent so far.

    A client's entry in ``squares`` is Σ c²/σ² over all noisy releases, where c is the number of the client's
    updates in a release. A release is a step or, with the tree mechanism, a node of the tree that is used
    at least once (with Honaker's estimate, every node). Several updates of a client in one node are assumed
    to be equal, which is the worst case. The result is exact for the tree, and an upper bound with Honaker's
    estimate, because the versions do not reveal each node of a tree. If the clipping norm adapts to a
    quantile, each release of the number of updates within the norm adds c²/(4 σ_b²) (Andrew et al. 2021,
    theorem 1): a zero update is counted as ½ (`Mechanism.clip`), so one update changes the number by at most
    ½.

    If the clients of each step are drawn uniformly from the fleet, `poisson_rdp` or `sampled_rdp` gives a
    second bound, and the lower of the two bounds is used. ``sampling`` then contains the probability that a
    client is drawn, and whether clients are drawn independently of each other. The noise added to the
    number of updates within the norm is proportional to ``expected``, the expected number of updates in a
    step: by default the mean under ``sampling`` or, without sampling, each step's actual number.

    >>> account = PrivacyAccount(Privacy(clip_norm=1.0, noise_multiplier=2.0), clients=3)
    >>> for clients in ([0, 1], [0, 2]): account.version(clients)
    >>> account.squares.tolist(), account.participations.tolist()  # client 0: 1²/σ² + 2²/σ² from two nodes
    ([1.25, 0.5, 0.25], [2, 1, 1])
    >>> round(account.epsilon(), 2)
    6.43
    """

    def __init__(
        self,
        rules: Privacy,
        clients: int,
        sampling: tuple[float, bool] | None = None,
        expected: float | None = None,
    ) -> None:
        self._rules, self._versions = rules, 0
        self._leaves: list[NDArray[np.int64]] = []
        self._step_divergence: NDArray[np.float64] | None = None
        if sampling is not None:
            rate, poisson = sampling
            expected = rate * clients if expected is None else expected
            counted = math.inf if rules.quantile is None else 2.0 * rules.count_deviation(expected)
            if rate < 1.0 and min(rules.noise_multiplier, counted) > SMALLEST_DEVIATION:
                together = (rules.noise_multiplier**-2 + counted**-2) ** -0.5
                bound = poisson_rdp if poisson else sampled_rdp
                self._step_divergence = bound(SAMPLED_ORDERS, rate, together)
        self._expected = expected
        self.squares = np.zeros(clients)
        """Squared shift that each client's updates cause in all releases together, in units of the noise's
        variance."""
        self.participations = np.zeros(clients, np.int64)
        """Number of applied updates of each client."""

    def version(self, clients: Sequence[int] | NDArray[np.int64]) -> None:
        """Record the next version of the model, which was computed from updates of these clients."""
        rules, mine = self._rules, np.asarray(clients, np.int64)
        self._versions += 1
        np.add.at(self.participations, mine, 1)
        _, leaf = place(self._versions, rules.restart_every)
        if leaf == 1:
            self._leaves.clear()
        self._leaves.append(mine)
        top = (leaf & -leaf).bit_length() - 1 if rules.mechanism == "tree" else 0
        for level in range(0 if rules.honaker else top, top + 1):
            self._add(np.concatenate(self._leaves[-(1 << level) :]), rules.noise_multiplier)
        if rules.quantile is not None:
            self._add(mine, 2.0 * rules.count_deviation(self._expected or len(mine)))

    def epsilon(self) -> float:
        """Return the ε spent so far, for the δ in the experiment's privacy settings; infinite if no noise is
        added."""
        return composed([self], self._rules.delta)

    @property
    def worst(self) -> float:
        """Largest entry of ``squares``, which belongs to the client with the least privacy."""
        return float(self.squares.max(initial=0.0))

    def sampled_divergence(self) -> NDArray[np.float64]:
        """Return the Rényi divergence at each of `SAMPLED_ORDERS`: the lower of the bounds with and
        without the sampling of clients."""
        plain = gaussian_rdp(SAMPLED_ORDERS, self.worst)
        if self._step_divergence is None:
            return plain
        return np.minimum(plain, self._versions * self._step_divergence)

    def _add(self, clients: NDArray[np.int64], deviation: float) -> None:
        unique, counts = np.unique(clients, return_counts=True)
        with np.errstate(over="ignore"):  # infinite, if the noise is very small
            self.squares[unique] += (counts / deviation) ** 2 if deviation else math.inf


def composed(accounts: Sequence[PrivacyAccount], delta: float) -> float:
    """Return the ε that several runs with the same clients have spent together; their divergences add up.

    See Mironov 2017, proposition 1. This also holds if the settings of a run depend on the results of earlier
    runs.

    >>> account = PrivacyAccount(Privacy(clip_norm=1.0, noise_multiplier=2.0), clients=1)
    >>> account.version([0])
    >>> round(composed([account], 1e-7), 2), round(composed([account] * 4, 1e-7), 2)
    (2.65, 5.67)
    """
    worst = sum(account.worst for account in accounts)
    if worst in (0.0, math.inf):
        return worst
    drawn = sum(account.sampled_divergence() for account in accounts)
    plain = epsilon(ORDERS, gaussian_rdp(ORDERS, worst), delta)
    return min(plain, epsilon(SAMPLED_ORDERS, np.asarray(drawn), delta))


def delta_warning(rules: Privacy, clients: int) -> str:
    """Return a warning if δ is at least 1/``clients``, which would leave individual clients unprotected;
    otherwise ""."""
    if not (rules.noise_multiplier or rules.local_noise_multiplier) or rules.delta < 1.0 / clients:
        return ""
    return (
        f"privacy.delta = {rules.delta:g} is not below 1/clients = {1.0 / clients:.2g}: "
        "(ε, δ) then permits publishing one client's data"
    )
