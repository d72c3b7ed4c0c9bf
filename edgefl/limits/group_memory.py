"""A control group's memory limit: past it the kernel kills the process, as a phone would."""

from __future__ import annotations

import contextlib

from edgefl.errors import ConfigError
from edgefl.limits.groups import Groups
from edgefl.limits.hierarchy import NoGroup, Place, figures, words, write

_MIB = 1 << 20


class GroupMemory:
    """The memory limit of one control group, which holds one process.

    It counts what its processes touch first: private pages, shared ones, the page cache of files, and the
    kernel's memory for them. A page of the parent's that a forked child only reads is the parent's. Swap is
    not given where it can be counted.
    """

    mechanism = "cgroup"

    def __init__(self, place: Place, limit_mib: float) -> None:
        if not 0 < limit_mib < 2**40:
            raise ValueError(f"limit_mib must be finite and above 0 (got {limit_mib})")
        self.limit_mib = limit_mib
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
        file = "memory.peak" if self._version == 2 else "memory.max_usage_in_bytes"
        found = words(self._folder / file)
        return int(found[0]) / _MIB if found else float("nan")

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed because of this limit."""
        file = "memory.events" if self._version == 2 else "memory.oom_control"
        return figures(self._folder / file).get("oom_kill", 0)

    def over(self) -> bool:
        """Never: who is over it is dead."""
        return False


class MemoryHold:
    """A running process under a memory limit of its own; made by `open_memory`."""

    def __init__(self, pid: int, limit_mib: float) -> None:
        try:
            self._groups = Groups(["memory"])
        except NoGroup as why:
            raise ConfigError(f"memory 'cgroup' cannot be used here: {why}") from None
        try:
            leaf = self._groups.leaf(f"memory-{pid}")
            self._memory = GroupMemory(leaf.place("memory"), limit_mib)
            leaf.enter(pid)
        except BaseException:
            self._groups.close()
            raise
        self._kills = 0
        self._peak_mib = float("nan")
        self._open = True

    def _look(self) -> None:
        if self._open:
            self._kills, self._peak_mib = self._memory.kills, self._memory.peak_mib

    @property
    def killed(self) -> bool:
        """Whether the kernel has killed it, or a process that it started, for want of memory."""
        self._look()
        return self._kills > 0

    @property
    def peak_mib(self) -> float:
        """The most that it has gained since it was put under the limit, MiB."""
        self._look()
        return self._peak_mib

    def close(self) -> None:
        """Take the limit off; does nothing the second time."""
        self._look()
        self._open = False
        self._groups.close()

    def __enter__(self) -> MemoryHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_memory(pid: int, limit_mib: float) -> MemoryHold:
    """Hold process ``pid`` to ``limit_mib`` MiB more than it has now, by a control group, until closed.

    Past the limit the kernel kills it. ConfigError, in one line, where control groups cannot be used;
    ValueError if the limit is not a finite number above 0. Without privileges a process can limit itself:
    `edgefl.limits.memory.limit_memory`.
    """
    return MemoryHold(pid, limit_mib)
