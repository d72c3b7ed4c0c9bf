"""The first module of a run's processes: imports the one that a process is to be, and runs its ``main``.

Memory, descriptors or threads that the machine refuses are one line that the supervisor is told, even where
the imports fail for want of them. A mistake of ours keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from edgefl.errors import EdgeflError, of_system

OURS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""Errors that a mistake of ours makes, and no lack of anything."""


def main(channel_fd: int, parent_pid: int, module: str, *arguments: str) -> int:
    """Be ``module``; its exit code, or 1 once the supervisor knows why it cannot be."""
    try:
        code: int | None = import_module(module).main(channel_fd, parent_pid, *arguments)
        return code or 0
    except Exception as error:
        if os.environ.get("EDGEFL_TRACEBACK") or isinstance(error, OURS):
            raise
        told = of_system(error) if isinstance(error, OSError) else str(error)
        if told == str(error):
            told = f"{type(error).__name__}: {error}"
        told = " ".join(told.split()).removesuffix(":")
        said = f"{module}: {told[:300]} (EDGEFL_TRACEBACK=1 shows where)"
        # While the error holds the frames that hold the channel open.
        _tell(channel_fd, str(error) if isinstance(error, EdgeflError) else said)
        return 1


def _tell(channel_fd: int, what: str) -> None:
    from edgefl.host.channel import Channel, Refused
    from edgefl.terminal import printable

    channel: Channel[Any] = Channel.inherit(channel_fd, Any)
    channel.tell(Refused(printable(what), config=False))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
