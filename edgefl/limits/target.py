"""A process that is held to a share of the CPU: what it has used, and stopping it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from edgefl.errors import ConfigError


def cpu_ns(pid: int) -> int:
    """CPU time that process ``pid`` has used so far, all its threads, in ns; 0 is this process.

    ProcessLookupError if there is none. Linux lets every user read any process's clock.

    >>> before = cpu_ns(0)
    >>> sum(range(1000)), cpu_ns(0) > before
    (499500, True)
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"the CPU time of another process cannot be read on {sys.platform}, only on Linux")
    try:
        # CPUCLOCK_SCHED of a whole process, as clock_getcpuclockid(3) makes it
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        raise ProcessLookupError(f"no process {pid}") from None


class Target:
    """One process, held by descriptor: a signal never reaches another one that got its number.

    ProcessLookupError if there is no process ``pid``, ConfigError if it is another user's, ValueError for a
    number that is none.
    """

    def __init__(self, pid: int) -> None:
        if pid < 1:
            raise ValueError(f"pid must be at least 1 (got {pid})")
        if not hasattr(os, "pidfd_open"):
            raise ConfigError(f"a process cannot be held on {sys.platform}, only on Linux")
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self.stopped = False
        try:
            signal.pidfd_send_signal(self._fd, 0)
        except PermissionError:
            os.close(self._fd)
            raise ConfigError(f"process {pid} is another user's: it cannot be held") from None

    def cpu_ns(self) -> int:
        """CPU time it has used so far, ns. ProcessLookupError once it is gone."""
        return cpu_ns(self.pid)

    def sleeps(self) -> bool:
        """Whether its first thread waits for something else than a core."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("S", "D")

    def stop(self) -> None:
        """Let it run no further."""
        self.stopped = True
        signal.pidfd_send_signal(self._fd, signal.SIGSTOP)

    def go(self) -> None:
        """Let it run on."""
        self.stopped = False
        signal.pidfd_send_signal(self._fd, signal.SIGCONT)

    def close(self) -> None:
        """Let it run on for good, if it still lives."""
        if self._fd < 0:
            return
        try:
            if self.stopped:
                self.go()
        except ProcessLookupError:
            pass
        finally:
            os.close(self._fd)
            self._fd = -1
