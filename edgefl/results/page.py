"""The report page's frame: HTML pieces and the style sheet, self-contained, readable without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from edgefl.results.style import Key, Picture

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --edge: #e4e4de; --ink: #16181d; --muted: #686b73; --line: #e6e6e1;
  --band: #dcefe4; --good: #147a45; --good-soft: #e0f2e7; --bad: #c02f2f; --bad-soft: #fbe6e4; --link: #1f63b8;
  --down: #86b6ef; --compute: #2a6fc9; --up: #e9a13b;
  --c1: #2a6fc9; --c2: #df6a2c; --c3: #1b9a74; --c4: #7a5bd0; --c5: #cf9a12; --c6: #d4568d; --c7: #4f7f2a; --c8: #5b7083;
}
@media (prefers-color-scheme: dark) { :root {
  --page: #121316; --card: #1a1c20; --edge: #2b2e34; --ink: #eceef2; --muted: #9a9fa9; --line: #2c2f36;
  --band: #1d3a2b; --good: #5cc98d; --good-soft: #16301f; --bad: #f07f78; --bad-soft: #3a1c1b; --link: #8ab8f2;
  --down: #2f5f9e; --compute: #5a9bec; --up: #d99a3e;
  --c1: #5a9bec; --c2: #ec8850; --c3: #3dba92; --c4: #a28cec; --c5: #d9ad3c; --c6: #e57fae; --c7: #86b45e; --c8: #91a5b7;
} }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: Inter, "Segoe UI", -apple-system, BlinkMacSystemFont, Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 56px; }
header { margin-bottom: 22px; }
.kicker { font-size: 12px; letter-spacing: .09em; text-transform: uppercase; color: var(--muted); margin: 0 0 4px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.015em; font-weight: 650; margin: 0 0 6px; overflow-wrap: anywhere; }
.sub { color: var(--muted); margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 19px; font-weight: 650; letter-spacing: -.01em; margin: 40px 0 12px; }
h3 { font-size: 15px; font-weight: 620; margin: 0; }
a { color: var(--link); }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.grid > .wide { grid-column: 1 / -1; }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 16px 18px; min-width: 0; }
.cards .card { padding: 13px 15px 12px; }
.stat { font-size: 12.5px; color: var(--muted); margin: 0; }
.value { font-size: 24px; font-weight: 650; letter-spacing: -.015em; margin: 2px 0 1px; line-height: 1.25; overflow-wrap: anywhere; }
.value.word { font-size: 16px; line-height: 1.88; }
.note { font-size: 12.5px; color: var(--muted); margin: 0; }
.good { color: var(--good); } .bad { color: var(--bad); }
.banner { border-radius: 10px; padding: 13px 18px; margin: 0 0 16px; background: var(--bad-soft); border: 1px solid var(--bad); }
.banner b { color: var(--bad); } .banner ul { margin: 4px 0 0; padding-left: 20px; }
.about { font-size: 13px; color: var(--muted); margin: 2px 0 10px; }
.keys { display: flex; flex-wrap: wrap; gap: 3px 16px; font-size: 12.5px; color: var(--muted); margin: 0 0 6px; padding: 0; list-style: none; }
.keys i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
.picture svg { display: block; width: 100%; height: auto; overflow: visible; font-family: inherit; font-variant-numeric: tabular-nums; }
.picture svg * { stroke-linejoin: round; stroke-linecap: butt; }
.wide .picture { overflow-x: auto; } .wide .picture svg { min-width: 700px; }
.scroll { overflow-x: auto; margin: 0 -18px; padding: 0 18px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 550; color: var(--muted); font-size: 12.5px; vertical-align: bottom; }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 12em; }
tr:last-child td { border-bottom: 0; } th:last-child, td:last-child { padding-right: 0; }
.n { text-align: right; }
pre { margin: 10px 0 0; overflow-x: auto; font-size: 12.5px; line-height: 1.55; font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.hash { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12.5px; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 5px 18px; margin: 10px 0 0; font-size: 13.5px; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
footer { margin-top: 40px; font-size: 12.5px; color: var(--muted); }
@media (max-width: 760px) {
  main { padding: 22px 14px 40px; } h1 { font-size: 25px; } .grid { grid-template-columns: minmax(0, 1fr); }
  .picture svg text { font-size: 11px !important; } .wide .picture svg text { font-size: 9px !important; }
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); } .cards .card:last-child:nth-child(odd) { grid-column: 1 / -1; } .card { padding: 14px; } .scroll { margin: 0 -14px; padding: 0 14px; }
}
@media print { body { background: none; } .card { break-inside: avoid; } }
""".strip()  # noqa: E501

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main>
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole HTML page. Its policy lets nothing be loaded and no script run."""
    return _HEAD.format(title=escape(title), css=CSS) + "\n".join(body) + "\n</main>\n</body>\n</html>\n"


def heading(kicker: str, title: str, sub: str) -> str:
    """The page's head."""
    return (
        f'<header><p class="kicker">{escape(kicker)}</p><h1>{escape(title)}</h1>'
        f'<p class="sub">{escape(sub)}</p></header>'
    )


