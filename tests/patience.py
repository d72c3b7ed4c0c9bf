"""Time limits that count only time in which no process of the test waited for a core.

So a test that makes progress on a busy machine gets more time, while one that hangs fails after the limit.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from edgefl.host.children import children_of

MAX_S = 2.0
"""Maximum time in seconds that a call of `Patience.over` counts. A longer gap means that the machine was
suspended."""


class Patience:
    """A time limit of ``limit_s``. `over` is to be called about once a second.

    >>> Patience(0.0).over(), Patience(60.0).over()
    (True, False)
    """

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s
        self._looked_s, self._known = time.monotonic(), _ran_and_waited()

    def over(self) -> bool:
        """Count the time since the last call; return True if no time is left."""
        now_s, now = time.monotonic(), _ran_and_waited()
        before = [self._known.get(pid, (0.0, 0.0)) for pid in now]
        ran_s, waited_s = (sum(one[k] for one in now.values()) - sum(b[k] for b in before) for k in (0, 1))
        passed_s = min(now_s - self._looked_s, MAX_S)
        self._left_s -= min(passed_s, max(passed_s - waited_s, ran_s))
        self._looked_s, self._known = now_s, now
        return self._left_s <= 0


def _ran_and_waited() -> dict[int, tuple[float, float]]:
    """Return how long this process and each descendant ran and waited for a core, in seconds (Linux)."""
    found = {}
    for pid in (os.getpid(), *descendants()):
        try:
            ran_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
        except (OSError, ValueError):
            continue  # it has ended, or the kernel has no such figures
        found[pid] = int(ran_ns) / 1e9, int(waited_ns) / 1e9
    return found


def descendants() -> list[int]:
    """Return the ids of all descendants of this process, including ended ones that were not reaped."""
    found = rest = children_of(os.getpid()) or []
    while rest:
        rest = [child for pid in rest for child in children_of(pid) or ()]
        found = found + rest
    return found
