"""Draw matplotlib figures as inline SVG. The page's CSS defines the colour of each role, such as "ink"."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Shape
from numpy.typing import NDArray

from edgefl.results.page import Picture, figure
from edgefl.results.tables import number

COLOURS = 8
# matplotlib draws with these placeholder colours; `Canvas.svg` replaces each with its role's CSS variable
_NAMES = "ink muted line band good bad down compute up c1 c2 c3 c4 c5 c6 c7 c8"
_ROLES = {role: f"#0a0b{number:02x}" for number, role in enumerate(_NAMES.split(), 1)}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "savefig.bbox": None,
    "text.parse_math": False,
    "text.usetex": False,  # the user may have set it; LaTeX fails on names with an underscore
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

house_style = partial(mpl.rc_context, _SETTINGS)
"""Context manager or decorator that gives figures the style of the pages."""


def close_fonts() -> None:
    """Close the font files that matplotlib keeps open."""
    for name in ("_get_font", "get_font"):
        if (clear := getattr(getattr(font_manager, name, None), "cache_clear", None)) is not None:
            clear()


colour = _ROLES.__getitem__
"""The placeholder colour of a role, such as ink, muted, line, bad, down or c1."""


def series(k: int) -> str:
    """Return the colour role of series ``k``, counted from 0; the ninth and later series are muted.

    >>> series(0), series(8)
    ('c1', 'muted')
    """
    return f"c{k + 1}" if k < COLOURS else "muted"


class Canvas:
    """A matplotlib figure with one plot. Its size and margins are in points; ``up`` is the y axis's label."""

    def __init__(
        self, width: float = 400.0, height: float = 220.0, *, left: float = 40.0, up: str = ""
    ) -> None:
        bottom, top, right = 34.0, 24.0 if up else 12.0, 12.0
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        self.figure.patch.set_visible(False)
        box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
        self.axes: Axes = self.figure.add_axes(box)
        self.axes.patch.set_visible(False)
        self.axes.set_title(up, loc="left", fontsize=9.5, color=colour("muted"), pad=6)
        self.axes.xaxis.set_major_formatter(lambda value, _: number(value))
        self.axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        self._tips: list[str] = []

    def shares(self, top: float = 1.03, low: float = 0.0) -> float:
        """Label the y axis with percentages; return its lower end."""
        self.axes.set_ylim(low, top - low * 0.03)
        self.axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.3g}%")
        return low

    def tip(self, artist: Artist, text: str) -> None:
        """Show ``text`` while the pointer is over the artist."""
        artist.set_gid(f"tip-{len(self._tips)}")
        self._tips.append(text)

    def svg(self, label: str) -> str:
        """Return the picture as inline SVG in the page's colours; ``label`` is for screen readers."""
        file = io.StringIO()
        # the salt differs between pictures, so those on one page do not share element ids
        with mpl.rc_context({"svg.hashsalt": label}):
            self.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = file.getvalue()
        # drop inline styles, which would apply to the whole page; the page's CSS has the same two rules
        unwanted = r"^.*?(?=<svg)|<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>"
        text = re.sub(unwanted, "", text, flags=re.S)
        for k, tip in enumerate(self._tips):
            text = text.replace(f'<g id="tip-{k}">', f"<g><title>{escape(tip)}</title>", 1)
        used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
        text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text)
        text = re.sub(r'(?<==")[^"<>]+', _shorter, text)  # shorten coordinates, not text
        text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # inherit the page's font
        for role, stand_in in _ROLES.items():
            text = text.replace(stand_in, f"var(--{role})")
        text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
        text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
        return re.sub(r">\s+<", "><", text).strip()


def _shorter(attribute: re.Match[str]) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), attribute[0])


class Curve(NamedTuple):
    """A metric over time or trips: a line with its legend, and a thin line for each of several seeds."""

    role: str
    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    seeds: Sequence[NDArray[np.float64]] = ()


AXES = {
    "at_s": ("emulated seconds", "emulated_s", "emulated time"),
    "trips": ("client trips", "client_trips", "client trips"),
}
"""The possible x axes of a curve: the axis's label, its column name in the data, and its name in titles."""


