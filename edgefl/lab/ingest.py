"""Measures how many updates per second the server processes, and the upper limits of this rate.

Only the training is missing; the server process, forked clients, sockets, slots, checksums, core (FedBuff),
kernel, journal and record are real. Clients compute nothing and wait for nothing (`IdleWorkload`), so the
rate is the highest that this machine can serve. The rate is computed from the server's times in the record,
without the first third of each turn, in which clients start and touch their memory for the first time. The
times of the stages of a trip on the server are measured over the whole turn.

The limits (`edgefl.lab.bare`) use the same number of processes: ``socket`` sends the same frames over ZeroMQ
and does nothing else, ``memory`` copies the same bytes and sums them, and ``passes`` (for ``shm``) reads and
writes memory as often as a trip does. A case is a transport and a model size. Cases take turns; in each turn,
edgefl is measured first, and then its limits. Each metric is the median over the turns of a case.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgefl import kernels
from edgefl.errors import RunError
from edgefl.experiment import Clock, Fleet, Model, Server, Stop
from edgefl.host.capacity import available_bytes
from edgefl.lab import bench
from edgefl.lab.aggregate import short
from edgefl.lab.bare import Limit, LimitCase, Transport
from edgefl.lab.bench import Say
from edgefl.lab.workloads import IDLE
from edgefl.parameters.buffer import ring_entries
from edgefl.processes import command_of, finding_edgefl
from edgefl.results import tables
from edgefl.results.record import Record

SIZES = (1_000, 62_006, 1_663_370, 11_173_962)
QUICK_SIZES = SIZES[1:3]
MAX_S, QUICK_MAX_S = 240.0, 40.0
"""Number of seconds after which no more turns start, without and with ``--quick``. Cases that have not had a
turn by that time are left out."""
LIMITS: dict[Transport, tuple[Limit, ...]] = {
    "shm": ("socket", "memory", "passes"),
    "wire": ("socket", "memory"),
}
CLIENTS = 8
UPDATES = 5
"""Number of updates per sum, which is the buffer size b of FedStaleWeight."""
STAGES = ("receive", "check", "decide", "sum", "publish", "send", "record", "report", "wait")
"""Stages into which the server's time is broken down. ``check`` is all time outside the other stages: parsing
and validating messages, and leasing slots. ``send`` is the time to send the reply, which is the next task."""
SHOWN = {"receive": "recv", "check": "chk", "sum": "sum", "publish": "pub", "send": "rep"}
"""The stages that the table shows, and their abbreviations for narrow terminals."""
SHORT = {"of bare ZeroMQ": "sock", "of memory's limit": "mem", "of its passes": "pass", "trip, µs": "trip"}
"""The other columns of the table, and their abbreviations for narrow terminals."""
FEW = 3
"""Minimum number of trips per client in a turn, on average."""
LONGEST_S = 60.0
"""Maximum length of a turn in seconds. If even this is too short for enough trips, the measurement fails."""
TOO_LARGE = "not measured, because more than half of the available memory is needed"
COPIES = 4
"""Number of vectors of the model's size in the memory of a client: the model, the base model, the update,
and the vector that is sent or received."""


class IngestFigures(NamedTuple):
    """Metrics that were measured on edgefl's server in one turn."""

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
    say: Say = bench.silent,
) -> dict[str, Any]:
    """Measure all cases; return plain values for `show` and a JSON file.

    Each case gets up to ``repetitions`` turns of ``seconds`` seconds, small models first, until `MAX_S`
    seconds have passed. On a very busy host, cases that got no turn are listed in ``left_out``. Sizes that
    need more than half of the available memory are listed in ``too_large``. A turn with fewer than three
    trips per client is repeated with twice the length.

    ``cases`` contains an entry for each transport and size: the number of ``turns``, the total number of
    ``trips``, ``trips_per_s`` and its ``spread`` (interquartile range divided by the median),
    ``gbytes_per_s`` (each trip moves a model down and an update up), ``server_trip_us`` (the server's median
    time for a trip, without the sum), ``server_us`` (the server's total time per trip except waiting),
    ``stages_us``, and, for each of ``limits``, its ``trips_per_s`` and ``of_limit`` (the rate of the case
    divided by the limit).

    Raises `RunError` if an update was lost, altered or not applied in its turn, if even turns of a minute are
    too short, or if all sizes are too large.
    """
    seconds = seconds or (0.6 if quick else 1.5)
    repetitions = repetitions or (3 if quick else 9)
    half = available_bytes() // 2
    vectors = UPDATES + (1 + COPIES) * clients
    wanted = sizes or (QUICK_SIZES if quick else SIZES)
    fitting = [size for size in wanted if 4 * size * (ring_entries(size) + vectors) < half]
    too_large = [short(size) for size in wanted if size not in fitting]
    if not fitting:
        raise RunError(f"ingest: {TOO_LARGE}: {', '.join(too_large)} parameters; choose smaller models")
    cases = [_Case(transport, size, clients, seconds) for transport in LIMITS for size in fitting]
    in_order = sorted(cases, key=lambda case: case.parameters)
    here = bench.machine(backend=kernels.backend())  # before the measurement, which itself causes load
    _take_turns(in_order, repetitions, QUICK_MAX_S if quick else MAX_S, say)
    return {
        "host": here,
        "clients": clients,
        "updates_per_sum": min(UPDATES, clients),
        "seconds": seconds,
        "repetitions": repetitions,
        "cases": [case.figures() for case in cases if case.turns],
        "left_out": [f"{case.transport} {short(case.parameters)}" for case in cases if not case.turns],
        "too_large": too_large,
    }


