"""The page kit: the parts of every HTML page of edgefl, which needs no scripts.

`page` makes a whole page; `stat`, `card`, `figure`, `facts` and `bullets` its parts, `tables.html_table` its
tables, and `pictures` its pictures. They escape their texts and return HTML.
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

from edgefl.results.terms import glossary, hint

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
    """The plotted rows after a row of column names."""


def head(title: str, more: str = "", style: str = "") -> str:
    """The start of a page up to ``<main>``; ``more`` is HTML of the head, ``style`` CSS besides `CSS`."""
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
    """A whole HTML page: figures in ``headline``, then cards in two columns under each heading.

    ``lead`` is the result in a sentence. ``headline``, ``sections`` and ``banner`` are HTML. Headings without
    cards are left out. A glossary of the terms used follows at the end.
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
    return "\n".join(body)


def stat(name: str, value: str, note: str = "", tone: str = "") -> str:
    """One headline card; ``tone`` is "", "good" or "bad". Words are smaller than numbers."""
    word = "" if value[:1].isdigit() or value in ("–", "VALID", "INVALID") else " word"
    return (
        f'<div class="card"><p class="stat"><span{hint(name)}>{escape(name)}</span></p>'
        f'<p class="value {tone}{word}">{escape(value)}</p><p class="note">{escape(note)}</p></div>'
    )


def card(title: str, about: str, inner: str, *, wide: bool = True) -> str:
    """A card around the HTML ``inner``."""
    name = f"<h3><span{hint(title)}>{escape(title)}</span></h3>" if title else ""
    about = f'<p class="about">{escape(about)}</p>' if about else ""
    return f'<section class="card{" wide" if wide else ""}">{name}{about}{inner}</section>'


def bullets(items: Iterable[str]) -> str:
    """A list of texts; empty for none."""
    rows = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>{rows}</ul>" if rows else ""


def facts(rows: Mapping[str, str]) -> str:
    """Names and their values; names without a value are left out."""
    return definitions((escape(name), escape(value)) for name, value in rows.items() if value)


def definitions(rows: Iterable[tuple[str, str]]) -> str:
    """A definition list of pairs of HTML."""
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{value}</dd>' for name, value in rows)}</dl>"


def figure(title: str, about: str, picture: Picture | None, empty: str = "Nothing was recorded.") -> str:
    """A card with a picture, its legend, an explanation and its data."""
    if picture is None:
        return card(title, empty, "", wide=False)
    keys = [f'<i style="background:var(--{role})"></i>{escape(text)}' for role, text in picture.keys]
    legend = f'<ul class="keys"><li>{"</li><li>".join(keys)}</li></ul>' if keys else ""
    drawn = f'{legend}<div class="picture">{picture.svg}</div>{_download(title, picture.data)}'
    return card(title, about, drawn, wide=picture.wide)


def _download(title: str, data: Sequence[Sequence[object]]) -> str:
    """A link that contains a picture's data as CSV."""
    if not data:
        return ""
    file = io.StringIO()
    rows = ([f"{cell:.10g}" if isinstance(cell, float) else cell for cell in row] for row in data)
    csv.writer(file, lineterminator="\n").writerows(rows)
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    content = quote(file.getvalue(), safe=" ,.:;()#/'")
    link = f'href="data:text/csv;charset=utf-8,{escape(content)}" download="{name}.csv"'
    return f'<p class="data"><a {link}>Data (CSV)</a></p>'
