"""The commands ``run``, ``resume``, ``compare``, ``report``, ``trace``, ``verify`` and ``keys`` of edgefl."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl import new_run_folder
from edgefl.cli.paths import folder_option, run_folder, run_or_sweep
from edgefl.errors import ConfigError, EdgeflError, FolderTaken, RunError, damaged
from edgefl.experiment import NO_PROGRESS, TOO_FEW_CLIENTS
from edgefl.terminal import say

if TYPE_CHECKING:
    from edgefl.experiment import Experiment
    from edgefl.hosts.nodes import Nodes
    from edgefl.results.result import Result

ExperimentFile = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment, a TOML file.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as strategy.name=fedbuff."),
]
ClockKind = Annotated[
    str | None, typer.Option("--clock", metavar="wall|virtual", help="Overrides clock.kind.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The run's folder.", parser=run_folder)]
AcceptInvalid = Annotated[
    bool, typer.Option("--accept-invalid", help="Exit with 0, not 3, if the emulation was INVALID.")
]
INVALID = 3
"""Exit code of a run that completed, but whose emulation missed its accuracy limits."""
TargetAccuracy = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="Compare the times until this accuracy; default: stop.accuracy."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")]
Web = Annotated[
    bool, typer.Option("--web", help="Show the run on a live page that only this machine can open.")
]
WebPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", min=0, max=65535, help="Port of the page; implies --web. Default: any."),
]

UnsetKeys = Annotated[
    list[str] | None,
    typer.Option("--unset", metavar="KEY", help="Remove one key of the file, such as training.steps."),
]
Seed = Annotated[int | None, typer.Option(help="Overrides seed.")]
Out = Annotated[Path | None, folder_option("Folder of the run; default runs/NAME-DATE-TIME.")]

Ray = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="HOST:PORT|auto", help="Have the nodes of this Ray cluster host clients or workers."
    ),
]


def known_tracker(text: str) -> str:
    """Parse the value of ``--track``. Raises `ConfigError` if the tracker is unknown or not installed."""
    from edgefl.results.trackers import require

    require(text)
    return text


Track = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Copy the run to tensorboard, mlflow or wandb (docs/trackers.md).",
        parser=known_tracker,
    ),
]


class Interrupted(EdgeflError):
    """The user pressed Ctrl-C during a run."""


def run(
    file: ExperimentFile,
    set_: Changes = None,
    unset: UnsetKeys = None,
    clock: ClockKind = None,
    seed: Seed = None,
    out: Out = None,
    accept_invalid: AcceptInvalid = False,
    web: Web = False,
    web_port: WebPort = None,
    quiet: Quiet = False,
    ray: Ray = None,
    track: Track = None,
) -> int:
    """Run one experiment."""
    require_torch()
    experiment = read_experiment(file, set_, unset, clock, seed, on_nodes=ray is not None)
    nodes = cluster(ray, experiment, file.parent.absolute(), quiet)
    return carry_out(experiment, file, out, accept_invalid, web, web_port, quiet, nodes, track)


def read_experiment(
    file: Path,
    set_: list[str] | None,
    unset: list[str] | None,
    clock: str | None,
    seed: int | None,
    *,
    on_nodes: bool,
    grid: Collection[str] = (),
) -> Experiment:
    """Load the experiment that a command runs. If nodes cannot use its ``server.transport``, print a warning.

    For ``grid``, see `config.load`. Raises `ConfigError` for an experiment that is invalid or cannot run on
    nodes.
    """
    from edgefl import config

    transport = "wire" if on_nodes else None
    found = config.load(
        file, set_ or (), seed=seed, clock=clock, unset=unset or (), transport=transport, grid=grid
    )
    if on_nodes:
        from edgefl.hosts import nodes

        if found.server.transport == "shm":
            say("edgefl: server.transport is 'wire' on nodes, because they share no memory ('shm')", err=True)
        return nodes.on_nodes(found, file.parent.absolute())
    return found


def carry_out(
    experiment: Experiment,
    file: Path,
    out: Path | None,
    accept_invalid: bool,
    web: bool,
    web_port: int | None,
    quiet: bool,
    nodes: AbstractContextManager[Nodes | None],
    track: str | None = None,
) -> int:
    """Run the experiment of ``file``, on ``nodes`` if there are any; return the exit code.

    Afterwards the run is copied to the tracker ``track``, if one is given.
    """
    folder = new_run_folder(experiment.name) if out is None else _free(out)

    from edgefl.devices.fleet import fleet_of
    from edgefl.privacy.accounting import delta_warning
    from edgefl.run import supervisor
    from edgefl.run.web import page_socket

    base, rules = file.parent.absolute(), experiment.privacy
    if rules is not None and (warning := delta_warning(rules, len(fleet_of(experiment)))):
        say(f"edgefl: {warning}", err=True)
    with page_socket(0 if web and web_port is None else web_port) as page, nodes as hosts:
        while True:
            try:
                begin = partial(supervisor.run, experiment, folder, quiet, base, page, hosts=hosts)
                code = _finish(begin, folder, quiet, accept_invalid)
                break
            except FolderTaken:
                if out is not None:
                    raise
                folder = new_run_folder(experiment.name)  # another run created the folder at the same moment
    if track is not None:
        copy_to_tracker(folder, track)
    return code


def copy_to_tracker(folder: Path, tracker: str) -> None:
    """Copy a run, or each run of a sweep, to a tracker, and print where the copies are."""
    from edgefl.results.run_folder import is_sweep
    from edgefl.results.sweep import Sweep
    from edgefl.results.trackers import track

    places = Sweep(folder).track(tracker) if is_sweep(folder) else [track(folder, tracker)]
    for place in dict.fromkeys(places):
        say(f"{tracker}: {place}", err=True)


def resume(
    folder: RunFolder,
    accept_invalid: AcceptInvalid = False,
    web: Web = False,
    web_port: WebPort = None,
    quiet: Quiet = False,
    ray: Ray = None,
) -> int:
    """Resume a run after a crash or Ctrl-C.

    A run killed before its first checkpoint restarts from the beginning.
    """
    from edgefl.results.run_folder import hinting_moved
    from edgefl.run import supervisor
    from edgefl.run.web import page_socket

    require_torch()
    with (
        page_socket(0 if web and web_port is None else web_port) as page,
        damaged(str(folder)),
        hinting_moved(folder),
        _cluster_for(ray, folder, quiet) as nodes,
    ):
        again = partial(supervisor.resume, folder, quiet, page, hosts=nodes)
        return _finish(again, folder, quiet, accept_invalid)


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Folders of runs or sweeps.", parser=run_or_sweep)
    ],
    out: Annotated[Path | None, folder_option("Write summary.json, report.html and trace.json here.")] = None,
    target: TargetAccuracy = None,
) -> None:
    """Compare runs: time to a target accuracy, and other metrics."""
    from edgefl.results.sweep import compare_folders
    from edgefl.results.tables import show

    with damaged(", ".join(map(str, folders))):
        show(compare_folders(folders, out, target))


def report(
    folder: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write; default report.html in the run's folder."),
    ] = None,
) -> None:
    """Write a run's HTML report and print its path."""
    from edgefl.files import is_replaceable
    from edgefl.results.report import write_report

    if out is not None and (not out.name or out.is_dir()):
        raise ConfigError(f"--out {out} is a folder; expected a file")
    if out is not None and out.is_file() and is_replaceable(out):
        with out.open("rb") as old:
            start = old.read(100).lstrip().lower()
            if start and not start.startswith((b"<!doctype html", b"<html")):
                raise ConfigError(f"--out {out}: the file exists and is not an HTML page; name another file")
    try:
        with damaged(str(folder)):
            say(write_report(folder, out))
    except RunError as error:
        raise ConfigError(f"{error}{'' if out else '; name another file: --out FILE'}") from None


