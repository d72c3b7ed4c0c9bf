"""The cost of a trip under the virtual clock when its training takes no time, by stage.

The whole run is real (server, workers, evaluator, messages, parameter buffer, record), but for the training:
`IdleWorkload` changes one number. Everything that remains is the system's own.

    python benchmarks/virtual_speed.py [--trips 50000] [--parameters 1000] [--workers 2] [--clients 200]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from edgefl.experiment import Checkpoint, Clock, Evaluation, Experiment, Fleet, Model, Server, Stop
from edgefl.lab import workloads
from edgefl.processes import usable_cores
from edgefl.run import supervisor

FLEETS = {
    "drawn": (["paper-fast-u1-2", "paper-slow-u8-12"], "none"),
    "phones": (["pixel-4", "moto-g4"], "lte"),
}
"""Trips whose time a distribution gives, and trips of devices, on a network without jitter or losses."""
NEVER = 10**9


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
    """Trips a second, and µs a trip of the server's time in each stage."""
    wanted = experiment(fleet, given.clients, given.parameters, given.trips, given.workers)
    with tempfile.TemporaryDirectory() as folder:
        record = supervisor.run(wanted, Path(folder) / "run", quiet=True, workload=workloads.IDLE).record
        trips, wall_s = int((record.trips["fate"] == "applied").sum()), record.meta.wall_s
        stages = {row.stage: row.seconds / trips * 1e6 for row in record.costs if row.stage != "start"}
        record.close()
    return {"trips_per_s": trips / wall_s, **stages}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a trip costs under the virtual clock.")
    parser.add_argument("--trips", type=int, default=50_000)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures into this file too")
    given = parser.parse_args()
    found = {}
    for fleet in FLEETS:
        rows = sorted(
            (measured(fleet, given) for _ in range(given.repetitions)), key=lambda row: row["trips_per_s"]
        )
        row = found[fleet] = rows[len(rows) // 2]
        stages = ", ".join(f"{name} {us:.0f}" for name, us in row.items() if name != "trips_per_s")
        print(
            f"{fleet}: {row['trips_per_s']:,.0f} trips/s (median of {len(rows)}); µs a trip: {stages}",
            flush=True,
        )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
