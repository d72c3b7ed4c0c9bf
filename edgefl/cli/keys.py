"""``edgefl keys``: what an experiment's file may say, each key with its default and meaning."""

from __future__ import annotations

from typing import Annotated

import typer


def add(app: typer.Typer) -> None:
    app.command()(keys)


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
