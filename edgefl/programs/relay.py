"""The relay is a process that forwards the TCP connections of all phones at the speed of their links.

When a program connects to a listening socket of a phone, the relay connects to the server one link delay
later, and accepts data one round trip later, when the TCP handshake over the link would be complete. Each
direction is then read as fast as the link accepts bytes (`edgefl.programs.way`), and each part is written at
its arrival time. Arrival times are absolute, so the delays of late wake-ups do not add up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal, NoReturn

from edgefl.devices import load_network
from edgefl.devices.link import Disconnected
from edgefl.devices.presence import AlternatingRenewal
from edgefl.devices.schema import Network
from edgefl.errors import TOO_MANY_FILES
from edgefl.host.channel import Channel, Closed
from edgefl.host.process import allow_open_files, become_child, outlive_parent
from edgefl.host.throttle import reduce_wakeup_latency
from edgefl.programs import messages
from edgefl.programs.phone import Address
from edgefl.programs.tree import end_marked
from edgefl.programs.way import LinkWay, Transmission
from edgefl.seeds import stream

AHEAD_S = 0.02
"""Maximum time, in emulated seconds, between reading data and the time at which the link can send it."""
MIN_WINDOW_BYTES, MAX_WINDOW_BYTES = 1 << 18, 1 << 24
"""Bounds of the window: the number of bytes that may be in transit in one direction of a connection."""
STALL_S = 20.0
"""Wall seconds without progress after which data from ended phones to their servers is dropped."""
REPORT_S = 0.5
MAX_PER_MESSAGE = 500
"""Maximum number of transmissions in one message."""
CLOSE_AT_ONCE = struct.pack("ii", 1, 0)
"""Value of the socket option SO_LINGER with which closing a socket resets the connection."""
MAX_SELECTED = 1023
"""The highest descriptor that select() accepts."""


class PreciseSelector(selectors.EpollSelector):
    """Selector whose timeouts have microsecond resolution; epoll's have only millisecond resolution.

    If its descriptor is too high for select(), the resolution is that of epoll.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.fileno() > MAX_SELECTED:
            return super().select(timeout)
        if timeout is None or timeout > 0:
            with contextlib.suppress(InterruptedError):
                select.select([self.fileno()], [], [], timeout)
        return super().select(0)


class EmulatedTime:
    """Clock that counts emulated seconds since the phones started."""

    def __init__(self, begin: messages.Begin) -> None:
        self._begin_ns, self.scale = begin.at_ns, begin.time_scale

    def now(self) -> float:
        return (time.monotonic_ns() - self._begin_ns) / 1e9 / self.scale

    async def until(self, at_s: float) -> None:
        """Wait until ``at_s``, and never return earlier."""
        while (left_s := at_s - self.now()) > 0:
            await asyncio.sleep(left_s * self.scale)


class Flow:
    """One direction of a phone's link, with a clock and traffic statistics."""

    def __init__(self, way: LinkWay, clock: EmulatedTime) -> None:
        self.way, self.clock = way, clock
        self.nbytes = 0
        self._finished: list[Transmission] = []

    async def room(self) -> None:
        """Wait until the link is free to send, or will be free within `AHEAD_S` seconds."""
        while (wait_s := self.way.free_s - AHEAD_S - self.clock.now()) > 0:
            await asyncio.sleep(wait_s * self.clock.scale)

    def enter(self, nbytes: int, waited: bool) -> Transmission:
        """Send ``nbytes`` over the link. ``waited`` is True if they had to wait until the link was free."""
        now_s, before = self.clock.now(), self.way.now
        # Waiting bytes were available when the link became free, even if this process woke up late.
        at_s = min(now_s, self.way.free_s) if waited else now_s
        part = self.way.enter(nbytes, at_s)
        if before is not None and before is not part and not before.on_its_way:
            self._finished.append(before)
        return part

    def arrived(self, part: Transmission, nbytes: int, held_up: bool) -> None:
        """Record that a part was delivered, and whether the receiver delayed the delivery (``held_up``)."""
        self.nbytes += nbytes
        part.on_its_way -= 1
        part.achieved_s = self.clock.now() - part.began_s
        part.held_up |= held_up
        if not part.on_its_way and part is not self.way.now:
            self._finished.append(part)

    def finished(self, all_of_them: bool = False) -> list[Transmission]:
        """Return the transmissions completed since the last call, except those delayed by the receiver."""
        if all_of_them and self.way.now is not None and not self.way.now.on_its_way:
            self._finished.append(self.way.now)
        found, self._finished = self._finished, []
        return [part for part in found if not part.held_up]


