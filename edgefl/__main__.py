"""``python -m edgefl`` is the ``edgefl`` command."""

from __future__ import annotations

import os
import signal
import sys

from edgefl import terminal


def main() -> int:
    """Run the command and return its exit code; Ctrl-C is one line from the first of its imports on."""
    _open_what_is_closed()
    try:
        from edgefl.cli import main as command

        return command()
    except KeyboardInterrupt:
        terminal.say("edgefl: interrupted", err=True)
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and said; Python's own end takes a while


def _open_what_is_closed() -> None:
    """Have input, output and error output that are closed lead nowhere, before others get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, errors="replace", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(main())