@house_style()
def curves_picture(
    curves: Sequence[Curve], over: str, what: str = "Accuracy", *, ends: bool = False, share: bool = True
) -> Picture | None:
    """Draw curves over ``at_s`` or ``trips``; return None if ``curves`` is empty.

    If ``share``, the values are shares and are shown as percentages. If ``ends``, the last value of each
    curve is printed at the end of the curve.
    """
    if not curves:
        return None
    canvas = Canvas(up=what)
    text_of = "{:.1%}".format if share else number
    for curve in reversed(curves):
        for seed in curve.seeds:
            canvas.axes.plot(*seed, color=colour(curve.role), linewidth=0.8, alpha=0.45)
        (line,) = canvas.axes.plot(curve.x, curve.y, color=colour(curve.role), linewidth=2.0)
        best = f", {text_of(np.nanmax(curve.y))} at best" if share else ""
        canvas.tip(line, f"{curve.name}: {text_of(curve.y[-1])} at the end{best}")
    farthest = max(float(x[-1]) for curve in curves for x in (curve.x, *(seed[0] for seed in curve.seeds)))
    canvas.axes.set_xlim(0, (farthest or 1.0) * (1.14 if ends else 1.04))
    axis, column, words = AXES[over]
    canvas.axes.set_xlabel(axis)
    low = canvas.shares(low=_low_end(curves, farthest)) if share else 0.0
    _end_dots(canvas, curves)
    last = [float(curve.y[-1]) for curve in curves]
    close = len(last) == 2 and abs(last[0] - last[1]) < 0.07 * (1 - low)  # the labels would overlap
    for curve, value in zip(curves, last, strict=True):
        if ends:
            up = (6.0 if value == max(last) else -6.0) if close else 0.0
            canvas.axes.annotate(
                text_of(value), (curve.x[-1], value), (6, up), textcoords="offset points", va="center",
                annotation_clip=False, color=colour("ink"), fontweight="bold",
            )  # fmt: skip
    keys = [(curve.role, curve.name) for curve in curves]
    points: list[tuple[object, ...]] = [("curve", column, what.lower())]
    for curve in curves:
        named = ((f"{curve.name}: run {k}", *seed) for k, seed in enumerate(curve.seeds, 1))
        for name, x, y in ((curve.name, curve.x, curve.y), *named):
            points += [(name, at, value) for at, value in zip(x.tolist(), y.tolist(), strict=True)]
    return Picture(canvas.svg(f"{what} over {words}"), keys, data=points)


def learning_figures(
    curves_of: Callable[[str, str], Sequence[Curve]],
    own: Sequence[str],
    about: Mapping[str, str],
    last: Sequence[str] | None,
    *,
    ends: bool = False,
    empty: str = "Nothing was recorded.",
) -> list[str]:
    """Return cards with curves of the accuracy, or of the loss, and of the ``own`` metrics.

    ``curves_of`` returns the curves of a metric over ``at_s`` or ``trips``. ``about`` maps each x axis, and
    "own" for the ``own`` metrics, to the explanation on the card. ``last`` holds cards that follow the
    accuracy cards; None means that the task has no accuracy, so the loss is shown instead.
    """

    def drawn(name: str, over: str, what: str) -> str:
        share = name == "accuracy"
        title = name.capitalize() if name in ("accuracy", "loss") else name
        picture = curves_picture(curves_of(name, over), over, name.capitalize(), ends=ends, share=share)
        return figure(f"{title} over {AXES[over][2]}", about[what], picture, empty)

    first = "loss" if last is None else "accuracy"
    both = [drawn(first, over, over) for over in AXES]
    return [*both, *(last or ()), *(drawn(name, "at_s", "own") for name in own)]


EARLY = 0.1
"""Initial fraction of the x axis. Curves still rise there, so the y axis's lower end ignores it."""


def _low_end(curves: Sequence[Curve], farthest: float) -> float:
    """Return the lower end of a percentage axis: just below the lowest value after `EARLY` if that value
    exceeds 70%, otherwise 0."""
    later = [curve.y[curve.x >= EARLY * farthest] for curve in curves]
    lowest = min((float(np.nanmin(y)) for y in later if np.isfinite(y).any()), default=0.0)
    return max(0.0, np.floor(lowest * 20 - 1) / 20) if lowest > 0.7 else 0.0


def _end_dots(canvas: Canvas, curves: Sequence[Curve]) -> None:
    """Draw a dot at the end of each curve, or a larger ring if an earlier curve ends nearby."""
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
    """Draw horizontal bars, each given as (start, end, y of the middle), as one path to save space."""
    if spans:
        start, end, y = np.array(spans).T
        low, high = y - height / 2, y + height / 2
        corners = np.array([(start, low), (end, low), (end, high), (start, high), (start, low)])
        codes = np.tile([Shape.MOVETO, *[Shape.LINETO] * 3, Shape.CLOSEPOLY], len(spans)).astype(np.uint8)
        shape = Shape(corners.transpose(2, 0, 1).reshape(-1, 2), codes)
        axes.add_patch(PathPatch(shape, facecolor=colour(role), linewidth=0))
