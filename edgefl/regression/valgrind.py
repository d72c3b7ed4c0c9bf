"""Requests to Valgrind from a program that runs under Valgrind.

When it is run as a script, this module imports the module that its first argument names, and passes the
second argument to that module's function ``main``.

This module imports little, because code is 50 times slower until the instrumentation is switched off.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from importlib import import_module

_TOOL = ord("C") << 24 | ord("T") << 16
ZERO, START, STOP, DUMP = _TOOL + 1, _TOOL + 4, _TOOL + 5, _TOOL
_CODE = bytes.fromhex("53 4889f8 4831d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 5b c3")
"""Machine code, for x86-64, of a function whose argument is the address of a request and its five arguments.
It contains the preamble from valgrind.h: four rotations by 128 bits in all, and an exchange of a register
with itself. Valgrind recognises this as a request; outside Valgrind it has no effect."""
_page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
_page.write(_CODE)
_call = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(_page)))


def request(code: int) -> int:
    """Send a request to Callgrind; return its result, which is 0 outside Valgrind.

    >>> import os
    >>> request(ZERO) if os.uname().machine == "x86_64" else 0
    0
    """
    words = (ctypes.c_ulong * 6)(code)
    return int(_call(ctypes.addressof(words)))


if __name__ == "__main__":
    request(STOP)
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: end with the process that waits for the counts
    sys.path.pop(0)  # remove this file's folder
    import_module("site").main()  # not imported at the top, because the start is instrumented
    import_module(sys.argv[1]).main(sys.argv[2])
