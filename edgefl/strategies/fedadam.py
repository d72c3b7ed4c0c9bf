"""FedAdam: FedAvg with Adam as the server optimiser (Reddi et al. 2021, ICLR, arXiv:2003.00295)."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.experiment import Decay, Positive
from edgefl.kernels.steps import ServerOptimizer
from edgefl.strategies.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedAdam(FedAvg):
    """With g = Σ_i p_i·Δ_i: m ← β1·m + (1 − β1)·g, v ← β2·v + (1 − β2)·g², w ← w + η_g·m/(√v + ε).

    This is Algorithm 2 of the paper. Initially, v = ε² and m = 0; there is no bias correction.

    >>> FedAdam(epsilon=0.01).optimizer().kind
    'adam'
    """

    server_lr: Positive = 0.03
    beta1: Decay = 0.9
    """β1: decay rate of the first moment m."""
    beta2: Decay = 0.99
    """β2: decay rate of the second moment v."""
    epsilon: Positive = 1e-3
    """ε: degree of adaptivity (τ in the paper); a smaller value adapts more."""

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(
            kind="adam", lr=self.server_lr, beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon
        )
