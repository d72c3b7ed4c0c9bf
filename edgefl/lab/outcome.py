"""Compares a disturbed run with an undisturbed run, or with the log that its clients wrote.

Under the virtual clock, all results must equal those of the undisturbed run. Under the wall clock, clients
log which updates were acknowledged (`edgefl.run.client`). Each of these updates must be in the record exactly
once, and the model must follow from the journal (`edgefl.lab.verify`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edgefl import failpoints
from edgefl.core.events import Arrived
from edgefl.errors import ConfigError, EdgeflError
from edgefl.lab.verify import verify
from edgefl.parameters import checkpoint
from edgefl.results.record import Record
from edgefl.results.result import Result
from edgefl.results.rows import FATES
from edgefl.results.run_folder import CHECKPOINTS, RESULTS

TRIP = (
    "client", "base_version", "trip", "sent_s", "arrived_s", "staleness", "applied_version", "weight", "fate",
    "steps", "examples", "loss", "checksum_sent", "trip_declared_s",
)  # fmt: skip
"""Columns of a trip whose values, under the virtual clock, are computed and not measured."""
VERSION = ("at_s", "updates", "weight_sum")
ALTERED = ("checksum", "version")
"""Incidents that killing a process must never cause: an update was altered in transit, or has the wrong base
version."""
REPEATED = "another sum"
"""Text in the message that refuses a sum because its masked updates were already in an earlier sum. Killing
one process must never cause such a refusal."""
MEASURED = ("at_s", "trips", "accuracy", "loss", "correct", "metrics", "client_loss")


def counts(folder: Path) -> tuple[int, int]:
    """Return the number of recorded versions and of recorded trips, or (0, 0) if there is no record."""
    try:
        with Record(folder) as record:
            return int(record.versions["version"].max(initial=0)), len(record.trips["task"])
    except ConfigError:
        return 0, 0


def unreadable(folder: Path) -> Iterator[str]:
    """Yield a line for each file of a finished run that is missing or invalid."""
    try:
        with Record(folder) as record:
            if record.meta.status != "done":
                yield f"the record says that the run is {record.meta.status}"
            if strange := set(record.trips["fate"].tolist()) - {"", *FATES}:
                yield f"recorded trips have unknown fates: {', '.join(sorted(map(str, strange)))}"
            events = sum(1 for _ in record.events())
        checkpoint.latest(folder / CHECKPOINTS, journal_seq=events)
        Result(folder).model()
    except ConfigError as error:
        yield str(error)
    yield from (f"{name} is missing" for name in RESULTS if not (folder / name).is_file())


def differences(undisturbed: Path, disturbed: Path) -> Iterator[str]:
    """Yield a line for each kind of result in which a disturbed run differs from the undisturbed run.

    ``undisturbed`` is the folder of the undisturbed run.
    """
    expected, found = _figures(undisturbed), _figures(disturbed)
    for kind, there in expected.items():
        here = found[kind]
        other = [key for key in sorted({*there, *here}) if here.get(key) != there.get(key)]
        if other:
            first = _first_difference(other[0], here.get(other[0]), there.get(other[0]))
            yield f"{len(other)} of {len(there)} {kind} differ from the undisturbed run's; the first: {first}"


Figures = Mapping[str, Mapping[int, Mapping[str, str]]]


def _figures(folder: Path) -> Figures:
    with Record(folder) as record:
        hidden = record.meta.secure is not None  # checksums of masked updates depend on the run's keys
        names = [name for name in TRIP if not (hidden and name == "checksum_sent")]
        trips = _rows(names, record.trips, record.trips["task"].tolist())
        versions = _rows(VERSION, record.versions, record.versions["version"].tolist())
        measured = {
            row.version: {name: str(getattr(row, name)) for name in MEASURED} for row in record.evaluations
        }
        meta = record.meta
    model = {name: tensor.tobytes().hex() for name, tensor in Result(folder).model().items()}
    figures = {"model_sha256": meta.model_sha256, "emulated_s": str(meta.emulated_s)}
    ended = {task: row for task, row in trips.items() if row["fate"]}
    return {
        "trips": ended,
        "versions": versions,
        "measurements": measured,
        "runs": {0: figures},
        "final models": {0: model},
    }


def _rows(names: Iterable[str], columns: Any, keys: list[int]) -> dict[int, dict[str, str]]:
    values = {name: map(str, columns[name].tolist()) for name in names}
    return {key: {name: next(value) for name, value in values.items()} for key in keys}


def _first_difference(key: int, here: Mapping[str, str] | None, there: Mapping[str, str] | None) -> str:
    if here is None or there is None:
        return f"{key} is only in the {'undisturbed' if here is None else 'disturbed'} one"
    name = next(name for name in there if here.get(name) != there[name])
    return f"{key} has {name} {here.get(name, 'none')[:40]} instead of {there[name][:40]}"


def broken_promises(folder: Path, account: Path, code: Path) -> Iterator[str]:
    """Yield descriptions of the violations in a run under the wall clock.

    A violation is an acknowledged update that was lost, altered or repeated, or a model that differs from the
    model recomputed from the journal. ``account`` is the log that the clients wrote (`edgefl.run.client`),
    and ``code`` is the folder of the user's modules.
    """
    problems = log_problems(account, folder)
    with Record(folder) as record:
        problems += [
            f"{row.kind}: {row.detail}"
            for row in record.incidents
            if row.kind in ALTERED or (row.kind == "refused" and REPEATED in row.detail)
        ]
        columns = record.trips.rows("task", "fate", "reason", "arrived_s", "uses")
        rows = {task: row for task, *row in columns}
        summed = Counter(task for _, tasks, _ in record.sums() for task in set(tasks.tolist()))
    for each in read_log(account):
        fate, reason, arrived_s, _ = rows.get(each.task, ("", "", 0.0, 0))
        if fate == "lost" or (not fate and arrived_s != arrived_s):
            problems.append(f"{each} is on record as {fate or 'not arrived'}")
        elif fate == "dropped" and not reason:
            problems.append(f"{each} was dropped without a reason")
    for task, row in rows.items():
        if row[-1] != summed[task]:
            problems.append(f"task {task} was summed {summed[task]} times, but the record counts {row[-1]}")
    if problems:
        yield f"{problems[0]}{f', and {len(problems) - 1} more' if len(problems) > 1 else ''}"
    try:
        verify(folder, code=code)
    except EdgeflError as error:
        yield f"recomputed from its journal, the run is not confirmed: {error}"


class Acknowledged(NamedTuple):
    """An update whose acknowledgement its client received."""

    client: int
    task: int
    checksum: int


def read_log(path: Path) -> list[Acknowledged]:
    """Read the acknowledged updates from the log ``path``, in the order of their acknowledgement.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "account"
    ...     _ = path.write_text("done 3 0 77\\ndone 2 1 78\\nacknowledged 3 0\\n")
    ...     read_log(path)
    [Acknowledged(client=3, task=0, checksum=77)]
    """
    done: dict[tuple[int, int], int] = {}
    found = []
    for line in path.read_text().splitlines():
        word, *numbers = line.split()
        client, task, *checksum = map(int, numbers)
        if word == "done":
            done[client, task] = checksum[0]
        else:
            found.append(Acknowledged(client, task, done[client, task]))
    return found


def log_problems(path: Path, folder: Path) -> list[str]:
    """Describe the acknowledgements in the log ``path`` that the record omits, repeats or contradicts."""
    with Record(folder) as record:
        arrivals = Counter(
            (event.client, event.task) for _, event in record.events() if type(event) is Arrived
        )
        sent = dict(record.trips.rows("task", "checksum_sent"))
    found = [
        f"task {task} of client {client} arrived {times} times"
        for (client, task), times in arrivals.items()
        if times > 1
    ]
    accounts = read_log(path)
    found += [f"{each} is logged more than once" for each, times in Counter(accounts).items() if times > 1]
    for each in accounts:
        if not arrivals[each.client, each.task]:
            found.append(f"{each} is lost")
        elif sent.get(each.task) != each.checksum:
            found.append(f"{each} is on record with checksum {sent.get(each.task)}")
    return found


KINDS = ("supervisor", "zygote", "server", "client", "worker", "evaluator", "governor", "secure")
"""Kinds of processes in a run."""
PLACES = ("die", *failpoints.OF_SERVER, *failpoints.OF_SUMS)
"""Failpoints of clients, of the server and of secure aggregation.

