"""FedProx: FedAvg with a proximal term on the client (Li et al. 2020, MLSys, arXiv:1812.06127)."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.experiment import NonNegative
from edgefl.strategies.base import LocalTerms
from edgefl.strategies.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg whose clients minimise F_i(y) + (μ/2)·‖y − w_k‖²: μ·(y_q − w_k) is added to the gradient.

    >>> FedProx(mu=0.1).local_rule().prox_mu
    0.1
    """

    mu: NonNegative = 0.01
    """μ: weight of the proximal term."""

    def local_rule(self) -> LocalTerms:
        return LocalTerms(prox_mu=self.mu)
