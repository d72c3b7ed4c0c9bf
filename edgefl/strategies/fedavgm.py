"""FedAvgM: FedAvg with server momentum (Hsu et al. 2019, arXiv:1909.06335)."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.experiment import Decay
from edgefl.kernels.steps import ServerOptimizer
from edgefl.strategies.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedAvgM(FedAvg):
    """v ← β·v + Σ_i p_i·Δ_i, w ← w + η_g·v.

    >>> FedAvgM(momentum=0.5).optimizer().momentum
    0.5
    """

    momentum: Decay = 0.9
    """β: momentum of the server's SGD."""

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(lr=self.server_lr, momentum=self.momentum)
