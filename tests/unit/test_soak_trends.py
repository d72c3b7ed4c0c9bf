"""The judgement on a long run: what is flat passes, whatever its noise, and what grows does not."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import soak

LOOKS, MINUTE_S = 240, 60.0


def judged(**figures: np.ndarray) -> list[str]:
    """Names of what is not flat in an hour of looks."""
    names = {"memory": f"server {soak.MEMORY}", "descriptors": "client descriptors", "files": "files"}
    seconds = np.linspace(0, 60 * MINUTE_S, LOOKS)
    samples = [
        (float(at), {names[name]: float(values[k]) for name, values in figures.items()})
        for k, at in enumerate(seconds)
    ]
    return [each.name for each in soak.trends(samples) if not each.is_flat(soak.MOST_MIB)]


def test_what_is_flat_passes() -> None:
    draw = np.random.default_rng(1)
    memory = 40 + draw.normal(0, 0.5, LOOKS)
    memory[:50] -= np.linspace(10, 0, 50)  # until everything has been used once
    assert judged(memory=memory, descriptors=np.full(LOOKS, 15.0), files=np.full(LOOKS, 7.0)) == []


@pytest.mark.parametrize("hour_mib", [8.0, 50.0])
def test_memory_that_grows_or_peaks_does_not(hour_mib: float) -> None:
    draw = np.random.default_rng(2)
    noise = 40 + draw.normal(0, 0.5, LOOKS)
    assert judged(memory=noise + np.linspace(0, hour_mib, LOOKS)) == [f"server {soak.MEMORY}"]
    peak = noise.copy()
    peak[-10] += hour_mib
    assert judged(memory=peak) == [f"server {soak.MEMORY}"]


def test_one_descriptor_or_file_more_does_not() -> None:
    """From before the last quarter on; a file that is open at one look of two is no leak."""
    more = np.where(np.arange(LOOKS) < 170, 15.0, 16.0)
    assert judged(descriptors=more, files=more) == ["client descriptors", "files"]
    assert (
        judged(descriptors=15.0 + np.arange(LOOKS) % 2, files=np.where(np.arange(LOOKS) < 190, 7.0, 8.0))
        == []
    )
