"""report.html: one run on one page, with its pictures."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray

from edgefl.limits.fidelity import RESOLUTION_WALL_S
from edgefl.results.measures import (
    applied_weight,
    class_accuracy,
    label_accuracy,
    median_by_profile,
    phases,
    profile_of_trips,
    profiles_by_speed,
    slow_group,
)
from edgefl.results.page import (
    COLOURS,
    Canvas,
    Key,
    Picture,
    bars_of,
    card,
    colour,
    dots,
    facts,
    figure,
    grid,
    heading,
    house_style,
    page,
    percent_axis,
    plain_axis,
    series,
    short,
    shorten,
    stat,
    stats,
)
from edgefl.results.record import Record
from edgefl.results.run_folder import write_text
from edgefl.results.summary import summarize
from edgefl.results.tables import html_table, many, number, percent, seconds

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
                           draw_accuracy(record, "at_s"), no_accuracy),
                    figure("Accuracy over client trips", "A trip is a download, a training and an upload.",
                           draw_accuracy(record, "trips"),
                           no_accuracy),
                    figure("Accuracy by class", "At the last evaluation.",
                           draw_classes(record), no_accuracy),
                    figure("Applied weight by client", "Share of all applied weight, times n: 1 is fair.",
                           draw_weights(record), "No update was applied."),
                ]
            ),
            "<h2>Fleet</h2>",
            grid(
                [
                    figure("Timeline of trips", "A lane a client, fastest profile first.",
                           draw_timeline(record), "No trip was made."),
                    card("Profiles", "Slowest first. Weight: mean share of applied weight, times n.",
                         _profiles(record, summary)),
                    figure("Staleness by profile",
                           "Bar: the middle half; line: 5% to 95%; dot: median; tick: mean.",
                           draw_staleness(record), "No update was applied."),
                    figure("Achieved against declared speed", "Each dot is a trip: how far off it was.",
                           draw_speed(record), "No trip was timed."),
                    card("Fidelity", "Error of achieved against declared time. Parts below "
                         f"{RESOLUTION_WALL_S * 1e3:g} ms on the wall are not judged.",
                         _fidelity(summary)),
                    card("Integrity and incidents", "", _incidents(record, summary)),
                ]
            ),
            "<h2>Server and host</h2>",
            grid(
                [
                    figure("Server time", summary["server_time"]["says"] or "Wall time by stage.",
                           draw_costs(record)),
                    figure("Memory", "Proportional set size: a shared page counts once.",
                           draw_memory(record)),
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
    head = ["Profile", "Network", ">Clients", ">GFLOPS", ">Trips", ">Trip, s", ">Staleness", ">Weight",
            ">Accuracy on its classes", ">Peak MiB / limit"]  # fmt: skip
    return html_table(head, rows)


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
    head = ["Part", ">In all", ">Median, signed", ">Median", ">95th percentile", ">Trips"]
    devices = [
        [device, *(_signed(found.get(part, {}).get("mean_error")) for part in PARTS)]
        for device, found in summary["fidelity"]["by_device"].items()
    ]
    return html_table(head, rows) + html_table(
        ["In all, by device", *(f">{part}" for part in PARTS.values())], devices
    )


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
        + html_table([">At, s", ">Client", "Kind", "What"], shown)
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


LANES = 32
POINTS = 3000


def profile_roles(record: Record) -> dict[str, str]:
    """Each profile's colour, fastest first, the same in every picture."""
    return {profile: series(k) for k, profile in enumerate(reversed(profiles_by_speed(record)))}


def _profile_keys(record: Record) -> tuple[Key, ...]:
    roles = list(profile_roles(record).items())
    keys = [Key(role, profile) for profile, role in roles[:COLOURS]]
    rest = len(roles) - COLOURS
    return tuple([*keys, Key("muted", f"{rest} slower profiles")] if rest > 0 else keys)