@dataclass
class _Case:
    """A case (a transport and a model size) and its turns so far."""

    transport: Transport
    parameters: int
    clients: int
    seconds: float
    """Length of a turn in seconds. It is doubled until a turn has enough trips."""
    turns: list[IngestFigures] = field(default_factory=list)
    limits: dict[Limit, list[float]] = field(default_factory=dict)
    took_s: float = 0.0
    """Duration of the last turn in seconds, including the time to measure the upper limits in `LIMITS`."""

    def turn(self) -> None:
        """Measure edgefl once, and then measure each limit."""
        began_s = time.monotonic()
        found, self.seconds = _long_enough(self.transport, self.parameters, self.clients, self.seconds)
        self.turns.append(found)
        for what in LIMITS[self.transport]:
            sums, seconds = min(UPDATES, self.clients), self.seconds / 2
            case = LimitCase(what, self.transport, self.parameters, self.clients, sums, seconds)
            self.limits.setdefault(what, []).append(limit_of(case))
        self.took_s = time.monotonic() - began_s

    def figures(self) -> dict[str, Any]:
        rate, spread = bench.median_and_spread([turn.trips_per_s for turn in self.turns])
        stages = {stage: float(np.median([turn.stages_us[stage] for turn in self.turns])) for stage in STAGES}
        allowed = {what: float(np.median(rates)) for what, rates in self.limits.items()}
        return {
            "transport": self.transport,
            "parameters": self.parameters,
            "turns": len(self.turns),
            "trips": sum(turn.trips for turn in self.turns),
            "trips_per_s": rate,
            "spread": spread,
            "gbytes_per_s": rate * 8 * self.parameters / 1e9,
            "server_trip_us": float(np.median([turn.server_trip_us for turn in self.turns])),
            "server_us": sum(stages.values()) - stages["wait"],
            "stages_us": stages,
            "limits": {
                what: {"trips_per_s": most, "of_limit": rate / most} for what, most in allowed.items()
            },
        }


def _take_turns(cases: list[_Case], most: int, most_s: float, say: Say) -> None:
    """Give each case up to ``most`` turns; stop when the next turn would probably end after ``most_s``."""
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
    """Run a turn, doubling its length until it has enough trips; return its metrics and its length."""
    while True:
        found = measured(transport, parameters, clients, seconds)
        if found.trips >= FEW * clients:
            return found, seconds
        if seconds >= LONGEST_S:
            raise RunError(
                f"ingest: {clients} clients with {parameters:,} parameters made only {found.trips} trips in "
                f"{seconds:g} s, but at least {FEW * clients} are needed; choose smaller models"
            )
        seconds *= 2


