"""Tests of the soak benchmark's trends: constant figures pass despite noise, and growing figures fail."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks import fuzz_kernels, soak

LOOKS, MINUTE_S = 240, 60.0


def judged(**figures: np.ndarray) -> list[str]:
    """Return the names of the figures that `soak.trends` does not find flat over an hour of samples."""
    names = {"memory": f"server {soak.MEMORY}", "descriptors": "client descriptors", "files": "files"}
    seconds = np.linspace(0, 60 * MINUTE_S, LOOKS)
    samples = [
        (float(at), {names[name]: float(values[k]) for name, values in figures.items()})
        for k, at in enumerate(seconds)
    ]
    return [each.name for each in soak.trends(samples) if not each.is_flat(soak.MAX_MIB)]


def test_constant_figures_pass() -> None:
    draw = np.random.default_rng(1)
    memory = 40 + draw.normal(0, 0.5, LOOKS)
    memory[:50] -= np.linspace(10, 0, 50)  # memory may grow at the start
    assert judged(memory=memory, descriptors=np.full(LOOKS, 15.0), files=np.full(LOOKS, 7.0)) == []


@pytest.mark.parametrize("hour_mib", [8.0, 50.0])
def test_memory_that_grows_or_peaks_fails(hour_mib: float) -> None:
    noise = 40 + np.random.default_rng(2).normal(0, 0.5, LOOKS)
    peak = noise.copy()
    peak[-10] += hour_mib
    for memory in (noise + np.linspace(0, hour_mib, LOOKS), peak):
        assert judged(memory=memory) == [f"server {soak.MEMORY}"]


def test_one_more_descriptor_or_file_fails() -> None:
    """It is a leak if it is open in the whole last quarter, but not if it is open in every other sample."""
    at = np.arange(LOOKS)
    more = np.where(at < 170, 15.0, 16.0)
    assert judged(descriptors=more, files=more) == ["client descriptors", "files"]
    assert judged(descriptors=15.0 + at % 2, files=np.where(at < 190, 7.0, 8.0)) == []


def test_a_failed_run_is_not_judged_by_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    (folder / soak.CHECKPOINTS).mkdir(parents=True)
    for number in range(soak.KEEP):
        (folder / soak.CHECKPOINTS / f"{number}.safetensors").touch()
    command = Mock(process=Mock(poll=Mock(return_value=1)), output=Mock(return_value=["edgefl: failed"]))
    monkeypatch.setattr(soak, "Command", lambda *_: command)
    monkeypatch.setattr(soak.outcome, "counts", lambda _: (1, 1))
    with pytest.raises(SystemExit, match="edgefl: failed\nthe run ended by itself, with exit code 1"):
        soak.soak(tmp_path / "soak.toml", [], folder, 60.0, 1.0, tmp_path / "samples")
    command.end.assert_called_once_with()


def test_the_fuzz_test_of_kernels_fails_if_there_is_no_back_end_to_compare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fuzz_kernels.py", "--backends", "none"])
    assert fuzz_kernels.main() == 1
    assert capsys.readouterr().out == "nothing to compare: none of none is available here\n"