class PhoneLink:
    """A phone's link: both directions, its connections and the phone's presence."""

    def __init__(self, phone: int, network: Network, begin: messages.Begin) -> None:
        self.phone, self.clock = phone, EmulatedTime(begin)
        shift = float(stream(begin.seed, "trace", phone).random()) if network.replays else 0.0
        names: tuple[Literal["up", "down"], ...] = ("up", "down")
        self.flows = {
            name: Flow(LinkWay(network, name, stream(begin.seed, f"relay-{name}", phone), shift), self.clock)
            for name in names
        }
        self.connections: set[asyncio.Task[None]] = set()
        self.sending: set[asyncio.Task[None]] = set()
        """Connections on which the end of the phone's stream has not been forwarded to the server yet."""
        self._delivered, self._waited_s = 0, 0.0
        self.count = self.refused = self.broken = 0
        self.here = self.resets = True
        self.out_of_files = False

    def state(self) -> messages.TrafficState:
        up, down = self.flows["up"], self.flows["down"]
        counts = len(self.connections), self.count, self.refused, self.broken
        busy_s = up.way.busy_s, down.way.busy_s
        return messages.TrafficState(self.phone, up.nbytes, down.nbytes, *counts, *busy_s, self.out_of_files)

    def is_delivering(self) -> bool:
        """Return True while data sent by the phone is in transit and the server accepts it.

        This must be called every `AHEAD_S` seconds.
        """
        up = self.flows["up"]
        if up.nbytes != self._delivered or self.clock.now() < up.way.due_s:
            self._delivered, self._waited_s = up.nbytes, 0.0
        self._waited_s += AHEAD_S  # counts calls, because the clock continues while the host is stalled
        return bool(self.sending) and self._waited_s < STALL_S + up.way.round_trip_s * self.clock.scale

    async def follow(self, presence: AlternatingRenewal) -> None:
        """Close the connections whenever the phone goes offline."""
        at_s = 0.0
        while True:
            self.here = presence.on(at_s)
            if not self.here:
                self.broken += len(self.connections)
                for task in self.connections:
                    task.cancel()
            at_s = presence.changes_s(at_s)
            await self.clock.until(at_s)

    async def listen(self, listener: socket.socket, server: Sequence[Address]) -> None:
        """Accept connections, and forward each to the server."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                near, _ = await loop.sock_accept(listener)
            except OSError as error:  # such as too many open files; open connections continue
                self._note(error)
                await asyncio.sleep(0.1)
                continue
            self.count += 1
            task = asyncio.create_task(self._connection(near, server))
            for tasks in (self.connections, self.sending):
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _connection(self, near: socket.socket, server: Sequence[Address]) -> None:
        """Forward one connection until it is closed or reset."""
        this = asyncio.current_task()
        assert this is not None

        async def send(far: socket.socket, from_s: float) -> None:
            try:
                await carry(near, far, self.flows["up"], from_s, resets)
            except* ReceiverLost:
                pass  # data that the server sent before it closed the connection is still delivered
            self.sending.discard(this)

        ends, resets = [near], dict[socket.socket, OSError]()
        try:
            near.setblocking(False)
            far = await self._open(server) if self.here else None
            if far is None:
                self.refused += 1
                raise ConnectionRefusedError
            ends.append(far)
            for end in ends:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened_s = self.clock.now() + self.flows["down"].way.delay_s
            async with asyncio.TaskGroup() as both:
                both.create_task(send(far, opened_s))
                both.create_task(carry(far, near, self.flows["down"], 0.0, resets))
        except BaseException as error:
            self.broken += _contains(error, Disconnected)
            for end in ends if self.resets or this in self.sending else ():
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, CLOSE_AT_ONCE)
            if not _contains(error, OSError, Disconnected, asyncio.CancelledError):
                raise
        finally:
            for end in ends:
                end.close()

    async def _open(self, server: Sequence[Address]) -> socket.socket | None:
        """Connect to the first address of the server that accepts, one link delay after the phone's request.

        Return None if none accepts.
        """
        await self.clock.until(self.clock.now() + self.flows["up"].way.delay_s)
        for family, address in server:
            try:
                with contextlib.ExitStack() as undo:
                    far = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    far.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(far, address)
                    undo.pop_all()
                    return far
            except OSError as error:
                self._note(error)
        await self.clock.until(self.clock.now() + self.flows["down"].way.delay_s)
        return None

    def _note(self, error: OSError) -> None:
        self.out_of_files |= error.errno in TOO_MANY_FILES


def _contains(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Return True if the error is of one of these kinds, or is a group that contains one."""
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return isinstance(error, kinds) or any(_contains(one, *kinds) for one in inner)


