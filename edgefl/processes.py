"""The cores that this process may use, and the environment of processes that it starts."""

from __future__ import annotations

import os
import site
from collections.abc import Mapping
from pathlib import Path

stopped_by: list[int] = []
"""Signals that have begun to end this process, in order."""
_POOLS = ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM", "NUMBA")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a process of edgefl's that will fork or compute as one core.

    Every pool of threads is of size one. The folder that edgefl is in comes last on ``PYTHONPATH`` if a new
    interpreter would not look there, so that it hides nothing of the user's.

    >>> child_environment({"HOME": "/"})["OMP_NUM_THREADS"]
    '1'
    """
    one = {f"{pool}_NUM_THREADS": "1" for pool in _POOLS}
    made = {**environment, **one, "PYTHONUNBUFFERED": "1"}
    root, given = str(Path(__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")
    known = [*site.getsitepackages(), *filter(None, given.split(os.pathsep))]
    if root not in map(os.path.realpath, known):
        made["PYTHONPATH"] = f"{given}{os.pathsep}{root}" if given else root
    return made
