"""Arguments and options that several commands share. Files and folders are checked before a command runs."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from edgefl.errors import ConfigError, RunError
from edgefl.terminal import say

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def run_folder(text: str) -> Path:
    """Parse an argument that names a run's folder. Raises `ConfigError` if it contains no run."""
    from edgefl.results.run_folder import EXPERIMENT_FILE, refuse_sweep

    folder = _open_to_user(Path(text))
    if not folder.exists():
        raise ConfigError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; expected the folder of a run")
    refuse_sweep(folder)
    if not any((folder / name).is_file() for name in (EXPERIMENT_FILE, "record.sqlite")):
        raise ConfigError(f"{folder} holds no run ({EXPERIMENT_FILE} is missing)")
    return folder


def run_or_sweep(text: str) -> Path:
    """Parse an argument that names the folder of a run or a sweep. Raises `ConfigError` for other folders."""
    from edgefl.results.run_folder import is_sweep

    folder = _open_to_user(Path(text))
    return folder if is_sweep(folder) else run_folder(text)


def _open_to_user(path: Path) -> Path:
    """Return the path. Raises `ConfigError` if the permissions of a folder hide it or its files."""
    try:
        hidden = path.is_dir() and not os.access(path, os.X_OK)
    except PermissionError:
        hidden = True
    if hidden:
        raise ConfigError(f"{path}: permission denied; is it another user's?")
    return path


def named_folder(text: str) -> Path:
    """Parse an option or argument DIR that names a folder. Raises `ConfigError` for an empty name."""
    if not text:
        raise ConfigError("DIR '': must be the name of a folder")
    return Path(text)


def new_file(text: str) -> Path:
    """Parse the value of ``--out``: the name of a new file, a device or a pipe.

    Raises `ConfigError` if a regular file of this name exists.
    """
    from edgefl.files import is_replaceable

    if Path(text).exists() and is_replaceable(Path(text)):
        raise ConfigError(f"--out {text}: the file exists; remove it or name another file")
    return Path(text)


def require_finite(option: str, number: float | None) -> None:
    """Raise `ConfigError` if an option's number is infinite or NaN, which is within all of typer's bounds."""
    if number is not None and not math.isfinite(number):
        raise ConfigError(f"{option} {number:g}: must be a finite number")


def put(path: Path, content: bytes) -> None:
    """Write the file that ``--out`` names, and create missing folders. Raises `ConfigError` if that fails."""
    from edgefl.files import write_bytes

    try:
        write_bytes(path, content)
    except RunError as error:
        raise ConfigError(f"--out {error}") from None


def put_or_print(path: Path | None, content: bytes) -> None:
    """Write the content to the file ``path``, and print the path; print the content if the path is None."""
    if path is not None:
        put(path, content)
        say(f"wrote {path}")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(content)


def folder_option(help_: str) -> Any:
    """Return an option for a folder, whose name must not be empty; ``help_`` is its help text."""
    return typer.Option(metavar="DIR", help=help_, parser=named_folder)


def file_option(help_: str) -> Any:
    """Return an option for a file that must not exist yet; ``help_`` is its help text."""
    return typer.Option(metavar="FILE", help=help_, parser=new_file)


def figures_file(text: str) -> Path:
    """Parse the value of ``--json``, the name of a file that is written when the command ends.

    Raises `ConfigError` if the file could not be written then.
    """
    from edgefl.files import is_replaceable
    from edgefl.results.run_folder import EXPERIMENT_FILE

    json, folder = Path(text), Path(text).absolute().parent
    if json.is_dir():
        raise ConfigError(f"--json {json} is a folder; expected a file")
    if not folder.is_dir():
        raise ConfigError(f"--json {json}: {json.parent} is not an existing folder")
    if (folder / EXPERIMENT_FILE).is_file():
        raise ConfigError(f"--json {json} is in the folder of a run, where only edgefl writes; name another")
    written = [json] if json.exists() else []
    if is_replaceable(json):
        written.append(folder)
    if not all(os.access(path, os.W_OK) for path in written):
        raise ConfigError(f"--json {json}: cannot be written")
    return json
