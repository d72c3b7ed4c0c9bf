"""What leaves the server: tasks, cancels and evaluations over its socket, wakes over its alarms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgefl import control, wire
from edgefl.peers import CLIENTS, Peer, Peers
from edgefl.sockets import Frame, Full, ServerSocket, Unreachable
from edgefl.stopwatch import Stopwatch
from edgefl.transport import ServerEnd


class SocketOutbox:
    """The executor's `Outbox` on the server's socket. Nothing in it waits for a peer."""

    def __init__(
        self,
        socket: ServerSocket,
        peers: Peers,
        transport: ServerEnd,
        watch: Stopwatch,
        *,
        fetched: Callable[[int], None],
        stuck: Callable[[Peer], None],
        assess: Callable[[int, int], None],
        wake: Callable[[float], None],
        stopped: Callable[[str], None],
    ) -> None:
        self._socket, self._peers, self._transport, self._watch = socket, peers, transport, watch
        self._fetched, self._stuck = fetched, stuck
        self.assess, self.wake, self._stopped = assess, wake, stopped

    def train(self, task: wire.Task) -> None:
        """Give a client its task, and with it the model where that travels by the socket."""
        before = self._watch.to("send")
        peer = self._peers.get(control.CLIENT, task.client)
        frames = self._transport.model_frames(task.entry)
        if peer is not None and self.send(peer, task, frames) and frames:
            self._fetched(task.slot)
        self._watch.to(before)

    def cancel(self, client: int, task: int) -> None:
        """Tell a client to give its task up."""
        peer = self._peers.get(control.CLIENT, client)
        if peer is not None:
            self.send(peer, wire.Cancel(task))

    def stop(self, reason: str) -> None:
        """The run is over: let the clients go."""
        self._stopped(reason)
        self.goodbye(*CLIENTS)

    def goodbye(self, *roles: str) -> None:
        """Tell all peers of these roles to leave."""
        for peer in self._peers.of(*roles):
            self.send(peer, wire.Bye())

    def send(self, peer: Peer, message: wire.FromServer, payload: Sequence[Frame] = ()) -> bool:
        """Whether the socket took the message. A peer that is gone is left to the supervisor to report."""
        try:
            self._socket.send(peer.identity, [wire.encode(message), *payload])
        except Full:
            self._stuck(peer)
            return False
        except Unreachable:
            return False
        return True
