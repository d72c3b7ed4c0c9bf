"""FedAdagrad: FedAvg with Adagrad as the server optimiser (Reddi et al. 2021, ICLR, arXiv:2003.00295)."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.experiment import Decay, Positive
from edgefl.kernels.steps import ServerOptimizer
from edgefl.strategies.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(FedAvg):
    """With g = Σ_i p_i·Δ_i: m ← β1·m + (1 − β1)·g, v ← v + g², w ← w + η_g·m/(√v + ε).

    This is Algorithm 2 of the paper. Initially, v = ε² and m = 0.

    >>> FedAdagrad(epsilon=0.01).optimizer().kind
    'adagrad'
    """

    server_lr: Positive = 0.03
    beta1: Decay = 0.0
    """β1: decay rate of the first moment m."""
    epsilon: Positive = 1e-3
    """ε: degree of adaptivity (τ in the paper); a smaller value adapts more."""

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(kind="adagrad", lr=self.server_lr, beta1=self.beta1, epsilon=self.epsilon)
