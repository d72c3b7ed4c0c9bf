"""What leaves the server under the virtual clock: only what workers and evaluator are told by its socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgefl.run import messages
from edgefl.run.outbox import SocketOutbox


class VirtualOutbox(SocketOutbox):
    """Tasks and cancels enter the agenda; the rest leaves as it does under the wall clock."""

    def __init__(
        self,
        *args: Any,
        begin: Callable[[messages.Task], None],
        end: Callable[[int, int], None],
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._begin, self._end = begin, end

    def train(self, task: messages.Task) -> None:
        self._begin(task)

    def cancel(self, client: int, task: int) -> None:
        self._end(client, task)
