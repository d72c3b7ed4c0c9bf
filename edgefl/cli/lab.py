"""``edgefl bench`` measures edgefl, ``reproduce`` tests papers' claims, and ``chaos`` kills processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.paths import figures_file, folder_option, require_finite
from edgefl.cli.run import Changes, ClockKind, ExperimentFile, Interrupted
from edgefl.errors import ConfigError, RunError, unknown
from edgefl.lab import PAPERS
from edgefl.terminal import say

if TYPE_CHECKING:
    from edgefl.lab.outcome import Findings
    from edgefl.lab.study import Curves, Finding, Study

Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the figures to this file.", parser=figures_file),
]
PICTURES = (".png", ".svg")
Quick = Annotated[bool, typer.Option("--quick", help="Measure fewer sizes, with fewer repetitions.")]

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measurements, each compared with its limit in the same run.",
)


@bench.command()
def aggregate(json: Json = None, quick: Quick = False) -> None:
    """Compare the speed of the server's sums with that of memory."""
    _measure("aggregate", json, quick)


@bench.command()
def fidelity(json: Json = None, quick: Quick = False) -> int:
    """Measure emulated phones against their profiles.

    The exit code is 1 if a limit is exceeded.
    """
    return 0 if _measure("fidelity", json, quick)["verdict"] == "PASS" else 1


@bench.command()
def ingest(json: Json = None, quick: Quick = False) -> None:
    """Measure the updates per second that the server handles."""
    _measure("ingest", json, quick)


@bench.command()
def memory(json: Json = None, quick: Quick = False) -> None:
    """Compare predicted and measured memory of training steps."""
    _measure("memory", json, quick)


@bench.command()
def peers(
    json: Json = None,
    quick: Quick = False,
    only: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Frameworks to measure; some of edgefl,torch,pfl,flower,flsim."),
    ] = None,
    settings: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Settings to measure; some of pfl,flute,fedstaleweight."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="S", min=0.1, help="Seconds per measurement; default 30, --quick 10."),
    ] = None,
    venvs: Annotated[
        Path | None,
        folder_option("Folder for the frameworks' environments; default peers in the cache folder."),
    ] = None,
) -> None:
    """Compare the speed of other frameworks with edgefl's.

    pip installs each framework into an environment of its own.
    """
    require_finite("--seconds", seconds)
    _measure("peers", json, quick, only=only, settings=settings, seconds=seconds, venvs=venvs)


@bench.command()
def spawn(json: Json = None, quick: Quick = False) -> None:
    """Measure the start-up time and memory of clients."""
    _measure("spawn", json, quick)


@bench.command()
def truth(
    json: Json = None,
    quick: Quick = False,
    rows: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="CSV file of measured steps, instead of the bundled ones."),
    ] = None,
    boards: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Compare only rates of boards, with this CSV of sbc-bench results."
        ),
    ] = None,
    phones: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Compare only inference on phones, with this CSV of times; needs --networks."
        ),
    ] = None,
    networks: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A CSV file with the layers of the networks in --phones."),
    ] = None,
) -> None:
    """Compare predicted step times and rates with measured ones."""
    given = {"--rows": rows, "--boards": boards, "--phones": phones}
    kinds = [name for name, value in given.items() if value]
    if len(kinds) > 1:
        raise ConfigError(f"{kinds[-1]} FILE: cannot be combined with {kinds[0]}")
    if (phones is None) != (networks is None):
        raise ConfigError("--phones FILE and --networks FILE are needed together")
    if phones is not None:
        _measure("phone_truth", json, quick, rows=phones, networks=networks)
    elif boards is not None:
        _measure("board_truth", json, quick, boards=boards)
    else:
        _measure("truth", json, quick, files=rows or ())


