"""Tests that a run whose clients come, go and die does not grow in memory, descriptors or processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import soak
from edgefl import Fleet, Stop
from edgefl.experiment import Checkpoint, Churn
from edgefl.lab import outcome
from tests.process.runs import DEVICES, Command, experiment, incidents

MAX_MIB = 16.0
"""Maximum growth in MiB. `python -m benchmarks.soak` runs for an hour and allows less growth, since its
warm-up is longer."""
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc"),
    pytest.mark.timeout(300),
]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.0, 60.0])
def test_a_run_with_churn_does_not_grow(seconds: float, tmp_path: Path) -> None:
    churn = Churn(mean_online_s=2.0, mean_offline_s=0.5, die_per_trip=0.05)
    wanted = experiment(
        fleet=Fleet(devices=DEVICES, network="fios", churn=churn, join_spread_s=0.5),
        checkpoint=Checkpoint(every_s=0.2),
        stop=Stop(versions=10**6),
    )
    file, samples = Command.write(wanted, tmp_path / "run"), tmp_path / "samples.jsonl"
    made = soak.soak(file, [], tmp_path / "run", seconds, seconds / 20, samples)
    assert soak.report(made, MAX_MIB) == 0
    assert samples.read_text().count("\n") == len(made)
    assert outcome.counts(tmp_path / "run")[0] > 0
    if seconds >= 60:
        assert len(incidents(tmp_path / "run", "death")) > 10
