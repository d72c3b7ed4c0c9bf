"""Child processes of a measurement that share what their parent made."""

from __future__ import annotations

import os
from collections.abc import Callable

from edgefl.processes import become_child


def forked(count: int, life: Callable[[int], None]) -> list[int]:
    """``count`` children that run ``life(number)`` and end; their process ids."""
    parent = os.getpid()
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                become_child(parent, f"edgefl-bare-{number}")
                life(number)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    return pids
