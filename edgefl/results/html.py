"""report.html: one run on one page."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.limits.fidelity import RESOLUTION_WALL_S
from edgefl.results import figures
from edgefl.results.files import write_text
from edgefl.results.measures import median_by_profile, profile_of_trips, profiles_by_speed
from edgefl.results.page import card, facts, figure, grid, heading, page, stat, stats, table
from edgefl.results.record import Record
from edgefl.results.summary import summarize
from edgefl.results.tables import many, number, percent, seconds

FILE_NAME = "report.html"
INCIDENTS = 12
PARTS = {
    "compute": "Training",
    "down": "Download",
    "up": "Upload",
    "delay": "Link delay",
    "trip": "Whole trip",
    "round": "Seen by the server",
}


def write_report(folder: str | Path) -> Path:
    """Write the run's ``report.html``; returns its path."""
    with Record(folder) as record:
        return write_text(Path(folder) / FILE_NAME, report(record))


def report(record: Record) -> str:
    """The page: self-contained HTML with inline pictures, light and dark, no script, no network."""
    summary = summarize(record)
    title = summary["name"] or record.folder.name
    no_accuracy = "No accuracy was a number." if record.evaluations else "No evaluation was made."
    return page(
        f"{title} · edgefl",
        [
            heading("edgefl run", title, _subtitle(record, summary)),
            _banner(summary),
            stats(_headline(record, summary)),
            "<h2>Learning</h2>",
            grid(
                [
                    figure("Accuracy over emulated time", "On the server's test examples.",
                           figures.draw_accuracy(record, "at_s"), no_accuracy),
                    figure("Accuracy over client trips", "A trip is a download, a training and an upload.",
                           figures.draw_accuracy(record, "trips"),
                           no_accuracy),
                    figure("Accuracy by class", "At the last evaluation.",
                           figures.draw_classes(record), no_accuracy),
                    figure("Applied weight by client", "Share of all applied weight, times n: 1 is fair.",
                           figures.draw_weights(record), "No update was applied."),
                ]
            ),
            "<h2>Fleet</h2>",
            grid(
                [
                    figure("Timeline of trips", "A lane a client, fastest profile first.",
                           figures.draw_timeline(record), "No trip was made."),
                    card("Profiles", "Slowest first. Weight: mean share of applied weight, times n.",
                         _profiles(record, summary)),
                    figure("Staleness by profile",
                           "Bar: the middle half; line: 5% to 95%; dot: median; tick: mean.",
                           figures.draw_staleness(record), "No update was applied."),
                    figure("Achieved against declared speed", "Each dot is a trip: how far off it was.",
                           figures.draw_speed(record), "No trip was timed."),
                    card("Fidelity", "Error of achieved against declared time. Parts below "
                         f"{RESOLUTION_WALL_S * 1e3:g} ms on the wall are not judged.",
                         _fidelity(summary), wide=False),
                    card("Integrity and incidents", "", _incidents(record, summary), wide=False),
                ]
            ),
            "<h2>Server and host</h2>",
            grid(
                [
                    figure("Server time", summary["server_time"]["says"] or "Wall time by stage.",
                           figures.draw_costs(record)),
                    figure("MemoryUse", "Proportional set size: a shared page counts once.",
                           figures.draw_memory(record)),
                ]
            ),
            "<h2>How it was made</h2>",
            grid([card("Run", "", _provenance(record, summary), wide=False),
                  card("Experiment", "", f"<pre>{escape(record.meta.toml.strip() or 'not recorded')}</pre>",
                       wide=False)]),
            f"<footer>Written by edgefl {escape(record.meta.edgefl)}. Times are emulated seconds unless they "
            "say wall.</footer>",
        ],
    )  # fmt: skip


def _subtitle(record: Record, summary: dict[str, Any]) -> str:
    meta = record.meta
    parts = [
        meta.strategy,
        meta.data,
        meta.model,
        meta.partition and f"{meta.partition} partition",
        many(summary["clients"], "client"),
        meta.clock and f"{meta.clock} clock",
        f"seed {meta.seed}",
    ]
    return " · ".join(part for part in parts if part)


def _banner(summary: dict[str, Any]) -> str:
    if summary["fidelity"]["valid"]:
        return ""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in summary["fidelity"]["reasons"])
    return (
        '<section class="banner"><b>INVALID.</b> The emulation did not hold its promises; '
        f"do not use these figures as results.<ul>{reasons}</ul></section>"
    )


def _headline(record: Record, summary: dict[str, Any]) -> list[str]:
    fidelity, staleness = summary["fidelity"], summary["staleness"]
    trips = summary["trips"]
    error = fidelity["median_abs_error"]
    lost = [f"{trips[fate]:,} {fate}" for fate in ("discarded", "dropped", "lost", "open") if trips[fate]]
    if record.meta.clock == "virtual" and error is not None:
        note = "times computed, not enforced"
    else:
        note = f"{percent(error, 2)} median error" if error is not None else "no trip was timed"
    if summary["accuracy"] is None:
        loss = "not a number" if record.evaluations else "not evaluated"
    else:
        loss = f"loss {number(summary['loss'])}"
    weight, theirs = (summary["slow_phones"][what] for what in ("applied_weight", "accuracy"))
    return [
        stat("Strategy", summary["strategy"] or "–", many(summary["processes"], "training process")),
        stat("Accuracy", percent(summary["accuracy"]), loss),
        stat("Slow phones' weight", number(weight), "of the fair share")
        if theirs is None and weight is not None else
        stat("Slow phones' classes", percent(theirs),
             "no update applied" if weight is None else f"weight {number(weight)} of the fair share"),
        stat("Client trips", f"{summary['client_trips']:,}", ", ".join(lost) or "no update was lost"),
        stat("Versions", f"{summary['versions']:,}",
             f"staleness {number(staleness['mean'])} mean, {staleness['max']} max"),
        stat("Emulated time", seconds(summary["emulated_s"]), f"{seconds(summary['wall_s'])} on the wall"),
        stat("Fidelity", "VALID" if fidelity["valid"] else "INVALID", note,
             "good" if fidelity["valid"] else "bad"),
    ]  # fmt: skip


