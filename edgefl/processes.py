"""The cores that this process may use, and the signals that are ending it."""

from __future__ import annotations

import os

stopped_by: list[int] = []
"""Signals that asked this process to end, in order."""


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
