"""A made-up but coherent run, written through the real `Store`: what reports are developed and tested on."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.events import Arrived, Joined, Summed
from edgefl.results.record import Aggregation, ClientRow, EvaluationRow, MemoryUse, TripRow, VersionRow
from edgefl.results.store import Store
from edgefl.seeds import stream

PROFILES = {
    # training GFLOPS, memory MiB, down, up Mbps, labels
    "pixel-4": (9.0, 512.0, 40.0, 20.0, (4, 5, 6, 7, 8, 9)),
    "pixel-3a": (4.0, 384.0, 17.0, 13.0, (4, 5, 6, 7, 8, 9)),
    "moto-g4": (0.9, 192.0, 5.0, 1.6, (0, 1, 2, 3)),
}


@dataclass
class Made:
    """What a synthetic run is made of; every field may be changed by a test."""

    clients: int = 24
    trips: int = 2000
    buffer_size: int = 5
    seed: int = 0
    strategy: str = "fedbuff"
    clock: str = "wall"
    every_versions: int = 10
    evaluations: bool = True
    classes: int = 10
    nan: bool = False
    fair: bool = False
    pacing_error: float = 0.004
    lost: int = 3
    dropped: int = 2
    profiles: dict[str, Any] = field(default_factory=lambda: dict(PROFILES))
    meta: dict[str, Any] = field(default_factory=dict)


def make(folder: Path, made: Made | None = None, **fields: Any) -> Path:
    """Write a run's record into ``folder``; returns the folder."""
    made = made or Made(**fields)
    folder.mkdir(parents=True, exist_ok=True)
    rng = stream(made.seed, "synthetic")
    names = list(made.profiles)
    profile = [names[min(int(len(names) * c / made.clients), len(names) - 1)] for c in range(made.clients)]
    with Store(folder) as store:
        rows = []
        for client, name in enumerate(profile):
            gflops, memory, down, up, labels = made.profiles[name]
            rows.append(
                ClientRow(
                    client=client,
                    profile=name,
                    network="lte",
                    examples=200 + client,
                    labels=labels,
                    train_gflops=gflops,
                    memory_mib=memory,
                    down_mbps=down,
                    up_mbps=up,
                )
            )
        store.clients(rows)
        _simulate(store, made, rows, rng)
    return folder


