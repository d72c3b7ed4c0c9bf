"""The program for edgefl: a whole run of FedAvg or FedStaleWeight under the virtual clock, with a record."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import edgefl
from edgefl.lab.bench import NEVER
from edgefl.results.record import Record

from . import task as shared

POLL_S = 0.5
"""Seconds between two checks of the run's record."""


def main(folder: str) -> None:
    task, _ = shared.read(folder)
    print(json.dumps({"version": metadata.version("edgefl")}), flush=True)
    strategy = (
        {"name": "fedstaleweight", "buffer_size": task.cohort}
        if task.asynchronous
        else {"name": "fedavg", "cohort": task.cohort}
    )
    fast = task.clients * 2 // 3
    experiment = edgefl.Experiment(
        fleet=edgefl.Fleet(
            devices={"paper-fast-u1-2": fast, "paper-slow-u8-12": task.clients - fast},
            network="none",
            memory="off",
        ),
        data=edgefl.Data(name=task.data, partition="iid"),
        model=edgefl.Model(args={"net": task.net}),
        training=edgefl.Training(
            steps=task.steps, epochs=None if task.steps else 1, batch_size=task.batch_size, lr=task.lr
        ),
        strategy=strategy,
        clock=edgefl.Clock(kind="virtual", workers=task.processes),
        # Version 0 is always evaluated; with all test images, this would take longer than the measurement.
        evaluation=edgefl.Evaluation(every_versions=NEVER, max_examples=10),
        checkpoint=edgefl.Checkpoint(every_s=float(NEVER)),
        stop=edgefl.Stop(versions=NEVER),
    )
    with tempfile.TemporaryDirectory(prefix="edgefl-peers-") as name:
        run = Path(name) / "run"
        threading.Thread(target=_interrupt, args=(run, task.seconds), daemon=True).start()
        with suppress(KeyboardInterrupt):
            edgefl.run(experiment, run, model=shared.make)
        with Record(run) as record:
            # The last checkpoint is written when the run's clock stops, so the start is its file's
            # modification time minus the duration of the run.
            stopped = max(path.stat().st_mtime for path in (record.folder / "checkpoints").iterdir())
            began_s = stopped - record.meta.wall_s - (time.time() - time.monotonic())
            walls = record.versions["wall_s"]
    for number, wall_s in enumerate(walls.tolist(), 1):
        print(json.dumps({"trips": number * task.cohort, "at_s": began_s + wall_s}), flush=True)


def _interrupt(run: Path, seconds: float) -> None:
    """Interrupt the run, as Ctrl-C does, as soon as the record contains enough models."""
    walls: list[float] = []
    while len(walls) < shared.MIN_ROUNDS or walls[-1] < walls[0] + seconds:
        time.sleep(POLL_S)
        if (run / "record.sqlite").exists():
            with suppress(Exception), Record(run) as record:  # the record may not have its tables yet
                walls = record.versions["wall_s"].tolist()
    os.kill(os.getpid(), signal.SIGINT)
