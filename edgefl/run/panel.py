"""The picture of a run in the terminal: at most 20 lines, 60 columns or more.

Drawn as bare segments, line by line: a quarter of what rich's own tables and panels cost, four times a
second on a host that should be left to the clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

from edgefl.run import control
from edgefl.run.course import Course, duration, percent, printable, rate

MOST_LINES = 20
MOST_COLUMNS = 120
LEAST_COLUMNS = 40
FIGURE_LINES = 5
MOST_NAME = 20
CELLS_PER_CLIENT = 2

Line = list[Segment]

PLAIN = Style()
DIM = Style(dim=True)
BOLD = Style(bold=True)
ACCENT = Style(color="cyan")
STRONG = Style(color="cyan", bold=True)
GOOD = Style(color="green")
WARN = Style(color="yellow", bold=True)
BAD = Style(color="red", bold=True)
GLYPHS = (("■", Style(color="green")), ("□", Style(color="blue")), ("·", DIM))
"""Training, idle, absent: told apart by shape too, for where there is no colour."""
EIGHTHS = " ▁▂▃▄▅▆▇█"


class Panel:
    """A renderable that shows a `Course` as it is when drawn."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self.state = ""
        """How the run ended; empty while it goes on."""
        self.failed = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(LEAST_COLUMNS, min(options.max_width, MOST_COLUMNS))
        # A line is kept free below, or the terminal would scroll at every redraw.
        for line in self.lines(width, min(MOST_LINES, console.size.height - 1)):
            yield from Segment.adjust_line_length(line, min(width, options.max_width), pad=False)
            yield Segment.line()

    def lines(self, width: int, height: int = MOST_LINES) -> list[Line]:
        """The picture, ``width`` columns wide and at most ``height`` lines."""
        inner = width - 4
        body = self._body(inner, height - 3)
        # The last line is short: a terminal writes ^C there.
        return [
            self._top(width),
            *([Segment("│ ", DIM), *_fit(line, inner), Segment(" │", DIM)] for line in body),
            self._bottom(width),
            self._footer(),
        ][: max(1, height)]

    # ---- frame ---------------------------------------------------------------------------------

    def _top(self, width: int) -> Line:
        course = self._course
        right = f"{course.experiment.clock.kind} clock"
        if course.scale is not None:
            right += f", time_scale {course.scale.value:g}"
        strategy = set_cell_size(course.strategy, min(cell_len(course.strategy), width // 3))
        room = width - 12 - len(right) - cell_len(strategy)
        name = set_cell_size(course.name, min(cell_len(course.name), max(4, room)))
        rule = "─" * (width - 11 - cell_len(name) - cell_len(strategy) - len(right))
        return [
            Segment("╭─ ", DIM),
            Segment(name, STRONG),
            Segment(" ─ ", DIM),
            Segment(strategy, BOLD),
            Segment(f" {rule} ", DIM),
            Segment(right, DIM),
            Segment(" ─╮", DIM),
        ]

    def _bottom(self, width: int) -> Line:
        course, right = self._course, ""
        if course.prepared is not None:
            data, model = printable(course.prepared.dataset), printable(course.experiment.model.name)
            right = f" {data}, {model}, {course.prepared.size:,} parameters "
            right = set_cell_size(right, min(cell_len(right), width - 6))
        return [Segment(f"╰{'─' * (width - 3 - cell_len(right))}{right}─╯", DIM)]

    def _footer(self) -> Line:
        if self.state:
            return [Segment(f"  {self.state}", BAD if self.failed else GOOD)]
        if self._course.note:
            return [Segment(f"  {self._course.note}", WARN if self._course.running else ACCENT)]
        return [Segment("  Ctrl-C stops it so that it can be resumed", DIM)]

    # ---- body ----------------------------------------------------------------------------------

    def _body(self, inner: int, height: int) -> list[Line]:
        if self._course.progress is None:
            return [[Segment(self._course.note or "…", DIM)]]
        blank: Line = []
        figures = self._figures(inner)
        if height < len(figures) + 4:  # no room for a fleet: what matters most first
            return [self._way(inner), *figures][: max(0, height)]
        roomy = height >= len(figures) + 6
        head = [self._way(inner), *([blank] if roomy else []), *figures, *([blank] if roomy else [])]
        return [*head, self._census(inner), *self._fleet(inner, height - len(head) - 1)]

    def _way(self, inner: int) -> Line:
        """The bar towards the nearest stop condition; towards a complete fleet before the start."""
        course, progress = self._course, self._course.progress
        assert progress is not None
        if not course.running:
            there = course.total - progress.absent
            share, text = there / max(1, course.total), f"{there:,} of {course.total:,} clients connected"
        else:
            goal = course.goals[0]  # an experiment without a stop condition is refused
            share = goal.share
            text = f"{math.floor(100 * share)}%  {_towards(goal.name, goal.reached, goal.target)}"
            if (left_s := course.left_s) is not None and not self.state:
                text += f", {f'{left_s:.0f} s' if left_s < 59.5 else duration(left_s)} left"
        text = set_cell_size(text, min(len(text), inner - 12))
        style = BAD if self.failed else GOOD if self.state == "done" else ACCENT
        return [*_bar(share, inner - len(text) - 2, style), Segment(f"  {text}")]

    def _figures(self, inner: int) -> list[Line]:
        course, progress = self._course, self._course.progress
        assert progress is not None
        per_s = rate(course.trips_per_s)
        left: list[Line] = [
            [*_label("version", 10), Segment(f"{progress.version:,}", BOLD)],
            [*_label("trips", 10), Segment(f"{progress.trips:,}", BOLD), Segment(f"  {per_s}", DIM)],
            [*_label("emulated", 10), Segment(duration(progress.emulated_s))],
            [*_label("wall", 10), Segment(duration(course.wall_s))],
            [*_label("dropped", 10), *_troubles(progress)],
        ]
        column = max(22, inner * 3 // 8)
        upper, lower = chart(course.accuracies, inner - column - 23)
        now, best = _figure(progress.accuracy), _figure(course.best)
        target = course.experiment.stop.accuracy
        under = f"of {target:g}" if target is not None else f"best {best}" if course.best is not None else ""
        staleness = f"mean {progress.staleness_mean:.3g}, max {progress.staleness_max:,}"
        right: list[Line] = [
            [*_label("accuracy", 11), Segment(now.ljust(12), BOLD), Segment(upper, ACCENT)],
            [*_label("", 11), Segment(under.ljust(12), DIM), Segment(lower, ACCENT)],
            [*_label("loss", 11), Segment(_figure(progress.loss))],
            [*_label("staleness", 11), Segment(staleness)],
            [*_label("fidelity", 11), *self._fidelity(roomy=inner >= 70)],
        ]
        return [[*_fit(a, column), *b] for a, b in zip(left, right, strict=True)]

    def _fidelity(self, roomy: bool) -> Line:
        progress, valid = self._course.progress, self._course.valid
        assert progress is not None
        median, p95 = percent(progress.fidelity_median), percent(progress.fidelity_p95)
        error = f"error {median} median, {p95} p95" if roomy else f"{median}, p95 {p95}"
        if valid is None:
            return [Segment("–")]
        if progress.invalid:
            return [Segment("INVALID", BAD), Segment(f"  {progress.invalid}")]
        if valid and self._course.computed:
            return [Segment("times computed, not enforced" if roomy else "times computed")]
        return [Segment("VALID" if valid else "INVALID", GOOD if valid else BAD), Segment(f"  {error}")]

    def _census(self, inner: int) -> Line:
        """The whole fleet in one line, which is the legend of the lines below it too."""
        progress, total = self._course.progress, self._course.total
        assert progress is not None
        line = [Segment(f"{total:,} client{'s' * (total != 1)}  ", BOLD)]
        counts = (progress.training, progress.idle, progress.absent)
        for (glyph, style), count, word in zip(GLYPHS, counts, ("training", "idle", "absent"), strict=True):
            line += [Segment(f" {glyph} ", style), Segment(f"{count:,} {word} ", PLAIN)]
        gap = inner - Segment.get_line_length(line) - len("trips")
        return [*line, Segment(" " * gap + "trips", DIM)] if gap > 0 else line

    def _fleet(self, inner: int, height: int) -> list[Line]:
        """A line a profile; in two columns where they are many and there is the width; the rest summed up."""
        progress = self._course.progress
        assert progress is not None
        rows = [(printable(name), counts) for name, counts in progress.by_profile.items()]
        columns = 2 if len(rows) > height and inner >= 70 else 1
        summed_up = len(rows) > height * columns
        if summed_up:
            shown = height * columns - 1
            rest = [sum(counts[i] for _, counts in rows[shown:]) for i in range(4)]
            rows = [*rows[:shown], (f"{len(rows) - shown} more profiles", rest)]
        width = (inner - 3 * (columns - 1)) // columns
        cells = _profiles(rows, width, MOST_NAME if columns == 1 else 16, summed_up)
        if columns == 1:
            return cells
        deep = -(-len(cells) // 2)
        cells += [[]] * (2 * deep - len(cells))
        gutter = Segment(" │ ", DIM)
        return [[*cells[i], gutter, *cells[i + deep]] for i in range(deep)]


def _profiles(
    rows: Sequence[tuple[str, Sequence[int]]], width: int, most_name: int, summed_up: bool
) -> list[Line]:
    """Name, clients, what they do, trips: in columns that fit what is in them."""
    if not rows:
        return []
    # What sums up the rest may be longer than the others; its bar then shows shares only.
    most = max(sum(counts[:3]) for _, counts in rows[: max(1, len(rows) - summed_up)])
    names = min(most_name, max(cell_len(name) for name, _ in rows))
    clients = max(len(f"{sum(counts[:3]):,}") for _, counts in rows)
    trips = max(6, *(len(f"{counts[3]:,}") for _, counts in rows))
    room = width - names - clients - trips - 5
    lines: list[Line] = []
    for name, (idle, training, absent, ended) in rows:
        bar = list(_census_bar((training, idle, absent), room, most))
        lines.append(
            [
                Segment(set_cell_size(name, names)),
                Segment(f"  {idle + training + absent:>{clients},}  ", DIM),
                *bar,
                Segment(" " * max(0, room - Segment.get_line_length(bar))),
                Segment(f" {ended:>{trips},}"),
            ]
        )
    return lines


def _census_bar(counts: Sequence[int], room: int, most: int) -> Iterator[Segment]:
    """A cell or two a client if there is room for ``most`` of them, else cells in proportion to ``most``."""
    total = sum(counts)
    each = min(CELLS_PER_CLIENT, room // most) if most else 0
    if each * total and each * total <= room:
        for (glyph, style), count in zip(GLYPHS, counts, strict=True):
            yield Segment(glyph.ljust(each) * count, style)
        return
    cells = max(1, min(room, round(room * total / most))) if total else 0
    for (glyph, style), width in zip(GLYPHS, apportion(counts, cells), strict=True):
        yield Segment(glyph * width, style)


def apportion(counts: Sequence[int], cells: int) -> list[int]:
    """Whole cells in proportion to ``counts``, by largest remainder; ties go to the first.

    >>> apportion([50, 30, 20], 7)
    [4, 2, 1]
    """
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    widths = [count * cells // total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda i: -(counts[i] * cells % total))
    for i in by_remainder[: cells - sum(widths)]:
        widths[i] += 1
    return widths


def chart(values: Sequence[float], width: int) -> tuple[str, str]:
    """A curve two lines high, its last value at the right: from the lowest to the highest value, which are
    taken to be 0.1 apart at least.

    >>> chart([0.0, 0.25, 0.5, 0.75, 1.0], 5)
    ('  ▁▄█', '▁▅███')
    """
    width = min(width, len(values))
    if width <= 0:
        return "", ""
    points = [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    low = min(points)
    span = max(max(points) - low, 0.1)
    levels = [1 + round(15 * (point - low) / span) for point in points]
    return (
        "".join(EIGHTHS[max(0, level - 8)] for level in levels),
        "".join(EIGHTHS[min(8, level)] for level in levels),
    )


def _bar(share: float, width: int, style: Style) -> Line:
    halves = math.floor(2 * width * share)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    return [Segment(done, style), Segment("─" * (width - len(done)), DIM)]


def _towards(name: str, reached: float, target: float) -> str:
    if name.endswith("_s"):
        return f"{name.removesuffix('_s')} {duration(reached)} of {duration(target)}"
    if name == "accuracy":
        return f"accuracy {reached:.4g} of {target:g}"
    return f"{name} {reached:,.0f} of {target:,.0f}"


def _label(text: str, width: int) -> Line:
    return [Segment(text.ljust(width), DIM)]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def _fit(line: Line, width: int) -> Line:
    return Segment.adjust_line_length(line, width)


def _troubles(progress: control.Progress) -> Line:
    """Updates that were dropped, and clients that failed."""
    dropped = Segment(f"{progress.dropped:,}", WARN if progress.dropped else PLAIN)
    if not progress.incidents:
        return [dropped]
    failed = f", {progress.incidents:,} client{'s' if progress.incidents > 1 else ''} failed"
    return [dropped, Segment(failed, WARN)]
