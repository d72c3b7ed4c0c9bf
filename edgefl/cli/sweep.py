"""``edgefl sweep`` runs an experiment over a grid and seeds; ``export`` writes a run's tables as files."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from edgefl import toml
from edgefl.cli.paths import folder_option, run_folder, run_or_sweep
from edgefl.cli.run import (
    INVALID,
    AcceptInvalid,
    Changes,
    ClockKind,
    ExperimentFile,
    Interrupted,
    Ray,
    TargetAccuracy,
    Track,
    cluster,
    copy_to_tracker,
    read_experiment,
)
from edgefl.errors import ConfigError, damaged
from edgefl.experiment import NO_PROGRESS
from edgefl.terminal import say

MAX_SEEDS = 10_000


def sweep(
    file: ExperimentFile,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="A..B|A,B", help="Seeds for each setting, such as 1..3 (the default) or 1,2,5."),
    ] = None,
    fleets: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            max=MAX_SEEDS,
            help="Instead of seeds: N fleets, drawn from the profiles' intervals.",
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V,V…",
            help="Values of one key, such as strategy.server_lr=0.1,1; may be repeated.",
        ),
    ] = None,
    set_: Changes = None,
    clock: ClockKind = None,
    out: Annotated[
        Path | None, folder_option("Folder; default runs/NAME-sweep. Finished runs in it are reused.")
    ] = None,
    target: TargetAccuracy = None,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            "-j",
            metavar="N",
            min=1,
            max=256,
            help="Runs at the same time, each on its share of the cores; virtual clock only.",
        ),
    ] = 1,
    ray: Ray = None,
    accept_invalid: AcceptInvalid = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no table.")] = False,
    track: Track = None,
) -> int:
    """Run one experiment over a grid of settings and seeds.

    The runs are compared. The same command resumes a sweep that was stopped.
    """
    choices = dict(map(axis, grid or ()))
    if len(choices) < len(grid or ()):
        raise ConfigError("--grid: give each key once, with all its values")
    if seeds is not None and fleets is not None:
        raise ConfigError("--seeds and --fleets: give only one of them; each fleet has its own seed")
    if jobs > 1 and ray is not None:
        raise ConfigError(
            "--jobs and --ray: give only one of them; with --ray, each run uses the whole cluster"
        )
    _check_replaced(set_ or (), choices)
    for change in set_ or () if fleets is not None else ():
        if toml.assignment(change)[0] == ("fleet", "model_errors"):
            raise ConfigError(f"--set {change}: has no effect, because --fleets replaces it")
    if clock is not None and (key := next((key for key in ("clock", "clock.kind") if key in choices), None)):
        raise ConfigError(f"--clock {clock}: has no effect, because --grid {key} replaces it")
    numbers = seeds_of("1..3" if seeds is None else seeds) if fleets is None else [*range(1, fleets + 1)]
    experiment = read_experiment(file, set_, None, clock, None, on_nodes=ray is not None, grid=choices)
    base, folder = file.parent.absolute(), out or Path("runs") / f"{experiment.name}-sweep"

    from edgefl.hosts.nodes import on_nodes
    from edgefl.results.tables import show
    from edgefl.run.sweep import CURVES
    from edgefl.run.sweep import sweep as run_all

    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT for background jobs
    try:
        found = run_all(
            experiment,
            folder,
            seeds=numbers,
            grid=choices,
            base=base,
            say=lambda text: None if quiet else say(text, err=True),
            show=lambda table: None if quiet else show(table),
            quiet=quiet,
            target=target,
            fleets=fleets is not None,
            jobs=jobs,
            hosts=lambda one: cluster(ray, one, base, quiet),
            adapted=lambda one: one if ray is None else on_nodes(one, base),
        )
    except KeyboardInterrupt:
        raise Interrupted("interrupted; run the same command again to resume") from None
    if not quiet:
        for name in ("report.html", CURVES):
            if (folder / name).is_file():
                say(f"{folder / name}")
    if track is not None:
        copy_to_tracker(folder, track)
    rows = found.summary()["comparison"]["rows"]
    if stuck := [row["label"] for row in rows if row["no_progress"]]:
        say(f"edgefl: {NO_PROGRESS}, so not ranked: {', '.join(stuck)}", err=True)
    invalid = [row["label"] for row in rows if not row["valid"]]
    if invalid:
        say(f"edgefl: INVALID: {', '.join(invalid)}; see fidelity in their summary.json", err=True)
    return 1 if stuck else INVALID if invalid and not accept_invalid else 0


def _check_replaced(changes: Sequence[str], grid: Iterable[str]) -> None:
    """Raise `ConfigError` if the grid overrides a key that ``--set`` changes.

    A grid overrides a key if it sets the key itself, the key's table, or a key that cannot be set together
    with it (`edgefl.config.ONE_OF`).
    """
    from edgefl.config import ONE_OF

    for change in changes:
        keys, _ = toml.assignment(change)
        for key in grid:
            replaced = tuple(key.split("."))
            if keys[: len(replaced)] == replaced or replaced in ONE_OF.get(keys, ()):
                raise ConfigError(f"--set {change}: has no effect, because --grid {key} replaces it")


def axis(text: str) -> tuple[str, list[str]]:
    """Parse the value of ``--grid`` into a key and its values.

    Commas inside brackets or quotes do not separate values.

    >>> axis("model.args.hidden=[32],[64,32]")
    ('model.args.hidden', ['[32]', '[64,32]'])
    """
    key, equals, values = text.partition("=")
    parts = _parts(values)
    if not equals or not key.strip() or not all(parts):
        raise ConfigError(f"--grid {text!r}: expected KEY=VALUE,VALUE, such as training.lr=0.1,1")
    return key.strip(), parts


def _parts(text: str) -> list[str]:
    parts, quote, depth = [""], "", 0
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def seeds_of(text: str) -> list[int]:
    """Parse the value of ``--seeds`` into a list of seeds.

    >>> seeds_of("1..3,7")
    [1, 2, 3, 7]
    """
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            low, high = int(first), int(last if dots else first)
        except ValueError:
            raise ConfigError(f"--seeds {text}: expected numbers, such as 1..3 or 1,2,5") from None
        if not 0 <= low <= high or high - low >= MAX_SEEDS:
            raise ConfigError(f"--seeds {text}: expected at most {MAX_SEEDS:,} seeds in ascending order")
        found += range(low, high + 1)
    return found


def export(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="The run's folder; with --track also a sweep's.", parser=run_or_sweep
        ),
    ],
    csv: Annotated[bool, typer.Option("--csv", help="CSV files (the default).")] = False,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Parquet files; needs polars or pyarrow.")
    ] = False,
    out: Annotated[Path | None, folder_option("Folder of the files; default DIR/tables.")] = None,
    track: Track = None,
) -> None:
    """Write a run's tables as files, or copy it to a tracker.

    Tables: evaluations, trips, versions, weights, clients, incidents.
    """
    if csv + parquet + (track is not None) > 1:
        raise ConfigError("--csv, --parquet and --track: give only one of them")
    if track is not None:
        if out is not None:
            raise ConfigError("--out: has no effect with --track; leave it out")
        with damaged(str(folder)):
            copy_to_tracker(folder, track)
        return
    run_folder(str(folder))  # raises an error for a sweep: only a single run has tables
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; expected a folder")

    from edgefl.results.columns import export as write

    with damaged(str(folder)):
        for path in write(folder, out or folder / "tables", "parquet" if parquet else "csv"):
            say(path)
