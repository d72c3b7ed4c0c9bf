"""A process that computes, or that takes memory, and knows nothing of limits: what mechanisms are tried on.

Run as a file, not as a module, so that it starts in milliseconds. It ends with its parent, or by itself.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

LONGEST_S = 30.0


def main(what: str, amount: str) -> None:
    """``compute SECONDS`` keeps one core busy for so long; ``take MIB`` touches so much memory."""
    parent = os.getppid()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:
        return
    sys.stdout.write("!")
    sys.stdout.flush()
    if what == "compute":
        until = time.monotonic() + min(float(amount), LONGEST_S)
        while time.monotonic() < until:
            sum(range(1000))
    else:
        sys.stdin.read(1)
        taken = bytearray(int(float(amount) * (1 << 20)))
        taken[::4096] = b"\x01" * len(taken[::4096])
        sys.stdout.write("+")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
