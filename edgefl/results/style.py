"""How every picture looks: one palette by role, which the page's CSS fills in for light and dark."""

from __future__ import annotations

import functools
import html
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Shape
from numpy.typing import NDArray

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
        salt = " ".join([draw.__name__, *(str(getattr(value, "__name__", value)) for value in args if isinstance(value, str) or callable(value))])
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
