"""Krum and Multi-Krum (Blanchard et al. 2017, NeurIPS, arXiv:1703.02757)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from edgefl.errors import ConfigError
from edgefl.experiment import Count
from edgefl.strategies.buffered import Buffered
from edgefl.strategies.rows import Rows, check_buffer


@dataclass(frozen=True, kw_only=True)
class Krum(Buffered):
    """w ← w + η_g · (1/m) Σ Δ_i over the m updates with the lowest scores in a buffer of K updates.

    The score of an update is the sum of the squared distances to its K − f − 2 nearest neighbours (section
    4), where f is the number of attackers per buffer that the rule tolerates. The rule is Krum if m = 1, and
    Multi-Krum if m > 1 (section 5). Among updates with equal scores, earlier updates are preferred. With
    ``restart = "new-version"`` and ``max_staleness = 0``, all updates of a step start from the same version,
    as in the paper's rounds.
    """

    reads: ClassVar[Literal["metadata", "updates"]] = "updates"

    attackers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """f: number of attackers per buffer that are tolerated. The default is the maximum that proposition 4.2
    allows, ⌊(K − 3) / 2⌋, or 0 for a buffer of one or two updates."""
    selected: Count = 1
    """m: number of updates that are averaged."""

    def tolerated(self, size: int) -> int:
        """Return f, the number of attackers that are tolerated in a buffer of ``size`` updates."""
        return max(0, (size - 3) // 2) if self.attackers is None else self.attackers

    def check(self, clients: int) -> None:
        super().check(clients)
        size = self.size(clients)
        check_buffer(size)
        if self.attackers is not None and size < 2 * self.attackers + 3:
            raise ConfigError(
                f"strategy.buffer_size must be at least 2 × strategy.attackers + 3 = "
                f"{2 * self.attackers + 3} (Blanchard et al., proposition 4.2), got {size}"
            )
        if self.selected > size:
            raise ConfigError(
                f"strategy.selected must be at most the buffer's {size} updates, got {self.selected}"
            )

    def combine(self, rows: Rows, weights: Sequence[float]) -> Sequence[float]:
        count = len(rows)
        nearest = max(1, count - self.tolerated(count) - 2)
        # The first value in each sorted row is the distance from the update to itself, which is 0.
        scores = np.sort(rows.sq_distances, axis=1)[:, 1 : 1 + nearest].sum(axis=1)
        chosen = set(np.argsort(scores, kind="stable")[: self.selected].tolist())
        return [1.0 / self.selected if row in chosen else 0.0 for row in range(count)]
