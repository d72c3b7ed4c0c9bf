"""A process's memory limit: without privileges (`MemoryLimit`), or by a control group (`open_memory`)."""

from __future__ import annotations

import contextlib
import resource

import psutil

from edgefl.errors import ConfigError
from edgefl.limits.groups import Groups, NoGroup, Place, figures, words, write

_MIB = 1 << 20


def peak_resident_mib() -> float:
    """The most resident memory that this process has had, shared pages too, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Growth:
    """Growth of this process's peak private resident memory since this was made."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        memory = self._process.memory_info()
        self._start_bytes = memory.rss - getattr(memory, "shared", 0)

    def peak_mib(self) -> float:
        """MiB; resident pages of files and shared memory are taken as they are now."""
        shared = getattr(self._process.memory_info(), "shared", 0)
        grew_mib: float = peak_resident_mib() - (shared + self._start_bytes) / _MIB
        return max(0.0, grew_mib)


def proportional_mib(pid: int | None) -> float | None:
    """A process's proportional set size; None without a process, and where the system does not tell."""
    try:
        pss = None if pid is None else getattr(psutil.Process(pid).memory_full_info(), "pss", None)
    except psutil.Error:
        return None
    return None if pss is None else float(pss / 2**20)


class MemoryLimit:
    """Holds this process to ``limit_mib`` MiB more than it has when this is made.

    Make it in the client after the fork and when its sockets are open, so that these do not count.

    ``rlimit``: ``RLIMIT_DATA`` is set to the private writable memory of now plus the limit, so that an
    allocation past it fails (``MemoryError`` in Python and numpy, ``RuntimeError`` in torch). It counts what
    is mapped, touched or not, thread stacks too, but no shared memory. ``watch``: growth of the private
    resident memory, read when `over` or `used_mib` is called. Pages shared with the parent do not count.
    """

    def __init__(self, limit_mib: float) -> None:
        self.limit_mib = _checked_mib(limit_mib)
        self._process = psutil.Process()
        self._start_bytes = self._private_bytes()
        self._peak_mib = 0.0
        if data_bytes := getattr(self._process.memory_info(), "data", 0):
            soft, (_, hard) = data_bytes + int(limit_mib * _MIB), resource.getrlimit(resource.RLIMIT_DATA)
            if hard != resource.RLIM_INFINITY:
                soft = min(soft, hard)
            with contextlib.suppress(OSError, ValueError):  # refused: the watch must do
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def _private_bytes(self) -> int | None:
        """Resident memory that is neither file-backed nor shared memory; None where it cannot be told."""
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared) if hasattr(memory, "shared") else None

    def used_mib(self) -> float:
        """Private resident memory gained since the limit was set, MiB; 0 where it cannot be read."""
        now = self._private_bytes()
        if now is None or self._start_bytes is None:
            return 0.0
        used = max(0, now - self._start_bytes) / _MIB
        self._peak_mib = max(self._peak_mib, used)
        return used

    @property
    def peak_mib(self) -> float:
        """The largest growth that `over`, `used_mib` or this has seen, MiB; it looks again when read."""
        self.used_mib()
        return self._peak_mib

    def over(self) -> bool:
        """Returns True if the process now holds more than its limit; costs some 20 µs."""
        return self.used_mib() > self.limit_mib


def _checked_mib(limit_mib: float) -> float:
    if not 0 < limit_mib < 2**40:
        raise ValueError(f"limit_mib must be finite and above 0 (got {limit_mib})")
    return limit_mib


class GroupMemory:
    """The memory limit of one control group, which holds one process.

    It counts what that touches first: pages, private and shared, files' page cache, and the kernel's memory
    for them; not what a forked child only reads. Swap is not given where it can be counted.
    """

    def __init__(self, place: Place, limit_mib: float) -> None:
        self.limit_mib = _checked_mib(limit_mib)
        self._folder, self._version = place
        limit = str(int(limit_mib * _MIB))
        if self._version == 2:
            write(self._folder / "memory.max", limit)
            swap, value = "memory.swap.max", "0"
        else:
            write(self._folder / "memory.limit_in_bytes", limit)
            swap, value = "memory.memsw.limit_in_bytes", limit
        if (self._folder / swap).exists():
            with contextlib.suppress(NoGroup):
                write(self._folder / swap, value)

    @property
    def peak_mib(self) -> float:
        """The most it has held, MiB; NaN where the kernel does not tell (version 2 before Linux 5.19)."""
        found = words(self._folder / ("memory.peak" if self._version == 2 else "memory.max_usage_in_bytes"))
        return int(found[0]) / _MIB if found else float("nan")

    @property
    def kills(self) -> int:
        """Number of processes that the kernel has killed because of this limit."""
        file = "memory.events" if self._version == 2 else "memory.oom_control"
        return figures(self._folder / file).get("oom_kill", 0)

    def over(self) -> bool:
        """Never: a process that is over it is dead."""
        return False


class MemoryHold(contextlib.AbstractContextManager["MemoryHold"]):
    """Holds process ``pid`` to ``limit_mib`` MiB more than it has now, by a control group, until closed.

    Past the limit the kernel kills it. ConfigError, in one line, where control groups cannot be used;
    ValueError if the limit is not a finite number above 0. Without privileges: `memory.MemoryLimit`.
    """

    def __init__(self, pid: int, limit_mib: float) -> None:
        with contextlib.ExitStack() as undo:
            try:
                self._groups = undo.enter_context(Groups(["memory"]))
            except NoGroup as why:
                raise ConfigError(f"memory 'cgroup' cannot be used here: {why}") from None
            group = self._groups.group(f"memory-{pid}")
            self._memory = GroupMemory(group.place("memory"), limit_mib)
            group.enter(pid)
            undo.pop_all()
        self._seen, self._open = (0, float("nan")), True

    def _look(self) -> tuple[int, float]:
        """Kills and peak, as the group said while it was there."""
        if self._open:
            self._seen = self._memory.kills, self._memory.peak_mib
        return self._seen

    @property
    def killed(self) -> bool:
        """True once the kernel has killed it, or a process that it started, for want of memory."""
        return self._look()[0] > 0

    @property
    def peak_mib(self) -> float:
        """The most that it has gained since it was put under the limit, MiB."""
        return self._look()[1]

    def close(self) -> None:
        """Take the limit off; does nothing the second time."""
        self._look()
        self._open = False
        self._groups.close()

    def __exit__(self, *_: object) -> None:
        self.close()


open_memory = MemoryHold
