"""FedDyn: dynamic regularisation of the clients' objectives (Acar et al. 2021, ICLR, arXiv:2111.04263)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from edgefl.experiment import Positive
from edgefl.strategies.base import LocalTerms, Step, VectorSum, View
from edgefl.strategies.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedDyn(FedAvg):
    """θ ← 1/|P| Σ_{k∈P} θ_k − h/α, h ← h − α/m Σ_{k∈P} (θ_k − θ), for a cohort P from a fleet of m clients.

    A client minimises L_k(y) − ⟨g_k, y⟩ + (α/2)·‖y − θ‖², then sets g_k ← g_k − α (y − θ), the gradient of
    L_k at the minimum. The paper minimises exactly; here the client runs the SGD steps of ``[training]``.

    >>> FedDyn(alpha=0.1).local_rule()
    LocalTerms(prox_mu=0.1, control=None, linear='g', lr=None)
    """

    server_vectors: ClassVar[tuple[str, ...]] = ("h",)
    client_vectors: ClassVar[tuple[str, ...]] = ("g",)

    alpha: Positive = 0.01
    """α: strength of the regularisation; the paper tries 0.1, 0.01 and 0.001."""
    weighting: Literal["examples", "uniform"] = "uniform"

    def local_rule(self) -> LocalTerms:
        return LocalTerms(prox_mu=self.alpha, linear="g")

    def step(self, state: Any, view: View) -> Step | None:
        step = super().step(state, view)
        if step is None:
            return None
        weights = [-self.alpha / len(view.devices)] * len(step.updates)
        return step._replace(parts={"h": VectorSum(weights, into_model=-1.0 / self.alpha)})
