"""Run packages in separate processes, because their threads would not survive the fork of clients."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping

from edgefl.errors import ConfigError, RunError, described
from edgefl.processes import command_of, finding_edgefl
from edgefl.terminal import say


def run_module(
    module: str, *arguments: str, about: str, text: bytes = b"", environment: Mapping[str, str] | None = None
) -> None:
    """Run a module with ``text`` as its standard input and with additional environment variables.

    If the process fails, raises a `ConfigError` that contains ``about`` and the last line that it printed.
    """
    done = subprocess.run(
        command_of(module, *arguments),
        env=finding_edgefl(os.environ | (environment or {})),
        input=text,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        lines = (done.stdout or done.stderr).decode(errors="replace").strip().splitlines()
        raise ConfigError(f"{about}: {lines[-1] if lines else f'exit code {done.returncode}'}")


def end(work: Callable[[], None]) -> int:
    """Call ``work`` and return the process's exit code; if ``work`` fails, print the reason in one line."""
    try:
        work()
    except (ConfigError, RunError) as error:
        say(str(error))
    except Exception as error:  # packages, networks and files raise errors of many kinds
        say(described(error)[:300])
    else:
        return 0
    return 1
