"""The server's peers: who is connected and was last heard when, and what happens to those that fail."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from edgefl.errors import RunError
from edgefl.experiment import Experiment
from edgefl.host.channel import Channel
from edgefl.processes import usable_cores
from edgefl.results.store import Store
from edgefl.run import control, messages
from edgefl.run.clock import Alarms, WallClock
from edgefl.run.connection import ServerSocket

CLIENTS = (control.CLIENT, control.WORKER)
STARTUP_S = 120.0
"""Wall seconds that a process may take from its start to its first message."""
BUSY_S = 120.0
"""Wall seconds that the evaluator may be silent over one version."""
MOST_DEATHS_IN_A_ROW = 5
"""A peer whose process dies so often without finishing anything is given up."""
MOST_PAST = 256
"""A worker has at most so many tasks in hand, and a few of them again."""
MOST_DETAIL = 500
"""Characters of what a peer says about itself that go on record."""


@dataclass
class Peer:
    """One process that should be there, under its present epoch."""

    role: control.Role
    number: int
    epoch: int
    heard_s: float
    """Monotonic seconds of its last message."""
    ready: bool = False
    expelled: bool = False
    dismissed: bool = False
    """It was told to leave."""
    deaths_in_a_row: int = 0
    past: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_PAST))
    """Its last tasks that have ended, or versions that it measured: it says these again, or late."""
    order: messages.Task | None = None
    """The last task that a client was sent."""
    repeats: int = 0
    """Times that it said its last word again since it was sent something to do."""
    idle: int = 0
    """Messages that asked for nothing to be done, since its last task or the last look at the peers."""

    @cached_property
    def identity(self) -> bytes:
        return control.routing_id(self.role, self.number, self.epoch)


class Peers:
    """The table of all peers, by routing id and by name; the server's socket calls those that are in it.

    Or it lets them in, where clients and workers come ``by_door``.
    """

    def __init__(
        self, monotonic: Callable[[], float], socket: ServerSocket, *, by_door: bool = False
    ) -> None:
        self._monotonic, self._socket, self._by_door = monotonic, socket, by_door
        self._looked = monotonic()
        self._forgave = False
        self._by_identity: dict[bytes, Peer] = {}
        self._by_name: dict[tuple[str, int], Peer] = {}

    def expect(self, role: control.Role, number: int, epoch: int = 0, deaths_in_a_row: int = 0) -> Peer:
        """Enter a process that was (or will be) started; returns its peer."""
        before = self._by_name.get((role, number))
        if before is not None:
            self.hang_up(before)
            del self._by_identity[before.identity]
        peer = Peer(role, number, epoch, self._monotonic(), deaths_in_a_row=deaths_in_a_row)
        self._by_identity[peer.identity] = self._by_name[role, number] = peer
        if self._by_door and role != control.EVALUATOR:
            self._socket.admit(peer.identity)
        else:
            self._socket.call(peer.identity)
        return peer

    def hang_up(self, peer: Peer) -> None:
        """Nothing that this peer says is taken in any more."""
        self._socket.hang_up(peer.identity)

    def heard(self, routing_id: bytes) -> Peer | None:
        """The peer behind a message, or None for a stranger."""
        peer = self._by_identity.get(routing_id)
        if peer is not None:
            peer.heard_s = self._monotonic()
        return peer

    def get(self, role: control.Role, number: int) -> Peer | None:
        return self._by_name.get((role, number))

    def remove(self, role: control.Role, number: int, epoch: int) -> Peer | None:
        """A process ended; returns its peer if it was the present one."""
        peer = self._by_name.get((role, number))
        if peer is None or peer.epoch != epoch:
            return None
        del self._by_name[role, number], self._by_identity[peer.identity]
        self.hang_up(peer)
        return peer

    def look(self, seconds: float, every_s: float) -> Iterator[tuple[Peer, float]]:
        """Yields `silent` peers to a caller that looks every ``every_s`` seconds.

        A look that is late by much was kept from it, as were the peers: the delay does not count. But not at
        two looks in a row: a peer that hangs is found by a server that is always slow, too.
        """
        now = self._monotonic()
        away_s, self._looked = now - self._looked, now
        self._forgave = not self._forgave and away_s > max(2 * every_s, seconds / 2)
        if self._forgave:
            for peer in self._by_name.values():
                peer.heard_s = min(now, peer.heard_s + away_s - every_s)
        return self.silent(seconds)

    def silent(self, seconds: float) -> Iterator[tuple[Peer, float]]:
        """Yields peers silent for more than ``seconds`` (at first `STARTUP_S`), and for how many they are."""
        now = self._monotonic()
        for peer in list(self._by_name.values()):
            peer.idle = 0
            allowed = seconds if peer.ready else max(seconds, STARTUP_S)
            if not peer.expelled and now - peer.heard_s > allowed:
                yield peer, now - peer.heard_s

    def refused(self, seconds: float) -> str:
        """The reason why this process reaches nobody, where a peer has waited so long for that; else ""."""
        now = self._monotonic()
        waits = any(not peer.ready and now - peer.heard_s > seconds for peer in self._by_name.values())
        return self._socket.refused() if waits else ""

    def of(self, *roles: str) -> list[Peer]:
        return [peer for peer in self._by_name.values() if peer.role in roles]

    @property
    def unready(self) -> int:
        """Processes that were started and have not said that they are ready."""
        return sum(not peer.ready for peer in self._by_name.values())


@dataclass(eq=False)
class Roster:
    """Ends, replaces or gives up the peers of one run that are silent, send what is no message, or die."""

    _peers: Peers
    _experiment: Experiment
    _store: Store
    _clock: WallClock
    _alarms: Alarms
    _channel: Channel[Any]

    def __post_init__(self) -> None:
        self.incidents: Counter[str] = Counter()
        self.look_every_s = max(0.1, self._experiment.server.heartbeat_s / 4)
        """Wall seconds between two calls of `find_silent`."""
        self.returning = 0
        """Peers that are dead and will be started again."""

    def find_silent(self, slowest_step_s: float) -> None:
        """Expel peers that are silent for too long; a client is silent during a step, so it may take one.

        `RunError` where that is the fault of nobody but the system, which lets this process reach no peer.
        """
        seconds = max(self._experiment.server.heartbeat_s, 3 * slowest_step_s)
        if why := self._peers.refused(seconds):
            raise RunError(f"the server can open no more connections to its clients: {why}")
        for peer, silent_s in self._peers.look(seconds, self.look_every_s):
            if peer.role not in CLIENTS and peer.ready and silent_s < BUSY_S:
                continue
            self.expel(peer, "hang", f"not heard for {silent_s:.1f} s")

    def expel(self, peer: Peer, kind: str, detail: str) -> None:
        """Have a peer's process ended, once."""
        if not peer.expelled:
            peer.expelled = True
            self._peers.hang_up(peer)
            self._note(peer, kind, detail)
            self._channel.send(control.Expel(peer.role, peer.number, peer.epoch))

    def departed(self, message: control.Departed, *, declared: bool = False) -> tuple[Peer, bool] | None:
        """A process has ended: start it again, or give it up (true). None if it was not the present one.

        A death that the experiment ``declared`` is none that a peer is given up for.
        """
        peer = self._peers.remove(message.role, message.peer, message.epoch)
        if peer is None:
            return None
        if not peer.expelled:
            memory = message.reason.startswith(control.OUT_OF_MEMORY)
            self._note(peer, "oom" if memory else "death", message.reason)
        client, fleet = peer.role == control.CLIENT, self._experiment.fleet
        deaths = peer.deaths_in_a_row + (not declared)
        if client and fleet.on_death == "drop":
            return peer, True
        if deaths >= MOST_DEATHS_IN_A_ROW:
            self._note(peer, "gave-up", f"died {deaths} times in a row")
            return peer, True
        self.returning += 1
        rejoin_s = fleet.rejoin_s * self._clock.time_scale if client else 0.0

        def replace() -> None:
            self.returning -= 1
            self.start(peer.role, peer.number, peer.epoch + 1, deaths)

        self._alarms.after(rejoin_s, replace)
        return peer, False

    def start(self, role: control.Role, number: int, epoch: int = 0, deaths_in_a_row: int = 0) -> None:
        """Have a peer's process started, which is expected from now on."""
        self._peers.expect(role, number, epoch, deaths_in_a_row)
        self._channel.send(control.Replace(role, number, epoch))

    def _note(self, peer: Peer, kind: str, detail: str) -> None:
        client = peer.number if peer.role == control.CLIENT else None
        self._store.incident(self._clock.now_s(), client, kind, detail[:MOST_DETAIL])
        self.incidents[kind] += 1


def slowest_step_s(plan: control.Serve, active: int) -> float:
    """Wall seconds that a client's training step may take, with so many training: until then it is silent."""
    prepared = plan.prepared
    seconds = prepared.host_step_s * max(1.0, active / usable_cores())
    if plan.experiment.fleet.throttle == "paced":
        return seconds
    # A client is not heard while its process is stopped: its step takes as long as the device's.
    return max(seconds, plan.time_scale * max(trip.compute_s / trip.steps for trip in prepared.first_trips))
