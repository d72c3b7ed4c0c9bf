"""The cores that this process may use, the signals that have asked it to end, and how modules of edgefl are
run as programs."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

stopped_by: list[int] = []
"""Numbers of the signals that have asked this process to end, in the order of arrival."""


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of edgefl as a program.

    The option -P keeps the current folder out of ``sys.path``, so that a file of the user with the name of an
    installed module does not replace it. Programs that the user's code starts would inherit PYTHONSAFEPATH,
    but not this option. `edgefl.host.child` appends the current folder for the user's code.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def finding_edgefl(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a program that imports edgefl.

    If a new interpreter would not find edgefl, its folder is appended to ``PYTHONPATH`` as the last entry,
    so that it does not hide the user's modules.
    """
    made = dict(environment)
    root, given = str(Path(__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")
    known = [*site.getsitepackages(), *filter(None, given.split(os.pathsep))]
    if root not in map(os.path.realpath, known):
        made["PYTHONPATH"] = f"{given}{os.pathsep}{root}" if given else root
    return made
