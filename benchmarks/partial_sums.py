"""Bytes between hosts, and the kernel's time, with and without sums near the clients (docs/hosts.md).

`python -m benchmarks.partial_sums` has 100 phones (``--phones``) on two nodes of this host, which join by
`edgefl join`, in synchronous rounds of all of them; the model has some 250,000 parameters (``--hidden``).
Bytes are those that the server's door counts, frame by frame, and beside it what the kernel counted on the
loopback interface, with all headers, encryption and whatever else used it. Kernel time is the summary's, wall
time, in which other work on the host takes part. ``--kernel`` measures it alone, in one thread's CPU time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import edgefl
from edgefl import Clock, Data, Evaluation, Experiment, Fleet, Model, Server, Stop, Training, kernels
from edgefl.core.events import Sum
from edgefl.kernels.steps import ServerOptimizer
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.results.result import Result
from edgefl.run import supervisor
from edgefl.run.adder import partial_sum
from edgefl.run.nodes import opened
from edgefl.run.slots import Aggregator, PartialSum

LOOPBACK = Path("/sys/class/net/lo/statistics/rx_bytes")


def experiment(given: argparse.Namespace, *, sums: bool) -> Experiment:
    return Experiment(
        fleet=Fleet(devices={given.device: given.phones}, network="fios"),
        data=Data(name="digits"),
        model=Model(args={"hidden": [given.hidden]}),
        training=Training(steps=1),
        strategy={"name": "fedavg", "cohort": given.phones},
        clock=Clock(kind=given.clock),
        server=Server(partial_sums=sums, heartbeat_s=60.0),
        evaluation=Evaluation(every_versions=given.versions),
        stop=Stop(versions=given.versions),
    )


def on_nodes(wanted: Experiment, folder: Path) -> Result:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with opened("tcp://127.0.0.1:*", None, 2) as nodes:
        command = [sys.executable, "-m", "edgefl", "join", nodes.address, "--workers", "1"]
        joined = [subprocess.Popen(command, env=environment, cwd=folder.parent) for _ in range(2)]
        try:
            return supervisor.run(wanted, folder, quiet=True, base=folder.parent, nodes=nodes)
        finally:
            nodes.close()
            for node in joined:
                node.wait()


def loopback_bytes() -> int:
    return int(LOOPBACK.read_text()) if LOOPBACK.exists() else 0


def figures(result: Result) -> dict[str, Any]:
    found = result.summary()
    versions, done = found["versions"], found["aggregation"]
    return {
        "model": found["model_sha256"][:12],
        "kB/version": sum(found["network"].get(f"{way}_a_version", 0) for way in ("in", "out")) / 1e3,
        "ms/version": done["seconds"] / versions * 1e3,
        "node ms/version": done["node_seconds"] / versions * 1e3,
        "wall s": found["wall_s"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phones", type=int, default=100)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=3333, help="75 times as many parameters")
    parser.add_argument("--device", default="pi-zero-2w")
    parser.add_argument("--clock", choices=("wall", "virtual"), default="wall")
    parser.add_argument("--kernel", action="store_true", help="measure the sums alone")
    parser.add_argument("--alone", action="store_true", help="on one host too, for the bits and the kernel")
    given = parser.parse_args()
    if given.kernel:
        measure_kernel(75 * given.hidden, given.phones)
        return 0
    with tempfile.TemporaryDirectory() as where:
        for sums in (False, True):
            kind = "partial sums" if sums else "float32 sum"
            wanted = experiment(given, sums=sums)
            if given.alone:
                show(f"one host, {kind}", figures(edgefl.run(wanted, Path(where) / f"alone-{sums}")))
            before = loopback_bytes()
            found = figures(on_nodes(wanted, Path(where) / f"nodes-{sums}"))
            found["lo kB/version"] = (loopback_bytes() - before) / given.versions / 1e3
            show(f"two nodes, {kind}", found)
    return 0


def measure_kernel(size: int, phones: int) -> None:
    """Print the least CPU time of a version's sums: on one host, on one of two nodes, and at their server."""
    kernels.set_threads(1)
    buffer, weights = ParameterBuffer.create(Shape(size, 3, phones)), (1.0 / phones,) * phones
    buffer.publish(version=0, entry=0)
    aggregator, draws = Aggregator(buffer, ServerOptimizer()), np.random.default_rng(1)
    for task in range(phones):
        slot = aggregator.lease(task=task, client=task, version=0).slot
        buffer.slot(slot)[:] = draws.normal(size=size)
        buffer.fetched[slot] = 1
        buffer.written(slot, task=task, checksum=kernels.checksum(buffer.slot(slot)))
    parts = []
    for tasks in (range(phones // 2), range(phones // 2, phones)):
        slots = [aggregator.leases[task].slot for task in tasks]
        numbers = np.array([tasks, slots], np.int64).tobytes() + np.array(weights[: len(tasks)]).tobytes()
        wanted = partial(partial_sum, buffer, numbers, None)
        made = wanted().view(np.float64)
        norms, checksums = made[size : size + len(tasks)], made[size + len(tasks) :].view(np.uint64)
        parts.append(PartialSum(tasks, made[:size], norms, checksums, 0.0))
    versions = count(1)

    def step(exact: bool, parts: Sequence[PartialSum] = ()) -> None:
        aggregator.exact, entry = exact, aggregator.free_entry()
        assert entry is not None
        assert not aggregator.sum(Sum(next(versions), tuple(range(phones)), weights), entry, parts).bad

    show("CPU ms of a version", {
        "one host, float32 sum": least_ms(partial(step, False)),
        "one host, exact sum": least_ms(partial(step, True)),
        "one of two nodes": least_ms(wanted),
        "the server of two nodes": least_ms(partial(step, True, parts)),
    })  # fmt: skip
    buffer.close()


def least_ms(function: Callable[[], object]) -> float:
    """The least of twenty turns."""
    spent = []
    for _ in range(20):
        began_ns = time.thread_time_ns()
        function()
        spent.append((time.thread_time_ns() - began_ns) / 1e6)
    return min(spent)


def show(what: str, found: dict[str, Any]) -> None:
    numbers = (
        f"{name} {value if isinstance(value, str) else format(value, '.4g')}" for name, value in found.items()
    )
    print(f"{what}: {', '.join(numbers)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
