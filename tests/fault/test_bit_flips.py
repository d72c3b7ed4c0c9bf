"""Tests that a flipped bit in a file of a run is noticed or changes nothing, thanks to the seals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgefl.parameters import checkpoint
from edgefl.results import seal
from tests.fault import disk
from tests.fault.bit_flips import GOOD, NOTICED, Flip, Reader, commanded, flips, killed
from tests.fault.conftest import Recorded

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=["finished", "killed"])
def folder(request: pytest.FixtureRequest, recorded: Recorded, tmp_path: Path) -> Path:
    if request.param == "finished":
        return recorded.folder
    disk.write(killed(recorded.changes), tmp_path / "killed")
    return tmp_path / "killed" / "run"


@pytest.fixture(scope="module")
def read(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(recorded.folder, tmp_path_factory.mktemp("flips") / "spoilt")


def test_no_flipped_bit_gives_another_result(folder: Path, tmp_path: Path) -> None:
    read = Reader(folder, tmp_path / "spoilt")
    found = Counter(map(read, flips(folder, 400)))
    assert found.keys() <= set(GOOD)
    assert found[NOTICED] > 100


@pytest.mark.slow
def test_commands_report_a_flipped_bit_in_one_line(folder: Path, tmp_path: Path) -> None:
    for flip in flips(folder, 5, seed=1):
        found = commanded(folder, flip, tmp_path / "run")
        assert found.endswith((": exit code 0", ": one line")), found


def results(read: Reader, name: str, part: float = 1.0) -> Iterator[str]:
    """Flip 400 evenly spaced bits, one at a time, in the first fraction ``part`` of a file; yield results."""
    size = int(8 * (read.whole / name).stat().st_size * part)
    return (read(Flip(name, bit)) for bit in range(0, size, size // 400))


def test_without_a_seal_of_its_header_a_flip_in_a_checkpoint_changes_a_result(
    recorded: Recorded, read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the seal did not cover the header's metadata, such as the updates' versions and times."""
    newest = max((recorded.folder / "checkpoints").glob("journal-*"))
    with checkpoint.safe_open(newest, framework="numpy") as file:
        metadata = file.metadata()
    sealed = {key: value for key, value in metadata.items() if key != "seal"}
    real = checkpoint._seal
    monkeypatch.setattr(checkpoint, "_seal", lambda tensors, _: real(tensors, sealed))
    found = results(read, f"checkpoints/{newest.name}", 0.01)
    assert any(said.startswith("another result") for said in found)


def test_without_its_seal_a_flip_in_the_record_changes_a_result(
    read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seal, "check", lambda record: None)
    assert any(said.startswith("another result") for said in results(read, "record.sqlite"))
