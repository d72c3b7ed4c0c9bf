"""What the user says of an import beyond its file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

CLIENTS = 100


class Asked(NamedTuple):
    """What a format has no use for must not be given: `formats.read` sees to it."""

    name: str | None = None
    """Id of the one profile, or of the fleet, that is made; by default the file's name."""
    only: tuple[str, ...] = ()
    """Of a file that holds many, these alone: the file's own names."""
    clients: int | None = None
    """Of a file that holds very many clients, so many; by default `CLIENTS`."""
    base: str | None = None
    """The device profile that a file without computing rates completes."""
    up: Path | None = None
    """The trace of the other way."""
