"""Build tables for the terminal, and format values as text."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from edgefl.terminal import printable


class PlainConsole(Console):
    """A ``rich.console.Console`` that prints ``?`` instead of control characters in text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.width < 1:  # rich takes COLUMNS=0 as a width, in which nothing fits
            self.width = shutil.get_terminal_size().columns

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, "\n"), style, control)


def show(*what: RenderableType) -> None:
    """Print to standard output with the package rich.

    The output respects NO_COLOR and COLUMNS, and depends on whether it goes to a terminal.
    """
    console = PlainConsole(highlight=False)
    for item in what:
        console.print(item)


def as_text(*what: RenderableType) -> str:
    """Return the text that `show` prints, without colours and without spaces at the ends of lines."""
    file = io.StringIO()
    console = PlainConsole(file=file, highlight=False, width=shutil.get_terminal_size().columns)
    for item in what:
        console.print(item)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def progress_bar(what: str) -> Progress:
    """Return a progress bar on stderr that counts ``what`` and disappears at the end.

    The bar is not shown if stderr is not a terminal.
    """
    console = PlainConsole(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


LONG_WORD = 16
"""Number of characters above which a word of text, such as a path, may be broken."""


class FittedTable:
    """A table for the terminal, made by `table`, that never breaks numbers or short words.

    In a narrow terminal, spare columns are left out before the text in other columns is wrapped between
    words. If even the longest words do not fit side by side, headings are abbreviated, with a legend below.
    If that is not enough, each row becomes a block: its first cell, then the other cells, each after its
    heading.
    """

    def __init__(
        self, columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None,
        caption: str | None, fold: bool, gap: int, spare: Iterable[int], short: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._heads = [column.lstrip(">") for column in columns]
        self._spare, self._short = {*spare}, short
        self._rows = [
            [cell if isinstance(cell, Text) else Text(figure(cell)) for cell in row] for row in rows
        ]
        self._title, self._gap = title and Text(title), gap
        self._caption = Text(caption) if caption else None
        numbers = self._numbers = [column.startswith(">") for column in columns]
        whole = [number or (place == 0 and not fold) for place, number in enumerate(numbers)]
        cells = [[row[place].plain for row in self._rows if row] for place in range(len(columns))]
        self._widths = [max(map(cell_len, texts), default=0) for texts in cells]
        self._least = [
            width if kept else min(_longest_word(texts), LONG_WORD)
            for width, texts, kept in zip(self._widths, cells, whole, strict=True)
        ]
        """Each column's minimum width, at which no number, name or short word is broken."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        every = range(len(self._heads))
        kept = [place for place in every if place not in self._spare]
        short = [self._short.get(head, head) for head in self._heads]
        for places, heads in ((every, self._heads), (kept, self._heads), (kept, short)):
            gaps = len(places) - 1
            whole = [max(self._widths[k], cell_len(heads[k])) for k in places]
            roomy = bool(self._spare) and places is every
            least = [max(self._narrowest(k, roomy), _longest_word([heads[k]])) for k in places]
            if sum(whole) + self._gap * gaps <= options.max_width:
                yield self._table(places, heads, [None] * len(places), self._gap)
                return
            if sum(least) <= (room := options.max_width - gaps):
                yield self._table(places, heads, _squeezed(whole, least, room), 1)
                return
        yield from self._blocks(kept, options.max_width - 2)

    def _narrowest(self, place: int, roomy: bool) -> int:
        """Return the minimum width of the column with index ``place``.

        If ``roomy``, a column that may shrink keeps at least half its width, and any other column all of it.
        """
        if not roomy:
            return self._least[place]
        return max(self._least[place], -(-self._widths[place] // (1 + (place in self._spare))))

    def _repr_html_(self) -> str:
        """Return the table as HTML for a notebook."""

        def row(tag: str, cells: Iterable[str]) -> str:
            sides = ("right" if number else "left" for number in self._numbers)
            parts = (
                f'<{tag} style="text-align:{side};overflow-wrap:anywhere">{escape(cell)}</{tag}>'
                for side, cell in zip(sides, cells, strict=True)
            )
            return f"<tr>{''.join(parts)}</tr>"

        body = "".join(row("td", (cell.plain for cell in cells)) for cells in self._rows if cells)
        title = f"<caption>{escape(self._title.plain)}</caption>" if self._title else ""
        note = f'<p style="white-space:pre-line">{escape(self._caption.plain)}</p>' if self._caption else ""
        return f"<table>{title}<thead>{row('th', self._heads)}</thead><tbody>{body}</tbody></table>{note}"

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        every = range(len(self._heads))
        whole = self._table(every, self._heads, [None] * len(every), self._gap)
        return Measurement.get(console, options, whole)

    def _table(
        self, places: Sequence[int], heads: Sequence[str], widths: Sequence[int | None], gap: int
    ) -> Table:
        """Return a table of the columns with indices ``places``; its caption explains shortened ``heads``."""
        pairs = ((heads[k], self._heads[k]) for k in places)
        legend = "; ".join(f"{head}: {whole}" for head, whole in pairs if head != whole)
        notes: list[Text] = [*filter(None, (self._caption, Text(legend)))]
        made = Table(
            box=SIMPLE_HEAD, title=self._title, title_justify="left", caption_justify="left",
            caption=Text("\n").join(notes) if notes else None, show_edge=False, pad_edge=False,
            padding=(0, gap - 1, 0, 0),
        )  # fmt: skip
        for k, width in zip(places, widths, strict=True):
            side: Literal["left", "right"] = "right" if self._numbers[k] else "left"
            made.add_column(Text(heads[k]), justify=side, overflow="fold", width=width)
        for row in self._rows:
            if row:
                made.add_row(*(row[k] for k in places))
            else:
                made.add_section()
        return made

    def _blocks(self, places: Sequence[int], room: int) -> Iterator[RenderableType]:
        yield from filter(None, [self._title])
        for row in filter(None, self._rows):
            yield row[0]
            named = [(self._heads[k], row[k]) for k in places[1:]]
            parts = [Text.assemble(f"{head} " if head else "", cell) for head, cell in named if cell.plain]
            yield Padding(Text("\n").join(_filled(parts, room)), (0, 0, 0, 2))
        yield from filter(None, [self._caption])


def _squeezed(whole: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Reduce the widths ``whole`` until they fit into ``room``, starting with the widest column."""
    widths = [*whole]
    while sum(widths) > room:
        loose = (k for k, width in enumerate(widths) if width > least[k])
        widths[max(loose, key=lambda k: widths[k])] -= 1
    return widths


def _filled(parts: Iterable[Text], room: int) -> list[Text]:
    """Join parts with dots into lines of at most ``room`` columns; a wider part is put on a separate line."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 3 + part.cell_len <= room:
            lines[-1] = Text(" · ").join([lines[-1], part])
        else:
            lines.append(part)
    return lines


def _longest_word(texts: Iterable[str]) -> int:
    return max((cell_len(word) for text in texts for word in text.split()), default=0)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    title: str | None = None,
    *,
    caption: str | None = None,
    fold: bool = False,
    gap: int = 2,
    spare: Iterable[int] = (),
    short: Mapping[str, str] | None = None,
) -> FittedTable:
    """Return a plain table for the terminal; a column whose name starts with ``>`` has right-aligned numbers.

    Numbers are never broken, and names in the first column are broken only if ``fold``. Columns are ``gap``
    spaces apart. An empty row ends a section. If the table is too wide, the columns with the indices
    ``spare`` are left out first, and then headings are replaced with their abbreviations in ``short``.
    """
    return FittedTable(columns, rows, title, caption, fold, gap, spare, short or {})


def figure(value: object) -> str:
    """Return the text of a cell: a float has four significant digits or, from 1000, no decimals; None is a
    dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share as a percentage with this number of decimals; a missing share becomes a dash.

    >>> percent(0.5), percent(1e300)
    ('50.0%', '1e+302%')
    """
    if value is not None and abs(value) >= 1e7:
        return f"{value * 100:.3g}%"
    return "–" if value is None else f"{value * 100:.{digits}f}%"


def seconds(value: float) -> str:
    """Return a duration with its unit.

    >>> seconds(0.25), seconds(91.87), seconds(8000)
    ('0.25 s', '91.9 s', '2 h 13 min')
    """
    if value < 600:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{int(value // 60)} min {int(value % 60)} s"
    if value < 172800:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    return f"{value / 86400:.1f} days"


def short_time(value: float) -> str:
    """Return the time of a step or a call with three significant digits, in s, ms or µs.

    >>> short_time(1234.5), short_time(0.9996), short_time(0.0324), short_time(2e-6)
    ('1,234 s', '1 s', '32.4 ms', '2 µs')
    """
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * one:
            return f"{number(value / one)} {unit}"
    return f"{number(value * 1e6)} µs"


def many(count: int, thing: str) -> str:
    """Return a count with its noun, such as "1 client" or "2 processes"."""
    return f"{count:,} {thing}" + ("" if count == 1 else "es" if thing.endswith("s") else "s")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with few digits; a dash if it is missing or not finite.

    >>> number(3071.8), number(999.6), number(0.08777), number(None)
    ('3,072', '1,000', '0.0878', '–')
    """
    if value is None or not np.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"
