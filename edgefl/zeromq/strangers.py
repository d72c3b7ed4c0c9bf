"""Limits on unauthenticated connections ("strangers") to a door, the socket to which other machines connect.

The number of such connections is limited, and so is the number of bytes that each may send. Without limits,
strangers could use up the file descriptors, and the memory for ZeroMQ's handshakes, before a key is checked.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sized
from contextlib import suppress

import zmq

from edgefl.host.pacing import Pauses, set_time_slice

Socket = zmq.Socket[bytes]
Context = zmq.Context[zmq.Socket[bytes]]

LOOK_S = 0.02
"""Minimum number of seconds between two checks of the connections."""
MAX_SHARE = 0.1
"""Maximum share of a core that the checks may use. With many connections, a check takes milliseconds."""
MAX_STRANGERS = 256
"""Maximum number of connections beyond the number of admitted peers. If there are more connections, the
oldest strangers (unauthenticated connections) are disconnected."""
STRANGER_BYTES, ALL_BYTES = 4 * 2**20, 32 * 2**20
"""Maximum number of bytes received from one stranger, and from all strangers together. These limits are
enforced on Linux only."""
SPARE_DESCRIPTORS = 512
"""If fewer file descriptors than this are free (or than half of the process's limit, if that is smaller), all
strangers are disconnected, because the files of the run's record need descriptors."""


class Strangers:
    """Connections to the socket ``router`` that have not yet sent a complete message.

    A peer with a valid key sends its first message after a few round trips, so it is a stranger only briefly.
    If there are too many strangers, the oldest are disconnected; a peer with a valid key then reconnects.
    ``admitted`` contains the admitted peers. ``called`` contains the remote address of each peer that has
    sent a message, keyed by the peer's name.
    """

    def __init__(
        self, router: Socket, context: Context, admitted: Sized, called: Mapping[bytes, str]
    ) -> None:
        self._router, self._admitted, self._called = router, admitted, called
        router.monitor("inproc://connections", zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events = context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # no limit, because ZeroMQ's own thread would block when a limit is reached
        self._events.connect("inproc://connections")
        self._open: dict[int, str] = {}
        """Remote address of each open connection, keyed by file descriptor; the oldest connection is
        first."""
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="edgefl-strangers", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Stop the thread that checks the connections."""
        self._over.set()
        self._watcher.join()
        self._router.disable_monitor()
        self._events.close(linger=0)

    def _watch(self) -> None:
        set_time_slice()  # ZeroMQ reads between the checks, so they must be on time even on a busy host
        pause_s, pauses = LOOK_S, Pauses(1.0 / MAX_SHARE)
        while not self._over.wait(pause_s):
            began_s = time.thread_time()
            with suppress(OSError, MemoryError):  # no file descriptor or no memory was free for this check
                self._look()
            pause_s = max(LOOK_S, pauses.after(time.thread_time() - began_s))

    def _look(self) -> None:
        """Record which connections have opened and closed, and shut down strangers that exceed a limit."""
        while self._events.poll(0):
            event = self._events.recv_multipart()[0]
            number = int.from_bytes(event[2:6], sys.byteorder)
            self._open.pop(number, None)
            if int.from_bytes(event[:2], sys.byteorder) == zmq.EVENT_ACCEPTED:
                with suppress(OSError):  # the connection is already closed
                    self._open[number] = far_end(number)
        known = set(self._called.values())
        strangers = [(number, far) for number, far in self._open.items() if far not in known]
        excess = len(self._open) - len(self._admitted) - MAX_STRANGERS
        stay = 0 if _short_of_descriptors() else len(strangers) - max(0, excess)
        in_all = 0
        for place, (number, far) in enumerate(reversed(strangers)):
            received = _received_bytes(number)
            if place < stay and received <= STRANGER_BYTES and in_all + received <= ALL_BYTES:
                in_all += received
            else:
                shut(number, far)
                del self._open[number]


def _received_bytes(number: int) -> int:
    """Return the number of bytes received on a TCP connection; 0 if the connection is closed or if the
    operating system does not count the bytes."""
    with suppress(OSError, AttributeError, struct.error):
        end = socket.socket(fileno=number)
        try:
            information = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        finally:
            end.detach()
        return int(struct.unpack_from("=Q", information, 128)[0])  # the field tcpi_bytes_received
    return 0


def _short_of_descriptors() -> bool:
    """Return True if few file descriptors are free. A new descriptor gets the lowest free number, so this
    number is compared with the limit."""
    try:
        lowest = os.dup(0)
    except OSError:
        return True
    os.close(lowest)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return lowest > most - min(SPARE_DESCRIPTORS, most // 2)


def far_end(number: int) -> str:
    """Return the remote address of a connection. Raises OSError if the file descriptor does not refer to a
    connection."""
    end = socket.socket(fileno=number)
    try:
        far = end.getpeername()
    finally:
        end.detach()
    if not isinstance(far, tuple):  # the connection was closed, and a Unix socket has its number
        raise OSError("not a connection over TCP")
    return f"tcp://{far[0]}:{far[1]}"


def shut(number: int, far: str) -> None:
    """Shut down the connection of a file descriptor if it still has the remote address ``far``. ZeroMQ then
    closes the descriptor."""
    with suppress(OSError):  # the connection is already closed
        if far_end(number) == far:
            end = socket.socket(fileno=number)
            try:
                end.shutdown(socket.SHUT_RDWR)
            finally:
                end.detach()
