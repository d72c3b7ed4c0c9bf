"""Messages without an end: ZeroMQ keeps a message's frames until its last has come, and shows none before.

So a peer that never sends the last would fill the server's memory unheard, whatever its high-water mark: that
counts whole messages. A thread looks at that memory, and shuts the connection that fills it.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import resource
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sized
from contextlib import suppress

import zmq

from edgefl.limits.pacing import set_time_slice

Socket = zmq.Socket[bytes]
Context = zmq.Context[zmq.Socket[bytes]]

LOOK_S, SOON_S, SOON_MS = 0.02, 0.001, 2
"""Seconds between two looks at the memory; and, once that has grown, at the connections, for so many ms."""
MOST_SHARE = 0.1
"""Most of a core that looking may take: with many peers one look is milliseconds."""
MOST_BYTES = 32 * 2**20
"""Bytes by which the server's own memory may grow before it is looked who might fill it."""
STEP_BYTES = 2**18
"""A look counts if memory has grown by so much since the last that did: what was waiting then was read."""
SIGHTINGS = 20
"""Looks at which a peer had bytes waiting and has said nothing whole since. One that is well cannot have so
many: it is read from no more while eight messages of it have not been taken, each of two reads at most."""
PATIENCE_LOOKS = 500
"""Looks after which growth that nobody is suspected of is this process's own doing."""
MOST_STRANGERS, FEW_STRANGERS = 256, 8
"""Most connections that have said nothing, beside those that are waited for; and while memory has grown."""
STRANGER_BYTES = 4 * 2**20
"""Bytes that may come from a stranger, who has said nothing whole yet."""
UNSAID_BYTES = 2**25
"""Bytes that may come by TCP since something whole was heard, once memory has grown: eight messages that wait
to be taken, and what the kernel keeps, are less."""
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
        self.heard_at: dict[str, int] = {}
        """Bytes that had come from a far end when something whole was last heard of it."""

    def look(self, most: int) -> None:
        """Learn who came and went since the last look; of more than ``most`` strangers shut the oldest."""
        while self._events.poll(0):
            event = self._events.recv_multipart()[0]
            number = int.from_bytes(event[2:6], sys.byteorder)
            self._open.pop(number, None)
            if int.from_bytes(event[:2], sys.byteorder) == zmq.EVENT_ACCEPTED:
                with suppress(OSError):  # it is gone again
                    self._open[number] = far_end(number)
        known = set(self._called.values())
        strangers = [(number, far) for number, far in self._open.items() if far not in known]
        excess = len(strangers) if _short_of_descriptors() else len(self._open) - len(self._admitted) - most
        for order, (number, far) in enumerate(strangers):
            if order < excess or _received_bytes(number) > STRANGER_BYTES:
                shut(number, far)
                del self._open[number]

    def endless(self, spoke: set[bytes]) -> Iterator[tuple[bytes, str, int]]:
        """Yields who has sent much since it ``spoke``, where it is, and the descriptor."""
        numbers = {far: number for number, far in self._open.items()}
        for name, far in list(self._called.items()):
            if (number := numbers.get(far)) is not None:
                received = _received_bytes(number)
                unsaid = received - self.heard_at.get(far, received)
                if name in spoke or unsaid > UNSAID_BYTES or far not in self.heard_at:
                    self.heard_at[far] = received
                if name not in spoke and unsaid > UNSAID_BYTES:
                    yield name, far, number

    def close(self) -> None:
        self._router.disable_monitor()
        self._events.close(linger=0)


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


