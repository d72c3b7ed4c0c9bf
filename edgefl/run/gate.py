"""The gate: decodes and checks incoming messages; encodes and sends outgoing ones.

An update passes only if its sender is known and holds the task, if its base version equals that of the lease,
and if its checksum equals the checksum in the slot. (The sum later compares this checksum with the update's
bytes.) A violation becomes a `Refusal`. Repeated and late reports of a finished task have no effect, because
a transport may lose, delay or repeat messages.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from edgefl.errors import SlotError, WireError
from edgefl.parameters.buffer import ParameterBuffer, SlotState
from edgefl.run import control, messages
from edgefl.run.aggregator import Aggregator
from edgefl.run.connection import ServerSocket
from edgefl.run.peers import MAX_DETAIL, Peer, Peers
from edgefl.run.progress import Gauge, Stopwatch
from edgefl.run.slots import Lease
from edgefl.run.transport import ShmServer
from edgefl.zeromq.sockets import Frame, Full, Unreachable


class TaskReturned(NamedTuple):
    """A task that ended without an update; ``kind`` is the kind of incident, or "" if there was none."""

    client: int
    task: int
    kind: str
    reason: str


class ResendRequest(NamedTuple):
    """A peer that should be busy keeps repeating its last report, so the server's order to it was probably
    lost and must be sent again."""


class Refusal(NamedTuple):
    """A peer has sent an invalid message, or does not read the server's messages."""

    kind: str
    detail: str


MAX_IDLE = 1000
"""Maximum number of messages without effect that a peer may send between two checks of all peers; a peer that
sends more is flooding the server."""
MAX_REPEATS = 2
"""Number of repeated reports that are ignored, because they may have been sent before the next task arrived;
after more repeats, the task counts as lost and is sent again."""
Checked = messages.Ready | messages.TaskResult | messages.Assessed | TaskReturned | ResendRequest | Refusal