def _profiles(record: Record, summary: dict[str, Any]) -> str:
    profile, ended = profile_of_trips(record), ~np.isnan(record.trips["arrived_s"])
    trip_s = median_by_profile(record, record.trips["trip_achieved_s"])
    first = {row.profile: row for row in reversed(record.clients)}
    rows = []
    for name in profiles_by_speed(record):
        networks = sorted({row.network for row in record.clients if row.profile == name})
        peak = summary["memory"]["by_profile"].get(name, {})
        peak_mib = number(peak.get("peak_mib"))
        limit = f" / {number(peak['limit_mib'])}" if peak.get("limit_mib") else ""
        rows.append(
            [
                name,
                ", ".join(networks),
                str(sum(row.profile == name for row in record.clients)),
                number(first[name].train_gflops),
                f"{int((ended & (profile == name)).sum()):,}",
                number(trip_s.get(name)),
                number(summary["staleness"]["by_profile"][name]["mean"]),
                number(summary["applied_weight"]["by_profile"].get(name)),
                percent(summary["accuracy_by_profile_labels"].get(name)),
                peak_mib + limit,
            ]
        )
    head = ["Profile", "Network", "Clients", "GFLOPS", "Trips", "Trip, s", "Staleness", "Weight",
            "Accuracy on its classes", "Peak MiB / limit"]  # fmt: skip
    return table(head, rows, text=(0, 1))


def _fidelity(summary: dict[str, Any]) -> str:
    rows = []
    for part, name in PARTS.items():
        found = summary["fidelity"]["by_quantity"].get(part)
        if found is not None and found["measured"]:
            rows.append(
                [
                    name,
                    _signed(found["mean_error"]),
                    _signed(found["median_error"]),
                    percent(found["median_abs_error"], 2),
                    percent(found["p95_abs_error"], 2),
                    f"{found['measured']:,}",
                ]
            )
    head = ["Part", "In all", "Median, signed", "Median", "95th percentile", "Trips"]
    devices = [
        [device, *(_signed(found.get(part, {}).get("mean_error")) for part in PARTS)]
        for device, found in summary["fidelity"]["by_device"].items()
    ]
    return table(head, rows) + table(["In all, by device", *PARTS.values()], devices)


def _signed(error: float | None) -> str:
    return "–" if error is None else f"{error * 100:+.2f}%"


def _incidents(record: Record, summary: dict[str, Any]) -> str:
    integrity = summary["integrity"]
    bad = integrity["checksum_mismatches"] + integrity["version_mismatches"]
    text = (
        f"{integrity['checked']:,} checksums were compared: {integrity['checksum_mismatches']} differed. "
        f"{integrity['version_mismatches']} updates were trained from another version than the one sent."
    )
    there = summary["availability"]
    if there["left"]:
        text += (
            f" Clients were online for {percent(there['online_share'], 0)} of the time: they left "
            f"{_times(there['left'])} and came back {_times(there['returned'])}."
        )
    tone = "bad" if bad else "good"
    out = f'<p class="about"><b class="{tone}">{"Mismatch." if bad else "Intact."}</b> {escape(text)}</p>'
    rows = record.incidents
    if not rows:
        return out + '<p class="about">No incident.</p>'
    shown = [
        [f"{row.at_s:.1f}", "–" if row.client is None else str(row.client), row.kind, row.detail]
        for row in rows[:INCIDENTS]
    ]
    more = f"The first {INCIDENTS} of {len(rows):,}: " if len(rows) > INCIDENTS else ""
    counts = ", ".join(f"{count:,} {kind}" for kind, count in summary["incidents"].items())
    return (
        out + f'<p class="about">{escape(more + counts)}.</p>'
        + table(["At, s", "Client", "Kind", "What"], shown, text=(2, 3))
    )  # fmt: skip


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _provenance(record: Record, summary: dict[str, Any]) -> str:
    meta, done, moved = record.meta, summary["aggregation"], summary["bytes"]
    load = percent(meta.load, 0) if meta.load is not None else ""
    if load and meta.used is not None:
        load += f" expected, {percent(meta.used, 0)} used by the run"
        load += f", {percent(meta.others, 0)} by others" if meta.others is not None else ""
    return facts(
        [
            ("Status", f"{meta.status}{f' ({meta.stop_reason})' if meta.stop_reason else ''}"),
            ("Model SHA-256", meta.model_sha256),
            ("Parameters", f"{meta.parameters:,}" if meta.parameters else ""),
            ("Aggregation", f"{done['updates']:,} updates by {done['backend']}, {done['threads']} threads, "
                            f"{number(done['gbytes_per_s'])} GB/s" if done["backend"] else ""),
            ("Moved", f"{moved['down'] / 1e6:,.1f} MB down, {moved['up'] / 1e6:,.1f} MB up"),
            ("Time scale", f"{meta.time_scale:.3g} wall seconds an emulated second"
                           if meta.clock == "wall" else ""),
            ("Host load", load),
            ("Transport", meta.transport),
            *((name.replace("_", " ").capitalize(), str(value)) for name, value in meta.host.items()),
            ("Software", ", ".join(f"{name} {version}" for name, version in meta.software.items())),
        ]
    )  # fmt: skip
