"""What leaves the server: tasks, cancels and evaluations over its socket, wakes over its alarms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgefl.run import control, messages
from edgefl.run.connection import Frame, Full, ServerSocket, Unreachable
from edgefl.run.peers import CLIENTS, Peer, Peers
from edgefl.run.progress import Stopwatch
from edgefl.run.transport import ServerEnd

AT_ONCE = 16
"""Tasks that are sent together at most: who waits for the first one must not wait long."""


class SocketOutbox:
    """The executor's `Outbox` on the server's socket. Nothing in it waits for a peer.

    Tasks are sent a few at once, when what came in together has been dealt with: each wakes a client, which
    may take the server's processor, and what the server does in one go it finds in its caches.
    """

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
        self._tasks: list[tuple[Peer, messages.Task]] = []

    def train(self, task: messages.Task) -> None:
        """Give a client its task, at the next `flush`."""
        peer = self._peers.get(control.CLIENT, task.client)
        if peer is not None:
            self._tasks.append((peer, task))
            if len(self._tasks) == AT_ONCE:
                self.flush()

    def flush(self) -> None:
        """Send the tasks that wait, each with its model where that travels by the socket."""
        if not self._tasks:
            return
        before = self._watch.to("send")
        tasks, self._tasks = self._tasks, []
        for peer, task in tasks:
            frames = self._transport.model_frames(task.entry)
            if self._sent(peer, (messages.encode(task), *frames)) and frames:
                self._fetched(task.slot)
        self._watch.to(before)

    def cancel(self, client: int, task: int) -> None:
        """Tell a client to give its task up."""
        peer = self._peers.get(control.CLIENT, client)
        if peer is not None:
            self.send(peer, messages.Cancel(task))

    def stop(self, reason: str) -> None:
        """The run is over: let the clients go."""
        self._stopped(reason)
        self.goodbye(*CLIENTS)

    def goodbye(self, *roles: str) -> None:
        """Tell all peers of these roles to leave."""
        for peer in self._peers.of(*roles):
            self.send(peer, messages.Bye())

    def send(self, peer: Peer, message: messages.FromServer, payload: Sequence[Frame] = ()) -> bool:
        """Whether the socket took the message, after the tasks that wait.

        A peer that is gone is left to the supervisor to report.
        """
        self.flush()
        return self._sent(peer, (messages.encode(message), *payload))

    def _sent(self, peer: Peer, frames: Sequence[Frame]) -> bool:
        try:
            self._socket.send(peer.identity, frames)
        except Full:
            self._stuck(peer)
            return False
        except Unreachable:
            return False
        return True
