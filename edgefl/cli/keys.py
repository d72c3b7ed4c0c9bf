"""``edgefl keys``: the keys of an experiment file; ``edgefl keygen``: key pairs for hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.terminal import say


def keys(
    which: Annotated[
        str, typer.Argument(metavar="[TABLE]", help="fleet, training, stop …, or strategy.NAME.")
    ] = "",
) -> None:
    """List the keys of an experiment, or of one table or strategy."""
    from edgefl.config import keys as known
    from edgefl.results import tables

    rows = []
    for key in known.keys(which):
        meaning = key.meaning.replace("``", "")
        rows.append((key.name, key.default or "–", f"{meaning} Allowed: {key.allowed}."))
    tables.show(tables.table(("key", "default", "meaning"), rows))


def keygen(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the keys, created if missing.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Hosts that may join.")] = None,
) -> None:
    """Create key pairs for the server and the hosts that may join."""
    from edgefl.zeromq.keys import make

    for path in make(folder, names or []):
        say(str(path))
