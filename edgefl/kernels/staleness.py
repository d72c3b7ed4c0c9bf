"""A moving average of each client's staleness, stored in flat arrays indexed by client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, overload

import numpy as np

from edgefl.errors import unknown
from edgefl.kernels import arguments
from edgefl.kernels.arguments import Averages, Doubles, Ids
from edgefl.kernels.selection import select

Mode: TypeAlias = Literal["window", "cumulative", "exponential"]
_MODES: dict[str, int] = {"window": 0, "cumulative": 1, "exponential": 2}


class MovingAverage:
    """A moving average per client, such as FedStaleWeight's E[τ_i] (Ma 2024); 0 before the first observation.

    In mode ``window`` the average is the mean of the last ``window`` observations, in mode ``cumulative`` the
    mean of all of them, and in mode ``exponential`` m ← decay·m + (1 − decay)·x, starting with the first x.

    The state consists of int64[clients] counts and float64[clients × width] entries, where width is the
    length of the window, or 1 in the other modes. All CPU back ends give the same bits.

    >>> average = MovingAverage(3, window=2)
    >>> [average.observe(1, x) for x in (4.0, 2.0, 0.0)]
    [4.0, 3.0, 1.0]
    >>> average.observe([0, 0], [6.0, 8.0]).tolist()
    [6.0, 7.0]
    >>> average.mean(2)
    0.0
    """

    def __init__(
        self,
        clients: int,
        mode: Mode = "window",
        window: int = 5,
        decay: float = 0.9,
        backend: str | None = None,
    ) -> None:
        if mode not in _MODES:
            raise ValueError(unknown("mode", mode, _MODES))
        if clients < 0:
            raise ValueError(f"clients must be at least 0 (got {clients})")
        if window < 1:
            raise ValueError(f"window must be at least 1 (got {window})")
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be at least 0 and under 1 (got {decay})")
        self.clients = clients
        self._backend, width = select(backend), window if mode == "window" else 1
        count: Ids = np.zeros(clients, dtype=np.int64)
        self._flat = Averages(_MODES[mode], width, float(decay), count, np.zeros(clients * width))
        self._means: Doubles = np.zeros(clients)
        """Current average of each client, as last computed by `observe`."""
        # The server usually observes one client per call, so these arrays are allocated once.
        self._one_id: Ids = np.zeros(1, dtype=np.int64)
        self._one_value: Doubles = np.zeros(1)
        self._one_mean: Doubles = np.zeros(1)

    @overload
    def observe(self, client_ids: int, values: float) -> float: ...
    @overload
    def observe(self, client_ids: Sequence[int] | Ids, values: Sequence[float] | Doubles) -> Doubles: ...
    def observe(
        self, client_ids: int | Sequence[int] | Ids, values: float | Sequence[float] | Doubles
    ) -> float | Doubles:
        """Add ``values[k]`` for the client ``client_ids[k]``, for k = 0, 1, …; clients may occur repeatedly.

        Returns the float64 average after each observation (a float for a single client). If a value is not
        finite or an id is out of range, nothing changes and ValueError is raised.
        """
        if type(client_ids) is int and type(values) is float:
            if not 0 <= client_ids < self.clients or values - values != 0.0:
                arguments.observations(self.clients, client_ids, values)
            self._one_id[0], self._one_value[0] = client_ids, values
            self._backend.observe(self._flat, self._one_id, self._one_value, self._one_mean)
            mean = self._means[client_ids] = float(self._one_mean[0])
            return mean
        ids, numbers = arguments.observations(self.clients, client_ids, values)
        means = np.empty(ids.size)
        self._backend.observe(self._flat, ids, numbers, means)
        self._means[ids] = means  # a client that occurs twice keeps its last mean
        return float(means[0]) if np.ndim(client_ids) == 0 else means

    @overload
    def mean(self, client_ids: int) -> float: ...
    @overload
    def mean(self, client_ids: Sequence[int] | Ids) -> Doubles: ...
    def mean(self, client_ids: int | Sequence[int] | Ids) -> float | Doubles:
        """Return the current averages of the clients in float64, with 0 for clients without observations."""
        ids = arguments.client_ids(self.clients, client_ids)
        means = self._means[ids]
        return float(means[0]) if np.ndim(client_ids) == 0 else means
