"""Messages without an end: ZeroMQ keeps a message's frames until its last has come, and shows none before.

So a peer that never sends the last would fill the server's memory unheard. It is found by that memory.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Set
from contextlib import suppress

LOOK_S = 0.02
MOST_SHARE = 0.02
"""Most of the server's time that looking may take: with many peers one look is milliseconds."""
MOST_BYTES = 64 * 2**20
"""Bytes by which the server's own memory may grow before it is looked who might fill it."""


class Unfinished:
    """Finds who fills this process's memory with a message that does not end. Linux; elsewhere it finds none.

    Where memory has grown by much, it is who has bytes waiting at two looks and said nothing whole meanwhile,
    although everything that was whole has been read; of several, the one with the most.
    """

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else None
        self._calm_bytes = self._own_bytes()
        self._waited: dict[str, int] = {}
        self._next_s = 0.0

    @property
    def due(self) -> bool:
        """True if it is time for the next look."""
        return self._statm is not None and time.monotonic() >= self._next_s

    def look(self, spoke: Set[str], *, all_read: bool) -> str | None:
        """Returns the address of such a peer; those that ``spoke`` since the last look are none."""
        began_s = time.monotonic()
        before, self._waited = self._waited, {}
        grown = self._own_bytes() - self._calm_bytes > MOST_BYTES
        if grown and all_read:
            self._waited = bytes_wait_from()
            if not self._waited:
                if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
                    trim(0)  # what was forgotten goes back to the system
                self._calm_bytes = self._own_bytes()  # the rest is this process's own doing
        now_s = time.monotonic()
        self._next_s = now_s + max(LOOK_S, (now_s - began_s) / MOST_SHARE)
        suspects = (before.keys() & self._waited.keys()) - spoke
        return max(suspects, key=self._waited.__getitem__, default=None)

    def close(self) -> None:
        """Look no more."""
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None

    def _own_bytes(self) -> int:
        if self._statm is None:
            return 0
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")


def bytes_wait_from() -> dict[str, int]:
    """Returns how many bytes wait to be read, by ZeroMQ's address at the far end of their connection."""
    import termios
    from fcntl import ioctl

    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            end = socket.socket(fileno=number)
        except OSError:  # no socket, or none any more
            continue
        with suppress(OSError):
            if count := int.from_bytes(ioctl(number, termios.FIONREAD, bytes(4)), sys.byteorder):
                far = end.getpeername()
                where = f"@{far[1:].decode()}" if isinstance(far, bytes) else str(far)
                found[f"ipc://{where}"] = count
        end.detach()
    return found
