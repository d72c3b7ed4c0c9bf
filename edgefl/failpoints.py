"""Named places where a test can make a process fail, as real ones do, in a real run.

``EDGEFL_FAILPOINTS="die:3:0,nan:1:2"`` makes client 3 die during its first trip and client 1 send NaN on its
third. Off unless the variable is set, and read once, so that a run does not pay for them.

| name      | the client                                                              |
|-----------|-------------------------------------------------------------------------|
| `die`     | is killed when its training is done, with its update half uploaded      |
| `hang`    | stops for good, as a frozen device does                                 |
| `rubbish` | sends bytes that are no message                                         |
| `nan`     | sends an update with a NaN in it                                        |
| `alter`   | changes its update after it said what its checksum is                   |
| `stale`   | says that it trained another version than it was given                  |
| `memory`  | allocates more than its device has                                      |
| `leave`   | gives the task back                                                     |

``"torn:0:7"`` kills the server when it passes the named place for the eighth time, ``"torn:1:7"`` the one
that was started in its place. With ``EDGEFL_FAILPOINTS_WHILE=FILE`` it passes only while that file is there:

| name      | the server is killed                                                    |
|-----------|-------------------------------------------------------------------------|
| `commit`  | before events and rows are committed                                    |
| `committed` | when they are, before anyone is told                                    |
| `sum`     | before a sum                                                            |
| `summed`  | when a version is made, before it is published                          |
| `published` | when it is published, before that is journaled                        |
| `event`   | after an event of the virtual clock's agenda                            |
| `torn`    | when it has written a part of a checkpoint                              |
| `unnamed` | when a checkpoint is whole, before it has its name                      |
| `renamed` | when it has its name, before the folder is flushed                      |
| `named`   | before older checkpoints are removed                                    |

The clients' own account of what was acknowledged, to hold against the record: `edgefl.run.witness`.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

from edgefl.errors import ConfigError

OF_SERVER = (
    "commit", "committed", "sum", "summed", "published", "event", "torn", "unnamed", "renamed", "named",
)  # fmt: skip
SAYS = "edgefl: killed at failpoint "
"""The beginning of the line on standard error that a process leaves then; the place's name is the rest."""
NAMES = ("die", "hang", "rubbish", "nan", "alter", "stale", "memory", "leave", *OF_SERVER)


def parse(text: str) -> frozenset[tuple[str, int, int]]:
    """The failpoints in ``text``: name, client, trip.

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
    """Read the environment again, as a process that was forked for another run does."""
    global _points, _while
    _points = parse(os.environ.get("EDGEFL_FAILPOINTS", ""))
    _while = os.environ.get(WHILE, "/")


def armed() -> bool:
    """Returns True if any client is to fail at all."""
    return bool(_points)


def hit(name: str, client: int, trip: int) -> bool:
    """Returns True if this client is to fail in this way on this trip."""
    return (name, client, trip) in _points


_passed: Counter[str] = Counter()
restarts = 0
"""The servers of this run before this process."""


def pass_by(name: str) -> None:
    """A place without a client: the process ends here if a test asked for that."""
    if _points and os.path.exists(_while):
        if (name, restarts, _passed[name]) in _points:
            die(name)
        _passed[name] += 1


def die(name: str) -> None:
    """Say which place this is, and end this process."""
    os.write(2, f"{SAYS}{name}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


arm()
