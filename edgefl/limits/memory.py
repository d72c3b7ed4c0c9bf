"""A client's memory limit without privileges: an allocation past it fails, growth is watched."""

from __future__ import annotations

import os
import sys
from pathlib import Path

try:
    import resource

    _HAS_RLIMIT = hasattr(resource, "RLIMIT_DATA")
except ImportError:  # there is none on Windows
    _HAS_RLIMIT = False

_MIB = 1 << 20
_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")


class MemoryLimit:
    """The limit of this process, counted from the moment it was set; made by `limit_memory`.

    Two mechanisms, each used where the system has it:

    ``rlimit``
        ``RLIMIT_DATA`` set to the private writable memory of now plus the limit, so that an allocation
        past it fails (``MemoryError`` in Python and numpy, ``RuntimeError`` in torch). It counts what is
        mapped, touched or not: thread stacks too, but no shared memory. ``RLIMIT_AS`` is not used: it
        would count every library and mapping.
    ``watch``
        Growth of the private resident memory (resident less shared and file pages), read by `over` and
        `used_mib`; memory is seen when they are called, not between. A page of the parent's that a forked
        child writes to was resident before, so it does not count as growth.
    """

    def __init__(self, limit_mib: float) -> None:
        if not 0 < limit_mib < 2**40:
            raise ValueError(f"limit_mib must be finite and above 0 (got {limit_mib})")
        self.limit_mib = limit_mib
        self._peak_mib = 0.0
        self.missing: tuple[str, ...] = ()
        """Mechanisms that this system does not have, each with its reason."""
        self._before: tuple[int, int] | None = None
        self._start_bytes = _private_bytes()
        if self._start_bytes is None:
            self.missing += (f"watch: {_STATM} cannot be read on {sys.platform}",)
        data_bytes = _data_bytes()
        if not _HAS_RLIMIT or data_bytes is None:
            self.missing += (f"rlimit: no RLIMIT_DATA with {_STATUS} on {sys.platform}",)
        else:
            self._set_rlimit(data_bytes)

    def _set_rlimit(self, data_bytes: int) -> None:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        soft = data_bytes + int(self.limit_mib * _MIB)
        hard = before[1]
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        except (OSError, ValueError) as wrong:
            self.missing += (f"rlimit: setrlimit(RLIMIT_DATA) was refused: {wrong}",)
            return
        self._before = before

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """What is enforced here: of ``rlimit`` and ``watch``."""
        return (("rlimit",) if self._before is not None else ()) + (
            ("watch",) if self._start_bytes is not None else ()
        )

    def used_mib(self) -> float:
        """Private resident memory gained since the limit was set, MiB; 0 where it cannot be read."""
        now = _private_bytes()
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
        """Whether the process now holds more than its limit. Costs some 10 µs."""
        return self.used_mib() > self.limit_mib

    def lift(self) -> None:
        """Take the rlimit off again; the watch goes on."""
        if self._before is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._before)
            self._before = None


def limit_memory(limit_mib: float) -> MemoryLimit:
    """Hold this process to ``limit_mib`` MiB more than it has now.

    Call it in the client after the fork and after its sockets are open, so that what is shared with its
    parent and the threads it needs are not counted.

    >>> limit = limit_memory(4096)
    >>> limit.over()
    False
    >>> limit.lift()
    """
    return MemoryLimit(limit_mib)


def _private_bytes() -> int | None:
    """Resident memory that is neither file-backed nor shared memory, or None."""
    try:
        fields = _STATM.read_bytes().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):
        return None


def _data_bytes() -> int | None:
    """Private writable memory mapped now (VmData), which is what RLIMIT_DATA counts, or None."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
