"""FedAsync: the server takes a step for every arriving update (Xie et al. 2019, arXiv:1903.03934)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from edgefl.experiment import NonNegative, Share
from edgefl.strategies.asynchronous import Asynchronous
from edgefl.strategies.base import LocalTerms, Step, View


@dataclass(frozen=True, kw_only=True)
class FedAsync(Asynchronous):
    """w ← (1 − α_τ)·w + α_τ·y_i with α_τ = α·s(τ), where y_i is the client's model.

    As in section 5.2, s(τ) is 1 (``constant``), (1 + τ)^−a (``polynomial``), or 1 for τ ≤ h and
    1/(a·(τ − h) + 1) for τ > h (``hinge``).

    >>> FedAsync(alpha=0.6).mixing(staleness=3)
    0.3
    """

    upload: ClassVar[Literal["delta", "model"]] = "model"

    alpha: Share = 0.6
    """α: mixing weight of a model whose staleness is 0."""
    scaling: Literal["constant", "polynomial", "hinge"] = "polynomial"
    """Form of the staleness discount s(τ)."""
    a: NonNegative | None = None
    """Parameter a of s(τ); by default 0.5 for ``polynomial`` and 10 for ``hinge``, as in the paper."""
    h: NonNegative = 4.0
    """Parameter h of s(τ) for ``hinge``: the maximum staleness that is not discounted."""
    rho: NonNegative = 0.0
    """Weight μ of the proximal term in the client's objective (option II in the paper)."""

    def local_rule(self) -> LocalTerms:
        return LocalTerms(prox_mu=self.rho)

    def mixing(self, staleness: int) -> float:
        """Return α_τ, the mixing weight of a model with this staleness."""
        if self.scaling == "constant":
            return self.alpha
        if self.scaling == "polynomial":
            return self.alpha * math.pow(1.0 + staleness, -(0.5 if self.a is None else self.a))
        late = max(0.0, staleness - self.h)
        return self.alpha / ((10.0 if self.a is None else self.a) * late + 1.0)

    def max_held(self, clients: int) -> int:
        return 1

    def step(self, state: Any, view: View) -> Step | None:
        if not view.held:
            return None
        update = view.held[0]
        share = self.mixing(update.staleness)
        return Step((update,), (share,), base_scale=1.0 - share)
