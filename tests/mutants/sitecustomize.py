"""Broken builds of edgefl: the processes of a run take one in that find this folder on their PYTHONPATH.

``EDGEFL_TEST_MUTANT`` names the build. Each breaks one promise, which `edgefl chaos` must notice.
"""

from __future__ import annotations

import os
import sys
from typing import Any

MUTANT = os.environ.get("EDGEFL_TEST_MUTANT", "")


def skips_held() -> None:
    """An update that was held when the run was interrupted comes back as nothing."""
    from edgefl.run.slots import Aggregator

    restore = Aggregator.restore

    def forgetful(self: Aggregator, *, update: Any, **of: Any) -> Any:
        update[:] = 0
        return restore(self, update=update, **of)

    Aggregator.restore = forgetful  # type: ignore[method-assign]


def sums_twice() -> None:
    """The first sum after a restart is added to the model once more."""
    from edgefl.run.slots import Aggregator

    restore, add = Aggregator.restore, Aggregator.sum

    def restored(self: Aggregator, **of: Any) -> Any:
        self.again = True  # type: ignore[attr-defined]
        return restore(self, **of)

    def twice(self: Aggregator, action: Any, entry: int) -> Any:
        before = self.buffer.model(self.buffer.latest[1]).copy()
        result = add(self, action, entry)
        if getattr(self, "again", False) and not result.bad:
            self.again = False  # type: ignore[attr-defined]
            self.buffer.model(entry)[:] += self.buffer.model(entry) - before
        return result

    Aggregator.restore, Aggregator.sum = restored, twice  # type: ignore[method-assign]


MUTANTS = {"skips-held": skips_held, "sums-twice": sums_twice}
if MUTANT and "edgefl.run.server_process" in sys.orig_argv:
    MUTANTS[MUTANT]()
