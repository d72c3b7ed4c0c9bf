"""Over a transport that drops, repeats, delays and reorders, every update counts once or its trip ends with a
reason, and the run goes on; a build without what that takes is found out."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from faulty_run import Broken, FaultyRun, faulty_run

from edgefl.run.connection import Connection
from edgefl.run.gate import Gate

MESSAGES = int(os.environ.get("EDGEFL_FAULTY_MESSAGES", "5000"))


def after(run: FaultyRun, messages: int) -> Counter[str]:
    """How updates ended after so many messages. `Broken` if not as promised."""
    while run.network.sent < messages:
        run.turn()
    return run.check()


@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_every_update_counts_once_or_ends_with_a_reason(transport: str, tmp_path: Path) -> None:
    with faulty_run(tmp_path, transport) as run:
        ends = after(run, MESSAGES)
        assert run.core.version > MESSAGES // 100
        assert ends["applied"] == 2 * run.core.version
        assert min(run.network.faults.values()) > MESSAGES // 10


def counts_again(gate: Gate, *_: object) -> None:
    """A gate that forgets that a task has ended."""


def says_once(self: Connection, message: object) -> None:
    """A client that trusts the transport."""
    said, self._unanswered = self._unanswered, None
    once(self, message)  # type: ignore[arg-type]
    self._unanswered = said


once = Connection.report
BROKEN = {
    "an update counts again": (Gate, "end_task", counts_again),
    "nothing is said twice": (Connection, "report", says_once),
    "a task is begun again": (Connection, "_latest", property(lambda _: -1, lambda *_: None)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_build_without_what_that_takes_is_found_out(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*BROKEN[what], raising=False)
    with pytest.raises(Broken), faulty_run(tmp_path, "shm") as run:
        after(run, 20 * MESSAGES)
