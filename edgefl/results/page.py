"""The frame of every page and the look of its pictures: self-contained HTML, readable without scripts.

Pictures have one palette by role, which the page's CSS fills in for light and dark.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import quote

import matplotlib as mpl
import numpy as np
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Shape
from numpy.typing import NDArray

from edgefl.results.tables import number
from edgefl.results.terms import glossary, hint

Table = Sequence[Sequence[object]]

CSS = resources.files("edgefl.results").joinpath("page.css").read_text(encoding="utf-8")

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title} · edgefl</title>
<style>{css}</style>
</head>
<body>
<main>"""


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
    """A whole HTML page: head, figures in ``headline``, and under each heading cards in two columns.

    ``lead`` says in a sentence what was found. ``headline``, ``sections`` and ``banner`` are HTML (`stat`,
    `figure` and `card` make it). A heading without cards is left out. The terms used are explained at the
    end.
    """
    body = [
        _HEAD.format(title=escape(title), css=CSS),
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
    """One headline card; ``tone`` is "", "good" or "bad". Words are set smaller than numbers."""
    word = "" if value[:1].isdigit() or value in ("–", "VALID", "INVALID") else " word"
    return (
        f'<div class="card"><p class="stat"><span{hint(name)}>{escape(name)}</span></p>'
        f'<p class="value {tone}{word}">{escape(value)}</p><p class="note">{escape(note)}</p></div>'
    )


def card(title: str, about: str, inner: str, *, wide: bool = True) -> str:
    """A card around HTML that is already safe."""
    name = f"<h3><span{hint(title)}>{escape(title)}</span></h3>" if title else ""
    about = f'<p class="about">{escape(about)}</p>' if about else ""
    return f'<section class="card{" wide" if wide else ""}">{name}{about}{inner}</section>'


def figure(title: str, about: str, picture: Picture | None, empty: str = "Nothing was recorded.") -> str:
    """A picture in its card, with title, legend and a sentence that says how to read it."""
    if picture is None:
        return card(title, empty, "", wide=False)
    keys = [f'<i style="background:var(--{role})"></i>{escape(text)}' for role, text in picture.keys]
    legend = f'<ul class="keys"><li>{"</li><li>".join(keys)}</li></ul>' if keys else ""
    drawn = f'{legend}<div class="picture">{picture.svg}</div>{_download(title, picture.data)}'
    return card(title, about, drawn, wide=picture.wide)


def _download(title: str, data: Table) -> str:
    """A link to a picture's data as CSV, which lies in the link itself: nothing is fetched."""
    if not data:
        return ""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([[_exact(cell) for cell in row] for row in data])
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    content = quote(file.getvalue(), safe=" ,.:;()#/'")
    link = f'href="data:text/csv;charset=utf-8,{escape(content)}" download="{name}.csv"'
    return f'<p class="data"><a {link}>Data (CSV)</a></p>'


def _exact(cell: object) -> object:
    return f"{cell:.10g}" if isinstance(cell, float) else cell


COLOURS = 8
# matplotlib draws with these stand-ins; `Canvas.svg` turns each into the CSS variable of its name
_NAMES = "ink muted line band good bad down compute up c1 c2 c3 c4 c5 c6 c7 c8"
_ROLES = {role: f"#0a0b{number:02x}" for number, role in enumerate(_NAMES.split(), 1)}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.family": "DejaVu Sans",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "xtick.major.pad": 5,
    "lines.solid_capstyle": "round",
    "text.color": _ROLES["ink"],
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
    **dict.fromkeys(("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"), 9.5),
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), _ROLES["muted"]),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), _ROLES["line"]),
}


class Picture(NamedTuple):
    """An inline SVG, its legend (the role of each colour, and what it stands for), and its data."""

    svg: str
    keys: Sequence[tuple[str, str]] = ()
    wide: bool = False
    data: Table = ()
    """The rows drawn, the first of them the columns' names."""


