"""Vectors sent with the model or kept by clients: bit-identical runs; a trip changes vectors exactly once."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgefl
from edgefl import Checkpoint, Fleet, Server, Stop, Training
from edgefl.lab.verify import verify
from edgefl.parameters import checkpoint
from edgefl.results.record import Record
from edgefl.run import supervisor
from tests.process.disturbed import check_every_kill_was_certain, killed
from tests.process.runs import experiment, virtual

pytestmark = pytest.mark.timeout(300)
OWN = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from edgefl.strategies.fedbuff import FedBuff


@dataclass(frozen=True, kw_only=True)
class Counting(FedBuff):
    vectors: ClassVar = ("sum",)
    client_vectors: ClassVar = ("first", "trips")

    def train(self, model, examples, context):
        parameters = list(model.parameters())
        for x, y in examples.batches():
            loss = torch.nn.functional.cross_entropy(model(x), y)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
                    parameter -= 0.1 * gradient
            context.step(len(y), loss)
        context.kept["trips"] += 1.0
        context.kept["first"] += context.start * (context.trip == 0)
        context.send["sum"] += 1.0 + 0.5 * context.vectors["sum"]
        context.log(trips=context.kept["trips"][0])
"""
SCAFFOLD = {"name": "scaffold", "cohort": 3, "over_selection": 1.4}
COUNTING = {"name": "counting:Counting", "buffer_size": 3}


def made(wanted: edgefl.Experiment, folder: Path, points: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the outcome of a run whose server was killed at each of these points and resumed."""
    (folder.parent / "counting.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        assert killed(wanted, folder, points, patch) == len(points), "the run ended before the last kill"
    check_every_kill_was_certain(folder, points)
    return outcome(folder)


def outcome(folder: Path) -> dict[str, Any]:
    last = checkpoint.latest(folder / "checkpoints")
    with Record(folder) as record:
        columns = ("task", "client", "fate", "weight", "loss", "checksum_sent", "checksum_seen", "metrics")
        rows = zip(*(record.trips[name].tolist() for name in columns), strict=True)
        return {
            "sha256": record.meta.model_sha256,
            "trips": [str(row) for row in rows if row[columns.index("fate")]],
            "kept": {client: kept.tobytes() for client, kept in sorted(last.kept.items())},
            "vectors": [vector.tobytes() for vector in last.vectors],
        }


@pytest.mark.parametrize(
    ("strategy", "update_format"),
    [
        pytest.param(SCAFFOLD, "float32", id="scaffold", marks=pytest.mark.slow),
        pytest.param({**SCAFFOLD, "name": "feddyn"}, "int8", id="feddyn, int8"),
        pytest.param(COUNTING, "int8", id="own training, int8", marks=pytest.mark.slow),
    ],
)
def test_same_bits_for_any_number_of_workers_and_on_the_wire(
    strategy: dict[str, Any], update_format: Any, tmp_path: Path
) -> None:
    found = []
    for workers, transport in ((1, "shm"), (8, "wire")):
        server = Server(transport=transport, update_format=update_format)
        wanted = virtual(workers, strategy=strategy, server=server, stop=Stop(versions=12))
        found.append(made(wanted, tmp_path / f"{workers}"))
    verify(tmp_path / "8", code=tmp_path)
    assert found[0] == found[1]
    assert found[0]["kept"]
    assert all(np.isfinite(np.frombuffer(kept, np.float32)).all() for kept in found[0]["kept"].values())


@pytest.mark.parametrize(
    ("strategy", "update_format", "kills"),
    [
        pytest.param(SCAFFOLD, "float32", 5, id="scaffold"),
        pytest.param(COUNTING, "int8", 10, id="own training, int8", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_and_resumed_has_the_bits_of_an_undisturbed_one(
    strategy: dict[str, Any], update_format: Any, kills: int, tmp_path: Path
) -> None:
    draw = random.Random(f"{strategy['name']} {update_format}")
    points = tuple(f"event:0:{draw.randrange(5, 20)}" for _ in range(kills))
    wanted = virtual(
        2,
        fleet=Fleet(devices={"pixel-4": 4, "moto-g4": 2}, network="lte", join_spread_s=1.0),
        strategy=strategy,
        server=Server(update_format=update_format),
        checkpoint=Checkpoint(every_s=1e-6),
        stop=Stop(versions=5 * kills),
    )
    assert made(wanted, tmp_path / "killed", points) == made(wanted, tmp_path / "whole")


def test_each_trip_that_the_server_accepted_changes_the_vectors_of_its_client_once(tmp_path: Path) -> None:
    wanted = virtual(2, strategy={**COUNTING, "max_staleness": 1}, stop=Stop(versions=20))
    made(wanted, tmp_path / "run")
    with Record(tmp_path / "run") as record:
        fates, clients = record.trips["fate"].tolist(), record.trips["client"].tolist()
        counted, arrived = record.metrics["trips"], record.trips["arrived_s"]
    taken = dict.fromkeys(range(6), 0)
    for place in np.argsort(arrived):
        client, fate, count = clients[place], fates[place], counted[place]
        if np.isfinite(count):
            assert count == taken[client] + 1
            taken[client] += fate == "applied" or fate == ""
    assert "discarded" in fates


def test_a_run_under_the_wall_clock_is_verified_with_its_vectors(tmp_path: Path) -> None:
    for strategy in (SCAFFOLD, COUNTING):
        folder = tmp_path / strategy["name"].partition(":")[0]
        wanted = experiment(strategy=strategy, training=Training(steps=2), stop=Stop(versions=6))
        assert made(wanted, folder)["kept"]
        assert verify(folder, code=tmp_path).versions == 6


FORKS = """
import os
import time

def train(model, examples, context):
    for x, y in examples.batches():
        context.step(len(y))
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(1e6)
        time.sleep(1e6)
"""


def test_forks_of_a_training_function_end_with_the_run(tmp_path: Path) -> None:
    """The fixture `nothing_left` fails the test if a process still runs."""
    (tmp_path / "forks.py").write_text(FORKS)
    wanted = experiment(training=Training(function="forks:train", steps=1), stop=Stop(versions=2))
    result = supervisor.run(wanted, tmp_path / "run", quiet=True, base=tmp_path)
    assert result.summary()["versions"] == 2


FORKED_WHILE_KILLED = """
import os
import signal
import time
from edgefl.host.process import kill_forks_with_parent

kill_forks_with_parent()
for kill in range(200):
    if (pid := os.fork()) == 0:
        os.fork()
        time.sleep(1e6)
    time.sleep(kill % 40 * 2e-5)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def test_a_fork_at_the_moment_of_its_parent_s_death_is_killed_too() -> None:
    """The fixture `nothing_left` fails the test if a process still runs. Mutant: a fork does not check
    whether its parent is alive."""
    subprocess.run([sys.executable, "-c", FORKED_WHILE_KILLED], check=True)
