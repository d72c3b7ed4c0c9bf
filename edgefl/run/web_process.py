"""The process that serves the live page of a run, using the supervisor's messages and the record.

It reads the record like any other reader, runs at low priority, and ends with the run.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import math
import os
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from html import escape
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl.devices.fleet import device_of
from edgefl.errors import EdgeflError
from edgefl.experiment import Experiment
from edgefl.host.channel import Channel, Closed
from edgefl.host.process import become_child
from edgefl.results import page
from edgefl.results.headline import Stat, emulated_time, learned
from edgefl.results.page import html_table
from edgefl.results.record import Record
from edgefl.results.rows import ClientRow, IncidentRow, TripRow
from edgefl.results.tables import many, number, seconds
from edgefl.run import control
from edgefl.run.view import PACE_S, RunView
from edgefl.run.web_http import WebReply, WebServer

HTML = "text/html; charset=utf-8"
EVERY_S = 0.9
"""Minimum interval between updates of the page, in seconds."""
FAREWELL_S = 2.0
"""Time limit in seconds for the readers of the page to receive the last update."""
MAX_POINTS = 600
"""Maximum number of points of a curve; if a curve has more, every second point is dropped."""
RECENT = 200
"""Number of recent trips over which the staleness at a point of the curve is averaged."""
LAST_TRIPS, LAST_INCIDENTS = 12, 6
"""Maximum numbers of trips and of incidents that are shown for a phone."""
LAST_TASKS = 500_000
"""Number of most recent tasks, over all phones, that are searched for the last trips of one phone."""
STATES = ("absent", "idle", "downloading", "training", "uploading")
"""Names of a phone's states; `control.Progress.states` contains indices into this tuple."""


def main(channel_fd: int, parent_pid: int, listener_fd: int) -> int:
    become_child(parent_pid, "edgefl-web")
    os.nice(10)  # leave the CPU to the clients
    channel: Channel[control.ToWeb] = Channel.inherit(channel_fd, control.ToWeb)
    try:
        shown = channel.receive()
    except Closed:
        return 1
    assert isinstance(shown, control.Shown)
    with socket.socket(fileno=listener_fd) as listener:
        asyncio.run(_serve(channel, LivePage(shown.experiment, Path(shown.folder), shown.path), listener))
    return 0


async def _serve(channel: Channel[control.ToWeb], live: LivePage, listener: socket.socket) -> None:
    ended = asyncio.Event()

    def receive() -> None:
        try:
            for message in channel.receive_ready():
                live.handle(message)
        except Closed:
            asyncio.get_running_loop().remove_reader(channel.fileno())
            ended.set()

    server = WebServer(live.answer)
    await server.start(listener)
    asyncio.get_running_loop().add_reader(channel.fileno(), receive)
    receive()  # messages that arrived together with the first one
    await ended.wait()
    live.end("ended")
    await server.close(FAREWELL_S)


def document() -> tuple[str, str, str]:
    """Return the two halves of the page, between which the initial data are inserted, and the
    Content-Security-Policy header.

    The page includes its style and script. The header forbids other scripts and requests to other origins.
    """
    html = resources.files("edgefl.run").joinpath("web_page.html").read_text("utf-8")
    style, _, body = html.partition("</style>\n")
    icon = '<link rel="icon" href="data:,">'
    text = f"{page.head('live', icon, style.removeprefix('<style>'))}\n{body}"
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    before, _, behind = text.partition("/* picture */")
    return before, behind, f"Content-Security-Policy: {policy}\r\n"


