"""Failpoints: named places in the code at which a test can make a process of a real run fail.

``EDGEFL_FAILPOINTS="die:3:0,nan:1:2"`` kills client 3 during its first trip, and makes client 1 send NaN in
its third trip. The variable is read once, when a process starts. If it is not set, failpoints cost no time.

| name      | the client                                                              |
|-----------|-------------------------------------------------------------------------|
| `die`     | is killed after its training, when half of its update has been uploaded |
| `hang`    | stops responding                                                        |
| `rubbish` | sends bytes that are not a message                                      |
| `nan`     | sends an update that contains NaN                                       |
| `alter`   | changes its update after sending its checksum                           |
| `stale`   | reports a base version that differs from the one in its task            |
| `memory`  | allocates more memory than its device has                               |
| `leave`   | returns its task without training                                       |

``"torn:0:7"`` kills the first server process of the run when it reaches the place ``torn`` for the eighth
time. ``"torn:1:7"`` does the same to the second server process, which replaces the first. If
``EDGEFL_FAILPOINTS_WHILE=FILE`` is set, visits to a place count only while FILE exists. The places are:

| name      | the server is killed                                                    |
|-----------|-------------------------------------------------------------------------|
| `commit`  | before it commits events and rows                                       |
| `committed` | after a commit, before it sends messages about the commit             |
| `sum`     | before a sum                                                            |
| `summed`  | after a sum, before it publishes the version                            |
| `published` | after it publishes a version, before it records the version           |
| `event`   | after an event of the virtual clock's agenda                            |
| `torn`    | after it has written a part of a checkpoint                             |
| `unnamed` | after it has written a checkpoint, before the rename                    |
| `renamed` | after the rename, before the folder is flushed                          |
| `named`   | before it removes older checkpoints                                     |

In the same way, ``"asked:0:7"`` kills the process that unmasks or decrypts sums for the first server process:

| name      | the process is killed                                                   |
|-----------|-------------------------------------------------------------------------|
| `asked`   | after the request for a sum has arrived                                 |
| `saved`   | after it has saved which updates it summed, before it replies           |

`edgefl.run.client` logs which updates the server has acknowledged, so that tests can compare them with the
run's record.
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
"""First part of the line that a process prints to standard error before it kills itself. The name of the
failpoint follows."""
NAMES = ("die", "hang", "rubbish", "nan", "alter", "stale", "memory", "leave", *OF_SERVER, *OF_SUMS)


def parse(text: str) -> frozenset[tuple[str, int, int]]:
    """Parse a list of failpoints into tuples of name, client and trip.

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
                f"EDGEFL_FAILPOINTS: {part!r}; allowed: NAME:CLIENT:TRIP, where NAME is one of {allowed}"
            )
        points.add((name, int(client), int(trip)))
    return frozenset(points)


WHILE = "EDGEFL_FAILPOINTS_WHILE"
_points: frozenset[tuple[str, int, int]]
_while: str


def arm() -> None:
    """Read the environment variables of failpoints again, in a process that was forked for another run."""
    global _points, _while
    _points = parse(os.environ.get("EDGEFL_FAILPOINTS", ""))
    _while = os.environ.get(WHILE, "/")


def armed() -> bool:
    """Return True if any failpoint is set."""
    return bool(_points)


def hit(name: str, client: int, trip: int) -> bool:
    """Return True if the failpoint ``name`` is set for this client and this trip."""
    return (name, client, trip) in _points


_passed: Counter[str] = Counter()
restarts = 0
"""Number of earlier server processes of this run: those before this server process or, in any other process,
before the server process that started it. If it is −1, `pass_by` never kills this process."""


def pass_by(name: str) -> None:
    """Count a visit to the place ``name``, and kill this process if a failpoint is set for this visit."""
    if _points and os.path.exists(_while):
        if (name, restarts, _passed[name]) in _points:
            die(name)
        _passed[name] += 1


def die(name: str) -> None:
    """Print the name of the failpoint to standard error, and kill this process."""
    os.write(2, f"{SAYS}{name}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


arm()
