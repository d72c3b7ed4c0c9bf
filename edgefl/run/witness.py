"""The witness: a log of acknowledged updates that the clients write, used to test the record.

With ``EDGEFL_WITNESS=FILE`` in a run's environment, under the wall clock every client appends a line to FILE
before it sends `Trained`, and another when it receives its next task, which acknowledges the update:

    done CLIENT TASK CHECKSUM
    acknowledged CLIENT TASK

The checksum is that of the update in its slot, a decimal number of 64 bits. Each line is one write to a file
opened for appending, so a kill cannot tear it. Without the variable there is no log.
"""

from __future__ import annotations

import os

VARIABLE = "EDGEFL_WITNESS"


class Witness:
    """A client's log writer; does nothing without the variable."""

    def __init__(self, client: int) -> None:
        self._client = client
        self._open: int | None = None
        path = os.environ.get(VARIABLE)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600) if path else None

    def done(self, task: int, checksum: int) -> None:
        """Log that the client is about to send `Trained`."""
        if self._fd is not None:
            self._open = task
            os.write(self._fd, f"done {self._client} {task} {checksum}\n".encode())

    def next_task(self) -> None:
        """Log that the client received its next task."""
        if self._fd is not None and self._open is not None:
            os.write(self._fd, f"acknowledged {self._client} {self._open}\n".encode())
            self._open = None
