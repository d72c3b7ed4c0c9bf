"""Tests that a run can be resumed after any power cut, and that missing flushes would be noticed."""

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
    """Draw ``count`` of the changes and, for each, a state that a power cut after it may leave."""
    rng = seeds.stream(1, "sample")
    chosen = set(rng.choice(len(changes), count, replace=False).tolist())
    return list(cuts(changes, 1, chosen))


def test_the_recorded_changes_make_the_files_of_the_run(recorded: Recorded) -> None:
    here = disk.Disk()
    for change in recorded.changes:
        here.apply(change)
    folder = recorded.folder.parent
    there = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert here.files() == there


def test_a_run_can_be_resumed_from_any_state_after_a_power_cut(recorded: Recorded) -> None:
    for cut in sampled(recorded.changes, 40):
        assert recorded.judge(cut) == "", (cut.after, sorted(cut.files))


@pytest.mark.slow
def test_a_run_resumed_after_a_power_cut_has_the_same_outcome(recorded: Recorded) -> None:
    for cut in sampled(recorded.changes, 8):
        assert recorded.judge.resumes(cut) == "", (cut.after, sorted(cut.files))


WRONG: dict[str, Callable[[list[Change]], list[Change]]] = {
    "no flush of a checkpoint": lambda changes: without_flushes(changes, "checkpoint"),
    "no flush of a folder": lambda changes: without_flushes(changes, "folder"),
    "no flush of the record": lambda changes: without_flushes(changes, "record"),
    "named before it is flushed": renamed_too_early,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_build_without_a_flush_is_caught(recorded: Recorded, wrong: str) -> None:
    changes = WRONG[wrong](recorded.changes)
    named = [number for number, change in enumerate(changes) if change.kind is Kind.RENAME]
    places = {number + after for number in named[-9:] for after in (0, 3)}
    # Few states show a missing flush of a folder, so more are drawn until one does.
    assert any(recorded.judge(cut) for seed in range(20) for cut in cuts(changes, 6, places, seed))
