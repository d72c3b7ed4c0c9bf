"""Limits that others have set on this process: the quota and memory of the control groups it lies in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from edgefl.emulation.mechanisms.hierarchy import NoGroup, figures, find, words

_UNLIMITED_BYTES = 1 << 60
"""Version 1 says "no limit" with the largest multiple of a page."""


def cpu_quota() -> float | None:
    """Cores that the control groups around this process allow together, or None if they allow all."""
    quotas = [quota for folder, version in _around("cpu") if (quota := _quota(folder, version)) is not None]
    return min(quotas, default=None)


def memory_limit_bytes() -> int | None:
    """Bytes that the control groups around this process allow, or None if they do not limit them."""
    limits = []
    for folder, version in _around("memory"):
        found = words(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max"))
        if found and found[0].isdecimal() and int(found[0]) < _UNLIMITED_BYTES:
            limits.append(int(found[0]))
    return min(limits, default=None)


class ThrottleMeter:
    """How long the quotas around this process have kept its group from running, since this was made.

    >>> share = ThrottleMeter().share()
    >>> share is None or 0.0 <= share <= 1.0
    True
    """

    def __init__(self) -> None:
        # The groups of now: the process may be moved, the time counts where it was spent.
        self._files = [(folder / "cpu.stat", version) for folder, version in _around("cpu")]
        self._start_s = time.monotonic()
        self._before = self._read()

    def share(self) -> float | None:
        """Share of the wall time in which a core stood still because the quota was used up.

        None where it cannot be read.
        """
        now, wall_s = self._read(), time.monotonic() - self._start_s
        if not now or wall_s <= 0:
            return None
        worst = max(after - before for before, after in zip(self._before, now, strict=True))
        return min(1.0, max(0.0, worst / wall_s))

    def _read(self) -> list[float]:
        """Seconds so far, a group."""
        return [_throttled_s(figures(file), version) for file, version in self._files]


def _around(controller: str) -> Iterator[tuple[Path, int]]:
    """The group of this process and those around it, as far as they can be seen."""
    try:
        folder, version = find(controller)
    except NoGroup:
        return
    while (folder / "cgroup.procs").exists():
        yield folder, version
        folder = folder.parent


def _throttled_s(stat: dict[str, int], version: int) -> float:
    return stat.get("throttled_usec", 0) / 1e6 if version == 2 else stat.get("throttled_time", 0) / 1e9


def _quota(folder: Path, version: int) -> float | None:
    if version == 1:
        quota, period = words(folder / "cpu.cfs_quota_us"), words(folder / "cpu.cfs_period_us")
        found = [*quota, *period]
    else:
        found = words(folder / "cpu.max")
    return int(found[0]) / int(found[1]) if len(found) == 2 and found[0].isdecimal() else None
