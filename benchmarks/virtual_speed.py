"""Measure the overhead of edgefl for each stage of a trip under the virtual clock.

The run is complete (server, workers, evaluator, messages, parameter buffer, record), except that training is
replaced by `IdleWorkload`, which changes one number. So the remaining time is edgefl's overhead.

    python benchmarks/virtual_speed.py [--trips 50000] [--parameters 1000] [--workers 2] [--clients 200]

With `--registered`, the size of the fleet varies. The benchmark prints one line for each number of registered
phones, of which `CONCURRENCY` train at the same time. With `--train`, each phone trains a model on its own
examples (`load`, `split`).

    python benchmarks/virtual_speed.py --registered 1000 100000 1000000 [--train] [--trips 50000]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from edgefl.experiment import (
    Checkpoint,
    Clock,
    Data,
    Evaluation,
    Experiment,
    Fleet,
    Model,
    Server,
    Stop,
    Training,
)
from edgefl.lab import workloads
from edgefl.processes import usable_cores
from edgefl.results.record import Record
from edgefl.run import supervisor

FLEETS = {
    "drawn": (["paper-fast-u1-2", "paper-slow-u8-12"], "none"),
    "phones": (["pixel-4", "moto-g4"], "lte"),
}
"""Two fleets, each with its profiles and its network. Trip times are drawn from distributions (``drawn``), or
are those of real phones on a network without jitter or losses (``phones``)."""
NEVER = 10**9
CONCURRENCY = 200
"""Number of phones of a large fleet that train at the same time."""
EXAMPLES, HELD = 100_000, 8
"""Total number of examples, and number of examples per phone. The phones of large fleets share examples."""


def experiment(fleet: str, clients: int, parameters: int, trips: int, workers: int) -> Experiment:
    profiles, network = FLEETS[fleet]
    half = clients // 2
    return Experiment(
        seed=1,
        fleet=Fleet(devices={profiles[0]: clients - half, profiles[1]: half}, network=network, memory="off"),
        model=Model(name="idle", args={"parameters": parameters}),
        strategy={"name": "fedstaleweight", "buffer_size": 10, "restart": "immediate"},
        clock=Clock(kind="virtual", workers=workers),
        server=Server(heartbeat_s=60.0),
        evaluation=Evaluation(every_versions=500),
        checkpoint=Checkpoint(every_s=float(NEVER)),
        stop=Stop(trips=trips),
    )


def measured(fleet: str, given: argparse.Namespace) -> dict[str, float]:
    """Run a fleet; return the trips per second, and the server's time per trip in each stage, in µs."""
    wanted = experiment(fleet, given.clients, given.parameters, given.trips, given.workers)
    with tempfile.TemporaryDirectory() as folder:
        record = supervisor.run(wanted, Path(folder) / "run", quiet=True, workload=workloads.IDLE).record
        trips, wall_s = int((record.trips["fate"] == "applied").sum()), record.meta.wall_s
        stages = {row.stage: row.seconds / trips * 1e6 for row in record.costs if row.stage != "start"}
        record.close()
    return {"trips_per_s": trips / wall_s, **stages}


