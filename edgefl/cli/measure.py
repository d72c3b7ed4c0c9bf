"""``edgefl measure``: the time of each class of operation on a device."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.paths import file_option, put
from edgefl.errors import ConfigError
from edgefl.terminal import say


def measure(
    out: Annotated[Path | None, file_option("JSON file to write; by default it is printed.")] = None,
    ssh: Annotated[str, typer.Option(metavar="USER@HOST", help="Measure there instead of here.")] = "",
    python: Annotated[str, typer.Option(help="Interpreter with torch; over ssh python3 by default.")] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; by default one per core.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, max=9999, help="Time budget; 8 by default.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Rough figures in half a minute.")] = False,
) -> None:
    """Measure the time of each class of operation on a device.

    edgefl profiles fit turns the result into a profile. The kit is one file that needs only Python 3.8 and
    torch: docs/measure.md.
    """
    from edgefl.measure import remote

    if not ssh and not python and find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")
    given = {"--threads": threads, "--minutes": minutes}
    options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    result = remote.run([*options, *(["--quick"] if quick else [])], _tell, ssh, python)
    text = json.dumps(result, indent=1) + "\n"
    if out is None:
        say(text, end="")
        return
    try:
        put(out, text.encode())
    except ConfigError:  # do not lose minutes of measurement
        say(text, end="")
        raise
    say(f"wrote {out}; next: edgefl profiles fit {out} --out {out.with_suffix('.toml')}")


def _tell(line: str) -> None:
    say(line, err=True)
