"""``edgefl reproduce``: a paper's claims, run here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from edgefl.cli.run import named_folder
from edgefl.errors import ConfigError, unknown
from edgefl.lab import PAPERS


def add(app: typer.Typer) -> None:
    app.command()(reproduce)


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="|".join(PAPERS), help="Whose claims.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="In small, on data that is always there: minutes, not hours.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder; default runs/reproduce-PAPER. Runs in it are not repeated.",
            parser=named_folder,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change one key in every run, such as data.name=fashion-mnist."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line a run, no table.")] = False,
) -> None:
    """A paper's claims: its settings, three seeds, the paper's figure beside ours, a verdict each."""
    if paper not in PAPERS:
        raise ConfigError(unknown("paper", paper, PAPERS))
    folder = out or Path("runs") / f"reproduce-{paper}{'-quick' if quick else ''}"

    def say(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    from edgefl.lab import page
    from edgefl.results.run_folder import require_free

    require_free(folder, "findings")
    module = import_module(f"edgefl.lab.{paper}")
    kept: dict[str, Any] = {"paper": paper, "quick": quick, "set": changes or []}
    if hasattr(module, "study"):
        from edgefl.lab.study import run_study

        study = module.study.changed(changes or ())
        try:
            curves = run_study(study, folder, quick=quick, say=say)
        except KeyboardInterrupt:
            from edgefl.cli.run import Interrupted

            raise Interrupted("interrupted; the same command goes on from there") from None
        findings = study.judge(curves)
        rows = page.rows_of(curves)
        notes = study.remarks(quick)
        page.write(folder, study.title, study.citation, findings, rows=rows, notes=notes, extra=kept)
    else:
        if changes:
            raise ConfigError(f"--set {changes[0]}: {paper} has no settings")
        _make(folder)
        findings, pictures = module.findings(quick=quick, say=say)
        page.write(folder, module.TITLE, module.CITATION, findings, pictures=pictures, extra=kept)
    if not quiet:
        from edgefl.results.tables import show

        show(page.table(findings))
        typer.echo(f"{folder / 'report.html'}")


def _make(folder: Path) -> None:
    """Make the folder, so that one that cannot be is refused before the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made: {error.strerror}") from None
