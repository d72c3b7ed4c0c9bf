"""Measures the start-up time and memory of clients, compared with a process that imports torch on its own.

The run consists of synchronous rounds in which all clients take part. Each client records when it was forked
and when it first trained. The earliest training begins as soon as the last client is ready. The memory of a
client is read on its second trip, because a client that has never trained has touched few of its pages.
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
from edgefl.experiment import Clock, Experiment, Fleet, Model, Server, Stop, Training
from edgefl.lab import bench
from edgefl.lab.bench import Say
from edgefl.learning.train import TrainResult
from edgefl.results import tables
from edgefl.results.tables import many
from edgefl.run.workload import Workload
from edgefl.strategies.base import TripInputs

COUNTS = (10, 50, 100, 300, 1000)
QUICK_COUNTS = COUNTS[:4]
TIME_SCALE = 1e-4
"""Wall seconds per emulated second; small, so that clients never wait for emulated time."""
PATIENCE_S = 120.0
"""Maximum number of seconds between two heartbeats of a client.

The limit is high because all clients train and read their memory at the same time on a few cores.
"""
_IMPORT = """
import time; started = time.perf_counter()
import torch
seconds = time.perf_counter() - started
torch.set_num_threads(1); torch.nn.Linear(4, 4)(torch.zeros(1, 4)).sum().backward()
print(seconds, flush=True); input()
"""


class StartWorkload(Workload):
    """The real workload, except that each client also writes a file into the base folder of the run.

    The file contains the times of the client's fork and first training on the monotonic clock, and the
    client's memory (`_memory`).
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
        elif done is not None:  # None in the zygote, the process that forks the clients
            note = json.dumps([self._forked_s, self._trained_s, *_memory(os.getpid())])
            (self._notes / f"{client}.json").write_text(note)
        return super().train(client, trip, done, steps, given)


def run(
    quick: bool = False,
    *,
    counts: tuple[int, ...] | None = None,
    repetitions: int | None = None,
    say: Say = bench.silent,
) -> dict[str, Any]:
    """Measure all fleet sizes; return plain values for `show` and a JSON file.

    ``rows`` contains an entry for each number of clients: ``ready_s``, the median time from the first fork
    until all clients are ready, with its ``spread``; ``ms_a_client``; and the medians over clients of
    ``proportional_mib`` and ``own_mib`` (unshared pages) after one trip of each client. ``torch`` contains
    the import time and the memory of a process that imports torch by itself. Raises `RunError` if a run had
    an incident, such as a client that ended early.
    """
    repetitions = repetitions or (2 if quick else 3)
    here = bench.machine()  # before the measurement, which itself causes load
    say("processes that import torch by themselves")
    import_s, shared, own = np.median([_import_torch() for _ in range(repetitions)], axis=0).tolist()
    rows = []
    for clients in counts or (QUICK_COUNTS if quick else COUNTS):
        say(f"{many(repetitions, 'start')} of {many(clients, 'client')}")
        turns = [started(clients) for _ in range(repetitions)]
        ready_s, spread = bench.median_and_spread([seconds for seconds, _ in turns])
        proportional_mib, own_mib = np.median([each for _, found in turns for each in found], axis=0).tolist()
        rows.append(
            {
                "clients": clients,
                "ready_s": ready_s,
                "spread": spread,
                "ms_a_client": ready_s / clients * 1e3,
                "proportional_mib": proportional_mib,
                "own_mib": own_mib,
            }
        )
    return {
        "host": here,
        "repetitions": repetitions,
        "torch": {"import_s": import_s, "proportional_mib": shared, "own_mib": own},
        "rows": rows,
    }


def started(clients: int) -> tuple[float, list[list[float]]]:
    """Start clients that make two trips each.

    Return the time in seconds until all clients were ready, and the memory of each client.
    """
    experiment = bench.settings(
        fleet=Fleet(devices={"pixel-4": clients}, network="fios", memory="off"),
        model=Model(name="mlp", args={"hidden": [64]}),
        training=Training(steps=1),
        strategy={"name": "fedavg", "cohort": clients},
        clock=Clock(kind="wall", time_scale=TIME_SCALE),
        server=Server(heartbeat_s=PATIENCE_S),
        stop=Stop(versions=2),
    )
    with tempfile.TemporaryDirectory(prefix="edgefl-spawn-") as name:
        base = Path(name)
        with bench.run_record(experiment, f"{__name__}:StartWorkload", base / "run") as record:
            if record.incidents:
                raise RunError(f"client {record.incidents[0].client}: {record.incidents[0].detail}")
        notes = [json.loads(file.read_text()) for file in base.glob("*.json")]
    forked_s, trained_s, *_ = (min(each) for each in zip(*notes, strict=True))
    return trained_s - forked_s, [memory for _, _, *memory in notes]


def _memory(pid: int) -> tuple[float, float]:
    """Return the proportional memory and the unshared memory of a process, both in MiB."""
    found = psutil.Process(pid).memory_full_info()
    return found.pss / 2**20, found.uss / 2**20


def _import_torch() -> tuple[float, float, float]:
    """Start a process that imports torch by itself and computes one gradient.

    Return its import time in seconds, and its proportional and unshared memory in MiB.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _IMPORT],
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
    heads = [">clients", ">all ready s", ">ms each", ">proportional MiB each", ">own MiB each"]
    rows = [
        f"{row['clients']} {row['ready_s']:.2f} {row['ms_a_client']:.1f} {row['proportional_mib']:.1f} "
        f"{row['own_mib']:.1f}".split()
        for row in result["rows"]
    ]
    torch, facts = result["torch"], result["host"]
    tables.show(
        tables.table(heads, rows, "Clients forked from a zygote that holds torch"),
        f"{bench.machine_line(facts)}; medians of {result['repetitions']} starts, memory after one trip "
        f"each. A process that imports torch by itself takes {torch['import_s']:.2f} s and "
        f"{torch['proportional_mib']:.0f} MiB ({torch['own_mib']:.0f} of its own)",
    )
