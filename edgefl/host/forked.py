"""Call a function in a forked child of this process, so that the call cannot change this process."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable

from edgefl.host.channel import Closed
from edgefl.host.children import Exit, collect, end_children, fork, waiting_for_children
from edgefl.host.process import open_pidfd

_MAX_WAIT_S = 1e3
"""Maximum time of one wait in seconds, so that it fits into poll's 32-bit number of milliseconds."""


def call_forked(
    name: str,
    call: Callable[[], bytes],
    *,
    quiet: bool = True,
    limit_s: float = math.inf,
    caller: int | None = None,
    look: Callable[[], float] = lambda: math.inf,
    end_all: bool = False,
) -> tuple[bytes, Exit]:
    """Run ``call`` in a forked child; return its result, and how the child ended.

    The result is empty if the child ended early. If ``quiet``, the child's output is discarded. While this
    process waits, it calls ``look``, which returns the seconds until ``look`` must be called again. If
    ``end_all``, all children of this process and their descendants are killed at the end. Raises TimeoutError
    after ``limit_s`` seconds, and `Closed` if the other end of the socket ``caller`` is closed. After such an
    error the child is still running, unless ``end_all``.
    """
    read, write = os.pipe()

    def main() -> None:
        restore_sigchld()
        os.close(read)
        own = os.getpid()
        if quiet:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        result = call()
        if os.getpid() == own:  # not true in a process that ``call`` forked and that returned here
            with os.fdopen(write, "wb") as pipe:
                pipe.write(result)

    with waiting_for_children() as restore_sigchld:
        pid = fork(name, main)
        os.close(write)
        child = open_pidfd(pid)
        try:
            return _written(read, child, caller, look, time.monotonic() + limit_s), collect(pid)
        finally:
            os.close(child)
            os.close(read)
            if end_all:
                end_children()


def _written(read: int, child: int, caller: int | None, look: Callable[[], float], until_s: float) -> bytes:
    """Return what the child wrote into the pipe before it ended.

    This does not wait for the end of the pipe, because the child's children may keep the pipe open.
    """
    data, poller, ended = bytearray(), select.poll(), False
    poller.register(read, select.POLLIN)
    poller.register(child, select.POLLIN)
    if caller is not None:
        poller.register(caller, select.POLLRDHUP)
    while (left_s := until_s - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in poller.poll(min(left_s, look(), _MAX_WAIT_S) * 1e3)}
        if caller in ready:
            raise Closed
        if read in ready:
            part = os.read(read, 1 << 16)
            data += part
            if not part:
                poller.unregister(read)
        elif ended:
            return bytes(data)
        ended = child in ready  # poll once more: the child may have written just before it ended
    raise TimeoutError
