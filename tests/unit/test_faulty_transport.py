"""Tests of runs over a transport that drops, repeats, delays and reorders messages.

Every update is counted exactly once, or its trip ends with a reason; the run continues. Implementations that
are wrong on purpose must fail these tests.
"""

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
    """Run until this many messages have been sent; return the number of ended tasks by fate.

    Raises `Broken` if the run breaks a rule.
    """
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
    """Replaces `Gate.end_task` without recording the end of the task."""


def report_once(self: Connection, message: object) -> None:
    """Replaces `Connection.report`: a message that gets no reply is not repeated."""
    unanswered, self._unanswered = self._unanswered, None
    once(self, message)  # type: ignore[arg-type]
    self._unanswered = unanswered


once = Connection.report
BROKEN = {
    "an update counts again": (Gate, "end_task", counts_again),
    "no message is repeated": (Connection, "report", report_once),
    "a task starts again": (Connection, "_latest", property(lambda _: -1, lambda *_: None)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_wrong_implementations_fail(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[broken], raising=False)
    with pytest.raises(Broken), faulty_run(tmp_path, "shm") as run:
        after(run, 20 * MESSAGES)
