"""What comes in at the server's socket: read, decoded, held against what was asked for, and passed on.

Nothing that a peer sends gets further than this unless it fits: a sender that is known, an update for a task
that it holds, from the version that it was given, with the checksum that lies in its slot. What does not fit
costs the sender its process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from edgefl.errors import SlotError, WireError
from edgefl.parameters.buffer import SlotState
from edgefl.run import control, messages
from edgefl.run.connection import Frame, ServerSocket
from edgefl.run.peers import Peer, Peers
from edgefl.run.progress import Gauge, Stopwatch
from edgefl.run.roster import MOST_DETAIL
from edgefl.run.slots import Aggregator
from edgefl.run.transport import ServerEnd


class Listener(Protocol):
    """Who is told what came in."""

    def ready(self, peer: Peer) -> None:
        """A process said for the first time that it is there."""

    def holds(self, peer: Peer, client: int, task: int) -> bool:
        """Whether this peer computes that task of that client."""

    def finished(self, done: messages.Done | messages.Gone) -> None:
        """A task has ended, with an update whole in its slot or without."""

    def assessed(self, answer: messages.Assessed) -> None:
        """The evaluator measured a version."""

    def note(self, client: int, kind: str, detail: str) -> None:
        """Something went wrong that the run survives."""

    def expel(self, peer: Peer, kind: str, detail: str) -> None:
        """This peer must go."""


class Reception:
    """Drains the socket; every message ends in a call of the listener, or in nothing."""

    def __init__(
        self,
        socket: ServerSocket,
        peers: Peers,
        transport: ServerEnd,
        aggregator: Aggregator,
        gauge: Gauge,
        watch: Stopwatch,
        listener: Listener,
    ) -> None:
        self._socket, self._peers, self._transport = socket, peers, transport
        self._aggregator, self._buffer = aggregator, aggregator.buffer
        self._gauge, self._watch, self._listener = gauge, watch, listener
        self._handlers: dict[type, Callable[..., None]] = {
            messages.Ready: self._ready,
            messages.Beat: lambda *_: None,
            messages.Chunk: self._chunk,
            messages.Done: self._done,
            messages.Gone: self._gone,
            messages.Assessed: self._assessed,
        }

    def handle(self, kind: type, handler: Callable[..., None]) -> None:
        """Have messages of one more kind dealt with: ``handler(peer, message, payload frames)``."""
        self._handlers[kind] = handler

    def drain(self) -> None:
        """Take in what has arrived."""
        watch, ns, heard, handlers = self._watch, self._watch.ns, self._peers.heard, self._handlers
        watch.to("receive")
        began_ns = watch.since_ns + ns.get("sum", 0)
        for name, frames in self._socket.receive():
            watch.to("check")
            peer = heard(name)
            if peer is None or peer.expelled:
                self._gauge.strangers += peer is None
                continue
            try:
                message = messages.decode_from_client(frames[0] if frames else b"")
                handler = handlers.get(type(message))
                if handler is None:
                    raise WireError(f"{type(message).__name__}, which nobody waits for")
                handler(peer, message, frames[1:])
                watch.to("receive")
                now_ns = watch.since_ns + ns.get("sum", 0)
                if type(message) is messages.Done:
                    self._gauge.cost(now_ns - began_ns)
                began_ns = now_ns
            except (WireError, SlotError) as error:
                self._listener.expel(peer, "malformed", str(error))

    def _ready(self, peer: Peer, message: messages.Ready, _: Sequence[Frame]) -> None:
        if (message.role, message.peer, message.epoch) != (peer.role, peer.number, peer.epoch):
            raise WireError(f"{message.role} {message.peer} says it is ready on another's connection")
        if not peer.ready:
            peer.ready = True
            self._listener.ready(peer)

    def _chunk(self, peer: Peer, message: messages.Chunk, body: Sequence[Frame]) -> None:
        lease = self._aggregator.leases.get(message.task)
        if lease is None or not self._listener.holds(peer, lease.client, message.task):
            raise WireError(f"a part of an update for task {message.task}, which is not the sender's")
        self._transport.accept(message, messages.payload([b"", *body]))

    def _done(self, peer: Peer, done: messages.Done, _: Sequence[Frame]) -> None:
        lease = self._aggregator.leases.get(done.task)
        holds = lease is not None and self._listener.holds(peer, done.client, done.task)
        if lease is None or not holds or lease.slot != done.slot:
            raise WireError(f"an update of task {done.task}, which is not the sender's")
        peer.deaths_in_a_row = 0
        if done.trained_version != lease.version:
            detail = f"task {done.task}: trained {done.trained_version}, was given {lease.version}"
            self._listener.note(done.client, "version", detail)
            self._listener.finished(messages.Gone(done.client, done.epoch, done.task, detail))
            return
        self.whole(lease.slot, done.task, done.checksum)
        self._listener.finished(done)

    def whole(self, slot: int, task: int, checksum: int) -> None:
        """The sender says that its update is whole. `WireError` if its slot does not say so too."""
        if self._transport.carries_updates:
            self._buffer.written(slot, task=task, checksum=checksum)
        elif self._buffer.state[slot] != SlotState.WRITTEN:
            raise WireError(f"an update of task {task} whose slot is not written")
        elif checksum != int(self._buffer.checksum[slot]):
            raise WireError(f"an update of task {task} with two checksums")

    def _gone(self, peer: Peer, gone: messages.Gone, _: Sequence[Frame]) -> None:
        if not self._listener.holds(peer, gone.client, gone.task):
            return
        reason = gone.reason[:MOST_DETAIL]
        if reason != "cancelled":
            self._listener.note(gone.client, "failed", reason)
        self._listener.finished(messages.Gone(gone.client, gone.epoch, gone.task, reason))

    def _assessed(self, peer: Peer, answer: messages.Assessed, _: Sequence[Frame]) -> None:
        if peer.role != control.EVALUATOR:
            raise WireError(f"{peer.role} {peer.number} is no evaluator")
        self._listener.assessed(answer)
