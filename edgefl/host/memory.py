"""Limit a process's memory, without privileges (`MemoryLimit`) or with a control group (`open_memory`)."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Collection

import psutil

from edgefl.errors import ConfigError, message_of
from edgefl.host.groups import Groups, NoGroup, Place, process_stat, read_counters, read_words, write
from edgefl.host.process import read_kernel_file

_MIB = 1 << 20
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024
_FORKED = 0x40  # flag PF_FORKNOEXEC of proc_pid_stat(5): the process was forked and has not called exec
_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Part of the message of torch's RuntimeError after a failed allocation."""


def is_no_memory(error: BaseException) -> bool:
    """Return True if ``error`` means that Python, numpy or torch could not allocate memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY in message_of(error)
    )


class Growth:
    """Growth of this process's peak private resident memory since the object's creation."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        memory = self._process.memory_info()
        self._start_bytes = memory.rss - memory.shared

    def peak_mib(self) -> float:
        """Return the growth in MiB.

        The peak includes file-backed and shared pages, so their current size is subtracted.
        """
        shared = self._process.memory_info().shared
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        grew_mib: float = peak_mib - (shared + self._start_bytes) / _MIB
        return max(0.0, grew_mib)


def proportional_mib(pid: int | None) -> float | None:
    """Return the proportional set size of a process, in MiB.

    Return None if ``pid`` is None or the size cannot be read.
    """
    try:
        pss = None if pid is None else getattr(psutil.Process(pid).memory_full_info(), "pss", None)
    except psutil.Error:
        return None
    return None if pss is None else float(pss / 2**20)


def private_mib(pids: Collection[int]) -> float:
    """Return the total resident memory of processes, in MiB, excluding files and shared memory.

    A page that a forked process has not copied yet belongs to both the process and its parent, but is counted
    only once. Processes that have ended count as 0. The call takes about 10 µs per process if none is a fork,
    and otherwise up to 10 µs for each MiB of each process.
    """
    forks = {pid for pid in pids if is_fork(pid)} if len(pids) > 1 else set()
    counted = [pid for pid in pids if pid not in forks or not parent_waits(pid)]
    if forks:
        return sum(_proportional_kib(live_thread(pid)) for pid in counted) / 1024
    return sum(map(_private_kib, counted)) / 1024


def live_thread(pid: int) -> int:
    """Return ``pid``, or another thread of the process if its first thread has ended.

    /proc shows no memory for an ended first thread, although the other threads keep all of it.
    """
    if process_stat(pid)[:1] == ["Z"]:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                if process_stat(f"{pid}/task/{task}")[:1] != ["Z"]:
                    return int(task)
    return pid


def _private_kib(pid: int) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        resident, shared = map(int, read_kernel_file(f"/proc/{pid}/statm").split()[1:3])
        if not resident and (thread := live_thread(pid)) != pid:
            return _private_kib(thread)
        return (resident - shared) * _PAGE_KIB
    return 0.0


