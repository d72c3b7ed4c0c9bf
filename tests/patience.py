"""Time limits that follow what the machine gives: seconds in which no process of a test waited for a core.

On a quiet machine they are seconds. Where others keep the cores busy, or everything stands still, a test that
gets on has as much longer as it has to wait; one that hangs waits for no core, and is found as soon as ever.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil

MOST_S = 2.0
"""A look counts for no more: if the next one was later, the machine stood still."""


class Patience:
    """Is over once ``limit_s`` have been given. Looked at about once a second.

    >>> Patience(0.0).over(), Patience(60.0).over()
    (True, False)
    """

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s
        self._looked_s, self._known = time.monotonic(), _ran_and_waited()

    def over(self) -> bool:
        """Returns True if nothing is left, counting the time since the last look."""
        now_s, now = time.monotonic(), _ran_and_waited()
        before = [self._known.get(pid, (0.0, 0.0)) for pid in now]
        ran_s, waited_s = (sum(one[k] for one in now.values()) - sum(b[k] for b in before) for k in (0, 1))
        passed_s = min(now_s - self._looked_s, MOST_S)
        self._left_s -= min(passed_s, max(passed_s - waited_s, ran_s))
        self._looked_s, self._known = now_s, now
        return self._left_s <= 0


def _ran_and_waited() -> dict[int, tuple[float, float]]:
    """Seconds that each of this process and all that it has started ran, and waited for a core. Linux."""
    found = {}
    me = psutil.Process()
    for pid in (me.pid, *(child.pid for child in me.children(recursive=True))):
        try:
            ran_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
        except (OSError, ValueError):
            continue  # it has ended, or the kernel does not say it
        found[pid] = int(ran_ns) / 1e9, int(waited_ns) / 1e9
    return found