def limit_of(case: LimitCase) -> float:
    """Measure, in a separate process, how many trips per second the limit allows."""
    with tempfile.TemporaryDirectory(prefix="edgefl-bare-") as folder:  # Ctrl-C kills the process at once
        command = command_of("edgefl.lab.bare", folder, *map(str, case))
        env, nothing = finding_edgefl(os.environ), subprocess.DEVNULL
        done = subprocess.run(command, env=env, stdin=nothing, capture_output=True, text=True, check=False)
    if done.returncode:
        _, _, why = done.stderr.strip().rpartition("\n")
        raise RunError(f"ingest: the limit {case.what} cannot be measured: {why}")
    return float(done.stdout)


def measured(
    transport: Transport, parameters: int, clients: int, seconds: float, out: Path | None = None
) -> IngestFigures:
    """Run edgefl for ``seconds`` seconds and return its metrics; the record is kept if ``out`` is given."""
    experiment = bench.settings(
        fleet=Fleet(devices={"pixel-4": clients}, network="fios", memory="off"),
        model=Model(name="idle", args={"parameters": parameters}),
        strategy={"name": "fedbuff", "buffer_size": min(UPDATES, clients)},
        clock=Clock(kind="wall", time_scale=1.0),
        server=Server(transport=transport, heartbeat_s=60.0),
        stop=Stop(wall_s=seconds),
    )
    with bench.run_record(experiment, IDLE, out) as record:
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
            f"{int(applied.sum())} of {summed} summed updates applied, {count} trips; "
            "every update must be applied, unaltered"
        )
    if count < 2:
        return IngestFigures(count, 0.0, 0.0, dict.fromkeys(STAGES, 0.0))
    span_s = float(arrived[-1] - arrived[0])
    steady = arrived[np.searchsorted(arrived, arrived[0] + span_s / 3) :]
    stages = {stage: costs.get(stage, 0.0) / count * 1e6 for stage in STAGES}
    # The measured wait includes the time in which clients join and leave. So compute the wait as the rest of
    # the time from the first to the last arrival.
    stages["wait"] = max(0.0, span_s / count * 1e6 - sum(stages.values()) + stages["wait"])
    rate = (len(steady) - 1) / float(steady[-1] - steady[0]) if len(steady) > 1 else (count - 1) / span_s
    return IngestFigures(count, rate, float(record.meta.server_trip_us or 0.0), stages)


def show(result: dict[str, Any]) -> None:
    """Print, for each case, the trips per second, their share of each limit, and the cost of a trip."""
    heads = [
        "case",
        ">trips/s",
        ">GB/s",
        *(f">{one}" for one in SHORT),
        *(f">{stage}, µs" for stage in SHOWN),
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
    facts, left_out, too_large = (result[key] for key in ("host", "left_out", "too_large"))
    fewest, most = (end(case["turns"] for case in result["cases"]) for end in (min, max))
    turns = tables.many(most, "turn") if fewest == most else f"{fewest} to {most} turns"
    abbreviated = SHORT | {f"{stage}, µs": name for stage, name in SHOWN.items()}
    tables.show(
        tables.table(
            heads, rows, "Client trips that the server processes, and its time per trip", short=abbreviated
        ),
        f"{bench.machine_line(facts, facts['backend'])}; "
        f"{result['clients']} clients, {result['updates_per_sum']} updates per sum, medians of "
        f"{turns} of {result['seconds']:g} s or more. Shares: of the rates of bare "
        "ZeroMQ with the same frames, of copying and summing the same bytes, and of a trip's passes over "
        "memory. trip: median time for one trip, without the sum"
        + (f"; left out because time was up: {', '.join(left_out)}" if left_out else "")
        + (f"; {TOO_LARGE}: {', '.join(too_large)} parameters" if too_large else ""),
    )
