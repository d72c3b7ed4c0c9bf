"""The frame of every page and the look of its pictures: self-contained HTML, readable without scripts.

Pictures have one palette by role, which the page's CSS fills in for light and dark.
"""

from __future__ import annotations

import functools
import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, NamedTuple, ParamSpec, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Shape
from numpy.typing import NDArray

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


# matplotlib draws with these stand-ins; `picture` turns each into the CSS variable of its name
_ROLES = {
    "ink": "#0a0b01",
    "muted": "#0a0b02",
    "line": "#0a0b03",
    "band": "#0a0b04",
    "good": "#0a0b05",
    "bad": "#0a0b06",
    "down": "#0a0b07",
    "compute": "#0a0b08",
    "up": "#0a0b09",
} | {f"c{k}": f"#0a0c0{k}" for k in range(1, 9)}
COLOURS = 8


class Key(NamedTuple):
    """One entry of a picture's legend; ``role`` names its colour."""

    role: str
    text: str


class Picture(NamedTuple):
    """An inline SVG and its legend."""

    svg: str
    keys: tuple[Key, ...] = ()
    wide: bool = False


P = ParamSpec("P")
Drawn = TypeVar("Drawn", bound=Picture | None)


def colour(role: str) -> str:
    """The stand-in colour of a role: ink, muted, line, band, good, bad, down, compute, up, c1 … c8."""
    return _ROLES[role]


def series(k: int) -> str:
    """The role of the k-th series, from 0; the ninth and later are muted.

    >>> series(0), series(8)
    ('c1', 'muted')
    """
    return f"c{k + 1}" if k < COLOURS else "muted"


def shorten(text: str, length: int = 20) -> str:
    """The text, or its start and end: names of one family differ at the end.

    >>> shorten("a-very-long-profile-name-7", 12)
    'a-very…ame-7'
    """
    tail = (length - 1) // 2
    return text if len(text) <= length else f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


class Canvas:
    """A figure with one axes, sized in points; margins are points too."""

    def __init__(
        self,
        width: float = 400.0,
        height: float = 220.0,
        *,
        left: float = 40.0,
        bottom: float = 34.0,
        right: float = 12.0,
        top: float = 12.0,
    ) -> None:
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        self.figure.patch.set_visible(False)
        box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
        self.axes: Axes = self.figure.add_axes(box)
        self.axes.patch.set_visible(False)
        self._tips: list[str] = []

    def tip(self, artist: Artist, text: str) -> None:
        """Show ``text`` while the pointer is over the artist."""
        artist.set_gid(f"tip-{len(self._tips)}")
        self._tips.append(text)

    def svg(self, label: str) -> str:
        """The picture as inline SVG whose colours are the page's; ``label`` is read to the blind."""
        file = io.StringIO()
        self.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = file.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
        # a style sheet inside would reach out over the whole page, which has the same two rules itself
        text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.S)
        for k, tip in enumerate(self._tips):
            text = text.replace(f'<g id="tip-{k}">', f"<g><title>{html.escape(tip)}</title>", 1)
        used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
        text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text)
        text = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), text)
        text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # the page's own
        # a dot is a stroke without length, which matplotlib leaves out and SVG wants spelled
        text = re.sub(r"(M -?[\d.]+ -?[\d.]+) ?\n(?=M|\")", r"\1h0", text)
        text = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", text)
        for role, stand_in in _ROLES.items():
            text = text.replace(stand_in, f"var(--{role})")
        text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
        text = text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)
        return re.sub(r">\s+<", "><", text).strip()


_SETTINGS: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "axes.formatter.use_mathtext": False,
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": colour("line"),
    "axes.labelcolor": colour("muted"),
    "axes.labelsize": 9.5,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": colour("line"),
    "grid.linewidth": 0.6,
    "xtick.color": colour("muted"),
    "ytick.color": colour("muted"),
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.pad": 5,
    "text.color": colour("ink"),
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "path.simplify": True,
}


def house_style(draw: Callable[P, Drawn]) -> Callable[P, Drawn]:
    """A decorator of functions that draw a `Picture`: in the house style, which is one for all pages."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **named: P.kwargs) -> Drawn:
        # a salt of its own keeps the ids of one page's pictures apart
        given = [value for value in args if isinstance(value, str) or callable(value)]
        salt = " ".join(str(getattr(value, "__name__", value)) for value in (draw, *given))
        with mpl.rc_context({**_SETTINGS, "svg.hashsalt": salt}):
            return draw(*args, **named)

    return drawn


def dots(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], role: str, size: float = 3.0) -> None:
    """Many points as one path: a scatter of thousands in a few bytes each. The caller sets the limits."""
    if not len(x):
        return
    points = np.repeat(np.column_stack([x, y]), 2, axis=0)
    codes = np.tile([Shape.MOVETO, Shape.LINETO], len(x)).astype(np.uint8)
    axes.add_patch(
        PathPatch(
            Shape(points, codes),
            fill=False,
            edgecolor=colour(role),
            linewidth=size,
            capstyle="round",
            alpha=0.6,
        )
    )


def bars_of(axes: Axes, spans: Sequence[tuple[float, float, float]], height: float, role: str) -> None:
    """Many horizontal bars (start, end, y of the middle) as one path."""
    if not spans:
        return
    vertices: list[tuple[float, float]] = []
    for start, end, y in spans:
        low, high = y - height / 2, y + height / 2
        vertices += [(start, low), (end, low), (end, high), (start, high), (start, low)]
    codes = np.tile([Shape.MOVETO, *[Shape.LINETO] * 3, Shape.CLOSEPOLY], len(spans)).astype(np.uint8)
    axes.add_patch(PathPatch(Shape(vertices, codes), facecolor=colour(role), edgecolor="none", linewidth=0))


def percent_axis(axis: Any) -> None:
    """Label an axis of shares in per cent."""
    axis.set_major_formatter(lambda value, _: f"{value * 100:.3g}%")


def plain_axis(axis: Any) -> None:
    """Label an axis with short numbers: 950, 12k, 3M."""
    axis.set_major_formatter(lambda value, _: short(value))


def short(value: float) -> str:
    """A number in few characters.

    >>> short(1234567), short(20000), short(0.25), short(12)
    ('1.23M', '20k', '0.25', '12')
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.4g}"
