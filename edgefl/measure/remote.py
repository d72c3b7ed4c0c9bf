"""Run the measurement kit in a separate process, on this machine or over ssh. The process reads the source of
the kit from its standard input, and writes the result to its standard output as JSON."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from edgefl.errors import ConfigError, RunError
from edgefl.measure import kit

PROGRESS = re.compile(r"^\w+/[\w ]+: .* steps, CV")
"""Pattern of the progress line that the kit prints for each finished part."""


def run(
    options: Sequence[str], tell: Callable[[str], None], ssh: str = "", python: str = ""
) -> dict[str, Any]:
    """Run the kit on this machine, or on the host ``ssh`` (``HOST`` or ``USER@HOST``), and return its result.
    The kit leaves no file on that host.

    ``options`` are the command-line options of the kit, and ``python`` is the Python interpreter. ``tell`` is
    called with a progress line for each part. Raises a one-line `RunError` if the host cannot be reached or
    if torch is not installed there.
    """
    if ssh.startswith("-"):
        raise ConfigError(f"--ssh {ssh}: must be HOST or USER@HOST")
    if ssh:
        command = ["ssh", ssh, f"{python or 'python3'} - {shlex.join(options)}"]
    else:
        command = [python or sys.executable, "-", *options]
    return _json(*_piped(command, tell), ssh or "this machine")


def _piped(command: Sequence[str], tell: Callable[[str], None]) -> tuple[int, str, str]:
    """Run a command with the kit's source as its standard input; return the exit code, the standard output
    and the last line of the standard error.

    ``tell`` is called with each line of the standard error; if the command fails, the last line is left out.
    """
    try:
        with (
            open(kit.__file__) as source,
            subprocess.Popen(
                command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace"
            ) as process,
        ):
            assert process.stdout is not None
            assert process.stderr is not None
            last = ""
            for line in filter(None, map(str.strip, process.stderr)):
                if last:
                    tell(last)
                last = line
                if PROGRESS.search(line):
                    tell(line)
                    last = ""
            code = process.wait()
            if last and not code:
                tell(last)
            return code, process.stdout.read(), last
    except OSError as error:
        raise ConfigError(f"{command[0]}: {error.strerror}") from None


def _json(code: int, output: str, last: str, where: str) -> dict[str, Any]:
    if code:
        raise RunError(f"measuring {where} failed: {last or f'exit code {code}'}")
    start = max(0, output.find("{\n"))  # a host's shell may print a greeting first
    try:
        result: dict[str, Any] = json.loads(output[start:])
    except ValueError:
        raise RunError(f"measuring {where} failed: it printed no JSON: {output[:60]!r}") from None
    return result
