"""The server's table of peers: who is connected, who was last heard when, who is dead and comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from edgefl.run import control

STARTUP_S = 120.0
"""Wall seconds that a process may take from its start to its first message."""


@dataclass
class Peer:
    """One process that should be there, under its present epoch."""

    role: control.Role
    number: int
    epoch: int
    heard: float
    """Monotonic seconds of its last message."""
    ready: bool = False
    expelled: bool = False
    deaths_in_a_row: int = 0
    identity: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.identity = control.routing_id(self.role, self.number, self.epoch)


class Peers:
    """All peers by routing id and by name."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._looked: float | None = None
        self._forgave = False
        self._by_identity: dict[bytes, Peer] = {}
        self._by_name: dict[tuple[str, int], Peer] = {}

    def expect(self, role: control.Role, number: int, epoch: int = 0, deaths_in_a_row: int = 0) -> Peer:
        """A process was (or will be) started for this peer."""
        before = self._by_name.get((role, number))
        if before is not None:
            del self._by_identity[before.identity]
        peer = Peer(role, number, epoch, self._monotonic(), deaths_in_a_row=deaths_in_a_row)
        self._by_identity[peer.identity] = self._by_name[role, number] = peer
        return peer

    def heard(self, routing_id: bytes) -> Peer | None:
        """The peer behind a message, or None for a stranger."""
        peer = self._by_identity.get(routing_id)
        if peer is not None:
            peer.heard = self._monotonic()
        return peer

    def get(self, role: control.Role, number: int) -> Peer | None:
        return self._by_name.get((role, number))

    def remove(self, role: control.Role, number: int, epoch: int) -> Peer | None:
        """A process ended; returns its peer if it was the present one."""
        peer = self._by_name.get((role, number))
        if peer is None or peer.epoch != epoch:
            return None
        del self._by_name[role, number], self._by_identity[peer.identity]
        return peer

    def look(self, seconds: float, every_s: float) -> Iterator[tuple[Peer, float]]:
        """Who is `silent`, for who means to ask every ``every_s``.

        A look that is late by much was kept from it: this process was stopped, starved or suspended, and
        whatever stood in its way stood in the others', too, so that the delay does not count. But not at two
        looks in a row: who hangs is found by a server that is always slow, too.
        """
        now = self._monotonic()
        away_s = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        self._forgave = not self._forgave and away_s > max(2 * every_s, seconds / 2)
        if self._forgave:
            for peer in self._by_name.values():
                peer.heard = min(now, peer.heard + away_s - every_s)
        return self.silent(seconds)

    def silent(self, seconds: float) -> Iterator[tuple[Peer, float]]:
        """Peers that were not heard for so long, or that were started and never said that they are ready,
        with how long it is."""
        now = self._monotonic()
        for peer in list(self._by_name.values()):
            allowed = seconds if peer.ready else max(seconds, STARTUP_S)
            if not peer.expelled and now - peer.heard > allowed:
                yield peer, now - peer.heard

    def of(self, *roles: str) -> list[Peer]:
        return [peer for peer in self._by_name.values() if peer.role in roles]

    @property
    def unready(self) -> int:
        """Processes that were started and have not said that they are ready."""
        return sum(not peer.ready for peer in self._by_name.values())


CLIENTS = (control.CLIENT, control.WORKER)
