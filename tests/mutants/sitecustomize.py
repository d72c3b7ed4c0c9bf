"""Mutants of edgefl: in processes with this folder on their PYTHONPATH, the mutant that
``EDGEFL_TEST_MUTANT`` names breaks a guarantee. `edgefl chaos` must detect each mutant.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

COMMIT_S = 0.05
"""Minimum time between commits of the record, in seconds."""


def acknowledges_first() -> None:
    """Send tasks before the record is committed, and commit it only every `COMMIT_S` seconds."""
    from edgefl.run.engine import WriteAhead

    secure, last = WriteAhead.secure, [0.0]

    def sometimes(self: WriteAhead) -> None:
        if time.monotonic() - last[0] < COMMIT_S:
            self.aggregator.settle()
        else:
            secure(self)
            last[0] = time.monotonic()

    WriteAhead.secure = sometimes  # type: ignore[method-assign]


def counts_twice() -> None:
    """Count a repeated report of an update as another update."""
    from edgefl.run.gate import Gate

    Gate.end_task = lambda *_: None  # type: ignore[method-assign]


def says_twice() -> None:
    """Report each update twice, as a network may."""
    from edgefl.run import messages
    from edgefl.run.connection import Connection

    say = Connection.report

    def again(self: Connection, message: Any) -> None:
        for _ in range(1 + isinstance(message, messages.Trained)):
            say(self, message)

    Connection.report = again  # type: ignore[method-assign]


def _write_checkpoints_often() -> None:
    """Do not limit the time for checkpoints. Otherwise, the only checkpoint before a kill on a slow host
    would be the first one, which contains no update."""
    from edgefl.run import server

    server.CHECKPOINT_SHARE = 1.0


def skips_held() -> None:
    """After a kill or an interrupt, replace the updates that the server held with zeros."""
    from edgefl import kernels
    from edgefl.run.aggregator import Aggregator

    _write_checkpoints_often()
    restore, take_over = Aggregator.restore, Aggregator.take_over

    def restored(self: Aggregator, *, update: Any, **of: Any) -> Any:
        update[:] = 0
        return restore(self, update=update, **of)

    def taken_over(self: Aggregator, held: Any) -> None:
        take_over(self, held)
        for update in held:
            slot = self.leases[update.task].slot
            self.buffer.raw(slot)[:] = 0
            self.buffer.checksum[slot] = kernels.checksum(self.buffer.slot(slot))

    Aggregator.restore, Aggregator.take_over = restored, taken_over  # type: ignore[method-assign]


def sums_twice() -> None:
    """Add the first sum after a restart to the model twice."""
    from edgefl.run.aggregator import Aggregator

    _write_checkpoints_often()
    add, restarted = Aggregator.sum, []

    def noting(name: str) -> None:
        before = getattr(Aggregator, name)

        def noted(self: Aggregator, *held: Any, **of: Any) -> Any:
            restarted.append(self)
            return before(self, *held, **of)

        setattr(Aggregator, name, noted)

    def twice(self: Aggregator, action: Any, entry: int) -> Any:
        before = self.buffer.model(self.buffer.latest[1]).copy()
        result = add(self, action, entry)
        if restarted and not result.bad:
            restarted.clear()
            self.buffer.model(entry)[:] += self.buffer.model(entry) - before
        return result

    noting("restore")
    noting("take_over")
    Aggregator.sum = twice  # type: ignore[method-assign]


SERVER, ZYGOTE = "edgefl.run.server_process", "edgefl.run.zygote"
MUTANTS: dict[tuple[str, str], Callable[[], None]] = {
    ("acknowledges-first", SERVER): acknowledges_first,
    ("counts-twice", SERVER): counts_twice,
    ("counts-twice", ZYGOTE): says_twice,
    ("skips-held", SERVER): skips_held,
    ("sums-twice", SERVER): sums_twice,
}
for (name, module), change in MUTANTS.items():
    if os.environ.get("EDGEFL_TEST_MUTANT") == name and module in sys.orig_argv:
        change()
