"""The report of one run: report.html with its pictures, and a table of its summary for the terminal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.experiment import NO_PROGRESS
from edgefl.files import write_text
from edgefl.host.fidelity import PHASES, RESOLUTION_WALL_S
from edgefl.results import page
from edgefl.results.groups import (
    applied_profiles,
    by_profile,
    profile_of_trips,
    profiles_by_speed,
    slow_group,
)
from edgefl.results.headline import headline
from edgefl.results.page import html_table
from edgefl.results.pictures import (
    Curve,
    close_fonts,
    learning_figures,
)
from edgefl.results.protection import privacy_card, secure_card
from edgefl.results.record import Record
from edgefl.results.run_pictures import draw_classes, draw_timeline, draw_weights
from edgefl.results.summary import is_client_trip, is_scored, measured, metric_names, summarize
from edgefl.results.tables import FittedTable, figure, many, number, percent, seconds, table
from edgefl.results.targets import evaluated_on

FILE_NAME = "report.html"
INCIDENTS = 12
ENERGY_J = ("compute_j", "download_j", "upload_j", "idle_j", "total_j")
PARTS = {"compute": "Training", "down": "Download", "up": "Upload", "delay": "Link delay",
         "trip": "Whole trip", "round": "Seen by the server"}  # fmt: skip


def write_report(
    folder: str | Path, out: str | Path | None = None, summary: dict[str, Any] | None = None
) -> Path:
    """Write the run's report to ``out``, by default the run's ``report.html``; return the path.

    ``summary`` is the result of `summarize` for the run, which is computed if ``summary`` is None.
    """
    with Record(folder) as record:
        text = report(record, summarize(record) if summary is None else summary)
    close_fonts()
    text += _mark(text.encode())
    return write_text(Path(folder) / FILE_NAME if out is None else Path(out), text)


def _mark(content: bytes) -> str:
    return f"<!-- sha256 of all before: {hashlib.sha256(content).hexdigest()} -->\n"


def is_whole(content: bytes) -> bool:
    """Return True if the content of a report's file is undamaged."""
    text = content[: content.rfind(b"<!--")]
    return content == text + _mark(text).encode()


def report(record: Record, summary: dict[str, Any]) -> str:
    """Return the run's page: HTML with inline pictures, for light and dark mode, without scripts."""
    enforced = record.meta.clock != "virtual"
    judged = "Times are computed from the profiles, not enforced, so they have no enforcement error. "
    if enforced:
        judged = "Errors of achieved times relative to declared ones. "
        judged += f"Parts shorter than {RESOLUTION_WALL_S * 1e3:g} ms of wall time are not judged. "
    judged += f"The device model itself is {model_error(summary['model_error_factor'])}."
    experiment = f"<pre>{escape(record.meta.toml.strip() or 'not recorded')}</pre>"
    fidelity, meta, stages = summary["fidelity"], record.meta, summary["server_time"]["stages"].items()
    banner = (
        "<b>INVALID.</b> The emulation missed its accuracy limits; do not use these figures as results."
        + page.bullets(fidelity["reasons"])
    )
    stuck = (
        f"<b>{NO_PROGRESS.capitalize()}.</b> The model learned nothing ({escape(meta.no_progress)}); "
        "do not use these figures as results."
    )
    calls = {row.stage: row.calls for row in record.costs}
    server = [
        [name, percent(found["share"]), number(found["us_a_trip"]), f"{calls[name]:,}"]
        for name, found in stages
    ]
    kinds = (meta.partition and f"{meta.partition} partition", many(summary["clients"], "client"))
    clock = meta.clock and f"{meta.clock} clock"
    about = (meta.strategy, meta.data, meta.model, *kinds, clock, f"seed {meta.seed}")
    sections = {
        "Learning": [
            *_learning(record),
            *_on_clients(summary["on_clients"]),
            *privacy_card(record),
            *secure_card(summary.get("secure")),
            *_attackers(summary.get("attackers")),
            *_logged(record),
            page.figure("Applied weight by client",
                        "Share of the weight in all sums, multiplied by the number of clients; 1 is fair.",
                        draw_weights(record), "No update was applied."),
        ],
        "Fleet": [
            page.figure("Timeline of trips", "One row per client, fastest profile first.",
                        draw_timeline(record), "No trip was made."),
            page.card("Profiles", "Slowest first. Applied weight: mean over the profile's clients.",
                      _profiles(record, summary)),
            *_energy(summary["energy"]),
            page.card("Fidelity", judged, _fidelity(fidelity, summary["model_error_factor"], enforced),
                      wide=enforced),
            page.card("Phase", "Phones that act at the same times distort comparisons (docs/individuals.md).",
                      _phase(summary["phase"]), wide=enforced),
            page.card("Integrity and incidents", "", _incidents(record, summary)),
        ],
        "Server and host": [
            page.card("Server time", summary["server_time"]["says"],
                      html_table(["Stage", ">Share", ">µs per trip", ">Calls"], server), wide=False),
            page.card("Memory", "Proportional set size: a shared page counts once.", _memory(record, summary),
                      wide=False),
        ],
        "Provenance": [
            page.card("Run", "", page.facts(_provenance(record, summary)), wide=False),
            page.card("Experiment", "", experiment, wide=False),
        ],
    }  # fmt: skip
    return page.page(
        "edgefl run",
        summary["name"] or record.folder.name,
        " · ".join(part for part in about if part),
        [page.stat(*one) for one in headline(summary)],
        sections,
        f"Written by edgefl {meta.edgefl}. Times are emulated seconds unless marked as wall time.",
        lead=in_a_sentence(record, summary),
        banner="".join([stuck] * bool(meta.no_progress) + [banner] * (not fidelity["valid"])),
    )


