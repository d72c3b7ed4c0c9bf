"""Queue of model versions for the evaluator.

The version at the head of the queue is being evaluated; under the wall clock, at most one more waits.
"""

from __future__ import annotations

from edgefl.run import control, messages
from edgefl.run.aggregator import Aggregator
from edgefl.run.gate import Gate
from edgefl.run.peers import Peers


class EvaluationQueue:
    """Keeps the ring entries of queued versions unchanged until the versions are evaluated or dropped.

    With ``keep_all`` no version is dropped, however long the queue is.
    """

    def __init__(self, aggregator: Aggregator, gate: Gate, peers: Peers, *, keep_all: bool = False) -> None:
        self._aggregator, self._gate, self._peers, self._keep_all = aggregator, gate, peers, keep_all
        self._queue: list[tuple[int, int]] = []  # (version, ring entry); the first is evaluated now
        self._given_up = False

    def request(self, version: int, entry: int) -> list[int]:
        """Request the evaluation of a version; return the versions that are dropped.

        Without ``keep_all``, a new version replaces the waiting version, so that the run never waits for the
        evaluator.
        """
        if self._given_up:
            return [version]
        dropped = []
        while len(self._queue) > 1 and not self._keep_all:
            late, late_entry = self._queue.pop()
            self._aggregator.unpin(late_entry)
            dropped.append(late)
        self._aggregator.pin(entry)
        self._queue.append((version, entry))
        if len(self._queue) == 1:
            self.send()
        return dropped

    def send(self) -> None:
        """Send the evaluator the first version in the queue, even if it was already sent."""
        peer = self._peers.get(control.EVALUATOR, 0)
        if self._queue and peer is not None and peer.ready:
            self._gate.send(peer, messages.Assess(*self._queue[0]))

    def complete(self, version: int) -> bool:
        """Remove an evaluated version from the queue; return False if its evaluation was not requested."""
        if not self._queue or self._queue[0][0] != version:
            return False
        self._aggregator.unpin(self._queue.pop(0)[1])
        self.send()
        return True

    def give_up(self) -> None:
        """Clear the queue, because the run no longer has an evaluator."""
        self._given_up = True
        while self._queue:
            self._aggregator.unpin(self._queue.pop()[1])

    @property
    def entries(self) -> dict[int, int]:
        """Ring entries of the queued versions, keyed by version."""
        return dict(self._queue)

    @property
    def waiting(self) -> bool:
        """True while a version is being evaluated."""
        return bool(self._queue)
