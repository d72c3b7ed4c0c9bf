"""``edgefl profiles`` and ``edgefl calibrate``."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from edgefl.cli import profiles


def add(app: typer.Typer) -> None:
    app.add_typer(profiles.app, name="profiles")
    app.command()(calibrate)


def calibrate(
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again even if the last one holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Measure what this machine computes a second."""
    from edgefl.emulation.calibration import EXPIRES_S
    from edgefl.emulation.calibration import calibrate as measure

    found = measure(force=fresh)
    if as_json:
        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2))
        return

    from edgefl.report.tables import show, table

    rows = [(name, rate.median, unit, 100 * rate.cv) for name, rate, unit in found.measured.rates()]
    title = f"one thread of {found.cpu}\n{found.library}, {found.measured.blas}"
    show(table(("what", ">median", "", ">CV %"), rows, title=title))
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.at_unix_s + EXPIRES_S))
    typer.echo(f"a second is one of CPU time; holds until {until}")
    cache_mib, arrays_mib = found.measured.cache_mib, 3 * found.measured.triad_mib
    if arrays_mib < 2 * cache_mib:
        typer.echo(f"the triad's {arrays_mib:.0f} MiB are not well past the cache of {cache_mib:.0f} MiB")
