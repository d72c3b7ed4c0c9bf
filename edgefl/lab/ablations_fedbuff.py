"""Ablations of FedBuff (Nguyen 2022): its lead over FedAvgM at two concurrencies; long-tailed data."""

from __future__ import annotations

import numpy as np

from edgefl.lab.claims import Race, growing_lead
from edgefl.lab.study import Curves, Finding
from edgefl.learning.partition import Rows

FEW = "10 at once"


def claims(curves: Curves) -> list[Finding]:
    """Judge whether FedBuff's lead over FedAvgM grows with concurrency."""
    many, few = (Race(f"FedBuff{end}", f"FedAvgM{end}", "", "") for end in ("", f", {FEW}"))
    return [lead_grows(curves, many, few)]


def lead_grows(curves: Curves, many: Race, few: Race) -> Finding:
    """Judge the claim of figure 3 that FedBuff's lead over FedAvgM grows with concurrency."""
    what = f"the lead over FedAvgM grows from {FEW} to all"
    return growing_lead(curves, what, "figure 3", "at 10 much the same, at 1,000 far ahead", many, few)


def long_tail(labels: Rows, profiles: list[str], rng: np.random.Generator) -> list[Rows]:
    """Partition examples like user accounts: a few clients hold many examples, and many hold few.

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
