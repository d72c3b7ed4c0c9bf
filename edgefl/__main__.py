"""``python -m edgefl`` is the ``edgefl`` command."""

from __future__ import annotations

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


if __name__ == "__main__":
    sys.exit(main())