@contextlib.contextmanager
def house_style() -> Iterator[None]:
    """Gives all that is drawn meanwhile the look of our pages; also a decorator of a function that draws."""
    with mpl.rc_context(_SETTINGS):
        yield


def close_fonts() -> None:
    """Close the font files that matplotlib keeps open for good: a page leaves no descriptor behind."""
    for name in ("_get_font", "get_font"):
        if (clear := getattr(getattr(font_manager, name, None), "cache_clear", None)) is not None:
            clear()


colour = _ROLES.__getitem__
"""The stand-in colour of a role, such as ink, muted, line, bad, down or c1."""


def series(k: int) -> str:
    """The role of the k-th series, from 0; the ninth and later are muted.

    >>> series(0), series(8)
    ('c1', 'muted')
    """
    return f"c{k + 1}" if k < COLOURS else "muted"


class Canvas:
    """A figure with one axes, sized in points; margins are points too."""

    def __init__(self, width: float = 400.0, height: float = 220.0, *, left: float = 40.0) -> None:
        bottom, top, right = 34.0, 12.0, 12.0
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        self.figure.patch.set_visible(False)
        box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
        self.axes: Axes = self.figure.add_axes(box)
        self.axes.patch.set_visible(False)
        self.axes.xaxis.set_major_formatter(lambda value, _: number(value))
        self._tips: list[str] = []

    def shares(self, top: float = 1.03, low: float = 0.0) -> float:
        """Make the y axis one of shares, in per cent; returns its lower end."""
        self.axes.set_ylim(low, top - low * 0.03)
        self.axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.3g}%")
        return low

    def tip(self, artist: Artist, text: str) -> None:
        """Show ``text`` while the pointer is over the artist."""
        artist.set_gid(f"tip-{len(self._tips)}")
        self._tips.append(text)

    def svg(self, label: str) -> str:
        """The picture as inline SVG whose colours are the page's; ``label`` is read to the blind."""
        file = io.StringIO()
        # a salt of its own keeps the ids of one page's pictures apart
        with mpl.rc_context({"svg.hashsalt": label}):
            self.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = file.getvalue()
        # a style sheet inside would reach out over the whole page, which has the same two rules itself
        unwanted = r"^.*?(?=<svg)|<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>"
        text = re.sub(unwanted, "", text, flags=re.S)
        for k, tip in enumerate(self._tips):
            text = text.replace(f'<g id="tip-{k}">', f"<g><title>{escape(tip)}</title>", 1)
        used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
        text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text)
        text = re.sub(r'(?<==")[^"<>]+', _shorter, text)  # coordinates; what is to be read stays as it is
        text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # the page's own
        for role, stand_in in _ROLES.items():
            text = text.replace(stand_in, f"var(--{role})")
        text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
        text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
        return re.sub(r">\s+<", "><", text).strip()


def _shorter(attribute: re.Match[str]) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), attribute[0])


class Curve(NamedTuple):
    """A measure over time or trips: a line with its legend, and a thin one for each of several seeds."""

    role: str
    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    seeds: Sequence[NDArray[np.float64]] = ()