@dataclass(eq=False)
class Gate:
    """Receives, checks and sends messages. Only `wait` blocks."""

    socket: ServerSocket
    transport: ShmServer
    _peers: Peers
    _aggregator: Aggregator
    _gauge: Gauge
    _watch: Stopwatch

    def __post_init__(self) -> None:
        self._buffer: ParameterBuffer = self._aggregator.buffer
        self._stuck: list[Peer] = []
        self._checks: dict[type, Callable[[Peer, Any, Sequence[Frame]], Iterable[Checked]]] = {
            messages.Ready: self._ready,
            messages.Beat: self._beat,
            messages.Chunk: self._chunk,
            messages.Gone: self._gone,
            messages.Trained: self._trained,
            messages.Assessed: self._assessed,
        }

    def receive(self) -> Iterator[tuple[Peer, Checked]]:
        """Yield the valid messages that have arrived, each with its sender, without blocking."""
        watch, ns, sender_of, checks = self._watch, self._watch.ns, self._peers.sender_of, self._checks
        watch.to("receive")
        began_ns = watch.since_ns + ns.get("sum", 0)
        for name, frames in self.socket.receive():
            watch.to("check")
            peer = sender_of(name)
            if peer is None or peer.expelled:
                continue
            try:
                message = messages.decode_from_client(frames[0] if frames else b"")
                if not peer.ready and type(message) is not messages.Ready:
                    raise WireError(f"{type(message).__name__} arrived before Ready")
                for checked in checks[type(message)](peer, message, frames[1:]):
                    yield peer, checked
            except (WireError, SlotError) as error:
                yield peer, Refusal("malformed", str(error))
                continue
            watch.to("receive")
            now_ns = watch.since_ns + ns.get("sum", 0)
            if type(message) is messages.Trained:
                self._gauge.cost(now_ns - began_ns)
            began_ns = now_ns
        while self._stuck:
            peer = self._stuck.pop()
            if self._peers.get(peer.role, peer.number) is peer:  # it has not died or been replaced
                yield peer, Refusal("hang", "does not read its messages")

    def _ready(self, peer: Peer, message: messages.Ready, _: Sequence[Frame]) -> Sequence[Checked]:
        if (message.role, message.peer, message.epoch) != (peer.role, peer.number, peer.epoch):
            raise WireError(f"{message.role} {message.peer} sent Ready on another process's connection")
        password = control.password(self.socket.secret, peer.identity)
        # `compare_digest` raises TypeError for a str with a letter such as é, so compare bytes.
        if not hmac.compare_digest(message.password.encode(), password.encode()):
            raise WireError(f"wrong password for {peer.role} {peer.number}")
        was, peer.ready = peer.ready, True
        return self._repeated(peer) if was else (message,)

    def _beat(self, peer: Peer, *_: object) -> Sequence[Checked]:
        peer.idle += 1
        if peer.idle > MAX_IDLE:
            raise WireError(f"sent {peer.idle} messages in a row without effect")
        return ()

    def _repeated(self, peer: Peer) -> Sequence[Checked]:
        """Ignore a repeated message; after more than `MAX_REPEATS` repetitions, request that the peer's
        order be sent again."""
        peer.repeats += 1
        again = (ResendRequest(),) if peer.repeats > MAX_REPEATS else ()
        return (*self._beat(peer), *again)

    def _chunk(self, peer: Peer, message: messages.Chunk, body: Sequence[Frame]) -> Sequence[Checked]:
        if self.lease_of(peer, message.task) is None:
            if message.task in peer.past:
                return self._beat(peer)
            raise WireError(f"sent a part of an update for task {message.task}, which it does not hold")
        self.transport.accept(message, messages.payload(body))
        return ()

    def _trained(self, peer: Peer, message: messages.Trained, _: Sequence[Frame]) -> Iterator[Checked]:
        fresh = False
        for result in message.results:
            lease = self.lease_of(peer, result.task)
            if not self._is_old(peer, lease, result):
                fresh = True
                yield self._complete(peer, lease, result)
        if not fresh:
            yield from self._repeated(peer)

    def _is_old(self, peer: Peer, lease: Lease | None, result: messages.TaskResult) -> bool:
        """Return True if a result is a repetition, or belongs to an order that has been replaced.

        A worker's result whose update lacks parts is also ignored, because the worker will compute it again.
        A client's trip is not repeated: an incomplete update does not match its checksum and is dropped.
        """
        if lease is None:
            return result.task in peer.past
        if peer.role == control.WORKER and not self.transport.is_complete(lease.slot, result.task):
            return True
        return result.order != lease.order

    def _complete(
        self, peer: Peer, lease: Lease | None, result: messages.TaskResult
    ) -> messages.TaskResult | TaskReturned:
        """Accept a complete update. Raises `WireError` if the lease or the slot contradicts the message."""
        buffer, task = self._buffer, result.task
        if lease is None:
            raise WireError(f"reported an update of task {task}, which it does not hold")
        if peer.role == control.CLIENT:
            result.measured()
        slot = lease.slot
        peer.deaths_in_a_row = 0
        if result.trained_version != lease.version:
            detail = f"task {task}: trained version {result.trained_version} instead of {lease.version}"
            self.end_task(peer, task)
            return TaskReturned(lease.client, task, "version", detail)
        if self.transport.carries_updates:
            buffer.written(slot, task=task, checksum=result.checksum)
        elif buffer.state[slot] != SlotState.WRITTEN:
            raise WireError(f"reported an update of task {task}, whose slot is not written")
        elif result.checksum != buffer.checksum[slot]:
            raise WireError(f"reported an update of task {task} whose checksum differs from that in its slot")
        self.end_task(peer, task)
        return result

    def end_task(self, peer: Peer, task: int) -> None:
        """End the assignment of a task to its peer, so that the task's update is used at most once."""
        self._aggregator.unassign(task)
        peer.past.append(task)

    def _gone(self, peer: Peer, gone: messages.Gone, _: Sequence[Frame]) -> Sequence[Checked]:
        lease = self.lease_of(peer, gone.task)
        if lease is None or lease.client != gone.client or lease.order != gone.order:
            return self._repeated(peer)
        self.end_task(peer, gone.task)
        reason = gone.reason[:MAX_DETAIL]
        return (TaskReturned(gone.client, gone.task, "" if reason == "cancelled" else "failed", reason),)

    def _assessed(self, peer: Peer, answer: messages.Assessed, _: Sequence[Frame]) -> Sequence[Checked]:
        if peer.role != control.EVALUATOR:
            raise WireError(f"{peer.role} {peer.number} is not an evaluator")
        if answer.version in peer.past:
            return self._repeated(peer)
        peer.past.append(answer.version)
        peer.deaths_in_a_row = 0
        return (answer,)

    def lease_of(self, peer: Peer, task: int) -> Lease | None:
        """Return the lease of a task, or None if this peer does not hold the task."""
        lease = self._aggregator.leases.get(task)
        computes = peer.role != control.EVALUATOR and lease is not None and lease.holder == peer.number
        return lease if computes else None

    def send(self, peer: Peer, message: messages.FromServer, payload: Sequence[Frame] = ()) -> bool:
        """Send a message; return False on failure. If the peer does not read its messages, `receive` will
        yield a `Refusal`."""
        try:
            self.socket.send(peer.identity, (messages.encode(message), *payload))
        except Full:
            self._stuck.append(peer)
            return False
        except Unreachable:
            return False
        if not isinstance(message, messages.Withdraw):
            peer.repeats = 0
        return True

    def dismiss(self, *roles: str) -> None:
        """Send `Bye` to all connected peers of these roles."""
        for peer in self._peers.of(*roles):
            if peer.ready and not peer.dismissed:  # a message to a peer that has left would delay closing
                peer.dismissed = self.send(peer, messages.Bye())

    def wait(self, timeout_ms: int) -> bool:
        """Wait up to ``timeout_ms``; return True if a watched descriptor is ready.

        The wait ends early when a message arrives or a descriptor is ready.
        """
        return self.socket.wait(0 if self._stuck else timeout_ms)