@house_style
def draw_accuracy(record: Record, over: str) -> Picture | None:
    """Accuracy over ``at_s`` (emulated time) or ``trips``: all classes, and those only slow phones hold."""
    rows = [row for row in record.evaluations if np.isfinite(row.accuracy)]
    if not rows:
        return None
    x = np.array([row.at_s if over == "at_s" else row.trips for row in rows], dtype=np.float64)
    canvas = Canvas()
    axes = canvas.axes
    lines = [("c1", "all classes", np.array([row.accuracy for row in rows]))]
    slow = slow_group(record)
    if slow.labels:
        several = f"the {len(slow.profiles)} slowest profiles"
        whose = " and ".join(slow.profiles) if len(slow.profiles) < 3 else several
        lines.append(
            ("c2", f"classes only on {whose}",
             np.array([label_accuracy(row, slow.labels) for row in rows]))
        )  # fmt: skip
    for role, name, y in reversed(lines):
        (line,) = axes.plot(x, y, color=colour(role), linewidth=2.2 if role == "c1" else 1.6)
        canvas.tip(line, f"{name}: {y[-1]:.1%} at the end, {np.nanmax(y):.1%} at best")
        axes.plot(x[-1:], y[-1:], "o", color=colour(role), markersize=5 if len(x) > 1 else 7)
    for role, y_end, up in _end_labels([(role, float(y[-1])) for role, _, y in lines]):
        axes.annotate(
            f"{y_end:.1%}", (x[-1], y_end), (7, up), textcoords="offset points", va="center",
            color=colour(role), fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(0, (float(x[-1]) or 1.0) * 1.14)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("emulated seconds" if over == "at_s" else "client trips")
    percent_axis(axes.yaxis)
    plain_axis(axes.xaxis)
    label = "Accuracy over " + ("emulated time" if over == "at_s" else "client trips")
    return Picture(canvas.svg(label), tuple(Key(role, name) for role, name, _ in lines))


def _end_labels(ends: list[tuple[str, float]]) -> list[tuple[str, float, float]]:
    # two labels closer than a line's height move apart by half of it
    if len(ends) == 2 and abs(ends[0][1] - ends[1][1]) < 0.07:
        sign = 1 if ends[0][1] >= ends[1][1] else -1
        return [(*ends[0], 6.0 * sign), (*ends[1], -6.0 * sign)]
    return [(*end, 0.0) for end in ends]


@house_style
def draw_classes(record: Record) -> Picture | None:
    """Accuracy in each class at the last evaluation; classes that only slow phones hold stand out."""
    if not record.evaluations or not record.evaluations[-1].total:
        return None
    last = record.evaluations[-1]
    values, only = class_accuracy(last), set(slow_group(record).labels)
    canvas = Canvas()
    axes = canvas.axes
    for label, value in enumerate(values):
        name = str(label)
        if np.isnan(value):
            continue
        (bar,) = axes.bar([label], [value], width=0.72, color=colour("c2" if label in only else "c1"))
        canvas.tip(bar, f"class {name}: {last.correct[label]} of {last.total[label]} right ({value:.1%})")
        if len(values) <= 12:
            axes.text(
                label, value + 0.02, f"{value * 100:.0f}", ha="center", color=colour("muted"), fontsize=9
            )
    step = max(1, -(-len(values) // 12))
    ticks = range(0, len(values), step)
    axes.set_xticks(list(ticks), [str(k) for k in ticks])
    axes.set_xlim(-0.6, len(values) - 0.4)
    axes.set_ylim(0, 1.09)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.grid(False, axis="x")
    axes.set_xlabel("class")
    percent_axis(axes.yaxis)
    keys = (Key("c1", "held by faster phones too"), Key("c2", "held only by slow phones")) if only else ()
    return Picture(canvas.svg("Accuracy by class"), keys)


@house_style
def draw_staleness(record: Record) -> Picture | None:
    """Staleness of applied updates by profile: middle half, 5th to 95th percentile, median and mean."""
    used, profile = record.trips["uses"] > 0, profile_of_trips(record)
    values, roles = record.trips["staleness"], profile_roles(record)
    rows = [(name, values[used & (profile == name)]) for name in reversed(roles)]
    rows = [(name, v) for name, v in rows if v.size]
    if not rows:
        return None
    longest = max(len(shorten(name)) for name, _ in rows)
    canvas = Canvas(height=max(240, 52 + 34 * len(rows)), left=16 + 5.9 * longest)
    axes = canvas.axes
    for y, (name, v) in enumerate(rows):
        p5, p25, p50, p75, p95 = np.percentile(v, [5, 25, 50, 75, 95])
        role = colour(roles[name])
        axes.plot([p5, p95], [y, y], color=role, linewidth=2, alpha=0.45)
        (middle,) = axes.plot([p25, p75], [y, y], color=role, linewidth=9)
        axes.plot([p50], [y], "o", color=colour("ink"), markersize=6)
        axes.plot([v.mean()], [y], "|", color=colour("ink"), markersize=15, markeredgewidth=1.6)
        figures = f"median {p50:.3g}, mean {v.mean():.3g}, middle half {p25:.3g} to {p75:.3g}, max {v.max()}"
        canvas.tip(middle, f"{name}: {figures}, {v.size} updates")
    axes.set_yticks(range(len(rows)), [shorten(name) for name, _ in rows])
    axes.tick_params(axis="y", labelcolor=colour("ink"))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(left=min(-0.3, -0.02 * axes.get_xlim()[1]))
    axes.grid(False, axis="y")
    axes.set_xlabel("versions published between download and arrival")
    plain_axis(axes.xaxis)
    return Picture(canvas.svg("Staleness by profile"))


@house_style
def draw_weights(record: Record) -> Picture | None:
    """Each client's share of the applied weight, times n, against the fair share 1."""
    share, roles = applied_weight(record), profile_roles(record)
    if not share:
        return None
    profile = {row.client: row.profile for row in record.clients}
    canvas = Canvas(left=34)
    axes = canvas.axes
    order = list(roles)
    ranked = sorted(
        share, key=lambda c: (order.index(profile[c]) if profile.get(c) in roles else len(order), -share[c])
    )
    x = np.arange(len(ranked), dtype=np.float64)
    y = np.array([share[client] for client in ranked])
    axes.axhline(1.0, color=colour("ink"), linewidth=1.0, linestyle=(0, (4, 3)))
    axes.annotate("fair: 1/n each", (1, 1), (-2, 5), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", color=colour("ink"), fontsize=9)  # fmt: skip
    for name in [*order, ""]:
        mine = np.array([profile.get(client, "") == name for client in ranked])
        if not mine.any():
            continue
        role = roles.get(name, "muted")
        if len(ranked) <= 120:
            for k in np.flatnonzero(mine):
                (stem,) = axes.bar([k], [y[k]], width=0.72, color=colour(role))
                canvas.tip(stem, f"client {ranked[k]} ({name}): {y[k]:.3f} of its fair share")
        else:
            dots(axes, x[mine], y[mine], role, 2.6)
    axes.set_xlim(-0.8, len(ranked) - 0.2)
    axes.set_ylim(0, max(1.25, float(y.max()) * 1.08))
    axes.set_xticks([])
    axes.grid(False, axis="x")
    axes.set_xlabel(
        f"{len(ranked)} clients, fastest profile first" if len(ranked) > 1 else "1 client", labelpad=8
    )
    return Picture(canvas.svg("Applied weight by client"), _profile_keys(record))


@house_style
def draw_timeline(record: Record) -> Picture | None:
    """Downloads, training and uploads over emulated time, a lane a client; a part of a large fleet."""
    trips = record.trips
    if not trips.rows:
        return None
    fleet = [row.client for row in record.clients] or sorted(set(trips["client"].tolist()))
    profile = {row.client: row.profile for row in record.clients}
    order = list(profile_roles(record))
    fleet.sort(key=lambda c: (order.index(profile[c]) if c in profile else len(order), c))
    lanes = [fleet[k] for k in np.unique(np.linspace(0, len(fleet) - 1, min(LANES, len(fleet))).astype(int))]
    start_s, end_s = _window(record)
    lane_of = {client: len(lanes) - 1 - k for k, client in enumerate(lanes)}
    spans: dict[str, list[tuple[float, float, float]]] = {"down": [], "compute": [], "up": [], "bad": []}
    columns = [trips[name] for name in ("client", "sent_s", "received_s", "compute_s", "arrived_s", "fate")]
    for client, sent, received, compute, arrived, fate in zip(*(c.tolist() for c in columns), strict=True):
        lane = lane_of.get(client)
        if lane is None or sent > end_s or (arrived if arrived == arrived else sent) < start_s:
            continue
        if fate in ("lost", "dropped"):
            end = arrived if arrived == arrived else sent + 0.01 * (end_s - start_s)
            spans["bad"].append((max(sent, start_s), min(end, end_s), lane))
            continue
        marks = phases(sent, received, compute, arrived)
        for part, (a, b) in zip(("down", "compute", "up"), marks, strict=True):
            if b > start_s and a < end_s:
                spans[part].append((max(a, start_s), min(b, end_s), lane))
    longest = max(len(shorten(profile.get(c, ""), 16)) for c in lanes) + 5
    canvas = Canvas(860, 46 + 13.5 * max(len(lanes), 3), left=14 + 5.6 * longest, right=14)
    axes = canvas.axes
    for role, group in spans.items():
        bars_of(axes, group, 0.66, role)
    axes.set_yticks([lane_of[c] for c in lanes],
                    [f"{shorten(profile.get(c, ''), 16)} #{c}" for c in lanes], fontsize=8.5)  # fmt: skip
    axes.set_ylim(-0.7, len(lanes) - 0.3)
    axes.set_xlim(start_s, end_s)
    axes.grid(False, axis="y")
    axes.set_xlabel("emulated seconds")
    plain_axis(axes.xaxis)
    keys = [Key("down", "download"), Key("compute", "training"), Key("up", "upload")]
    if spans["bad"]:
        keys.append(Key("bad", "lost or dropped"))
    return Picture(canvas.svg("Timeline of client trips"), tuple(keys), wide=True)


def _window(record: Record) -> tuple[float, float]:
    # the middle of the run, as long as about six trips of the slowest client
    sent, arrived = record.trips["sent_s"], record.trips["arrived_s"]
    last = float(np.nanmax(np.concatenate([sent, arrived])))
    length = arrived - sent
    known = length[np.isfinite(length)]
    span = min(max(float(known.max()) * 6, float(np.median(known)) * 20), last) if known.size else last
    start = max(0.0, min((last - span) / 2, last - span))
    return start, max(start + span, start + 1e-6)


@house_style
def draw_speed(record: Record) -> Picture | None:
    """Achieved against declared training speed, by trip; the band is ±2%.

    Where training is too short to be measured, the speed of whole trips.
    """
    trips, meta = record.trips, record.meta
    least_s = RESOLUTION_WALL_S / meta.time_scale if meta.clock == "wall" and meta.time_scale > 0 else 0.0
    part = "training"
    declared, achieved = trips["compute_declared_s"], trips["compute_s"]
    known = np.flatnonzero((declared > 0) & (declared >= least_s) & (achieved > 0))
    if not known.size:
        part = "the trip"
        declared, achieved = trips["trip_declared_s"], trips["trip_achieved_s"]
        known = np.flatnonzero((declared > 0) & (declared >= least_s) & (achieved > 0))
    if not known.size:
        return None
    if known.size > POINTS:
        known = known[np.linspace(0, known.size - 1, POINTS).astype(int)]
    error: NDArray[np.float64] = declared[known] / achieved[known] - 1.0
    flops = trips["flops"][known]
    rated = part == "training" and bool((flops > 0).all())
    x = flops / declared[known] / 1e9 if rated else declared[known]
    canvas = Canvas(left=46)
    axes = canvas.axes
    reach = max(0.03, float(np.abs(error).max()) * 1.15)
    low, high = float(x.min()) / 1.35, float(x.max()) * 1.35
    axes.axhspan(-0.02, 0.02, color=colour("band"), linewidth=0)
    axes.axhline(0, color=colour("muted"), linewidth=0.8)
    # a profile declares one rate: a little horizontal spread by trip shows how many points there are
    jitter = 1 + 0.10 * (np.modf(known * 0.61803398875)[0] - 0.5) if rated else np.ones(known.size)
    profile = profile_of_trips(record)[known]
    for name, role in {**profile_roles(record), "": "muted"}.items():
        mine = profile == name
        dots(axes, (x * jitter)[mine], error[mine], role, 2.4)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(-reach, reach)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_formatter(lambda *_: "")
    plain_axis(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:+.3g}%" if value else "0")
    axes.set_xlabel("declared GFLOPS of training" if rated else f"declared seconds of {part}")
    return Picture(
        canvas.svg("Achieved against declared speed"), (*_profile_keys(record), Key("band", "±2%"))
    )


@house_style
def draw_costs(record: Record) -> Picture | None:
    """The server's wall time a trip, by stage."""
    ended = int((~np.isnan(record.trips["arrived_s"])).sum()) or 1
    # waiting for clients is no cost, and would dwarf what is
    costs = [row for row in record.costs if row.seconds > 0 and row.stage not in ("wait", "start")]
    rows = [(row.stage, row.seconds / ended * 1e6, row) for row in costs][:10]
    if not rows:
        return None
    total = sum(row.seconds for row in costs) / ended * 1e6
    bars = [(name, value, f"{value:.1f}", f"{name}: {row.seconds:.3f} s in {row.calls} calls")
            for name, value, row in rows]  # fmt: skip
    return _bars(bars, f"microseconds a trip; {total:.0f} in all", "Server time by stage", "c1")


@house_style
def draw_memory(record: Record) -> Picture | None:
    """Memory of each kind of process, proportional set size."""
    size = record.meta.memory
    clients = np.array(list(size.clients_mib.values()))
    kind = "workers" if record.meta.clock == "virtual" else "clients"
    rows = [(f"{clients.size} {kind}", float(clients.sum()))] if clients.size else []
    rows += [
        (name, value)
        for name, value in (
            ("evaluator", size.evaluator_mib), ("zygote", size.zygote_mib), ("server", size.server_mib),
            ("supervisor", size.supervisor_mib), ("shared buffer", size.shared_mib),
        )
        if value
    ]  # fmt: skip
    if not rows:
        return None
    each = f"; {clients.mean():.1f} a {kind[:-1]}" if clients.size else ""
    bars = [(name, value, short(round(value, 1)), f"{name}: {value:.1f} MiB") for name, value in rows]
    return _bars(bars, f"MiB{each}", "Memory", "c3")


def _bars(rows: list[tuple[str, float, str, str]], unit: str, label: str, role: str) -> Picture:
    canvas = Canvas(
        height=44 + 26 * max(len(rows), 3), left=14 + 6 * max(len(shorten(row[0])) for row in rows)
    )
    axes = canvas.axes
    for k, (_, value, text, tip) in enumerate(rows):
        (bar,) = axes.barh([-k], [value], height=0.62, color=colour(role))
        canvas.tip(bar, tip)
        axes.annotate(text, (value, -k), (5, 0), textcoords="offset points", va="center", color=colour("ink"))
    axes.set_yticks([-k for k in range(len(rows))], [shorten(row[0]) for row in rows])
    axes.tick_params(axis="y", labelcolor=colour("ink"))
    axes.set_xlim(0, max(row[1] for row in rows) * 1.16)
    axes.grid(False, axis="y")
    axes.set_xlabel(unit)
    plain_axis(axes.xaxis)
    return Picture(canvas.svg(label))
