"""How many threads a kernel call may use."""

from __future__ import annotations

import os
import sys

_MOST = 16
"""Memory, which is the limit, is saturated by fewer cores than large hosts have."""

_threads = 0


def threads() -> int:
    """The most threads one call may use: by default one a core of this process, at most 16."""
    global _threads
    if _threads == 0:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        _threads = min(cores, _MOST)
    return _threads


def set_threads(n: int | None) -> None:
    """Let one call use ``n`` threads (None: the default again) and end those that wait for work.

    The result's bits do not depend on it. Threads are made again when a call next needs them.

    >>> set_threads(1); threads()
    1
    >>> set_threads(None)
    """
    global _threads
    if n is not None and (isinstance(n, bool) or not isinstance(n, int)):
        raise TypeError(f"threads must be an integer or None (got {n!r})")
    if n is not None and n < 1:
        raise ValueError(f"threads must be at least 1 (got {n})")
    native = sys.modules.get("edgefl.kernels.backend_c")
    if native is not None:
        native.close_pool()
    _threads = n or 0
