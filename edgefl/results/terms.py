"""Explanations of the terms on a page: tooltips of headings, and a list at the page's end."""

from __future__ import annotations

import re
from html import escape

_TERMS = {
    "to target": (r"to target$", "Until the smoothed measure reached the target; the table names both."),
    "slow phones": (
        r"slow phones|^slow classes$",
        "The clients of the slowest profiles, by the declared time of a trip; fixed by the fleet.",
    ),
    "accuracy": (r"^accuracy", "Share of the test examples that the global model classifies right."),
    "applied weight": (
        r"\bweight\b",
        "Share of all weight in the sums that a client's updates had, times the number of clients: "
        "1 is fair.",
    ),
    "client trip": (
        r"^client trips|^trips\b|^trip, s|^whole trip|client trips$",
        "One client's way through a task: download of the model, training, upload of its update.",
    ),
    "computed": (
        r"^computed$",
        "Under the virtual clock trips take exactly what profiles declare: nothing is enforced.",
    ),
    "emulated time": (
        r"emulated time",
        "The phones' time. The wall's may be longer or shorter, by the time scale.",
    ),
    "fidelity": (
        r"^fidelity$",
        "How far achieved times were from what profiles declare; INVALID where that is too far.",
    ),
    "in all": (r"^in all", "Sum of the achieved times over the sum of the declared ones, minus 1."),
    "model within": (
        r"^model within",
        "Factor within which 90% of a real device's times lie around its profile's.",
    ),
    "proportional set size": (
        r"^memory$|^peak mib",
        "Memory of a process in which a page shared by n processes counts as an n-th.",
    ),
    "seen by the server": (
        r"^seen by the server$",
        "From the task's sending to the arrival of its update, as the server measures it.",
    ),
    "staleness": (
        r"staleness",
        "Versions that the server made between a client's download and its update's arrival.",
    ),
    "version": (r"^versions?$", "One global model: each sum of the server's makes the next."),
    "worst tenth": (r"worst tenth", "The tenth of the clients with the lowest value."),
}
"""Term to the pattern of the headings that use it, of which the first match counts, and its explanation."""
TERMS = {term: text for term, (_, text) in sorted(_TERMS.items())}


def term_of(heading: str) -> str | None:
    """The term that a heading names, or None.

    >>> term_of("Staleness / 95%"), term_of("Slow phones' classes"), term_of("Seed")
    ('staleness', 'slow phones', None)
    """
    return next((term for term, (said, _) in _TERMS.items() if re.search(said, heading.lower())), None)


def hint(heading: str) -> str:
    """The HTML attribute that shows a heading's explanation under the pointer; empty if it needs none."""
    term = term_of(heading)
    return "" if term is None else f' title="{escape(TERMS[term])}"'


def glossary(html: str) -> str:
    """A list of the terms whose explanations are somewhere in ``html``; empty if there is none."""
    used = [term for term, text in TERMS.items() if escape(text) in html]
    rows = "".join(f"<dt>{term}</dt><dd>{escape(TERMS[term])}</dd>" for term in used)
    card = f'<h2>Words</h2><div class="grid"><section class="card wide"><dl>{rows}</dl></section></div>'
    return card if used else ""
