"""A badge for a README: an SVG file, or the JSON that shields.io's endpoint badge reads."""

from __future__ import annotations

from html import escape

from edgefl.files import json_text
from edgefl.regression.gate import GateResults

LABEL = "edgefl"
_COLOURS = {"red": "#c0392b", "orange": "#b8860b", "brightgreen": "#2e7d32"}
_CHARACTER = 6.6
"""Width of a character in pixels, at a font size of 11 px."""


def colour(results: GateResults) -> str:
    """Return the badge's colour, by its name at shields.io.

    The badge is red if something failed or nothing was measured, else orange if a function could not be
    judged, else green.
    """
    if results.red:
        return "red"
    return "orange" if any(row.outcome == "NOT JUDGED" for row in results.rows) else "brightgreen"


def endpoint(results: GateResults) -> str:
    """Return the JSON of shields.io's endpoint badge.

    >>> print(endpoint(GateResults()))
    {
      "schemaVersion": 1,
      "label": "edgefl",
      "message": "nothing was measured",
      "color": "red"
    }
    <BLANKLINE>
    """
    shown = {"schemaVersion": 1, "label": LABEL, "message": results.headline, "color": colour(results)}
    return json_text(shown)


def svg(results: GateResults) -> str:
    """Return the badge as SVG."""
    left, right = (len(text) * _CHARACTER + 12 for text in (LABEL, results.headline))
    name, message = escape(LABEL), escape(results.headline)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right:.0f}" height="20" role="img" '
        f'aria-label="{name}: {message}"><title>{name}: {message}</title>'
        f'<rect width="{left:.0f}" height="20" fill="#444"/>'
        f'<rect x="{left:.0f}" width="{right:.0f}" height="20" fill="{_COLOURS[colour(results)]}"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{left / 2:.0f}" y="14">{name}</text>'
        f'<text x="{left + right / 2:.0f}" y="14">{message}</text></g></svg>\n'
    )
