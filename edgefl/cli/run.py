"""``edgefl run`` and ``edgefl resume``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl import new_run_folder
from edgefl.errors import ConfigError, EdgeflError

if TYPE_CHECKING:
    from edgefl.experiment import Experiment

RESOLVED = "experiment.toml"
"""The resolved experiment in a run's folder: what makes a folder a run."""


class Interrupted(EdgeflError):
    """Ctrl-C came while a run was on its way."""


def named_folder(text: str) -> Path:
    """The folder that an option names. `ConfigError` for an empty name, which would be this folder."""
    if not text:
        raise ConfigError("--out '': no name, expected a folder")
    return Path(text)


def add(app: typer.Typer) -> None:
    app.command()(run)
    app.command()(resume)


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The experiment, a TOML file.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as strategy.name=fedbuff."),
    ] = None,
    clock: Annotated[str | None, typer.Option(metavar="wall|virtual", help="Beats clock.kind.")] = None,
    seed: Annotated[int | None, typer.Option(help="Beats seed.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the run; default runs/NAME-DATE-TIME.", parser=named_folder
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")] = False,
) -> None:
    """Run one experiment."""
    from edgefl import config

    experiment = config.load(file, set_ or (), seed=seed, clock=clock)
    folder = _folder(out, experiment)

    from edgefl.run import supervisor

    try:
        result = supervisor.run(experiment, folder, quiet, file.parent.absolute())
    except KeyboardInterrupt:
        raise _interrupted(folder) from None
    _finish(result.summary(), folder, quiet)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The run's folder.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")] = False,
) -> None:
    """Carry on with a run after a crash or Ctrl-C.

    A run that was killed before its first checkpoint starts again.
    """
    require_run(folder)

    from edgefl.run import supervisor

    try:
        result = supervisor.resume(folder, quiet)
    except KeyboardInterrupt:
        raise _interrupted(folder) from None
    _finish(result.summary(), folder, quiet)


def require_run(folder: Path) -> None:
    """Raise `ConfigError` if ``folder`` holds no run."""
    if not folder.exists():
        raise ConfigError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: a file, expected the folder of a run")
    if not (folder / RESOLVED).is_file():
        raise ConfigError(f"{folder}: no run in it ({RESOLVED} is missing)")


def _folder(out: Path | None, experiment: Experiment) -> Path:
    """Where the run goes: a folder that is new or empty."""
    if out is None:
        return new_run_folder(experiment.name)
    if (out / RESOLVED).is_file():
        raise ConfigError(f"--out {out}: holds a run; give another folder, or carry on: edgefl resume {out}")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: a file, expected a new or empty folder")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: not empty, expected a new or empty folder")
    return out


def _interrupted(folder: Path) -> Interrupted:
    if (folder / RESOLVED).is_file():
        return Interrupted(f"interrupted; carry on with: edgefl resume {folder}")
    return Interrupted("interrupted before anything was written")


def _finish(summary: dict[str, Any], folder: Path, quiet: bool) -> None:
    """Say how it went. A figure of an overloaded emulation is not given without saying so, even if quiet."""
    fidelity = summary.get("fidelity") or {}
    if fidelity.get("valid") is False:
        why = (fidelity.get("reasons") or ["the emulation missed its bounds"])[0]
        typer.echo(f"edgefl: INVALID: {why}; see fidelity in summary.json", err=True)
    if not quiet:
        from edgefl.results.tables import show, summary_table

        show(summary_table(summary, folder))