def stat(name: str, value: str, note: str = "", tone: str = "") -> str:
    """One headline card; ``tone`` is "", "good" or "bad". Words are set smaller than numbers."""
    word = "" if value[:1].isdigit() or value in ("–", "VALID", "INVALID") else " word"
    return (
        f'<div class="card"><p class="stat">{escape(name)}</p>'
        f'<p class="value {tone}{word}">{escape(value)}</p><p class="note">{escape(note)}</p></div>'
    )


def stats(cards: Iterable[str]) -> str:
    """A row of headline cards."""
    return f'<section class="cards">{"".join(cards)}</section>'


def figure(title: str, about: str, picture: Picture | None, empty: str = "Nothing was recorded.") -> str:
    """A picture in its card, with title, legend and a sentence that says how to read it."""
    if picture is None:
        return f'<section class="card"><h3>{escape(title)}</h3><p class="about">{escape(empty)}</p></section>'
    wide = " wide" if picture.wide else ""
    return (
        f'<section class="card{wide}"><h3>{escape(title)}</h3><p class="about">{escape(about)}</p>'
        f'{legend(picture.keys)}<div class="picture">{picture.svg}</div></section>'
    )


def legend(keys: Sequence[Key]) -> str:
    """Colour and meaning, side by side."""
    items = "".join(
        f'<li><i style="background:var(--{key.role})"></i>{escape(key.text)}</li>' for key in keys
    )
    return f'<ul class="keys">{items}</ul>' if items else ""


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: Sequence[int] = (0,),
    wrap: Sequence[int] | None = None,
) -> str:
    """A table; the columns ``text`` are words (left), the others numbers (right). Cells are escaped.

    Long words of the columns ``wrap``, by default the last, go on in the next line.
    """
    wrapped = (len(head) - 1,) if wrap is None else wrap

    def cell(tag: str, k: int, value: str) -> str:
        kind = ' class="n"' if k not in text else ' class="text"' if tag == "td" and k in wrapped else ""
        return f"<{tag}{kind}>{escape(value)}</{tag}>"

    top = "".join(cell("th", k, name) for k, name in enumerate(head))
    body = "".join(f"<tr>{''.join(cell('td', k, v) for k, v in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def card(title: str, about: str, inner: str, *, wide: bool = True) -> str:
    """A card around HTML that is already safe."""
    kind = "card wide" if wide else "card"
    about = f'<p class="about">{escape(about)}</p>' if about else ""
    return f'<section class="{kind}"><h3>{escape(title)}</h3>{about}{inner}</section>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values in two columns; empty values are left out."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs if value)
    return f"<dl>{rows}</dl>"


def grid(parts: Iterable[str]) -> str:
    """Cards in two columns, one on a narrow screen."""
    return f'<div class="grid">{"".join(parts)}</div>'
