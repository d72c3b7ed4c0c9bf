"""``edgefl doctor``."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def add(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """What this machine can do, and what it cannot and why."""
    from edgefl.doctor import examine

    findings = list(examine())
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
        return

    from edgefl.report.tables import show, table

    show(table(("what", "found", "problem"), findings, title="what this machine can do"))
