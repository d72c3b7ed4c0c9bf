"""``edgefl bench``: measurements, each beside its limit in the same run."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.run import RESOLVED
from edgefl.errors import ConfigError

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions.")]


def add(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    for command in (aggregate, fidelity, ingest, spawn):
        group.command()(command)
    app.add_typer(group, name="bench", help="Measurements, each beside its limit in the same run.")


def aggregate(json: Json = None, quick: Quick = False) -> None:
    """The server's weighted sum, beside the memory's limit."""
    _measure("aggregate", json, quick)


def fidelity(
    json: Json = None,
    quick: Quick = False,
    slowed: Annotated[
        bool, typer.Option("--slowed", help="The same runs on a host slowed to half, instead.")
    ] = False,
) -> int:
    """How well phones are emulated, against what they declare; exit code 1 unless every bar is held."""
    from edgefl.lab.fidelity import run

    _check(json)
    result = run(json, quick, slowed=slowed, say=lambda text: typer.echo(f"{text} …", err=True))
    return 0 if result["verdict"] == "PASS" else 1


def ingest(json: Json = None, quick: Quick = False) -> None:
    """Updates a second that the server takes in."""
    _measure("ingest", json, quick)


def spawn(json: Json = None, quick: Quick = False) -> None:
    """How fast clients start, and their memory."""
    _measure("spawn", json, quick)


def _check(json: Path | None) -> None:
    """Raise `ConfigError` where the figures could not be written: before minutes are spent on them."""
    if json is None:
        return
    if json.is_dir():
        raise ConfigError(f"--json {json}: a folder, expected a file")
    if not json.absolute().parent.is_dir():
        raise ConfigError(f"--json {json}: no folder {json.parent}")
    if (json.absolute().parent / RESOLVED).is_file():
        raise ConfigError(f"--json {json}: in the folder of a run, whose files are its own; give another")
    if not os.access(json if json.exists() else json.absolute().parent, os.W_OK):
        raise ConfigError(f"--json {json}: cannot be written")


def _measure(what: str, json: Path | None, quick: bool) -> None:
    _check(json)
    import_module(f"edgefl.lab.{what}").run(json, quick)