def _measure(what: str, file: Path | None, quick: bool, **more: Any) -> dict[str, Any]:
    """Run the measurement ``what``, print its result and return it.

    If ``file`` is given, write the result to it, and pictures of the result to files beside it. No pictures
    are written if ``file`` is a device or a pipe.
    """
    from edgefl.files import is_replaceable, write_text

    module = import_module(f"edgefl.lab.{what}")
    draws = hasattr(module, "draw") and file is not None and is_replaceable(file)
    if file is not None and draws and file.suffix in PICTURES:
        raise ConfigError(f"--json {file}: a picture is written to this file; name another")
    result: dict[str, Any] = module.run(quick, **more, say=lambda text: say(f"{text} …", err=True))
    module.show(result)
    if file is not None:
        write_text(file, json.dumps(result, indent=2) + "\n")
        pictures = [file.with_suffix(ending) for ending in PICTURES if draws]
        if pictures:
            import matplotlib

            # The user may have set text.usetex, but LaTeX may be missing.
            with matplotlib.rc_context({"text.usetex": False}):
                module.draw(result, pictures)
        say(f"wrote {', '.join(map(str, [file, *pictures]))}", err=True)
    return result


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help=f"Paper's name: {', '.join(PAPERS)}.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Small runs on bundled data: minutes instead of hours.")
    ] = False,
    settings: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Other settings of the paper: cifar10 (fedstaleweight, defedavg) or 1000 (fedbuff).",
        ),
    ] = "",
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="First tune each algorithm's learning rates for these settings, and save them."
        ),
    ] = False,
    mutants: Annotated[
        bool,
        typer.Option(
            "--mutants",
            help="Also run wrong implementations of each claim's algorithm (--quick always does).",
        ),
    ] = False,
    out: Annotated[
        Path | None, folder_option("Folder; default runs/reproduce-PAPER. Finished runs in it are reused.")
    ] = None,
    changes: Changes = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no table.")] = False,
) -> None:
    """Test a paper's claims, with a verdict on each.

    The settings are the paper's, with at least three seeds.
    """
    if paper not in PAPERS:
        raise ConfigError(unknown("paper", paper, PAPERS))
    if quick and settings not in ("", "quick"):
        raise ConfigError(f"--quick: cannot be combined with --settings {settings}")
    settings = "quick" if quick else settings
    folder = out or Path("runs") / f"reproduce-{paper}{'-' if settings else ''}{settings}"

    def tell(text: str) -> None:
        if not quiet:
            say(text, err=True)

    from edgefl.lab.claims import corrected, correction
    from edgefl.lab.study import verdict_table, write_report
    from edgefl.results.run_folder import require_free

    require_free(folder, "findings")
    kept: dict[str, Any] = {"paper": paper, "settings": settings, "set": changes or []}
    if paper == "theory":
        options = [*(f"--set {change}" for change in changes or ()), *["--tune"] * tune]
        options += ["--mutants"] * mutants + [f"--settings {settings}"] * bool(settings and not quick)
        if options:
            raise ConfigError(f"{options[0]}: {paper} has no settings")
        from edgefl.lab import theory

        try:  # refuse an invalid folder before the work begins
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {folder}: cannot be created: {error.strerror}") from None
        title, citation, remarks, curves = theory.TITLE, theory.CITATION, list[str](), None
        findings = corrected(theory.findings(quick=quick, say=tell))
    else:
        from edgefl.lab.studies import load

        study = load(paper).changed(changes or ())
        curves, findings = _judged(study, folder, settings, tune, mutants, quiet, tell)
        title, citation, remarks = study.title, study.citation, study.remarks(settings)  # of the tuned steps
    notes = [*remarks, *filter(None, [correction(findings)])]
    write_report(folder, title, citation, findings, curves=curves, notes=notes, extra=kept)
    if not quiet:
        from edgefl.results.tables import show

        show(verdict_table(findings))
        say(correction(findings))
        say(f"{folder / 'report.html'}")


def _judged(
    study: Study,
    folder: Path,
    settings: str,
    tune: bool,
    mutants: bool,
    quiet: bool,
    tell: Callable[[str], None],
) -> tuple[Curves, list[Finding]]:
    """Run a study and judge its claims; if ``tune``, first choose the learning rates."""
    from edgefl.lab.claims import examined

    try:
        if tune:
            from edgefl.lab.tuning import tune as choose_steps

            tell(f"wrote learning rates to {choose_steps(study, folder, settings, say=tell, quiet=quiet)}")
        curves = study.run(folder, settings, say=tell, quiet=quiet)
        return curves, examined(study, curves, folder, mutants=mutants, say=tell, quiet=quiet)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; run the same command again to resume") from None