def trace(folder: RunFolder) -> None:
    """Write a run's Perfetto timeline and print its path."""
    from edgefl.results.trace import write_trace

    with damaged(str(folder)):
        say(write_trace(folder))


def verify(
    folder: RunFolder,
    code: Annotated[
        Path | None, folder_option("Import the run's own modules from here; only if you trust them.")
    ] = None,
) -> None:
    """Repeat a run from its journal, and compare every bit.

    The updates, measurements and model of both runs must be identical.
    """
    from edgefl.lab.verify import verify as again
    from edgefl.results.run_folder import hinting_moved
    from edgefl.results.tables import progress_bar

    with progress_bar("versions") as progress, damaged(str(folder)), hinting_moved(folder):
        task = progress.add_task("", total=None)
        found = again(folder, lambda made, of: progress.update(task, completed=made, total=of), code)
    if found.updates:
        say(f"identical: {found.updates:,} updates, {found.versions:,} versions")
    else:
        say("no update arrived in this run; its initial model is identical")
    say(f"model_sha256 {found.model_sha256}")


def keys(
    which: Annotated[
        str, typer.Argument(metavar="[TABLE]", help="fleet, training, stop …, or a strategy's name.")
    ] = "",
) -> None:
    """List the keys of an experiment, or of one table or strategy."""
    from edgefl.config import keys as known
    from edgefl.results import tables

    rows = []
    for key in known.keys(which):
        meaning = key.meaning.replace("``", "")
        rows.append((key.name, key.default or "–", f"{meaning} Allowed: {key.allowed}."))
    tables.show(tables.table(("key", "default", "meaning"), rows))


