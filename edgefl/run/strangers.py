"""Connections to a door that have said nothing yet: a thread keeps them, and the bytes that they send, few.

They would cost descriptors, and memory for what ZeroMQ keeps of a handshake, before a key is asked for.
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

from edgefl.limits.pacing import set_time_slice

Socket = zmq.Socket[bytes]
Context = zmq.Context[zmq.Socket[bytes]]

LOOK_S = 0.02
"""Seconds between two looks."""
MOST_SHARE = 0.1
"""Largest share of a core for looking: with many connections one look takes milliseconds."""
MOST_STRANGERS = 256
"""Most connections that have said nothing, beside those that are waited for."""
STRANGER_BYTES, ALL_BYTES = 4 * 2**20, 32 * 2**20
"""Bytes that may come from a stranger, and from all of them. Linux; elsewhere they are not counted."""
SPARE_DESCRIPTORS = 512
"""Where fewer descriptors than these are left nobody may be silent: a record has to be written, too."""


class Strangers:
    """Connections that others made to this socket, of which nothing whole has been heard yet.

    An honest one needs a few round trips and speaks at once; so where there are many the oldest are shut,
    and an honest one among them comes again. ``admitted`` are all that may come; ``called`` has the far ends
    of those that have spoken.
    """

    def __init__(
        self, router: Socket, context: Context, admitted: Sized, called: Mapping[bytes, str]
    ) -> None:
        self._router, self._admitted, self._called = router, admitted, called
        router.monitor("inproc://connections", zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events = context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # at a mark ZeroMQ's own thread would wait
        self._events.connect("inproc://connections")
        self._open: dict[int, str] = {}
        """Far ends by descriptor, the oldest first."""
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="edgefl-strangers", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._watcher.join()
        self._router.disable_monitor()
        self._events.close(linger=0)

    def _watch(self) -> None:
        set_time_slice()  # soon, also where the host is busy: ZeroMQ's thread reads on meanwhile
        pause_s = LOOK_S
        while not self._over.wait(pause_s):
            began_s = time.thread_time()
            with suppress(OSError, MemoryError):  # no descriptor, or no memory, is left to look with
                self._look()
            pause_s = max(LOOK_S, (time.thread_time() - began_s) / MOST_SHARE)

    def _look(self) -> None:
        """Learn who came and went since the last look; shut strangers that are too many or send too much."""
        while self._events.poll(0):
            event = self._events.recv_multipart()[0]
            number = int.from_bytes(event[2:6], sys.byteorder)
            self._open.pop(number, None)
            if int.from_bytes(event[:2], sys.byteorder) == zmq.EVENT_ACCEPTED:
                with suppress(OSError):  # it is gone again
                    self._open[number] = far_end(number)
        known = set(self._called.values())
        strangers = [(number, far) for number, far in self._open.items() if far not in known]
        excess = len(self._open) - len(self._admitted) - MOST_STRANGERS
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
    """Bytes that have come by this TCP connection; 0 if it is gone, and where the system does not count."""
    with suppress(OSError, AttributeError, struct.error):
        end = socket.socket(fileno=number)
        try:
            information = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        finally:
            end.detach()
        return int(struct.unpack_from("=Q", information, 128)[0])  # tcpi_bytes_received
    return 0


def _short_of_descriptors() -> bool:
    """Returns True if this process may not open many more: it is always given the lowest that is free."""
    try:
        lowest = os.dup(0)
    except OSError:
        return True
    os.close(lowest)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return lowest > most - min(SPARE_DESCRIPTORS, most // 2)


def far_end(number: int) -> str:
    """The far end's address of a connection. OSError if this descriptor is none."""
    end = socket.socket(fileno=number)
    try:
        far = end.getpeername()
    finally:
        end.detach()
    return f"tcp://{far[0]}:{far[1]}"


def shut(number: int, far: str) -> None:
    """Shut the connection to this far end, if the descriptor still is that: ZeroMQ closes it then."""
    with suppress(OSError):  # the other was quicker
        if far_end(number) == far:
            end = socket.socket(fileno=number)
            try:
                end.shutdown(socket.SHUT_RDWR)
            finally:
                end.detach()
