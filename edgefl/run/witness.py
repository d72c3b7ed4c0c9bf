"""The witness: the clients' own log of acknowledged updates, for tests of the record.

With ``EDGEFL_WITNESS=FILE`` in a run's environment, every client of the wall clock appends a line to FILE
before it sends `Done`, and another when it receives its next task, which acknowledges the update:

    done CLIENT TASK CHECKSUM
    acknowledged CLIENT TASK

The checksum is that of the update in its slot, a decimal number of 64 bits. Each line is one write to a file
opened for appending, so a kill cannot tear it. Without the variable there is no log.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from edgefl.core.events import Arrived
from edgefl.results.record import Record

VARIABLE = "EDGEFL_WITNESS"


class Acknowledged(NamedTuple):
    """An update whose acknowledgement its client received."""

    client: int
    task: int
    checksum: int


class Witness:
    """A client's log writer; does nothing without the variable."""

    def __init__(self, client: int) -> None:
        self._client = client
        self._open: int | None = None
        path = os.environ.get(VARIABLE)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600) if path else None

    def done(self, task: int, checksum: int) -> None:
        """Log that the client is about to send `Done`."""
        if self._fd is not None:
            self._open = task
            os.write(self._fd, f"done {self._client} {task} {checksum}\n".encode())

    def next_task(self) -> None:
        """Log that the client received its next task."""
        if self._fd is not None and self._open is not None:
            os.write(self._fd, f"acknowledged {self._client} {self._open}\n".encode())
            self._open = None


def read(path: Path) -> list[Acknowledged]:
    """Read the acknowledged updates, in order, from the log ``path``.

    >>> import tempfile; path = Path(tempfile.mkdtemp()) / "account"
    >>> _ = path.write_text("done 3 0 77\\ndone 2 1 78\\nacknowledged 3 0\\n")
    >>> read(path)
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


def problems(path: Path, folder: Path) -> list[str]:
    """Describe acknowledgements in the log ``path`` that are not exactly once in the record in ``folder``."""
    with Record(folder) as record:
        arrivals = Counter(
            (event.client, event.task) for _, event in record.events() if type(event) is Arrived
        )
        trips = record.trips
        sent = dict(zip(trips["task"].tolist(), trips["checksum_sent"].tolist(), strict=True))
    found = [
        f"task {task} of client {client} arrived {times} times"
        for (client, task), times in arrivals.items()
        if times > 1
    ]
    accounts = read(path)
    found += [f"{each} twice" for each, times in Counter(accounts).items() if times > 1]
    for each in accounts:
        if not arrivals[each.client, each.task]:
            found.append(f"{each} is lost")
        elif sent.get(each.task) != each.checksum:
            found.append(f"{each} is on record with checksum {sent.get(each.task)}")
    return found
