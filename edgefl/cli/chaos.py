"""``edgefl chaos``: kill processes of an experiment repeatedly, and check that nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.lab import Json
from edgefl.cli.paths import folder_option
from edgefl.cli.run import Changes, ClockKind, ExperimentFile, Interrupted
from edgefl.errors import RunError
from edgefl.terminal import say

if TYPE_CHECKING:
    from edgefl.lab.chaos_findings import Findings


def chaos(
    file: ExperimentFile,
    kills: Annotated[int, typer.Option(metavar="N", min=1, help="Number of kills.")] = 20,
    only: Annotated[
        str | None, typer.Option(metavar="KINDS", help="Kinds of processes to kill, such as server,client.")
    ] = None,
    every: Annotated[float, typer.Option(metavar="S", min=0.0, help="Mean seconds to the next kill.")] = 1.0,
    failpoints: Annotated[
        int, typer.Option(metavar="K", min=0, help="Instead: K kills of the server at each failpoint.")
    ] = 0,
    set_: Changes = None,
    clock: ClockKind = None,
    seed: Annotated[int, typer.Option(help="Seed of the times and processes.")] = 0,
    out: Annotated[Path | None, folder_option("Folder; default runs/chaos-DATE-TIME.")] = None,
    json: Json = None,
) -> int:
    """Kill processes of an experiment, resume it, and check it.

    Each kill is a kill -9 at a random time, until the run is done.
    Exit code 1 and a line for each violated guarantee.
    """
    from edgefl import new_run_folder
    from edgefl.files import write_text
    from edgefl.lab.chaos import Plan, disturb
    from edgefl.results.tables import progress_bar, show

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
        raise Interrupted("interrupted; the results above are those until then")
    if len(findings.kills) < kills and not failpoints:
        why = "its runs end too soon, or have no process of the kinds in --only"
        raise RunError(f"{file}: {len(findings.kills)} of {kills} kills were made: {why}")
    return 0


def _table(findings: Findings) -> Any:
    from edgefl.results.tables import table

    rows = []
    for kind in (*findings.kinds, None):
        count, found = findings.recovery(kind)
        rows.append((kind or "all", count, *(found.get(key) for key in ("median_s", "p95_s", "worst_s"))))
    return table(("killed", ">times", ">recovery median, s", ">p95", ">worst"), rows)


def _lines(findings: Findings) -> list[str]:
    from edgefl.results.tables import many

    judged = [each for each in findings.rounds if each.judged]
    trips, commands = (sum(getattr(each, name) for each in judged) for name in ("trips", "commands"))
    held, of = sum(not each.violations for each in judged), f"{findings.clock} clock, {findings.transport}"
    lines = [f"{of}: {many(len(judged), 'run')} by {many(commands, 'command')}, {many(trips, 'trip')}"]
    bits = "with the same bits as an undisturbed run"
    kept = f"with each of {sum(each.acknowledged for each in judged):,} acknowledged updates on record once"
    lines.append(f"{held} of {len(judged)} {bits if findings.clock == 'virtual' else kept}")
    if not findings.violations:
        longest_s = max((each.outlived_s for each in findings.rounds), default=0.0)
        lines.append(f"nothing left; no process outlived its supervisor by more than {longest_s:.1f} s")
    if unjudged := len(findings.rounds) - len(judged):
        lines.append(f"{many(unjudged, 'run')} did not end and were not checked")
    return lines
