"""A figure for a paper: learning curves over seeds as vector graphics with embedded fonts."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from edgefl.errors import ConfigError, unknown
from edgefl.files import write_bytes
from edgefl.results import grouping
from edgefl.results.pictures import close_fonts
from edgefl.results.record import Record
from edgefl.results.result import Result
from edgefl.results.statistics import Points, summary_curve
from edgefl.results.summary import measured, metric_names
from edgefl.validation import path, require

Runs = Sequence[Result | str | Path]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette for colour-blind readers.

Each of the first seven curves has its own line style in `DASHES`, so the lines differ even in black-and-white
print; later curves have other combinations of colour and line style (`look`).
"""
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_SETTINGS: Any = {
    "pdf.fonttype": 42,  # TrueType, since some publishers refuse Type 3 fonts
    "ps.fonttype": 42,
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "text.parse_math": False,
    "text.usetex": False,  # the user may have set it; LaTeX fails on names with an underscore
    "savefig.bbox": None,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "svg.hashsalt": "edgefl",
}
ENDINGS = (".pdf", ".svg", ".eps", ".png")
BANDS = ("interval", "range", "none")
SHADE = 0.18
"""Opacity of the band around a curve."""
LARGEST_IN = 200.0
"""Maximum width and height of a figure, in inches; a larger one has too many pixels for a .png file."""
AXES = {"at_s": "emulated seconds", "trips": "client trips", "version": "version"}


def plot(
    runs: Mapping[str, Runs] | Runs,
    file: str | Path,
    *,
    y: str = "accuracy",
    over: Literal["at_s", "trips", "version"] = "at_s",
    band: Literal["interval", "range", "none"] = "interval",
    width_in: float = 3.4,
    height_in: float = 2.3,
) -> Path:
    """Draw learning curves into ``file`` (.pdf, .svg, .eps, or .png at 300 dpi); return its path.

    ``runs`` maps each label to finished runs, one per seed. If no labels are given, runs that differ only in
    their seed are grouped as in `edgefl compare`. Each line shows the mean over seeds of the metric ``y``
    (accuracy, loss or your own), with straight segments between evaluations. The line ends where the longest
    run ends; shorter runs keep their last value until then. The ``band`` is the 95% interval of the mean
    (Student's t), the range of the seeds, or nothing. The default size, in inches, fits a column of a paper.
    Drawing the same runs again gives the same file, byte for byte.

    Raises `ConfigError` if a run does not have the metric, if ``file`` has another suffix, or if another
    argument has a value that is not allowed.
    """
    file = path("file", file)
    if file.suffix not in ENDINGS:
        raise ConfigError(f"{file}: must end in one of {', '.join(ENDINGS)}")
    for name, text in (("y", y), ("over", over), ("band", band)):
        require(name, text, isinstance(text, str), "a name")
    if over not in AXES:
        raise ConfigError(f"over: {unknown('axis', over, AXES)}")
    if band not in BANDS:
        raise ConfigError(f"band: {unknown('band', band, BANDS)}")
    sizes: tuple[tuple[str, Any], ...] = (("width_in", width_in), ("height_in", height_in))
    for name, size_in in sizes:
        fits = isinstance(size_in, Real) and 0.0 < float(size_in) <= LARGEST_IN
        require(name, size_in, fits, f"a number of inches above 0 and at most {LARGEST_IN:g}")
    curves = {
        label: [_curve(result, y, over) for result in found] for label, found in _by_label(runs).items()
    }
    if not curves:
        raise ConfigError("nothing to draw: name at least one run")
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.add_subplot()
        for place, (label, seeds) in enumerate(curves.items()):
            x, mean, low, high = summary_curve(seeds, band, share=y == "accuracy")
            colour, dash = look(place)
            axes.plot(x, mean, color=colour, linestyle=dash, label=label)
            if band != "none" and len(seeds) > 1:
                axes.fill_between(x, low, high, linewidth=0, **shade(colour, file.suffix))
        axes.set_xlabel(AXES[over])
        axes.set_ylabel(y)
        axes.set_xlim(left=0)
        axes.legend().set_in_layout(False)
        nothing: Any = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(file.suffix, {})
        drawn = io.BytesIO()
        figure.savefig(drawn, format=file.suffix[1:], dpi=300, metadata=nothing)
    close_fonts()
    content = drawn.getvalue()
    if file.suffix == ".eps":  # matplotlib cannot leave out its date
        content = re.sub(rb"^%%CreationDate:.*\n", b"", content, count=1, flags=re.MULTILINE)
    return write_bytes(file, content)


def shade(colour: str, ending: str) -> dict[str, Any]:
    """Return the colour and opacity of a band in a file with this ending.

    EPS has no transparency, so its bands are paler instead; otherwise they would hide their curves.
    """
    if ending != ".eps":
        return {"color": colour, "alpha": SHADE}
    return {"color": tuple(1.0 - SHADE * (1.0 - part) for part in to_rgb(colour))}


def look(place: int) -> tuple[str, Any]:
    """Return the colour and line style of the curve with index ``place``; there are 49 different pairs."""
    again, colour = divmod(place, len(COLOURS))
    return COLOURS[colour], DASHES[(colour + again) % len(DASHES)]


def _by_label(runs: Mapping[str, Runs] | Runs) -> dict[str, list[Result]]:
    if isinstance(runs, Mapping):
        for label in runs:
            require("runs", label, isinstance(label, str), "a mapping from names")
        return {label: _results(f"runs of {label!r}", found) for label, found in runs.items()}
    rows = grouping.grouped(grouping.load([run.dir for run in _results("runs", runs)]))
    return {label: [Result(run.folder) for run in part] for label, part in rows.items()}


def _results(what: str, runs: Any) -> list[Result]:
    """Return ``runs`` as results. Raises `ConfigError` unless ``runs`` is a list of at least one run."""
    if isinstance(runs, str) or not isinstance(runs, Iterable) or not (found := list(runs)):
        raise ConfigError(f"{what}: must be a list of at least one run, got {runs!r}")
    return [run if isinstance(run, Result) else Result(run) for run in found]


def _curve(result: Result, y: str, over: str) -> Points:
    """Return an array with one column for each evaluation that measured the metric ``y``.

    The first row holds the values of ``over``, and the second row those of ``y``.
    """
    with Record(result.dir) as record:
        known = ["accuracy", "loss", *metric_names(record)]
        points = measured(record, y, over)
    if not points.size:
        raise ConfigError(f"{result.dir}: no {y} was measured; {unknown('measure', y, known)}")
    return points
