"""Comparison of runs: tables for the terminal, and a folder with a summary, a page and a trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from rich.console import Group as RenderGroup
from rich.console import RenderableType
from rich.text import Text

from edgefl.errors import listed
from edgefl.experiment import NO_PROGRESS, TOO_FEW_CLIENTS
from edgefl.files import write_json, write_text
from edgefl.results import fleets, page, trace
from edgefl.results.grouping import (
    UNFINISHED,
    Run,
    RunGroup,
    goal_of,
    grouped,
    load,
    own_names,
    rows_of,
)
from edgefl.results.groups import applied_profiles, profiles_by_speed
from edgefl.results.own_code import mixed_code
from edgefl.results.page import html_table
from edgefl.results.pictures import Curve, close_fonts, curves_picture, learning_figures, series
from edgefl.results.run_folder import SUMMARY_FILE, require_free
from edgefl.results.spending import together
from edgefl.results.statistics import NONE, Estimate, difference, estimate, higher, share, summary_curve
from edgefl.results.summary import is_scored, measured, metric_names, rounded
from edgefl.results.tables import FittedTable, many, number, percent, table
from edgefl.results.targets import COSTS, RaceTarget, evaluated_on, race_in_words

VERDICT_COLOURS = {"VALID": "green", "INVALID": "bold red", NO_PROGRESS: "bold red", UNFINISHED: "bold red"}


def compare(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    target: float | RaceTarget | None = None,
    labelled: Mapping[str, Sequence[Path]] | None = None,
) -> RenderGroup:
    """Return tables that compare the runs in ``folders``; if ``out`` is given, also write files to it.

    The tables are 80 columns wide. Runs that differ only in their seed share a row, which shows the mean ±
    half the width of its 95% interval (Student's t). ``labelled`` adds runs that are already grouped: it maps
    each row's label to the folders of the row's runs. These rows precede the others.
    The time to the accuracy ``target`` is compared seed by seed; see `targets.target_of` for the default.
    The files in ``out`` are summary.json (the first run's summary with two more fields, ``runs`` and
    ``comparison``), report.html and trace.json.
    Raises `ConfigError` if a folder holds no run or is given twice, if the runs used different data, or if
    ``out`` is a file or holds a run or a reproduction.
    """
    if out is not None:
        require_free(Path(out), "comparison")
    rows_given = {label: [*members] for label, members in (labelled or {}).items()}
    runs = load([*(folder for members in rows_given.values() for folder in members), *folders])
    goal = target if isinstance(target, RaceTarget) else goal_of(runs, target)
    rest = iter(runs)
    given = {label: [next(rest) for _ in members] for label, members in rows_given.items()}
    others = {
        f"{label} ({part[0].folder})" if label in given else label: part
        for label, part in grouped([*rest]).items()
    }
    rows = rows_of({**given, **others}, goal)
    if out is not None:
        write(Path(out), runs, rows, goal)
        trace.write_events(Path(out) / trace.FILE_NAME, [run.record for run in runs])
    return terminal_tables(runs, rows, goal)


def write(
    out: Path, runs: Sequence[Run], rows: Sequence[RunGroup], target: RaceTarget | None, **more: Any
) -> None:
    """Write summary.json, with the additional fields ``more``, and report.html into ``out``."""
    write_json(out / SUMMARY_FILE, {**document(out, runs, rows, target), **more})
    write_text(out / "report.html", comparison_page(out, runs, rows, target))
    close_fonts()


def terminal_tables(runs: Sequence[Run], rows: Sequence[RunGroup], target: RaceTarget | None) -> RenderGroup:
    """Return the comparison for the terminal: tables, the result in one sentence, and other notes.

    The tables show the time to the target, the final metrics, and the user's own metrics.
    """
    own = [(name, row.label, _plain(row.figures.get(name, NONE))) for name in own_names(rows) for row in rows]
    tables: list[RenderableType] = [*_race(rows, target), _at_the_end(runs[0], rows)]
    tables += [table(("measure", "run", ">at the end"), own, fold=True)] if own else []
    spent = together(run.record for run in runs)
    code = mixed_code([run.record for run in runs])
    invalid = ", ".join(row.label for row in rows if not row.valid)
    warning = f"INVALID: {invalid}. {DO_NOT_USE}" if invalid else ""
    notes = (in_a_sentence(rows, target), warning, spent, *unfinished(runs), *cautions(runs), *code)
    parts = [*tables, *(Text(note) for note in notes if note)]
    return RenderGroup(*[each for part in parts for each in (Text(), part)][1:])


def unfinished(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each run that has not ended."""
    return [
        f"{run.folder} has not ended, so its row is not ranked; edgefl resume {run.folder} continues it."
        for run in runs
        if not run.finished
    ]


def cautions(runs: Sequence[Run]) -> list[str]:
    """Return sentences that name the runs that ended early, and the runs with phones that act in phase."""
    ends = TOO_FEW_CLIENTS, "participations"
    early = [str(run.folder) for run in runs if run.record.meta.stop_reason.startswith(ends)]
    in_phase = [str(run.folder) for run in runs if run.summary["phase"]["warning"]]
    count, found = many(len(runs), "run"), []
    if early:
        found.append(f"{len(early)} of {count} ended early, with too few clients: {listed(early)}.")
    if in_phase:
        found.append(
            f"In {len(in_phase)} of {count} (by chance 1%) phones act in phase, so that comparisons may not "
            f"hold (docs/individuals.md): {listed(in_phase)}."
        )
    return found


def _race(rows: Sequence[RunGroup], target: RaceTarget | None) -> Iterator[FittedTable]:
    """Yield a table of times to the target and a table of results over random fleets, if there are any."""
    if target is not None:
        yield table(
            [head.lower() for head in RACE_HEADS],
            _race_cells(rows),
            title=f"Time to {target}",
            caption=f"{target.rule}\n{RATIO}",
            fold=True,
            gap=1,
            spare=(4,),
        )
    if cells := [fleets.row(label, one) for label, one in _over_fleets(rows).items()]:
        about = fleets.explained(rows[0].label)
        yield table(
            [head.lower() for head in fleets.HEADS], cells, title=fleets.TITLE, caption=about, fold=True
        )


def _over_fleets(rows: Sequence[RunGroup]) -> dict[str, fleets.Ahead]:
    """Count, for each label, the randomly drawn fleets in which its setting beats the first setting.

    The dictionary is empty if no fleets were drawn (``edgefl sweep --fleets``).
    """
    found = {row.label: row.to_target.ahead for row in rows if row.to_target is not None}
    return {label: one for label, one in found.items() if one is not None}


def _race_cells(rows: Sequence[RunGroup]) -> list[tuple[str, ...]]:
    cells: list[tuple[str, ...]] = []
    for place, row in enumerate(rows):
        if (found := row.to_target) is not None:
            each = ((found.text(over), found.ratio_text(over) if place else "1") for over in COSTS)
            cells.append((row.label, *chain.from_iterable(each), found.passed))
    return cells


SHORT = {"accuracy on slow phones' classes": "slow", "client trips": "trips", "staleness mean/max": "stale",
         "weight of slow phones": "weight"}  # fmt: skip
"""Shorter headings for narrow terminals, keyed by the full heading."""
DO_NOT_USE = "Do not use their figures as results; each run's own report has the reasons."
COMPUTED = "Computed: times follow from the device profiles; no error is measured."


def _cells(row: RunGroup, scored: bool) -> dict[str, object]:
    """Return the final metrics of a row's runs, keyed by heading; accuracies are included if ``scored``."""
    f, stalest = row.figures, max(each["staleness_max"] for each in row.each)
    slow = share(f["slow_accuracy"])
    shares = {">Accuracy": share(f["accuracy"]), ">Accuracy on slow phones' classes": slow}
    return {
        "Run": row.label,
        **(shares if scored else {}),
        ">Loss": _plain(f["loss"]),
        ">Client trips": _count(f["client_trips"]),
        ">Versions": _count(f["versions"]),
        ">Staleness mean/max": f"{number(f['staleness_mean'].mean)}/{stalest:.0f}",
        ">Weight of slow phones": _plain(f["slow_weight"]),
        ">Fidelity": row.verdict,
    }


def _at_the_end(first: Run, rows: Sequence[RunGroup]) -> FittedTable:
    """Return a table of the final metrics; on narrow terminals, accuracy takes precedence over the loss."""
    slow, scored = first.slow, _scored(rows)
    found = []
    for row in rows:
        cells = _cells(row, scored)
        if not slow.labels:
            cells.pop(">Accuracy on slow phones' classes", None)
        cells[">Weight of slow phones"] = number(row.figures["slow_weight"].mean)
        cells[">Fidelity"] = Text(row.verdict, VERDICT_COLOURS.get(row.verdict, ""))
        found.append(cells)
    phones, heads = ", ".join(slow.profiles), [*found[0]]
    notes = [f"Slow phones' classes: the classes held only by {phones}."] if slow.labels and scored else []
    notes.append(f"Weight of slow phones: mean applied weight of {phones}; 1 is fair.")
    notes += [COMPUTED] if any(row.verdict == "computed" for row in rows) else []
    return table(
        [head.lower() for head in heads],
        [[*cells.values()] for cells in found],
        title="At the end",
        caption="\n".join(notes),
        fold=True,
        gap=1,
        spare=[heads.index(">Loss")] if scored else [],
        short=SHORT,
    )


def _scored(rows: Sequence[RunGroup]) -> bool:
    """Return True unless the runs have a loss but no accuracy, as in a regression task."""
    return is_scored(
        {name: any(np.isfinite(row.figures[name].mean) for row in rows) for name in ("accuracy", "loss")}
    )


def _plain(value: Estimate) -> str:
    return str(value) if np.isfinite(value.mean) else "–"


def _count(value: Estimate) -> str:
    return "–" if not np.isfinite(value.mean) else f"{value.mean:,.0f}"


def document(
    out: Path, runs: Sequence[Run], rows: Sequence[RunGroup], target: RaceTarget | None
) -> dict[str, Any]:
    """Return the content of the comparison's summary.json.

    These are the fields of the first run's summary, the summaries of all runs, and the comparison's rows.
    """
    first = rows[0].figures
    return {
        **runs[0].summary,
        "runs": [{"folder": os.path.relpath(run.folder, out), **run.summary} for run in runs],
        "comparison": {
            "target": None if target is None else target._asdict(),
            "slow_phones_profiles": list(runs[0].slow.profiles),
            "slow_phones_labels": list(runs[0].slow.labels),
            "privacy": together(run.record for run in runs),
            "rows": [
                {
                    "label": row.label,
                    "seeds": [run.record.meta.seed for run in row.runs],
                    "valid": row.valid,
                    "no_progress": row.stuck,
                    "figures": row.estimates(),
                    "each": [{name: rounded(value) for name, value in found.items()} for found in row.each],
                    "to_target": None if row.to_target is None else row.to_target.builtins(),
                    "minus_first": {
                        k: rounded(f.mean - first.get(k, NONE).mean) for k, f in row.figures.items()
                    },
                }
                for row in rows
            ],
        },
    }


def comparison_page(
    out: Path, runs: Sequence[Run], rows: Sequence[RunGroup], target: RaceTarget | None
) -> str:
    """Return the comparison's page: self-contained HTML with links to the runs' reports."""
    meta, seeds = runs[0].record.meta, {len(row.runs) for row in rows}
    names = [row.label.partition(" ×")[0] for row in rows]
    if len(seeds) > 1 or len({*names}) < len(names):
        names = [row.label for row in rows]
    each = many(len(rows[0].runs), "seed") + " each" if len(seeds) == 1 < len(runs) / len(rows) else ""
    about = "" if _scored(rows) else "No accuracy is measured. "
    lines = f"Measured on the {evaluated_on(runs[0].record)} examples."
    if any(len(row.runs) > 1 for row in rows):
        about += "± is half the 95% interval of the mean over seeds. "
        lines = "Thin lines show each seed, thick lines the mean over seeds."
    about += COMPUTED if any(row.verdict == "computed" for row in rows) else ""
    ends = [_cells(row, _scored(rows)) for row in rows]
    invalid = ", ".join(row.label for row in rows if not row.valid)
    warning = f"<b>INVALID:</b> {escape(invalid)}. {DO_NOT_USE}"
    stuck = ", ".join(row.label for row in rows if row.stuck)
    stuck = stuck and f"<p><b>{NO_PROGRESS.capitalize()}</b>, so not ranked: {escape(stuck)}.</p>"
    stuck += "".join(f"<p><b>{UNFINISHED.capitalize()}:</b> {escape(line)}</p>" for line in unfinished(runs))
    stuck += "".join(f"<p><b>Caution:</b> {escape(line)}</p>" for line in cautions(runs))
    each_run = together(run.record for run in runs), *mixed_code([run.record for run in runs])
    race: list[str] = []
    if target is not None:
        times = html_table(RACE_HEADS, _race_cells(rows))
        race = [page.card(f"Time to {target}", f"{target.rule} {RATIO}", times)]
    sections = {
        "Side by side": [
            *race,
            *_fleets_html(rows),
            page.card(
                "At the end of the runs", about, html_table([*ends[0]], [[*row.values()] for row in ends])
            ),
            *([page.card("Measures", "At the last evaluation.", _measures(rows))] if own_names(rows) else []),
            page.card("Each run", " ".join(filter(None, each_run)), _each(out, runs, rows)),
        ],
        "Learning": [*_learning(rows, lines), *profile_cards(rows)],
    }
    return page.page(
        "edgefl comparison",
        " · ".join(names[:4]) + (" …" if len(names) > 4 else ""),
        " · ".join(part for part in (meta.data, meta.model, many(len(runs), "run"), each) if part),
        (),
        sections,
        "Times are emulated seconds.",
        lead=in_a_sentence(rows, target),
        banner=stuck + (warning if invalid else ""),
    )


def _fleets_html(rows: Sequence[RunGroup]) -> list[str]:
    cells = [fleets.row(label, one) for label, one in _over_fleets(rows).items()]
    about = fleets.explained(rows[0].label)
    return [page.card(fleets.TITLE, about, html_table([*fleets.HEADS], cells))] if cells else []


RATIO = "Time is emulated. Ratios are to the first row, seed by seed, with the 95% interval of their mean."
RACE_HEADS = ("Run", ">Time to target, s", ">Time ÷ first row's (95%)", ">Client trips to target",
              ">Trips ÷ first row's (95%)", ">Reached")  # fmt: skip


def in_a_sentence(rows: Sequence[RunGroup], target: RaceTarget | None) -> str:
    """Return the result in a sentence: the time to the target and the final accuracy, with intervals."""
    ranked = [row for row in rows if row.ranked]
    race = race_in_words({row.label: [run.record for run in row.runs] for row in ranked}, target)
    fair = _over_fleets(ranked) if rows[0].ranked else {}
    over = (fleets.in_words(label, rows[0].label, one) for label, one in fair.items())
    race = " ".join((race, *over)).strip()
    known = [row for row in ranked if np.isfinite(row.figures["accuracy"].mean)]
    ends = {run.record.meta.stop_reason for row in ranked for run in row.runs}
    if len(known) < 2 or ends == {"accuracy"}:  # all runs stopped at the target accuracy
        return race
    slow = [row for row in known if np.isfinite(row.figures["slow_accuracy"].mean)]
    text = _highest(known) + (f". {_highest_of_slow(slow)}" if len(slow) > 1 else "")
    return f"{race} {text}.".strip()


def _highest(rows: Sequence[RunGroup]) -> str:
    """Name, in a sentence, the row with the highest final accuracy and its lead over the second row."""
    first, second, *_ = _by(rows, "accuracy")
    text = f"At the end {_leaders(rows, 'accuracy')} the highest accuracy"
    text += f": {percent(first.figures['accuracy'].mean)}"
    gap = _gap(first, second, "accuracy")
    if gap is None or gap.mean == 0.0 or _level(first, second, "accuracy"):
        return text + _doubt(first, second, "accuracy")
    if gap.mean < 0.0:  # possible if the rows have different seeds
        gap = gap._replace(mean=-gap.mean)
        text += f"; on the seeds that both have, {second.label} is "
        other = first
    else:
        text, other = f"{text}, ", second
    text += f"{(gap.mean * 100):.1f}"
    text += "" if gap.half is None else f" ±{gap.half * 100:.1f}"
    text += f" points above {other.label}"
    if gap.half is None:
        return text + ONE_SEED
    return text if higher(gap) else text + UNDECIDED


def _highest_of_slow(rows: Sequence[RunGroup]) -> str:
    first, second, *_ = _by(rows, "slow_accuracy")
    leaders, found = _leaders(rows, "slow_accuracy"), share(first.figures["slow_accuracy"])
    text = f"On the classes that only slow phones hold, {leaders} the highest accuracy: {found}"
    return text + _doubt(first, second, "slow_accuracy")


ONE_SEED = " (one seed: another may reverse the order)"
NO_SEED = " (they have no seed in common: other seeds may reverse the order)"
UNDECIDED = " (these seeds do not tell them apart)"


def _doubt(first: RunGroup, second: RunGroup, figure: str) -> str:
    """Return why the seeds do not show that ``first`` is ahead; "" if they do or if the means are equal."""
    if _level(first, second, figure):
        return ""
    gap = _gap(first, second, figure)
    if gap is None:
        return NO_SEED
    return ONE_SEED if gap.half is None else "" if higher(gap) else UNDECIDED


def _by(rows: Sequence[RunGroup], figure: str) -> list[RunGroup]:
    """Return the rows sorted by a metric's mean, highest first."""
    return sorted(rows, key=lambda row: -row.figures[figure].mean)


def _level(one: RunGroup, other: RunGroup, figure: str) -> bool:
    return one.figures[figure].mean == other.figures[figure].mean


def _leaders(rows: Sequence[RunGroup], figure: str) -> str:
    """Return the labels of the rows with the highest mean of a metric, followed by "has" or "have"."""
    first = _by(rows, figure)[0]
    names = [row.label for row in rows if _level(row, first, figure)]
    return f"{' and '.join(names)} {'have' if len(names) > 1 else 'has'}"


def _gap(first: RunGroup, second: RunGroup, figure: str) -> Estimate | None:
    """Return a metric's mean difference, ``first`` minus ``second``, over the seeds that both rows have.

    Return None if the rows have no seed in common.
    """
    one, other = (
        {run.record.meta.seed: each[figure] for run, each in zip(row.runs, row.each, strict=True)}
        for row in (first, second)
    )
    seeds = [seed for seed in one if seed in other]
    return difference([one[seed] for seed in seeds], [other[seed] for seed in seeds]) if seeds else None


def _learning(rows: Sequence[RunGroup], lines: str) -> list[str]:
    """Return pictures of the accuracy (of the loss if no run has an accuracy) and of the user's metrics."""
    about = {"at_s": lines, "trips": "A trip consists of download, training and upload.", "own": lines}
    own = dict.fromkeys(name for row in rows for run in row.runs for name in metric_names(run.record))
    last: list[str] | None = [] if _scored(rows) else None
    if last is not None and rows[0].runs[0].slow.labels:
        slow = curves(rows, "accuracy", "trips", slow=True)
        drawn = curves_picture(slow, "trips", "Accuracy on slow phones' classes")
        last = [page.figure("Accuracy on slow phones' classes", "Classes that no faster phone has.", drawn)]
    return learning_figures(lambda *what: curves(rows, *what), [*own], about, last)


def profile_cards(rows: Sequence[RunGroup]) -> list[str]:
    """Return two cards that show each profile's applied weight and staleness, slowest profile first."""
    names = profiles_by_speed(*(run.record for row in rows for run in row.runs))

    def by_profile(title: str, about: str, value: Callable[[Run], dict[str, float]]) -> str:
        found = [[value(run) for run in row.runs] for row in rows]
        cells = []
        for name in names:
            known = ([figures[name] for figures in seeds if name in figures] for seeds in found)
            cells.append([name, *(str(estimate(values)) if values else None for values in known)])
        return page.card(title, about, html_table(["Profile", *(f">{row.label}" for row in rows)], cells))

    def staleness(run: Run) -> dict[str, float]:
        found = run.summary["staleness"]["by_profile"]
        return {name: found[name]["mean"] for name in found.keys() & applied_profiles(run.record)}

    return [
        by_profile("Applied weight by profile", "Mean over a profile's clients: 1 is fair.",
                   lambda run: run.summary["applied_weight"]["by_profile"]),
        by_profile("Staleness by profile", "Mean over applied updates; runs without any are left out.",
                   staleness),
    ]  # fmt: skip


def _measures(rows: Sequence[RunGroup]) -> str:
    """Return a table of the user's metrics, with one column for each of ``rows``."""
    cells = [[name, *(_plain(row.figures.get(name, NONE)) for row in rows)] for name in own_names(rows)]
    return html_table(["Measure", *(f">{row.label}" for row in rows)], cells)


def _each(out: Path, runs: Sequence[Run], rows: Sequence[RunGroup]) -> str:
    found, labels = {}, {run.folder: row.label.partition(" ×")[0] for row in rows for run in row.runs}
    for run in runs:
        report, meta = run.folder / "report.html", run.record.meta
        name = escape(f"{labels[run.folder]}, seed {meta.seed}")
        link = f'<a href="{escape(quote(os.fsencode(os.path.relpath(report, out))))}">{name}</a>'
        accuracy, loss = run.summary["accuracy"], run.summary["loss"]
        learned = f"loss {number(loss)}" if accuracy is None else percent(accuracy)
        figures = f"{learned}, {run.summary['client_trips']:,} trips"
        hashed = f'{figures} <span class="hash">{escape(meta.model_sha256[:16])}</span>'
        found[run.folder] = (link if report.is_file() else name, hashed)
    return page.definitions(found.values())


def curves(rows: Sequence[RunGroup], name: str, over: str, *, slow: bool = False) -> list[Curve]:
    """Return, for each row, a metric's curve over ``at_s`` or ``trips``: the mean, and each seed's curve.

    If ``slow``, the metric is the accuracy on the classes that only slow clients have.
    """
    found = []
    for k, row in enumerate(rows):
        points = (measured(run.record, name, over, run.slow.labels if slow else None) for run in row.runs)
        seeds = [each for each in points if each.size]
        if len(seeds) == 1:
            found.append(Curve(series(k), row.label, *seeds[0]))
        elif seeds:
            x, mean, *_ = summary_curve(seeds)
            found.append(Curve(series(k), row.label, x, mean, seeds))
    return found
