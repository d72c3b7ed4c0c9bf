"""The pictures in the report of one run: accuracy by class, applied weights, and the timeline of trips."""

from __future__ import annotations

import numpy as np

from edgefl.results.groups import (
    applied_weight,
    class_accuracy,
    profile_of,
    profiles_by_speed,
    slow_group,
)
from edgefl.results.page import Picture
from edgefl.results.pictures import COLOURS, Canvas, bars_of, colour, house_style, series
from edgefl.results.record import Record
from edgefl.results.tables import many
from edgefl.results.trace import phases

LANES, MAX_POINTS = 32, 2000
"""Maximum number of clients in the timeline, and of points in the picture of weights."""


def profile_roles(record: Record) -> dict[str, str]:
    """Return the colour role of each profile in the pictures, fastest profile first."""
    return {profile: series(k) for k, profile in enumerate(reversed(profiles_by_speed(record)))}


@house_style()
def draw_classes(record: Record) -> Picture | None:
    """Draw the accuracy in each class at the last evaluation; another colour marks slow phones' classes."""
    if not record.evaluations or not record.evaluations[-1].total:
        return None
    last = record.evaluations[-1]
    values, only = class_accuracy(last), set(slow_group(record).labels)
    canvas = Canvas(up="Accuracy")
    axes = canvas.axes
    for label in np.flatnonzero(np.isfinite(values)).tolist():
        value = values[label]
        (bar,) = axes.bar([label], [value], width=0.72, color=colour("c2" if label in only else "c1"))
        canvas.tip(bar, f"class {label}: {last.correct[label]} of {last.total[label]} right ({value:.1%})")
        if len(values) <= 12:
            percents = f"{value * 100:.0f}"
            axes.text(label, value + 0.02, percents, ha="center", color=colour("muted"), fontsize=9)
    axes.set_xlim(-0.6, len(values) - 0.4)
    axes.grid(False, axis="x")
    axes.set_xticks(range(0, len(values), max(1, -(-len(values) // 12))))
    axes.set_xlabel("class")
    canvas.shares(1.09)
    keys = (("c1", "also on faster phones"), ("c2", "only on slow phones")) if only else ()
    data = [
        (k, right, of, k in only) for k, (right, of) in enumerate(zip(last.correct, last.total, strict=True))
    ]
    columns = ("class", "right", "test_examples", "only_slow_phones")
    return Picture(canvas.svg("Accuracy by class"), keys, data=[columns, *data])


@house_style()
def draw_weights(record: Record) -> Picture | None:
    """Draw each client's share of the applied weight, multiplied by the number of clients; 1 is fair."""
    (clients, share), roles = applied_weight(record), profile_roles(record)
    if not len(share):
        return None
    profile, order = profile_of(record, clients), {name: k for k, name in enumerate([*roles, ""])}
    rank = np.lexsort((-share, np.array([order[name] for name in profile.tolist()])))
    places = np.unique(np.linspace(0, len(rank) - 1, min(MAX_POINTS, len(rank))).astype(int))
    shown = rank[places]
    canvas = Canvas(left=34, up="Applied weight ÷ fair share")
    axes = canvas.axes
    axes.axhline(1.0, color=colour("ink"), linewidth=1.0, linestyle=(0, (4, 3)))
    axes.annotate("fair share", (1, 1), (-2, 5), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", color=colour("ink"), fontsize=9)  # fmt: skip
    size = 6 if len(rank) <= 100 else 2.5
    for name, role in {**roles, "": "muted"}.items():
        mine = profile[shown] == name
        axes.plot(
            places[mine], share[shown[mine]], "o", color=colour(role), markersize=size, markeredgewidth=0
        )
    axes.set_xlim(-0.8, len(rank) - 0.2)
    axes.set_ylim(0, max(1.25, share.max() * 1.08))
    axes.set_xticks([])
    axes.grid(False, axis="x")
    part = f", {len(shown):,} of them shown" if len(shown) < len(rank) else ""
    axes.set_xlabel(f"{many(len(rank), 'client')}, fastest profile first{part}", labelpad=8)
    keys = [(role, name) for name, role in roles.items()][:COLOURS]
    if (rest := len(roles) - COLOURS) > 0:
        keys.append(("muted", f"{rest} slower profiles"))
    data = list(zip(clients[shown].tolist(), profile[shown].tolist(), share[shown].tolist(), strict=True))
    return Picture(
        canvas.svg("Applied weight by client"), keys, data=[("client", "profile", "weight"), *data]
    )


@house_style()
def draw_timeline(record: Record) -> Picture | None:
    """Draw downloads, training and uploads over emulated time, with one row of bars per client."""
    trips = record.trips
    if not trips["task"].size:
        return None
    order = [*profile_roles(record), ""]
    training = np.unique(trips["client"])
    profile = dict(zip(training.tolist(), profile_of(record, training).tolist(), strict=True))
    fleet = sorted(profile, key=lambda client: (order.index(profile[client]), client))
    chosen = np.unique(np.linspace(0, len(fleet) - 1, min(LANES, len(fleet))).astype(int))
    lane_of = {fleet[k]: -lane for lane, k in enumerate(chosen)}
    # show the middle of the run, for about six trips of the slowest client
    sent_s, arrived_s = trips["sent_s"], trips["arrived_s"]
    span_s = float(np.nanmax(np.concatenate([sent_s, arrived_s])))
    length_s = (arrived_s - sent_s)[np.isfinite(arrived_s - sent_s)]
    start_s = 0.0
    if length_s.size:
        last_s = span_s
        span_s = min(max(float(length_s.max()) * 6, float(np.median(length_s)) * 20), last_s)
        start_s = max(0.0, (last_s - span_s) / 2)
    end_s = start_s + max(span_s, 1e-6)
    bad_s = np.where(np.isnan(arrived_s), sent_s + 0.01 * (end_s - start_s), arrived_s)
    bad = np.isin(trips["fate"].astype(str), ("lost", "dropped"))
    lanes = np.array([lane_of.get(client, 1) for client in trips["client"].tolist()])
    spans: dict[str, list[tuple[float, float, float]]] = {}
    for part, (a, b) in {**phases(trips), "bad": (sent_s, bad_s)}.items():
        shown = (lanes <= 0) & (bad == (part == "bad")) & (b > start_s) & (a < end_s)
        ends = np.maximum(a, start_s)[shown].tolist(), np.minimum(b, end_s)[shown].tolist()
        spans[part] = list(zip(*ends, lanes[shown].tolist(), strict=True))
    # shorten long names in the middle, because names of one family differ at the end
    short = {name: name if len(name) <= 13 else f"{name[:6]}…{name[-6:]}" for name in order}
    names = [f"{short[profile[client]]} #{client}" for client in lane_of]
    canvas = Canvas(860, 48 + 13.5 * max(len(names), 3), left=16 + 5.9 * max(map(len, names)))
    canvas.axes.set_yticks([-k for k in range(len(names))], names)
    canvas.axes.set_ylim(-len(names) + 0.4, 0.6)
    canvas.axes.tick_params(axis="y", labelcolor=colour("ink"))
    canvas.axes.grid(False, axis="y")
    for role, group in spans.items():
        bars_of(canvas.axes, group, 0.66, role)
    canvas.axes.set_xlim(start_s, end_s)
    canvas.axes.set_xlabel("emulated seconds")
    part_names = {"down": "download", "compute": "training", "up": "upload", "bad": "lost or dropped"}
    keys = [(part, name) for part, name in part_names.items() if part != "bad" or spans["bad"]]
    client_of = {lane: client for client, lane in lane_of.items()}
    data = [
        (client_of[int(lane)], profile[client_of[int(lane)]], part_names[part], start, end)
        for part, group in spans.items() for start, end, lane in group
    ]  # fmt: skip
    head = ("client", "profile", "part", "start_s", "end_s")
    return Picture(canvas.svg("Timeline of client trips"), keys, wide=True, data=[head, *sorted(data)])