def in_a_sentence(record: Record, summary: dict[str, Any]) -> str:
    """Return the result in a sentence: accuracy or loss, time, and the slow phones' accuracy and weight."""
    trips, versions = many(summary["client_trips"], "client trip"), many(summary["versions"], "version")
    spent = f"in {seconds(summary['emulated_s'])} of emulated time ({trips}, {versions})"
    if summary["strategy"]:
        spent = f"with {summary['strategy']} {spent}"
    who = many(summary["clients"], "phone")
    if summary["accuracy"] is not None:
        text = f"{who} reached {percent(summary['accuracy'])} accuracy {spent}"
        if summary["best_accuracy"] - summary["accuracy"] >= 0.01:
            text += f", after {percent(summary['best_accuracy'])} at its best"
        text += ", but its loss is not finite" if summary["loss"] is None else ""
    elif summary["loss"] is not None:
        text = f"{who} reached a loss of {number(summary['loss'])} {spent}"
    else:
        what = "no model was evaluated" if summary["evaluated_version"] is None else "the loss is not finite"
        text = f"{who} trained {spent}, but {what}"
    slow = summary["slow_phones"]
    whose = " and ".join(slow["profiles"]) if len(slow["profiles"]) < 3 else "the slowest profiles"
    if slow["accuracy"] is not None:
        text += f"; on the classes held only by {whose}, the accuracy is {percent(slow['accuracy'])}"
    if slow["applied_weight"] is not None:
        text += (
            f"; each phone of {whose} had {number(slow['applied_weight'])} times its fair share of the weight"
        )
    return f"{text}."


def _learning(record: Record) -> list[str]:
    """Return the cards with the accuracy, or the loss if the task has no accuracy, and the user's metrics."""
    empty = "No accuracy was a finite number." if record.evaluations else "No evaluation was made."
    about = {
        "at_s": f"On the server's {evaluated_on(record)} examples.",
        "trips": "A trip consists of download, training and upload.",
        "own": "As measured by the evaluation function.",
    }
    last: list[str] | None = None
    if is_scored({name: measured(record, name, "trips").size > 0 for name in ("accuracy", "loss")}):
        last = [page.figure("Accuracy by class", "At the last evaluation.", draw_classes(record), empty)]
    own = metric_names(record)
    return learning_figures(lambda *what: _curves(record, *what), own, about, last, ends=True, empty=empty)


