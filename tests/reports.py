"""Helpers for tests of results: invented rows and records, checkers of pages, traces and printed tables."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console, RenderableType

from edgefl.results.rows import ClientRow, EvaluationRow, TripRow, VersionRow
from edgefl.results.store import Store

EVIL = '<script>alert("x")</script>&amp;"\'$\\frac{1}{2}$ </title></style>'
FLEET = {"pixel-4": (0.1, (4, 5, 6, 7, 8, 9)), "moto-g4": (1.0, (0, 1, 2, 3))}
"""Maps each profile to the seconds that a step takes and the classes that its clients hold."""


def client(number: int, profile: str = "pi-4", step_s: float | None = None, *labels: int) -> ClientRow:
    return ClientRow(client=number, profile=profile, network="lte", examples=9, labels=labels, step_s=step_s)


def trip(task: int, client: int = 0, sent_s: float = 0.0, **fields: Any) -> TripRow:
    given = {"base_version": 0, "trip": task, **fields}
    return TripRow(task=task, client=client, sent_s=sent_s, **given)


def version(number: int, at_s: float = 0.0, **fields: Any) -> VersionRow:
    given = {"wall_s": 0.0, "updates": 5, "weight_sum": 1.0, "sum_s": 1e-4, **fields}
    return VersionRow(version=number, at_s=at_s, **given)


def evaluation(version: int, at_s: float = 0.0, **fields: Any) -> EvaluationRow:
    given = {"wall_s": 0.0, "trips": 5, "accuracy": 0.5, "loss": 0.7, **fields}
    return EvaluationRow(version=version, at_s=at_s, **given)


def write_run(
    folder: Path,
    *,
    clients: int = 4,
    trips: int = 60,
    fleet: dict[str, tuple[float, tuple[int, ...]]] = FLEET,
    buffer_size: int = 5,
    classes: int = 10,
    evaluations: bool = True,
    nan: bool = False,
    error: float = 0.0,
    lost: int = 0,
    **meta: Any,
) -> Path:
    """Record a run whose clients take turns, one trip a second. ``error``: achieved / declared time − 1."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in fleet for _ in range(-(-clients // len(fleet)))][:clients]
    held: list[int] = []
    number = 0

    def evaluate(at_s: float, trips: int) -> None:
        if evaluations:
            right = math.nan if nan else min(number, 9) / 10
            counts = {"correct": (min(number, 9),) * classes, "total": (10,) * classes}
            store.evaluation(
                evaluation(number, at_s, trips=trips, accuracy=right, loss=1.0 - right, **counts)
            )

    with Store(folder) as store:
        store.clients([client(k, name, fleet[name][0], *fleet[name][1]) for k, name in enumerate(names)])
        store.version(version(0))
        evaluate(0.0, 0)
        for task in range(trips):
            sent_s, at_s = max(0.0, task + 1.0 - clients), task + 1.0
            if task < lost:
                store.trip(trip(task, task % clients, sent_s, fate="lost", reason="process died"))
                store.incident(at_s, task % clients, "death", "killed by signal 9")
                continue
            parts = {f"{part}_declared_s": (at_s - sent_s) / 3 for part in ("down", "compute", "up")}
            took = {name.replace("_declared", ""): value * (1 + error) for name, value in parts.items()}
            store.trip(
                trip(
                    task, task % clients, sent_s, base_version=number, trained_version=number, staleness=0,
                    received_s=sent_s + took["down_s"], arrived_s=at_s, work_s=1.0, down_bytes=9, up_bytes=9,
                    trip_declared_s=at_s - sent_s, trip_achieved_s=sum(took.values()), peak_mib=1.0,
                    checksum_sent=task, checksum_seen=task, **parts, **took,
                )
            )  # fmt: skip
            held.append(task)
            if len(held) == buffer_size:
                number += 1
                store.applied(number, held, [1 / buffer_size] * buffer_size)
                for done in held:
                    store.released(done, "applied")
                held.clear()
                store.version(version(number, at_s))
                evaluate(at_s, task + 1)
        known = {"strategy": "fedbuff", "clock": "wall", "data": "digits", "emulated_s": float(trips)}
        store.set_meta(**{"status": "done", **known, **meta})
    return folder


def printed(*what: RenderableType, width: int = 80) -> str:
    """Return what a terminal of ``width`` columns shows, after a check that no line is longer."""
    file = StringIO()
    Console(file=file, width=width).print(*what)
    assert max(map(len, file.getvalue().splitlines())) <= width
    return file.getvalue()


def read_json(path: Path) -> Any:
    """Read JSON as the standard defines it: without NaN."""
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


class Page(HTMLParser):
    """A parsed page, after a check of its structure and of what screen readers and keyboards need."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.downloads: list[str] = []
        self.levels: list[int] = []
        self.feed(path.read_text())
        assert self.open == []
        assert "script" not in self.tags
        assert self.tags.count("style") == 1
        assert len(self.ids) == len(set(self.ids))
        assert self.levels[:1] == [1]
        assert self.levels.count(1) == 1
        assert all(after - before <= 1 for before, after in pairwise(self.levels)), (
            "a heading level is skipped"
        )
        assert "title" in self.tags

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        found = dict(attrs)
        if tag in ("h1", "h2", "h3"):
            self.levels.append(int(tag[1]))
        wanted = {"html": ["lang"], "th": ["scope"], "svg": ["aria-label"]}.get(tag, [])
        if found.get("class") == "scroll":
            wanted = ["aria-label", "tabindex"]  # so that it can be scrolled by keys
        assert all(found.get(name) for name in wanted), f"{tag} without one of {wanted}"
        for name, value in attrs:
            assert not name.startswith("on"), "an event handler"
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href", "src"):
                (self.downloads if str(value).startswith("data:") else self.links).append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return a trace's events, after checks of their fields and that no slices of a thread partly overlap."""
    events: list[dict[str, Any]] = read_json(path)["traceEvents"]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X", "i", "C")
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for slices in threads.values():
        ends: list[float] = []
        for event in slices:
            end = round(event["ts"] + event["dur"], 3)
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)
        assert [e["ts"] for e in slices] == sorted(e["ts"] for e in slices)
    return events


def noisy_curve(
    rate: float, seed: int, swing: float = 0.05, period: float = 20.0
) -> tuple[list[float], list[float]]:
    """Return a learning curve: evaluation times, and accuracies with noise (standard deviation ``swing``)."""
    costs = np.arange(0.0, 2000.0, period)
    rng = np.random.default_rng(seed)
    true = 0.9 * (1 - np.exp(-rate * costs / 300))
    return costs.tolist(), np.clip(true + swing * rng.standard_normal(len(costs)), 0, 1).tolist()
