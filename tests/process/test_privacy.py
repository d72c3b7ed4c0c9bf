"""Tests of private runs: limits on participation, and the secret key of a resumed run."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl import ConfigError, Server, Stop
from edgefl.experiment import Churn
from edgefl.lab.verify import verify
from edgefl.privacy.source import KEY_FILE
from edgefl.results.record import Record

from .disturbed import left, made_in, plan
from .runs import Command, experiment, virtual

pytestmark = pytest.mark.timeout(300)
LIMITS = {"max_participations": 5, "min_separation": 2}
PRIVATE = {
    "clip_norm": 0.5,
    "noise_multiplier": 2.0,
    "quantile": 0.5,
    "honaker": True,
    "restart_every": 4,
    **LIMITS,
}
FEDBUFF = {"name": "fedbuff", "buffer_size": 2}


def check_limits(folder: Path, clients: int) -> None:
    """Assert that the run kept its limits and recorded ε for each version."""
    with Record(folder) as record:
        owner = dict(zip(record.trips["task"].tolist(), record.trips["client"].tolist(), strict=True))
        versions = [[owner[task] for task in tasks.tolist()] for _, tasks, _ in record.sums()]
    taken = [client for cohort in versions for client in cohort]
    counts = [taken.count(client) for client in range(clients)]
    assert max(counts) == 5
    for before, after in pairwise(versions):
        assert not set(before) & set(after)
    result = edgefl.Result(folder)
    figures = result.summary()["privacy"]
    assert figures["participations"] == {"max": 5, "limit": 5}
    assert result.summary()["stop_reason"] == "participations"
    table = result.versions()
    assert (np.diff(table["epsilon"]) >= 0).all()
    assert table["epsilon"][0] > 0
    assert figures["epsilon"] == pytest.approx(float(table["epsilon"][-1]))
    assert result.evaluations()["epsilon"][0] == 0


def test_a_resumed_private_run_keeps_its_counts_and_its_key(tmp_path: Path) -> None:
    plan(tmp_path, {26: "interrupt"})
    folder, key = tmp_path / "run", tmp_path / "key"
    wanted = virtual(1, model=made_in(tmp_path), strategy=FEDBUFF, privacy=PRIVATE, stop=Stop(versions=99))
    Command.run(wanted, folder).ends(130)
    assert left(tmp_path) == []
    made = verify(folder, code=tmp_path).versions
    assert made >= 2
    shutil.copy(folder / KEY_FILE, key)
    Command("resume", str(folder)).ends(0)
    check_limits(folder, clients=6)
    assert edgefl.Result(folder).summary()["privacy"]["private"]
    assert not (folder / KEY_FILE).exists()
    with pytest.raises(ConfigError, match=f"the secret noise key {KEY_FILE} is missing"):
        verify(folder, code=tmp_path)
    shutil.copy(key, folder / KEY_FILE)  # with the key, the whole run is reproduced bit by bit
    assert verify(folder, code=tmp_path).versions > made


@pytest.mark.slow
def test_limits_hold_under_the_wall_clock(tmp_path: Path) -> None:
    wanted = experiment(
        strategy=FEDBUFF, privacy=PRIVATE, stop=Stop(versions=99), server=Server(heartbeat_s=30)
    )
    edgefl.run(wanted, tmp_path / "run")
    check_limits(tmp_path / "run", clients=6)


def test_clients_that_must_wait_for_a_version_count_as_left(tmp_path: Path) -> None:
    """Once a phone has died, the others must wait for a version that they alone cannot make."""
    fleet = edgefl.Fleet(devices={"pixel-4": 6}, churn=Churn(die_per_trip=0.2), on_death="drop")
    rules = {"clip_norm": 0.5, "noise_multiplier": 1.0, "min_separation": 2}
    strategy = {"name": "fedbuff", "buffer_size": 3}
    wanted = virtual(1, fleet=fleet, privacy=rules, strategy=strategy, stop=Stop(versions=99))
    summary = edgefl.run(wanted, tmp_path / "run").summary()
    left = 6 - summary["trips"]["lost"]
    assert left > 0
    assert summary["stop_reason"] == f"too few clients are left: {left} of 6"