class ReceiverLost(OSError):
    """The receiver of a stream has closed or reset its connection."""


def window_bytes(way: LinkWay) -> int:
    """Return the window of a connection: twice the number of bytes that the link can hold, within the bounds.

    If the link has no rate limit, the window is the upper bound or, without delay and jitter, the lower one.
    """
    if math.isinf(way.bytes_per_s):
        return MAX_WINDOW_BYTES if way.jittered_s else MIN_WINDOW_BYTES
    wire = way.bytes_per_s * (way.jittered_s + AHEAD_S)
    return min(max(MIN_WINDOW_BYTES, int(2 * wire)), MAX_WINDOW_BYTES)


Part = tuple[Transmission, float, bytes]


async def carry(
    source: socket.socket,
    target: socket.socket,
    flow: Flow,
    from_s: float,
    resets: dict[socket.socket, OSError],
) -> None:
    """Forward the stream from ``source`` to ``target``, including its end, starting at the time ``from_s``.

    If the source resets its connection, the error is raised when all earlier data has arrived. A socket
    reports a reset only once: if a write raises the error, a later read returns the end of the stream. Write
    errors are therefore stored in ``resets``, keyed by socket, for the task that reads from the socket.
    """
    way, window = flow.way, window_bytes(flow.way)
    parts: deque[Part | OSError | None] = deque()
    changed = asyncio.Condition()
    inside = 0

    async def write() -> None:
        nonlocal inside
        while True:
            async with changed:
                while not parts:
                    await changed.wait()
                part = parts.popleft()
            if part is None:
                with contextlib.suppress(OSError):
                    target.shutdown(socket.SHUT_WR)
                return
            if isinstance(part, OSError):
                raise part
            transmission, due_s, data = part
            await flow.clock.until(due_s)
            try:
                held_up = await _write(target, data)
            except OSError as error:
                if not isinstance(error, BrokenPipeError):  # raised if the target had ended its own stream
                    resets[target] = error
                raise ReceiverLost from error
            flow.arrived(transmission, len(data), held_up)
            async with changed:
                inside -= len(data)
                changed.notify_all()

    async def read() -> None:
        nonlocal inside
        await flow.clock.until(from_s)
        waiting, due_s = False, 0.0
        while True:
            await flow.room()
            if inside > window:
                waiting = False
                async with changed:
                    while inside > window:
                        await changed.wait()
            end: OSError | None = None
            try:
                data, at_once = await _read(source, way.chunk_bytes)
            except OSError as error:
                end, data, at_once = error, b"", True
            if data:
                transmission = flow.enter(len(data), waited=waiting and at_once)
                due_s, waiting = way.due_s, True
                inside += len(data)
                parts.append((transmission, due_s, data))
            else:
                await flow.clock.until(max(due_s, flow.clock.now() + way.delay_s))
                parts.append(end or resets.get(source))
            async with changed:
                changed.notify_all()
            if not data:
                return

    async with asyncio.TaskGroup() as both:
        both.create_task(read())
        both.create_task(write())


