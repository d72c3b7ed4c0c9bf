"""Entry point of a run's processes: imports the module of a process, and runs its ``main``.

If the system refuses memory, descriptors or threads, even during the imports, the supervisor receives the
reason as one line. An internal error keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from edgefl.errors import EdgeflError, described, message_of, of_system

INTERNAL = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""Types of internal errors; none of them is caused by a lack of resources."""


def main(channel_fd: int, parent_pid: int, module: str, *arguments: str) -> int:
    """Run ``main`` of ``module`` and return its exit code; if it fails, report why and return 1."""
    try:
        with suppress(FileNotFoundError):  # the folder was deleted
            sys.path.append(os.getcwd())  # for modules that the user's functions import when they are called
        code: int | None = import_module(module).main(channel_fd, parent_pid, *arguments)
        return code or 0
    except Exception as error:
        if os.environ.get("EDGEFL_TRACEBACK") or isinstance(error, INTERNAL):
            raise
        own = message_of(error)
        reason = of_system(error) if isinstance(error, OSError) else own
        reason = described(error) if reason == own else " ".join(reason.split())
        line = f"{module}: {reason[:300]} (EDGEFL_TRACEBACK=1 shows where)"
        # Report inside this block, because ``error`` refers to the frames that keep the channel open.
        _report(channel_fd, own if isinstance(error, EdgeflError) else line)
        return 1


def _report(channel_fd: int, reason: str) -> None:
    from edgefl.host.channel import Channel, Refused
    from edgefl.terminal import printable

    channel: Channel[Any] = Channel.inherit(channel_fd, Any)
    channel.tell(Refused(printable(reason), config=False))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
