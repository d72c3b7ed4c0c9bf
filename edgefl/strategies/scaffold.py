"""SCAFFOLD: averaging with correction of client drift (Karimireddy et al. 2020, ICML, arXiv:1910.06378)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from edgefl.strategies.base import LocalTerms, Step, VectorSum, View
from edgefl.strategies.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    """x ← x + η_g/|S| Σ_{i∈S} Δ_i and c ← c + 1/N Σ_{i∈S} Δc_i for a cohort S from a fleet of N clients.

    This is Algorithm 1 of the paper. A client takes K steps y ← y − η_l (g_i(y) − c_i + c), and then keeps
    c_i⁺ = c_i − c + (x − y)/(K η_l), which is option II of the paper. It downloads c with the model, and
    uploads Δc_i = c_i⁺ − c_i with its update, which doubles the bytes of both transfers. The algorithm
    requires plain SGD (no ``training.momentum``).

    >>> Scaffold(cohort=2).local_rule().control
    ('c', 'c_i')
    """

    vectors: ClassVar[tuple[str, ...]] = ("c",)
    client_vectors: ClassVar[tuple[str, ...]] = ("c_i",)

    weighting: Literal["examples", "uniform"] = "uniform"

    def local_rule(self) -> LocalTerms:
        return LocalTerms(control=("c", "c_i"))

    def step(self, state: Any, view: View) -> Step | None:
        step = super().step(state, view)
        if step is None:
            return None
        return step._replace(parts={"c": VectorSum([1.0 / len(view.devices)] * len(step.updates))})