def load(spec: Data, seed: int) -> tuple[Any, ...]:
    """Return training and test examples of two classes that a hyperplane separates; 500 are in both sets."""
    x = np.random.default_rng(seed).standard_normal((EXAMPLES, 8), dtype=np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return x, y, x[:500], y[:500]


def split(labels: Any, profiles: Sequence[str], rng: np.random.Generator) -> list[Any]:
    """Assign `HELD` consecutive examples to each phone. Several phones may hold the same example."""
    starts = rng.integers(len(labels) - HELD, size=len(profiles))
    return list(starts[:, None] + np.arange(HELD))


def registered(clients: int, given: argparse.Namespace) -> Experiment:
    """Return an experiment with ``clients`` phones, of which `CONCURRENCY` train at the same time."""
    here = Path(__file__).stem
    return Experiment(
        seed=1,
        fleet=Fleet(devices={"pixel-4": clients - clients // 2, "moto-g4": clients // 2}, network="lte"),
        data=Data(name=f"{here}:load", partition=f"{here}:split"),
        model=Model(args={"hidden": [16]}) if given.train else Model(name="idle", args={"parameters": 1000}),
        training=Training(steps=1, batch_size=HELD),
        strategy={"name": given.strategy, given.at_a_time: CONCURRENCY},
        clock=Clock(kind="virtual", workers=given.workers),
        server=Server(heartbeat_s=60.0),
        evaluation=Evaluation(every_versions=500),
        checkpoint=Checkpoint(every_s=float(NEVER)),
        stop=Stop(trips=given.trips),
    )


def look_at(process: psutil.Process) -> tuple[float, float, float]:
    """Return the current time in s, the total PSS of a process and its descendants in MiB, and the server's
    CPU time in s."""
    mib = cpu_s = 0.0
    for each in [process, *process.children(recursive=True)]:
        try:
            mib += each.memory_full_info().pss / 2**20
            if each.name() == "edgefl-server":
                cpu_s = sum(each.cpu_times()[:2])
        except psutil.Error:  # the process has just ended
            continue
    return time.time(), mib, cpu_s


def of_fleet(clients: int, given: argparse.Namespace) -> dict[str, float]:
    """Run a fleet of ``clients`` registered phones in a separate process, and return its measurements."""
    with tempfile.TemporaryDirectory() as folder:
        run, looks, started = Path(folder) / "run", [(0.0, 0.0, 0.0)], time.time()
        command = [sys.executable, __file__, *sys.argv[1:], "--one", str(clients), str(run)]
        with subprocess.Popen(command) as process:
            family = psutil.Process(process.pid)
            while process.poll() is None:
                looks.append(look_at(family))
                time.sleep(0.2)
            ended = time.time()
        if process.returncode:
            raise SystemExit(f"the run with {clients} phones failed")
        with Record(run) as record:
            return {
                "registered": clients,
                "pss_mib": max(mib for _, mib, _ in looks),
                **_seconds(record, started, ended, [(at_s, cpu_s) for at_s, _, cpu_s in looks if cpu_s]),
                **_sizes(record, clients),
                **{
                    f"{path.name}_mib": path.stat().st_size / 2**20
                    for path in run.iterdir()
                    if path.is_file()
                },
            }


def _seconds(
    record: Record, started: float, ended: float, server: list[tuple[float, float]]
) -> dict[str, float]:
    """Return the trips per second after the first version, the server's CPU time per trip in µs, and how many
    seconds the start and the end of the run take.

    At the first version, all phones have joined. ``server`` is a list of (time, CPU time of the server so
    far) in seconds. The CPU time per trip is accurate even on a busy host.
    """
    at_s, wall_s = record.versions["at_s"], record.versions["wall_s"]
    arrived = int((record.trips["arrived_s"] > at_s[0]).sum())
    # The time at which the last checkpoint was written is the time at which the run's clock stopped.
    stopped = max(path.stat().st_mtime for path in (record.folder / "checkpoints").iterdir())
    first = stopped - record.meta.wall_s + float(wall_s[0])
    spent_s = server[-1][1] - float(np.interp(first, *zip(*server, strict=True)))
    return {
        "server_cpu_us": spent_s / arrived * 1e6,
        "start_s": first - started,
        "trips_per_s": arrived / float(wall_s[-1] - wall_s[0]),
        "end_s": ended - stopped,
    }


def _sizes(record: Record, clients: int) -> dict[str, float]:
    """Return the size of the record in bytes per trip (including its events and sums), the part of it that is
    events, and the size per phone (including its join event)."""
    pages = dict(record.select("SELECT name, SUM(pgsize) FROM dbstat GROUP BY name"))
    ((joins,),) = record.select(
        "SELECT TOTAL(LENGTH(event)) FROM journal WHERE instr(event, ?)", (b"\xa6joined",)
    )
    ((events,),) = record.select("SELECT TOTAL(LENGTH(event)) FROM journal")
    of_joins = pages["journal"] * joins / events
    trips = len(record.trips["task"])
    of_trips = pages["journal"] - of_joins + pages["trips"] + pages["sums"] + pages["versions"]
    return {
        "record_bytes_a_trip": of_trips / trips,
        "journal_bytes_a_trip": (pages["journal"] - of_joins) / trips,
        "record_bytes_a_phone": (pages["clients"] + of_joins) / clients,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of a trip under the virtual clock.")
    parser.add_argument("--trips", type=int, default=50_000)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures into this file too")
    parser.add_argument(
        "--registered", type=int, nargs="+", metavar="N", help="measure large fleets of these sizes"
    )
    parser.add_argument("--train", action="store_true", help="phones of large fleets really train")
    parser.add_argument("--strategy", default="fedbuff", help="for large fleets; default %(default)s")
    parser.add_argument("--at-a-time", default="concurrency", help="its field that sets CONCURRENCY")
    parser.add_argument("--one", nargs=2, metavar=("N", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        wanted, workload = registered(int(given.one[0]), given), None if given.train else workloads.IDLE
        supervisor.run(wanted, Path(given.one[1]), quiet=True, base=Path(__file__).parent, workload=workload)
        return
    if given.registered is not None:
        _fleets(given)
        return
    found = {}
    for fleet in FLEETS:
        rows = sorted(
            (measured(fleet, given) for _ in range(given.repetitions)), key=lambda row: row["trips_per_s"]
        )
        row = found[fleet] = rows[len(rows) // 2]
        stages = ", ".join(f"{name} {us:.0f}" for name, us in row.items() if name != "trips_per_s")
        print(
            f"{fleet}: {row['trips_per_s']:,.0f} trips/s (median of {len(rows)}); µs per trip: {stages}",
            flush=True,
        )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def _fleets(given: argparse.Namespace) -> None:
    rows: list[dict[str, float]] = []
    for clients in given.registered:
        row = of_fleet(clients, given)
        rows.append(row)
        a_phone = (row["pss_mib"] - rows[0]["pss_mib"]) * 2**20 / max(1, clients - given.registered[0])
        print(
            f"{clients:,} registered: start {row['start_s']:.1f} s, {row['trips_per_s']:,.0f} trips/s "
            f"({row['trips_per_s'] / rows[0]['trips_per_s']:.2f}), "
            f"{row['server_cpu_us']:.0f} µs of server CPU time per trip, end {row['end_s']:.1f} s; "
            f"PSS {row['pss_mib']:,.0f} MiB, {a_phone:,.0f} bytes per added phone; "
            f"record: {row['record_bytes_a_trip']:.0f} bytes per trip "
            f"({row['journal_bytes_a_trip']:.0f} of events), {row['record_bytes_a_phone']:.0f} per phone",
            flush=True,
        )
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