async def _read(source: socket.socket, most: int) -> tuple[bytes, bool]:
    """Return up to ``most`` bytes (b"" at the end of the stream), and True if they were available at once."""
    try:
        return source.recv(most), True
    except BlockingIOError:
        return await asyncio.get_running_loop().sock_recv(source, most), False


async def _write(target: socket.socket, data: bytes) -> bool:
    """Write all data; return True if the receiver delayed it."""
    with contextlib.suppress(BlockingIOError):
        sent = target.send(data)
        if sent == len(data):
            return False
        data = data[sent:]
    await asyncio.get_running_loop().sock_sendall(target, data)
    return True


class Relay:
    """Forwards the connections of all phones until an `EndPhones` message arrives or the parent dies."""

    def __init__(self, channel: Channel[messages.ToRelay], run_id: str) -> None:
        self._channel, self._run_id = channel, run_id
        self._carry: list[messages.Carry] = []
        self._links: list[PhoneLink] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._drain = False

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._receive)
        self._channel.send(messages.Started())
        reporting = asyncio.create_task(self._report_periodically())
        await self._ended.wait()
        while self._drain:
            await asyncio.sleep(AHEAD_S)  # the first wait lets pending connections be accepted
            if not sum(link.is_delivering() for link in self._links):  # sum checks every link; any would not
                break
        loop.remove_reader(self._channel.fileno())
        reporting.cancel()
        tasks = [*self._tasks, *(task for link in self._links for task in link.connections)]
        for link in self._links:
            link.resets = not self._drain  # if the programs ended by themselves, close without a reset
            link.broken += len(link.sending) if self._drain else 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._report(all_of_them=True)
        self._channel.send(messages.Drained())

    def _receive(self) -> None:
        try:
            for message in self._channel.receive_ready():
                match message:
                    case messages.Carry():
                        self._carry.append(message)
                    case messages.Begin():
                        self._begin(message)
                    case messages.EndPhones():
                        self._drain = not message.now
                        self._ended.set()
        except Closed:
            self._orphaned()

    def _begin(self, begin: messages.Begin) -> None:
        for one in self._carry:
            link = PhoneLink(one.phone, load_network(one.network), begin)
            self._links.append(link)
            for fd, server in one.doors:
                listener = socket.socket(fileno=fd)
                self._tasks.append(asyncio.create_task(link.listen(listener, server)))
            if (presence := begin.presence(one.phone)) is not None:
                self._tasks.append(asyncio.create_task(link.follow(presence)))

    async def _report_periodically(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._report()
            if self._channel.waiting:  # messages arrived during the send
                self._receive()

    def _report(self, all_of_them: bool = False) -> None:
        """Report the traffic since the last report."""
        try:
            for link in self._links:
                if not (all_of_them or self._channel.has_room):
                    return  # the next report follows; a send to a full channel would delay the streams
                for name, flow in link.flows.items():
                    done = flow.finished(all_of_them)
                    for start in range(0, len(done), MAX_PER_MESSAGE):
                        some = done[start : start + MAX_PER_MESSAGE]
                        declared_s = [part.declared_s for part in some]
                        achieved_s = [part.achieved_s for part in some]
                        self._channel.send(messages.Transmitted(link.phone, name, declared_s, achieved_s))
                self._channel.send(link.state())
        except Closed:
            self._orphaned()

    def _orphaned(self) -> NoReturn:
        """End the phones, because the keeper may also be dead, and exit without forwarding pending data."""
        end_marked(self._run_id)
        os._exit(0)


def main() -> None:
    """Entry point of the relay process."""
    become_child(int(sys.argv[2]), "edgefl-relay")
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # the phones continue after Ctrl-Z, and need their links
    outlive_parent()
    allow_open_files()
    reduce_wakeup_latency()
    channel: Channel[messages.ToRelay] = Channel.inherit(int(sys.argv[1]), messages.ToRelay)
    with (
        contextlib.suppress(Closed),  # edgefl's main process ended or gave up while the relay started
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(PreciseSelector())) as runner,
    ):
        runner.run(Relay(channel, sys.argv[3]).serve())


if __name__ == "__main__":
    main()