def _simulate(store: Store, made: Made, rows: list[ClientRow], rng: np.random.Generator) -> None:
    size = 234_000
    queue: list[tuple[float, int, int, int, int, float, tuple[float, float, float]]] = []
    version = task = ended = 0
    count = [0] * made.clients
    held: list[tuple[int, int, int]] = []
    skill = np.zeros(made.classes)
    at_s = 0.0
    store.version(VersionRow(version=0, at_s=0.0, wall_s=0.0, updates=0, weight_sum=0.0, sum_s=0.0))

    def send(client: int, now: float) -> None:
        nonlocal task
        row = rows[client]
        parts = (
            size * 8e-6 / (row.down_mbps or 1) + 0.05,
            3.2 / (row.train_gflops or 1) * float(rng.uniform(0.85, 1.15)),
            size * 8e-6 / (row.up_mbps or 1) + 0.05,
        )
        heapq.heappush(queue, (now + sum(parts), client, task, version, count[client], now, parts))
        task += 1
        count[client] += 1

    for client in range(made.clients):
        store.journal(Joined(client=client, at_s=0.0))
        send(client, 0.0)
    _evaluate(store, made, 0, 0.0, 0, skill, rng)
    bad = set(
        rng.choice(max(made.trips, 1), size=min(made.lost + made.dropped, made.trips), replace=False).tolist()
    )
    lost = set(list(bad)[: made.lost])
    while ended < made.trips and queue:
        at_s, client, this, base, trip, sent_s, (down, compute, up) = heapq.heappop(queue)
        row = rows[client]
        if ended in lost:
            store.trip(
                TripRow(
                    task=this,
                    client=client,
                    base_version=base,
                    trip=trip,
                    sent_s=sent_s,
                    fate="lost",
                    reason="process died",
                )
            )
            store.incident(at_s, client, "death", "killed by signal 9 while it trained")
            store.incident(at_s + 1.0, client, "rejoin", "")
        else:
            error = 1 + made.pacing_error * rng.standard_normal(3) if made.clock == "wall" else np.ones(3)
            checksum = int(rng.integers(0, 2**64, dtype=np.uint64))
            store.journal(Arrived(client, this, base, row.examples, 5, 0.5, at_s))
            store.trip(
                TripRow(
                    task=this, client=client, base_version=base, trip=trip, sent_s=sent_s,
                    received_s=sent_s + down, arrived_s=at_s, staleness=version - base,
                    examples=row.examples, steps=5, loss=2.3 * math.exp(-version / 60),
                    trained_version=base, down_bytes=size, up_bytes=size,
                    down_s=down * error[0], compute_s=compute * error[1], up_s=up * error[2],
                    down_declared_s=down, compute_declared_s=compute, up_declared_s=up,
                    trip_declared_s=down + compute + up,
                    trip_achieved_s=down * error[0] + compute * error[1] + up * error[2],
                    flops=compute * (row.train_gflops or 1) * 1e9,
                    lateness_s=abs(float(rng.normal(0, 2e-4))), cpu_s=0.02, peak_mib=13 + float(rng.random()),
                    checksum_sent=checksum, checksum_seen=checksum,
                )
            )  # fmt: skip
            if ended in bad:
                store.released(this, "dropped", "not finite")
                store.incident(at_s, client, "non-finite", f"task {this}")
            else:
                held.append((this, client, version - base))
        ended += 1
        if len(held) == made.buffer_size:
            weights = [(1 + s) ** (0.5 if made.fair else -0.5) / made.buffer_size for _, _, s in held]
            version += 1
            for (_, owner, _), weight in zip(held, weights, strict=True):
                skill[[c for c in rows[owner].labels if c < made.classes]] += weight
            store.journal(Summed(version, at_s))
            store.applied(version, [t for t, _, _ in held], weights)
            for done, _, _ in held:
                store.released(done, "applied")
            held.clear()
            store.version(
                VersionRow(
                    version=version,
                    at_s=at_s,
                    wall_s=at_s * 0.2,
                    updates=made.buffer_size,
                    weight_sum=sum(weights),
                    sum_s=8e-5,
                    norm=0.4,
                )
            )
            if version % made.every_versions == 0:
                _evaluate(store, made, version, at_s, ended, skill, rng)
        send(client, at_s)
        for stage, seconds in (
            ("receive", 3e-5),
            ("core", 2.5e-5),
            ("sum", 1.6e-5),
            ("record", 1.4e-5),
            ("send", 2e-5),
        ):
            store.cost(stage, seconds)
    store.set_meta(
        name="synthetic", edgefl="0.1.0", status="done", stop_reason=f"versions = {version}",
        strategy=made.strategy, clock=made.clock, seed=made.seed, clients=made.clients,
        processes=made.clients if made.clock == "wall" else 2, transport="shm", time_scale=0.2,
        wall_s=at_s * 0.2, emulated_s=at_s, data="digits", partition="by-device", test_examples=360,
        model="mlp", parameters=58_500,
        model_sha256="6f" * 32, throttle="paced", host_step_s=0.004, load=0.31, steal=0.002,
        aggregation=Aggregation(backend="c", threads=2, updates=version * made.buffer_size,
                                seconds=version * 8e-5, bytes=version * (made.buffer_size + 2) * size),
        memory=MemoryUse(server_mib=61.0, supervisor_mib=48.0, zygote_mib=118.0, evaluator_mib=92.0,
                      shared_mib=7.1,
                      clients_mib={c: 12.0 + (c % 7) / 4 for c in range(made.clients)}),
        host={"cpu": "AMD EPYC 7R13", "cores": 2, "memory_gib": 7.7, "kernel": "6.1"},
        software={"edgefl": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "numpy": "2.4.6"},
        toml='[fleet]\ndevices = { pixel-4 = 8, moto-g4 = 8 }\n\n[strategy]\nname = "fedbuff"\n',
        **made.meta,
    )  # fmt: skip


def _evaluate(
    store: Store,
    made: Made,
    version: int,
    at_s: float,
    trips: int,
    skill: np.ndarray,
    rng: np.random.Generator,
) -> None:
    if not made.evaluations:
        return
    total = tuple(36 for _ in range(made.classes))
    chance = 1 / made.classes
    share = chance + (0.965 - chance) * (1 - np.exp(-skill / 14))
    correct = tuple(int(rng.binomial(t, min(p, 1.0))) for t, p in zip(total, share, strict=True))
    accuracy = math.nan if made.nan else sum(correct) / sum(total)
    loss = math.nan if made.nan else -math.log(max(accuracy, 0.01))
    store.evaluation(
        EvaluationRow(
            version=version,
            at_s=at_s,
            wall_s=at_s * 0.2,
            trips=trips,
            accuracy=accuracy,
            loss=loss,
            correct=correct,
            total=total,
        )
    )
