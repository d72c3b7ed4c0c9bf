"""Updates a second that the server takes in, each case beside its limits in the same run.

Everything is real but the training: server process, forked clients, socket, slots, checksums, core (FedBuff),
kernel, journal and record. Clients compute nothing and wait for nothing (`IdleWorkload`), so the trips a
second are the most that this machine can serve. They are read off the record, by the server's own clock, from
the second third of a turn on: in the first, clients come one by one and find memory that was never touched.
(What a trip costs the server, by stage, is of the whole turn.)

The limits (`edgefl.lab.bare`) use the same number of processes: ``socket`` passes the same frames over
ZeroMQ and does nothing else, ``memory`` copies the same bytes and sums them, ``passes`` (``shm``) makes the
passes of a trip over memory. System and limits take turns, and the cases do; each figure is a median over the
turns that a case had before the time was up.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from edgefl import kernels
from edgefl.errors import RunError
from edgefl.experiment import Checkpoint, Clock, Evaluation, Experiment, Fleet, Model, Server, Stop
from edgefl.host.capacity import host
from edgefl.lab.aggregate import short
from edgefl.lab.bare import Limit, LimitCase, Transport
from edgefl.lab.workloads import IDLE
from edgefl.parameters.buffer import ring_entries
from edgefl.results import tables
from edgefl.results.record import Record
from edgefl.run import supervisor

SIZES = (1_000, 62_006, 1_663_370, 11_173_962)
QUICK_SIZES = SIZES[1:3]
MOST_S, QUICK_MOST_S = 240.0, 40.0
"""Seconds after which no turn is begun; a case that had none is left out."""
LIMITS: dict[Transport, tuple[Limit, ...]] = {
    "shm": ("socket", "memory", "passes"),
    "wire": ("socket", "memory"),
}
CLIENTS = 8
UPDATES = 5
"""Updates in a sum: FedStaleWeight's b."""
NEVER = 10**9
STAGES = ("receive", "check", "decide", "sum", "publish", "send", "record", "report", "wait")
"""The stages that the server's stopwatch tells apart. ``check`` reads a message, holds it against what was
asked for and leases slots: all that is in none of the others. ``send`` is the reply, the next task."""
SHOWN = {"receive": "recv", "check": "chk", "sum": "sum", "publish": "pub", "send": "rep"}
"""Stages in the table, and their heads."""
FEW = 3
"""Trips of each client, on average, that a turn has at least."""
LONGEST_S = 60.0
"""A turn that is as long and has too few of them is an error."""
COPIES = 4
"""Vectors of a client's own: its model, its base, its update, and one on the wire."""


class IngestFigures(NamedTuple):
    """The figures of one turn of the system."""

    trips: int
    trips_per_s: float
    server_trip_us: float
    stages_us: dict[str, float]


