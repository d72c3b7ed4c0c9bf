"""Runs the measuring kit in a process of its own, here or over ssh: the kit goes in, its JSON comes out."""

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

PROGRESS = re.compile(r"^\S+/\S+: .* steps, CV")
"""A part of the kit that is done."""


def run(
    options: Sequence[str], tell: Callable[[str], None], ssh: str = "", python: str = ""
) -> dict[str, Any]:
    """Run the kit on this machine, or on ``ssh`` (user@host), and return what it says; nothing is left there.

    ``python`` is the interpreter; ``tell`` gets a line for each part. Raises `RunError` in one line for a
    host that cannot be reached or has no torch.
    """
    if ssh.startswith("-"):
        raise ConfigError(f"--ssh {ssh}: must be HOST or USER@HOST")
    if ssh:
        command = ["ssh", ssh, f"{python or 'python3'} - {shlex.join(options)}"]
    else:
        command = [python or sys.executable, "-", *options]
    return _json(*_piped(command, tell), ssh or "here")


def _piped(command: Sequence[str], tell: Callable[[str], None]) -> tuple[int, str, str]:
    """The command's exit code, output and, if it failed, last line of errors, which is not told."""
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
    try:
        said: dict[str, Any] = json.loads(output)
    except ValueError:
        raise RunError(f"measuring {where} failed: it printed no JSON: {output[:60]!r}") from None
    return said