A failpoint is a named place in the code at which a test can kill a process (`edgefl.failpoints`).

The clients' failpoint is used only under the wall clock.
"""


class Kill(msgspec.Struct):
    """A kill of one process, and the time that the run needed to recover from it."""

    kind: str
    round: int
    command: int
    """Number of the ``edgefl`` command of this round that was running, counted from 1."""
    at_s: float
    recovery_s: float | None = None
    """Seconds until a version newer than all earlier ones was recorded; None if the run ended first."""


class DisturbedRun(msgspec.Struct, kw_only=True):
    """One round: a run that is killed and resumed, and then checked for violations."""

    seed: int
    kills: int = 0
    commands: int = 0
    """Number of ``edgefl`` commands: one that started the run, and one each time that it was resumed."""
    wall_s: float = 0.0
    versions: int = 0
    trips: int = 0
    acknowledged: int = 0
    """Number of acknowledged updates in the log that the clients write (only under the wall clock)."""
    outlived_s: float = 0.0
    """Longest time in seconds by which a process of the run outlived the supervisor."""
    judged: bool = False
    violations: list[str] = []


@dataclass
class Findings:
    """All rounds and kills so far."""

    clock: str
    transport: str
    rounds: list[DisturbedRun] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    interrupted: bool = False

    @property
    def violations(self) -> list[str]:
        """One line for each violation, with the seed of the round in which it occurred."""
        return [f"seed {each.seed}: {line}" for each in self.rounds for line in each.violations]

    @property
    def kinds(self) -> list[str]:
        """The kinds of the killed processes, and the failpoints at which processes died."""
        made = {kill.kind for kill in self.kills}
        return [kind for kind in (*KINDS, *PLACES) if kind in made]

    def recovery(self, kind: str | None = None) -> tuple[int, dict[str, float]]:
        """Return the number of kills of one kind (None: of all kinds), and the times to recover from them.

        The times are the median, the 95th percentile and the largest time, in seconds.
        """
        kills = [kill for kill in self.kills if kind in (None, kill.kind)]
        seconds = [kill.recovery_s for kill in kills if kill.recovery_s is not None]
        if not seconds:
            return len(kills), {}
        found = np.quantile(seconds, (0.5, 0.95, 1.0)).tolist()
        return len(kills), dict(zip(("median_s", "p95_s", "worst_s"), found, strict=True))

    def document(self) -> dict[str, Any]:
        """Return all findings as plain values for a JSON file."""
        kinds = {kind: self.recovery(kind) for kind in self.kinds}
        return {
            "clock": self.clock,
            "transport": self.transport,
            "kills": len(self.kills),
            "interrupted": self.interrupted,
            "violations": self.violations,
            "recovery": {kind: {"kills": count, **found} for kind, (count, found) in kinds.items()},
            "rounds": msgspec.to_builtins(self.rounds),
            "each_kill": msgspec.to_builtins(self.kills),
        }
