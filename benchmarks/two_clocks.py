"""One experiment on 16 phones under both clocks: what each says of the same trips.

    python benchmarks/two_clocks.py [--trips 400] [--repetitions 3]

The wall clock's run is late by what its machine makes it late, which its fidelity says. Beside that stands
what the two runs disagree about: when trips arrived, in which order, and how stale they were.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import edgefl
from edgefl.lab.clocks import agreement
from edgefl.results.record import Record


def experiment(kind: str, trips: int) -> edgefl.Experiment:
    return edgefl.Experiment(
        name=f"two-clocks-{kind}",
        seed=1,
        fleet=edgefl.Fleet(
            devices={"pixel-4": 4, "pixel-3": 4, "pi-4": 4, "moto-g4": 4}, network="lte", join_spread_s=1.0
        ),
        data=edgefl.Data(name="digits"),
        model=edgefl.Model(args={"hidden": [16]}, flops_per_example=3e7),
        training=edgefl.Training(steps=2),
        strategy={"name": "fedbuff", "buffer_size": 5},
        clock=edgefl.Clock(kind=kind, time_scale=1.0),
        evaluation=edgefl.Evaluation(every_versions=1000),
        stop=edgefl.Stop(trips=trips),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The wall clock and the virtual clock on the same trips.")
    parser.add_argument("--trips", type=int, default=400)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    for _ in range(given.repetitions):
        with tempfile.TemporaryDirectory() as folder:
            took_s = {}
            for kind in ("wall", "virtual"):
                result = edgefl.run(experiment(kind, given.trips), Path(folder) / kind)
                took_s[kind] = result.summary()["wall_s"]
            with Record(Path(folder) / "wall") as wall, Record(Path(folder) / "virtual") as virtual:
                found = agreement(wall, virtual)
        print(f"{took_s['wall']:.1f} s of the wall clock in {took_s['virtual']:.1f} s")
        print("  " + ", ".join(f"{name} {value:.6g}" for name, value in found._asdict().items()), flush=True)


if __name__ == "__main__":
    main()
