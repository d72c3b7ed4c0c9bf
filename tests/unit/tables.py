"""Parametrized cases as a text with one case per line: ``input -> message``."""

from __future__ import annotations


def arrows(text: str) -> list[list[str]]:
    """Split each line at ``->``; return its parts, with ``\\n`` replaced by a line break."""
    return [
        [part.strip().replace("\\n", "\n") for part in line.split("->")] for line in text.strip().splitlines()
    ]
