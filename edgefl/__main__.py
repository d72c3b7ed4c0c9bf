"""Makes ``python -m edgefl`` the same as the command ``edgefl``."""

from __future__ import annotations

import os
import signal
import sys

from edgefl import terminal
from edgefl.processes import stopped_by


def main() -> int:
    """Run the command ``edgefl`` and return its exit code. Print only one line after Ctrl-C, even while
    modules are still being imported."""
    _reopen_closed_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup makes a process ignore SIGHUP
            signal.signal(number, _stop)
    try:
        from edgefl.cli import main as command

        code = command()
    except KeyboardInterrupt:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second signal would end the process with a traceback
        terminal.say("edgefl: interrupted", err=True)
        code = 130
    try:
        return 128 + stopped_by[0] if code == 130 and stopped_by else code
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C during exit


def _stop(number: int, _: object) -> None:
    """Treat a signal that arrives outside a run as Ctrl-C. A closed terminal sends SIGHUP twice; the second
    one is ignored."""
    if number == signal.SIGHUP and stopped_by:
        return
    stopped_by.append(number)
    raise KeyboardInterrupt


def _reopen_closed_streams() -> None:
    """Replace closed standard streams with the null device, so that no file gets their file descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, errors="replace", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(main())
