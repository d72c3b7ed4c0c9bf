"""Over a transport that drops, repeats, delays and reorders, every update counts once or its trip ends with a
reason, and the run goes on; a build without what that takes is found out."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from faulty_run import Broken, campaign, faulty_run
from faulty_virtual import compared

from edgefl.errors import RunError, SlotError
from edgefl.run.connection import Connection
from edgefl.run.gate import Gate
from edgefl.run.transport import WireServer
from edgefl.run.virtual import VirtualTimeline

MESSAGES = int(os.environ.get("EDGEFL_FAULTY_MESSAGES", "5000"))


@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_every_update_counts_once_or_ends_with_a_reason(transport: str, tmp_path: Path) -> None:
    with faulty_run(tmp_path, transport=transport) as run:
        while run.network.sent < MESSAGES:
            run.turn()
        ends = run.check()
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


once = Connection.say
BEGUN_AGAIN = (Connection, "_latest", property(lambda _: -1, lambda *_: None))
BROKEN = {
    "an update counts again": (Gate, "_ended", counts_again),
    "nothing is said twice": (Connection, "say", says_once),
    "a task is begun again": BEGUN_AGAIN,
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_build_without_what_that_takes_is_found_out(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*BROKEN[what], raising=False)
    with pytest.raises(Broken):
        campaign(tmp_path, 20 * MESSAGES, "shm", 1)


@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_under_the_virtual_clock_the_bits_are_those_of_a_perfect_transport(
    transport: str, tmp_path: Path
) -> None:
    said = compared(tmp_path, MESSAGES // 4, transport, 1)
    assert re.search(r"; [1-9]\d* versions with the bits of a perfect transport, [1-9]\d* of them", said)


VIRTUAL_BROKEN = {
    "an order is carried out again": BEGUN_AGAIN,
    "an update counts without its parts": (WireServer, "whole", lambda *_: True),
    "nothing is given again": (VirtualTimeline, "unheard", lambda *_: None),
    "what is said of an old order counts": (
        Gate, "_is_old", lambda _, peer, lease, said: lease is None and said.task in peer.past,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "transport", "most"),
    [
        ("an order is carried out again", "shm", MESSAGES),
        ("an update counts without its parts", "wire", MESSAGES // 5),
        pytest.param("nothing is given again", "shm", MESSAGES, marks=pytest.mark.slow),
        pytest.param("what is said of an old order counts", "shm", MESSAGES, marks=pytest.mark.slow),
    ],
)
def test_a_build_whose_workers_are_not_told_again_is_found_out(
    what: str, transport: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*VIRTUAL_BROKEN[what], raising=False)
    with pytest.raises((Broken, RunError, SlotError)):
        compared(tmp_path, most, transport, 2)