def _curves(record: Record, name: str, over: str) -> list[Curve]:
    """Return a metric's curves over time or trips.

    For accuracy, a second curve shows the accuracy on the classes that only slow phones have.
    """
    points = measured(record, name, over)
    if name != "accuracy":
        return [Curve("c1", name, *points)] if points.size else []
    slow = slow_group(record)
    theirs = measured(record, name, over, slow.labels)
    found = [Curve("c1", "all classes", *points)] if points.size else []
    several = f"the {len(slow.profiles)} slowest profiles"
    whose = " and ".join(slow.profiles) if len(slow.profiles) < 3 else several
    return found + ([Curve("c2", f"classes only on {whose}", *theirs)] if found and theirs.size else [])


def _on_clients(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    kinds = [kind for kind in ("global", "personal") if kind in found]
    text_of = percent if found["measure"] == "accuracy" else number
    rows = [
        [name, values["clients"], *(text_of(values[kind]) for kind in kinds)]
        for name, values in found["by_profile"].items()
    ]
    for which, name, part in (("mean", "Mean of all", 1), ("worst_decile", "Mean of the worst tenth", 10)):
        clients = max(1, found["clients"] // part)
        rows.append([name, clients, *(text_of(found[kind][which]) for kind in kinds)])
    about = f"{found['measure'].capitalize()} at version {found['version']}, mean over clients. "
    about += "Personal model: the global model after one trip's training on the client's other examples."
    table = html_table(["Profile", ">Clients", *(f">{kind.capitalize()} model" for kind in kinds)], rows)
    return [page.card("On the clients' own examples", about, table)]


def _attackers(found: dict[str, Any] | None) -> list[str]:
    """Return a card with the accuracy and weight of honest and attacking clients, if any client attacks."""
    if found is None:
        return []
    rows = []
    for name in ("honest", "attacking"):
        of = found[name]
        rows.append(
            [name.capitalize(), percent(of["weight_share"]), number(of["weight"]), percent(of["accuracy"])]
        )
    about = f"{many(found['clients'], 'client')} sent harmful updates. "
    about += f"Accuracy is that of the last model on {found['accuracy_on']}. " if found["accuracy_on"] else ""
    about += failed_attacks(found)
    table = html_table(["Clients", ">Share of weight", ">Applied weight", ">Accuracy"], rows)
    return [page.card("Attackers", about, table, wide=False)]


def failed_attacks(found: Mapping[str, Any]) -> str:
    """Return text with the number of trips that failed in the user's attack function, and the reason why the
    first failed; "" if none failed.

    >>> failed_attacks({"failed_trips": 3, "first_failure": "'mine:attack' raised ValueError: no"})
    "3 trips failed because of the attack function; in the first, 'mine:attack' raised ValueError: no"
    """
    count, why = found["failed_trips"], found["first_failure"]
    failed = f"{many(count, 'trip')} failed because of the attack function; in the first, {why}"
    return failed if count else ""


def _logged(record: Record) -> list[str]:
    """Return a card with the metrics that the user's training function logged, if there are any."""
    rows = []
    for name, values in record.metrics.items():
        known = values[np.isfinite(values)]
        if part := -(-len(known) // 10):
            rows.append([name, len(known), float(known[:part].mean()), float(known[-part:].mean())])
    columns = ["Metric", ">Trips", ">First tenth", ">Last tenth"]
    about = "Means over the first and last tenth of trips in which the training function logged a metric."
    return [page.card("Training metrics", about, html_table(columns, rows))] if rows else []


def _profiles(record: Record, summary: dict[str, Any]) -> str:
    profile, ended = profile_of_trips(record), is_client_trip(record)
    trip_s = by_profile(record, record.trips["trip_achieved_s"])
    staleness, applied = summary["staleness"]["by_profile"], applied_profiles(record)
    rows = []
    for name in profiles_by_speed(record):
        theirs = record.fleet["profile"] == name
        peak = summary["memory"]["by_profile"].get(name, {})
        limit = f" / {number(peak['limit_mib'])}" if peak.get("limit_mib") else ""
        rows.append(
            [
                name,
                ", ".join(sorted(set(record.fleet["network"][theirs].tolist()))),
                int(theirs.sum()),
                number(float(np.median(record.fleet["step_s"][theirs]))),
                f"{int((ended & (profile == name)).sum()):,}",
                number(trip_s.get(name)),
                " / ".join(number(staleness[name][what]) for what in ("mean", "p95"))
                if name in applied
                else None,
                number(summary["applied_weight"]["by_profile"].get(name)),
                percent(summary["accuracy_by_profile_labels"].get(name)),
                number(peak.get("peak_mib")) + limit,
                number(peak.get("process_grew_mib")),
            ]
        )
    head = ["Profile", "Network", ">Clients", ">Median training step, s", ">Trips", ">Median trip time, s",
            ">Staleness, mean / 95th percentile", ">Applied weight", ">Accuracy on its classes",
            ">Peak memory / limit, MiB", ">Process growth, MiB"]  # fmt: skip
    return html_table(head, rows)


def _energy(found: dict[str, Any]) -> list[str]:
    """Return a card with the energy of the trips, or no card if no profile states its power draw."""
    if not found["by_profile"]:
        return []
    rows = [
        [name, *(number(one[key]) for key in ENERGY_J), f"{number(one['low_j'])} to {number(one['high_j'])}"]
        for name, one in (*found["by_profile"].items(), ("all", found))
    ]
    head = [
        "Profile",
        ">Computing, J",
        ">Download, J",
        ">Upload, J",
        ">Idle, J",
        ">Sum, J",
        ">90% interval, J",
    ]
    unknown = f" {found['unknown_trips']:,} trips are missing, because their profiles state no power draw."
    about = "Energy of completed trips, from the profiles' currents or a metered radio (docs/profiles.md)."
    return [page.card("Energy", about + (unknown if found["unknown_trips"] else ""), html_table(head, rows))]


def _fidelity(fidelity: dict[str, Any], model_error_factor: dict[str, float], enforced: bool) -> str:
    """Return tables of the errors by part of a trip and by device.

    If times were not ``enforced``, there is only a table of the errors of the device models.
    """
    within, factors = "Device model within (90%)", {k: f"{v:.2g}×" for k, v in model_error_factor.items()}
    if not enforced:
        return html_table(["Device", f">{within}"], factors.items()) if factors else ""
    rows = []
    for part, name in PARTS.items():
        if (found := fidelity["by_quantity"].get(part)) is not None and found["measured"]:
            signed = (_signed(found[which]) for which in ("mean_error", "median_error"))
            absolute = (percent(found[which], 2) for which in ("median_abs_error", "p95_abs_error"))
            rows.append([name, *signed, *absolute, f"{found['measured']:,}"])
    head = ["Part of a trip", ">Error of the total", ">Median error", ">Median absolute error",
            ">95th percentile, absolute", ">Trips"]  # fmt: skip
    by_phase = [
        [device, *(_errors(found.get(part, {})) for part in PHASES)]
        for device, found in fidelity["by_device"].items()
    ]
    devices = [
        [
            device,
            *(_signed(found.get(part, {}).get("mean_error")) for part in PARTS),
            factors.get(device),
        ]
        for device, found in fidelity["by_device"].items()
    ]
    parts = (f">{name}" for name in PARTS.values())
    columns = ["Error of the total, by device", *parts, f">{within}"]
    named = ["Median error / 95th percentile, by device", *(f">{PARTS[part]}" for part in PHASES)]
    warnings = page.bullets(fidelity.get("warnings", ()))
    listed = f"<p>Warning: phases whose times are off although their trips are on time</p>{warnings}"
    tables = html_table(head, rows) + html_table(named, by_phase) + html_table(columns, devices)
    return (listed if warnings else "") + tables


def _errors(found: Mapping[str, Any]) -> str:
    """Return the median error with its sign, and the 95th percentile of the absolute errors."""
    if found.get("p95_abs_error") is None:
        return "–"
    return f"{_signed(found['median_error'])} / {percent(found['p95_abs_error'], 2)}"


def _phase(phase: dict[str, Any]) -> str:
    names = {
        "one_profile_buffers": "Buffers with updates of one profile only",
        "coincident_arrivals": "Arrivals that coincide with another",
    }
    rows = [
        [name, percent(found["share"]), percent(found["expected"]),
         f"{percent(found['low'])} to {percent(found['high'])}"]
        for key, name in names.items()
        if (found := phase[key]) is not None
    ]  # fmt: skip
    if not rows:
        return "<p>Too few updates to judge.</p>"
    head = ["Share of", ">This run", ">If phones were independent", ">99% interval"]
    table = html_table(head, rows, wrap=(0,))
    if phase["by_design"]:
        return f"{table}<p>Clients act together by design: {escape(phase['by_design'])}.</p>"
    return table + (f"<p><b>{escape(phase['warning'])}</b></p>" if phase["warning"] else "")


def _signed(error: float | None) -> str:
    return "–" if error is None else f"{round(error * 100, 2) + 0.0:+.2f}%"  # adding 0.0 avoids −0.00%


def _incidents(record: Record, summary: dict[str, Any]) -> str:
    integrity, there, rows = summary["integrity"], summary["availability"], record.incidents
    bad = integrity["checksum_mismatches"] + integrity["version_mismatches"]
    text = (
        f"{integrity['checked']:,} checksums were compared: {integrity['checksum_mismatches']} differed. "
        f"{integrity['version_mismatches']} updates were trained from a version other than the one sent."
    )
    if there["left"]:
        left, back = ("once" if n == 1 else f"{n:,} times" for n in (there["left"], there["returned"]))
        text += (
            f" Clients were online for {percent(there['online_share'], 0)} of the time: they left "
            f"{left} and came back {back}."
        )
    verdict = '<b class="bad">Mismatch.</b>' if bad else '<b class="good">Intact.</b>'
    out = f'<p class="about">{verdict} {escape(text)}</p>'
    if not rows:
        return out + '<p class="about">No incidents.</p>'
    more = f"The first {INCIDENTS} of {len(rows):,}: " if len(rows) > INCIDENTS else ""
    counts = ", ".join(f"{count:,} {kind}" for kind, count in summary["incidents"].items())
    shown = [(f"{row.at_s:.1f}", row.client, row.kind, row.detail) for row in rows[:INCIDENTS]]
    table = html_table([">At, s", ">Client", "Kind", "Detail"], shown)
    return f'{out}<p class="about">{escape(more + counts)}.</p>{table}'


def _memory(record: Record, summary: dict[str, Any]) -> str:
    found, kind = summary["memory"], "worker" if record.meta.clock == "virtual" else "client"
    names = {"processes": many(len(record.meta.memory.clients_mib), kind), "per_process": f"each {kind}"}
    names |= {"evaluator": "evaluator", "zygote": "zygote, which clients are forked from"}
    names |= {name: name for name in ("server", "supervisor")}
    sizes = [[text, found[f"{name}_mib"]] for name, text in (names | {"shared": "shared buffer"}).items()]
    return html_table(["Process", ">MiB"], [row for row in sizes if row[1]])


def _provenance(record: Record, summary: dict[str, Any]) -> dict[str, str]:
    meta, done, moved = record.meta, summary["aggregation"], summary["bytes"]
    load = percent(meta.load, 0) if meta.load is not None else ""
    if load and meta.used is not None:
        load += f" expected, {percent(meta.used, 0)} used by the run"
        load += f", {percent(meta.others, 0)} by others" if meta.others is not None else ""
    summed = f"{done['updates']:,} updates by {done['backend']}, {many(done['threads'], 'thread')}"
    return {
        "Status": f"{meta.status}{f' ({meta.stop_reason})' if meta.stop_reason else ''}",
        "Remark": meta.remark,
        "Model SHA-256": meta.model_sha256,
        "Parameters": f"{meta.parameters:,}" if meta.parameters else "",
        "Aggregation": f"{summed}, {number(done['gbytes_per_s'])} GB/s" if done["backend"] else "",
        "Transfers of completed trips": f"{moved['down'] / 1e6:,.1f} MB down, {moved['up'] / 1e6:,.1f} MB up",
        "Time scale": (
            f"{meta.time_scale:.3g} wall seconds per emulated second" if meta.clock == "wall" else ""
        ),
        "Host load": load,
        "Transport": meta.transport,
        **{name.replace("_", " ").capitalize(): str(value) for name, value in meta.host.items()},
        "Software": ", ".join(f"{name} {version}" for name, version in meta.software.items()),
    }


def model_error(factors: Mapping[str, float]) -> str:
    """Describe the model error: the factor within which real devices agree with their profiles.

    >>> model_error({"pi-4": 1.355, "pixel-3a": 6.0}), model_error({"pi-4": 1.3}), model_error({})
    ('within a factor of 1.4 to 6 (90%)', 'within a factor of 1.3 (90%)', 'not that of a real device')
    """
    if not factors:
        return "not that of a real device"
    ends = dict.fromkeys(f"{end(factors.values()):.2g}" for end in (min, max))
    return f"within a factor of {' to '.join(ends)} (90%)"


def nodes_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of nodes and the names of lost and rejoined ones; a rejoined node has several rows.

    >>> silent, back = {"name": "a", "lost": "silent"}, {"name": "a", "lost": ""}
    >>> nodes_text([silent, {"name": "b", "lost": "silent"}, back])
    '2, lost: b, rejoined: a'
    """
    last = {row["name"]: row["lost"] for row in rows}
    lost = [name for name, why in last.items() if why]
    back = list(dict.fromkeys(row["name"] for row in rows if row["lost"] and not last[row["name"]]))
    found = [f"lost: {', '.join(lost)}"] * bool(lost) + [f"rejoined: {', '.join(back)}"] * bool(back)
    return ", ".join([str(len(last)), *found])


def summary_table(summary: Mapping[str, Any], folder: Path) -> FittedTable:
    """Return a table of a run's summary for the terminal, with the headline metrics and some others."""
    aggregation, worst = summary["aggregation"], summary["fidelity"]["worst"]
    rows = [(one.name.lower(), one.text) for one in headline(summary)]
    rows[0] = ("strategy", f"{summary['strategy']}, {summary['clock']} clock, seed {summary['seed']}")
    if summary["no_progress"]:
        rows.append((NO_PROGRESS, summary["no_progress"]))
    if "attackers" in summary and (failed := failed_attacks(summary["attackers"])):
        rows.append(("attackers", failed))
    if clipped := summary["incidents"].get("clipped"):
        rows.append(("server.secure.clip", f"limited elements of {many(clipped, 'update')}"))
    if summary["incidents"].get("rounded"):
        hint = "choose a smaller server.secure.clip or resolution, or sum fewer updates"
        rows.append(("server.secure", f"rounding distorted the first version; {hint}"))
    found = summary["on_clients"] or {}
    for kind in ("global", "personal"):
        if kind in found:
            mean, tenth = (figure(found[kind][name]) for name in ("mean", "worst_decile"))
            rows.append((f"{kind} {found['measure']} on clients", f"mean {mean}, worst decile {tenth}"))
    if worst and summary["clock"] == "wall":
        errors = f"median {worst['median_error']:+.2%}, p95 {worst['p95_abs_error']:.2%}"
        rows.append(("worst phase", f"{PHASES[worst['phase']]} of {worst['device']}: {errors}"))
    if summary["nodes"]:
        rows.append(("nodes", nodes_text(summary["nodes"])))
    for real in summary["real_devices"]:
        took = f"median {figure(real['ratio']['median'])} times its profile's training time"
        rows.append((f"a real {real['profile']}", took))
    rows += [
        ("device model", model_error(summary["model_error_factor"])),
        ("aggregation", f"{aggregation['backend']}, {figure(aggregation['gbytes_per_s'])} GB/s"),
        ("model", summary["model_sha256"][:16]),
        ("folder", str(folder)),
    ]
    return table(("run", summary["name"] or folder.name), rows)
