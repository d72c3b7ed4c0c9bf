"""Functions that build edgefl's HTML pages, which need no scripts.

`page` builds a whole page; `stat`, `card`, `figure`, `facts` and `bullets` build its parts, `html_table`
builds its tables, and the module `pictures` draws its pictures. These functions escape text and return HTML.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import NamedTuple
from urllib.parse import quote

from edgefl.results import tables

CSS = resources.files("edgefl.results").joinpath("page.css").read_text(encoding="utf-8")
NO_SCRIPT = "default-src 'none'; style-src 'unsafe-inline'"
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{more}
<title>{title} · edgefl</title>
<style>{css}</style>
</head>
<body>
<main>"""


class Picture(NamedTuple):
    """An inline SVG, its legend (colour roles and their meanings), and its data."""

    svg: str
    keys: Sequence[tuple[str, str]] = ()
    wide: bool = False
    data: Sequence[Sequence[object]] = ()
    """A row of column names, followed by the plotted rows."""


def head(title: str, more: str = "", style: str = "") -> str:
    """Return a page's HTML up to ``<main>``.

    ``more`` is HTML to add to the head, and ``style`` is CSS to add.
    """
    return _HEAD.format(title=escape(title), more=more, css=CSS + style)


def page(
    kicker: str,
    title: str,
    sub: str,
    headline: Iterable[str],
    sections: Mapping[str, Sequence[str]],
    footer: str,
    *,
    lead: str = "",
    banner: str = "",
) -> str:
    """Return a whole HTML page: the cards ``headline``, then each heading of ``sections`` with its cards.

    ``kicker`` is a small line above the title, ``sub`` is a line below it, and ``lead`` is the result in a
    sentence. ``headline``, ``banner`` and the cards are HTML. A section's cards are in two columns; a heading
    without cards is left out. The page ends with a glossary of its terms. Undecodable bytes in
    file names and command arguments become ``?``.
    """
    policy = f'<meta http-equiv="Content-Security-Policy" content="{NO_SCRIPT}">'
    body = [
        head(title, policy),
        f'<header><p class="kicker">{escape(kicker)}</p><h1>{escape(title)}</h1>',
        f'<p class="sub">{escape(sub)}</p></header>',
        f'<section class="banner">{banner}</section>' if banner else "",
        f'<p class="lead">{escape(lead)}</p>' if lead else "",
        f'<section class="cards">{cards}</section>' if (cards := "".join(headline)) else "",
    ]
    grids = ((escape(name), "".join(cards)) for name, cards in sections.items() if cards)
    body += [f'<h2>{name}</h2><div class="grid">{cards}</div>' for name, cards in grids]
    body.append(glossary("".join(body)))
    body.append(f"<footer>{escape(footer)}</footer>\n</main>\n</body>\n</html>\n")
    return "\n".join(body).encode(errors="replace").decode()


def stat(name: str, value: str, note: str = "", tone: str = "") -> str:
    """Return a card with a headline metric; words are set in a smaller font than numbers.

    ``tone`` is "", "good" or "bad".
    """
    word = "" if value[:1].isdigit() or value == "–" or value.isupper() else " word"
    return (
        f'<div class="card"><p class="stat"><span{hint(name)}>{escape(name)}</span></p>'
        f'<p class="value {tone}{word}">{escape(value)}</p><p class="note">{escape(note)}</p></div>'
    )


def card(title: str, about: str, inner: str, *, wide: bool = True) -> str:
    """Return a card around the HTML ``inner``."""
    name = f"<h3><span{hint(title)}>{escape(title)}</span></h3>" if title else ""
    about = f'<p class="about">{escape(about)}</p>' if about else ""
    return f'<section class="card{" wide" if wide else ""}">{name}{about}{inner}</section>'


def bullets(items: Iterable[str]) -> str:
    """Return the strings as an HTML list, or an empty string if ``items`` is empty."""
    rows = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>{rows}</ul>" if rows else ""


def facts(rows: Mapping[str, str]) -> str:
    """Return an HTML definition list of names and values; names without a value are left out."""
    return definitions((escape(name), escape(value)) for name, value in rows.items() if value)


def definitions(rows: Iterable[tuple[str, str]]) -> str:
    """Return an HTML definition list; the names and values must already be HTML."""
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{value}</dd>' for name, value in rows)}</dl>"


def figure(title: str, about: str, picture: Picture | None, empty: str = "Nothing was recorded.") -> str:
    """Return a card with a picture, its legend, an explanation and a link to its data."""
    if picture is None:
        return card(title, empty, "", wide=False)
    keys = [f'<i style="background:var(--{role})"></i>{escape(text)}' for role, text in picture.keys]
    legend = f'<ul class="keys"><li>{"</li><li>".join(keys)}</li></ul>' if keys else ""
    scrolls = ' role="group" aria-label="Picture" tabindex="0"' if picture.wide else ""
    drawn = f'{legend}<div class="picture"{scrolls}>{picture.svg}</div>{_download(title, picture.data)}'
    return card(title, about, drawn, wide=picture.wide)


def _download(title: str, data: Sequence[Sequence[object]]) -> str:
    """Return a link that contains a picture's data as CSV."""
    if not data:
        return ""
    file = io.StringIO()
    rows = ([f"{cell:.10g}" if isinstance(cell, float) else cell for cell in row] for row in data)
    csv.writer(file, lineterminator="\n").writerows(rows)
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    content = quote(file.getvalue(), safe=" ,.:;()/'", errors="replace")
    link = f'href="data:text/csv;charset=utf-8,{escape(content)}" download="{name}.csv"'
    return f'<p class="data"><a {link}>Data (CSV)</a></p>'


