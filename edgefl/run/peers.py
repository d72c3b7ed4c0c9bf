"""The server's peers (clients, workers and the evaluator) and their life cycle: connection, silence,
death and replacement."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from edgefl.errors import RunError
from edgefl.experiment import Experiment
from edgefl.host.capacity import capacity_cores
from edgefl.host.channel import Channel
from edgefl.results.store import Store
from edgefl.run import control
from edgefl.run.clock import Alarms, WallClock
from edgefl.run.connection import ServerSocket

CLIENTS = (control.CLIENT, control.WORKER)
STARTUP_S = 120.0
"""Time limit from the start of a process to its first message, in wall seconds. The first processes of a run
start one after the other, so their limit begins anew each time one of them becomes ready."""
BUSY_S = 120.0
"""Time in wall seconds for which the evaluator may be silent while it evaluates a version."""
MAX_DEATHS_IN_A_ROW = 5
"""Number of consecutive deaths, with no finished task between them, after which a peer is not restarted."""
MAX_PAST = 256
"""Number of finished tasks that are remembered for each peer; a worker holds at most 64 tasks at a time."""
MAX_DETAIL = 500
"""Maximum number of characters of a text from a peer that are written to the record."""


@dataclass
class Peer:
    """A process that is expected to connect; ``epoch`` is the number of the peer's earlier processes."""

    role: control.Role
    number: int
    epoch: int
    last_message_s: float
    """Time of the last message, in seconds, as read from the monotonic clock."""
    ready: bool = False
    expelled: bool = False
    dismissed: bool = False
    """True if a `Bye` message was sent."""
    deaths_in_a_row: int = 0
    past: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_PAST))
    """The peer's latest finished tasks or, for the evaluator, its latest evaluated versions. Repeated and
    late reports of a task or version in this list are ignored."""
    repeats: int = 0
    """Number of times that the peer has repeated its last report since the server last sent it an order."""
    idle: int = 0
    """Number of messages without effect since the last check of all peers."""

    @cached_property
    def identity(self) -> bytes:
        return control.routing_id(self.role, self.number, self.epoch)