def _proportional_kib(pid: int) -> float:
    """Return a process's private memory in KiB, each page divided by the number of processes that map it."""
    with contextlib.suppress(OSError):
        for line in read_kernel_file(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith(b"Pss_Anon:"):
                return float(line.split()[1])
    return _private_kib(pid)  # another user's process, or an old version of Linux


def is_fork(pid: int) -> bool:
    """Return True if the process was forked and has not called exec since."""
    found = process_stat(pid)
    return bool(found) and bool(int(found[6]) & _FORKED)


def parent_waits(pid: int) -> bool:
    """Return True if a thread of the parent is in an uninterruptible wait, as after a vfork.

    Until it calls exec, a process created by vfork appears to own the memory of its parent.
    """
    parent = next(iter(process_stat(pid)[1:2]), "")
    with contextlib.suppress(OSError):
        return any(
            process_stat(f"{parent}/task/{task}")[:1] == ["D"] for task in os.listdir(f"/proc/{parent}/task")
        )
    return False


class MemoryLimit:
    """Limits this process to ``limit_mib`` MiB more than it uses at the object's creation.

    Create it in the client after the fork and after opening sockets, so that these are not counted.

    ``RLIMIT_DATA`` is set to the current private writable memory plus the limit, so that an allocation beyond
    it fails (``MemoryError`` in Python and numpy, ``RuntimeError`` in torch). The limit covers all mapped
    private memory, even if it is never touched, and threads' stacks, but not shared memory. In addition,
    `over` and `used_mib` measure the growth of private resident memory, which excludes pages shared with the
    parent.
    """

    def __init__(self, limit_mib: float) -> None:
        self.limit_mib = _checked_mib(limit_mib)
        self._process = psutil.Process()
        self._start_bytes = self._private_bytes()
        self._peak_mib = 0.0
        if data_bytes := self._process.memory_info().data:
            soft, (_, hard) = data_bytes + int(limit_mib * _MIB), resource.getrlimit(resource.RLIMIT_DATA)
            if hard != resource.RLIM_INFINITY:
                soft = min(soft, hard)
            with contextlib.suppress(OSError, ValueError):  # if refused, the limit is only observed
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def _private_bytes(self) -> int:
        """Return the resident memory that is neither file-backed nor shared, in bytes."""
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)

    def used_mib(self) -> float:
        """Return the growth of private resident memory since the limit was set, in MiB."""
        used = max(0, self._private_bytes() - self._start_bytes) / _MIB
        self._peak_mib = max(self._peak_mib, used)
        return used

    @property
    def peak_mib(self) -> float:
        """Largest growth measured by `over`, `used_mib` or this property, in MiB."""
        self.used_mib()
        return self._peak_mib

    def over(self) -> bool:
        """Return True if the process is over its limit now. The call takes about 20 µs."""
        return self.used_mib() > self.limit_mib


def _checked_mib(limit_mib: float) -> float:
    if not 0 < limit_mib < 2**40:
        raise ValueError(f"limit_mib must be finite and above 0 (got {limit_mib})")
    return limit_mib


class GroupMemory:
    """Memory limit of a control group that holds one process.

    The limit covers the pages that this process touches before any other (private, shared and page cache),
    and the kernel memory for them. It does not cover pages of the parent that a forked process only reads.
    Swap is disabled if the kernel accounts for it.
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
        """Peak memory in MiB; NaN if the kernel does not report it (control groups v2 before Linux 5.19)."""
        found = read_words(
            self._folder / ("memory.peak" if self._version == 2 else "memory.max_usage_in_bytes")
        )
        return int(found[0]) / _MIB if found else float("nan")

    @property
    def kills(self) -> int:
        """Number of processes that the kernel killed because of this limit."""
        file = "memory.events" if self._version == 2 else "memory.oom_control"
        return read_counters(self._folder / file).get("oom_kill", 0)

    def over(self) -> bool:
        """Return False, because the kernel kills a process that exceeds the limit."""
        return False


class MemoryHold(contextlib.AbstractContextManager["MemoryHold"]):
    """Until `close`, a control group limits process ``pid`` to ``limit_mib`` MiB above its current use.

    The kernel kills the process if it exceeds the limit. Raises ConfigError if control groups cannot be
    used, and ValueError if the limit is not finite or not above 0. See `MemoryLimit` for use without
    privileges.
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

    def _read(self) -> tuple[int, float]:
        """Return the number of kills and the peak memory in MiB; after `close`, the last values."""
        if self._open:
            self._seen = self._memory.kills, self._memory.peak_mib
        return self._seen

    @property
    def killed(self) -> bool:
        """True once the kernel has killed the process, or one that it started, for exceeding the limit."""
        return self._read()[0] > 0

    @property
    def peak_mib(self) -> float:
        """Largest growth since the limit was set, in MiB."""
        return self._read()[1]

    def close(self) -> None:
        """Remove the limit. A second call does nothing."""
        self._read()
        self._open = False
        self._groups.close()

    def __exit__(self, *_: object) -> None:
        self.close()


open_memory = MemoryHold
