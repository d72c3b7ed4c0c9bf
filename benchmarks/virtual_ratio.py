"""Measure the share of the machine's training speed that an experiment reaches under the virtual clock.

    EDGEFL_DATA=… python benchmarks/virtual_ratio.py [--alternations 5] [--seconds 30]

The experiment is that of FedStaleWeight (Ma 2024, section 6.2). There are 15 clients: 10 clients take
U(1, 2) s per trip and hold the labels 4 to 9, and 5 clients take U(8, 12) s and hold the labels 0 to 3. A
trip is one SGD step of a CNN with GroupNorm (468,458 parameters) on 32 MNIST images. There is a version every
5 updates, and an evaluation on 2,000 test images every 500 versions.

The machine's training speed is that of a torch loop that does the same step on batches of the same data, in
one single-threaded process per core, without a server, updates or evaluation. The experiment and the loop
take turns. The loop is measured twice: with the default allocator settings of the C library, and with freed
memory kept for reuse, as in workers (`edgefl.host.process.keep_freed_memory`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import edgefl
from edgefl.host.process import child_environment, keep_freed_memory
from edgefl.processes import usable_cores
from edgefl.results.record import Record


def experiment(trips: int, workers: int) -> edgefl.Experiment:
    return edgefl.Experiment(
        name="virtual-ratio",
        seed=1,
        fleet=edgefl.Fleet(devices={"paper-fast-u1-2": 10, "paper-slow-u8-12": 5}, network="none"),
        data=edgefl.Data(
            name="mnist",
            partition="by-device",
            labels={"paper-fast-u1-2": [4, 5, 6, 7, 8, 9], "paper-slow-u8-12": [0, 1, 2, 3]},
        ),
        model=edgefl.Model(name="cnn-groupnorm"),
        training=edgefl.Training(steps=1, batch_size=32, lr=0.01),
        strategy={"name": "fedstaleweight", "buffer_size": 5},
        clock=edgefl.Clock(kind="virtual", workers=workers),
        evaluation=edgefl.Evaluation(every_versions=500, max_examples=2000),
        stop=edgefl.Stop(trips=trips),
    )


def whole(trips: int, workers: int) -> float:
    """Run the experiment; return the applied trips per second from its start to its last version."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        subprocess.run(
            [sys.executable, "-c", _RUN, str(trips), str(workers), str(run)],
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        )
        with Record(run) as record:
            arrived = int((record.trips["fate"] == "applied").sum())
            return arrived / float(record.versions["wall_s"][-1])


_RUN = """
import sys
from pathlib import Path
import edgefl
from virtual_ratio import experiment
edgefl.run(experiment(int(sys.argv[1]), int(sys.argv[2])), Path(sys.argv[3]))
"""


def bare(seconds: float, processes: int, *, keeping: bool) -> float:
    """Run the torch loops; return their total rate in steps/s. If ``keeping``, they keep freed memory."""
    command = [sys.executable, __file__, "--bare", str(seconds), "--processes", str(processes)]
    if keeping:
        command.append("--keeping")
    environment = child_environment(os.environ)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout)


def _bare(seconds: float, processes: int, keeping: bool) -> None:
    """Load the data and the model, then fork ``processes`` processes that each run a torch loop.

    Print their total rate in steps/s.
    """
    import torch

    from edgefl.learning.data import load_data
    from edgefl.learning.models import make_model

    torch.set_num_threads(1)
    wanted = experiment(1, processes)
    data = load_data(wanted.data, wanted.seed)
    inputs = torch.from_numpy(data.train_x[:])
    labels = torch.from_numpy(data.train_y)
    model = make_model(wanted.model, data.input_shape, data.classes, wanted.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=wanted.training.lr)
    model.train()

    def step() -> None:
        rows = torch.randint(len(labels), (wanted.training.batch_size,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()

    reading, writing = os.pipe()
    for number in range(processes):
        if os.fork() == 0:
            if keeping:
                keep_freed_memory()
            torch.manual_seed(number)
            for _ in range(5):
                step()
            steps, started = 0, time.perf_counter()
            while time.perf_counter() < started + seconds:
                step()
                steps += 1
            os.write(writing, f"{steps / (time.perf_counter() - started)!r}\n".encode())
            os._exit(0)
    os.close(writing)
    for _ in range(processes):
        os.wait()
    with os.fdopen(reading) as rates:
        print(sum(map(float, rates)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Trips per second under the virtual clock ÷ steps per second of a bare torch loop."
    )
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each part")
    parser.add_argument("--json", type=Path, help="write the figures into this file too")
    parser.add_argument("--bare", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--keeping", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--processes", type=int, default=usable_cores(), help="number of workers and of loops"
    )
    given = parser.parse_args()
    if given.bare is not None:
        _bare(given.bare, given.processes, given.keeping)
        return
    rows: list[tuple[float, float, float]] = []
    for number in range(given.alternations):
        limit = bare(given.seconds, given.processes, keeping=False)
        made = whole(max(50, int(limit * given.seconds)), given.processes)
        rows.append((limit, bare(given.seconds, given.processes, keeping=True), made))
        print(f"{number + 1}: {_line(*rows[-1])}", flush=True)
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    print(f"medians of {len(rows)}, {given.processes} processes: {_line(*medians)}")
    if given.json is not None:
        given.json.write_text(json.dumps({"bare_keeping_whole_per_s": rows}, indent=1) + "\n")


def _line(limit: float, keeping: float, made: float) -> str:
    return (
        f"bare {limit:.1f}/s, keeping memory {keeping:.1f}/s, whole {made:.1f}/s: "
        f"{made / limit:.3f} and {made / keeping:.3f}"
    )


if __name__ == "__main__":
    main()