class Peers:
    """Table of all expected peers; it finds a peer by its routing id, or by its role and number.

    The server's socket connects to the peers. With ``by_door``, clients and workers instead connect to the
    door, the server's socket for other machines.
    """

    def __init__(
        self, monotonic: Callable[[], float], socket: ServerSocket, *, by_door: bool = False
    ) -> None:
        self._monotonic, self._socket, self.by_door = monotonic, socket, by_door
        self._checked_s = monotonic()
        self._excused = False
        self._starting = 0
        """Number of first processes (of epoch 0) that were not ready at the last check."""
        self._progress_s = -math.inf
        """Time of the last check at which `_starting` had decreased, in seconds of the monotonic clock."""
        self._by_identity: dict[bytes, Peer] = {}
        self._by_name: dict[tuple[str, int], Peer] = {}

    def expect(self, role: control.Role, number: int, epoch: int = 0, deaths_in_a_row: int = 0) -> Peer:
        """Add a process that has been started or will be started; return the peer that represents it."""
        before = self._by_name.get((role, number))
        if before is not None:
            self.disconnect(before)
            del self._by_identity[before.identity]
        peer = Peer(role, number, epoch, self._monotonic(), deaths_in_a_row=deaths_in_a_row)
        self._by_identity[peer.identity] = self._by_name[role, number] = peer
        if self.by_door and role != control.EVALUATOR:
            self._socket.admit(peer.identity)
        else:
            self._socket.connect(peer.identity)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Disconnect a peer, and ignore all its further messages."""
        self._socket.disconnect(peer.identity)

    def sender_of(self, routing_id: bytes) -> Peer | None:
        """Return the sender of a message and record the time; return None if the sender is unknown."""
        peer = self._by_identity.get(routing_id)
        if peer is not None:
            peer.last_message_s = self._monotonic()
        return peer

    def get(self, role: control.Role, number: int) -> Peer | None:
        return self._by_name.get((role, number))

    def remove(self, role: control.Role, number: int, epoch: int) -> Peer | None:
        """Remove a process that has ended, and return its peer.

        Return None if the peer already has a newer process or has already been removed.
        """
        peer = self._by_name.get((role, number))
        if peer is None or peer.epoch != epoch:
            return None
        del self._by_name[role, number], self._by_identity[peer.identity]
        self.disconnect(peer)
        return peer

    def check_silence(self, seconds: float, every_s: float) -> Iterator[tuple[Peer, float]]:
        """Yield peers as `silent` does, but discount delays of this process.

        Call this method every ``every_s`` seconds. If a call is very late, this process was held up, and so
        probably were the peers. The delay is therefore not counted as silence. If the next call is also late,
        its delay is counted, so that even a slow server detects peers that hang.
        """
        now = self._monotonic()
        away_s, self._checked_s = now - self._checked_s, now
        self._excused = not self._excused and away_s > max(2 * every_s, seconds / 2)
        if self._excused:
            for peer in self._by_name.values():
                peer.last_message_s = min(now, peer.last_message_s + away_s - every_s)
        return self.silent(seconds)

    def silent(self, seconds: float) -> Iterator[tuple[Peer, float]]:
        """Yield each peer that has been silent for more than ``seconds``, and for how many seconds.

        A dismissed peer may be silent, because it is ending. Before its `Ready` message, a peer may be silent
        for `STARTUP_S` seconds if this limit is longer.
        """
        now = self._monotonic()
        starting = sum(not peer.ready and not peer.epoch for peer in self._by_name.values())
        if starting < self._starting:
            self._progress_s = now
        self._starting = starting
        for peer in list(self._by_name.values()):
            peer.idle = 0
            allowed, since_s = seconds if peer.ready else max(seconds, STARTUP_S), peer.last_message_s
            if not peer.ready and not peer.epoch:
                since_s = max(since_s, self._progress_s)
            if not (peer.expelled or peer.dismissed) and now - since_s > allowed:
                yield peer, now - since_s

    def refused(self, seconds: float) -> str:
        """Return why this process cannot open sockets, or "" if it can.

        The check is made only if a peer's `Ready` message has not arrived within ``seconds``.
        """
        now = self._monotonic()
        waits = any(not peer.ready and now - peer.last_message_s > seconds for peer in self._by_name.values())
        return self._socket.refused() if waits else ""

    def of(self, *roles: str) -> list[Peer]:
        return [peer for peer in self._by_name.values() if peer.role in roles]

    @property
    def unready(self) -> int:
        """Number of started processes that have not yet sent a `Ready` message."""
        return sum(not peer.ready for peer in self._by_name.values())


@dataclass(eq=False)
class PeerLifecycle:
    """Ends peers that are silent or send invalid messages, and replaces dead peers.

    The core decides whether a dead client is replaced; `retry` decides for workers and the evaluator.
    """

    _peers: Peers
    _experiment: Experiment
    _store: Store
    _clock: WallClock
    _alarms: Alarms
    _channel: Channel[Any]

    def __post_init__(self) -> None:
        self.incidents: Counter[str] = Counter()
        self.check_every_s = max(0.1, self._experiment.server.heartbeat_s / 4)
        """Interval between calls of `find_silent`, in wall seconds."""
        self.returning = 0
        """Number of dead peers for which another process will be started."""

    def find_silent(self, slowest_step_s: float) -> None:
        """Expel peers that have been silent for longer than both ``server.heartbeat_s`` and three times
        ``slowest_step_s``, because clients are silent during a training step.

        Raises `RunError` if peers are silent because the system does not let this process open connections.
        """
        seconds = max(self._experiment.server.heartbeat_s, 3 * slowest_step_s)
        if why := self._peers.refused(seconds):
            raise RunError(f"the server cannot open any more connections to its clients: {why}")
        for peer, silent_s in self._peers.check_silence(seconds, self.check_every_s):
            if peer.role not in CLIENTS and peer.ready and silent_s < BUSY_S:
                continue
            self.expel(peer, "hang", f"silent for {silent_s:.1f} s")

    def expel(self, peer: Peer, kind: str, detail: str) -> None:
        """Ask the supervisor to end the process of a peer; repeated calls have no effect."""
        if not peer.expelled:
            peer.expelled = True
            self._peers.disconnect(peer)
            self._note(peer, kind, detail)
            self._channel.send(control.Expel(peer.role, peer.number, peer.epoch))

    def departed(self, message: control.Departed) -> Peer | None:
        """Record the end of a process; return its peer, or None if the process was not the current one."""
        peer = self._peers.remove(message.role, message.peer, message.epoch)
        if peer is not None and not peer.expelled:
            memory = message.reason.startswith(control.OUT_OF_MEMORY)
            self._note(peer, "oom" if memory else "death", message.reason)
        return peer

    def retry(self, peer: Peer, *, blamed: bool = True) -> bool:
        """Restart a worker or the evaluator; return False if it has died too often to be restarted.

        A death is counted only if the process is ``blamed`` for it.
        """
        deaths = peer.deaths_in_a_row + blamed
        if deaths >= MAX_DEATHS_IN_A_ROW:
            self._note(peer, "gave-up", f"died {deaths} times in a row")
            return False
        self.replace(peer, 0.0, deaths)
        return True

    def replace(self, peer: Peer, after_s: float, deaths_in_a_row: int = 0) -> None:
        """Start another process in place of a dead one, after ``after_s`` wall seconds."""
        self.returning += 1

        def start() -> None:
            self.returning -= 1
            self.start(peer.role, peer.number, peer.epoch + 1, deaths_in_a_row)

        self._alarms.after(after_s, start)

    def start(self, role: control.Role, number: int, epoch: int = 0, deaths_in_a_row: int = 0) -> None:
        """Ask the supervisor to start a process for a peer, and add the process to the expected peers."""
        self._peers.expect(role, number, epoch, deaths_in_a_row)
        self._channel.send(control.Replace(role, number, epoch))

    def _note(self, peer: Peer, kind: str, detail: str) -> None:
        client = peer.number if peer.role == control.CLIENT else None
        self._store.incident(self._clock.now_s(), client, kind, detail[:MAX_DETAIL])
        self.incidents[kind] += 1


def slowest_step_s(plan: control.Serve, active: int) -> float:
    """Return the longest time, in wall seconds, for which a training step can keep a client silent while
    ``active`` clients train."""
    prepared = plan.prepared
    seconds = prepared.host_step_s * max(1.0, active / capacity_cores())
    if plan.experiment.fleet.throttle == "paced":
        return seconds
    # A client sends nothing while it is stopped, so it can be silent for as long as a step on the device.
    return max(seconds, plan.time_scale * max(trip.compute_s / trip.steps for trip in prepared.first_trips))
