"""How much of the run its clients were there, from their coming and going in the journal."""

from __future__ import annotations

from collections import Counter
from typing import Any

from edgefl.core.events import Joined
from edgefl.record import Record
from edgefl.report.measures import rounded


def attendance_of(record: Record, emulated_s: float) -> dict[str, Any]:
    """The share of all clients' time that they were online, how often one left and came back, and why.

    A client is online from when it joined to when it left; one that finished its task first counts to when
    it should have gone. Clients that had joined once and come again have returned.
    """
    since: dict[int, float] = {}
    known: set[int] = set()
    online_s, returned = 0.0, 0
    reasons: Counter[str] = Counter()
    for move in record.moves():
        if isinstance(move, Joined):
            returned += move.client in known
            known.add(move.client)
            since.setdefault(move.client, move.at_s)
        else:
            online_s += move.at_s - since.pop(move.client, move.at_s)
            reasons[move.reason] += 1
    online_s += sum(max(0.0, emulated_s - at_s) for at_s in since.values())
    clients_s = len(record.clients) * emulated_s
    return {
        "online_share": rounded(online_s / clients_s) if clients_s > 0 else None,
        "left": sum(reasons.values()),
        "returned": returned,
        "reasons": dict(sorted(reasons.items())),
    }