def html_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, wrap: Sequence[int] | None = None
) -> str:
    """Return an HTML table, which scrolls if its card is too narrow. Cells are escaped.

    A name in ``columns`` that starts with ``>`` marks a column of numbers. ``wrap`` holds the indices of the
    columns in which long words are broken, if possible after ``::``; by default, only in the last
    column. If there are several such columns, a narrow screen shows each row as a block. Columns that have no
    value in any row are left out, except the first column.
    """
    cells = [[tables.figure(value) for value in row] for row in rows]
    wrapped = (len(columns) - 1,) if wrap is None else wrap
    stacked = len(wrapped) > 1
    shown = [
        k for k in range(len(columns)) if k == 0 or not cells or any(row[k] not in ("", "–") for row in cells)
    ]

    def role(name: str) -> str:  # screen readers need the roles if CSS shows rows as blocks
        return f' role="{name}"' if stacked else ""

    def heading(place: int) -> str:
        name = columns[place].lstrip(">")
        kind = ' class="n"' if columns[place].startswith(">") else ""
        unbroken = re.sub(r", (\S{1,6})$", ",\N{NO-BREAK SPACE}\\1", name)  # do not break before a unit
        return f'<th scope="col"{role("columnheader")}{kind}{hint(name)}>{escape(unbroken)}</th>'

    def cell(place: int, value: str) -> str:
        number = columns[place].startswith(">")
        kind = ' class="n"' if number else ' class="text"' if place in wrapped else ""
        kind = ' class="n none"' if stacked and value == "–" else kind
        name = f' data-name="{escape(columns[place].lstrip(">"))}"' if stacked else ""
        return f"<td{role('cell')}{kind}{name}>{escape(value).replace('::', '::<wbr>')}</td>"

    head = "".join(map(heading, shown))
    body = "".join(f"<tr{role('row')}>{''.join(cell(k, row[k]) for k in shown)}</tr>" for row in cells)
    kind, group = (' class="stack"' if stacked else ""), role("rowgroup")
    return (
        f'<div class="scroll" role="group" aria-label="Table" tabindex="0"><table{kind}{role("table")}>'
        f"<thead{group}><tr{role('row')}>{head}</tr></thead><tbody{group}>{body}</tbody></table></div>"
    )


_TERMS = {
    "to target": (
        r"to target$",
        "Time or trips until the smoothed metric reached the target, which the card's title states.",
    ),
    "slow phones": (
        r"slow phones",
        "The clients of the fleet's slowest profiles, ranked by the declared time of a trip.",
    ),
    "accuracy": (r"^accuracy", "Share of the evaluated examples that the global model classifies correctly."),
    "applied weight": (
        r"(?<!share of )\bweight\b",
        "A client's share of the total weight in all sums, multiplied by the number of clients: 1 is fair.",
    ),
    "client trip": (
        r"^client trips|^trips\b|^median trip|^whole trip|client trips$",
        "One client's work on a task: download of the model, training, and upload of the update.",
    ),
    "emulated time": (
        r"emulated time",
        "Time on the emulated phones. The time scale is the wall time per emulated second.",
    ),
    "fidelity": (
        r"^fidelity$",
        "How far achieved times were from declared ones; INVALID if the errors exceed the limits.",
    ),
    "error of the total": (
        r"^error of the total",
        "Sum of the achieved times divided by the sum of the declared times, minus 1.",
    ),
    "device model within": (
        r"^device model within",
        "Factor within which 90% of a real device's times agree with the times of its profile.",
    ),
    "proportional set size": (
        r"^memory$|^peak memory",
        "Memory of a process; a page that n processes share counts as 1/n of a page for each.",
    ),
    "seen by the server": (
        r"^seen by the server$",
        "Time from sending a task to the arrival of its update, as the server measures it.",
    ),
    "staleness": (
        r"staleness",
        "Number of versions that the server made between a client's download and the arrival of its update.",
    ),
    "version": (
        r"^versions?$",
        "One state of the global model. Each sum at the server produces the next version.",
    ),
    "worst tenth": (r"worst tenth", "The tenth of the clients with the worst values."),
}
"""For each term, a pattern for the headings that the term explains, and the explanation. If several patterns
match a heading, the first is used."""
TERMS = {term: text for term, (_, text) in sorted(_TERMS.items())}


def term_of(heading: str) -> str | None:
    """Return the term that explains a heading, or None.

    >>> term_of("Staleness / 95%"), term_of("Slow phones' classes"), term_of("Share of weight")
    ('staleness', 'slow phones', None)
    """
    return next((term for term, (pattern, _) in _TERMS.items() if re.search(pattern, heading.lower())), None)


def hint(heading: str) -> str:
    """Return the HTML attribute for a tooltip that explains a heading; "" if no term explains it."""
    term = term_of(heading)
    return "" if term is None else f' title="{escape(TERMS[term])}"'


def glossary(html: str) -> str:
    """Return an HTML glossary of the terms whose explanations are in ``html``; "" if there are none."""
    used = [term for term, text in TERMS.items() if escape(text) in html]
    rows = "".join(f"<dt>{term}</dt><dd>{escape(TERMS[term])}</dd>" for term in used)
    card = f'<h2>Terms</h2><div class="grid"><section class="card wide"><dl>{rows}</dl></section></div>'
    return card if used else ""
