"""``edgefl measure`` times each class of operation on a device; ``calibrate`` measures this host's rates."""

from __future__ import annotations

import json
import shlex
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from edgefl.cli.paths import AsJson, file_option, put
from edgefl.errors import ConfigError
from edgefl.terminal import say


def measure(
    out: Annotated[Path | None, file_option("JSON file to write; by default the result is printed.")] = None,
    ssh: Annotated[
        str | None, typer.Option(metavar="USER@HOST", help="Measure there instead of here.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Interpreter with torch; over ssh python3 by default.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; by default one per core.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, max=9999, help="Time budget; 8 by default.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Rough figures in half a minute.")] = False,
) -> None:
    """Measure the time of each class of operation on a device.

    edgefl profiles fit turns the result into a profile. The measuring program is a single file that
    needs only Python 3.8 and torch: see docs/measure.md.
    """
    from edgefl.devices.imports import profile_names
    from edgefl.measure import remote

    for option, value in (("--ssh", ssh), ("--python", python)):
        if value == "":  # from an unset shell variable; the wrong machine would be measured
            raise ConfigError(f"{option} '': must not be empty; leave the option out for its default")
    if out is not None and out.suffix != ".json" and not out.exists():  # devices and pipes exist
        raise ConfigError(f"--out {out}: must end in .json, or edgefl profiles fit would read it as CSV")
    if not ssh and not python and find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")
    given = {"--threads": threads, "--minutes": minutes}
    options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    options += ["--quick"] if quick else []
    result = remote.run(options, lambda line: say(line, err=True), ssh or "", python or "")
    text = json.dumps(result, indent=1) + "\n"
    if out is None:
        say(text, end="")
        return
    try:
        put(out, text.encode())
    except ConfigError:  # print the result, so that minutes of measurement are not lost
        say(text, end="")
        raise
    (name,) = profile_names([out.stem])
    command = ["edgefl", "profiles", "fit", str(out), "--out", str(out.with_name(f"{name}.toml"))]
    say(f"wrote {out}; next: {shlex.join(command)}")


def calibrate(
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again even if the last result is still valid.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's compute rates."""
    from edgefl.devices.code import UNITS
    from edgefl.host.calibration import EXPIRES_S, stored_calibration
    from edgefl.host.calibration import calibrate as measure

    found = measure(force=fresh)
    if as_json:
        say(json.dumps(msgspec.to_builtins(found), indent=2))
        return

    from edgefl.results.tables import show, table

    rows = [(name, rate.median, unit, 100 * rate.cv) for name, rate, unit in found.measured.rates()]
    rows += [
        (f"{name} code", rate.median, UNITS[name], 100 * rate.cv)
        for name, rate in found.measured.code.items()
    ]
    title = f"one thread of {found.cpu}\n{found.library}, {found.measured.blas}"
    show(table(("operations", ">median", "unit", ">variation, %"), rows, title=title))
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.at_unix_s + EXPIRES_S))
    stored = stored_calibration() == found  # an older one may be stored
    valid = f"valid until {until}" if stored else "not stored: no cache folder can be written"
    say(f"rates are per second of CPU time; {valid}")
    cache_mib, arrays_mib = found.measured.cache_mib, 3 * found.measured.triad_mib
    if arrays_mib < 2 * cache_mib:
        say(f"the triad's arrays ({arrays_mib:.0f} MiB) are less than twice the cache ({cache_mib:.0f} MiB),")
        say("so the triad's rate may be partly that of the cache")
