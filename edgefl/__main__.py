"""``python -m edgefl`` is the ``edgefl`` command."""

from __future__ import annotations

import signal
import sys

from edgefl import terminal


def main() -> int:
    """Run the command and return its exit code; Ctrl-C is one line from the first of its imports on."""
    try:
        from edgefl.cli import main as command

        return command()
    except KeyboardInterrupt:
        terminal.say("edgefl: interrupted", err=True)
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and said; Python's own end takes a while


if __name__ == "__main__":
    sys.exit(main())
