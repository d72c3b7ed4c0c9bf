"""Long-tailed data for the ablations of FedBuff (Nguyen 2022, table 7)."""

from __future__ import annotations

import numpy as np

from edgefl.learning.partition import Rows


def long_tail(labels: Rows, profiles: list[str], rng: np.random.Generator) -> list[Rows]:
    """Partition examples as in the data of user accounts: a few clients hold many, and many clients hold few.

    The sizes are log-normal with σ = 1.5. Examples are split in the order of their labels, so most clients
    hold one or two labels; each client holds at least one example. ``data.partition`` can name this function.

    >>> parts = long_tail(np.repeat(np.arange(10), 50), ["pi-4"] * 40, np.random.default_rng(0))
    >>> len(parts), sum(map(len, parts)), min(map(len, parts)), max(map(len, parts)) > 60
    (40, 500, 1, True)
    """
    clients = len(profiles)
    by_label = np.argsort(labels, kind="stable")
    share = np.cumsum(rng.permutation(rng.lognormal(0.0, 1.5, clients)))
    cuts = 1 + np.arange(clients - 1) + np.floor(share[:-1] / share[-1] * (len(labels) - clients)).astype(int)
    return np.split(by_label, cuts)