class Unfinished:
    """Finds who fills this process's memory with a message that does not end. Linux; elsewhere it finds none.

    ``called`` has the peers' addresses by name. The peers that were found are in ``found``: the connection
    is shut then, and what it had sent is given back. ``strangers`` are looked at too, everywhere.
    """

    def __init__(self, called: Mapping[bytes, str], strangers: Strangers | None = None) -> None:
        self._called, self._strangers = called, strangers
        self.spoke: set[bytes] = set()
        """Who has said something whole since the last look: whoever takes messages in enters it."""
        self.found: deque[bytes] = deque()
        self._seen: Counter[bytes] = Counter()
        self._looks = 0
        self._struck = False
        self._began, self._over, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._statm = -1
        if sys.platform == "linux":
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
            self._calm_bytes = self._last_bytes = self._own_bytes()
        self._watching = sys.platform == "linux" or strangers is not None
        if self._watching:
            # No `threading.Thread`: to start one waits for ever where there is no memory for its first call.
            _thread.start_new_thread(self._run, ())

    def close(self) -> None:
        """Look no more."""
        if self._watching and not self._over.is_set():
            self._over.set()
            if self._began.is_set():  # else it has nothing to look with when it begins, and nothing to do
                self._ended.wait()
            if self._statm >= 0:
                os.close(self._statm)

    def _run(self) -> None:
        self._began.set()
        try:
            self._watch()
        finally:
            self._ended.set()

    def _watch(self) -> None:
        set_time_slice()  # soon, also where the host is busy: ZeroMQ's thread reads on meanwhile
        pause_s = LOOK_S
        while not self._over.wait(pause_s):
            began_s = time.thread_time()
            grown = False
            with suppress(OSError, MemoryError):  # no descriptor, or no memory, is left to look with
                if self._strangers is not None:
                    self._strangers.look(FEW_STRANGERS if self._looks else MOST_STRANGERS)
                grown = self._statm >= 0 and self._look()
            pause_s = max(SOON_S if grown else LOOK_S, (time.thread_time() - began_s) / MOST_SHARE)

    def _look(self) -> bool:
        """Look once; returns True if memory has grown by much."""
        own_bytes = self._own_bytes()
        self._calm_bytes = min(self._calm_bytes, own_bytes)
        if own_bytes - self._calm_bytes <= MOST_BYTES:
            if self._strangers is not None:
                self._strangers.heard_at.clear()
            self._forget(own_bytes)
            return False
        self._looks += 1
        if own_bytes - self._last_bytes >= STEP_BYTES:
            self._last_bytes = own_bytes
            self._count()
        elif self._struck:
            self._struck = False
            if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
                trim(0)  # what was forgotten goes back to the system
        self._last_bytes = min(self._last_bytes, own_bytes)
        if self._looks > PATIENCE_LOOKS:
            if max(self._seen.values(), default=0) < SIGHTINGS / 4:
                self._calm_bytes = own_bytes
            self._forget(own_bytes)
        return True

    def _forget(self, own_bytes: int) -> None:
        self._last_bytes, self._looks = own_bytes, 0
        self._seen.clear()
        self.spoke.clear()

    def _count(self) -> None:
        waiting = bytes_wait_from() if self._strangers is None else {}
        spoke = set()
        while self.spoke:  # others enter more meanwhile
            spoke.add(name := self.spoke.pop())
            self._seen.pop(name, None)
        for name, where in list(self._called.items()):
            if where in waiting:
                self._seen[name] += 1
                if self._seen[name] >= SIGHTINGS:
                    self._strike(name, where, waiting[where])
        if self._strangers is not None:
            for name, where, number in self._strangers.endless(spoke):
                self._strike(name, where, number)

    def _strike(self, name: bytes, where: str, number: int) -> None:
        shut(number, where)
        self._seen.pop(name, None)
        self._struck = True
        self.found.append(name)

    def _own_bytes(self) -> int:
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")


def far_end(number: int) -> str:
    """The far end's address of a connection. OSError if this descriptor is none."""
    end = socket.socket(fileno=number)
    try:
        far = end.getpeername()
    finally:
        end.detach()
    if isinstance(far, tuple):
        return f"tcp://{far[0]}:{far[1]}"
    return f"ipc://@{far[1:].decode()}" if isinstance(far, bytes) else f"ipc://{far}"


def shut(number: int, far: str) -> None:
    """Shut the connection to this far end, if the descriptor still is that: ZeroMQ closes it then."""
    with suppress(OSError):  # the other was quicker
        if far_end(number) == far:
            end = socket.socket(fileno=number)
            try:
                end.shutdown(socket.SHUT_RDWR)
            finally:
                end.detach()


def bytes_wait_from() -> dict[str, int]:
    """Returns from which addresses bytes wait, or come next, that ZeroMQ is to read, with the descriptors."""
    places, poller = {}, select.poll()
    for number in _read_from():
        with suppress(OSError):  # no connection, or none any more
            places[number] = far_end(number)
            poller.register(number, select.POLLIN)
    return {places[number]: number for number, event in poller.poll(SOON_MS) if event & select.POLLIN}


def _read_from() -> set[int]:
    """Descriptors that an event loop of this process reads from; a peer that is at its mark is none."""
    found: set[int] = set()
    for number in os.listdir("/proc/self/fdinfo"):
        with suppress(OSError), open(f"/proc/self/fdinfo/{number}") as info:
            lines = [line.split() for line in info if line.startswith("tfd:")]
            found.update(int(words[1]) for words in lines if int(words[3], 16) & 1)  # EPOLLIN
    return found
