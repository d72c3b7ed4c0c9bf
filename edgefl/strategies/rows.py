"""The updates of a step, for a strategy that reads their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl import kernels
from edgefl.errors import ConfigError
from edgefl.kernels.ranks import MAX_UPDATES

Doubles = NDArray[np.float64]


class Rows:
    """K updates of D parameters, one row per update.

    All values are finite. The rows are read-only and valid only while `Strategy.combine` runs.

    >>> rows = Rows([np.array(row, np.float32) for row in ([3, 4], [0, 1], [0, -1])], clients=[7, 8, 9])
    >>> len(rows), rows.norms.tolist(), rows.sq_distances[1].tolist(), rows.median().tolist()
    (3, [5.0, 1.0, 1.0], [18.0, 0.0, 4.0], [0.0, 1.0])
    """

    def __init__(
        self,
        updates: Sequence[NDArray[Any]],
        scales: Sequence[NDArray[np.float32] | None] | None = None,
        clients: Sequence[int] = (),
        backend: str | None = None,
    ) -> None:
        self._updates, self._scales, self._backend = updates, scales, backend
        self.clients = tuple(clients)
        """The client that sent each update."""

    def __len__(self) -> int:
        return len(self._updates)

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        """Return a copy of one update, as float32[D]."""
        out = np.empty(self.size, np.float32)
        scales = None if self._scales is None else [self._scales[row]]
        kernels.weighted_sum(out, None, [self._updates[row]], [1.0], self._backend, scales=scales)
        return out

    @property
    def size(self) -> int:
        """D, the number of parameters in each update."""
        return self._updates[0].size

    def trimmed_mean(self, trim: int) -> NDArray[np.float32]:
        """Return the mean of each parameter without its ``trim`` smallest and ``trim`` largest values.

        The result is float32[D]. Raises ValueError unless 0 ≤ 2·trim < K.
        """
        out = np.empty(self.size, np.float32)
        kernels.trimmed_mean(out, self._updates, trim, self._backend, scales=self._scales)
        return out

    def median(self) -> NDArray[np.float32]:
        """Return the median of each parameter, as float32[D].

        For even K, the median is the mean of the two middle values.
        """
        return self.trimmed_mean((len(self) - 1) // 2)

    @cached_property
    def products(self) -> Doubles:
        """Inner products of all pairs of updates, as float64[K, K]."""
        return kernels.products(self._updates, self._backend, scales=self._scales)

    @property
    def norms(self) -> Doubles:
        """L2 norms of the updates, as float64[K]."""
        return np.sqrt(self.products.diagonal())

    @property
    def sq_distances(self) -> Doubles:
        """Squared L2 distances between all pairs of updates, as float64[K, K]."""
        squares = self.products.diagonal()
        return np.maximum(squares[:, None] + squares - 2 * self.products, 0.0)

    @property
    def cosines(self) -> Doubles:
        """Cosines of the angles between all pairs of updates, as float64[K, K]; 0 for an update of zeros."""
        lengths = self.norms[:, None] * self.norms
        return np.divide(self.products, lengths, out=np.zeros_like(lengths), where=lengths > 0)


def check_buffer(size: int) -> None:
    """Raise `ConfigError` if a buffer of ``size`` updates is too large for `Rows` to compare all of them."""
    if size > MAX_UPDATES:
        raise ConfigError(
            f"strategy.buffer_size must be at most {MAX_UPDATES} for a strategy that compares updates, "
            f"got {size}"
        )
