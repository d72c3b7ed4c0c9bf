"""Writing the baselines of a whole session, once, by the process that has all results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from edgefl.errors import ConfigError
from edgefl.regression.baseline import Entry, save


def save_all(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Save every row that carries an entry; a line for each file."""
    files: dict[str, list[Entry]] = {}
    for row in rows:
        if row["entry"]:
            files.setdefault(row["file"], []).append(msgspec.convert(row["entry"], Entry))
    notes = []
    for file, entries in sorted(files.items()):
        try:
            save(Path(file), entries)
            notes.append(f"saved {len(entries)} in {file}")
        except (ConfigError, OSError) as error:
            notes.append(f"NOT saved: {error}")
    return notes
