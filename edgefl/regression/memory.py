"""The memory of a repetition: of its own process as the kernel keeps it, and of all that it has started."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from edgefl.host.children import children_of
from edgefl.host.groups import process_stat

LOOK_S = 0.005
"""Time between two looks at what a call has started."""
PAUSE = 4
"""A look is followed by a pause of so many times its CPU time: looking takes at most a fifth of a core."""
_FORKED = 0x40  # PF_FORKNOEXEC in proc_pid_stat(5): it has its parent's program


class TreeWatch:
    """Looks at the memory of a call's process and of all that it has started, while the call runs.

    The measuring process makes it and then forks the call's, which says when to begin and end: a page that
    both have tells the one of that, and the other the most that was seen.
    """

    def __init__(self) -> None:
        self._measuring = os.getpid()
        # The call's process, 0 before it begins and -1 once it is over; KiB at the highest.
        self._page = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")

    def reset(self) -> None:
        """Get ready for the next process."""
        self._page[0] = self._page[1] = 0

    def begin(self) -> int:
        """Begin, in the call's process; returns the KiB that all hold now."""
        for pid in self._others(os.getpid()):
            _forget_peak(pid)
        self._page[0] = os.getpid()
        return self._now_kib(os.getpid())

    def end(self) -> int:
        """End, in the call's process; returns the KiB that all held at the highest that was seen."""
        last = self._now_kib(os.getpid())
        self._page[0] = -1
        return max(last, self._page[1])

    def look(self) -> float:
        """Look, in the measuring process; returns the seconds until the next look."""
        pid, start_s = self._page[0], time.thread_time()
        if pid < 0:
            return math.inf
        if pid:
            self._page[1] = max(self._page[1], self._now_kib(pid))
        return max(LOOK_S, PAUSE * (time.thread_time() - start_s))

    def _now_kib(self, pid: int) -> int:
        """KiB of the call's process now, and of the others since they are there."""
        others = sum(map(_started_kib, self._others(pid)))
        return own_kib(kib("status", pid)) + others if others else 0

    def _others(self, own: int) -> Iterator[int]:
        """All that the call has started; what has lost its parent fell to the measuring process."""
        waiting = [self._measuring]
        for pid in waiting:
            waiting += children_of(pid) or ()
            if pid not in (self._measuring, own):
                yield pid


class Peak:
    """Private and shared memory gained since this was made, at its highest.

    Of this process as the kernel keeps it; with what it has started, as far as ``watch`` has seen it.

    >>> block = mmap.mmap(-1, 4096 * 4096)
    >>> peak = Peak(TreeWatch())
    >>> block[::4096] = b"x" * 4096  # touch each page
    >>> 15 < peak.mib() < 18
    True
    >>> block.close()
    """

    def __init__(self, watch: TreeWatch) -> None:
        _forget_peak(os.getpid())  # where it cannot, it is since the process began: in a fresh one the same
        self._watch, self._start_kib = watch, own_kib(kib("status"))
        self._all_start_kib = watch.begin() or self._start_kib

    def mib(self) -> float:
        """Return the peak in MiB, less the file pages mapped now, since the kernel keeps one for all."""
        now = kib("status")
        own = now["VmHWM"] - now["RssFile"] - self._start_kib
        return max(0, own, self._watch.end() - self._all_start_kib) / 1024


def kib(file: str, pid: int | str = "self") -> dict[str, int]:
    """Return what a file of the process in /proc gives in kB, by name; nothing of one that is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/{file}").read_bytes().split(b"\n")[1:]  # after a name, of any bytes
        words = (line.decode().split() for line in lines if line.endswith(b" kB"))
        return {name.removesuffix(":"): int(count) for name, count, _ in words}
    return {}


def own_kib(status: dict[str, int]) -> int:
    """Return a process's resident memory that is no file's."""
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def _started_kib(pid: int) -> int:
    """Memory that this process alone holds: since its program began at its highest, of a mere fork now.

    Pages that a fork shares with its parent are the parent's; one that is about to become another program
    may still have its parent's memory as its own, while the parent waits for it.
    """
    fork = _is_fork(pid)
    now, highest = kib("smaps_rollup", pid), kib("status", pid).get("VmHWM", 0)
    private = now.get("Private_Dirty", 0)
    if not fork:
        return max(private, highest - (now.get("Rss", highest) - private))
    return 0 if _parent_waits(pid) or not _is_fork(pid) else private


def _is_fork(pid: int) -> bool:
    found = process_stat(pid)
    return bool(found) and bool(int(found[6]) & _FORKED)


def _parent_waits(pid: int) -> bool:
    """Returns True if a thread of the process's parent is in a wait that cannot be interrupted."""
    parent = next(iter(process_stat(pid)[1:2]), "")
    with contextlib.suppress(OSError):
        return any(process_stat(int(task))[:1] == ["D"] for task in os.listdir(f"/proc/{parent}/task"))
    return True


def _forget_peak(pid: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
