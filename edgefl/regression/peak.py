"""The peak of a process's own memory over a stretch of time, as the kernel kept it: nothing is sampled."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class Peak:
    """Private and shared memory gained since this was made, at its highest; file pages are not counted.

    >>> return_free_memory()
    >>> peak = Peak()
    >>> block = b"x" * (16 << 20); del block
    >>> 15 < peak.mib() < 18
    True
    """

    def __init__(self) -> None:
        # Where it cannot be reset the peak since the process began is taken: in a fresh process the same.
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text(_RESET_PEAK)
        now = _status_kib()
        self._start_kib = now["RssAnon"] + now["RssShmem"]

    def mib(self) -> float:
        """MiB; the file pages mapped now are taken off the peak, since the kernel keeps one for all."""
        now = _status_kib()
        return max(0, now["VmHWM"] - now["RssFile"] - self._start_kib) / 1024


def return_free_memory() -> None:
    """Give the allocator's free pages back to the system, so that using memory again is seen as growth."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_kib() -> dict[str, int]:
    found = dict.fromkeys(("VmHWM", "RssAnon", "RssFile", "RssShmem"), 0)
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0])
    return found
