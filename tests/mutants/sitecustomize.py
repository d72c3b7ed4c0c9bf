"""Broken builds of edgefl: processes of a run that find this folder on their PYTHONPATH become one.

``EDGEFL_TEST_MUTANT`` names the build. Each breaks one promise, which `edgefl chaos` must notice.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

COMMIT_S = 0.05
"""As often as the record was written before anyone waited for it."""


def acknowledges_first() -> None:
    """Tasks are sent before the record is committed, which is done now and then."""
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
    """A message that says a second time that an update is whole is taken for another update."""
    from edgefl.run.gate import Gate

    Gate.end_task = lambda *_: None  # type: ignore[method-assign]


def says_twice() -> None:
    """Clients say twice that an update is whole, as a network may."""
    from edgefl.run import messages
    from edgefl.run.connection import Connection

    say = Connection.report

    def again(self: Connection, message: Any) -> None:
        for _ in range(1 + isinstance(message, messages.Trained)):
            say(self, message)

    Connection.report = again  # type: ignore[method-assign]


def _write_checkpoints_often() -> None:
    """Else a host that is slow to write one has none but the first, which has no update, before each kill."""
    from edgefl.run import server

    server.CHECKPOINT_SHARE = 1.0


def skips_held() -> None:
    """An update that was held when the server was killed or the run interrupted comes back as nothing."""
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
    """The first sum after a restart is added to the model once more."""
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
