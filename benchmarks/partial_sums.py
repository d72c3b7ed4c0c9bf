"""Bytes between hosts, and the kernel's time, with and without sums near the clients (docs/hosts.md).

`python -m benchmarks.partial_sums` has 100 phones (``--phones``) on two nodes of this host, which join by
`edgefl join`, in synchronous rounds of all of them; the model has some 250,000 parameters (``--hidden``).
Bytes are those that the server's door counts, frame by frame, and beside it what the kernel counted on the
loopback interface, with all headers, encryption and whatever else used it. Kernel time is the summary's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import edgefl
from edgefl import Clock, Data, Evaluation, Experiment, Fleet, Model, Server, Stop, Training
from edgefl.results.result import Result
from edgefl.run import supervisor
from edgefl.run.nodes import opened

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
        "kB/version": sum(found["network"].values()) / versions / 1e3,
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
    parser.add_argument("--alone", action="store_true", help="on one host too, for the bits and the kernel")
    given = parser.parse_args()
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


def show(what: str, found: dict[str, Any]) -> None:
    numbers = (
        f"{name} {value if isinstance(value, str) else format(value, '.4g')}" for name, value in found.items()
    )
    print(f"{what}: {', '.join(numbers)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
