"""The ε of (ε, δ) user-level differential privacy, in Rényi's divergence (Mironov 2017, arXiv:1702.07476).

Two fleets are neighbours if one client's updates are zero in one of them. Who takes part when is the same in
both: it depends on devices and draws, not on examples. A trip that fails, and an update that is not finite,
therefore take part as an update of zero (`edgefl.core`).
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
"""Orders α of the divergence, over which the least ε is taken."""
SAMPLED_ORDERS = np.arange(2, 257)
"""Those of sampled steps, whose bound is for whole numbers."""


def gaussian_rdp(orders: ArrayLike, square: ArrayLike) -> NDArray[np.float64]:
    """The divergence of order α of noise N(0, 1) and the same shifted: α·``square``/2, of the squared shift.

    Mironov 2017, corollary 3. The squared shifts of steps that are made one after the other, each by what was
    seen before, add up (proposition 1).

    >>> float(gaussian_rdp(8.0, 0.25))
    1.0
    """
    half: NDArray[np.float64] = np.asarray(square, np.float64) / 2.0
    return half * np.asarray(orders, np.float64)


def sampled_rdp(
    orders: Sequence[int] | NDArray[np.int64], rate: float, noise_multiplier: float
) -> NDArray[np.float64]:
    """A bound on the divergence of a step over a cohort drawn uniformly without replacement.

    Wang, Balle and Kasiviswanathan 2019 (arXiv:1808.00087), theorem 9: for whole α ≥ 2 and the share γ =
    ``rate`` that is drawn, log(1 + γ² C(α,2) min(4(e^ε(2) − 1), 2e^ε(2)) + 2 Σ_j≥3 γ^j C(α,j) e^((j−1)ε(j)))
    over α − 1. It holds where one update is replaced by another, which moves a sum by 2L: ε(j) = 2j/σ².

    >>> full = gaussian_rdp(2, 4 / 5.0**2)
    >>> float(sampled_rdp([2], 0.01, 5.0)[0]) < float(full) / 1000
    True
    """
    found = []
    for order in np.asarray(orders).tolist():
        ways = [math.log(math.comb(order, j)) + j * math.log(rate) for j in range(2, order + 1)]
        each = [2.0 * j / noise_multiplier**2 for j in range(2, order + 1)]
        sizes = [math.log(2.0) + (j - 1) * x for j, x in enumerate(each, start=2)]
        sizes[0] = each[0] + min(math.log(2.0), math.log(-4.0 * math.expm1(-each[0])))
        found.append(np.logaddexp.reduce([0.0, *np.add(ways, sizes)]) / (order - 1))
    return np.array(found)


def poisson_rdp(
    orders: Sequence[int] | NDArray[np.int64], rate: float, noise_multiplier: float
) -> NDArray[np.float64]:
    """The divergence of a step for which each client is drawn by itself, with the chance q = ``rate``.

    Mironov, Talwar and Zhang 2019 (arXiv:1908.10530), section 3.3, for whole α ≥ 2:
    log(Σ_k C(α,k) (1 − q)^(α−k) q^k e^((k² − k)/(2σ²))) over α − 1.

    >>> 2 * float(poisson_rdp([2], 0.01, 5.0)[0]) < float(sampled_rdp([2], 0.01, 5.0)[0])
    True
    """
    found = []
    for order in np.asarray(orders).tolist():
        drawn = [k * math.log(rate) + (order - k) * math.log1p(-rate) for k in range(order + 1)]
        sizes = [
            math.log(math.comb(order, k)) + k * (k - 1) / (2.0 * noise_multiplier**2)
            for k in range(order + 1)
        ]
        found.append(np.logaddexp.reduce(np.add(drawn, sizes)) / (order - 1))
    return np.array(found)


def epsilon(orders: NDArray[Any], divergence: NDArray[np.float64], delta: float) -> float:
    """The least ε that the ``divergence`` of these orders gives with ``delta``.

    Canonne, Kamath and Steinke 2020 (arXiv:2004.00010), proposition 12:
    ε = τ(α) + log((α − 1)/α) − (log δ + log α)/(α − 1).

    >>> round(epsilon(ORDERS, gaussian_rdp(ORDERS, 1.0), 1e-5), 2)  # 4.38 is exact
    4.73
    """
    bound = divergence + np.log1p(-1.0 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1.0)
    return max(0.0, float(bound.min()))


class PrivacyAccount:
    """The ε that the versions of a run have spent.

    A client's ``squares`` are Σ c²/σ² over all that is released with noise, c the number of its updates in
    it: the nodes of the tree that are ever used (with Honaker's estimate all of them), or the steps. Its
    updates in one node count as if they were all alike. This is exact for the tree, and an upper bound with
    Honaker's estimate, because the versions do not reveal each node of a tree. Each count for a quantile adds
    c²/(4 σ_b²) (Andrew et al. 2021, theorem 1), since an update of zero counts ½ (`Mechanism.clip`).

    If each step's cohort is drawn uniformly from all clients (``sampling``: each client's probability, and
    whether clients are drawn independently), `poisson_rdp` or `sampled_rdp` gives a second bound, and the
    lower one is used. The noise of a count is scaled to the ``expected`` number of updates in a step, not the
    actual number: by default the mean of ``sampling``, else each step's own number.

    >>> account = PrivacyAccount(Privacy(clip_norm=1.0, noise_multiplier=2.0), clients=3)
    >>> for clients in ([0, 1], [0, 2]): account.version(clients)
    >>> account.squares.tolist(), account.participations.tolist()  # client 0: nodes of one leaf, and of both
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
        self._of_a_step: NDArray[np.float64] | None = None
        if sampling is not None:
            rate, poisson = sampling
            expected = rate * clients if expected is None else expected
            if rules.noise_multiplier and rate < 1.0:
                counted = 0.0 if rules.quantile is None else (2.0 * rules.count_deviation(expected)) ** -2
                together = (rules.noise_multiplier**-2 + counted) ** -0.5
                self._of_a_step = (poisson_rdp if poisson else sampled_rdp)(SAMPLED_ORDERS, rate, together)
        self._expected = expected
        self.squares = np.zeros(clients)
        """By client: the squared shift that all its updates make, in deviations of the noise."""
        self.participations = np.zeros(clients, np.int64)
        """By client: its updates that were applied."""

    def version(self, clients: Sequence[int] | NDArray[np.int64]) -> None:
        """The next version was made with updates of these clients."""
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
        """The ε until now, with the δ of the rules; infinite without noise."""
        return composed([self], self._rules.delta)

    @property
    def worst(self) -> float:
        """The largest of ``squares``."""
        return float(self.squares.max(initial=0.0))

    def sampled_divergence(self) -> NDArray[np.float64]:
        """The divergence at `SAMPLED_ORDERS`, the lower one of both bounds."""
        plain = gaussian_rdp(SAMPLED_ORDERS, self.worst)
        return plain if self._of_a_step is None else np.minimum(plain, self._versions * self._of_a_step)

    def _add(self, clients: NDArray[np.int64], deviation: float) -> None:
        who, often = np.unique(clients, return_counts=True)
        self.squares[who] += (often / deviation) ** 2 if deviation else math.inf


def composed(accounts: Sequence[PrivacyAccount], delta: float) -> float:
    """The ε that these runs have spent together on the same clients: their divergences add up.

    Mironov 2017, proposition 1, also where a run's settings were chosen by the results of those before it.

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


def caution(rules: Privacy, clients: int) -> str:
    """A warning about a δ that protects nobody in a fleet of so many clients; "" for one that is below."""
    if not rules.noise_multiplier or rules.delta < 1.0 / clients:
        return ""
    return (
        f"privacy.delta = {rules.delta:g} is not below 1/clients = {1.0 / clients:.2g}: "
        "(ε, δ) then permits the data of one client to be published"
    )
