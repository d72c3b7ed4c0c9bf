"""Tables of refusals as text: what is given, an arrow, what is said."""

from __future__ import annotations


def arrows(text: str) -> list[list[str]]:
    """The arrows' parts of each line, ``\\n`` in them as a new line."""
    return [
        [part.strip().replace("\\n", "\n") for part in line.split("->")] for line in text.strip().splitlines()
    ]
