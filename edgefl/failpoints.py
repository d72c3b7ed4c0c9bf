"""Failpoints: named places in the code where a test can make a process of a real run fail.

``EDGEFL_FAILPOINTS="die:3:0,nan:1:2"`` kills client 3 during its first trip and makes client 1 send NaN in
its third. The variable is read once, at the start of a process; without it failpoints cost nothing.

| name      | the client                                                              |
|-----------|-------------------------------------------------------------------------|
| `die`     | is killed after its training, with half of its update uploaded          |
| `hang`    | stops responding                                                        |
| `rubbish` | sends bytes that are not a message                                      |
| `nan`     | sends an update that contains NaN                                       |
| `alter`   | changes its update after sending its checksum                           |
| `stale`   | reports another base version than its task's                            |
| `memory`  | allocates more memory than its device has                               |
| `leave`   | returns its task untrained                                              |

``"torn:0:7"`` kills the run's first server when it reaches the place ``torn`` for the eighth time, and
``"torn:1:7"`` kills its successor. With ``EDGEFL_FAILPOINTS_WHILE=FILE`` places count only while FILE exists:

| name      | the server is killed                                                    |
|-----------|-------------------------------------------------------------------------|
| `commit`  | before it commits events and rows                                       |
| `committed` | after a commit, before it sends messages about it                     |
| `sum`     | before a sum                                                            |
| `summed`  | after a sum, before it publishes the version                            |
| `published` | after it publishes a version, before it records the version           |
| `event`   | after an event of the virtual clock's agenda                            |
| `torn`    | after it has written a part of a checkpoint                             |
| `unnamed` | after it has written a checkpoint, before the rename                    |
| `renamed` | after the rename, before the folder is flushed                          |
| `named`   | before it removes older checkpoints                                     |

Likewise ``"asked:0:7"`` kills the first process that unmasks or opens sums for the run's first server:

| name      | the process is killed                                                   |
|-----------|-------------------------------------------------------------------------|
| `asked`   | after a sum's request arrives                                           |
| `saved`   | after it saved which updates it summed, before it replies               |

`edgefl.run.client` records which updates were acknowledged, to compare with the run's record.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

from edgefl.errors import ConfigError

OF_SERVER = (
    "commit", "committed", "sum", "summed", "published", "event", "torn", "unnamed", "renamed", "named",
)  # fmt: skip
OF_SUMS = ("asked", "saved")
SAYS = "edgefl: killed at failpoint "
"""Start of the line that a process prints to standard error before it kills itself; the name follows."""
NAMES = ("die", "hang", "rubbish", "nan", "alter", "stale", "memory", "leave", *OF_SERVER, *OF_SUMS)


def parse(text: str) -> frozenset[tuple[str, int, int]]:
    """Parse failpoints into tuples of name, client and trip.

    >>> sorted(parse("die:3:0,nan:1:2"))
    [('die', 3, 0), ('nan', 1, 2)]
    """
    points = set()
    for part in filter(None, text.split(",")):
        name, _, place = part.partition(":")
        client, _, trip = place.partition(":")
        if name not in NAMES or not client.isdigit() or not trip.isdigit():
            allowed = ", ".join(NAMES)
            raise ConfigError(
                f"EDGEFL_FAILPOINTS: {part!r}; allowed: NAME:CLIENT:TRIP with NAME of {allowed}"
            )
        points.add((name, int(client), int(trip)))
    return frozenset(points)


WHILE = "EDGEFL_FAILPOINTS_WHILE"
_points: frozenset[tuple[str, int, int]]
_while: str


def arm() -> None:
    """Read the environment again, in a process that was forked for another run."""
    global _points, _while
    _points = parse(os.environ.get("EDGEFL_FAILPOINTS", ""))
    _while = os.environ.get(WHILE, "/")


def armed() -> bool:
    """Return True if any failpoint is set."""
    return bool(_points)


def hit(name: str, client: int, trip: int) -> bool:
    """Return True if a failpoint is set for this client and trip."""
    return (name, client, trip) in _points


_passed: Counter[str] = Counter()
restarts = 0
"""Number of servers that this run had before this process, or before the server that started it; −1: no
failpoint applies."""


def pass_by(name: str) -> None:
    """Count a visit of the place ``name``, and kill this process if a failpoint is set for this visit."""
    if _points and os.path.exists(_while):
        if (name, restarts, _passed[name]) in _points:
            die(name)
        _passed[name] += 1


def die(name: str) -> None:
    """Print the place's name to standard error and kill this process."""
    os.write(2, f"{SAYS}{name}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


arm()
