"""Measures the peak memory of a repetition.

The kernel reports the peak of the repetition's own process. The memory of processes that this process starts
is sampled.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from edgefl.host.children import children_of
from edgefl.host.memory import is_fork, live_thread, parent_waits
from edgefl.host.pacing import Pauses

LOOK_S = 0.005
"""Minimum time in seconds between two samples of the memory of the processes that a repetition started."""
PAUSE = 4
"""Ratio of the pause after a sample to the sample's CPU time, so that sampling takes at most a fifth of a
core."""


class TreeWatch:
    """Samples the memory of a call's process and of all processes that it started, while the call runs.

    The measuring process creates this object, forks the call's process and takes the samples. The call's
    process begins and ends the sampling. A memory page that both processes share holds the id of the call's
    process and the highest sample.
    """

    def __init__(self) -> None:
        self._measuring, self._pauses = os.getpid(), Pauses(PAUSE)
        # Id of the call's process (0 before the call, -1 after it), and the highest sample so far in KiB.
        self._page = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")

    def reset(self) -> None:
        """Reset the recorded process and peak before the next measured call starts its process."""
        self._page[0] = self._page[1] = 0

    def begin(self) -> int:
        """Begin sampling; return the current total memory of all processes, in KiB.

        Called in the call's process. The result is 0 if the call has not started any process.
        """
        for pid in self._others(os.getpid()):
            _forget_peak(pid)
        self._page[0] = os.getpid()
        return self._now_kib(os.getpid())

    def end(self) -> int:
        """End sampling; return the highest total memory of all processes at any sample, in KiB.

        Called in the call's process.
        """
        last = self._now_kib(os.getpid())
        self._page[0] = -1
        return max(last, self._page[1])

    def look(self) -> float:
        """Take a sample; return the time in seconds until the next. Called in the measuring process."""
        pid, start_s = self._page[0], time.thread_time()
        if pid < 0:
            return math.inf
        if pid:
            self._page[1] = max(self._page[1], self._now_kib(pid))
        return max(LOOK_S, self._pauses.after(time.thread_time() - start_s))

    def _now_kib(self, pid: int) -> int:
        """Return the current memory of the call's process plus the peaks of processes it started, in KiB.

        The result is 0 if the call started no processes.
        """
        others = sum(map(_started_kib, self._others(pid)))
        return own_kib(kib("status", pid)) + others if others else 0

    def _others(self, own: int) -> Iterator[int]:
        """Yield the ids of all processes that the call started; the measuring process adopts orphans."""
        waiting = [self._measuring]
        for pid in waiting:
            waiting += children_of(pid) or ()
            if pid not in (self._measuring, own):
                yield pid


class Peak:
    """Peak growth of private and shared memory since this object was created.

    The kernel reports the peak of this process; ``watch`` samples the memory of the processes it started.

    >>> block = mmap.mmap(-1, 4096 * 4096)
    >>> peak = Peak(TreeWatch())
    >>> block[::4096] = b"x" * 4096  # touch each page
    >>> 15 < peak.mib() < 18
    True
    >>> block.close()
    """

    def __init__(self, watch: TreeWatch) -> None:
        _forget_peak(os.getpid())  # if this fails, the peak since the start of the process is returned
        self._watch, self._start_kib = watch, own_kib(kib("status"))
        self._all_start_kib = watch.begin() or self._start_kib

    def mib(self) -> float:
        """Return the peak in MiB. File pages, which the kernel's peak includes, are subtracted."""
        now = kib("status")
        own = now["VmHWM"] - now["RssFile"] - self._start_kib
        return max(0, own, self._watch.end() - self._all_start_kib) / 1024


def kib(file: str, pid: int | str = "self") -> dict[str, int]:
    """Return the values in kB from a file in a process's /proc folder, keyed by name.

    The result is empty if the process has ended.
    """
    with contextlib.suppress(OSError):
        # Skip the first line, because a process's name may contain any bytes.
        lines = Path(f"/proc/{pid}/{file}").read_bytes().split(b"\n")[1:]
        words = (line.decode().split() for line in lines if line.endswith(b" kB"))
        return {name.removesuffix(":"): int(count) for name, count, _ in words}
    return {}


def own_kib(status: dict[str, int]) -> int:
    """Return the resident memory of a process without file pages, in KiB."""
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def _started_kib(pid: int) -> int:
    """Return the memory in KiB that a started process owns.

    This is the peak since the process called exec, or the current memory if it has not called exec. Pages
    that a forked process shares with its parent are attributed to the parent. The result is 0 for a process
    that was started by vfork and has not called exec yet, because it uses its parent's memory.
    """
    fork, thread = is_fork(pid), live_thread(pid)
    now, highest = kib("smaps_rollup", thread), kib("status", thread).get("VmHWM", 0)
    private = now.get("Private_Dirty", 0)
    if not fork:
        return max(private, highest - (now.get("Rss", highest) - private))
    return 0 if parent_waits(pid) or not is_fork(pid) else private


def _forget_peak(pid: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