class LivePage:
    """State of the page: the supervisor's messages, the curves so far, and the replies to requests."""

    def __init__(self, experiment: Experiment, folder: Path, path: str) -> None:
        self._experiment, self._folder, self._path = experiment, folder, path.encode()
        self._view = RunView(experiment)
        self._document = document()
        self._fleet: list[tuple[str, str, int]] = []
        self._states = b""
        self._curve: list[tuple[float, ...]] = []
        """Points of the curves. Each holds the emulated seconds, the wall seconds, the number of trips, the
        share of the goal that is reached, the mean staleness of recent trips, and the median and the 95th
        percentile of the enforcement error."""
        self._drawn_s = -math.inf
        self._ended = ""
        self._picture = b""
        self._new = asyncio.Event()

    def handle(self, message: control.ToWeb) -> None:
        """Handle a message from the supervisor; update the page no more often than about once a second."""
        match message:
            case control.Activity(text=text, restarted=again):
                (self._view.restarted if again else self._view.say)(text)
            case control.Described():
                self._fleet = message.fleet
                self._view.describe(message)
            case control.Progress():
                self._view.update(message)
                self._states = message.states or self._states
                if time.monotonic() - self._drawn_s < EVERY_S:
                    return
                self._add_point(message)
            case control.Ended(outcome=outcome, verdict=verdict):
                self._ended, self._view.judged = outcome, verdict
            case control.Shown():
                pass
        self._drawn_s = time.monotonic()
        self._draw()

    def end(self, outcome: str) -> None:
        """Show the end of the run; use ``outcome`` if the supervisor died before it sent an outcome."""
        if not self._ended:
            self._ended, self._view.judged = outcome, control.NO_VERDICT
        self._draw()

    def _draw(self) -> None:
        self._picture = b""
        new, self._new = self._new, asyncio.Event()
        new.set()

    def _encoded(self) -> bytes:
        """Return the page's data as JSON, encoded once for all readers."""
        self._picture = self._picture or msgspec.json.encode(self.picture())
        return self._picture

    def answer(self, path: str) -> WebReply | None:
        """Reply to a request with the page, its event stream or the details of a phone.

        Return None if the path does not exist or does not start with the page's secret path.
        """
        prefix, rest = path.encode()[: len(self._path)], path[len(self._path) :]
        return self._below(rest) if hmac.compare_digest(prefix, self._path) else None

    def _below(self, path: str) -> WebReply | None:
        if path == "":
            before, behind, policy = self._document
            picture = self._encoded().replace(b"<", b"\\u003c")
            return WebReply(HTML, before.encode() + picture + behind.encode(), policy)
        if path == "events":
            return WebReply("text/event-stream", self._pictures())
        name, _, digits = path.rpartition("/")
        if name == "phone" and digits.isascii() and digits.isdigit() and len(digits) <= 9:
            client = int(digits)
            if client < self._view.total:
                return WebReply(HTML, self._phone(client).encode())
        return None

    async def _pictures(self) -> AsyncGenerator[bytes, None]:
        while True:
            new, ended = self._new, self._ended
            yield b"data: " + self._encoded() + b"\n\n"
            if ended:
                return
            await new.wait()

    def _add_point(self, progress: control.Progress) -> None:
        if progress.connected is not None:
            return
        (staleness,) = self._select(
            "SELECT AVG(staleness) FROM (SELECT staleness FROM trips WHERE staleness IS NOT NULL "
            f"ORDER BY task DESC LIMIT {RECENT})"
        ) or [(None,)]
        known = (staleness[0], progress.fidelity_median, progress.fidelity_p95)
        share = self._view.goal(progress).share
        numbers = (math.nan if value is None else value for value in known)
        emulated_s, wall_s = progress.emulated_s, progress.wall_s
        # A new server may have gone back to a checkpoint.
        while self._curve and (self._curve[-1][0] > emulated_s or self._curve[-1][1] > wall_s):
            self._curve.pop()
        self._curve.append((emulated_s, wall_s, progress.trips, share, *numbers))
        if len(self._curve) > MAX_POINTS:
            del self._curve[1:-1:2]

    def _record(self) -> Record:
        """Open the record without checking the whole file, because each update of the page opens it twice."""
        return Record(self._folder, sealed=False)

    def _select(self, statement: str) -> list[tuple[Any, ...]]:
        try:
            with self._record() as record:
                return record.select(statement)
        except EdgeflError:  # there is no record yet
            return []

    # ---- the page's data -----------------------------------------------------------------------

    def picture(self) -> dict[str, Any]:
        """Return the data that the page's script displays."""
        view, progress = self._view, self._view.progress
        about = [f"{self._experiment.clock.kind} clock"]
        if view.scale is not None:
            scale = f"time scale {view.scale.value:.3g}"
            about += [scale] * (self._experiment.clock.kind == "wall")
            about += [many(view.total, "phone"), view.workload]
        found: dict[str, Any] = {
            "title": view.title,
            "sub": ", ".join(about),
            "note": view.note,
            "ended": self._ended,
            "report": str(self._folder / "report.html"),
            "fleet": self._fleet,
            "states": "".join(map(str, self._states)),
            "names": STATES,
        }
        if progress is not None:
            goal = view.goal(progress)
            found["goal"] = {"share": goal.share, "text": goal.text, "left": self._left(goal.steady)}
            found["cards"] = self._cards(progress)
            found["charts"] = self._charts()
        return found

    def _left(self, steady: bool) -> str:
        """Estimate the remaining time from the pace of the last ten minutes; return "" if it is unknown."""
        if not steady or len(self._curve) < 3 or self._ended:
            return ""
        last = self._curve[-1]
        first = self._curve[bisect_left(self._curve, last[1] - PACE_S, key=lambda point: point[1])]
        gained, took_s = last[3] - first[3], last[1] - first[1]
        return f"{seconds((1 - last[3]) * took_s / gained)} left" if gained > 0 else ""

    def _cards(self, progress: control.Progress) -> str:
        """Return the headline cards as HTML."""
        fidelity, why = self._view.verdict(progress)
        lost = [f"{progress.dropped:,} dropped"] * bool(progress.dropped)
        lost += [f"{many(progress.incidents, 'process')} failed"] * bool(progress.incidents)
        cards = [
            learned(progress.accuracy, progress.loss, progress.metrics),
            Stat("Client trips", f"{progress.trips:,}", ", ".join(lost) or "no update was lost"),
            Stat("Throughput", f"{number(self._rate())}/s", "client trips, recently"),
            Stat("Version", f"{progress.version:,}", "of the global model"),
            Stat("Staleness", number(progress.staleness_mean), f"mean; {progress.staleness_max:,} max"),
            emulated_time(progress.emulated_s, progress.wall_s),
            Stat("Fidelity", fidelity or "–", why, {"VALID": "good", "INVALID": "bad"}.get(fidelity, "")),
        ]
        return "".join(page.stat(*one) for one in cards)

    def _rate(self) -> float | None:
        """Return the number of trips per wall second over the last few points; None if it is unknown."""
        if len(self._curve) < 2:
            return None
        first, last = self._curve[max(0, len(self._curve) - 6)], self._curve[-1]
        return (last[2] - first[2]) / (last[1] - first[1]) if last[1] > first[1] else None

    def _charts(self) -> list[dict[str, Any]]:
        """Return the charts over emulated time; each has a title, a number format and one line per series."""
        rows = self._select("SELECT at_s, accuracy, loss FROM evaluations ORDER BY version")
        rows = rows[: -1 : -(-len(rows) // MAX_POINTS) or 1] + rows[-1:]
        at_s, accuracy, loss = np.array(rows, dtype=np.float64).reshape(-1, 3).T
        now_s, wall_s, trips, _, staleness, median, p95 = np.array(self._curve).reshape(-1, 7).T
        on = self._experiment.data.evaluate_on
        rate = np.divide(np.diff(trips), np.diff(wall_s), out=np.zeros(max(0, trips.size - 1)),
                         where=np.diff(wall_s) > 0)  # fmt: skip
        return [
            _chart("Accuracy", f"of the global model on the server's {on} examples", "share",
                   ("accuracy", at_s, accuracy)),
            _chart("Loss", f"of the global model on the server's {on} examples", "", ("loss", at_s, loss)),
            _chart("Throughput", "client trips per wall second", "", ("trips/s", now_s[1:], rate)),
            _chart("Staleness", f"versions, mean of the last {RECENT} trips", "",
                   ("staleness", now_s, staleness)),
            _chart("Enforcement error", "recent, achieved against declared time", "share",
                   ("median", now_s, median), ("95th percentile", now_s, p95)),
        ]  # fmt: skip

    # ---- one phone -----------------------------------------------------------------------------

    def _phone(self, client: int) -> str:
        """Return a phone's device, link, last trips and incidents as HTML."""
        trips: list[TripRow] = []
        incidents: list[IncidentRow] = []
        facts = self._facts(client)
        with suppress(EdgeflError), self._record() as record:  # if there is no record yet, show less
            row, trips, incidents = record.phone(client, LAST_TRIPS, LAST_INCIDENTS, LAST_TASKS)
            facts |= {} if row is None else _recorded_facts(row)
        state = STATES[self._states[client]] if client < len(self._states) else "not connected"
        none = '<p class="about">No {} yet.</p>'
        about = '<p class="about">The last trips, newest first. Each time reads: achieved of declared.</p>'
        shown = [(f"{one.at_s:.1f}", one.kind, one.detail) for one in incidents]
        past = about + html_table(TRIP_COLUMNS, map(_trip, trips)) if trips else none.format("trip has ended")
        events = html_table(INCIDENT_COLUMNS, shown) if shown else none.format("incident")
        return f"<h3>Phone {client}: {escape(state)}</h3>{page.facts(facts)}{past}{events}"

    def _facts(self, client: int) -> dict[str, str]:
        ends = accumulate(count for _, _, count in self._fleet)
        profile, network, _ = self._fleet[next(place for place, end in enumerate(ends) if client < end)]
        facts = {"Profile": profile, "Network": network}
        with suppress(EdgeflError):
            device = device_of(self._experiment, client, profile)
            about = (device.name, device.soc, str(device.year or ""))
            facts["Device"] = ", ".join(filter(None, about))
        return facts


def _recorded_facts(row: ClientRow) -> dict[str, str]:
    """Return a client's recorded properties as strings, keyed by their labels on the page."""
    return {
        "Step": "" if row.step_s is None else f"{number(row.step_s)} s declared, for a whole batch",
        "Memory": "" if row.memory_mib is None else f"{number(row.memory_mib)} MiB for the app",
        "Link": f"{_mbps(row.down_mbps)} down, {_mbps(row.up_mbps)} up",
        "Examples": f"{row.examples:,}",
        "Classes": ", ".join(map(str, row.labels[:20])) + (", …" if len(row.labels) > 20 else ""),
    }


def _mbps(rate: float | None) -> str:
    return "no limit" if rate is None else f"{number(rate)} Mbit/s"


INCIDENT_COLUMNS = (">At, s", "Incident", "Detail")
TRIP_COLUMNS = (">Trip", ">From version", ">Staleness", ">Download, s", ">Training, s", ">Upload, s",
                ">Trip error", ">Loss", "Fate")  # fmt: skip


def _trip(row: TripRow) -> Sequence[object]:
    """Return the table cells of a trip; each cell with a time reads "ACHIEVED of DECLARED", in seconds."""
    parts = ((row.down_s, row.down_declared_s), (row.compute_s, row.compute_declared_s),
             (row.up_s, row.up_declared_s))  # fmt: skip
    times = [
        "–" if took is None or declared is None else f"{number(took, 4)} of {number(declared, 4)}"
        for took, declared in parts
    ]
    took, declared = row.trip_achieved_s, row.trip_declared_s
    error = f"{(took / declared - 1) * 100:+.2f}%" if took is not None and declared else "–"
    fate = row.fate or ("held" if row.arrived_s is not None else "running")
    return (row.trip, row.base_version, row.staleness, *times, error, number(row.loss),
            f"{fate}: {row.reason}" if row.reason else fate)  # fmt: skip


def _chart(title: str, about: str, kind: str, *lines: tuple[str, Any, Any]) -> dict[str, Any]:
    series = []
    for name, x, y in lines:
        known = np.isfinite(x) & np.isfinite(y)
        points = [[float(f"{value:.6g}") for value in values[known].tolist()] for values in (x, y)]
        series.append([name, *points])
    return {"title": title, "about": about, "kind": kind, "lines": series}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