def chaos(
    file: ExperimentFile,
    kills: Annotated[int, typer.Option(metavar="N", min=1, help="Number of kills.")] = 20,
    only: Annotated[
        str | None, typer.Option(metavar="KINDS", help="Kinds of processes to kill, such as server,client.")
    ] = None,
    every: Annotated[
        float, typer.Option(metavar="S", min=0.0, help="Mean seconds from a recovery to the next kill.")
    ] = 1.0,
    failpoints: Annotated[
        int,
        typer.Option(
            metavar="K", min=0, help="Instead of --kills: kill the server K times at each failpoint."
        ),
    ] = 0,
    set_: Changes = None,
    clock: ClockKind = None,
    seed: Annotated[int, typer.Option(help="Seed that draws the times and processes.")] = 0,
    out: Annotated[Path | None, folder_option("Folder; default runs/chaos-DATE-TIME.")] = None,
    json: Json = None,
) -> int:
    """Kill processes of runs, resume the runs, and check them.

    Processes are killed with kill -9, at random times or at failpoints, in as many runs as needed.
    If a guarantee is violated, the exit code is 1, and each violation is printed on one line.
    """
    from edgefl import new_run_folder
    from edgefl.files import write_text
    from edgefl.lab.chaos import Plan, disturb
    from edgefl.results.tables import progress_bar, show

    require_finite("--every", every)
    plan = Plan(
        file=file,
        changes=tuple(set_ or ()),
        clock=clock,
        kills=kills,
        seed=seed,
        every_s=every,
        only=frozenset(only.split(",") if only else ()),
        failpoints=failpoints,
    )
    folder = out or new_run_folder("chaos")
    with progress_bar("kills") as progress:
        task = progress.add_task("", total=kills if not failpoints else None)

        def tell(findings: Findings, doing: str) -> None:
            progress.update(task, completed=len(findings.kills), description=doing)

        findings = disturb(plan, folder, tell)
    show(_table(findings))
    for line in _lines(findings):
        say(line)
    for violation in findings.violations:
        say(f"VIOLATED: {violation}", err=True)
    if json is not None:
        import json as encoder

        write_text(json, encoder.dumps({"file": str(file), "seed": seed, **findings.document()}, indent=1))
    if findings.violations:
        return 1
    if findings.interrupted:
        raise Interrupted("interrupted; the results above are incomplete")
    if len(findings.kills) < kills and not failpoints:
        why = "the runs end too soon, or have no process of the kinds in --only"
        raise RunError(f"{file}: only {len(findings.kills)} of {kills} kills were made: {why}")
    if failpoints and not findings.kills:
        raise RunError(f"{file}: no process was killed, because no run reached one of these failpoints")
    return 0


def _table(findings: Findings) -> Any:
    from edgefl.results.tables import table

    rows = []
    for kind in (*findings.kinds, None):
        count, found = findings.recovery(kind)
        rows.append((kind or "all", count, *(found.get(key) for key in ("median_s", "p95_s", "worst_s"))))
    return table(("killed", ">times", ">recovery, median, s", ">95th percentile, s", ">longest, s"), rows)


def _lines(findings: Findings) -> list[str]:
    from edgefl.results.tables import many

    judged = [each for each in findings.rounds if each.judged]
    trips, commands = (sum(getattr(each, name) for each in judged) for name in ("trips", "commands"))
    held, of = sum(not each.violations for each in judged), f"{findings.clock} clock, {findings.transport}"
    lines = [f"{of}: {many(len(judged), 'run')} by {many(commands, 'command')}, {many(trips, 'trip')}"]
    bits = "with the same bits as an undisturbed run"
    kept = f"with each of {sum(each.acknowledged for each in judged):,} acknowledged updates recorded once"
    lines.append(f"{held} of {len(judged)} {bits if findings.clock == 'virtual' else kept}")
    if not findings.violations:
        longest_s = max((each.outlived_s for each in findings.rounds), default=0.0)
        lines.append(
            f"nothing left behind; no process outlived its supervisor by more than {longest_s:.1f} s"
        )
    if unjudged := len(findings.rounds) - len(judged):
        lines.append(f"{many(unjudged, 'run')} did not end and were not checked")
    return lines
