"""Parametrized cases as a text with a case per line: ``input -> message``."""

from __future__ import annotations


def arrows(text: str) -> list[list[str]]:
    """Return the parts of each line, in which ``\\n`` is a line break."""
    return [
        [part.strip().replace("\\n", "\n") for part in line.split("->")] for line in text.strip().splitlines()
    ]
