"""``edgefl compare``, ``report``, ``trace`` and ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.run import named_folder, require_run


def add(app: typer.Typer) -> None:
    app.command()(compare)
    app.command()(report)
    app.command()(trace)
    app.command()(verify)


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write summary.json, report.html and trace.json here.", parser=named_folder
        ),
    ] = None,
) -> None:
    """Runs side by side: a table, and with --out a picture."""
    for folder in folders:
        require_run(folder)

    from edgefl.results.compare import compare as beside
    from edgefl.results.tables import show

    show(beside(folders, out))


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The run's folder.")],
) -> None:
    """Write a run's HTML report and say where it is."""
    require_run(folder)

    from edgefl.results.report import write_report

    typer.echo(write_report(folder))


def trace(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The run's folder.")],
) -> None:
    """Write a run's Perfetto timeline and say where it is."""
    require_run(folder)

    from edgefl.results.trace import write_trace

    typer.echo(write_trace(folder))


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The run's folder.")],
) -> None:
    """Make the run again from its journal and compare every update and the model."""
    require_run(folder)

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from edgefl.run.verify import verify as again

    columns = (TextColumn("versions"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("versions", total=None)
        found = again(folder, lambda made, of: progress.update(bar, completed=made, total=of))
    if found.updates:
        typer.echo(f"same: {found.updates:,} updates, {found.versions:,} versions")
    else:
        typer.echo("no update arrived in this run; its model is still the first one, and that is the same")
    typer.echo(f"model_sha256 {found.model_sha256}")
