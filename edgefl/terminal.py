"""Print text to the terminal. Control characters, which names and error messages may contain, are
replaced."""

from __future__ import annotations

import os
import sys


def printable(text: str, keep: str = "") -> str:
    r"""Replace control characters, which a terminal could interpret, with ``?``, except those in ``keep``.

    >>> printable("pixel\x1b[2J-4\n"), printable("a\n\tb", keep="\n\t")
    ('pixel?[2J-4?', 'a\n\tb')
    """
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


def say(text: object, *, err: bool = False, end: str = "\n") -> None:
    """Print text to standard output, or to standard error if ``err`` is True."""
    print(printable(str(text), "\n\t"), end=end, file=sys.stderr if err else sys.stdout, flush=True)


def can_redraw() -> bool:
    """Return True if standard error is a terminal that can redraw lines."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