def cluster(
    ray: str | None, experiment: Experiment, base: Path, quiet: bool
) -> AbstractContextManager[Nodes | None]:
    """Return the nodes of the Ray cluster ``ray``, or no nodes if it is None."""
    if ray is None:
        return nullcontext()
    from edgefl.hosts.ray import nodes_of

    return nodes_of(ray, experiment, base, quiet=quiet)


def _cluster_for(ray: str | None, folder: Path, quiet: bool) -> AbstractContextManager[Nodes | None]:
    """Return the nodes of a Ray cluster that resume the run in ``folder``, or no nodes if ``ray`` is None."""
    if ray is None:
        return nullcontext()
    from edgefl import config
    from edgefl.results.run_folder import (
        EXPERIMENT_FILE,
        base_of,
        begun,
        missing_results,
        restore_experiment,
    )

    if missing_results(folder):  # the run has ended, so only its results are written
        return nullcontext()
    restore_experiment(folder)
    return cluster(
        ray, config.load(folder / EXPERIMENT_FILE, recorded=True), base_of(folder, begun(folder)), quiet
    )


def require_torch() -> None:
    """Raise `ConfigError` if torch is missing, so that not every process of the run prints a traceback."""
    if find_spec("torch") is None:
        raise ConfigError("a run needs torch, which is not installed: pip install torch")


def _free(out: Path) -> Path:
    """Return the folder ``out``. Raises `ConfigError` unless it is new or empty."""
    from edgefl.results.run_folder import EXPERIMENT_FILE

    if (out / EXPERIMENT_FILE).is_file():
        raise ConfigError(f"--out {out} holds a run; name another folder, or carry on: edgefl resume {out}")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; expected a new or empty folder")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out} is not empty; expected a new or empty folder")
    return out


def _finish(run: Callable[[], Result], folder: Path, quiet: bool, accept_invalid: bool) -> int:
    """Call ``run``, print the outcome (only problems if ``quiet``), and return the exit code."""
    from edgefl.results.result import summary_in
    from edgefl.results.run_folder import EXPERIMENT_FILE, is_done

    try:
        summary = run().summary()
    except KeyboardInterrupt:
        if not is_done(folder):
            begun = (folder / EXPERIMENT_FILE).is_file()
            hint = f"; carry on with: edgefl resume {folder}" if begun else " before anything was written"
            raise Interrupted(f"interrupted{hint}") from None
        summary = summary_in(folder)  # the run had ended when the signal came
    fidelity = summary["fidelity"]
    if summary["stop_reason"].startswith(TOO_FEW_CLIENTS):
        say(f"edgefl: the run ended early: {summary['stop_reason']}", err=True)
    if summary["stop_reason"] == "participations":
        say("edgefl: run ended: [privacy] allows too few clients to take part in another version", err=True)
    if no_progress := summary["no_progress"]:
        say(f"edgefl: {NO_PROGRESS}: {no_progress}; the figures are not meaningful", err=True)
    if not fidelity["valid"]:
        say(f"edgefl: INVALID: {'; '.join(fidelity['reasons'][:2])}; see fidelity in summary.json", err=True)
    if warning := summary["phase"]["warning"]:
        say(f"edgefl: {warning}", err=True)
    if not quiet:
        from edgefl.results.report import summary_table
        from edgefl.results.tables import show

        show(summary_table(summary, folder))
    return 1 if no_progress else 0 if fidelity["valid"] or accept_invalid else INVALID
