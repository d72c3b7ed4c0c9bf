"""The ε that a private run has spent by each version, and that several runs have spent together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgefl.core.events import Joined, Summed
from edgefl.experiment import Privacy
from edgefl.privacy.accounting import PrivacyAccount, composed, delta_warning
from edgefl.results.record import Record
from edgefl.strategies.base import Sampling


class Spending(NamedTuple):
    """ε, clipping norm and participations of a private run."""

    rules: Privacy
    account: PrivacyAccount
    sampled: bool
    """Each version's cohort was drawn uniformly from all clients, which lowers ε."""
    epsilon: NDArray[np.float64]
    """ε spent until each version, from version 0 on."""
    clip_norm: NDArray[np.float64]
    """Clipping norm of each version's updates; NaN for version 0."""

    @property
    def private(self) -> bool:
        """The run added noise that cannot be reproduced from the seed."""
        return self.rules.noise == "secure" and self.rules.noise_multiplier > 0

    @property
    def says(self) -> str:
        """The guarantee in a sentence."""
        rules, bound = self.rules, f"ε = {self.epsilon[-1]:.3g} at δ = {self.rules.delta:g}"
        if not rules.noise_multiplier:
            return "Updates are clipped, but no noise is added: clients are not protected."
        if not self.private:
            return f"The noise follows from the seed and protects nobody; a secret key would give {bound}."
        how = "the tree of DP-FTRL" if rules.mechanism == "tree" else "noise in each version"
        text = "Each client is protected from anyone who sees only the models of this run: "
        text += f"{bound}, by {how}."
        warning = delta_warning(rules, len(self.account.squares))
        return f"{text} {warning}." if warning else text


def spending(record: Record) -> Spending | None:
    """The account of a run's versions; None for a run without ``[privacy]``."""
    rules, clients = record.meta.privacy, len(record.fleet["client"])
    if rules is None:
        return None
    drawn = None if record.meta.sampling is None else Sampling(*record.meta.sampling)
    counts = rules.mechanism == "gaussian" and drawn is not None and _whole(record)
    expected = None if drawn is None else drawn.rate * clients
    account = PrivacyAccount(rules, clients, drawn if counts else None, expected)
    owner = dict(zip(record.trips["task"].tolist(), record.trips["client"].tolist(), strict=True))
    found = [0.0]
    for _, tasks, _ in record.sums():
        account.version([owner[task] for task in tasks.tolist()])
        found.append(account.epsilon())
    return Spending(rules, account, counts, np.array(found), _clip_norms(record, rules, len(found)))


def summary_of(found: Spending | None) -> dict[str, Any] | None:
    """The figures for ``summary.json``."""
    if found is None:
        return None
    rules, bound = found.rules, float(found.epsilon[-1])
    parts = found.account.participations
    return {
        "private": found.private,
        "epsilon": bound if math.isfinite(bound) else None,
        "delta": rules.delta,
        "noise": rules.noise,
        "mechanism": rules.mechanism,
        "noise_multiplier": rules.noise_multiplier,
        "clip_norm": float(found.clip_norm[-1]) if len(found.clip_norm) > 1 else rules.clip_norm,
        "sampled": found.sampled,
        "participations": {"max": int(parts.max(initial=0)), "limit": rules.max_participations},
        "says": found.says,
    }


def _whole(record: Record) -> bool:
    """Returns True if each cohort was drawn from all clients: none joined late, left, or lost a task."""
    moves, rules, trips = list(record.moves()), record.meta.privacy, record.trips
    limited = rules is not None and (rules.max_participations is not None or rules.min_separation > 1)
    late = max((move.at_s for move in moves), default=0.0) > trips["sent_s"].min(initial=math.inf)
    here = len(moves) == len(record.fleet["client"]) and all(isinstance(move, Joined) for move in moves)
    return here and not limited and not late and not {"lost", "dropped"} & set(trips["fate"].tolist())


def _clip_norms(record: Record, rules: Privacy, count: int) -> NDArray[np.float64]:
    norms = np.full(count, rules.clip_norm)
    norms[:1] = math.nan
    if rules.quantile is not None:
        for _, event in record.events():
            if isinstance(event, Summed) and event.clip_norm is not None:
                norms[event.version + 1 :] = event.clip_norm
    return norms


def together(records: Iterable[Record]) -> str:
    """A sentence on the ε of several runs on one fleet; "" where fewer than two runs add noise."""
    found = [one for one in map(spending, records) if one is not None and one.rules.noise_multiplier]
    if len(found) < 2:
        return ""
    delta = max(one.rules.delta for one in found)
    bound = composed([one.account for one in found], delta)
    return (
        f"Each ε is that of one run. All {len(found)} runs together have spent ε = {bound:.3g} at "
        f"δ = {delta:g} on their clients, if these are the same people. This bound applies to anyone who "
        "sees several of the runs or chooses one by its results."
    )
