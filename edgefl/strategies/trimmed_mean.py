"""Coordinate-wise trimmed mean (Yin et al. 2018, ICML, arXiv:1803.01498)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec

from edgefl.strategies.base import Vector
from edgefl.strategies.buffered import Buffered
from edgefl.strategies.rows import Rows, check_buffer


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Buffered):
    """w ← w + η_g · trmean_β(Δ_1, …, Δ_K) (definition 2, algorithm 1, option II).

    For each parameter, the β·K smallest and β·K largest of the K values are left out, and the other values
    are averaged. With ``restart = "new-version"`` and ``max_staleness = 0``, all updates of a step start from
    the same version, as in the paper's rounds.
    """

    reads: ClassVar[Literal["metadata", "updates"]] = "updates"

    beta: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.2
    """β: share of the values that is left out at each end; β·K is rounded down."""

    def check(self, clients: int) -> None:
        super().check(clients)
        check_buffer(self.size(clients))

    def combine(self, rows: Rows, weights: Sequence[float]) -> Vector:
        trim = int(self.beta * len(rows) + 1e-9)
        return rows.trimmed_mean(min(trim, (len(rows) - 1) // 2))
