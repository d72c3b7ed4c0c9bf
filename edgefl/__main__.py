"""``python -m edgefl`` is the ``edgefl`` command."""

from __future__ import annotations

import os
import signal
import sys

from edgefl import terminal
from edgefl.processes import stopped_by


def main() -> int:
    """Run the command and return its exit code. Ctrl-C prints one line, even during imports."""
    _reopen_closed_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # set by nohup
            signal.signal(number, _stop)
    try:
        from edgefl.cli import main as command

        code = command()
    except KeyboardInterrupt:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second signal would end it with a traceback
        terminal.say("edgefl: interrupted", err=True)
        code = 130
    try:
        return 128 + stopped_by[0] if code == 130 and stopped_by else code
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C during exit


def _stop(number: int, _: object) -> None:
    """Outside a run, treat a signal as if it were Ctrl-C. A closing terminal sends SIGHUP twice: ignore the
    second."""
    if number == signal.SIGHUP and stopped_by:
        return
    stopped_by.append(number)
    raise KeyboardInterrupt


def _reopen_closed_streams() -> None:
    """Open the null device in place of closed standard streams, so that no file gets their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, errors="replace", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(main())
