"""The ε that a private run has spent up to each version, and the ε that several runs have spent together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgefl.core.events import Joined, Summed
from edgefl.experiment import Privacy
from edgefl.privacy.accounting import (
    ORDERS,
    PrivacyAccount,
    composed,
    delta_warning,
    epsilon,
    gaussian_rdp,
    local_epsilon,
    local_square,
)
from edgefl.results.record import Record
from edgefl.strategies.base import Sampling


class LocalSpending(NamedTuple):
    """The ε spent by the uploads of the client with the most trips; only the client's noise protects them."""

    trips: int
    epsilon: float
    limit: int
    limit_epsilon: float
    """The ε after ``limit`` trips, the declared maximum."""


class Spending(NamedTuple):
    """The ε, the clipping norms and the participations of a private run."""

    rules: Privacy
    account: PrivacyAccount
    """The ε of the published models. If the server adds no noise, only participations are counted here."""
    sampled: bool
    """True if each version's cohort was drawn uniformly from all clients, which lowers ε."""
    epsilon: NDArray[np.float64]
    """The ε spent up to each version, starting with version 0.

    The ε is spent by the published models or, if only clients add noise, by the uploads.
    """
    clip_norm: NDArray[np.float64]
    """Clipping norm of each version's updates; NaN for version 0."""
    local: LocalSpending | None = None
    hidden: bool = False
    """True if secure aggregation hides individual updates from the server."""

    @property
    def private(self) -> bool:
        """True if the run added noise that cannot be reproduced from the seed."""
        return self.rules.noise == "secure" and self.rules.noise_multiplier > 0

    @property
    def says(self) -> str:
        """Sentences that state who is protected from whom, and with which ε."""
        warning = delta_warning(self.rules, len(self.account.squares))
        parts = [self._says_local, self._says_central if self.rules.central else ""]
        return " ".join([part for part in parts if part] + ([f"{warning}."] if warning else []))

    @property
    def _says_local(self) -> str:
        if (local := self.local) is None:
            return ""
        bound = f"ε = {local.limit_epsilon:.3g} at δ = {self.rules.delta:g} for {local.limit} trips"
        whom = "from the server and from anyone who sees its updates or the models"
        text = f"Each client's own noise would protect it {whom}: {bound}, {local.epsilon:.3g} for the "
        text += (
            f"{local.trips} trips of the client with the most trips; "
            "here this noise follows from the seed and protects nobody."
        )
        return text

    @property
    def _says_central(self) -> str:
        rules, bound = self.rules, f"ε = {self.epsilon[-1]:.3g} at δ = {self.rules.delta:g}"
        if not rules.noise_multiplier:
            return "Updates are clipped, but no noise is added: clients are not protected."
        if not self.private:
            return (
                f"The server's noise follows from the seed and protects nobody; with a secret key it would "
                f"protect each client from anyone who sees only the models: {bound}."
            )
        how = "the tree of DP-FTRL" if rules.mechanism == "tree" else "noise in each version"
        text = "Each client is protected from anyone who sees only the models of this run: "
        sees = "the sums of updates without noise" if self.hidden else "each update"
        return f"{text}{bound}, by {how}. The server is trusted: it sees {sees}."


def spending(record: Record) -> Spending | None:
    """Return the ε that a run has spent up to each version; None for a run without ``[privacy]``."""
    rules, clients = record.meta.privacy, len(record.fleet["client"])
    if rules is None:
        return None
    drawn = None if record.meta.sampling is None else Sampling(*record.meta.sampling)
    counts = rules.mechanism == "gaussian" and drawn is not None and _whole(record)
    expected = None if drawn is None else drawn.rate * clients
    if (most := record.meta.max_weight) is not None:  # a maximum weight of 1/n means n updates per step
        expected = 1.0 / most
    account = PrivacyAccount(rules, clients, drawn if counts else None, expected)
    owner = dict(zip(record.trips["task"].tolist(), record.trips["client"].tolist(), strict=True))
    found = [0.0]
    for _, tasks, _ in record.sums():
        account.version([owner[task] for task in tasks.tolist()])
        found.append(account.epsilon())
    spent, local = np.array(found), None
    if rules.local_noise_multiplier and rules.max_participations is not None:
        trips, limit = most_trips(record), rules.max_participations
        last = int(trips.max(initial=0))
        local = LocalSpending(last, local_epsilon(rules, last), limit, local_epsilon(rules, limit))
        if not rules.central:
            at_s = np.concatenate([[0.0], record.versions["at_s"]])
            sent = np.searchsorted(np.sort(record.trips["sent_s"]), at_s, side="right")
            spent = np.array([local_epsilon(rules, int(trips[k - 1]) if k else 0) for k in sent.tolist()])
    norms, hidden = _clip_norms(record, rules, len(found)), record.meta.secure is not None
    return Spending(rules, account, counts, spent, norms, local, hidden)


def most_trips(record: Record) -> NDArray[np.int64]:
    """Return, for each task in chronological order, the largest number of tasks of any client so far."""
    trips = record.trips
    return np.maximum.accumulate(trips["trip"][np.argsort(trips["sent_s"], kind="stable")] + 1)


def summary_of(found: Spending | None) -> dict[str, Any] | None:
    """Return the privacy results for ``summary.json``."""
    if found is None:
        return None
    rules, local, bound = found.rules, found.local, float(found.epsilon[-1])
    if local is not None and not rules.central:
        bound = local.epsilon  # includes trips after the last version
    most = int(found.account.participations.max(initial=0)) if local is None else local.trips
    return {
        "private": found.private,
        "epsilon": _finite(bound),
        "delta": rules.delta,
        "noise": rules.noise,
        "mechanism": rules.mechanism if rules.central else None,
        "noise_multiplier": rules.noise_multiplier,
        "clip_norm": float(found.clip_norm[-1]) if len(found.clip_norm) > 1 else rules.clip_norm,
        "sampled": found.sampled,
        "participations": {"max": most, "limit": rules.max_participations},
        **({} if local is None else {"local": _local_summary(rules, local)}),
        "says": found.says,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _local_summary(rules: Privacy, local: LocalSpending) -> dict[str, Any]:
    return {
        "noise_multiplier": rules.local_noise_multiplier,
        "epsilon": _finite(local.epsilon),
        "epsilon_at_limit": _finite(local.limit_epsilon),
    }


def _whole(record: Record) -> bool:
    """Return True if each cohort was drawn from all clients: participations were not limited, no client
    joined late or left, and no update was lost or dropped."""
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
    """Return sentences about the total ε that several runs have spent on one fleet.

    Return "" unless at least two runs add noise of the same kind.
    """
    all_found = [one for one in map(spending, records) if one is not None]
    found = [one for one in all_found if one.rules.noise_multiplier]
    local = [(one.rules, one.local.trips) for one in all_found if one.local is not None]
    texts = []
    if len(found) > 1:
        delta = max(one.rules.delta for one in found)
        bound = composed([one.account for one in found], delta)
        texts.append(
            f"Each ε is that of one run. The {len(found)} runs with the server's noise together have spent "
            f"ε = {bound:.3g} at δ = {delta:g} on their clients, if these are the same people. This bound "
            "applies to anyone who sees several of these runs or chooses one by its results."
        )
    if len(local) > 1:
        delta, square = max(rules.delta for rules, _ in local), sum(local_square(*one) for one in local)
        bound = epsilon(ORDERS, gaussian_rdp(ORDERS, square), delta) if square else 0.0
        texts.append(
            f"All uploads of a client in the {len(local)} runs with local noise together have spent "
            f"ε = {bound:.3g} at δ = {delta:g}."
        )
    return " ".join(texts)