def run(
    quick: bool = False,
    *,
    sizes: tuple[int, ...] | None = None,
    clients: int = CLIENTS,
    seconds: float | None = None,
    repetitions: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure; returns plain values, for `show` and a JSON file.

    Cases take up to ``repetitions`` turns of ``seconds``, one after the other, until `MOST_S` have passed,
    small models first. On a host so busy that some had none by then, these are ``left_out``. ``say`` is told
    of every turn.

    ``cases`` has one entry a transport and size: its ``turns``, ``trips`` counted in all, ``trips_per_s``
    with its ``spread`` (interquartile range over median), ``gbytes_per_s`` (a model down and an update up),
    ``server_trip_us`` (median cost of a trip to the server, without the sum), ``server_us`` (its whole time
    a trip but waiting), ``stages_us``, and for each of ``limits`` its ``trips_per_s`` and ``of_limit``.

    A turn with fewer than three trips a client is made again, twice as long. Raises `RunError` if any update
    was lost, altered or not applied in its turn, or if a minute is too short for a turn.
    """
    seconds = seconds or (0.6 if quick else 1.5)
    repetitions = repetitions or (3 if quick else 9)
    half = int(psutil.virtual_memory().available) // 2
    vectors = UPDATES + (1 + COPIES) * clients
    fitting = [
        size
        for size in sizes or (QUICK_SIZES if quick else SIZES)
        if 4 * size * (ring_entries(size) + vectors) < half
    ]
    cases = [_Case(transport, size, clients, seconds) for transport in LIMITS for size in fitting]
    in_order = sorted(cases, key=lambda case: case.parameters)
    _take_turns(in_order, repetitions, QUICK_MOST_S if quick else MOST_S, say)
    return {
        "host": {**host()._asdict(), "load_1min": round(os.getloadavg()[0], 2), "backend": kernels.backend()},
        "clients": clients,
        "updates_per_sum": min(UPDATES, clients),
        "seconds": seconds,
        "repetitions": repetitions,
        "cases": [case.figures() for case in cases if case.turns],
        "left_out": [f"{case.transport} {short(case.parameters)}" for case in cases if not case.turns],
    }


@dataclass
class _Case:
    """A transport and size, with the turns that it has had."""

    transport: Transport
    parameters: int
    clients: int
    seconds: float
    """Length of a turn, which grows where a case needs longer ones."""
    turns: list[IngestFigures] = field(default_factory=list)
    limits: dict[Limit, list[float]] = field(default_factory=dict)
    took_s: float = 0.0
    """Seconds of the last turn, its limits included."""

    def turn(self) -> None:
        """Measure the system once, and then each limit."""
        began_s = time.monotonic()
        found, self.seconds = _long_enough(self.transport, self.parameters, self.clients, self.seconds)
        self.turns.append(found)
        for what in LIMITS[self.transport]:
            sums, seconds = min(UPDATES, self.clients), self.seconds / 2
            case = LimitCase(what, self.transport, self.parameters, self.clients, sums, seconds)
            self.limits.setdefault(what, []).append(limit_of(case))
        self.took_s = time.monotonic() - began_s

    def figures(self) -> dict[str, Any]:
        low, rate, high = np.percentile([turn.trips_per_s for turn in self.turns], [25, 50, 75]).tolist()
        stages = {stage: float(np.median([turn.stages_us[stage] for turn in self.turns])) for stage in STAGES}
        allowed = {what: float(np.median(rates)) for what, rates in self.limits.items()}
        return {
            "transport": self.transport,
            "parameters": self.parameters,
            "turns": len(self.turns),
            "trips": sum(turn.trips for turn in self.turns),
            "trips_per_s": rate,
            "spread": (high - low) / rate,
            "gbytes_per_s": rate * 8 * self.parameters / 1e9,
            "server_trip_us": float(np.median([turn.server_trip_us for turn in self.turns])),
            "server_us": sum(stages.values()) - stages["wait"],
            "stages_us": stages,
            "limits": {
                what: {"trips_per_s": most, "of_limit": rate / most} for what, most in allowed.items()
            },
        }


def _take_turns(cases: list[_Case], most: int, most_s: float, say: Callable[[str], None]) -> None:
    """Up to ``most`` turns of each case; none that would end after ``most_s``, by what its last one took."""
    began_s = time.monotonic()
    for turn in range(most):
        for case in cases:
            if time.monotonic() - began_s + case.took_s > most_s:
                return
            say(f"turn {turn + 1} of at most {most}: {case.transport}, {short(case.parameters)} parameters")
            case.turn()


def _long_enough(
    transport: Transport, parameters: int, clients: int, seconds: float
) -> tuple[IngestFigures, float]:
    """Repeat a turn, twice as long each time, until each client made trips; returns its length, too."""
    while True:
        with tempfile.TemporaryDirectory(prefix="edgefl-ingest-") as folder:
            found = measured(transport, parameters, clients, seconds, Path(folder) / "run")
        if found.trips >= FEW * clients:
            return found, seconds
        if seconds >= LONGEST_S:
            raise RunError(
                f"ingest: {found.trips} trips of {clients} clients with {parameters:,} parameters in "
                f"{seconds:g} s, at least {FEW * clients} are needed: give smaller sizes"
            )
        seconds *= 2


def limit_of(case: LimitCase) -> float:
    """Trips a second that the limit allows, measured by a process of its own."""
    command = [sys.executable, "-m", "edgefl.lab.bare", *map(str, case)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        _, _, why = done.stderr.strip().rpartition("\n")
        raise RunError(f"ingest: the limit {case.what} cannot be measured: {why}")
    return float(done.stdout)


def measured(transport: Transport, parameters: int, clients: int, seconds: float, out: Path) -> IngestFigures:
    """Let the system run for so many seconds, with its record in the folder ``out``."""
    experiment = Experiment(
        fleet=Fleet(devices={"pixel-4": clients}, network="fios", memory="off"),
        model=Model(name="idle", args={"parameters": parameters}),
        strategy={"name": "fedbuff", "buffer_size": min(UPDATES, clients)},
        clock=Clock(kind="wall", time_scale=1.0),
        server=Server(transport=transport, heartbeat_s=60.0),
        evaluation=Evaluation(every_versions=NEVER),
        checkpoint=Checkpoint(every_s=float(NEVER)),
        stop=Stop(wall_s=seconds),
    )
    with supervisor.run(experiment, out, quiet=True, workload=IDLE).record as record:
        return _figures(record)


def _figures(record: Record) -> IngestFigures:
    trips, incidents = record.trips, record.incidents
    arrived = np.sort(trips["arrived_s"][~np.isnan(trips["arrived_s"])])
    applied = trips["fate"] == "applied"
    altered = int((trips["checksum_sent"][applied] != trips["checksum_seen"][applied]).sum())
    summed = int(record.versions["updates"].sum())
    count, costs = len(arrived), {row.stage: row.seconds for row in record.costs}
    if incidents or altered or int(applied.sum()) != summed:
        first = f" ({incidents[0].kind}: {incidents[0].detail})" if incidents else ""
        raise RunError(
            f"ingest: {len(incidents)} incidents{first}, {altered} altered updates, "
            f"{int(applied.sum())} applied of {summed} summed, {count} trips; every update must count"
        )
    if count < 2:
        return IngestFigures(count, 0.0, 0.0, dict.fromkeys(STAGES, 0.0))
    span_s = float(arrived[-1] - arrived[0])
    steady = arrived[np.searchsorted(arrived, arrived[0] + span_s / 3) :]
    stages = {stage: costs.get(stage, 0.0) / count * 1e6 for stage in STAGES}
    # The server also waited for the fleet to come and go: what is left of the span is its wait for updates.
    stages["wait"] = max(0.0, span_s / count * 1e6 - sum(stages.values()) + stages["wait"])
    rate = (len(steady) - 1) / float(steady[-1] - steady[0]) if len(steady) > 1 else (count - 1) / span_s
    return IngestFigures(count, rate, float(record.meta.server_trip_us or 0.0), stages)


def show(result: dict[str, Any]) -> None:
    """Print a line a case: its trips a second, their share of each limit, and what a trip costs."""
    heads = [
        "",
        ">trips/s",
        ">GB/s",
        ">sock",
        ">mem",
        ">pass",
        ">trip",
        *(f">{head}" for head in SHOWN.values()),
    ]
    rows = []
    for case in result["cases"]:
        limits = [case["limits"].get(what) for what in LIMITS["shm"]]
        costs = [case["server_trip_us"], *(case["stages_us"][stage] for stage in SHOWN)]
        rate = case["trips_per_s"]
        rows.append(
            [
                f"{case['transport']} {short(case['parameters'])}",
                tables.number(rate),
                tables.number(case["gbytes_per_s"]),
                *("" if limit is None else f"{100 * limit['of_limit']:.0f}%" for limit in limits),
                *(f"{us:.0f}" if us < 10_000 else f"{us / 1000:.0f}k" for us in costs),
            ]
        )
    facts = result["host"]
    fewest, most = (end(case["turns"] for case in result["cases"]) for end in (min, max))
    turns = tables.many(most, "turn") if fewest == most else f"{fewest} to {most} turns"
    tables.show(
        tables.table(heads, rows, "Client trips that the server takes in, and its µs a trip by stage"),
        f"{facts['cpu']}, {facts['cores']} cores, {facts['backend']}, load {facts['load_1min']}; "
        f"{result['clients']} clients, {result['updates_per_sum']} updates a sum, medians of "
        f"{turns} of {result['seconds']:g} s or more. sock, mem, pass: share of what "
        "bare ZeroMQ does with the same frames, of what copying and summing the same bytes allows, and of a "
        "trip's passes over memory. trip: median µs of one trip, without the sum"
        + (f"; left out, for the time was up: {', '.join(result['left_out'])}" if result["left_out"] else ""),
    )
