"""Coordinate-wise median (Yin et al. 2018, ICML, arXiv:1803.01498)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from edgefl.strategies.base import Vector
from edgefl.strategies.buffered import Buffered
from edgefl.strategies.rows import Rows, check_buffer


@dataclass(frozen=True, kw_only=True)
class Median(Buffered):
    """w ← w + η_g · med(Δ_1, …, Δ_K), where med is the median of each parameter.

    This is option I of algorithm 1 in the paper, with definition 1. Δ_1 to Δ_K are the updates of a full
    buffer. With ``restart = "new-version"`` and ``max_staleness = 0``, all updates of a step start from the
    same version, as in the paper's rounds.
    """

    reads: ClassVar[Literal["metadata", "updates"]] = "updates"

    def check(self, clients: int) -> None:
        super().check(clients)
        check_buffer(self.size(clients))

    def combine(self, rows: Rows, weights: Sequence[float]) -> Vector:
        return rows.median()