@house_style()
def curves_picture(
    curves: Sequence[Curve], over: str, what: str = "Accuracy", *, ends: bool = False, share: bool = True
) -> Picture | None:
    """Curves over ``at_s`` (emulated time) or ``trips``, of a ``share`` or of any numbers.

    ``ends`` writes their last values.
    """
    if not curves:
        return None
    canvas = Canvas()
    said = "{:.1%}".format if share else number
    for curve in reversed(curves):
        for seed in curve.seeds:
            canvas.axes.plot(*seed, color=colour(curve.role), linewidth=0.8, alpha=0.45)
        (line,) = canvas.axes.plot(curve.x, curve.y, color=colour(curve.role), linewidth=2.0)
        best = f", {said(np.nanmax(curve.y))} at best" if share else ""
        canvas.tip(line, f"{curve.name}: {said(curve.y[-1])} at the end{best}")
    farthest = max(float(x[-1]) for curve in curves for x in (curve.x, *(seed[0] for seed in curve.seeds)))
    canvas.axes.set_xlim(0, (farthest or 1.0) * (1.14 if ends else 1.04))
    canvas.axes.set_xlabel("emulated seconds" if over == "at_s" else "client trips")
    low = canvas.shares(low=_low_end(curves, farthest)) if share else 0.0
    _end_dots(canvas, curves)
    last = [float(curve.y[-1]) for curve in curves]
    close = len(last) == 2 and abs(last[0] - last[1]) < 0.07 * (1 - low)  # the labels would overlap
    for curve, value in zip(curves, last, strict=True):
        if ends:
            up = (6.0 if value == max(last) else -6.0) if close else 0.0
            canvas.axes.annotate(
                said(value), (curve.x[-1], value), (6, up), textcoords="offset points", va="center",
                annotation_clip=False, color=colour(curve.role), fontweight="bold",
            )  # fmt: skip
    when = "emulated_s" if over == "at_s" else "client_trips"
    label = f"{what} over {'emulated time' if over == 'at_s' else 'client trips'}"
    keys = [(curve.role, curve.name) for curve in curves]
    return Picture(canvas.svg(label), keys, data=[("curve", when, what.lower()), *_points(curves)])


def _points(curves: Sequence[Curve]) -> Iterator[tuple[object, ...]]:
    """The points of each curve, and those of its seeds by their place."""
    for curve in curves:
        yield from ((curve.name, float(x), float(y)) for x, y in zip(curve.x, curve.y, strict=True))
        for k, seed in enumerate(curve.seeds, 1):
            yield from ((f"{curve.name}: run {k}", float(x), float(y)) for x, y in seed.T)


EARLY = 0.1
"""The first part of a picture's span, in which curves rise: it does not count where all are near the top."""


def _low_end(curves: Sequence[Curve], farthest: float) -> float:
    """The lower end of an axis of shares: 0, or a little below all curves where they soon stay above 70%."""
    later = [curve.y[curve.x >= EARLY * farthest] for curve in curves]
    lowest = min((float(np.nanmin(y)) for y in later if np.isfinite(y).any()), default=0.0)
    return max(0.0, np.floor(lowest * 20 - 1) / 20) if lowest > 0.7 else 0.0


def _end_dots(canvas: Canvas, curves: Sequence[Curve]) -> None:
    """A dot at the end of each curve; rings around it for those that end at almost the same place."""
    across, up = canvas.axes.get_xlim()[1], float(np.diff(canvas.axes.get_ylim())[0])
    placed: list[tuple[float, float]] = []
    for curve in curves:
        x, y = float(curve.x[-1]) / across, float(curve.y[-1]) / up
        under = sum(abs(x - a) < 0.02 and abs(y - b) < 0.03 for a, b in placed)
        placed.append((x, y))
        fill = colour(curve.role) if not under else "none"
        canvas.axes.plot(
            curve.x[-1:], curve.y[-1:], "o", color=colour(curve.role), markersize=5 + 4 * under,
            markerfacecolor=fill, markeredgewidth=1.6 if under else 0, clip_on=False, zorder=4,
        )  # fmt: skip


def bars_of(axes: Axes, spans: Sequence[tuple[float, float, float]], height: float, role: str) -> None:
    """Many horizontal bars (start, end, y of the middle) as one path, which takes a few bytes a bar."""
    if spans:
        start, end, y = np.array(spans).T
        low, high = y - height / 2, y + height / 2
        corners = np.array([(start, low), (end, low), (end, high), (start, high), (start, low)])
        codes = np.tile([Shape.MOVETO, *[Shape.LINETO] * 3, Shape.CLOSEPOLY], len(spans)).astype(np.uint8)
        shape = Shape(corners.transpose(2, 0, 1).reshape(-1, 2), codes)
        axes.add_patch(PathPatch(shape, facecolor=colour(role), linewidth=0))
