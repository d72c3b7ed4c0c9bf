"""``edgefl gate``: show results of ``pytest --edgefl-json`` in a comment or a badge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.paths import put_or_print
from edgefl.errors import ConfigError

app = typer.Typer(help="Show results of pytest --edgefl-json in a comment or a badge.", no_args_is_help=True)
Results = Annotated[Path, typer.Argument(metavar="FILE", help="Results of pytest --edgefl-json FILE.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write to a file, not to stdout.")]


@app.command()
def comment(file: Results, out: Out = None) -> None:
    """Print Markdown for a comment on a pull request."""
    from edgefl.regression.gate import load_results
    from edgefl.regression.markdown import comment as text

    put_or_print(out, text(load_results(file)).encode())


@app.command()
def badge(file: Results, out: Out = None) -> None:
    """Print a badge for shields.io, or write an SVG file."""
    from edgefl.regression.badge import endpoint, svg
    from edgefl.regression.gate import load_results

    results = load_results(file)
    if out is not None and out.suffix not in (".svg", ".json"):
        raise ConfigError(f"--out {out}: a badge is a .svg or .json file")
    draw = svg if out is not None and out.suffix == ".svg" else endpoint
    put_or_print(out, draw(results).encode())
