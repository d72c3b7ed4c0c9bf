"""The cores that this process may use, and the signals that have asked it to end."""

from __future__ import annotations

import os

stopped_by: list[int] = []
"""Numbers of the signals that have asked this process to end, in the order of arrival."""


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))
