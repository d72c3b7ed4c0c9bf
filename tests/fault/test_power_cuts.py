"""Whatever a power cut leaves of a run's files, the run goes on; where it could not, the judge says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgefl import seeds
from tests.fault import disk
from tests.fault.conftest import Recorded
from tests.fault.power_cut import Cut, cuts, renamed_too_early, without_flushes
from tests.fault.shim import Change, Kind

pytestmark = pytest.mark.timeout(600)


def sampled(changes: list[Change], count: int) -> list[Cut]:
    """States from all over the run, one at a change."""
    rng = seeds.stream(1, "sample")
    chosen = set(rng.choice(len(changes), count, replace=False).tolist())
    return list(cuts(changes, 1, chosen))


def test_what_the_disk_was_told_is_what_is_there(recorded: Recorded) -> None:
    here = disk.Disk()
    for change in recorded.changes:
        here.apply(change)
    folder = recorded.folder.parent
    there = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert here.files() == there


def test_the_run_goes_on_from_whatever_is_left(recorded: Recorded) -> None:
    for cut in sampled(recorded.changes, 40):
        assert recorded.judge(cut) == "", (cut.after, sorted(cut.files))


@pytest.mark.slow
def test_resumed_from_whatever_is_left_it_ends_as_if_nothing_had_been(recorded: Recorded) -> None:
    for cut in sampled(recorded.changes, 8):
        assert recorded.judge.resumes(cut) == "", (cut.after, sorted(cut.files))


WRONG: dict[str, Callable[[list[Change]], list[Change]]] = {
    "no flush of a checkpoint": lambda changes: without_flushes(changes, "checkpoint"),
    "no flush of a folder": lambda changes: without_flushes(changes, "folder"),
    "no flush of the record": lambda changes: without_flushes(changes, "record"),
    "named before it is flushed": renamed_too_early,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_build_that_does_it_wrong_is_caught(recorded: Recorded, wrong: str) -> None:
    """Of the same run without some of its flushes some state is no good."""
    changes = WRONG[wrong](recorded.changes)
    named = [number for number, change in enumerate(changes) if change.kind is Kind.RENAME]
    states = cuts(changes, 6, {number + after for number in named[-9:] for after in (0, 3)})
    assert any(map(recorded.judge, states))
