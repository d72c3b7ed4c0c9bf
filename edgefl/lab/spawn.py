"""The time that clients take to start, and their memory, beside a process that imports torch for itself.

The run is an ordinary one of synchronous rounds in which all clients take part. Each notes when it was forked
and when it first trained: the first trains as soon as the last has said that it is ready. On its second trip
it reads its memory: a client that has never trained has hardly touched its pages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from edgefl.devices.fleet import ClientInfo
from edgefl.errors import RunError
from edgefl.experiment import Checkpoint, Clock, Evaluation, Experiment, Fleet, Model, Server, Stop, Training
from edgefl.host.capacity import host
from edgefl.learning.train import TrainResult
from edgefl.results import tables
from edgefl.results.tables import many
from edgefl.run import supervisor
from edgefl.run.workload import Workload
from edgefl.strategies.base import TripInputs

COUNTS = (10, 50, 100, 300, 1000)
QUICK_COUNTS = COUNTS[:4]
TIME_SCALE = 1e-4
"""Emulated time runs so fast that pacing waits for nothing."""
NEVER = 10**9
PATIENCE_S = 120.0
"""Longest silence of a client: all of them train and read their memory at once, on a few cores."""
_IMPORT = """
import time; started = time.perf_counter()
import torch
seconds = time.perf_counter() - started
torch.set_num_threads(1); torch.nn.Linear(4, 4)(torch.zeros(1, 4)).sum().backward()
print(seconds, flush=True); input()
"""


class StartWorkload(Workload):
    """The real workload, whose clients write down in the run's base folder how they started.

    When they were forked and first trained by the system's monotonic clock, and their memory, as `_memory`.
    """

    def __init__(self, experiment: Experiment, clients: Sequence[ClientInfo], base: Path) -> None:
        super().__init__(experiment, clients, base)
        self._notes = base
        self._forked_s = self._trained_s = 0.0
        os.register_at_fork(before=self._note_fork)

    def _note_fork(self) -> None:
        self._forked_s = time.monotonic()

    def train(
        self,
        client: int,
        trip: int,
        done: Callable[[float], None] | None,
        steps: int | None = None,
        given: TripInputs | None = None,
    ) -> TrainResult:
        if trip == 0:
            self._trained_s = time.monotonic()
        elif done is not None:  # of a client, not of the zygote
            note = json.dumps([self._forked_s, self._trained_s, *_memory(os.getpid())])
            (self._notes / f"{client}.json").write_text(note)
        return super().train(client, trip, done, steps, given)


def run(
    quick: bool = False,
    *,
    counts: tuple[int, ...] | None = None,
    repetitions: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure; returns plain values, for `show` and a JSON file.

    ``rows`` has one entry a number of clients: ``ready_s`` from the first fork until all are ready (median,
    with its ``spread``), ``ms_a_client``, and the medians over the clients of ``proportional_mib`` and
    ``own_mib`` (pages that nobody shares) after one trip each. ``torch`` is what one process pays that
    imports it for itself. ``say`` is told what is measured next.

    Raises `RunError` if a client ended early.
    """
    repetitions = repetitions or (2 if quick else 3)
    say("processes that import torch for themselves")
    import_s, shared, own = np.median([_import_torch() for _ in range(repetitions)], axis=0).tolist()
    rows = []
    for clients in counts or (QUICK_COUNTS if quick else COUNTS):
        say(f"{many(repetitions, 'start')} of {many(clients, 'client')}")
        turns = [started(clients) for _ in range(repetitions)]
        low, ready_s, high = np.percentile([seconds for seconds, _ in turns], [25, 50, 75]).tolist()
        proportional_mib, own_mib = np.median([each for _, found in turns for each in found], axis=0).tolist()
        rows.append(
            {
                "clients": clients,
                "ready_s": ready_s,
                "spread": (high - low) / ready_s,
                "ms_a_client": ready_s / clients * 1e3,
                "proportional_mib": proportional_mib,
                "own_mib": own_mib,
            }
        )
    return {
        "host": {**host()._asdict(), "load_1min": round(os.getloadavg()[0], 2)},
        "repetitions": repetitions,
        "torch": {"import_s": import_s, "proportional_mib": shared, "own_mib": own},
        "rows": rows,
    }


def started(clients: int) -> tuple[float, list[list[float]]]:
    """Start so many clients, let each make two trips: seconds until all were ready, and each one's memory."""
    experiment = Experiment(
        fleet=Fleet(devices={"pixel-4": clients}, network="fios", memory="off"),
        model=Model(name="mlp", args={"hidden": [64]}),
        training=Training(steps=1),
        strategy={"name": "fedavg", "cohort": clients},
        clock=Clock(kind="wall", time_scale=TIME_SCALE),
        evaluation=Evaluation(every_versions=NEVER),
        checkpoint=Checkpoint(every_s=float(NEVER)),
        server=Server(heartbeat_s=PATIENCE_S),
        stop=Stop(versions=2),
    )
    with tempfile.TemporaryDirectory(prefix="edgefl-spawn-") as name:
        base = Path(name)
        workload = f"{__name__}:{StartWorkload.__name__}"
        with supervisor.run(experiment, base / "run", True, base, workload=workload).record as record:
            if record.incidents:
                raise RunError(f"client {record.incidents[0].client}: {record.incidents[0].detail}")
        notes = [json.loads(file.read_text()) for file in base.glob("*.json")]
    forked_s, trained_s, *_ = (min(each) for each in zip(*notes, strict=True))
    return trained_s - forked_s, [memory for _, _, *memory in notes]


def _memory(pid: int) -> tuple[float, float]:
    """A process's memory, MiB: a shared page counts once over all that map it, or not at all."""
    found = psutil.Process(pid).memory_full_info()
    return found.pss / 2**20, found.uss / 2**20


def _import_torch() -> tuple[float, float, float]:
    """Seconds and memory of a process that imports torch for itself and takes one gradient."""
    with subprocess.Popen(
        [sys.executable, "-c", _IMPORT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        seconds = float(process.stdout.readline())
        memory = _memory(process.pid)
        process.communicate("\n")
    return seconds, *memory


def show(result: dict[str, Any]) -> None:
    """Print a line a number of clients."""
    heads = [">clients", ">all ready s", ">ms each", ">proportional MiB each", ">own MiB each"]
    rows = [
        f"{row['clients']} {row['ready_s']:.2f} {row['ms_a_client']:.1f} {row['proportional_mib']:.1f} "
        f"{row['own_mib']:.1f}".split()
        for row in result["rows"]
    ]
    torch, facts = result["torch"], result["host"]
    tables.show(
        tables.table(heads, rows, "Clients forked from a zygote that holds torch"),
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_1min']}; medians of "
        f"{result['repetitions']} starts, memory after one trip each. A process that imports torch for "
        f"itself takes {torch['import_s']:.2f} s and {torch['proportional_mib']:.0f} MiB "
        f"({torch['own_mib']:.0f} of its own)",
    )
