"""FedYogi: FedAvg with Yogi as the server optimiser (Reddi et al. 2021, ICLR, arXiv:2003.00295)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgefl.kernels.steps import ServerOptimizer
from edgefl.strategies.fedadam import FedAdam


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    """FedAdam with v ← v − (1 − β2)·g²·sign(v − g²).

    >>> FedYogi(epsilon=0.01).optimizer().kind
    'yogi'
    """

    def optimizer(self) -> ServerOptimizer:
        return replace(super().optimizer(), kind="yogi")
